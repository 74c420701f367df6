"""The stages to the orchestrator: their commands, their flags as their own parsers read them, what makes what."""

import argparse
import contextlib
import hashlib
import importlib.util
import io
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from eagle3.pipeline.settings import FOLDERS, ROOT, STAGE_ARGS, STAGES, Settings, Usage

SCRIPTS = {
    "01": "01_prepare_dataset.py",
    "02": "02_extract_hidden_states.py",
    "03": "03_build_vocab_map.py",
    "04": "04_train_draft.py",
    "check": "eagle3/served_check.py",
}
ON_NODES = ("02", "04")  # stages that run on all nodes of a hostfile
NEEDS = {"01": (), "02": ("01",), "03": ("01",), "04": ("01", "02", "03"), "check": ("01", "02", "03", "04")}
# Flags that leave what a stage makes as it is: places, machine, pace, looks
PLACES = {"model_path", "prepared_dir", "hidden_states_dir", "vocab_map_dir", "draft_dir", "output_dir"}
PLACES |= {"trust_remote_code"}
MACHINE = {"tensor_parallel_size", "gpu_memory_utilization", "device", "batch_tokens", "engine_arg", "num_proc"}
MACHINE |= {"deepspeed_config", "activation_checkpointing", "local_rank", "concurrency", "responses_endpoint"}
PACE = {"max_skipped", "max_failed", "max_disk_gb", "num_shards", "shard_index", "merge", "save_every", "dry_run"}
LOOKS = {"show", "note", "format"}
NO_PART = PLACES | MACHINE | PACE | LOOKS
HASHED = 64 << 20  # bytes of a file at most
GROWS = {"01": "max_samples", "04": "epochs"}  # a larger value adds to what is there


@dataclass(frozen=True)
class Place:
    """Of a node among several."""

    rank: int
    port: int  # free on the first node


def command(stage: str, settings: Settings, place: Place | None = None) -> list[str]:
    """The command of a stage, of one node with `place`; `settings` are resolved: a model directory, GPUs."""
    values, out, gpus = settings.values, settings.output, settings.values["GPUS"]
    model, prepared = ["--model-path", values["MODEL_PATH"]], ["--prepared-dir", f"{out}/prepared"]
    trust = ["--trust-remote-code"] if settings.trust and stage in ("01", "02", "check") else []
    tensor_parallel = ["--tensor-parallel-size", gpus]
    launcher = [sys.executable]
    script = [str(ROOT / SCRIPTS[stage])]
    match stage:
        case "01":
            flags = [*model, "--output-dir", f"{out}/prepared", "--dataset", values["DATASET"], *tensor_parallel]
            flags += ["--max-samples", values["MAX_SAMPLES"]] if values["MAX_SAMPLES"] else []
        case "02":
            flags = [*model, *prepared, "--output-dir", f"{out}/hidden_states", *tensor_parallel]
            flags += ["--num-shards", str(len(settings.nodes)), "--shard-index", str(place.rank)] if place else []
        case "03":
            flags = [*prepared, "--output-dir", f"{out}/vocab_map"]
        case "04":
            if place:
                launcher += ["-m", "torch.distributed.run", "--nnodes", str(len(settings.nodes)), "--node-rank"]
                launcher += [str(place.rank), "--nproc-per-node", gpus, "--master-addr", settings.nodes[0]]
                launcher += ["--master-port", str(place.port)]
            elif gpus != "1":
                launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", gpus]
            flags = [*model, "--hidden-states-dir", f"{out}/hidden_states", "--vocab-map-dir", f"{out}/vocab_map"]
            flags += ["--output-dir", f"{out}/draft"]
            flags += ["--note", values["NOTE"]] if values["NOTE"] else []
        case "check":
            script = ["-m", "eagle3.served_check"]
            flags = [*model, *prepared, "--draft-dir", f"{out}/draft", *tensor_parallel]
    return [*launcher, *script, *flags, *settings.arguments[stage], *trust]


def flags_of(stage: str, settings: Settings) -> argparse.Namespace:
    """The flags of a stage as its own parser reads them. Raises Usage for what it does not take."""
    words = command(stage, settings)
    mark = "eagle3.served_check" if stage == "check" else str(ROOT / SCRIPTS[stage])
    module = _script(stage)
    parse = getattr(module, "parse_arguments", None) or module.parse
    said, before = io.StringIO(), sys.argv
    sys.argv = words[words.index(mark) :]
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return parse()
    except SystemExit as end:
        line = (said.getvalue().strip().splitlines() or [f"exit code {end.code}"])[-1]
        origin = settings.origins[STAGE_ARGS[stage]]
        raise Usage(
            f"{STAGE_ARGS[stage]} ({origin}): {line.partition('error: ')[2] or line}; {SCRIPTS[stage]} --help lists "
            "the flags"
        ) from None
    finally:
        sys.argv = before


def _script(stage: str) -> ModuleType:
    """A numbered script as a module; its main does not run."""
    path = ROOT / SCRIPTS[stage]
    spec = importlib.util.spec_from_file_location(f"eagle3_stage_{stage}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def making(flags: argparse.Namespace) -> dict[str, Any]:
    """The flags that make what a stage writes, as JSON has them; a file by its name and content, wherever it lies."""
    kept = {name: value for name, value in vars(flags).items() if name not in NO_PART}
    for name in ("dataset", "exclude", "draft_config"):
        if kept.get(name):
            value = kept[name]
            kept[name] = [_identity(str(one)) for one in value] if isinstance(value, list) else _identity(str(value))
    return json.loads(json.dumps(kept, default=str))


def _identity(value: str) -> str:
    path, colon, weight = value.rpartition(":")
    if not os.path.exists(path):
        path, colon, weight = value, "", ""
    if not os.path.isfile(path):
        return (os.path.basename(os.path.abspath(path)) if os.path.isdir(path) else path) + colon + weight
    size = os.path.getsize(path)
    content = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8] if size < HASHED else "not hashed"
    return f"{os.path.basename(path)} ({size:,} bytes, {content}){colon}{weight}"


def differences(stage: str, had: dict[str, Any], has: dict[str, Any]) -> tuple[list[str], bool]:
    """How the flags of a stage differ from those that made its work, in words, and whether they only add to it."""
    named = [name for name in {**had, **has} if had.get(name) != has.get(name)]
    words = [f"--{name.replace('_', '-')} was {shown(had.get(name))}, is {shown(has.get(name))}" for name in named]
    grows = GROWS.get(stage)
    more = named == [grows] and (has[grows] is None or (had[grows] is not None and has[grows] > had[grows]))
    return words, more


def shown(value: Any) -> str:
    if value is None or value == []:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def origins(stage: str, settings: Settings, flags: argparse.Namespace) -> dict[str, tuple[Any, str]]:
    """Value and origin of every flag of a stage."""
    words = settings.arguments[stage]
    from_config = settings.config_arguments.get(stage, [])
    given = {_name(word): "command line" for word in words[len(from_config) :] if word.startswith("--")}
    given = {_name(word): "config" for word in from_config if word.startswith("--")} | given
    mine = {_name(word) for word in command(stage, settings) if word.startswith("--")}
    found = {}
    for name, value in vars(flags).items():
        origin = given.get(name) or ("run_pipeline.sh" if name in mine else "default")
        found[name] = (value, origin)
    return found


def _name(word: str) -> str:
    return word.removeprefix("--").partition("=")[0].replace("-", "_")


def manifest_digest(folder: Path) -> str | None:
    """What tells one state of a stage's directory from another: its manifest, but for the code that wrote it."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        manifest.pop("code", None)
    except (OSError, ValueError, AttributeError):
        return None
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]


def upstream(stage: str) -> tuple[str, ...]:
    """The stage and those that it takes from, in order."""
    return tuple(one for one in STAGES if one in NEEDS[stage] or one == stage)


def manifests(output: Path, stage: str) -> dict[str, str | None]:
    """Digests of the manifests of a stage and of those that it takes from."""
    return {one: manifest_digest(output / FOLDERS[one]) for one in upstream(stage) if one in FOLDERS}
