"""Acceptance as a server would count it, and the plain means beside it."""

from bisect import bisect_right
from dataclasses import dataclass, field, fields

import torch

from eagle3.draft.model import Batch, StepOutput

LENGTHS = (512, 1024, 2048, 4096, 8192)  # tokens before a start: acceptance falls where training had few so far out


@dataclass
class Acceptance:
    """Sums over held-out turns. Fields that are lists have one entry a TTT step, or a number of drafts K = 1..steps;
    those named far_ have one for starts before each of LENGTHS and one for later ones."""

    steps: int
    loss: list[float] = field(default_factory=list)  # KL summed over rows
    rows: list[float] = field(default_factory=list)
    correct: list[float] = field(default_factory=list)  # rows where the draft's token is the next one
    outside: list[float] = field(default_factory=list)  # rows whose next token is not in the draft vocabulary
    position: list[float] = field(default_factory=list)  # starts of the walk with K = steps that accept draft k
    starts: list[float] = field(default_factory=list)  # of the walk with K drafts
    accepted: list[float] = field(default_factory=list)  # by the walk with K drafts
    lost: list[float] = field(default_factory=list)  # starts of that walk that stop at a token outside the vocabulary
    sampled_starts: list[float] = field(default_factory=list)  # expected, at temperature 1
    sampled_accepted: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)  # leading right drafts up to K, summed over all starts
    far_starts: list[float] = field(default_factory=list)  # of the walk with K = steps
    far_accepted: list[float] = field(default_factory=list)
    plain_starts: float = 0

    def __post_init__(self) -> None:
        for name, length in self._lists(self.steps).items():
            setattr(self, name, getattr(self, name) or [0] * length)

    @classmethod
    def _lists(cls, steps: int) -> dict[str, int]:
        """Length of each list."""
        names = [one.name for one in fields(cls) if one.name not in ("steps", "plain_starts")]
        return {name: len(LENGTHS) + 1 if name.startswith("far_") else steps for name in names}

    def tensor(self) -> torch.Tensor:
        """All sums as one float64 vector, for a reduction over ranks."""
        values = [value for name in self._lists(self.steps) for value in getattr(self, name)]
        return torch.tensor([*values, self.plain_starts], dtype=torch.float64)

    @classmethod
    def of(cls, vector: torch.Tensor, steps: int) -> "Acceptance":
        """The inverse of `tensor`."""
        lengths = cls._lists(steps)
        *parts, (plain_starts,) = (part.tolist() for part in vector.split([*lengths.values(), 1]))
        return cls(steps, **dict(zip(lengths, parts, strict=True)), plain_starts=plain_starts)

    def report(self) -> dict[str, object]:
        """Means for people and metrics.jsonl; `_by_drafts` lists are for K = 1..steps drafts.

        `tau` is the walk of the design with K = steps, at temperature 0. `tau_plain_mean` is not it, and
        `tau_sampled_estimate` is the walk's expected value at temperature 1 on the same text.
        """
        last = self.steps - 1
        tau = [1 + a for a in _ratios(self.accepted, self.starts, 4)]
        report = {
            "loss_by_step": _ratios(self.loss, self.rows),
            "accuracy_by_step": _ratios(self.correct, self.rows),
            "outside_vocabulary_by_step": _ratios(self.outside, self.rows),
            "tau": round(tau[last], 4),
            "tau_by_drafts": [round(value, 4) for value in tau],
            "acceptance_by_position": _ratios(self.position, [self.starts[last]] * self.steps),
            "lost_to_vocabulary": _ratios(self.lost, self.starts)[last],
            "tau_by_tokens_before": {
                f"below_{limit}" if limit else f"from_{LENGTHS[-1]}": round(1 + accepted / starts, 4)
                for limit, starts, accepted in zip((*LENGTHS, 0), self.far_starts, self.far_accepted, strict=True)
                if starts
            },
            "tau_plain_mean": round(1 + self.plain[last] / max(self.plain_starts, 1), 4),
            "walk_starts": int(self.starts[last]),
        }
        if self.sampled_starts[last]:
            estimate = _ratios(self.sampled_accepted, self.sampled_starts, 4)
            report["tau_sampled_estimate_by_drafts"] = [round(1 + value, 4) for value in estimate]
        return report


def _ratios(sums: list[float], counts: list[float], digits: int = 5) -> list[float]:
    return [round(a / max(n, 1), digits) for a, n in zip(sums, counts, strict=True)]


def walk(accepted: list[int]) -> list[int]:
    """Starts of the walk through one turn, as places in `accepted`.

    accepted[i] is the number of leading right drafts from the turn's i-th start; after A accepted drafts the server
    emits A + 1 tokens and starts again there.
    """
    taken, place = [], 0
    while place < len(accepted):
        taken.append(place)
        place += accepted[place] + 1
    return taken


def expected_walk(chance: list[list[float]]) -> tuple[float, float]:
    """Expected starts and accepted drafts of the walk through one turn, when drafts are accepted by chance.

    chance[i][k] is the probability that draft k from the turn's i-th start is accepted, given that those before it
    were: sum of min(p, q) for target p and draft q (Leviathan et al. 2023, arXiv:2211.17192, theorem 3.5).
    """
    reach = [0.0] * (len(chance) + 1)  # probability that the walk starts at i
    reach[0] = 1.0
    accepted = 0.0
    for i, row in enumerate(chance):
        survived = 1.0
        for k, probability in enumerate(row):
            stopped = survived * (1 - probability)
            reach[min(i + k + 1, len(chance))] += reach[i] * stopped
            survived -= stopped
            accepted += reach[i] * survived
        reach[min(i + len(row) + 1, len(chance))] += reach[i] * survived
    return sum(reach[:-1]), accepted


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
    outside = known & (wanted < 0)  # [K, R]
    leading = right.long().cumprod(0).sum(0)  # [R], leading right drafts of each start
    for step in range(sums.steps):
        sums.loss[step] += float(output.loss[step])
        sums.rows[step] += int(known[step].sum())
        sums.correct[step] += int(right[step].sum())
        sums.outside[step] += int(outside[step].sum())
        sums.plain[step] += int(leading.clamp(max=step + 1).sum())
    sums.plain_starts += leading.numel()
    leading, outside, counts = leading.cpu(), outside.cpu(), known.sum(0).tolist()
    positions = batch.positions[batch.rows].cpu()  # [R]
    for turn in _turns(batch):
        for drafts in range(1, sums.steps + 1):
            accepted = leading[turn].clamp(max=drafts).tolist()
            starts = walk(accepted)
            sums.starts[drafts - 1] += len(starts)
            sums.accepted[drafts - 1] += sum(accepted[i] for i in starts)
            sums.lost[drafts - 1] += sum(
                accepted[i] < drafts and bool(outside[accepted[i], int(turn[i])]) for i in starts
            )
        for i in starts:  # of the walk with all drafts
            for step in range(accepted[i]):
                sums.position[step] += 1
            far = bisect_right(LENGTHS, int(positions[turn[i]]))
            sums.far_starts[far] += 1
            sums.far_accepted[far] += accepted[i]
        if output.overlap is not None:
            chance = output.overlap[:, turn].T.tolist()
            for drafts in range(1, sums.steps + 1):
                rows = [row[: min(drafts, counts[n])] for n, row in zip(turn.tolist(), chance, strict=True)]
                expected = expected_walk(rows)
                sums.sampled_starts[drafts - 1] += expected[0]
                sums.sampled_accepted[drafts - 1] += expected[1]


def _turns(batch: Batch) -> list[torch.Tensor]:
    """Row numbers of each turn: consecutive starts of one document. Turns never touch: headers lie between."""
    rows = batch.rows.cpu()
    documents = batch.documents.cpu()[rows]
    breaks = ((rows[1:] != rows[:-1] + 1) | (documents[1:] != documents[:-1])).nonzero()[:, 0] + 1
    return [part for part in torch.arange(rows.numel()).tensor_split(breaks) if part.numel()]
