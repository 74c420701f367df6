"""What earlier stages measured: seconds, tokens and memory, from the run itself or from a short run in OUT/probe."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.pipeline import state
from eagle3.pipeline.settings import FOLDERS

PROBE = "probe"  # a run of a few samples inside the output directory


@dataclass(frozen=True)
class Capture:
    """Of stage 02: what was captured, and what came before."""

    tokens: int
    seconds: float
    loading: float  # s until the first sample


@dataclass(frozen=True)
class Training:
    tokens_a_second: float  # of training, all ranks
    other_seconds: float  # start, evaluation, checkpoints, export


@dataclass(frozen=True)
class Measured:
    """Of one output directory; None and {} where nothing is known."""

    where: Path
    seconds: dict[str, float]  # whole stages that finished
    memory: dict[str, int]  # most host memory of all processes of a stage, bytes
    prepared: int  # tokens of stage 01
    capture: Capture | None
    training: Training | None
    training_flags: dict[str, Any]  # of the run whose training was measured


def measured(output: Path) -> list[Measured]:
    """The run's own figures first, then those of its probe."""
    found = [_read(directory) for directory in (output, output / PROBE)]
    return [one for one in found if one.seconds or one.capture or one.training]


def _read(directory: Path) -> Measured:
    stages = state.read(directory).get("stages", {})
    done = {name: entry for name, entry in stages.items() if entry.get("state") == "finished"}
    return Measured(
        directory,
        {name: entry["seconds"] for name, entry in done.items()},
        {name: entry["memory"] for name, entry in done.items() if entry.get("memory")},
        (_json(directory / FOLDERS["01"] / "manifest.json") or {}).get("tokens", 0),
        _capture(directory / FOLDERS["02"], done.get("02")),
        _training(directory / FOLDERS["04"], done.get("04")),
        (done.get("04") or {}).get("made_of", {}).get("04", {}),
    )


def _capture(folder: Path, entry: dict[str, Any] | None) -> Capture | None:
    timing = (_json(folder / "manifest.json") or {}).get("timing") or {}
    if not entry or not timing.get("seconds"):
        return None
    return Capture(timing["tokens"], timing["seconds"], max(0.0, entry["last_seconds"] - timing["seconds"]))


def _training(folder: Path, entry: dict[str, Any] | None) -> Training | None:
    """Steps of the first tenth warm caches and compile, so their median stands for each step."""
    if not entry or not entry.get("train_tokens"):
        return None
    try:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    seconds = {line["step"]: line["seconds"] for line in lines if line.get("kind") == "train" and "seconds" in line}
    if not seconds:
        return None
    steps = sorted(seconds.values())
    usual = statistics.fmean(steps[: max(1, round(0.95 * len(steps)))])  # without the slowest: what compiled
    tokens = entry["train_tokens"] / len(seconds)  # a step
    return Training(tokens / usual, max(0.0, entry["seconds"] - usual * len(seconds)))


def _json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
