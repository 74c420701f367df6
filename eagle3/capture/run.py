"""One pass over samples: feed the engine, keep the index, retry what fails, stop before the disk is full."""

import shutil
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3 import artifacts, terminal
from eagle3.artifacts import Index
from eagle3.capture.interface import Engine, EngineDied, EngineSettings, Fault, Sample, Written
from eagle3.terminal import UserError

CARRIED_FIELDS = ("tokens", "supervised", "source", "dataset", "conversation")  # of stage 01's records
KILLED = "engine died"  # reason of a sample that an engine died of twice; not tried again by itself
FLOAT16_MAX = 65504.0


@dataclass(frozen=True)
class Limits:
    """Where a run stops by itself."""

    max_failed: float = 0.1  # share of the samples attempted; more means that the engine, not a sample, is at fault
    disk_bytes: int | None = None  # of the shard's sample files; None for what the disk holds


DEFAULT_LIMITS = Limits()


def readable(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


class Run:
    """The unfinished samples and what has become of them; it outlives an engine that dies."""

    def __init__(
        self, prepared_dir: Path, todo: list[dict[str, Any]], used: int, settings: EngineSettings, limits: Limits
    ) -> None:
        """`used`: bytes of the sample files that are there already."""
        self._prepared_dir = prepared_dir
        self._settings = settings
        self._limits = limits
        self._queue = deque(todo)
        self._tokens = sum(record["tokens"] for record in todo)
        self._engine_has: dict[int, Sample] = {}  # by index
        self._suspects: deque[dict[str, Any]] = deque()  # were in an engine that died; each goes alone
        self._were_in: set[int] = set()  # samples that were in an engine that died
        self._tried: set[int] = set()  # samples that failed once
        self._used = used
        self._expected = 0  # bytes of the files that the engine is about to write
        self._failed: Counter = Counter()
        self.settled = 0  # samples
        self.tokens = 0  # of these
        self.largest = 0.0  # magnitude of all states

    @property
    def left(self) -> int:
        """Samples that a limit left undone."""
        return len(self._queue) + len(self._suspects)

    def over(self, engine: Engine) -> None:
        """Settle the samples with `engine`. Raises EngineDied, after which another engine may go on; UserError."""
        with ExitStack() as stack:
            self._bar = stack.enter_context(terminal.progress(self._tokens, "tok", "capture", done=self.tokens))
            index = Index(self._settings.output_dir, self._settings.shard)
            self._index = stack.enter_context(index.appending())
            try:
                while self.has_room():  # again when the last ones failed and are to be retried
                    self._feed(engine, self._draw(self._suspects or self._queue, alone=bool(self._suspects)))
            except EngineDied as error:
                if cause := self._engine_died():
                    raise EngineDied(f"{error}; sample {cause} ended it twice and is left out from now on") from error
                raise
        if self._too_many_failed():
            self._give_up()
        if self.left and not self._limit_reached():
            self._disk_full()

    def has_room(self) -> bool:
        """Whether a sample is left and may be written."""
        return self.left > 0 and not self._no_room_for((self._suspects or self._queue)[0])

    def _feed(self, engine: Engine, samples: Iterator[Sample]) -> None:
        for sample, outcome in engine.capture(samples):
            del self._engine_has[sample.index]
            self._expected -= self._bytes(sample.record)
            self._settle(sample, outcome)

    def _draw(self, queue: deque[dict[str, Any]], *, alone: bool = False) -> Iterator[Sample]:
        """Drawn by the engine as it has room: only samples in flight are in memory."""
        while queue and not self._no_room_for(queue[0]):
            sample = load(self._prepared_dir, queue.popleft(), self._settings.target.vocab_size)
            self._engine_has[sample.index] = sample
            self._expected += self._bytes(sample.record)
            # a damaged file, or one of a killed run that did not get to say so: it takes room, and no one may read it
            artifacts.sample_path(self._settings.output_dir, sample.index).unlink(missing_ok=True)
            yield sample
            if alone:
                return

    def _bytes(self, record: dict[str, Any]) -> int:
        return self._settings.layout.sample_bytes(record["tokens"], record["supervised"])

    def _no_room_for(self, record: dict[str, Any]) -> bool:
        """Whether a limit or the disk leaves no room for one more sample beside those in the engine."""
        needed = self._expected + self._bytes(record)
        limit = self._limits.disk_bytes
        disk = shutil.disk_usage(self._settings.output_dir)
        return (limit is not None and self._used + needed > limit) or needed + reserve(disk) > disk.free

    def _limit_reached(self) -> bool:
        """Tells a limit that was asked for from a full disk, which is a fault."""
        limit = self._limits.disk_bytes
        return limit is not None and self._used + self._bytes((self._suspects or self._queue)[0]) > limit

    def _disk_full(self) -> None:
        disk = shutil.disk_usage(self._settings.output_dir)
        rest = sum(map(self._bytes, [*self._suspects, *self._queue]))
        raise UserError(
            f"the disk is nearly full: {self._settings.output_dir} has {readable(disk.free)} free, {self.left} samples "
            f"are left and need {readable(rest)}; free space, then the same command continues"
        )

    def _settle(self, sample: Sample, outcome: Written | Fault) -> None:
        """Put the outcome into the index; a first failure goes back into the queue."""
        kept = {field: sample.record.get(field) for field in CARRIED_FIELDS}
        if isinstance(outcome, Written):
            self._used += outcome.bytes
            self._note_size(sample, outcome.largest)
            self._index.add(index=sample.index, **kept, ids=sample.digest, bytes=outcome.bytes, status="done")
        elif sample.index not in self._tried:
            self._tried.add(sample.index)
            self._queue.append(sample.record)
            return
        else:
            self._fail(sample, outcome)
        self.settled += 1
        self.tokens += sample.record["tokens"]
        self._bar.update(sample.record["tokens"])
        if self.settled >= 20 and self._too_many_failed():
            self._give_up()

    def _fail(self, sample: Sample, fault: Fault) -> None:
        kept = {field: sample.record.get(field) for field in CARRIED_FIELDS}
        self._failed[fault.reason] += 1
        self._index.add(index=sample.index, **kept, status="failed", reason=fault.reason, detail=fault.detail)
        terminal.warn(f"sample {sample.index} skipped after two tries: {fault.reason} ({fault.detail})")

    def _note_size(self, sample: Sample, largest: float) -> None:
        if largest > FLOAT16_MAX >= self.largest:
            terminal.warn(
                f"sample {sample.index} has states up to {largest:.3g}, more than float16 holds; they are stored as "
                f"{self._settings.layout.aux}, which keeps them"
            )
        self.largest = max(self.largest, largest)

    def _engine_died(self) -> str:
        """The samples that were in the engine go next, each alone. Returns the one that was alone at a second death."""
        suspects, self._engine_has, self._expected = list(self._engine_has.values()), {}, 0
        if len(suspects) == 1 and suspects[0].index in self._were_in:
            self._fail(suspects[0], Fault(KILLED, "twice, the second time alone with this sample"))
            return str(suspects[0].index)
        self._were_in.update(sample.index for sample in suspects)
        self._suspects.extendleft(sample.record for sample in reversed(suspects))
        return ""

    def suspects(self) -> str:
        """The samples that were in an engine that died, in words."""
        numbers = [str(record["index"]) for record in self._suspects]
        return ", ".join(numbers[:8]) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")

    def _too_many_failed(self) -> bool:
        return sum(self._failed.values()) > self._limits.max_failed * self.settled

    def _give_up(self) -> None:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self._failed.most_common())
        raise UserError(
            f"{sum(self._failed.values())} of {self.settled} samples failed ({reasons}), more than "
            f"{self._limits.max_failed:.0%}; see {self._settings.log} and "
            f"{self._settings.shard.named('index.jsonl')}; the same command tries them again"
        )


def reserve(disk: Any) -> int:
    """Bytes of a file system (shutil.disk_usage) that are left alone, so that index, manifest and log find room."""
    return min(1 << 30, disk.total // 100)


def load(prepared_dir: Path, record: dict[str, Any], vocab_size: int) -> Sample:
    """Read one prepared sample. Raises UserError when it is damaged."""
    tensors = artifacts.load_sample(prepared_dir, "01", record, vocab_size)
    return Sample(record, tensors["input_ids"].clone(), tensors["loss_mask"].clone())
