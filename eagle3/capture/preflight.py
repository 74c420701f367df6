"""What can be known to fail before the engine is loaded, which takes minutes: packages, memory, ports.

It takes about a second: it looks at files, at torch's list of GPUs and at nvidia-smi, says what is in the way, and ends
nothing. Only what is sure to fail is refused: the caches and activations that an engine needs besides its weights are
the engine's to weigh.
"""

import errno
import math
import os
import re
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3 import engine_guard, model_files, terminal
from eagle3.capture.interface import EngineSettings
from eagle3.packages import auto_classes, require_packages
from eagle3.target import Target
from eagle3.terminal import UserError

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY = 1 << 30  # NCCL and vLLM's queues; Docker's default is 64 MB
MEMINFO = Path("/proc/meminfo")
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
PATIENCE = 5.0  # s: a process that has just ended gives its GPU memory back with a delay
MOST_NAMED = 4  # GPUs and processes in one message
FLOATS = {"F64", "F32", "F16", "BF16"}  # safetensors' names of what engines cast to the run's dtype


def check(engine: str, settings: EngineSettings) -> None:
    """Raises UserError for what `engine` (vllm or transformers) would fail with, naming the figures and the remedy."""
    require_target_packages(engine, settings.target, settings.trust_remote_code)
    if engine == "vllm":
        look_at_ports()
        if settings.tensor_parallel_size > 1:
            require_shared_memory()
    require_memory(engine, settings)


def require_memory(engine: str, settings: EngineSettings) -> None:
    """Raises UserError where GPUs, or the host without them, have no room for the target."""
    weights = weight_bytes(engine, settings)
    if visible := torch.cuda.device_count() if engine == "vllm" or settings.device == "cuda" else 0:
        _require_gpu_memory(engine, settings, weights, visible)
    elif weights > (free := available_memory()):
        raise UserError(
            f"the target's weights take {_gib(weights)} in {settings.layout.dtype}, the host has {_gib(free)} of "
            "memory available; end what else holds it (top shows it), or take a smaller target"
        )


def require_target_packages(engine: str, target: Target, trust_remote_code: bool) -> None:
    """Raises UserError naming the packages that this target needs in this engine and that are not installed."""
    classes: set[str] = set()
    if trust_remote_code:
        # vLLM runs its own model classes; transformers those of the directory, without a tokenizer
        vllm_runs = {"AutoConfig", "AutoTokenizer", "AutoProcessor", "AutoImageProcessor", "AutoVideoProcessor"}
        models = {name for name in auto_classes(target.directory) if name.startswith("AutoModel")}
        classes = vllm_runs if engine == "vllm" else models | {"AutoConfig"} if models else set()
    require_packages(target.directory, classes, unpacks=engine == "transformers")


# ------------------------------------------------------------------------------------ shared memory, ports


def require_shared_memory() -> None:
    """Raises UserError where /dev/shm has no room for what several GPUs exchange there."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.exists() else 0
    if free < LEAST_SHARED_MEMORY:
        raise UserError(
            f"{SHARED_MEMORY} has {free / 1e6:.0f} MB free, several GPUs need {LEAST_SHARED_MEMORY / 1e6:.0f} MB there "
            "to talk to each other; start the container with --shm-size=16g or --ipc=host, else clear it"
        )


def look_at_ports() -> None:
    """Say which of the ports that the environment names is taken: vLLM looks for others, and may be blocked there."""
    for name in ("VLLM_PORT", "MASTER_PORT"):
        port = os.environ.get(name, "").strip()
        if not port.isdigit() or int(port) > 65535:
            if port and name == "VLLM_PORT":
                raise UserError(
                    f"{name} is {port}, expected a port; unset it (Kubernetes sets it where a service is named vllm)"
                )
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("", int(port)))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    terminal.warn(f"{name} is {port}, which another process is using; unset it, or give a free port")


# ------------------------------------------------------------------------------------------------- weights


def weight_bytes(engine: str, settings: EngineSettings) -> int:
    """Memory that the target's weights take at least, from the headers of its files."""
    target, size = settings.target, settings.torch_dtype.itemsize
    quantised, nested = _quantisation(target)
    # transformers unpacks compressed-tensors of a nested model while it loads them (transformers_engine)
    unpacked = 32 // _bits(quantised) if engine == "transformers" and nested else 0
    files = model_files.weight_files(target.directory)
    headers = {path: model_files.read_header(path) for path in set(files.values())}
    total = 0
    for name, path in files.items():
        layer = re.search(r"\blayers\.(\d+)\.", name)
        if layer and int(layer[1]) >= target.num_layers:
            continue  # of multi-token prediction, which no engine loads here
        entry = headers[path][name]
        start, end = entry["data_offsets"]
        if unpacked and name.endswith("_packed"):
            total += math.prod(entry["shape"]) * unpacked * size
        elif entry["dtype"] in FLOATS:
            total += math.prod(entry["shape"]) * size
        else:
            total += end - start
    return total


def _quantisation(target: Target) -> tuple[dict[str, Any], bool]:
    """quantization_config, and whether it is compressed-tensors of a model with a text_config."""
    raw = model_files.read_json(target.directory / "config.json") or {}
    text = raw.get("text_config") or {}
    found = raw.get("quantization_config") or text.get("quantization_config") or {}
    return found, bool(text) and found.get("quant_method") == "compressed-tensors"


def _bits(quantised: dict[str, Any]) -> int:
    """Width of packed weights; 32 where the config does not say."""
    groups = (quantised.get("config_groups") or {}).values()
    return next((group["weights"]["num_bits"] for group in groups if group.get("weights")), 32)


def available_memory() -> int:
    """Bytes that the host or this container can still give."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB$", MEMINFO.read_text(), re.MULTILINE)
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.exists() else "max"
    return min(int(available[1]) << 10, math.inf if limit == "max" else int(limit))


# --------------------------------------------------------------------------------------------- GPU memory


@dataclass(frozen=True)
class Gpu:
    number: int  # as nvidia-smi counts where it knows the GPU, else as CUDA does
    uuid: str
    total: int  # bytes, as CUDA says it
    free: int


@dataclass(frozen=True)
class Holder:
    """A process with memory on a GPU."""

    pid: int
    text: str


def _require_gpu_memory(engine: str, settings: EngineSettings, weights: int, visible: int) -> None:
    share, count = settings.gpu_memory_utilization, settings.tensor_parallel_size
    if engine == "transformers":  # spreads over all of them as they have room
        share, count = 1.0, visible
    gpus = _gpus(count)
    least = min(gpu.total for gpu in gpus)
    if weights > share * least * count:
        raise UserError(_too_large(settings, weights, share * least, count, visible))
    deadline = time.monotonic() + PATIENCE
    while short := _short(engine, gpus, share, weights):
        left = engine_guard.survivors(settings.output_dir)  # waits for those that are being ended
        if time.monotonic() > deadline:
            raise UserError(_in_the_way(engine, short, share, weights / count, left))
        time.sleep(0.5)
        gpus = _gpus(count)


def _too_large(settings: EngineSettings, weights: int, usable: float, count: int, visible: int) -> str:
    least = math.ceil(weights / usable)
    heads = settings.target.config.get("num_attention_heads") or 0
    # tensor parallelism divides the heads
    wanted = next((number for number in range(least, heads + 1) if heads % number == 0), least)
    plural = "" if count == 1 else "s"
    remedy = f"give --tensor-parallel-size {wanted}" if wanted <= visible else f"it takes {wanted}, {visible} visible"
    return (
        f"the target's weights take {_gib(weights)}, {count} GPU{plural} of which {_gib(usable)} each may be used "
        f"(--gpu-memory-utilization) cannot hold them; {remedy}"
    )


def _short(engine: str, gpus: list[Gpu], share: float, weights: int) -> dict[Gpu, float]:
    """GPUs with less free memory than they are to give, and how much that is: vLLM demands its share of each."""
    if engine == "vllm":
        wanted = {gpu: share * gpu.total for gpu in gpus}
    elif weights > sum(gpu.free for gpu in gpus):
        wanted = dict.fromkeys(gpus, weights / len(gpus))
    else:
        return {}
    return {gpu: size for gpu, size in wanted.items() if gpu.free < size}


def _in_the_way(engine: str, short: dict[Gpu, float], share: float, weights: float, left: dict[int, str]) -> str:
    """The message for GPUs without room; `weights` on each GPU, `left`: engine processes of killed runs."""
    holders = _holders()
    parts: list[str] = []
    pids: set[int] = set()
    for gpu, wanted in list(short.items())[:MOST_NAMED]:
        mine = holders.get(gpu.uuid, [])
        named = ", ".join(
            holder.text + (" left by a killed run" if holder.pid in left else "") for holder in mine[:MOST_NAMED]
        )
        named += f" and {len(mine) - MOST_NAMED} more" if len(mine) > MOST_NAMED else ""
        pids |= {holder.pid for holder in mine}
        parts.append(
            f"GPU {gpu.number} has {_gib(gpu.free)} of {_gib(gpu.total)} free, {_gib(wanted)} are wanted, in the way: "
            + (named or "nothing that nvidia-smi shows here: another container's, or another user's")
        )
    if len(short) > MOST_NAMED:
        parts.append(f"{len(short) - MOST_NAMED} more GPUs likewise")
    them = "it" if len(pids) == 1 else "them"
    remedy = f"end {them} if you do not need {them}"
    room = min(math.floor(100 * gpu.free / gpu.total) / 100 for gpu in short)
    if engine == "vllm" and all(room * gpu.total > weights for gpu in short):
        remedy += f", or give --gpu-memory-utilization {room:g} (now {share:g})"
    return "; ".join([*parts, remedy])


def _gpus(count: int) -> list[Gpu]:
    """The first `count` GPUs that CUDA shows this process, whatever CUDA_VISIBLE_DEVICES made of their order."""
    listed = {row[0]: row[1:] for row in _nvidia_smi("--query-gpu=uuid,index,memory.total,memory.free")}
    gpus = []
    for number in range(count):
        known = torch.cuda.get_device_properties(number)
        uuid, total = f"GPU-{known.uuid}", known.total_memory
        row = listed.get(uuid, [])
        if row and all(map(str.isdigit, row)) and abs((int(row[1]) << 20) - total) < 0.05 * total:
            gpus.append(Gpu(int(row[0]), uuid, total, int(row[2]) << 20))
            continue
        # no nvidia-smi, a slice of a GPU (MIG), or memory shared with the host. To ask CUDA takes half a GB of the GPU
        free, total = torch.cuda.mem_get_info(number)
        if known.is_integrated:
            free = max(free, available_memory())  # the page cache gives way
        gpus.append(Gpu(number, uuid, total, free))
    return gpus


def _holders() -> dict[str, list[Holder]]:
    """Processes on each GPU, by its uuid."""
    found: dict[str, list[Holder]] = {}
    for uuid, pid, *name, size in _nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory"):
        if pid.isdigit():
            held = f", {size} MiB" if size.isdigit() else ""
            found.setdefault(uuid, []).append(Holder(int(pid), f"pid {pid} ({', '.join(name)[-60:]}{held})"))
    return found


def _nvidia_smi(query: str) -> list[list[str]]:
    """Rows of a query; none where nvidia-smi is absent or fails."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[field.strip() for field in line.split(",")] for line in answer.splitlines() if line.count(",") >= 3]


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
