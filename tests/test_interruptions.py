"""Killed, interrupted or terminated at any moment, then the same command: as if nothing had happened."""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from capture_for_tests import settings_for
from conftest import REPOSITORY
from interruptions_for_tests import (
    CONVERSATIONS,
    EXIT_CODES,
    Stage,
    assert_nothing_left,
    assert_same_samples,
    largest_difference,
    stage_01,
    stage_02,
    stage_03,
    stage_04,
    write_prepared,
)
from states_for_tests import write_states

from eagle3 import artifacts, engine_guard, vllm_runtime
from eagle3.capture import extract

TRAINING = ["--epochs", 12, "--ttt-steps", 3, "--learning-rate", 1e-2, "--max-tokens", 128, "--val-fraction", 0.1]
TRAINING += ["--save-every", 4]


@dataclass
class Case:
    """A stage for the random moments: its command for an output directory, and the comparison with an unbroken run."""

    command: Callable[[Path], list[object]]
    compare: Callable[[Path, Path], None]


def manifest(directory: Path) -> dict:
    """Without what differs between two runs that did the same."""
    facts = json.loads((directory / "manifest.json").read_text())
    return {key: value for key, value in facts.items() if key not in ("code", "canary", "timing", "bytes")}


def same_prepared(one: Path, other: Path) -> None:
    assert_same_samples(one, other)
    counts = [artifacts.load_tensors(directory / "token_freq.pt") for directory in (one, other)]
    assert counts[0].equal(counts[1]) and manifest(one) == manifest(other)


def same_states(one: Path, other: Path) -> None:
    assert_same_samples(one, other, tolerance=1e-4)
    assert manifest(one) == manifest(other)


def same_map(one: Path, other: Path) -> None:
    maps = [artifacts.load_tensors(directory / "vocab_map.pt") for directory in (one, other)]
    assert all(maps[0][name].equal(maps[1][name]) for name in ("d2t", "t2d")) and manifest(one) == manifest(other)
    assert_nothing_left(other)


def same_draft(one: Path, other: Path) -> None:
    assert largest_difference(one, other) <= 1e-6
    assert manifest(one) == manifest(other)
    rates = []
    for directory in (one, other):
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        rates.append({line["step"]: line["learning_rate"] for line in lines if line["kind"] == "train"})
    assert rates[0] == rates[1]
    assert_nothing_left(other)


def same_answers(one: Path, other: Path) -> None:
    reports = [json.loads((directory / "served_check.json").read_text()) for directory in (one, other)]
    assert all(reports[0][key] == reports[1][key] for key in reports[0] if not key.startswith("seconds"))
    assert_nothing_left(other)


def same_pipeline(one: Path, other: Path) -> None:
    same_prepared(one / "prepared", other / "prepared")
    same_map(one / "vocab_map", other / "vocab_map")
    assert_same_samples(one / "hidden_states", other / "hidden_states", tolerance=1e-4)
    same_draft(one / "draft", other / "draft")


@pytest.fixture
def case(request: pytest.FixtureRequest, tiny_target: Path, tmp_path: Path) -> Case:
    prepared = tmp_path / "prepared"
    if request.param in ("02-transformers", "02-vllm", "03", "check"):
        write_prepared(prepared, tiny_target)
    if request.param.startswith("04"):
        write_states(tmp_path, tiny_target, count=24)
    match request.param:
        case "01":
            rows = tmp_path / "many.jsonl"
            rows.write_text(CONVERSATIONS.read_text() * 8)
            return Case(lambda out: stage_01(tiny_target, rows, out), same_prepared)
        case "02-transformers" | "02-vllm" as stage:
            return Case(lambda out: stage_02(tiny_target, prepared, out, stage.removeprefix("02-")), same_states)
        case "03":
            return Case(lambda out: stage_03(prepared, out), same_map)
        case "04" | "04-two-ranks" as stage:
            ranks = 2 if "two" in stage else 1
            return Case(lambda out: stage_04(tiny_target, tmp_path, out, *TRAINING, ranks=ranks), same_draft)
        case "check":
            states, vocab, draft = (tmp_path / name for name in ("hidden_states", "vocab_map", "draft"))
            for command in (
                stage_02(tiny_target, prepared, states, "transformers"),
                stage_03(prepared, vocab),
                stage_04(tiny_target, tmp_path, draft, *TRAINING),
            ):
                assert Stage(command, tmp_path / "log").process.wait() == 0

            def check(out: Path) -> list[object]:
                out.mkdir(exist_ok=True)
                for name in ("manifest.json", "export"):
                    if not (out / name).exists():
                        (out / name).symlink_to(draft / name)
                flags = ["--model-path", tiny_target, "--prepared-dir", prepared, "--draft-dir", out]
                return [sys.executable, "-m", "eagle3.served_check", *flags, "--max-new-tokens", 64]

            return Case(check, same_answers)
        case "pipeline":
            settings = tmp_path / "run.env"
            settings.write_text(
                f"MODEL_PATH={tiny_target}\nDATASET={CONVERSATIONS}\nMAX_SAMPLES=60\nGPUS=1\n"
                "PREPARE_ARGS=(--max-seq-len 128)\nEXTRACT_ARGS=(--engine transformers --dtype float32)\n"
                f"VOCAB_ARGS=(--draft-vocab-size 400)\nTRAIN_ARGS=({' '.join(map(str, TRAINING))})\n"
            )
            pipeline = [REPOSITORY / "run_pipeline.sh", "--config", settings, "--to", "04"]
            return Case(lambda out: [*pipeline, "--output-dir", out], same_pipeline)


@pytest.mark.slow
def test_a_capture_killed_on_its_way_continues(tiny_target: Path, tmp_path: Path) -> None:
    prepared = write_prepared(tmp_path / "prepared", tiny_target)
    whole, out = (settings_for(tiny_target, tmp_path / name, batch_tokens=4096) for name in ("whole", "out"))
    extract.extract(prepared, "transformers", whole)
    stage = Stage(stage_02(tiny_target, prepared, out.output_dir, "transformers"), tmp_path / "log")
    index = out.output_dir / "index.jsonl"
    stage.wait_for(lambda: index.exists() and index.read_text().count("\n") > 20)
    assert stage.stop(signal.SIGKILL) == -9
    assert not artifacts.read_manifest(out.output_dir, "02")["complete"]
    recorded = [artifacts.sample_path(out.output_dir, index) for index in artifacts.Index(out.output_dir).samples()]
    times = {path: path.stat().st_mtime_ns for path in recorded}
    extract.extract(prepared, "transformers", out)
    same_states(whole.output_dir, out.output_dir)
    assert times == {path: path.stat().st_mtime_ns for path in recorded}, "finished samples were done again"


@pytest.mark.slow
@pytest.mark.skipif(vllm_runtime.version() is None, reason="vllm is not installed")
def test_kill_9_while_vllm_loads_leaves_no_engine(tiny_target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepared = write_prepared(tmp_path / "prepared", tiny_target)
    stage = Stage(stage_02(tiny_target, prepared, out, "vllm"), tmp_path / "log")
    stage.wait_for(lambda: len(stage.family()) > 3)  # with watcher and resource tracker: EngineCore, just forked
    assert stage.stop(signal.SIGKILL) == -9  # looks after the rest of the family
    assert not list(out.glob(f"{engine_guard.PREFIX}*"))


STAGES = ["01", "02-transformers", "02-vllm", "03", "04", "04-two-ranks", "check", "pipeline"]


@pytest.mark.manual
@pytest.mark.parametrize("case", STAGES, indirect=True)
def test_random_moments(case: Case, tmp_path: Path, request: pytest.FixtureRequest, capfd) -> None:
    """Each run is stopped at a random moment by a random signal, to the process alone or to its group, and rerun."""
    name = request.node.callspec.params["case"]
    chance = random.Random(f"{name} {os.environ.get('MOMENTS_SEED', 0)}")
    began = time.monotonic()
    whole = tmp_path / "whole"
    assert Stage(case.command(whole), tmp_path / "whole.log").process.wait() == 0, (tmp_path / "whole.log").read_text()
    lasts = time.monotonic() - began
    for moment in range(int(os.environ.get("MOMENTS", 10))):
        out, log = tmp_path / f"out{moment}", tmp_path / f"out{moment}.log"
        number = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
        group = number == signal.SIGINT and chance.random() < 0.5
        seconds = chance.uniform(0.02, 1) * lasts
        stage = Stage(case.command(out), log, PYTHONPATH=str(REPOSITORY))
        time.sleep(seconds)
        ended = stage.process.poll() is not None
        reached = log.read_text().splitlines()[-1:] or [""]
        stopped = time.monotonic()
        alone = name == "pipeline" and number in (signal.SIGKILL, signal.SIGHUP)  # the run goes on without its terminal
        code = stage.stop(number, group, alone) if not ended else stage.process.returncode
        stopped = time.monotonic() - stopped
        second = tmp_path / f"out{moment}.second.log"
        again = Stage(case.command(out), second, PYTHONPATH=str(REPOSITORY)).process.wait()
        while alone and again and "is in use by" in second.read_text():
            second.unlink()
            time.sleep(3)
            again = Stage(case.command(out), second, PYTHONPATH=str(REPOSITORY)).process.wait()
        text = log.read_text() + second.read_text()
        with capfd.disabled():
            print(
                f"\n  {name} {moment}: {seconds:5.1f} of {lasts:.1f} s, {signal.Signals(number).name}"
                f"{' to the group' if group else ''}, exit {code}, gone after {stopped:.1f} s, rerun {again}; "
                f"{reached[0][-70:]!r}",
                end="",
            )
        assert again == 0, text
        case.compare(whole, out)
        # the signal itself: before the handlers are set, or after the work; a launcher of ranks ends with 1
        assert ended or code in {0, EXIT_CODES[number], -number, 1 if name == "04-two-ranks" else 0}, text
