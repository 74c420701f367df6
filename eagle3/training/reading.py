"""Micro-batches from the files of stage 02, read by threads ahead of the training step within a budget of bytes."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from threading import Lock
from types import TracebackType

import torch

from eagle3 import artifacts
from eagle3.draft.config import DraftConfig
from eagle3.draft.model import Batch
from eagle3.terminal import UserError
from eagle3.training.supervision import empty_batch, load_sample, make_batch

THREADS = 4  # of a rank
AHEAD = 1 << 30  # bytes of samples that are being read or wait, of a rank; one micro-batch may be larger

Pack = list[dict]  # index records of a micro-batch


@dataclass(frozen=True)
class Source:
    """Where samples are read and what batches are made for."""

    directory: Path  # stage 02's
    config: DraftConfig
    steps: int  # of training-time test
    device: torch.device  # batches for a GPU are pinned

    def batch(self, records: Pack, supervision: str) -> Batch:
        """Read one micro-batch now; of no record, or none with a draft start, the empty one."""
        making = _Making(self, records, supervision)
        for place in range(len(records)):
            making.read(place)
        return making.batch()


@dataclass(frozen=True)
class Step:
    """What one rank reads for an optimizer step."""

    batches: list[Batch]
    tokens: int
    bytes: int  # of files
    waited: float  # seconds until the batches were there


class Reader:
    """Iterates over the optimizer steps of one rank; a context manager, so that no thread outlives the block.

    Samples are read by THREADS threads in the order in which they are needed. What is read but not yet handed out
    never exceeds AHEAD bytes, however slow the training is; only the step that is handed out comes on top. An exception
    of a thread is raised where its micro-batch would have come.
    """

    def __init__(self, source: Source, steps: list[list[Pack]], supervision: str) -> None:
        """`steps`: of each the packs of its micro-batches."""
        self._source, self._steps, self._supervision = source, steps, supervision
        self._coming = (pack for step in steps for pack in step)
        self._next = next(self._coming, None)
        self._read: deque[tuple[int, Future[Batch]]] = deque()  # bytes; in order, being read or ready
        self._ahead = 0  # their bytes

    def __enter__(self) -> "Reader":
        self._threads = ThreadPoolExecutor(THREADS, "reader", _start_thread, (self._source.device,))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._threads.shutdown(cancel_futures=True)  # waits for the samples that are being read

    def __iter__(self) -> Iterator[Step]:
        for packs in self._steps:
            started = time.monotonic()
            batches = []
            for _ in packs:
                self._submit()
                size, batch = self._read.popleft()
                batches.append(batch.result())
                self._ahead -= size
            self._submit()
            records = [record for pack in packs for record in pack]
            tokens, size = (sum(record[field] for record in records) for field in ("tokens", "bytes"))
            yield Step(batches, tokens, size, time.monotonic() - started)

    def _submit(self) -> None:
        """Have the next packs read, as many as the budget takes, at least one."""
        while self._next is not None:
            size = sum(record["bytes"] for record in self._next)
            if self._read and self._ahead + size > AHEAD:
                return
            making = _Making(self._source, self._next, self._supervision)
            samples = [self._threads.submit(making.read, place) for place in range(len(self._next))]
            # Tasks begin in this order: when a thread comes to the last one, others have begun all it waits for
            self._read.append((size, self._threads.submit(making.batch, samples)))
            self._ahead += size
            self._next = next(self._coming, None)


def _start_thread(device: torch.device) -> None:
    torch.set_num_threads(1)  # of this thread's operations: the pool is what runs at once
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else memory is pinned by way of the first GPU, which takes some of its memory


class _Making:
    """A micro-batch in the making: each sample's states are copied from the mapped file to their place among all."""

    def __init__(self, source: Source, records: Pack, supervision: str) -> None:
        self._source, self._records, self._supervision = source, records, supervision
        self._ends = {
            field: list(accumulate(record[field] for record in records)) for field in ("tokens", "supervised")
        }
        self._samples: list[dict[str, torch.Tensor]] = [{}] * len(records)  # without states
        self._states: dict[str, torch.Tensor] = {}  # of all samples, stage 02's names
        self._lock = Lock()

    def read(self, place: int) -> None:
        """Read one sample. Raises UserError naming its file where it is damaged; other errors name it in a note."""
        record = self._records[place]
        path = artifacts.sample_path(self._source.directory, record["index"])
        try:
            sample = load_sample(self._source.directory, record, self._source.config)
            for name in sorted(sample.keys() & {"aux_hidden", "aux_scale", "final_hidden", "final_scale"}):
                self._put(name, sample.pop(name), place, path)
        except Exception as error:
            error.add_note(f"while sample {record['index']} was read from {path}")
            if isinstance(error, OSError):
                error.filename = error.filename or str(path)
            raise
        ids, mask = sample["input_ids"], sample["loss_mask"]
        nothing = {"aux_hidden": torch.empty(len(ids), 0), "final_hidden": torch.empty(int(mask.sum()), 0)}
        self._samples[place] = {"input_ids": ids, "loss_mask": mask} | nothing

    def _put(self, name: str, states: torch.Tensor, place: int, path: Path) -> None:
        """states [n, ...] into rows of the tensor for all samples, which the first one read makes room for."""
        field = "tokens" if name.startswith("aux") else "supervised"
        end = self._ends[field][place]
        with self._lock:
            if name not in self._states:
                shape = self._ends[field][-1], *states.shape[1:]
                pinned = self._source.device.type == "cuda"
                self._states[name] = torch.empty(shape, dtype=states.dtype, pin_memory=pinned)
            everyone = self._states[name]
        if states.dtype != everyone.dtype:
            raise UserError(
                f"{path} is damaged: {name} is {states.dtype}, in other samples {everyone.dtype}; delete it and rerun "
                "stage 02"
            )
        everyone[end - len(states) : end].copy_(states)

    def batch(self, samples: list[Future[None]] = ()) -> Batch:
        """The batch, once `samples` are read."""
        for sample in samples:
            sample.result()
        batch = make_batch(self._samples, self._source.steps, self._supervision) if self._samples else None
        if batch is None or batch.rows.numel() == 0:
            return empty_batch(self._source.config, self._source.steps)
        batch = replace(batch, **self._states)
        if self._source.device.type != "cuda":
            return batch
        tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        return replace(batch, **{name: tensor.pin_memory() for name, tensor in tensors.items()})  # as it is, if pinned
