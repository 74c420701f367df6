"""The learning rate over a run: its corners, and that the flag reaches the optimizer and the fingerprint."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interruptions_for_tests import stage_04
from states_for_tests import write_states

from eagle3 import artifacts
from eagle3.training.schedule import SCHEDULES, factor


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # of 110 steps, 10 of them warm-up; 60 is halfway down, 88 begins the last fifth
        ("cosine", {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.55, 85: 0.1 + 0.45 * (1 - 0.707107), 110: 0.1, 500: 0.1}),
        ("linear", {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.5, 88: 0.22, 109: 0.01, 110: 0.0, 500: 0.0}),
        (
            "wsd",
            {0: 0.1, 9: 1.0, 10: 1.0, 60: 1.0, 87: 1.0, 88: 1.0, 89: 21 / 22, 99: 0.5, 109: 1 / 22, 110: 0.0, 500: 0.0},
        ),
    ],
)
def test_corners(schedule: str, expected: dict[int, float]) -> None:
    assert {step: factor(schedule, step, 10, 110) for step in expected} == pytest.approx(expected, abs=1e-4)


@given(st.sampled_from(SCHEDULES), st.integers(1, 60), st.data())
def test_every_step_has_a_rate_and_it_falls_after_the_warm_up(schedule: str, total: int, data: st.DataObject) -> None:
    """A run of one step, and one that is all warm-up, too."""
    warmup = data.draw(st.integers(1, total))
    factors = [factor(schedule, step, warmup, total) for step in range(total + 2)]
    assert all(0 < one <= 1 for one in factors[:total]) and factors[warmup - 1] == 1
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup - 1 :] == sorted(factors[warmup - 1 :], reverse=True)
    assert factors[total] == factors[total + 1] == pytest.approx(0.1 if schedule == "cosine" else 0)


@pytest.mark.slow
def test_the_flag_is_the_rate_of_each_step_and_part_of_the_run(tiny_target: Path, tmp_path: Path) -> None:
    write_states(tmp_path, tiny_target, count=6)
    output = tmp_path / "draft"
    flags = ["--ttt-steps", 2, "--max-tokens", 64, "--epochs", 2, "--warmup-ratio", 0, "--learning-rate", 0.01]
    command = [*stage_04(tiny_target, tmp_path, output, *flags), "--schedule", "wsd"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in lines if line["kind"] == "train"]
    assert rates == pytest.approx([0.01] * 9 + [0.005])  # the last fifth is two steps
    assert artifacts.read_manifest(output, "04")["fingerprint"]["schedule"] == "wsd"
