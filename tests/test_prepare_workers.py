"""Stage 01 with several processes: the same files as with one, no hangs, and an end when a process dies."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY
from prepare_for_tests import prepare_here

from eagle3 import engine_guard
from eagle3.artifacts import Index
from eagle3.prepare import workers
from eagle3.prepare.workers import count_for
from eagle3.sources import Datasets
from eagle3.target import load_tokenizer, open_target
from eagle3.terminal import UserError


def write_rows(path: Path, count: int) -> Path:
    """Chats with a duplicate, a broken line and a long answer here and there."""
    rows = []
    for n in range(count):
        said = f"It is {n % 50 if n % 7 == 0 else n}. " * (200 if n % 11 == 0 else 3)
        rows.append({"messages": [{"role": "user", "content": "And?"}, {"role": "assistant", "content": said}]})
    lines = [json.dumps(row) if n % 13 else "{broken" for n, row in enumerate(rows)]
    path.write_text("\n".join(lines))
    return path


def result(directory: Path) -> tuple:
    """All that later stages and people read."""
    tensors = {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*.pt"))}
    return tensors, Index(directory).samples(), (directory / "skipped.jsonl").read_text()


def temporaries(directory: Path) -> list[Path]:
    return list(directory.rglob("*.tmp"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 300)


@pytest.mark.slow
def test_the_output_does_not_depend_on_the_number_of_processes(smollm2, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "ROWS_PER_WORKER", 1)
    prepare_here(smollm2, rows, tmp_path / "one", num_proc=1)
    prepare_here(smollm2, rows, tmp_path / "two", num_proc=2, max_samples=60)
    assert not temporaries(tmp_path / "two") and len(Index(tmp_path / "two").samples()) == 60
    prepare_here(smollm2, rows, tmp_path / "two", num_proc=2)
    assert result(tmp_path / "two") == result(tmp_path / "one") and not temporaries(tmp_path / "two")


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_run_which_then_continues(smollm2, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "ROWS_PER_WORKER", 1)
    real = workers.Workers.outcomes

    def outcomes(self, jobs, wanted):
        for number, outcome in enumerate(real(self, jobs, wanted)):
            if number == 40:
                os.kill(next(iter(self._pool._processes)), signal.SIGKILL)
            yield outcome

    monkeypatch.setattr(workers.Workers, "outcomes", outcomes)
    with pytest.raises(UserError, match=r"a worker process of stage 01 died.*the same command continues"):
        prepare_here(smollm2, rows, tmp_path / "out", num_proc=2)
    assert 0 < len(Index(tmp_path / "out").samples()) < 250 and not temporaries(tmp_path / "out")
    monkeypatch.setattr(workers.Workers, "outcomes", real)
    prepare_here(smollm2, rows, tmp_path / "out", num_proc=1)
    prepare_here(smollm2, rows, tmp_path / "one", num_proc=1)
    assert result(tmp_path / "out") == result(tmp_path / "one")


@pytest.mark.slow
def test_no_process_outlives_a_stage_that_is_killed(smollm2, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 20_000)
    command = [sys.executable, REPOSITORY / "01_prepare_dataset.py", "--model-path", smollm2, "--dataset", path]
    command += ["--output-dir", tmp_path / "out", "--num-proc", 2]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as stage:
        roots = {stage.pid: engine_guard.look(stage.pid)[1]}
        deadline = time.monotonic() + 60
        while not any((tmp_path / "out").glob("samples/*/*.pt")):  # the workers are at work
            assert stage.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        started = engine_guard.family(roots)
        assert len(started) >= 4  # the stage, what workers are forked from, and two workers
        stage.kill()
    while engine_guard.alive(started):
        assert time.monotonic() < deadline, engine_guard.alive(started)
        time.sleep(0.05)


@pytest.mark.slow
def test_the_script_with_workers_and_long_rows(run_script, smollm2, tmp_path):
    """A text of 200,000 characters among them, tokenizer threads asked for: neither hangs (P28)."""
    path = write_rows(tmp_path / "rows.jsonl", 2000)
    long = {"messages": [{"role": "user", "content": "w " * 100_000}, {"role": "assistant", "content": "a"}]}
    path.write_text(path.read_text() + "\n" + json.dumps(long) + "\n")
    command = ["01_prepare_dataset.py", "--model-path", smollm2, "--dataset", path, "--max-seq-len", 512]
    threads = {"TOKENIZERS_PARALLELISM": "true"}
    out = tmp_path / "out"
    result = run_script(*command, "--output-dir", out, "--num-proc", 2, environment=threads, timeout=120)
    assert "no assistant tokens after truncation to 512" in result.stdout and not temporaries(out)


def test_few_rows_and_many_processes(tiny_target, tmp_path):
    """They are as few as the rows (P29)."""
    path = write_rows(tmp_path / "rows.jsonl", 4)
    tokenizer = load_tokenizer(open_target(str(tiny_target)), trust_remote_code=False)
    for number in range(20):
        prepare_here(tiny_target, path, tmp_path / f"{number}", tokenizer=tokenizer, num_proc=8)
        assert len(Index(tmp_path / f"{number}").samples()) == 3


def test_no_more_processes_than_can_be_kept_busy():
    cores = len(os.sched_getaffinity(0))
    assert [count_for(8, rows) for rows in (0, 3, 999, 2000, 50_000)] == [1, 1, 1, 2, 8]
    assert count_for(None, 50_000_000) == count_for(None, None) == cores and count_for(3, None) == 3


def test_no_more_rows_are_read_than_samples_are_wanted(tiny_target, rows, tmp_path, monkeypatch):
    """What a run of ten samples fetches from a large dataset (P33)."""
    read = []
    real = Datasets.rows

    def counted(self, spool):
        for row in real(self, spool):
            read.append(row)
            yield row

    monkeypatch.setattr(Datasets, "rows", counted)
    totals = prepare_here(tiny_target, rows, tmp_path / "out", max_samples=10)
    assert totals.samples == 10 and len(read) == 10 + totals.skipped_rows


def test_importing_the_script_does_nothing():
    """Spawned workers import it (P30)."""
    started = time.monotonic()
    names = runpy.run_path(str(REPOSITORY / "01_prepare_dataset.py"), run_name="x")
    assert "main" in names and time.monotonic() - started < 5
