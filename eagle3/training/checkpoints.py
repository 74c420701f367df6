"""The output directory of a run, and DeepSpeed's checkpoints in it: written whole, rotated, loaded by as many ranks as
wrote them or by others.

    OUT/draft/checkpoints/  latest  step00000500/  step00001000/  best.safetensors
"""

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from eagle3 import artifacts
from eagle3.terminal import UserError

MASTERS = "single_partition_of_fp32_groups"  # in DeepSpeed's files, without padding


def barrier() -> None:
    """Wait for all ranks."""
    if dist.get_world_size() > 1:
        dist.barrier()


@contextlib.contextmanager
def output_lock(directory: Path) -> Iterator[None]:
    """Hold the output directory's lock on rank 0; all ranks stop when it is taken."""
    with contextlib.ExitStack() as stack:
        refused: UserError | None = None
        if dist.get_rank() == 0:
            try:
                stack.enter_context(artifacts.directory_lock(directory))
            except UserError as error:
                refused = error
        verdict = [str(refused) if refused else None]
        dist.broadcast_object_list(verdict)
        if verdict[0]:
            raise UserError(verdict[0])
        yield


def claim_output(directory: Path, fingerprint: dict[str, Any]) -> None:
    """Start a manifest, or refuse a directory that another training run filled."""
    earlier = artifacts.read_manifest(directory, "04", missing_ok=True)
    barrier()  # every rank has looked before rank 0 writes
    if earlier:
        remedy = "give another --output-dir, or delete this one"
        artifacts.require_same(directory, earlier["fingerprint"], fingerprint, remedy)
    elif (directory / "checkpoints" / "latest").exists():
        raise UserError(f"{directory} has checkpoints but no manifest.json; what made them is unknown: delete them")
    elif dist.get_rank() == 0:
        artifacts.write_manifest(directory, "04", fingerprint, complete=False)


def write(engine: Any, folder: Path, tag: str, state: dict[str, Any], before: str | None) -> None:
    """Write checkpoint `tag`; `latest` points to it only once it is whole and on disk. `before` stays too, no other.

    To be called by all ranks.
    """
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(folder / tag, ignore_errors=True)  # half written by a killed run
    barrier()
    with artifacts.writing(folder / tag):
        engine.save_checkpoint(str(folder), tag=tag, client_state=state, save_latest=False)
    barrier()  # every rank's part is written
    if rank == 0:
        for path in (*(folder / tag).iterdir(), folder / tag):
            artifacts.sync_folder(path)  # a file as well
        with artifacts.atomic_file(folder / "latest", "w") as file:
            file.write(tag)
        for old in folder.glob("step*"):  # half written ones of killed runs may have later names
            if old.name not in (tag, before):
                shutil.rmtree(old)


def load(engine: Any, folder: Path) -> tuple[str, dict[str, Any]] | None:
    """Load what `latest` names into the engine; its name and the state that was written with it, None without any.

    Weights, float32 masters and optimizer state are those that were saved, bit for bit, whatever number of ranks saved
    them: DeepSpeed 0.19 itself refuses another number with ZeRO 1 and 2, though every file holds a consecutive slice of
    the same flat vector. Raises UserError naming the checkpoint, what is wrong and the one to go back to.
    """
    if not (folder / "latest").exists():
        return None
    tag = (folder / "latest").read_text().strip()
    try:
        parts = _parts(folder / tag) if engine.zero_optimization() else []
        moved = len(parts) not in (0, dist.get_world_size())
        path, state = engine.load_checkpoint(str(folder), tag=tag, load_optimizer_states=not moved)
        if moved:
            _load_parts(engine.optimizer, parts)
    except Exception as error:
        raise UserError(
            f"checkpoint {folder / tag} does not load ({str(error).splitlines()[0] if str(error) else error!r}); "
            f"write an earlier one's name into {folder / 'latest'}: "
            f"{', '.join(p.name for p in sorted(folder.glob('step*')) if p.name != tag) or 'none there'}"
        ) from error
    if path is None:
        raise UserError(f"checkpoint {folder / tag} is incomplete; write an earlier one's name into latest")
    return tag, state


def _parts(directory: Path) -> list[Path]:
    """Each rank's part of the optimizer state, in order. Raises FileNotFoundError naming those that are missing."""
    found = {int(m[1]): path for path in directory.glob("*") if (m := re.search(r"zero_pp_rank_(\d+)_", path.name))}
    if not found:
        raise FileNotFoundError("no file of it holds the optimizer state of a ZeRO stage from 1 on")
    path = next(iter(found.values()))
    count = _read(path)["partition_count"][0]
    if missing := [rank for rank in range(count) if rank not in found]:
        names = [re.sub(r"_rank_\d+", f"_rank_{rank}", path.name, count=1) for rank in missing]
        raise FileNotFoundError(f"{len(found)} of {count} ranks' files are there, missing {', '.join(names)}")
    return [found[rank] for rank in range(count)]


def _read(path: Path) -> dict[str, Any]:
    # as DeepSpeed reads it: its own checkpoints hold Python objects, and are trusted as local
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)["optimizer_state_dict"]


def _load_parts(optimizer: Any, paths: list[Path]) -> None:
    """Load this rank's slice of what other ranks saved into DeepSpeed's ZeRO 1 or 2 optimizer."""
    if optimizer.round_robin_gradients:
        raise ValueError("round_robin_gradients orders weights by the number of ranks, which has changed")
    rank, saved = dist.get_rank(), [_read(path) for path in paths]
    mine, state = dict(saved[0]), {}
    mine[MASTERS] = []
    for group, current in enumerate(optimizer.single_partition_of_fp32_groups):
        start, size = rank * current.numel(), current.numel()
        mine[MASTERS].append(_slice([part[MASTERS][group] for part in saved], start, size))
        moments = [part["base_optimizer_state"]["state"].get(group, {}) for part in saved]
        state[group] = {  # with padding of zeros at the end; a number is the count of steps
            name: _slice([one[name] for one in moments], start, size) if value.dim() else value
            for name, value in moments[0].items()
        }
    mine["base_optimizer_state"] = saved[0]["base_optimizer_state"] | {"state": state}
    optimizer.load_state_dict({rank: mine}, load_optimizer_states=True, load_from_fp32_weights=True)


def _slice(parts: list[torch.Tensor], start: int, size: int) -> torch.Tensor:
    """Numbers start to start + size of the vectors `parts`, one after the other; zeros behind their end, [size]."""
    taken = torch.zeros(size, dtype=parts[0].dtype)
    first = 0  # of the part
    for part in parts:
        low, high = max(start, first), min(start + size, first + len(part))
        if low < high:
            taken[low - start : high - start] = part[low - first : high - first]
        first += len(part)
    return taken
