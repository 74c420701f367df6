"""How fast a run trains and how long it waits for data."""

import time
from typing import Any

import torch
import torch.distributed as dist

from eagle3 import terminal
from eagle3.draft.config import DraftConfig
from eagle3.draft.model import Batch
from eagle3.training.estimate import Work, matmul_rate, operations
from eagle3.training.reading import Step

WARM_UP = 10  # steps that are not judged: threads, kernels and the page cache start
WINDOW = 60.0  # seconds of training after which the wait is judged
MOST_WAIT = 0.03  # of the step time


class Meter:
    """Measures the optimizer steps of this process, all ranks together. Every rank has one and calls `add`."""

    def __init__(self, config: DraftConfig, options: Any, device: torch.device) -> None:
        """`options`: loop.TrainOptions. On a GPU rank 0 measures a matrix product, which shares are of."""
        self._config, self._device = config, device
        self._train_lm_head, self._teacher = options.train_lm_head, options.loss == "kl"
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        on_gpu = device.type == "cuda" and self._rank == 0
        self._peak = matmul_rate(getattr(torch, options.dtype)) if on_gpu else None
        self.seconds = self.waited = 0.0
        self.tokens = self.bytes = self.operations = 0.0
        self._steps, self._warned = 0, False
        self._since = (0.0, 0.0, 0.0)  # seconds, waited and bytes at the start of the window

    def add(self, step: Step, started: float) -> dict[str, float]:
        """Of a step that ends now and got its batches at `started` (time.monotonic), for metrics.jsonl:

        seconds from asking for the batches to the end, data_wait the seconds of them until the last rank had its
        batches, tokens, tokens_per_second and, on a GPU, share_of_peak.
        """
        seconds = step.waited + time.monotonic() - started
        waits = [step.waited if rank == self._rank else 0.0 for rank in range(self._world)]
        sums = [step.tokens, step.bytes, sum(map(self._operations, step.batches)), *waits]
        if self._world > 1:
            vector = torch.tensor(sums, dtype=torch.float64, device=self._device)
            dist.all_reduce(vector)
            sums = vector.tolist()
        tokens, size, done, *waits = sums
        waited = min(max(waits), seconds)
        self.seconds += seconds
        self.waited += waited
        self.tokens += tokens
        self.bytes += size
        self.operations += done
        self._steps += 1
        self._judge()
        values = {"seconds": round(seconds, 3), "data_wait": round(waited, 4)}
        values |= {"tokens": int(tokens), "tokens_per_second": round(tokens / seconds, 1)}
        if self._peak:
            values["share_of_peak"] = round(self._share_of_peak(done, seconds), 4)
        return values

    def rows(self) -> dict[str, str]:
        """For the closing summary; none where no step was trained."""
        if not self._steps:
            return {}
        speed = f"{self.tokens / self.seconds:,.0f} tokens/s"
        if self._peak:
            share = self._share_of_peak(self.operations, self.seconds)
            speed += f", {share:.0%} of the {self._peak / 1e12:.0f} TFLOP/s of a matrix product at the start"
        waited, rate = self.waited / self.seconds, self.bytes / self.seconds / 1e9
        return {"speed": speed, "waited for data": f"{waited:.1%} of the step time; {rate:.3g} GB/s were read"}

    def _operations(self, batch: Batch) -> int:
        work = Work.of(batch) if self._teacher else Work.of(batch).without_teacher()
        return operations(self._config, work, self._train_lm_head)

    def _share_of_peak(self, done: float, seconds: float) -> float:
        return done / (seconds * self._world * self._peak)

    def _judge(self) -> None:
        """Warn, once a run, of a window in which training waited too long for its data."""
        if self._steps == WARM_UP:
            self._since = self.seconds, self.waited, self.bytes
        seconds, waited, size = (
            now - then for now, then in zip((self.seconds, self.waited, self.bytes), self._since, strict=True)
        )
        if self._steps <= WARM_UP or seconds < WINDOW:
            return
        self._since = self.seconds, self.waited, self.bytes
        if self._rank == 0 and not self._warned and waited > MOST_WAIT * seconds:
            self._warned = True
            terminal.warn(
                f"training waited for its data {waited / seconds:.0%} of the last {seconds:.0f} s, in which "
                f"{size / seconds / 1e9:.3g} GB/s were read: put --hidden-states-dir on a local or faster disk, or "
                "have stage 02 store less (--store-dtype fp8 halves it)"
            )


def shown(loss: float, report: dict[str, Any] | None, speed: dict[str, float]) -> dict[str, str]:
    """What the progress bar says after a step: its loss, tau of the last evaluation, and what `Meter.add` gave."""
    parts = {"loss": f"{loss:.3f}", "tau": str((report or {}).get("tau", "-"))}
    parts["tok/s"] = f"{speed['tokens_per_second']:,.0f}"
    if "share_of_peak" in speed:
        parts["peak"] = f"{speed['share_of_peak']:.0%}"
    return parts
