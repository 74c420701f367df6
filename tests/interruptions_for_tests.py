"""Stages as processes that are sent signals, and what their results are compared by."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from conftest import REPOSITORY
from prepare_for_tests import prepare_here
from safetensors.torch import load_file

from eagle3 import artifacts, engine_guard
from eagle3.artifacts import Index

CONVERSATIONS = REPOSITORY / "configs" / "conversations" / "smollm2.jsonl"
EXIT_CODES = {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


class Stage:
    """A running command in a session of its own, as a terminal gives it. Output goes to `log`."""

    def __init__(self, command: list[object], log: Path, cwd: Path | None = None, **environment: str) -> None:
        settings = os.environ | {"OMP_NUM_THREADS": "1", "EAGLE3_PYTHON": sys.executable} | environment
        with open(log, "ab") as sink:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdout=sink,
                stderr=sink,
                env=settings,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=heed_signals,
            )
        self.log = log

    def wait_for(self, event: Callable[[], object], seconds: float = 120) -> None:
        """Until `event()` is true; the process must not end before."""
        deadline = time.monotonic() + seconds
        while not event():
            assert self.process.poll() is None, f"ended before the event\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"no event\n{self.log.read_text()}"
            time.sleep(0.01)

    def family(self) -> engine_guard.Processes:
        """The process and its descendants, but not the watcher."""
        seen = engine_guard.look(self.process.pid)
        return engine_guard.family({self.process.pid: seen[1]}) if seen else {}

    def stop(self, number: int, group: bool = False, alone: bool = False) -> int:
        """Send the signal, to the process group where a terminal would. Returns the exit code, negative for a signal;
        no process that descended from it may be left after 15 s, unless the process goes `alone`."""
        family = self.family()
        (os.killpg if group else os.kill)(self.process.pid, number)
        code = self.process.wait(60)
        if alone:
            return code
        deadline = time.monotonic() + 15
        while (left := engine_guard.alive(family)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"left after signal {number}: {left}\n{self.log.read_text()}"
        return code


def heed_signals() -> None:
    """Undo what nohup or a background job of a shell has switched off for its children."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def write_prepared(directory: Path, model: Path, conversations: Path = CONVERSATIONS) -> Path:
    """Stage 01 in this process."""
    prepare_here(model, conversations, directory, max_seq_len=128)
    return directory


def stage_01(model: Path, dataset: Path, out: Path) -> list[object]:
    flags = ["--model-path", model, "--dataset", dataset, "--output-dir", out, "--max-seq-len", 128]
    return [sys.executable, REPOSITORY / "01_prepare_dataset.py", *flags]


def stage_02(model: Path, prepared: Path, out: Path, engine: str) -> list[object]:
    flags = ["--model-path", model, "--prepared-dir", prepared, "--output-dir", out, "--engine", engine]
    return [sys.executable, REPOSITORY / "02_extract_hidden_states.py", *flags, "--dtype", "float32"]


def stage_03(prepared: Path, out: Path) -> list[object]:
    flags = ["--prepared-dir", prepared, "--output-dir", out, "--draft-vocab-size", 400]
    return [sys.executable, REPOSITORY / "03_build_vocab_map.py", *flags]


def stage_04(model: Path, states: Path, out: Path, *flags: object, ranks: int = 1) -> list[object]:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    paths = ["--hidden-states-dir", states / "hidden_states", "--vocab-map-dir", states / "vocab_map"]
    return [*launcher, REPOSITORY / "04_train_draft.py", "--model-path", model, *paths, "--output-dir", out, *flags]


def assert_same_samples(one: Path, other: Path, tolerance: float = 0.0) -> None:
    """Ids, masks and order identical, states within `tolerance` of their size; no temporary file left in `other`."""
    a, b = (Index(directory).samples() for directory in (one, other))
    drop = {"bytes"} if tolerance else set()
    assert list(a) == list(b)
    for index in a:
        assert {k: v for k, v in a[index].items() if k not in drop} == {
            k: v for k, v in b[index].items() if k not in drop
        }
        x, y = (artifacts.load_tensors(artifacts.sample_path(directory, index)) for directory in (one, other))
        assert x.keys() == y.keys()
        for name in x:
            if tolerance and x[name].is_floating_point():
                assert x[name].shape == y[name].shape
                assert float((x[name].float() - y[name].float()).norm()) <= tolerance * float(x[name].float().norm())
            else:
                assert torch.equal(x[name], y[name]), f"{name} of sample {index}"
    assert_nothing_left(other)


def assert_nothing_left(directory: Path) -> None:
    left = [path for path in directory.rglob(".*") if not path.name.endswith(".lock")]
    left += [path for path in directory.rglob("*.tmp")]
    assert not left


def largest_difference(one: Path, other: Path) -> float:
    """Largest difference of any float weight of two exports."""
    a, b = (load_file(directory / "export" / "model.safetensors") for directory in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a if a[name].is_floating_point())
