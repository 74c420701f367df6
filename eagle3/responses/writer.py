"""The target writes the assistant turns of conversations; each finished one goes to the journal at once.

As many conversations as the backend takes are in flight, and each goes on by itself. Rows are begun in the order of the
input, and none that the wanted number of samples cannot need.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3 import terminal
from eagle3.artifacts import IndexWriter
from eagle3.conversations import Conversation
from eagle3.masking import Masker
from eagle3.responses.backends import Backend, Generated, Outcome, Request, Sampling
from eagle3.responses.journal import Journal, Places, Tally
from eagle3.responses.turns import Talk, special_tokens
from eagle3.sources import Row
from eagle3.terminal import UserError

MAX_FAILED = 0.2  # of the conversations settled in a run; more means that the backend, not a row, is at fault
FEWEST_FAILED = 10


def fingerprint_of(fingerprint: dict[str, Any], sampling: Sampling, max_seq_len: int) -> dict[str, Any]:
    """What the journal's first line says: the caller's fields (target, tokenizer, dataset), and how it is written."""
    return {**fingerprint, "max_seq_len": max_seq_len, **sampling.fields()}


def is_written(
    journal_path: Path, fingerprint: dict[str, Any], sampling: Sampling, *, max_samples: int | None, max_seq_len: int
) -> bool:
    """Whether `write_answers` would have nothing to do, so that no backend need be opened.

    Raises UserError when the journal was made by something else.
    """
    journal = Journal(journal_path)
    journal.require_made_by(fingerprint_of(fingerprint, sampling, max_seq_len))
    places = Places(journal, sampling.samples_per_prompt)
    if not places.finished or places.exhausted:
        return places.finished
    return max_samples is not None and sum(map(places.samples, places.settled())) >= max_samples


def write_answers(
    backend: Backend,
    masker: Masker,
    tokenizer: Any,
    conversations: Iterable[tuple[Row, Conversation]],
    journal_path: Path,
    sampling: Sampling,
    *,
    fingerprint: dict[str, Any],
    max_samples: int | None,
    max_seq_len: int,
    end_ids: Iterable[int],
    total: int | None = None,
) -> Tally:
    """Write the answers of `conversations` to the journal, or continue there, until there are `max_samples` samples.

    `fingerprint` names target, tokenizer and dataset; an answer ends at an id of `end_ids`; `total` is the number of
    conversations where it is known, for the progress bar. Returns counts over the whole journal. Raises UserError when
    the journal was made by something else, when the engine dies twice, and when more than a fifth of the rows fail.
    """
    journal = Journal(journal_path)
    with journal.appending(fingerprint_of(fingerprint, sampling, max_seq_len)) as index:
        run = _Run(
            backend=backend,
            masker=masker,
            tokenizer=tokenizer,
            sampling=sampling,
            max_samples=max_samples,
            max_seq_len=min(max_seq_len, backend.max_model_len),
            end_ids=tuple(sorted(end_ids)),
            places=Places(journal, sampling.samples_per_prompt),
            index=index,
        )
        run.over(conversations, total)
    return run.places.tally


@dataclass
class _Run:
    """One pass over the conversations that are not yet settled."""

    backend: Backend
    masker: Masker
    tokenizer: Any
    sampling: Sampling
    max_samples: int | None
    max_seq_len: int
    end_ids: tuple[int, ...]
    places: Places
    index: IndexWriter

    def __post_init__(self) -> None:
        self._special = special_tokens(self.tokenizer)
        self._talks: dict[tuple[int, int], Talk] = {}  # in flight, by order and draw
        self._settled = 0  # rows from the first on without a gap
        self._enough = 0  # samples of these
        self._expected = 0  # samples of all rows begun, those in flight taken for one sample
        self._done = 0  # conversations settled by this run
        self._failed: Counter = Counter()

    def over(self, conversations: Iterable[tuple[Row, Conversation]], total: int | None) -> None:
        tally, most = self.places.tally, self.max_samples
        if most is None:
            bar = terminal.progress(total and total * self.sampling.samples_per_prompt, "row", "answers")
        else:
            bar = terminal.progress(most, "sample", "answers")
        feed, exhausted = self._draws(conversations), False
        started = time.monotonic()
        with bar as self._bar:
            self._advance()
            while most is None or self._enough < most:
                while len(self._talks) < self.backend.window and (most is None or self._expected < most):
                    if exhausted := not self._begin(feed):
                        break
                if self._talks:
                    for place, outcome in self.backend.finished():
                        self._take(self._talks[place], outcome)
                    tally.seconds = time.monotonic() - started
                    bar.set_postfix_str(f"{tally.generated:,} tokens, {tally.rate:,.0f} tok/s")
                elif exhausted:
                    break
        if self._talks:
            self.backend.abandon()
        self.index.add(finished={"exhausted": exhausted and not self._talks})

    def _draws(self, conversations: Iterable[tuple[Row, Conversation]]) -> Iterator[Talk]:
        """All conversations, in order, drawn one by one: only those in flight are in memory."""
        for order, (row, conversation) in enumerate(conversations):
            self._expected += (known := self.places.samples(order))
            self._bar.update(known if self.max_samples is not None else 0)
            for draw in range(self.sampling.samples_per_prompt):
                yield Talk(order, draw, row, conversation, self.masker, self.tokenizer, self._special, self.max_seq_len)

    def _begin(self, feed: Iterator[Talk]) -> bool:
        """Begin the next conversation, unless it is settled already; False when there is none."""
        talk = next(feed, None)
        if talk is None:
            return False
        if not self.places.has(talk.order, talk.draw):
            self._talks[talk.order, talk.draw] = talk
            self._expected += 1
            self._go_on(talk)
        elif self.max_samples is None:
            self._bar.update(1)
        return True

    def _go_on(self, talk: Talk) -> None:
        if talk.next_prompt() is None:
            self._settle(talk, talk.record())
        else:
            self._submit(talk)

    def _submit(self, talk: Talk) -> None:
        room = self.max_seq_len - len(talk.prompt)
        request = Request(
            talk.prompt,
            min(self.sampling.max_tokens, room),
            self.sampling.temperature,
            self.sampling.top_p,
            self.sampling.seed_of(talk.order, talk.draw, talk.turn),
            self.end_ids,
        )
        self.backend.submit((talk.order, talk.draw), request)

    def _take(self, talk: Talk, outcome: Outcome) -> None:
        """Go on with an answer; after a failure try again, once a row."""
        if isinstance(outcome, Generated) and outcome.reason == "stop" and not self._is_ended(outcome):
            outcome = "answer without its end-of-turn token"
        if isinstance(outcome, Generated):
            self.places.tally.generated += len(outcome.ids)
            talk.take(outcome)
            self._go_on(talk)
        elif not talk.retried:
            talk.retried = True
            self._submit(talk)
        else:
            self._failed[outcome] += 1
            terminal.warn(f"{talk.row.place} failed twice: {outcome}")
            self._settle(talk, talk.place() | {"failed": outcome})

    def _is_ended(self, generated: Generated) -> bool:
        return bool(generated.ids) and generated.ids[-1] in self.end_ids

    def _settle(self, talk: Talk, record: dict[str, Any]) -> None:
        """Put a conversation's line on disk, and count it."""
        before = self.places.samples(talk.order)
        self.index.add(**record)
        self.places.note(record)
        self.places.tally.add(record)
        fresh = self.places.samples(talk.order) - before
        del self._talks[talk.order, talk.draw]
        self._expected += fresh - 1
        self._done += 1
        self._bar.update(1 if self.max_samples is None else fresh)
        self._advance()
        failed = sum(self._failed.values())
        if failed >= FEWEST_FAILED and failed > MAX_FAILED * self._done:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in self._failed.most_common())
            raise UserError(
                f"{failed} of {self._done} rows failed ({reasons}), more than {MAX_FAILED:.0%}; "
                "mend the cause, then the same command tries them again"
            )

    def _advance(self) -> None:
        while self.places.has_all(self._settled):
            self._enough += self.places.samples(self._settled)
            self._settled += 1
