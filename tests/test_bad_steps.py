"""Bad optimizer steps: left out exactly, on all ranks alike, counted, named, and too many in a row end the run."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import REPOSITORY
from interruptions_for_tests import stage_04
from safetensors.torch import load_file
from states_for_tests import write_states

from eagle3 import artifacts
from eagle3.training import guard

FLAGS = ["--ttt-steps", 2, "--max-tokens", 64, "--val-fraction", 0.1, "--save-every", 2]


def run(command: list[object]) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=120)


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def states(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("states")
    write_states(directory, tiny_target)
    return directory


# ------------------------------------------------------------------------------------------ what a bad step is


class Engine:
    """As much of DeepSpeed's engine as the guard uses, around a real AdamW, without ZeRO."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.optimizer = torch.optim.AdamW([weight], lr=0.1)
        self.guard = guard.StepGuard(self, self.optimizer, SimpleNamespace(step=lambda: None))
        self.weight = weight

    def step(self) -> None:
        self.optimizer.step()

    def was_step_applied(self) -> bool:
        return True

    def take(self, norm: float, loss: float = 1.0, supervised: bool = True) -> tuple[str | None, bool]:
        """One step; the fault, and whether the weight moved."""
        before = self.weight.detach().clone()
        self.weight.grad = torch.tensor([norm])
        fault = self.guard.step(torch.tensor([0.5, loss]), supervised).fault
        assert self.weight.grad is not None
        return fault, not torch.equal(before, self.weight)


@pytest.fixture
def engine() -> Engine:
    return Engine(torch.nn.Parameter(torch.ones(1)))


def test_a_norm_is_judged_by_the_median_of_the_good_ones(engine: Engine) -> None:
    for norm in [1e6, *[1.0] * (guard.FEWEST - 1)]:  # the median is not trusted before
        assert engine.take(norm) == (None, True)
    assert engine.take(guard.FACTOR * 0.99) == (None, True)
    assert engine.take(guard.FACTOR * 1.01) == ("its gradient norm 20.2 is above 20 times the median 1", False)
    assert (engine.guard.skipped, engine.guard.in_a_row) == (1, 1)
    for _ in range(guard.WINDOW):  # would become the median if bad steps entered it
        assert engine.take(1e3)[1] is False
    assert engine.guard.in_a_row == guard.WINDOW + 1
    for _ in range(guard.WINDOW):
        assert engine.take(5.0) == (None, True)
    assert engine.take(guard.FACTOR * 4.0) == (None, True)  # the median is of the last ones
    assert (engine.guard.skipped, engine.guard.in_a_row) == (guard.WINDOW + 1, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_bad_from_the_first_step(engine: Engine, value: float) -> None:
    """T23: nothing of it reaches the optimizer."""
    assert engine.take(1.0, loss=value) == ("its loss is not finite", False)
    assert engine.take(value) == ("its gradient is not finite", False)
    assert not engine.optimizer.state[engine.weight]  # no moment, no count of steps
    assert engine.take(1.0) == (None, True)


def test_steps_without_a_supervised_row_do_not_lower_the_median(engine: Engine) -> None:
    """T26: they are left out, for momentum would move the weights."""
    for _ in range(guard.FEWEST):
        assert engine.take(1.0) == (None, True)
        assert engine.take(0.0, loss=0.0, supervised=False) == ("none of its rows is supervised", False)
    assert (engine.guard.skipped, engine.guard.in_a_row) == (guard.FEWEST, 0)  # no sign of trouble
    assert engine.take(guard.FACTOR * 0.99)[0] is None


def test_a_checkpoint_keeps_what_the_guard_knows(engine: Engine) -> None:
    for norm in (*[1.0] * guard.FEWEST, 50.0):
        engine.take(norm)
    other = Engine(torch.nn.Parameter(torch.ones(1)))
    other.guard.restore(json.loads(json.dumps(engine.guard.state())))
    assert (other.guard.skipped, other.guard.in_a_row) == (1, 1)
    assert other.take(50.0)[1] is False


# ------------------------------------------------------------------------------------------ under DeepSpeed


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bad_step_is_as_if_its_batch_had_never_been(ranks: int, tiny_target: Path, states: Path) -> None:
    """T23. Weights, masters, moments and learning rate are bit by bit those of an engine that never saw the batch."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks > 1 else []
    result = run([sys.executable, *launcher, REPOSITORY / "tests" / "bad_steps_for_tests.py", tiny_target, states])
    assert result.returncode == 0, result.stderr
    everyone = json.loads(result.stdout.splitlines()[-1])
    assert len(everyone) == ranks and all(one == everyone[0] for one in everyone)  # one verdict
    for case, outcome in everyone[0].items():
        kind = case.split()[-1]
        wanted = "its loss is not finite" if kind == "loss" else "its gradient norm 0."
        assert outcome["fault"].startswith(wanted), case
        assert outcome["suspects"] == ([ranks - 1] if kind == "loss" else []), case  # a pack of the last rank
        assert outcome["untouched"] and outcome["equal"] and outcome["moved"], case
        assert outcome["counts"] == [1, 1] and outcome["in_a_row_after_a_good_step"] == 0, case


DAMAGED = """
import itertools, runpy, sys, torch
from eagle3.training import reading
load, count = reading.load_sample, itertools.count(1)
def damaged(directory, record, config):
    sample, number = load(directory, record, config), next(count)
    if {when}:
        sample["aux_hidden"] = torch.full_like(sample["aux_hidden"], torch.nan)
    return sample
reading.load_sample, reading.THREADS = damaged, 1  # samples are read in order
sys.argv[0] = sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_damaged(command: list[object], program: Path, when: str) -> subprocess.CompletedProcess:
    """Stage 04 with the states of a sample overwritten as it is read, `when` being a condition on that."""
    program.write_text(DAMAGED.format(when=when))
    return run([command[0], program, *command[1:]])


@pytest.mark.slow
def test_a_bad_sample_is_named_and_the_run_goes_on(tiny_target: Path, states: Path, tmp_path: Path) -> None:
    output = tmp_path / "draft"
    command = stage_04(tiny_target, states, output, *FLAGS, "--epochs", 3, "--accumulation", 3)
    result = run_damaged(command, tmp_path / "program.py", 'record["index"] == 5')
    assert result.returncode == 0, result.stderr
    lines = metrics(output)
    skipped = [line for line in lines if line["kind"] == "skipped"]
    assert [line["skipped"] for line in skipped] == [1, 2, 3] and [line["epoch"] for line in skipped] == [0, 1, 2]
    for line in skipped:
        assert line["samples"] == [5] and line["samples_in_all"] == 1  # of three packs
        assert line["fault"] == "its loss is not finite"
        assert f"warning: step {line['step']} is skipped: its loss is not finite; samples 5\n" in result.stderr
    trained = {line["step"] for line in lines if line["kind"] == "train"}
    steps = artifacts.read_manifest(output, "04")["steps"]
    assert len(trained) + 3 == steps and not trained & {line["step"] for line in skipped}
    assert f"{steps}, 3 of them skipped" in result.stdout
    assert artifacts.read_manifest(output, "04")["skipped_steps"] == 3
    weights = load_file(output / "export" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values() if tensor.is_floating_point())


@pytest.mark.slow
def test_bad_steps_in_a_row_end_the_run_and_leave_the_last_good_checkpoint(
    tiny_target: Path, states: Path, tmp_path: Path
) -> None:
    """None is written amid them, nor at an epoch's end; one that no good step followed may be the cause of them."""
    output = tmp_path / "draft"
    command = stage_04(tiny_target, states, output, *FLAGS, "--epochs", 2)  # 11 packs of one sample
    # the held-out one is read twice before
    result = run_damaged(command, tmp_path / "program.py", "number == 3 or number > 6")
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "10 steps in a row were skipped up to step 14 (its loss is not finite; samples " in error
    assert f"the last good checkpoint is {output}/checkpoints/step00000002; try a lower --learning-rate (now" in error
    folder = output / "checkpoints"
    assert sorted(path.name for path in folder.glob("step*")) == ["step00000002", "step00000004"]
    assert (folder / "latest").read_text() == "step00000004"
    again = run(command)  # of sound states
    assert again.returncode == 0 and "continuing after step 4 of 22" in again.stdout
    assert "22, 1 of them skipped" in again.stdout  # the first, which the checkpoint knows of
