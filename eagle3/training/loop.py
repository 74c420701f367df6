"""The training loop under DeepSpeed: batches, one optimizer step, validation, checkpoints that resume."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from eagle3 import terminal
from eagle3.draft.loss import Teacher, Text
from eagle3.draft.model import Batch, DraftModel
from eagle3.target import TargetHead
from eagle3.terminal import UserError
from eagle3.training import baselines, best, checkpoints, engine, guard, packing, reading, schedule, throughput
from eagle3.training.estimate import sample_cost
from eagle3.training.metrics import Acceptance, measure
from eagle3.training.record import Record

NORMALISED_AT_ONCE = 128  # rows of logits over the whole vocabulary: 84 MB of float32 at 163,840 ids


@dataclass(frozen=True)
class TrainOptions:
    """What changes the weights, apart from the data and the number of ranks."""

    epochs: int
    learning_rate: float
    schedule: str  # cosine | linear | wsd
    warmup_ratio: float
    weight_decay: float
    clip: float
    max_tokens: int  # tokens of one pack (micro-batch)
    max_rows: int  # supervised ones of it
    accumulation: int
    ttt_steps: int
    step_decay: float  # weight of TTT step k is step_decay ** k
    loss: str  # kl | cross-entropy
    loss_norm: str  # per-step | first-step
    supervision: str  # served | shifted-mask
    train_lm_head: bool
    dtype: str
    seed: int


def loss_weights(rows: torch.Tensor, options: TrainOptions) -> torch.Tensor:
    """Factor of each TTT step's summed KL, float [K], from the rows [K] that count in the whole optimizer step."""
    decay = options.step_decay ** torch.arange(rows.shape[0], device=rows.device)
    divisor = rows if options.loss_norm == "per-step" else rows[:1]
    return (decay / divisor.clamp(min=1)).float()


def normaliser(head: TargetHead, batch: Batch, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Log of the sum of exp(logit) over all ids of `head` at the supervised positions, float [S] on the CPU."""
    parts = []
    for start in range(0, len(batch.final_hidden), NORMALISED_AT_ONCE):
        states = batch.final_states(slice(start, start + NORMALISED_AT_ONCE), device, dtype)
        parts.append(head(states).float().logsumexp(-1).cpu())  # bf16 would round it by percents
    return torch.cat(parts)


class StopRequested:
    """Turns SIGINT, SIGTERM and SIGHUP into a flag that is read between optimizer steps, while the block runs.

    A launcher passes on what the terminal has sent already, so only a signal that comes terminal.PATIENCE seconds after
    the first one is a person who does not want to wait for the checkpoint.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._since = 0.0

    def __enter__(self) -> "StopRequested":
        self._before = {number: signal.getsignal(number) for number in terminal.SIGNALS}
        terminal.on_signals(self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            terminal.leave_terminal()
        if not self.signal:
            self.signal, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > terminal.PATIENCE:
            os._exit(128 + number)


class Trainer:
    """One training run in one output directory."""

    def __init__(
        self,
        model: DraftModel,
        head: TargetHead,
        whole_head: Callable[[], TargetHead],
        options: TrainOptions,
        deepspeed_config: dict[str, Any],
        hidden_states: Path,
        output: Path,
        train: list[dict],
        held_out: list[dict],
        target_to_draft: torch.Tensor,
        save_every: int,
    ) -> None:
        """`head` gives the draft's ids, `whole_head` loads that of all ids, which is needed once;
        `train` (failed samples too) and `held_out` are index records of stage 02 in the directory `hidden_states`;
        `target_to_draft` int64 [V] gives -1 outside;
        a checkpoint is written every `save_every` optimizer steps and after each epoch."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.options, self.head, self.whole_head = options, head, whole_head
        self.output, self.hidden_states = output, hidden_states
        self.train_records, self.held_out, self.save_every = train, held_out, save_every
        self.device = engine.device()
        self.target_to_draft = target_to_draft.to(self.device)
        self.dtype = getattr(torch, options.dtype)
        self.fitted = (0, 0)  # draft starts and tokens of the largest micro-batch so far
        self.source = reading.Source(hidden_states, model.config, options.ttt_steps, self.device)
        self.sample_cost = sample_cost(model.config, options.ttt_steps, options.train_lm_head, options.loss)
        self.per_epoch = [
            packing.steps_per_epoch(len(self._packs(epoch)), self.world, options.accumulation)
            for epoch in range(options.epochs)
        ]
        self.packs_a_step = self.world * options.accumulation
        self.total_steps = sum(self.per_epoch)
        self.ahead = 0  # steps done beyond those that take this number of packs a step to the same place
        model.lm_head.weight.requires_grad_(options.train_lm_head)
        settings = {"lr": options.learning_rate, "weight_decay": options.weight_decay}
        config = deepspeed_config | {
            "gradient_accumulation_steps": options.accumulation,
            "gradient_clipping": options.clip,
            "bf16": {"enabled": options.dtype == "bfloat16"},
        }
        self.engine, optimizer, self.schedule = engine.start(model, config, self._learning_rate_factor, settings)
        self.model: DraftModel = self.engine.module
        self.guard = guard.StepGuard(self.engine, optimizer, self.schedule)
        self.step = 0  # optimizer steps done
        self.epoch = 0
        self.step_in_epoch = 0
        self.last_report: dict[str, Any] | None = None
        self.best_file = output / "checkpoints" / "best.safetensors"
        self.best: dict[str, Any] | None = None  # epoch, step and report of the evaluation with the highest tau
        self.normalisers: list[torch.Tensor] | None = None  # of this rank's held-out packs
        self.checkpoint: str | None = None  # name of the latest
        self.good_checkpoint: str | None = None  # of the latest after which a step was good
        self.baselines: dict[str, dict[str, Any]] | None = None  # reports of drafts that learned nothing

    def _packs(self, epoch: int) -> list[list[dict]]:
        budgets = self.options.max_tokens, self.options.max_rows
        return packing.epoch_packs(self.train_records, *budgets, self.options.seed, epoch, self.sample_cost)

    def _learning_rate_factor(self, step: int) -> float:
        total = self.total_steps - self.ahead
        warmup = max(1, math.ceil(self.options.warmup_ratio * total))
        return schedule.factor(self.options.schedule, step - self.ahead, warmup, total)

    # ------------------------------------------------------------------------------------------- batches

    def _reader(self, steps: list[list[list[dict]]], supervision: str) -> reading.Reader:
        return reading.Reader(self.source, steps, supervision)

    def _teacher(self, batch: Batch, normaliser: torch.Tensor | None = None) -> Teacher:
        with torch.no_grad():
            return Teacher(self.head(batch.final_hidden), normaliser)

    def _text(self, batch: Batch) -> Text:
        labels = self.target_to_draft[batch.following.clamp(min=0)]
        return Text(labels.masked_fill(batch.following < 0, -1))

    def _normalise(self, packs: list[list[dict]]) -> list[torch.Tensor]:
        """For each pack log of the sum of exp(logit) over all target ids, float [S]: the share outside the draft's."""
        head = self.whole_head()
        with self._reader([[records] for records in packs], "served") as steps:
            return [normaliser(head, step.batches[0], self.device, self.dtype) for step in steps]

    # ---------------------------------------------------------------------------------------------- steps

    def _optimizer_step(self, batches: list[Batch], stop: int) -> tuple[torch.Tensor, guard.Outcome, list[int], int]:
        """Accumulate one optimizer step and apply it, unless the guard finds it bad.

        Returns mean loss [K] over all ranks, the guard's outcome, the places among the step's packs whose loss is not
        finite, and the highest stop signal; all ranks get the same.
        """
        steps = self.options.ttt_steps
        counts = torch.zeros(steps + 1, dtype=torch.float64, device=self.device)  # rows of each TTT step; stop signal
        for batch in batches:
            counts[:steps] += batch.valid.sum(1).to(self.device)
        counts[steps] = stop
        if self.world > 1:
            dist.all_reduce(counts)
        rows = counts[:steps]  # supervised rows of the whole optimizer step, all ranks and micro-batches
        weights = loss_weights(rows, self.options)
        # losses of each TTT step; 1 for each micro-batch whose loss is not finite, in the order of the packs
        sums = torch.zeros(steps + self.world * len(batches), dtype=torch.float64, device=self.device)
        for micro, batch in enumerate(batches):
            with self._size_told(batch):
                batch = batch.to(self.device, self.dtype)
                teacher = self._text(batch) if self.options.loss == "cross-entropy" else self._teacher(batch)
                output = self.engine(batch, teacher)
                sums[:steps] += output.loss.detach()
                sums[steps + micro * self.world + self.rank] = ~output.loss.detach().isfinite().all()
                loss = (output.loss * weights).sum()
                # DeepSpeed averages over ranks; the weights already count the rows of all of them
                self.engine.backward(loss * self.world, scale_wrt_gas=False)
            if micro + 1 < len(batches):
                self.engine.step()
        if self.world > 1:
            dist.all_reduce(sums)
        loss = (sums[:steps] / rows.clamp(min=1)).cpu()
        return loss, self.guard.step(loss, bool(rows.any())), sums[steps:].nonzero()[:, 0].tolist(), int(counts[steps])

    @contextlib.contextmanager
    def _size_told(self, batch: Batch) -> Iterator[None]:
        """Notes on an error of memory how large the micro-batch was, and the largest that fitted before."""
        size = batch.rows.numel(), batch.input_ids.numel()
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if terminal.is_out_of_memory(error):
                told = "a micro-batch of {1:,} tokens and {0:,} draft starts did not fit".format(*size)
                if self.fitted[1]:
                    told += ", the largest that did had {1:,} and {0:,}".format(*self.fitted)
                error.add_note(told)
            raise
        self.fitted = max(self.fitted, size)

    def _skipped(self, outcome: guard.Outcome, packs: list[list[dict]], record: Record | None) -> None:
        """Name a step that was left out, and the samples of `packs`. Raises UserError after too many in a row."""
        indices = [sample["index"] for pack in packs for sample in pack]
        samples = ", ".join(map(str, indices[: guard.NAMED]))
        if len(indices) > guard.NAMED:
            samples += f" and {len(indices) - guard.NAMED} more"
        if record:
            values = {"epoch": self.epoch, "fault": outcome.fault, "samples": indices[: guard.NAMED]}
            record.skipped(self.step, values | {"samples_in_all": len(indices), "skipped": self.guard.skipped})
            terminal.warn(f"step {self.step} is skipped: {outcome.fault}; samples {samples}")
        if self.guard.in_a_row < guard.MOST_IN_A_ROW:
            return
        kept = "no checkpoint is known to be good"
        if self.good_checkpoint:
            kept = f"the last good checkpoint is {self.output / 'checkpoints' / self.good_checkpoint}"
        raise UserError(
            f"{self.guard.in_a_row} steps in a row were skipped up to step {self.step} ({outcome.fault}; samples "
            f"{samples}); {kept}; try a lower --learning-rate "
            f"(now {self.options.learning_rate}) or --clip (now {self.options.clip}) in another --output-dir, or look "
            "at the samples that metrics.jsonl names"
        )

    def run(self) -> int:
        """Train to the end or to a stop signal. Returns the signal's number, 0 at the end."""
        self.meter = throughput.Meter(self.model.config, self.options, self.device)
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(StopRequested())
            record = bar = None
            if self.rank == 0:
                record = stack.enter_context(Record(self.output, self.step))
                bar = stack.enter_context(terminal.progress(self.total_steps, "step", "training", self.step))
            if self.held_out and self.baselines is None and not self._take_baselines(stop, record):
                self._save()
                return stop.signal or signal.SIGTERM
            while self.epoch < self.options.epochs:
                if self._epoch(stop, record, bar):
                    self._save()
                    return stop.signal or signal.SIGTERM
                if self.held_out:
                    report = self.evaluate(self.model, stop)
                    if report is None:
                        self._save()
                        return stop.signal or signal.SIGTERM
                    self.last_report = report
                    self._keep_best(report)
                    if record:
                        record.add("held_out", self.step, {"epoch": self.epoch + 1} | report)
                self.epoch, self.step_in_epoch = self.epoch + 1, 0
                if not self.guard.in_a_row or self.epoch == self.options.epochs:
                    self._save()
        return 0

    def _epoch(self, stop: StopRequested, record: Record | None, bar: tqdm | None) -> bool:
        """The rest of the current epoch. Returns whether a stop was asked for; `record` and `bar` are rank 0's."""
        packs = self._packs(self.epoch)
        count = packing.steps_per_epoch(len(packs), self.world, self.options.accumulation)
        jobs = [
            packing.step_packs(packs, step, self.rank, self.world, self.options.accumulation)
            for step in range(self.step_in_epoch, count)
        ]
        due = False  # a checkpoint; never amid bad steps, where the weights may be what is bad
        with self._reader(jobs, self.options.supervision) as steps:
            for step in steps:
                if self._train(step, packs, stop.signal, record, bar):
                    return True
                due = due or self.step % self.save_every == 0
                if due and not self.guard.in_a_row and self.step_in_epoch < count:
                    self._save()
                    due = False
        return False

    def _train(
        self, step: reading.Step, packs: list[list[dict]], stop: int, record: Record | None, bar: tqdm | None
    ) -> bool:
        """One optimizer step of the epoch's `packs`, recorded. Returns whether a rank was asked to stop."""
        started = time.monotonic()
        rate = self.schedule.get_last_lr()[0]
        loss, outcome, suspects, asked = self._optimizer_step(step.batches, stop)
        speed = self.meter.add(step, started)
        first = self.step_in_epoch * self.world * self.options.accumulation  # pack of all ranks
        self.step += 1
        self.step_in_epoch += 1
        if outcome.fault:
            places = suspects or range(self.world * self.options.accumulation)
            self._skipped(outcome, [pack for place in places for pack in packs[first + place :][:1]], record)
        else:
            self.good_checkpoint = self.checkpoint
        if record and not outcome.fault:
            values = {
                "epoch": self.epoch,
                "loss_by_step": [round(value, 5) for value in loss.tolist()],
                "learning_rate": rate,
                "gradient_norm": outcome.gradient_norm,
            }
            record.add("train", self.step, values | speed)
        if bar is not None:
            bar.update(1)
            bar.set_postfix(throughput.shown(float(loss[0]), self.last_report, speed))
        return bool(asked)

    def _take_baselines(self, stop: StopRequested, record: Record | None) -> bool:
        """Figures of the draft before its first step and of one that says one token; False if a stop was asked for."""
        untrained = self.evaluate(self.model, stop)
        if untrained is None:
            return False
        places, steps = self.target_to_draft.cpu(), self.options.ttt_steps
        constant = baselines.most_frequent_token(self.hidden_states, self.held_out, places, steps)
        self.baselines = {"untrained": untrained, "most_frequent_token": constant}
        if record:
            for name, report in self.baselines.items():
                record.add(name, 0, report)
        return True

    @torch.no_grad()
    def evaluate(self, model: DraftModel, stop: StopRequested | None = None) -> dict[str, Any] | None:
        """Loss, accuracy and walk tau of `model` on the held-out conversations, always with served supervision.

        None when a rank was asked to stop before the end.
        """
        sums = Acceptance(self.options.ttt_steps)
        stopped = 0.0
        packs = packing.pack(self.held_out, self.options.max_tokens, self.options.max_rows)[self.rank :: self.world]
        if self.normalisers is None:
            self.normalisers = self._normalise(packs)
        with self._reader([[records] for records in packs], "served") as steps:
            for step, normaliser in zip(steps, self.normalisers, strict=True):
                if stop and stop.signal:
                    stopped = 1.0
                    break
                batch = step.batches[0].to(self.device, model.fc.weight.dtype)
                teacher = self._teacher(batch, normaliser.to(self.device))
                measure(model(batch, teacher), batch, self.target_to_draft, sums)
        vector = torch.cat([sums.tensor(), torch.tensor([stopped], dtype=torch.float64)]).to(self.device)
        if self.world > 1:
            dist.all_reduce(vector)
        if vector[-1]:
            return None
        return Acceptance.of(vector[:-1].cpu(), self.options.ttt_steps).report()

    # ---------------------------------------------------------------------------------------- checkpoints

    def _keep_best(self, report: dict[str, Any]) -> None:
        """Keep the weights just evaluated if no earlier ones had a higher tau; of equal ones the later are kept."""
        sound = all(map(math.isfinite, report["loss_by_step"]))
        if sound and (self.best is None or report["tau"] >= self.best["report"]["tau"]):
            self.best = {"epoch": self.epoch + 1, "step": self.step, "report": report}
            if self.rank == 0:
                best.write(self.best_file, self.model, self.best)

    def _save(self) -> None:
        """Write a checkpoint; the one before it stays too."""
        state = {"step": self.step, "epoch": self.epoch, "step_in_epoch": self.step_in_epoch}
        state |= {
            "world": self.world,
            "packs_a_step": self.packs_a_step,
            "last_report": self.last_report,
            "total_steps": self.total_steps,
            "guard": self.guard.state(),
        }
        state["baselines"] = self.baselines
        # the end of an epoch is told from its last step, for a checkpoint in use is never written over
        tag = f"step{self.step:08d}" + ("" if self.step_in_epoch else f"-epoch{self.epoch}")
        if tag == self.checkpoint:  # stopped before anything was done
            return
        checkpoints.write(self.engine, self.output / "checkpoints", tag, state, self.checkpoint)
        self.checkpoint = tag

    def resume(self) -> bool:
        """Continue from the latest checkpoint of the output directory; False when there is none."""
        loaded = checkpoints.load(self.engine, self.output / "checkpoints")
        if loaded is None:
            return False
        self.checkpoint, state = loaded
        self.step, self.epoch, self.step_in_epoch = state["step"], state["epoch"], state["step_in_epoch"]
        self.last_report, self.baselines = state["last_report"], state["baselines"]
        self.guard.restore(state["guard"])
        self.best = best.read(self.best_file)
        if other := (state["world"], state["packs_a_step"]) != (self.world, self.packs_a_step):
            self._continue_others(state["world"], state["packs_a_step"])
        self.ahead = self.step - sum(self.per_epoch[: self.epoch]) - self.step_in_epoch
        self.total_steps += self.ahead
        if other:
            self.schedule.last_epoch = self.step - 1
            self.schedule.step()  # the rate of the next step, by the new plan
        elif self.rank == 0 and state["total_steps"] != self.total_steps:
            terminal.warn(
                f"the run had {state['total_steps']} steps, now it has {self.total_steps}: "
                "the learning rate follows the new plan"
            )
        return True

    def _continue_others(self, world: int, packs_a_step: int) -> None:
        """Find the place in the epoch that `world` ranks have come to, in steps of the present ranks.

        It is rounded down, so that no pack is left out.
        """
        packs, again = len(self._packs(self.epoch)), 0
        done = min(self.step_in_epoch * packs_a_step, packs)
        if done == packs:
            self.step_in_epoch = packing.steps_per_epoch(packs, self.world, self.options.accumulation)
        else:
            self.step_in_epoch, again = divmod(done, self.packs_a_step)
        if self.rank == 0:
            terminal.warn(
                f"the checkpoint is of {world} ranks and {packs_a_step} packs a step, now it is {self.world} and "
                f"{self.packs_a_step}: weights and optimizer state are exactly the saved ones, the learning rate goes "
                f"on from the same place in the data, {again} packs of this epoch come a second time"
            )
