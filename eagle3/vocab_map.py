"""Stage 03: which target ids the draft vocabulary has, from the counts of stage 01."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3 import artifacts
from eagle3.terminal import UserError

STAGE = "03"


@dataclass(frozen=True)
class VocabMap:
    """The map between D draft ids and V target ids, and how it came about."""

    d2t: torch.Tensor  # int64 [D]: target id = i + d2t[i], strictly increasing
    t2d: torch.Tensor  # bool [V]: whether a target id is in the draft vocabulary
    coverage: float  # share of supervised tokens whose id is in the draft vocabulary
    forced: int  # ids that had to be in it
    filled: int  # ids that never occurred, taken to reach D

    @property
    def size(self) -> int:
        return len(self.d2t)

    @property
    def full(self) -> bool:
        return len(self.d2t) == len(self.t2d)


def build_vocab_map(counts: torch.Tensor, forced_ids: list[int], tokenizer_size: int, size: int) -> VocabMap:
    """Choose `size` ids: the forced ones, then the most frequent, ties and ids that never occur by lowest id.

    `counts` is int64 [V]. Ids from `tokenizer_size` on (padding of the embedding) come last. With `size` >= V the map
    is the identity. Raises UserError when the forced ids do not fit.
    """
    vocab_size = len(counts)
    forced = torch.tensor(forced_ids, dtype=torch.int64)
    if len(forced) > size:
        raise UserError(
            f"{len(forced)} ids must be in the draft vocabulary (end, special and added tokens), "
            f"--draft-vocab-size is {size}; give at least {len(forced)}"
        )
    rank = counts.clone()  # [V]
    rank[tokenizer_size:] = -1
    rank[forced] = counts.max() + 1
    chosen = rank.argsort(descending=True, stable=True)[:size].sort().values  # [D]
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    unseen = t2d & (counts == 0)
    unseen[forced] = False
    return VocabMap(
        d2t=chosen - torch.arange(len(chosen)),
        t2d=t2d,
        coverage=int(counts[chosen].sum()) / int(counts.sum()),
        forced=len(forced),
        filled=0 if len(chosen) == vocab_size else int(unseen.sum()),
    )


def write_vocab_map(prepared: Path, directory: Path, draft_vocab_size: int) -> VocabMap:
    """Build the map from stage 01's directory and write vocab_map.pt and manifest.json, replacing earlier ones.

    Raises UserError when stage 01 is not finished or its counts do not fit its manifest.
    """
    manifest = artifacts.read_manifest(prepared, "01")
    if not manifest["complete"]:
        raise UserError(f"{prepared} is not finished; run the command of stage 01 again, it continues")
    counts = artifacts.load_counts(prepared, manifest["vocab_size"], manifest["supervised"])  # [V]
    if not counts.any():
        raise UserError(f"{prepared} has no assistant token to choose a vocabulary by; look at the data of stage 01")
    result = build_vocab_map(counts, manifest["forced_ids"], manifest["tokenizer_size"], draft_vocab_size)
    with artifacts.directory_lock(directory):
        artifacts.read_manifest(directory, STAGE, missing_ok=True)  # refuses the directory of another stage
        new = directory / ".vocab_map.new"  # whole before the earlier map goes
        artifacts.save_tensors(new, {"d2t": result.d2t, "t2d": result.t2d})
        (directory / "manifest.json").unlink(missing_ok=True)  # it must never describe another map
        new.replace(directory / "vocab_map.pt")
        artifacts.write_manifest(
            directory,
            STAGE,
            {
                "target": manifest["fingerprint"]["target"],
                "tokenizer": manifest["fingerprint"]["tokenizer"],
                "draft_vocab_size": result.size,
                "token_freq": hashlib.sha256(counts.numpy().tobytes()).hexdigest()[:16],
            },
            coverage=result.coverage,
            forced=result.forced,
            filled=result.filled,
        )
    return result
