"""One row to sample files under temporary names; runs in stage 01's own process or in its workers."""

import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eagle3 import mask_check
from eagle3.conversations import Conversation, SkipRow, TokenRow, parse_row
from eagle3.exclusion import Exclusion
from eagle3.masking import Masker, Sample
from eagle3.prepare import overflow
from eagle3.prepare.progress import EXCLUDED
from eagle3.prepare.sample_file import sample_file
from eagle3.sources import Row
from eagle3.target import Target
from eagle3.terminal import UserError

Job = tuple[Row, bool]  # a row, and whether its mask is derived a second time
CHECKED_FIRST = 20  # rows whose masks are derived a second time, then
CHECKED_EVERY = 50  # one row in so many


@dataclass(frozen=True)
class RowSettings:
    """What decides the samples of a row. Travels to worker processes, so it holds no tokenizer."""

    target: Target
    trust_remote_code: bool
    end_ids: tuple[int, ...]
    date: str  # what chat templates take for today
    columns: dict[str, str] | None
    exclusion: Exclusion | None
    max_seq_len: int
    overflow: str
    samples_dir: Path  # where the temporary files go


@dataclass(frozen=True)
class Written:
    """A sample in a temporary file that is not synced yet."""

    path: str
    size: int  # bytes
    tokens: int
    supervised_ids: np.ndarray  # int32 [S]


@dataclass(frozen=True)
class Outcome:
    """What became of one row: samples, or the reason why there are none."""

    reason: str | None = None
    samples: list[Written] = field(default_factory=list)
    digest: str = ""  # of the conversation's text
    origin: str | None = None
    form: str = ""  # how the row was read
    trailing: int = 0  # messages after the last assistant turn
    cut: int = 0  # samples cut at the limit
    left_out: int = 0  # samples of the row that the limit left without supervised tokens
    checked: int = 0  # assistant turns whose mask a second derivation confirmed
    failure: OSError | None = None  # a sample could not be written; the rows after this one were not begun


class RowProcessor:
    """Parses, masks, checks and writes rows, one after another."""

    def __init__(self, settings: RowSettings, tokenizer: Any) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        self._masker = Masker(tokenizer, settings.end_ids, date=settings.date)
        self._names = itertools.count()

    def process(self, jobs: list[Job]) -> list[Outcome]:
        """The outcome of each row up to a failure to write; their texts are tokenised together.

        Raises UserError when two derivations of a row's mask differ.
        """
        parsed = [self._parse(row) for row, _ in jobs]
        masked = iter(self._masker.samples_of([item for item in parsed if isinstance(item, Conversation)]))
        outcomes = []
        for (row, check), item in zip(jobs, parsed, strict=True):
            try:
                samples = next(masked) if isinstance(item, Conversation) else item
                if isinstance(samples, SkipRow):
                    raise samples
                if isinstance(item, Conversation):
                    checked = self._check(row, item, samples) if check else 0
                    outcomes.append(self._outcome(item, item, samples, checked))
                else:
                    outcomes.append(self._outcome(item, None, self._of_ids(item), 0))
            except SkipRow as skip:
                outcomes.append(Outcome(reason=str(skip)))
            except OSError as error:
                return [*outcomes, Outcome(failure=error)]
        return outcomes

    def _parse(self, row: Row) -> Conversation | TokenRow | SkipRow:
        try:
            parsed = parse_row(row, self._settings.columns)
            exclusion = self._settings.exclusion
            if exclusion and isinstance(parsed, Conversation) and exclusion.matches(parsed.messages):
                raise SkipRow(EXCLUDED)
            return parsed
        except SkipRow as skip:
            return skip

    def _check(self, row: Row, conversation: Conversation, samples: list[Sample]) -> int:
        try:
            ends, date = self._settings.end_ids, self._settings.date
            return mask_check.check(self._tokenizer, conversation, samples, ends, date=date)
        except mask_check.MaskDisagreement as error:
            raise UserError(f"{row.place}: {error}") from error

    def _of_ids(self, row: TokenRow) -> list[Sample]:
        """The samples of a row that was tokens already. Raises SkipRow where they cannot be this target's."""
        if self._settings.exclusion:
            raise UserError(
                "--exclude cannot find prompts in rows that are tokens already; exclude them where they are text"
            )
        ends, size = set(self._settings.end_ids), self._settings.target.vocab_size
        samples = [Sample(ids, mask) for ids, mask in row.samples]
        for sample in samples:
            if max(sample.ids) >= size:
                raise SkipRow("token ids outside the target's vocabulary")
            for begin, end in sample.runs():
                if begin == 0:
                    raise SkipRow("loss_mask begins at the first token")
                if not ends.isdisjoint(sample.ids[begin : end - 1]):
                    raise SkipRow("loss_mask goes on after an end-of-turn token")
        return samples

    def _outcome(
        self, parsed: Conversation | TokenRow, conversation: Conversation | None, samples: list[Sample], checked: int
    ) -> Outcome:
        settings = self._settings
        fitted = overflow.fit(samples, conversation, self._masker.samples, settings.max_seq_len, settings.overflow)
        return Outcome(
            samples=[self._write(sample) for sample in fitted.samples],
            digest=parsed.digest,
            origin=parsed.origin,
            form=parsed.form,
            trailing=conversation.trailing if conversation else 0,
            cut=fitted.cut,
            left_out=fitted.left_out,
            checked=checked,
        )

    def _write(self, sample: Sample) -> Written:
        ids = np.array(sample.ids, dtype=np.int32)  # [T]; torch.tensor takes three times as long
        mask = np.array(sample.mask, dtype=np.bool_)  # [T]
        content = sample_file(ids, mask)
        path = f"{self._settings.samples_dir}/.{os.getpid()}-{next(self._names)}.tmp"
        try:
            with open(path, "wb") as file:
                file.write(content)
        except OSError as error:
            error.filename = path  # write does not say where
            raise
        return Written(path, len(content), len(ids), ids[mask])
