"""Acceptance as a server would count it, and the plain means beside it."""

from dataclasses import dataclass, field

import torch

from eagle3.draft.model import Batch, StepOutput


@dataclass
class Acceptance:
    """Sums over held-out turns. All lists have one entry a TTT step."""

    steps: int
    loss: list[float] = field(default_factory=list)  # KL summed over rows
    rows: list[int] = field(default_factory=list)
    correct: list[int] = field(default_factory=list)  # rows where the draft's token is the next one
    outside: list[int] = field(default_factory=list)  # rows whose next token is not in the draft vocabulary
    walk_starts: int = 0
    walk_accepted: list[int] = field(default_factory=list)  # starts of the walk with more than k accepted drafts
    chain_starts: int = 0
    chain_accepted: int = 0

    def __post_init__(self) -> None:
        for name in ("loss", "rows", "correct", "outside", "walk_accepted"):
            setattr(self, name, getattr(self, name) or [0] * self.steps)

    def tensor(self) -> torch.Tensor:
        """All sums as one float64 vector, for a reduction over ranks."""
        lists = [*self.loss, *self.rows, *self.correct, *self.outside, *self.walk_accepted]
        return torch.tensor([*lists, self.walk_starts, self.chain_starts, self.chain_accepted], dtype=torch.float64)

    @classmethod
    def of(cls, vector: torch.Tensor, steps: int) -> "Acceptance":
        """The inverse of `tensor`."""
        values = vector.tolist()
        loss, *counts = (values[place : place + steps] for place in range(0, 5 * steps, steps))
        rows, correct, outside, accepted = ([int(value) for value in part] for part in counts)
        starts, chains, chained = (int(value) for value in values[5 * steps :])
        return cls(steps, loss, rows, correct, outside, starts, accepted, chains, chained)

    def report(self) -> dict[str, object]:
        """Means for people and metrics.jsonl. `tau` is the walk of the design, `tau_plain_mean` is not it."""
        return {
            "loss_by_step": [round(a / max(n, 1), 5) for a, n in zip(self.loss, self.rows, strict=True)],
            "accuracy_by_step": [round(a / max(n, 1), 5) for a, n in zip(self.correct, self.rows, strict=True)],
            "outside_vocabulary_by_step": [
                round(a / max(n, 1), 5) for a, n in zip(self.outside, self.rows, strict=True)
            ],
            "tau": round(1 + sum(self.walk_accepted) / max(self.walk_starts, 1), 4),
            "acceptance_by_position": [round(a / max(self.walk_starts, 1), 5) for a in self.walk_accepted],
            "tau_plain_mean": round(1 + self.chain_accepted / max(self.chain_starts, 1), 4),
            "walk_starts": self.walk_starts,
        }


def walk(accepted: list[int]) -> list[int]:
    """Accepted drafts at each start of the walk through one turn.

    accepted[i] is the number of leading right drafts from the turn's i-th start; after A accepted drafts the server
    emits A + 1 tokens and starts again there.
    """
    taken, place = [], 0
    while place < len(accepted):
        taken.append(accepted[place])
        place += accepted[place] + 1
    return taken


def measure(output: StepOutput, batch: Batch, target_to_draft: torch.Tensor, sums: Acceptance) -> None:
    """Add one batch (served supervision) to `sums`.

    target_to_draft: int64 [V], the draft id of a target id, -1 outside the draft vocabulary; a draft is right when
    it is the token that follows in the target's own text.
    """
    wanted = target_to_draft[batch.labels.clamp(min=0)]  # [K, R]
    known = batch.valid & (batch.labels >= 0)
    if not known.any():
        return
    right = known & (output.predicted == wanted) & (wanted >= 0)  # [K, R]
    leading = right.long().cumprod(0).sum(0)  # [R], leading right drafts of each start
    for step in range(sums.steps):
        sums.loss[step] += float(output.loss[step])
        sums.rows[step] += int(known[step].sum())
        sums.correct[step] += int(right[step].sum())
        sums.outside[step] += int((known[step] & (wanted[step] < 0)).sum())
    sums.chain_starts += leading.numel()
    sums.chain_accepted += int(leading.sum())
    for turn in _turns(batch):
        for accepted in walk(leading[turn].tolist()):
            sums.walk_starts += 1
            for step in range(accepted):
                sums.walk_accepted[step] += 1


def _turns(batch: Batch) -> list[torch.Tensor]:
    """Row numbers of each turn: consecutive starts of one document. Turns never touch: headers lie between."""
    rows = batch.rows.cpu()
    documents = batch.documents.cpu()[rows]
    breaks = ((rows[1:] != rows[:-1] + 1) | (documents[1:] != documents[:-1])).nonzero()[:, 0] + 1
    return [part for part in torch.arange(rows.numel()).tensor_split(breaks) if part.numel()]
