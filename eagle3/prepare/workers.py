"""Rows to outcomes, in order, by one process or several; the outcomes do not depend on how many there are."""

import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import connection
from pathlib import Path
from typing import Any

from eagle3 import terminal
from eagle3.prepare.rows import Job, Outcome, RowProcessor, RowSettings
from eagle3.target import load_tokenizer
from eagle3.terminal import UserError

ROWS_PER_WORKER = 1000  # a worker takes seconds to start, a row milliseconds
BATCH = 32  # rows sent to a worker at once
AHEAD = 4  # batches under way for each worker


class Workers:
    """A pool of processes that have loaded the tokenizer, or this process alone."""

    def __init__(self, settings: RowSettings, tokenizer: Any, count: int) -> None:
        self._count = count
        if count == 1:
            self._own, self._pool = RowProcessor(settings, tokenizer), None
        else:
            # A forked child of a process with threads (tokenizers, torch) may hang: workers are forked from a process
            # that has nothing but imported what they need, once for all of them.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["eagle3.prepare.rows", type(tokenizer).__module__])
            # a class of transformers itself arrives by pickle, without the seconds that AutoTokenizer's import takes
            self._carrier = tempfile.NamedTemporaryFile(prefix="eagle3-tokenizer-")  # noqa: SIM115
            if type(tokenizer).__module__.startswith("transformers."):
                pickle.dump(tokenizer, self._carrier)
            self._carrier.flush()
            self._pool = ProcessPoolExecutor(count, context, _start_worker, (settings, self._carrier.name))

    def outcomes(
        self, jobs: Iterable[tuple[Any, Job]], wanted: Callable[[], int | None]
    ) -> Iterator[tuple[Any, Outcome]]:
        """Yields each job's key and outcome in the order of the jobs.

        `wanted` says how many more samples are of use (None: all): no more rows than that are read ahead.
        """
        pending: deque[tuple[list[Any], list[Outcome] | Future]] = deque()
        batch: list[tuple[Any, Job]] = []
        ahead = AHEAD * self._count if self._pool else 0
        under_way = 0
        for job in jobs:
            batch.append(job)
            under_way += 1
            if len(batch) == BATCH or _enough(wanted(), under_way):
                pending.append(self._submit(batch))
                batch = []
            while pending and (len(pending) > ahead or _enough(wanted(), under_way)):
                keys, result = pending.popleft()
                under_way -= len(keys)
                yield from zip(keys, _result(result), strict=False)  # fewer after a failure
        if batch:
            pending.append(self._submit(batch))
        for keys, result in pending:
            yield from zip(keys, _result(result), strict=False)  # fewer after a failure

    def _submit(self, batch: list[tuple[Any, Job]]) -> tuple[list[Any], list[Outcome] | Future]:
        keys, jobs = [key for key, _ in batch], [job for _, job in batch]
        if self._pool is None:
            return keys, self._own.process(jobs)
        try:
            return keys, self._pool.submit(_process, jobs)
        except BrokenProcessPool as error:
            raise _died() from error

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
            self._carrier.close()


def count_for(asked: int | None, rows: int | None) -> int:
    """Processes for so many rows (None: unknown, taken for many): no more than can be kept busy."""
    available = asked or len(os.sched_getaffinity(0))
    return available if rows is None else max(1, min(available, rows // ROWS_PER_WORKER))


def _enough(wanted: int | None, rows: int) -> bool:
    return wanted is not None and rows >= wanted


def _result(result: list[Outcome] | Future) -> list[Outcome]:
    if not isinstance(result, Future):
        return result
    try:
        return result.result()
    except BrokenProcessPool as error:
        raise _died() from error


def _died() -> UserError:
    return UserError(
        "a worker process of stage 01 died, perhaps killed by the kernel for want of memory (dmesg says so); "
        "the same command continues, with a smaller --num-proc if memory is short"
    )


# ------------------------------------------------------------------------------------ in a worker process


def _start_worker(settings: RowSettings, carrier: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; stage 01 ends its workers itself
    threading.Thread(target=_end_with_stage, daemon=True).start()
    terminal.quiet_libraries()
    import torch

    torch.set_num_threads(1)
    global _settings, _carrier
    _settings, _carrier = settings, Path(carrier)


def _end_with_stage() -> None:
    """End this worker when the process of stage 01 is gone; its own parent is the one it was forked from."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


@cache
def _processor() -> RowProcessor:
    # not while the worker starts: there an error would not reach stage 01
    if carried := _carrier.read_bytes():  # written by the process that started this one
        return RowProcessor(_settings, pickle.loads(carried))
    return RowProcessor(_settings, load_tokenizer(_settings.target, trust_remote_code=_settings.trust_remote_code))


def _process(batch: list[Job]) -> list[Outcome]:
    return _processor().process(batch)
