"""What a training run takes: floating-point operations, bytes kept for backward, memory of a rank, steps and hours.

Counts come from the loss masks of real packs, whose states are not read. Everything is derived from what
draft/training_time_test.py computes; tests/test_dry_run.py counts what it keeps.
"""

import argparse
import os
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle3 import artifacts, terminal
from eagle3.draft.config import NORM_KEYS, DraftConfig, derive
from eagle3.draft.model import Batch, DraftModel
from eagle3.export import config_json
from eagle3.target import Target
from eagle3.training import packing
from eagle3.training.inputs import Inputs
from eagle3.training.supervision import make_batch

PACKS_READ = 32  # of the first epoch: their mean stands for all
SHARE_OF_MATMUL_RATE = 0.5  # that a whole training step is taken to reach
FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Work:
    """What the cost of one micro-batch follows."""

    tokens: int  # T
    supervised: int  # S, final states
    rows: int  # R, draft starts
    embedded: int  # U, tokens whose query half is taken
    steps: int  # K
    seen: int  # step-0 keys, summed over the rows that see them

    @classmethod
    def of(cls, batch: Batch) -> "Work":
        return cls(
            tokens=len(batch.input_ids),
            supervised=len(batch.final_hidden),
            rows=batch.rows.numel(),
            embedded=batch.embedded.numel(),
            steps=len(batch.valid),
            seen=int((batch.shared.last - batch.shared.first + 1).sum()),
        )

    def without_teacher(self) -> "Work":
        """Where the loss is that of the text, which needs no teacher's logits."""
        return replace(self, supervised=0)


def work_of(directory: Path, records: list[dict[str, Any]], steps: int, supervision: str) -> Work:
    """The work of one pack of stage 02's samples in `directory`, from their ids and masks alone."""
    samples = []
    for record in records:
        sample = artifacts.load_fields(artifacts.sample_path(directory, record["index"]), artifacts.PREPARED, "02")
        ids, mask = sample["input_ids"], sample["loss_mask"]
        nothing = {"aux_hidden": torch.empty(len(ids), 0), "final_hidden": torch.empty(int(mask.sum()), 0)}
        samples.append({"input_ids": ids, "loss_mask": mask} | nothing)
    return Work.of(make_batch(samples, steps, supervision))


# ------------------------------------------------------------------------------------------------ formulas


def operations(config: DraftConfig, work: Work, train_lm_head: bool) -> int:
    """Floating-point operations of forward and backward of one micro-batch."""
    size, inner, draft = config.hidden_size, config.intermediate_size, config.draft_vocab_size
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    tokens, rows, steps = work.tokens, work.rows, work.steps
    # forward 2, gradients of input and weight 2 each; the aux states need none, their norms do
    fc = (6 if config.fc_norm else 4) * len(config.aux_layers) * size * size * tokens
    # of k and v the hidden state's half; of q, k and v the embedding's, which takes no gradient itself
    shared = fc + size * (6 * 2 * key * tokens + 4 * (2 * key * tokens + query * work.embedded))
    step = 6 * size * (2 * query + 3 * inner) * rows  # q, o and the MLP
    own = 6 * size * 2 * key * rows * (steps - 1)
    head = (6 if train_lm_head else 4) * size * draft * rows * steps + 2 * size * draft * work.supervised
    attention = (4 + 10) * query * work.seen * steps  # backward recomputes the scores
    return shared + step * steps + own + head + attention


def sample_cost(config: DraftConfig, steps: int, train_lm_head: bool, loss: str) -> packing.Cost:
    """What `operations` makes of a token, of a supervised one, and of a key that a draft start sees."""
    unit = Work(tokens=0, supervised=0, rows=0, embedded=0, steps=steps, seen=0)
    row = replace(unit, rows=1, embedded=1, supervised=int(loss == "kl"))
    parts = (replace(unit, tokens=1), row, replace(unit, seen=1))
    return packing.Cost(*(operations(config, part, train_lm_head) for part in parts))


def saved_bytes(config: DraftConfig, work: Work, itemsize: int, *, recompute: bool = False) -> int:
    """Bytes of activations that one micro-batch keeps for backward: weights, states and indexes are not among them.

    itemsize: bytes of a number of the weights' dtype. recompute: activation checkpointing, at the moment when the last
    step has been computed again.
    """
    size, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
    query, key = heads * width, config.num_key_value_heads * width
    tokens, rows, steps = work.tokens, work.rows, work.steps
    # what step 0 takes, its norm with the roots, keys and values; cos and sin
    total = itemsize * tokens * 2 * (size + key) + FLOAT32 * (tokens + 2 * width * (tokens + steps * rows))
    total += itemsize * rows * (2 * key * (steps - 1) + query * steps)  # own keys and values, what attention gave
    if config.fc_norm:  # by autograd: float32 copies of the states, and their norms
        total += len(config.aux_layers) * tokens * size * (itemsize + FLOAT32)
    streams = itemsize * rows * size * (steps + 1)  # before the first step and after each
    # norms of a step's input, of the stream after attention, and of its output; that stream; query, gate, up, logits
    step = itemsize * rows * (4 * size + query + 2 * config.intermediate_size + config.draft_vocab_size)
    step += FLOAT32 * rows * (heads + 3)  # log-sum-exp and roots
    if recompute:
        return total + streams + step + itemsize * work.embedded * query
    return total + streams + step * steps - FLOAT32 * rows  # step 0 shares the roots of all tokens


def backward_bytes(config: DraftConfig, work: Work, itemsize: int) -> int:
    """Bytes that backward adds at its start: gradients of all keys and values."""
    key = config.num_key_value_heads * config.head_dim
    return itemsize * 2 * key * (work.tokens + work.rows * (work.steps - 1))


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters."""

    trained: int
    frozen: int  # embedding, and lm_head unless it is trained
    teacher: int  # rows of the target's lm_head

    @classmethod
    def of(cls, config: DraftConfig, train_lm_head: bool) -> "Weights":
        with torch.device("meta"):
            model = DraftModel(config)
        every = sum(parameter.numel() for parameter in model.parameters())
        head = model.lm_head.weight.numel()
        frozen = model.embed_tokens.numel() + (0 if train_lm_head else head)
        return cls(every if train_lm_head else every - head, frozen, head)


def state_bytes(weights: Weights, itemsize: int, deepspeed: dict[str, Any], world: int) -> dict[str, int]:
    """Bytes of a rank for weights, gradients and optimizer, by name; what DeepSpeed keeps in host memory is named so.

    ZeRO stage 1 divides the optimizer's over the ranks, 2 also the gradients, 3 also the weights. Without ZeRO float32
    weights are their own master copy.
    """
    zero = deepspeed.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    offloaded = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    master = 0 if stage == 0 and itemsize == FLOAT32 else FLOAT32
    optimizer = "master weights and AdamW's moments, float32" + (", in host memory" if offloaded else "")
    return {
        "weights, frozen ones too": itemsize * (weights.trained // (world if stage >= 3 else 1) + weights.frozen),
        "target's lm_head for the draft ids": itemsize * weights.teacher,
        "gradients": itemsize * weights.trained // (world if stage >= 2 else 1),
        optimizer: (master + 2 * FLOAT32) * weights.trained // (world if stage >= 1 else 1),
    }


def input_bytes(config: DraftConfig, work: Work, itemsize: int) -> int:
    """Bytes of a micro-batch's states on the device, and of the teacher's logits."""
    aux = len(config.aux_layers) * config.hidden_size * work.tokens
    return itemsize * (aux + (config.hidden_size + config.draft_vocab_size) * work.supervised)


def matmul_rate(dtype: torch.dtype) -> float:
    """Floating-point operations a second that this GPU reaches in an 8192 x 8192 x 8192 product of random numbers."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(13):
        torch.cuda.synchronize()
        started = time.perf_counter()
        a @ b
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * 8192**3 / statistics.median(seconds[3:])


# ------------------------------------------------------------------------------------------------ dry run


def show_dry_run(
    flags: argparse.Namespace,
    target: Target,
    inputs: Inputs,
    stated: dict[str, Any] | None,
    deepspeed: dict[str, Any],
    train: list[dict[str, Any]],
) -> None:
    """Print what stage 04 would take with its `flags`, once for all ranks of a launcher. Nothing is made or locked.

    stated: the draft config file; train: records of the samples that are trained on. Raises UserError for what the run
    itself would refuse: a shape that no server takes, a sample that fits no micro-batch.
    """
    started = time.monotonic()
    norms = [key for key in NORM_KEYS if getattr(flags, key)]
    config = derive(target, len(inputs.d2t), inputs.aux_layers, stated, norms)
    config_json(config, target)
    if os.environ.get("RANK", "0") != "0":
        return
    rows = dry_run(config, flags, deepspeed, inputs.directory, train, int(os.environ.get("WORLD_SIZE", "1")))
    terminal.summary("stage 04, dry run: nothing was made", rows, started)


def dry_run(
    config: DraftConfig,
    flags: argparse.Namespace,
    deepspeed: dict[str, Any],
    directory: Path,
    train: list[dict[str, Any]],
    world: int,
) -> dict[str, str]:
    """The rows that `show_dry_run` prints, for `world` ranks; `directory` holds stage 02's samples."""
    gpu, trained = torch.cuda.is_available(), flags.lm_head == "trained"
    name = flags.dtype if flags.dtype != "auto" else "bfloat16" if gpu else "float32"
    dtype = getattr(torch, name)
    itemsize = dtype.itemsize
    budgets = flags.max_tokens, flags.max_rows or flags.max_tokens
    cost = sample_cost(config, flags.ttt_steps, trained, flags.loss)
    epochs = [packing.epoch_packs(train, *budgets, flags.seed, epoch, cost) for epoch in range(flags.epochs)]
    train = list(filter(packing.is_whole, train))
    micro = world * flags.accumulation
    steps = sum(packing.steps_per_epoch(len(packs), world, flags.accumulation) for packs in epochs)

    def work(records: list[dict[str, Any]]) -> Work:
        found = work_of(directory, records, flags.ttt_steps, flags.supervision)
        return found if flags.loss == "kl" else found.without_teacher()

    packs = list(filter(None, epochs[0]))
    read = [work(pack) for pack in packs[:: -(-len(packs) // PACKS_READ)]]
    fullest = work(max(packs, key=lambda pack: (sum(r["supervised"] for r in pack), sum(r["tokens"] for r in pack))))
    tokens = sum(one.tokens for one in read)
    a_token = sum(operations(config, one, trained) for one in read) / tokens
    all_tokens = sum(record["tokens"] for record in train)
    mean_tokens = all_tokens * flags.epochs / steps  # of a step, all ranks
    mean_bytes = sum(record["bytes"] for record in train) * flags.epochs / steps

    weights = Weights.of(config, trained)
    memory = state_bytes(weights, itemsize, deepspeed, world)
    recompute = flags.activation_checkpointing
    saved = saved_bytes(config, fullest, itemsize, recompute=recompute)
    memory["activations" + (", checkpointed" if recompute else "")] = saved
    memory["gradients of keys and values"] = backward_bytes(config, fullest, itemsize)
    memory["states and teacher logits"] = input_bytes(config, fullest, itemsize)
    on_device = sum(size for part, size in memory.items() if "host memory" not in part)

    rows = {
        "weights": f"{weights.trained:,} trained, {weights.frozen:,} frozen",
        "optimizer steps": f"{steps:,}: {flags.epochs} epochs of {len(train):,} samples, {all_tokens:,} tokens, "
        f"{micro} micro-batch{'es' if micro > 1 else ''} a step",
        "FLOPs a token": f"{a_token:.3g}, forward and backward (mean of {len(read)} of {len(packs)} packs)",
        "FLOPs a step": f"{a_token * mean_tokens:.3g} for {mean_tokens:,.0f} tokens on {_ranks(world)}",
        "states read a step": f"{_size(mean_bytes)} by all ranks",
        "memory a rank": f"{_size(on_device)} for {name} on {_ranks(world)}, ZeRO stage "
        f"{deepspeed.get('zero_optimization', {}).get('stage', 0)}, without workspace and communication buckets",
    }
    rows |= {f"  {part}": _size(size) for part, size in memory.items()}
    rows["  of a micro-batch of"] = (
        f"{fullest.tokens:,} tokens, {fullest.rows:,} draft starts: the one with most supervised tokens"
    )
    if gpu:
        rate = matmul_rate(dtype)
        hours = a_token * all_tokens * flags.epochs / (SHARE_OF_MATMUL_RATE * rate * world) / 3600
        rows["hours"] = (
            f"{hours:.2f} on {_ranks(world)}, if a step reaches {SHARE_OF_MATMUL_RATE:.0%} of the {rate / 1e12:.0f} "
            f"TFLOP/s that a matrix product reached here now ({torch.cuda.get_device_name()}); evaluation and "
            "checkpoints come on top"
        )
    else:
        rows["hours"] = "no GPU: not estimated"
    return rows


def _ranks(world: int) -> str:
    return f"{world} rank{'s' if world > 1 else ''}"


def _size(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"
