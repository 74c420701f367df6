"""What a run left in its output directory; a stage that is missing or damaged has the reason in its place."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3 import artifacts
from eagle3.capture import shards
from eagle3.terminal import UserError

FOLDERS = {"01": "prepared", "02": "hidden_states", "03": "vocab_map", "04": "draft"}


@dataclass(frozen=True)
class Part:
    """One stage's directory."""

    directory: Path
    manifest: dict[str, Any] | None
    absent: str  # why there is no manifest

    def state(self) -> str:
        """Whether the stage finished; stage 03 is written at once."""
        if self.manifest is None:
            return self.absent
        return "complete" if self.manifest.get("complete", True) else "not finished"


@dataclass(frozen=True)
class Run:
    """All that the report tells of."""

    directory: Path
    parts: dict[str, Part]  # by stage
    samples: list[dict[str, Any]]  # records of stage 01
    skipped: dict[str, int]  # reasons of rows without samples
    metrics: dict[str, list[dict[str, Any]]]  # by kind (train, held_out), ascending steps
    served: dict[str, Any] | None
    card: str | None  # README.md of the export
    pipeline: dict[str, Any] | None  # run.json of run_pipeline.sh
    faults: list[str]  # files that could not be read


def read_run(directory: Path) -> Run:
    """Read OUT. Raises UserError when it holds nothing of any stage."""
    parts = {stage: _read_part(directory / name, stage) for stage, name in FOLDERS.items()}
    if all(part.manifest is None for part in parts.values()):
        raise UserError(
            f"{directory} holds no stage's output ({'; '.join(part.absent for part in parts.values())}); give the "
            f"directory that holds {', '.join(FOLDERS.values())}"
        )
    faults: list[str] = []
    samples, skipped = [], {}
    if parts["01"].manifest is not None:
        try:
            samples, skipped = _read_index(parts["01"].directory)
        except UserError as error:
            faults.append(str(error))
    draft = parts["04"].directory
    metrics = _read_metrics(draft / "metrics.jsonl", faults)
    served = _read_object(draft / "served_check.json", faults)
    card = draft / "export" / "README.md"
    text = card.read_text(errors="replace") if card.is_file() else None
    pipeline = _read_object(directory / "run.json", faults)
    return Run(directory, parts, samples, skipped, metrics, served, text, pipeline, faults)


def _read_part(directory: Path, stage: str) -> Part:
    if not directory.is_dir():
        return Part(directory, None, f"{directory.name}/ is absent: stage {stage} has not run here")
    try:
        manifest = artifacts.read_manifest(directory, stage, missing_ok=True)
    except UserError as error:
        return Part(directory, None, str(error))
    if manifest is not None:
        return Part(directory, dict(manifest), "")
    if stage == "02" and (found := shards.present(directory)):
        return Part(
            directory,
            None,
            f"{directory.name}/ has {len(found)} of {found[0].count} shards, not merged: run stage 02 with --merge",
        )
    return Part(directory, None, f"{directory.name}/ has no manifest.json: stage {stage} has written nothing yet")


def _read_index(directory: Path) -> tuple[list[dict[str, Any]], dict[str, int]]:
    latest: dict[int, dict[str, Any]] = {}
    skipped: dict[str, int] = {}
    for record in artifacts.Index(directory).read():
        if record["status"] == "skipped":
            skipped[record["reason"]] = skipped.get(record["reason"], 0) + 1
        else:
            latest[record["index"]] = record
    return [record for _, record in sorted(latest.items())], skipped


def _read_metrics(path: Path, faults: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The lines of metrics.jsonl; of two of one kind and step the later counts, as after a resume."""
    found: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "held_out": {}}
    damaged = 0
    lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    for line in lines[:-1]:  # what follows the last newline is being written, or torn by a kill
        try:
            record = json.loads(line)
            found.setdefault(record["kind"], {})[int(record["step"])] = record
        except (ValueError, TypeError, KeyError):
            damaged += 1
    if damaged:
        faults.append(f"{path}: {damaged} damaged line{'s' if damaged > 1 else ''} left out")
    return {kind: [record for _, record in sorted(records.items())] for kind, records in found.items()}


def _read_object(path: Path, faults: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_bytes())
        if isinstance(value, dict):
            return value
        faults.append(f"{path} is damaged: a {type(value).__name__}, expected an object")
    except ValueError as error:
        faults.append(f"{path} is damaged: {error}")
    return None
