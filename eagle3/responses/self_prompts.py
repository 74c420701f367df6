"""Prompts that the target writes itself: it continues its own template after the header of a user turn.

Magpie (Xu et al. 2024, arXiv 2406.08464). prompts.jsonl holds a line for each sample, in the order of their numbers:
{"number", "messages": [user turn]} for a prompt, {"number", "dropped": reason} for what the filter refuses. The first
line says what made them. Whatever finishes first, the lines come in order, so a run that continues gives the same.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3 import artifacts, terminal
from eagle3.responses.backends import Backend, Generated, Request, Sampling
from eagle3.responses.journal import Journal
from eagle3.responses.turns import special_tokens
from eagle3.sources import Row
from eagle3.templates import MARKER
from eagle3.terminal import UserError, short

PLACEHOLDER = "(the user's text)"
# In UTF-8: "Hi there" is short, "什么是熵?" is not. Words would not do: many scripts write none.
FEWEST_BYTES = 10
FEWEST_SAMPLES = 300  # before the share that passes is judged
FEWEST_PASSING = 0.02  # of the samples; fewer mean that the target cannot write prompts this way
PASSED = "prompts"


@dataclass(frozen=True)
class UserTurn:
    """What a template puts around a user's text: all before it as ids, and where the text ends."""

    prefix: list[int]
    stop_id: int | None  # the token that follows the text
    stop_text: str  # the text that follows where no token of its own does


def user_turn(tokenizer: Any) -> UserTurn:
    """The template's user turn. Raises UserError when the user's text cannot be found in it."""
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": PLACEHOLDER}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates raise whatever their author or Jinja likes
        raise UserError(f"--dataset self: the chat template refuses a user turn ({short(error)})") from error
    before, found, after = text.rpartition(PLACEHOLDER)
    if not found:
        raise UserError("--dataset self: the chat template does not repeat a user's text; give a dataset")
    follows = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"]
    markers = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    stop_id = follows[0] if follows and follows[0] in markers else None
    stop_text = "" if stop_id is not None else after.strip().split("\n")[0]
    return UserTurn(tokenizer(before, add_special_tokens=False)["input_ids"], stop_id, stop_text)


class SelfPrompts:
    """The prompts of a journal as a dataset for stage 01."""

    def __init__(self, path: Path) -> None:
        self._journal = Journal(path)
        self._fingerprint = self._journal.fingerprint()
        if self._fingerprint is None:
            raise UserError(f"{path} is missing or empty; run the same command, it writes the prompts")

    def identity(self) -> str:
        return f"self {artifacts.digest(self._fingerprint)}"

    def total(self) -> int:
        return sum(1 for _ in self.rows())

    def rows(self, spool: Path | None = None) -> Iterator[Row]:
        """Chat rows of one user turn, numbered by their samples. `spool` is not needed: all is local."""
        for _, record in self._journal.read():
            if "messages" in record:
                yield Row("self", record["number"], {"messages": record["messages"]})


def write_prompts(
    backend: Backend,
    tokenizer: Any,
    count: int,
    journal_path: Path,
    sampling: Sampling,
    *,
    fingerprint: dict[str, Any],
    max_seq_len: int,
    end_ids: Iterable[int],
) -> Counter:
    """Have the target write `count` prompts into the journal, or continue there. Returns counts of what became of it.

    `sampling` should be at temperature 1; its `max_tokens` bounds a prompt. `fingerprint` names target and tokenizer.
    Raises UserError when the journal was made by something else, when a request fails twice (all have the same prompt),
    or when hardly any sample is a prompt.
    """
    turn = user_turn(tokenizer)
    room = min(max_seq_len, backend.max_model_len) - len(turn.prefix)
    if room < 1:
        raise UserError(f"--max-seq-len {max_seq_len} leaves no room for a prompt after {len(turn.prefix)} tokens")
    stop_ids = tuple(sorted({*end_ids} | ({turn.stop_id} - {None})))
    most = min(sampling.max_tokens, room)
    journal = Journal(journal_path)
    with journal.appending({**fingerprint, **sampling.fields()}) as index:
        sift = _Filter(tokenizer, turn)
        for _, record in journal.read():
            if "number" in record:
                sift.count(record)

        def submit(number: int) -> None:
            seed = sampling.seed_of(number)
            request = Request(turn.prefix, most, sampling.temperature, sampling.top_p, seed, stop_ids, turn.stop_text)
            backend.submit(number, request)

        begun, waiting, failed = sift.seen, {}, set()
        with terminal.progress(count, "prompt", "prompts", min(sift.passed, count)) as bar:
            while sift.passed < count:
                # as many as the rest will take at the rate so far: what comes too late is lost
                left = count - sift.passed
                while begun - sift.seen < backend.window and (begun - sift.seen) * sift.share < left:
                    submit(begun)
                    begun += 1
                for number, outcome in backend.finished():
                    if isinstance(outcome, Generated):
                        waiting[number] = outcome
                    elif number not in failed:
                        failed.add(number)
                        submit(number)
                    else:
                        raise UserError(f"--dataset self: {outcome}; mend the cause, then the same command continues")
                while sift.seen in waiting and sift.passed < count:
                    record = {"number": sift.seen, **sift.judge(waiting.pop(sift.seen))}
                    index.add(**record)
                    sift.count(record)
                    bar.update("messages" in record)
                    sift.require_prompts()
    backend.abandon()
    return sift.outcomes


class _Filter:
    """Tells prompts from other samples, in the order of their numbers."""

    def __init__(self, tokenizer: Any, turn: UserTurn) -> None:
        self._tokenizer, self._turn = tokenizer, turn
        templates = tokenizer.chat_template or ""
        texts = templates.values() if isinstance(templates, dict) else [templates]
        self._markers = {*special_tokens(tokenizer), *(found for text in texts for found in MARKER.findall(text))}
        self._texts: set[int] = set()  # of the prompts so far, normalised
        self.outcomes: Counter = Counter()  # PASSED, or the reason why not

    @property
    def seen(self) -> int:
        return self.outcomes.total()

    @property
    def passed(self) -> int:
        return self.outcomes[PASSED]

    @property
    def share(self) -> float:
        """Of the samples that pass, as far as it is known."""
        return max(self.passed, 1) / max(self.seen, 1)

    def judge(self, generated: Generated) -> dict[str, Any]:
        """The line of one sample but for its number: messages, or why it is dropped."""
        ids = generated.ids
        stopped = generated.reason == "stop"
        if stopped and not self._turn.stop_text:
            ids = ids[:-1]
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if stopped and self._turn.stop_text:
            text = text.partition(self._turn.stop_text)[0]
        text = text.strip()
        if not stopped:
            return {"dropped": "unfinished"}
        if not text:
            return {"dropped": "empty"}
        if any(marker in text for marker in self._markers):
            return {"dropped": "markers of the template"}
        if len(text.encode()) < FEWEST_BYTES:
            return {"dropped": "too short"}
        if _key(text) in self._texts:
            return {"dropped": "duplicate"}
        return {"messages": [{"role": "user", "content": text}]}

    def count(self, record: dict[str, Any]) -> None:
        self.outcomes[record.get("dropped", PASSED)] += 1
        if "messages" in record:
            self._texts.add(_key(record["messages"][0]["content"]))

    def require_prompts(self) -> None:
        if self.seen >= FEWEST_SAMPLES and self.passed < FEWEST_PASSING * self.seen:
            reasons = ", ".join(f"{reason}: {number}" for reason, number in self.outcomes.most_common())
            raise UserError(
                f"--dataset self: {self.passed} of {self.seen} samples are prompts ({reasons}); this target cannot "
                "write prompts this way, give a dataset"
            )


def _key(text: str) -> int:
    """Equal for texts that differ in case, white space or punctuation alone."""
    letters = (letter for letter in unicodedata.normalize("NFKC", text).casefold() if letter.isalnum())
    return int(artifacts.digest("".join(letters)), 16)
