"""How often each id occurs at supervised positions: counted by stage 01, in all and by source, read by stage 03."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from eagle3 import artifacts
from eagle3.terminal import UserError

MERGE_EVERY = 1 << 20  # tokens that wait to be counted
COPY = {"samples": ((torch.int64,), 0)}  # beside by_source, as artifacts.PREPARED


class TokenCounts:
    """Occurrences of each id by source, with a copy on disk for a run that is interrupted.

    `by_source` maps a source to int64 [2, P]: its P ids, ascending, and how often each occurs. Pairs, because a file
    has some ten thousand ids, not the whole vocabulary: there may be hundreds of files. `covered` is the number of
    samples, from the first on, that were counted before this run.
    """

    def __init__(
        self, directory: Path, vocab_size: int, samples: int, finished: dict[str, torch.Tensor] | None
    ) -> None:
        """Start from the counts of a finished run, else from the copy, else from nothing.

        `samples` is the number that the index has.
        """
        self.directory, self.vocab_size = directory, vocab_size
        self.copy = directory / "token_freq.partial.pt"
        self.by_source, self.covered = finished or {}, 0
        self._waiting: dict[str, list[torch.Tensor]] = {}
        self._tokens_waiting = 0
        if finished is not None:
            self.covered = samples
        elif self.copy.exists():
            with suppress(UserError):  # damaged: the samples are counted again
                saved = artifacts.load_fields(self.copy, COPY, "01")
                by_source = _checked(self.copy, saved.get("by_source"), vocab_size)
                if saved["samples"] <= samples:  # more samples: the index lost its end in a power cut
                    self.by_source, self.covered = by_source, int(saved["samples"])

    def add(self, index: int, source: str, ids: torch.Tensor) -> None:
        """Count the supervised ids of sample `index`, int32 [S], unless the counts that this run began with have it."""
        if index >= self.covered:
            self._waiting.setdefault(source, []).append(ids)
            self._tokens_waiting += len(ids)
            if self._tokens_waiting >= MERGE_EVERY:
                self._merge()

    def _merge(self) -> None:
        for source, waiting in self._waiting.items():
            counts = torch.bincount(torch.cat(waiting), minlength=self.vocab_size)  # [V]
            if source in self.by_source:
                counts.index_add_(0, *self.by_source[source])
            ids = counts.nonzero().flatten()  # [P]
            self.by_source[source] = torch.stack([ids, counts[ids]])
        self._waiting, self._tokens_waiting = {}, 0

    def save_copy(self, samples: int) -> None:
        self._merge()
        artifacts.save_tensors(self.copy, {"samples": torch.tensor(samples), "by_source": self.by_source})

    def finish(self) -> None:
        """Write token_freq.pt and token_freq_by_source.pt."""
        self._merge()
        by_source = dict(sorted(self.by_source.items()))  # a resumed run may meet the sources in another order
        artifacts.save_tensors(self.directory / "token_freq_by_source.pt", by_source)
        artifacts.save_tensors(self.directory / "token_freq.pt", _total(by_source, self.vocab_size))


def load_by_source(directory: Path, counts: torch.Tensor) -> dict[str, torch.Tensor]:
    """token_freq_by_source.pt of stage 01, as TokenCounts.by_source.

    Raises UserError unless it adds up to `counts`, int64 [V], which token_freq.pt has.
    """
    path = directory / "token_freq_by_source.pt"
    if not path.exists():
        raise UserError(f"{path} is missing; run the command of stage 01 again, it counts the samples again")
    by_source = _checked(path, artifacts.load_tensors(path), len(counts))
    if not _total(by_source, len(counts)).equal(counts):
        raise UserError(f"{path} does not add up to token_freq.pt; delete it and rerun stage 01")
    return by_source


def _total(by_source: dict[str, torch.Tensor], vocab_size: int) -> torch.Tensor:
    total = torch.zeros(vocab_size, dtype=torch.int64)  # [V]
    for pairs in by_source.values():
        total.index_add_(0, *pairs)
    return total


def _checked(path: Path, by_source: Any, vocab_size: int) -> dict[str, torch.Tensor]:
    """The counts by source off the file. Raises UserError unless they are what TokenCounts.by_source says."""
    if not isinstance(by_source, dict) or not all(_is_pairs(pairs, vocab_size) for pairs in by_source.values()):
        raise UserError(
            f"{path} is damaged: expected ascending ids below {vocab_size} and their counts, by source; "
            "delete it and rerun stage 01"
        )
    return {source: pairs.clone() for source, pairs in by_source.items()}


def _is_pairs(pairs: Any, vocab_size: int) -> bool:
    if not isinstance(pairs, torch.Tensor) or pairs.dtype != torch.int64 or pairs.dim() != 2 or len(pairs) != 2:
        return False
    ids, counts = pairs
    if len(ids) == 0:
        return True
    return bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size and int(counts.min()) > 0
