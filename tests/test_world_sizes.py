"""A run continued by another number of ranks, and the ZeRO stages that are offered."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import pytest
import torch
from conftest import REPOSITORY
from hypothesis import given
from hypothesis import strategies as st
from interruptions_for_tests import largest_difference, stage_04
from worlds_for_tests import CASES

from eagle3 import artifacts
from eagle3.training import loop, packing


def launch(*arguments: object, ranks: int) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}
    command = map(str, [sys.executable, *launcher, *arguments])
    return subprocess.run(list(command), capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture(scope="module")
def results(tiny_target: Path, states: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What worlds_for_tests.py found: saved by `before` ranks and continued by others, "saved 3 ..." being of three."""
    found = {}
    for before, after in ((3, 2), (1, 3)):  # with three the flat vector has padding
        out = tmp_path_factory.mktemp(f"from-{before}")
        for name, ranks in (("saved", before), ("continued", after)):
            program = REPOSITORY / "tests" / "worlds_for_tests.py"
            result = launch(program, tiny_target, states, out, name, ranks=ranks)
            assert result.returncode == 0, result.stderr
            for dtype, zero in CASES:
                one = torch.load(out / f"{name} {dtype} {zero}.pt")
                found[f"{name} {before} {dtype} {zero}"] = one | {"said": result.stderr}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "zero"), CASES)
@pytest.mark.parametrize("before", [3, 1])
def test_another_number_of_ranks_continues_exactly(results: dict[str, dict], before: int, dtype: str, zero: str):
    """Masters, moments and rate are the saved ones bit for bit; with as many packs a step, so are the next weights but
    for the order of sums."""
    saved, continued = (results[f"{name} {before} {dtype} {zero}"] for name in ("saved", "continued"))
    assert continued["found"] and not saved["found"]
    assert saved["checkpoint"]["steps"].tolist() == [2] and float(saved["checkpoint"]["exp_avg"].abs().max()) > 0
    for name, vector in saved["checkpoint"].items():
        assert torch.equal(vector, continued["checkpoint"][name]), name
    assert saved["rate"] == continued["rate"] and saved["rates"] == continued["rates"]
    for name, weight in saved["weights"].items():
        # bf16 weights differ by a rounding of gradients, and Adam divides by their size
        tolerance = 1e-5 if dtype == "float32" else 1e-2
        torch.testing.assert_close(continued["weights"][name], weight, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_zero_0_1_and_2_give_the_same_weights(results: dict[str, dict], ranks: int) -> None:
    first, *others = (results[f"saved {ranks} float32 {zero}"]["weights"] for zero in ("0", "1", "2"))
    for weights in others:
        for name, weight in first.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5)  # the learning rate is 1e-2


# ----------------------------------------------------------------------------------------------- the whole stage

KILLED = """
import itertools, os, runpy, sys
from eagle3.training import loop
step, count = loop.Trainer._optimizer_step, itertools.count(1)
def killed(self, batches, stop):
    if next(count) == 6:
        os.kill(os.getpid(), 9)
    return step(self, batches, stop)
loop.Trainer._optimizer_step = killed
sys.argv[0] = sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FLAGS = ["--ttt-steps", 2, "--max-tokens", 64, "--learning-rate", 1e-2, "--val-fraction", 0.1, "--save-every", 2]


@pytest.mark.slow
def test_killed_with_two_ranks_and_continued_with_one(tiny_target: Path, states: Path, tmp_path: Path) -> None:
    """T15, T18. With twice the micro-batches it becomes the run of two; without, the rates still run to their end."""
    flags = [*FLAGS, "--epochs", 3]
    straight, out, other, again = (tmp_path / name for name in ("straight", "out", "other", "again"))

    def run(output: Path, *more: object, ranks: int, program: tuple = ()) -> subprocess.CompletedProcess:
        return launch(*program, *stage_04(tiny_target, states, output, *flags, *more)[1:], ranks=ranks)

    assert run(straight, ranks=2).returncode == 0
    (tmp_path / "killed.py").write_text(KILLED)
    assert run(out, ranks=2, program=(tmp_path / "killed.py",)).returncode
    assert (out / "checkpoints" / "latest").read_text() == "step00000004"  # 6 steps an epoch, of 11 packs
    shutil.copytree(out, other)
    shutil.copytree(out, again)

    resumed = run(again, ranks=2)
    assert resumed.returncode == 0 and "the checkpoint is of" not in resumed.stderr, resumed.stderr
    assert largest_difference(straight, again) <= 1e-6 and rates(again) == rates(straight)

    same = run(out, "--accumulation", 2, ranks=1)
    assert same.returncode == 0 and "continuing after step 4 of 18" in same.stdout, same.stderr
    assert "the checkpoint is of 2 ranks and 2 packs a step, now it is 1 and 2: weights and optimizer" in same.stderr
    assert "the same place in the data, 0 packs of this epoch come a second time" in same.stderr
    assert largest_difference(straight, out) < 5e-3  # bf16 rounding of weights up to 1
    assert rates(out) == rates(straight)

    half = run(other, ranks=1)
    assert half.returncode == 0 and "continuing after step 4 of 29" in half.stdout, half.stderr  # of 33 8 are done
    assert "2 packs a step, now it is 1 and 1: " in half.stderr
    manifest = artifacts.read_manifest(other, "04")
    assert (manifest["steps"], manifest["ranks"], manifest["complete"]) == (29, 1, True)
    assert rates(other)[5] == pytest.approx(rates(straight)[5], rel=0.05)  # of 8 / 33 and 4 / 18
    assert rates(other)[29] == pytest.approx(1e-3, rel=0.05)  # a tenth
    losses = [line["loss_by_step"][0] for line in lines(other, "train")]
    assert losses[-1] < 0.9 * losses[3]

    latest = again / "checkpoints" / (again / "checkpoints" / "latest").read_text()  # T18
    (latest / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    damaged = run(again, ranks=1)  # which must not take it for a checkpoint of one rank
    (said,) = [line for line in damaged.stderr.splitlines() if line.startswith("error: checkpoint")]
    assert damaged.returncode == 1 and "1 of 2 ranks' files are there, missing zero_pp_rank_1_mp" in said
    assert said.endswith(f"write an earlier one's name into {latest.parent}/latest: step00000016"), said


@pytest.mark.slow
def test_two_nodes_of_a_hostfile(tiny_target: Path, states: Path, tmp_path: Path) -> None:
    """As far as one machine shows it: DeepSpeed's launcher once for each node, without ssh, one rank each."""
    (tmp_path / "hosts").write_text("node-1 slots=1\nnode-2 slots=1\n")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", tmp_path / "hosts", "--no_ssh"]
    launcher += ["--master_addr", "localhost", "--master_port", port]
    stage = stage_04(tiny_target, states, tmp_path / "out", *FLAGS, "--epochs", 1)[1:]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            list(map(str, [*launcher, "--node_rank", node, *stage])), env=environment, stdout=PIPE, text=True
        )
        for node in range(2)
    ]
    said = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "2 ranks on cpu" in said[0] and "draft trained and exported" not in said[1]
    manifest = artifacts.read_manifest(tmp_path / "out", "04")
    assert manifest["complete"] and (manifest["ranks"], manifest["steps"]) == (2, 6)


def lines(output: Path, kind: str) -> list[dict]:
    found = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


def rates(output: Path) -> dict[int, float]:
    return {line["step"]: line["learning_rate"] for line in lines(output, "train")}


@given(
    packs=st.integers(1, 40), before=st.integers(1, 9), after=st.integers(1, 9), share=st.floats(0, 1), rank=st.just(1)
)
def test_no_pack_is_left_out_and_fewer_than_a_step_come_again(packs, before, after, share, rank) -> None:
    steps = packing.steps_per_epoch(packs, before, 1)
    done = round(share * steps)
    one = SimpleNamespace(rank=rank, world=after, packs_a_step=after, epoch=0, step_in_epoch=done)
    one.options, one._packs = SimpleNamespace(accumulation=1), lambda epoch: [[]] * packs
    loop.Trainer._continue_others(one, before, before)
    if done == steps:
        assert one.step_in_epoch == packing.steps_per_epoch(packs, after, 1)
    else:
        assert done * before - after < one.step_in_epoch * after <= done * before
