"""Several nodes: the hostfile, the remote commands, and what can be known to fail on a node before anything runs.

Every node, the first one too, is reached by `REMOTE HOST bash -s`, where REMOTE is ssh unless a config says otherwise.
It must be bash: sh may read on beyond the line that it runs, to what node.py is to read, a line of JSON. Nodes share
a file system: checkout, Python environment, target and output directory have the same path on each. Standard library
alone.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from eagle3.pipeline import stages
from eagle3.pipeline.machine import existing
from eagle3.pipeline.settings import ROOT, Settings
from eagle3.terminal import UserError

PASSED_ON = re.compile(r"(NCCL|GLOO|TORCH|VLLM|HF|EAGLE3|OMP)_\w+|PYTHONPATH|TRITON_\w+|no_proxy")  # of the environment
PATIENCE = 60  # s for the answer of a node


def start(settings: Settings, host: str, told: dict[str, Any], **pipes: Any) -> subprocess.Popen:
    """node.py on a host. Lines that follow on its stdin are signals; its end tells that this process has gone."""
    program = shlex.join([sys.executable, "-m", "eagle3.pipeline.node"])
    process = subprocess.Popen(
        [*shlex.split(settings.values["REMOTE"]), host, "bash", "-s"], stdin=subprocess.PIPE, text=True, **pipes
    )
    try:
        process.stdin.write(f"cd {shlex.quote(str(ROOT))} && exec {program}\n{json.dumps(told)}\n")
        process.stdin.flush()
    except BrokenPipeError:  # the exit code and what REMOTE says tell why
        pass
    return process


def ask(settings: Settings, host: str, told: dict[str, Any]) -> dict[str, Any]:
    """A node's answer. Raises UserError where none comes."""
    try:
        process = start(settings, host, told, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        answer, said = process.communicate(timeout=PATIENCE)
        return json.loads(answer.splitlines()[-1])
    except subprocess.TimeoutExpired:
        process.kill()
        why = f"no answer in {PATIENCE} s"
    except OSError as error:  # REMOTE itself
        why = error.strerror
    except (IndexError, ValueError):
        why = (said.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    remote = settings.values["REMOTE"]
    raise UserError(
        f"node {host}: {why}; `{remote} {host} true` must run without a question, and {sys.executable} and {ROOT} must "
        "be there as they are here"
    )


def environment(settings: Settings) -> dict[str, str]:
    """What a node's stage gets besides the node's own: what the config exports, and settings of the libraries."""
    return {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)} | settings.environment


def told(stage: str, settings: Settings, port: int) -> list[dict[str, Any]]:
    """What each node is told to run. `port`: free on the first one."""
    flags = []
    if stage == "02" and (most := stages.flags_of("02", settings).max_disk_gb) is not None:
        flags = ["--max-disk-gb", str(most / len(settings.nodes))]  # of a shard
    said = []
    for rank, host in enumerate(settings.nodes):
        command = stages.command(stage, settings, stages.Place(rank, port)) + flags
        log, memory = (
            str(settings.output.absolute() / "logs" / f"{stage}.{host}.{kind}") for kind in ("log", "memory")
        )
        facts = {"environment": environment(settings), "directory": os.getcwd(), "log": log, "memory": memory}
        said.append({"command": command} | facts)
    return said


# ----------------------------------------------------------------------------------------------- before a run


def look(settings: Settings, model: Path) -> list[str]:
    """Findings, one for each node that is not ready. A marker file shows that the output directory is shared."""
    place = existing(settings.output)
    findings = []
    try:
        with tempfile.NamedTemporaryFile(prefix=".eagle3-shared-", dir=place) as marker:
            here = {
                "first": settings.nodes[0],
                "places": [str(model.absolute())],
                "marker": os.path.abspath(marker.name),
            }
            for host in settings.nodes:
                try:
                    found = ask(settings, host, {"look": here})
                except UserError as error:
                    findings.append(str(error))
                    continue
                findings += [f"node {host}: {fault}" for fault in _faults(settings, found)]
    except OSError:  # preflight says that it cannot be written
        return []
    return findings


def _faults(settings: Settings, found: dict[str, Any]) -> list[str]:
    faults = []
    if not found["marker"]:
        faults.append(
            f"{settings.output} is not shared with it: a file made here is not seen there; give an --output-dir on a "
            "file system that all nodes mount at the same place"
        )
    if found["missing"]:
        faults.append(f"{', '.join(found['missing'])} is not there; all nodes need it at the same place")
    if found["unknown"]:
        faults.append(
            f"it cannot resolve {found['unknown']}, the first node; name nodes in the hostfile as the others reach them"
        )
    if found["gpus"] is not None and found["gpus"] < int(settings.values["GPUS"]):
        faults.append(f"it has {found['gpus']} GPUs, the hostfile says slots={settings.values['GPUS']}; correct that")
    return faults
