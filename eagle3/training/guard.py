"""Optimizer steps that would harm the draft are left out: loss or gradient not finite, or a gradient far too large."""

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

FACTOR = 20  # times the running median
WINDOW = 100  # good steps that the median is of
FEWEST = 20  # good steps before it is used
MOST_IN_A_ROW = 10
NAMED = 8  # samples of a bad step


@dataclass(frozen=True)
class Outcome:
    """What became of one optimizer step."""

    gradient_norm: float  # before clipping, over all ranks
    fault: str | None  # why the weights were left as they are; None: they were updated


class StepGuard:
    """Takes DeepSpeed's optimizer steps, and leaves weights and optimizer state untouched in the bad ones.

    A step is bad if its loss or gradient norm is not finite, or if the norm is above FACTOR times the median norm of
    the last WINDOW good steps. The median counts once there are FEWEST of them: before, at the start of training,
    norms move fast. FACTOR is wide on purpose: healthy batches differ by a few times, and clipping bounds what a large
    gradient does, so only what no healthy batch gives is left out. Bad steps do not enter the median.

    A step without a supervised row, whose zero gradient would still let Adam's momentum move the weights, is left out
    too, and is no sign of trouble.

    All ranks judge alike without asking each other: loss and norm are sums over all of them.
    """

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        """`engine`: DeepSpeed's, ZeRO 0 to 2, made with `optimizer` and `schedule`."""
        self._engine, self._optimizer, self._schedule = engine, optimizer, schedule
        self._loss_finite = self._supervised = True
        self._plain_norm: float | None = None
        # DeepSpeed has no way to discard accumulated gradients. It calls the optimizer once they are reduced, measured
        # and clipped, and cleans up after it.
        self._withheld: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        optimizer.register_step_pre_hook(self._withhold)
        optimizer.register_step_post_hook(self._give_back)
        self.norms: deque[float] = deque(maxlen=WINDOW)  # of good steps
        self.skipped = 0
        self.in_a_row = 0

    def step(self, loss: torch.Tensor, supervised: bool = True) -> Outcome:
        """In place of engine.step() at the end of an accumulation; `loss` float [K] is that of all ranks, `supervised`
        whether any of them had a supervised row.

        The schedule moves on in a bad step too.
        """
        self._supervised = supervised
        self._loss_finite = bool(torch.isfinite(loss).all())
        self._plain_norm = None
        if self._engine.optimizer is self._optimizer:  # float32 without ZeRO: DeepSpeed clips and tells no norm
            gradients = [
                p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None
            ]
            self._plain_norm = float(torch.nn.utils.get_total_norm(gradients))
        self._engine.step()
        norm = self._norm()
        if not self._engine.was_step_applied():  # DeepSpeed itself found gradients that are not finite
            norm = math.inf
            self._schedule.step()
        fault = self._fault(norm)
        if fault:
            self.skipped += 1
            self.in_a_row += supervised
        else:
            self.in_a_row = 0
            self.norms.append(norm)
        return Outcome(norm, fault)

    def _withhold(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Take the gradients away in a bad step: AdamW passes over weights that have none, state and all."""
        if self._fault(self._norm()):
            self._withheld = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
            for parameter, _ in self._withheld:
                parameter.grad = None

    def _give_back(self, *_: Any) -> None:
        for parameter, gradient in self._withheld:  # DeepSpeed keeps the buffers of offloaded ones
            parameter.grad = gradient
        self._withheld = []

    def _norm(self) -> float:
        # during the step the engine's own copy is still that of the step before
        return float(self._engine.optimizer._global_grad_norm if self._plain_norm is None else self._plain_norm)

    def _fault(self, norm: float) -> str | None:
        if not self._supervised:
            return "none of its rows is supervised"
        if not self._loss_finite:
            return "its loss is not finite"
        if not math.isfinite(norm):
            return "its gradient is not finite"
        if len(self.norms) >= FEWEST and norm > FACTOR * (median := statistics.median(self.norms)):
            return f"its gradient norm {norm:.3g} is above {FACTOR} times the median {median:.3g}"
        return None

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"norms": list(self.norms), "skipped": self.skipped, "in_a_row": self.in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.norms.clear()
        self.norms.extend(state["norms"])
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]
