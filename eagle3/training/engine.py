"""DeepSpeed's ranks and its engine."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.optim.lr_scheduler import LambdaLR

from eagle3.draft.model import DraftModel
from eagle3.terminal import UserError


@contextlib.contextmanager
def distributed() -> Iterator[tuple[int, int]]:
    """Join the ranks a launcher started (torchrun, deepspeed), or be the only one. Gives (rank, world)."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns that it found no GPU
    if os.environ["WORLD_SIZE"] == "1":
        os.environ.setdefault("MASTER_PORT", "0")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # On CPU it would compile its own all-reduce with g++ at run time, for minutes; gloo needs nothing
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(device())  # collectives of objects use the current device
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    try:
        yield dist.get_rank(), dist.get_world_size()
    except BaseException:
        if dist.get_world_size() > 1:
            raise  # the other ranks may be waiting in a collective: leaving the group in order would wait with them
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def device() -> torch.device:
    """This rank's device."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def start(
    model: DraftModel, config: dict[str, Any], factor: Callable[[int], float], settings: dict[str, float]
) -> tuple[Any, torch.optim.AdamW, LambdaLR]:
    """DeepSpeed's engine around the trainable weights of `model`, its AdamW with `settings`, and the schedule.

    config: DeepSpeed's, all but the micro-batch; factor: of the learning rate at each step. Raises UserError naming
    the key and the fault of a value that DeepSpeed does not take.
    """
    import deepspeed

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, betas=(0.9, 0.95), fused=True, **settings)
    schedule = LambdaLR(optimizer, factor)
    config = config | {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9}
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    except ValidationError as error:
        (fault, *_) = error.errors()
        where = ".".join(map(str, fault["loc"]))
        raise UserError(f"--deepspeed-config: {where} is {fault['input']!r}: {fault['msg']}") from error
    for state in optimizer.state.values():  # bf16 without ZeRO: DeepSpeed has stepped to allocate it
        state["step"].zero_()
    return engine, optimizer, schedule
