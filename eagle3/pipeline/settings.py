"""Settings of a run: the command line wins over the config file, which wins over the defaults.

A config (configs/pipelines/*.env) is read by bash, as it always was: it may compute, and `$root` is the checkout. What
it exports is environment of the stages. Standard library alone: nothing here waits for torch.
"""

import argparse
import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.terminal import UserError

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("01", "02", "03", "04", "check")
FOLDERS = {"01": "prepared", "02": "hidden_states", "03": "vocab_map", "04": "draft"}  # of the output directory
STAGE_ARGS = dict(zip(STAGES, ("PREPARE_ARGS", "EXTRACT_ARGS", "VOCAB_ARGS", "TRAIN_ARGS", "CHECK_ARGS"), strict=True))
PLAIN = {"MODEL_PATH": "", "DATASET": "mlabonne/open-perfectblend", "OUTPUT_DIR": "", "MAX_SAMPLES": "", "GPUS": ""}
PLAIN |= {"NOTE": "", "HOSTFILE": "", "REMOTE": "ssh -o BatchMode=yes -o ConnectTimeout=20"}
SHELL_OWN = {"_", "SHLVL", "PWD", "OLDPWD", "LINES", "COLUMNS", "root", "config"}
GIVEN = {"model_path": "MODEL_PATH", "dataset": "DATASET", "output_dir": "OUTPUT_DIR", "max_samples": "MAX_SAMPLES"}
GIVEN |= {"gpus": "GPUS", "hostfile": "HOSTFILE"}
PROBE_SAMPLES = 32

# Prints what the config leaves: names of shell variables, their values, the environment; all between NULs
READ_CONFIG = r"""
set -euo pipefail
config=$1 root=$2
shift 2
before=" $(compgen -v | tr '\n' ' ') before name "
source "$config" >&2
set +u # under which a plain variable has no [@]
for name in $(compgen -v); do
  case $before in *" $name "*) continue ;; esac
  case $name in BASH* | PIPESTATUS | FUNCNAME) continue ;; esac
  eval 'printf "%s\0%s\0" "$name" "${#'"$name"'[@]}"
  [ "${#'"$name"'[@]}" = 0 ] || printf "%s\0" "${'"$name"'[@]}"'
done
printf '\0'
env -0
"""


class Usage(UserError):
    """A mistake on the command line or in a config: exit code 2."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        message = message.replace("unrecognized arguments: ", "unknown option ")
        message = re.sub(r"^argument (\S+): expected one argument", r"\1 needs a value", message)
        raise Usage(f"{message}; --help lists the options")


@dataclass
class Settings:
    """Values by name, and where each came from: "command line", "config" or "default"."""

    values: dict[str, str]
    arguments: dict[str, list[str]]  # flags of each stage, by stage
    origins: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)  # that the config exports
    smoke: bool = False
    trust: bool = False
    first: str = "01"
    last: str = "check"
    named: str = ""  # a stage that was asked for by name: it runs though it has finished
    machine: str = ""  # to plan for, in the place of this one
    config_arguments: dict[str, list[str]] = field(default_factory=dict)  # those of `arguments` that the config gave
    nodes: list[str] = field(default_factory=list)  # hosts of the hostfile; without one there are none

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))

    @property
    def stages(self) -> tuple[str, ...]:
        return STAGES[STAGES.index(self.first) : STAGES.index(self.last) + 1]

    @property
    def output(self) -> Path:
        model = self.values["MODEL_PATH"].rstrip("/")
        return Path(self.values["OUTPUT_DIR"] or f"output/{os.path.basename(model)}")


def parser() -> argparse.ArgumentParser:
    """The command line; its help is the head of run_pipeline.sh, which needs no Python to print it."""
    made = _Parser(prog="run_pipeline.sh", add_help=False, allow_abbrev=False)
    made.add_argument("--smoke", action="store_true")
    made.add_argument("--trust-remote-code", action="store_true")
    for name in ("config", "model-path", "dataset", "output-dir", "max-samples", "gpus", "machine", "hostfile"):
        made.add_argument(f"--{name}")
    for name in ("from", "to", "only"):
        made.add_argument(f"--{name}")
    made.add_argument("--args", nargs=2, action="append", default=[], metavar=("STAGE", "FLAGS"))
    actions = made.add_mutually_exclusive_group()
    for name in ("plan", "print-config", "status", "stop", "detach"):
        actions.add_argument(f"--{name}", action="store_true")
    made.add_argument("--probe", nargs="?", type=int, const=PROBE_SAMPLES)
    made.add_argument("--force", action="store_true")
    made.add_argument("--redo", action="store_true")
    return made


def settings_of(given: argparse.Namespace) -> Settings:
    """Raises Usage for what does not go together or does not exist."""
    if given.smoke and (given.config or given.model_path or given.dataset):
        raise Usage("--smoke always uses the embedded target and conversations")
    config = str(ROOT / "configs/pipelines/smoke.env") if given.smoke else given.config
    origins = dict.fromkeys((*PLAIN, *STAGE_ARGS.values()), "default")
    settings = Settings(dict(PLAIN), {stage: [] for stage in STAGES}, origins)
    settings.smoke, settings.trust, settings.machine = given.smoke, given.trust_remote_code, given.machine or ""
    if config:
        _read_config(settings, config, f"--config {given.config}" if given.config else config)
    for name, setting in GIVEN.items():
        if (value := getattr(given, name)) is not None:
            settings.values[setting], settings.origins[setting] = value, "command line"
    for stage, flags in given.args:
        _require_stage(stage)
        settings.arguments[stage] += shlex.split(flags)
        settings.origins[STAGE_ARGS[stage]] = "command line over " + settings.origins[STAGE_ARGS[stage]]
    if settings.values["HOSTFILE"]:
        _read_hostfile(settings)
    for name in ("MAX_SAMPLES", "GPUS"):
        value = settings.values[name]
        if value and not (value.isdigit() and int(value)):
            raise Usage(
                f"{name.lower().replace('_', '-')} {value} ({settings.origins[name]}): expected a number from 1"
            )
    _choose_stages(settings, given)
    asks = given.status or given.stop
    if not settings.values["MODEL_PATH"] and not (asks and settings.values["OUTPUT_DIR"]):
        raise Usage("--model-path is missing (or --smoke, which brings its own small target)")
    return settings


def _choose_stages(settings: Settings, given: argparse.Namespace) -> None:
    first, last = getattr(given, "from"), given.to
    if given.only and (first or last):
        raise Usage("--only stands without --from and --to")
    settings.first, settings.last = given.only or first or STAGES[0], given.only or last or STAGES[-1]
    settings.named = given.only or first or ""
    for stage in (settings.first, settings.last):
        _require_stage(stage)
    if STAGES.index(settings.first) > STAGES.index(settings.last):
        raise Usage(f"--from {settings.first} comes after --to {settings.last}")


def _require_stage(stage: str) -> None:
    if stage not in STAGES:
        raise Usage(f"no stage {stage}; stages are {' '.join(STAGES)}")


def _read_hostfile(settings: Settings) -> None:
    """Lines as DeepSpeed reads them, `host slots=8`: nodes and GPUS, which is of each node."""
    named, slots = f"HOSTFILE {settings.values['HOSTFILE']}", []
    try:
        lines = Path(settings.values["HOSTFILE"]).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Usage(f"{named} cannot be read ({getattr(error, 'strerror', 'it is no text')})") from None
    for number, line in enumerate(lines, 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        found = re.fullmatch(r"([\w.:-]+)\s+slots=([1-9]\d*)", line)
        if found is None or found[1].startswith("-"):
            raise Usage(f"{named}, line {number}: {line!r}; expected a host and its GPUs, such as node-1 slots=8")
        if found[1] in settings.nodes:
            raise Usage(f"{named}, line {number}: {found[1]} was named before; one line a node")
        settings.nodes.append(found[1])
        slots.append(found[2])
    if len(slots) < 2 or len(set(slots)) > 1:
        have = f"slots={', '.join(slots)}" if slots else "no node"
        raise Usage(f"{named} has {have}; expected two nodes or more, with as many slots each (one: leave it away)")
    if settings.origins["GPUS"] == "command line" and settings.values["GPUS"] != slots[0]:
        raise Usage(f"--gpus {settings.values['GPUS']}, but {named} says slots={slots[0]}; leave --gpus away")
    settings.values["GPUS"], settings.origins["GPUS"] = slots[0], "hostfile"


def _read_config(settings: Settings, config: str, named: str) -> None:
    if not os.access(config, os.R_OK) or not os.path.isfile(config):
        raise Usage(f"{named}: no such file")
    path = os.path.abspath(config)  # `source` would look for a bare name on PATH
    result = subprocess.run(["bash", "-c", READ_CONFIG, "bash", path, str(ROOT)], capture_output=True)
    if result.returncode:
        said = result.stderr.decode(errors="replace").strip().splitlines() or ["it stops with an error"]
        raise Usage(f"{named}: {said[-1]}")
    shell, environment = _parted(result.stdout)
    exported = dict(line.partition("=")[::2] for line in environment)
    settings.environment = {
        name: value for name, value in exported.items() if os.environ.get(name) != value and name not in SHELL_OWN
    }
    stage_of = {name: stage for stage, name in STAGE_ARGS.items()}
    for name, values in shell.items():
        if name in stage_of:
            settings.arguments[stage_of[name]] = list(values)
            settings.config_arguments[stage_of[name]] = list(values)
        elif name in PLAIN:
            settings.values[name] = values[0] if values else ""
        elif name in exported or name in SHELL_OWN or not name.isupper():
            continue
        else:
            known = ", ".join((*PLAIN, *STAGE_ARGS.values()))
            raise Usage(f"{named} sets {name}, which is no setting; known: {known}")
        settings.origins[name] = "config"


def _parted(output: bytes) -> tuple[dict[str, list[str]], list[str]]:
    """Shell variables with their values, and lines of the environment."""
    words = [word.decode(errors="surrogateescape") for word in output.split(b"\0")]
    shell: dict[str, list[str]] = {}
    place = 0
    while words[place]:
        count = int(words[place + 1])
        shell[words[place]] = words[place + 2 : place + 2 + count]
        place += 2 + count
    return shell, [word for word in words[place + 1 :] if word]
