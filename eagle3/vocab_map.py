"""Stage 03: which target ids the draft vocabulary has, from the counts of stage 01."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3 import artifacts
from eagle3.coverage import Coverage, coverage
from eagle3.terminal import UserError
from eagle3.token_counts import load_by_source

STAGE = "03"


@dataclass(frozen=True)
class VocabMap:
    """The map between D draft ids and V target ids, and how it came about."""

    d2t: torch.Tensor  # int64 [D]: target id = i + d2t[i], strictly increasing
    t2d: torch.Tensor  # bool [V]: whether a target id is in the draft vocabulary
    coverage: float  # share of supervised tokens whose id is in the draft vocabulary
    by_size: Coverage  # the same for maps of other sizes, by source
    forced: int  # ids that had to be in it
    filled: int  # ids that never occurred, taken to reach D

    @property
    def size(self) -> int:
        return len(self.d2t)

    @property
    def full(self) -> bool:
        return len(self.d2t) == len(self.t2d)


def build_vocab_map(
    counts: torch.Tensor, forced_ids: list[int], tokenizer_size: int, size: int, by_source: dict[str, torch.Tensor]
) -> VocabMap:
    """Choose `size` ids: the forced ones, then the most frequent, ties and ids that never occur by lowest id.

    `counts` is int64 [V], `by_source` as in TokenCounts. Ids from `tokenizer_size` on (padding of the embedding) come
    last. With `size` >= V the map is the identity. Raises UserError when the forced ids do not fit.
    """
    vocab_size, forced = len(counts), len(forced_ids)
    if forced > size:
        raise UserError(
            f"{forced} ids must be in the draft vocabulary (end, special and added tokens, --force-tokens), "
            f"--draft-vocab-size is {size}; give at least {forced}"
        )
    rank = counts.clone()  # [V]
    rank[tokenizer_size:] = -1
    rank[forced_ids] = counts.max() + 1
    order = rank.argsort(descending=True, stable=True)  # [V]
    chosen = order[:size].sort().values  # [D]
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    return VocabMap(
        d2t=chosen - torch.arange(len(chosen)),
        t2d=t2d,
        coverage=int(counts[chosen].sum()) / int(counts.sum()),
        by_size=coverage(order, by_source, len(chosen), forced),
        forced=forced,
        filled=0 if len(chosen) == vocab_size else int((counts[order[forced:size]] == 0).sum()),
    )


def write_vocab_map(
    prepared: Path, directory: Path, draft_vocab_size: int, force_tokens: Sequence[int] = ()
) -> VocabMap:
    """Build the map from stage 01's directory and replace vocab_map.pt, coverage.png and manifest.json.

    `force_tokens` are ids that must be in it besides those of stage 01. Raises UserError when stage 01 is not finished,
    its counts do not fit its manifest, or the tokenizer has no such id.
    """
    manifest = artifacts.read_manifest(prepared, "01")
    if not manifest["complete"]:
        raise UserError(f"{prepared} is not finished; run the command of stage 01 again, it continues")
    counts = artifacts.load_counts(prepared, manifest["vocab_size"], manifest["supervised"])  # [V]
    if not counts.any():
        raise UserError(f"{prepared} has no assistant token to choose a vocabulary by; look at the data of stage 01")
    by_source = load_by_source(prepared, counts)
    tokenizer_size = manifest["tokenizer_size"]
    if outside := [token for token in force_tokens if not 0 <= token < tokenizer_size]:
        raise UserError(
            f"--force-tokens {' '.join(map(str, outside))}: the tokenizer has ids from 0 to {tokenizer_size - 1}; "
            "give ids of this target's tokenizer"
        )
    forced_ids = sorted({*manifest["forced_ids"], *force_tokens})
    result = build_vocab_map(counts, forced_ids, tokenizer_size, draft_vocab_size, by_source)
    with artifacts.directory_lock(directory):
        artifacts.read_manifest(directory, STAGE, missing_ok=True)  # refuses the directory of another stage
        new, figure = directory / ".vocab_map.new", directory / ".coverage.new"  # whole before the earlier ones go
        artifacts.save_tensors(new, {"d2t": result.d2t, "t2d": result.t2d})
        if result.by_size.sizes:
            with artifacts.atomic_file(figure) as file:
                file.write(result.by_size.png())
        (directory / "manifest.json").unlink(missing_ok=True)  # it must never describe another map
        new.replace(directory / "vocab_map.pt")
        if result.by_size.sizes:
            figure.replace(directory / "coverage.png")
        else:  # no size is below the target's
            (directory / "coverage.png").unlink(missing_ok=True)
        artifacts.write_manifest(
            directory,
            STAGE,
            {
                "target": manifest["fingerprint"]["target"],
                "tokenizer": manifest["fingerprint"]["tokenizer"],
                "draft_vocab_size": result.size,
                "forced_ids": artifacts.digest(forced_ids),
                "token_freq": hashlib.sha256(counts.numpy().tobytes()).hexdigest()[:16],
            },
            coverage=result.coverage,
            coverage_by_size=result.by_size.facts(),
            forced=result.forced,
            force_tokens=sorted(set(force_tokens)),
            filled=result.filled,
        )
    return result
