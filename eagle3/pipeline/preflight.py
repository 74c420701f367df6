"""What can be known to fail before anything runs: one finding a line, each with what to do. It mends nothing."""

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import torch

from eagle3 import model_files, vllm_runtime
from eagle3.capture import preflight as capture
from eagle3.capture.interface import EngineSettings
from eagle3.export import config_json
from eagle3.pipeline import nodes, stages
from eagle3.pipeline.machine import existing
from eagle3.pipeline.plan import Finding, Job, draft_of
from eagle3.pipeline.settings import FOLDERS
from eagle3.prepare.stage import length_limit
from eagle3.target import load_tokenizer, require_trust
from eagle3.terminal import REMEDIES, UserError

LEAST_FILES = 1024  # open at once: vLLM's sockets, samples, libraries
LEAST_FREE = 200 << 20  # bytes of a file system that a run writes to besides its output


def look(job: Job, settings: EngineSettings) -> list[Finding]:
    """All findings. `settings`: stage 02's engine."""
    todo = [stage for stage in job.settings.stages if stage not in job.finished]
    loads = any(stage in todo for stage in ("01", "02", "check"))
    checks: list[tuple[str, Callable[[], None]]] = [
        ("hard", lambda: _require_writable(job)),
        ("hard", _require_open_files),
        ("soft", lambda: _require_room_elsewhere(job)),
    ]
    if loads:
        checks.append(("hard", lambda: _require_tokenizer(job)))
    if "01" in todo:
        checks.append(("hard", lambda: length_limit(job.target, job.flags["01"].max_seq_len) and None))
    if "04" in todo:
        checks.append(("hard", lambda: config_json(draft_of(job), job.target) and None))
    if "02" in todo or "check" in todo:
        checks.append(("hard", lambda: _require_weights(job)))
        if job.machine.gpus > 1 and job.gpus > 1:
            checks.append(("hard", capture.require_shared_memory))
    if "02" in todo:
        checks.append(("hard", lambda: capture.require_target_packages(job.engine, job.target, job.settings.trust)))
        # the server that writes stage 01's answers is to be stopped after it
        serving = "01" in todo and job.flags["01"].responses_endpoint
        checks.append(("note" if serving else "hard", lambda: _require_memory(job, settings)))
    if job.engine == "vllm" or "check" in todo:
        checks += [("hard", lambda: _require_vllm(job, todo)), ("note", capture.look_at_ports)]
    checks.append(("hard", _require_driver))
    found = [finding for level, check in checks for finding in _findings(level, check)]
    if job.nodes > 1 and any(stage in stages.ON_NODES for stage in todo):
        found += [Finding("hard", line) for line in nodes.look(job.settings, job.target.directory)]
    return found


def _findings(level: str, check: Callable[[], None]) -> Iterator[Finding]:
    """What a check refuses, and what it warns of."""
    said = StringIO()
    try:
        with redirect_stderr(said):
            check()
    except UserError as error:
        yield Finding(level, str(error))
    for line in said.getvalue().splitlines():
        if line.startswith("warning: "):
            yield Finding("note", line.removeprefix("warning: "))


def _require_writable(job: Job) -> None:
    """A file is made and removed in the output directory, or in the nearest one above it, and in each stage's."""
    places = {existing(job.settings.output / folder) for folder in ("", *FOLDERS.values())}
    for place in sorted(places):
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"x")
        except OSError as error:
            remedy = REMEDIES.get(error.errno, "mend that")
            raise UserError(f"{place} cannot be written ({error.strerror}); {remedy}") from None


def _require_open_files() -> None:
    """The soft limit is raised for the stages; the hard one is another's to raise."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        raise UserError(
            f"{hard} files may be open at once, {LEAST_FILES} are needed; raise it: ulimit -Hn 65536 as root, or "
            "--ulimit nofile=65536 for a container"
        )


def _require_room_elsewhere(job: Job) -> None:
    """File systems that libraries write to besides the output directory: temporary files, caches."""
    places = {tempfile.gettempdir()}
    for name in ("HF_HOME", "XDG_CACHE_HOME", "EAGLE3_CACHE", "TRITON_HOME", "TRITON_CACHE_DIR"):
        if os.environ.get(name):
            places.add(os.environ[name])
    for place in sorted(places):
        free = shutil.disk_usage(existing(Path(place))).free
        if free < LEAST_FREE:
            raise UserError(
                f"{place} has {free / 1e6:.0f} MB free, {LEAST_FREE / 1e6:.0f} MB are wanted for temporary files and "
                "caches; make room, or set TMPDIR (HF_HOME, XDG_CACHE_HOME) to another disk"
            )


def _require_tokenizer(job: Job) -> None:
    """It loads, has a chat template, and no id beyond the embedding's rows."""
    require_trust(job.target, job.settings.trust)
    load_tokenizer(job.target, trust_remote_code=job.settings.trust)


def _require_weights(job: Job) -> None:
    model_files.require_loadable(job.target.directory, job.target.vocab_size)


def _require_memory(job: Job, settings: EngineSettings) -> None:
    try:
        _require_weights(job)
    except UserError:  # a finding of its own; there is nothing to weigh then
        return
    capture.require_memory(job.engine, settings)


def _require_vllm(job: Job, todo: list[str]) -> None:
    if vllm_runtime.version() is None and job.engine != "vllm":
        raise UserError("the served check needs vLLM, which this environment lacks; give --to 04, or install vLLM")
    if "02" in todo or "check" in todo:
        vllm_runtime.require_version()


def _require_driver() -> None:
    """nvidia-smi shows GPUs that torch cannot use: an old driver, or a torch without CUDA."""
    if torch.cuda.device_count() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return
    if answer:
        built = torch.version.cuda
        needs = f"is for CUDA {built}" if built else "has no CUDA"
        remedy = "update the driver (CUDA 13 needs 580)" if built else "install the gpu extra (EAGLE3_EXTRA=gpu)"
        raise UserError(
            f"nvidia-smi lists {len(answer)} GPUs with driver {answer[0]}, torch {torch.__version__} {needs} and can "
            f"use none; {remedy}, or set CUDA_VISIBLE_DEVICES= to run without"
        )
