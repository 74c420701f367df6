"""The closing summary of a run, and its report."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from eagle3.pipeline.settings import FOLDERS, ROOT, STAGES, Settings


def close(settings: Settings, state: dict[str, Any], ran: dict[str, float]) -> None:
    """Write report.html and print what the run did."""
    output = settings.output
    print("\nsummary")
    for stage in STAGES:
        entry = state["stages"].get(stage)
        if not entry or "seconds" not in entry:
            continue
        parts = [f"{entry['seconds']:.0f} s" + ("" if stage in ran else ", in an earlier run")]
        parts += [f"{entry['disk'] / 1e9:.3f} GB on disk"] if "disk" in entry else []
        parts += [f"{entry['memory'] / 1e9:.1f} GB of host memory at most"] if entry.get("memory") else []
        parts += facts(output, stage)
        print(f"  {stage:<5}  {', '.join(parts)}")
    print(f"seconds by stage: {' '.join(f'{stage} {seconds:.0f}s' for stage, seconds in ran.items()) or 'nothing ran'}")
    command = [sys.executable, "-m", "eagle3.report", str(output)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    report = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
    lines = (report.stdout or report.stderr).strip().splitlines()
    print(f"report: {lines[-1]}" if lines else "report: none was written")
    if (output / "draft" / "export").exists() and "04" in settings.stages:
        served = settings.values["MODEL_PATH"]
        config = json.dumps({"method": "eagle3", "model": f"{output}/draft/export", "num_speculative_tokens": 3})
        print(f"serve: vllm serve {served} --speculative-config '{config}'")
        print(f"the draft lies in {output}/draft/export")
        if settings.values["NOTE"]:
            print(settings.values["NOTE"])
    sys.stdout.flush()


def facts(output: Path, stage: str) -> list[str]:
    """What a stage's files say of it."""
    found = read(output / FOLDERS.get(stage, "draft") / ("served_check.json" if stage == "check" else "manifest.json"))
    match stage:
        case "01" if "samples" in found:
            skipped = sum(found.get("skipped", {}).values())
            return [f"{found['samples']:,} samples of {found['tokens']:,} tokens, {skipped:,} rows skipped"]
        case "02" if "samples" in found:
            failed = sum(found.get("failed", {}).values())
            return [f"{found['samples']:,} samples, {failed:,} failed, {found['bytes_per_token']} bytes a token"]
        case "03" if "coverage" in found:
            return [f"{found['coverage']:.2%} of the answers' tokens covered"]
        case "04" if "steps" in found:
            tau = (found.get("report") or {}).get("tau")
            skipped = found.get("skipped_steps", 0)
            return [f"{found['steps']:,} steps, {skipped} skipped" + (f", tau {tau} held out" if tau else "")]
        case "check" if "tau" in found:
            return [f"tau {found['tau']} served, {found['identical']} of {found['prompts']} answers identical"]
    return []


def read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below, as their lengths say."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            file = os.path.join(path, name)
            if os.path.isfile(file):
                total += os.path.getsize(file)
    return total


def train_tokens(output: Path) -> int:
    """Tokens that stage 04 trained on, over all epochs."""
    manifest = read(output / FOLDERS["04"] / "manifest.json")
    held_out = set(manifest.get("held_out", []))
    latest: dict[int, int] = {}
    try:
        lines = (output / FOLDERS["02"] / "index.jsonl").read_bytes().splitlines()
        for record in map(json.loads, lines):
            latest[record["index"]] = record["tokens"] if record["status"] in ("done", "consumed") else 0
    except (OSError, ValueError, KeyError):
        return 0
    return manifest.get("epochs", 0) * sum(tokens for index, tokens in latest.items() if index not in held_out)
