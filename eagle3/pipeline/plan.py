"""What a run takes, stage by stage, before it starts: disk, host memory, GPU memory, tokens, hours.

Bytes come from the formulas of what the stages write (states.Layout, sample_file, draft/config) and training/estimate;
seconds from what was measured here (measured.py), else from assumptions that the plan states.
"""

import argparse
import math
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from eagle3.draft.config import NORM_KEYS, DraftConfig, derive, read_draft_config
from eagle3.pipeline.closing import folder_bytes
from eagle3.pipeline.machine import Machine
from eagle3.pipeline.measured import Measured
from eagle3.pipeline.settings import FOLDERS, STAGES, Settings
from eagle3.pipeline.sizes import BF16, TargetSize
from eagle3.prepare.sample_file import sample_file
from eagle3.states import Layout
from eagle3.target import Target
from eagle3.training import estimate, packing
from eagle3.training.inputs import read_deepspeed_config

ASSUMED_SAMPLES = 100_000
ASSUMED_TOKENS = 800  # of a sample of chat data
ASSUMED_SUPERVISED = 0.6  # of its tokens
BYTES_A_TOKEN = 4.0  # of a row of JSON
INDEX_LINE = {"01": 185, "02": 218}  # bytes
PREPARE_RATE, PREPARE_RATE_CODE = 400_000, 20_000  # tokens/s: a fast tokenizer, one in Python
READ_RATE, WRITE_RATE = 2e9, 1e9  # bytes/s of a disk: weights, states
CAPTURE_SHARE = 0.25  # of the matmul rate, in a forward pass of the target
GENERATED = 100  # answers' tokens/s of all requests of the served check together, where nothing is measured
PROCESS = 1_300_000_000  # bytes of a Python with torch and DeepSpeed or vLLM
STARTUP = {"01": 8.0, "02": 25.0, "03": 4.0, "04": 25.0, "check": 25.0}  # s
SOFT_SHARE = 0.9  # of a memory: an estimate above it may not fit
SUMMARY_FILES = 3_000  # bytes: manifest and lock


@dataclass(frozen=True)
class Finding:
    """Something in the way. "hard" is sure to fail, "soft" may, "note" is worth knowing."""

    level: str
    text: str


@dataclass(frozen=True)
class Data:
    """What is trained on."""

    samples: int
    tokens: int
    supervised: int
    longest: int
    known: str  # where these are from; assumptions say so
    records: list[dict[str, Any]] | None  # of stage 01's index; None: assumed

    @property
    def share(self) -> float:
        return self.supervised / max(self.tokens, 1)


@dataclass
class StagePlan:
    """Of one stage. Bytes and seconds; None: nothing of it."""

    stage: str
    disk: int = 0  # that stays
    peak: int = 0  # most on disk meanwhile
    host: int = 0
    gpu: int = 0  # of each
    tokens: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    there: int = 0  # bytes on disk already
    done: bool = False


@dataclass
class Plan:
    stages: dict[str, StagePlan]
    data: Data
    target: TargetSize
    weights_a_gpu: int
    bytes_a_token: float  # of stages 01 and 02
    findings: list[Finding] = field(default_factory=list)

    def level(self) -> str:
        """The worst of the findings: hard, soft, note, or nothing."""
        levels = [finding.level for finding in self.findings]
        return next((level for level in ("hard", "soft", "note") if level in levels), "")


@dataclass(frozen=True)
class Job:
    """All that a plan is made from."""

    settings: Settings
    flags: dict[str, argparse.Namespace]
    target: Target
    size: TargetSize
    layout: Layout
    machine: Machine
    data: Data
    measured: list[Measured]
    finished: frozenset[str]
    engine: str

    @property
    def gpus(self) -> int:
        """Of a node: ranks of training there, and of tensor parallelism."""
        return int(self.settings.values["GPUS"])

    @property
    def nodes(self) -> int:
        return len(self.settings.nodes) or 1

    @property
    def on_gpu(self) -> bool:
        return self.machine.gpus > 0


# ---------------------------------------------------------------------------------------------------- data


def data_of(records: list[dict[str, Any]], known: str) -> Data:
    tokens = [record["tokens"] for record in records]
    return Data(len(tokens), sum(tokens), sum(r["supervised"] for r in records), max(tokens, default=0), known, records)


def assumed_data(settings: Settings, max_seq_len: int) -> Data:
    """Before stage 01 has run: samples from --max-samples or a local file's lines, lengths assumed."""
    dataset, wanted = settings.values["DATASET"], settings.values["MAX_SAMPLES"]
    tokens, samples = min(ASSUMED_TOKENS, max_seq_len), ASSUMED_SAMPLES
    whence = f"{samples:,} samples assumed, the dataset does not say"
    if os.path.isfile(dataset) and dataset.endswith(".jsonl"):
        with open(dataset, "rb") as file:
            samples = sum(1 for _ in file)
        tokens = min(max(1, round(os.path.getsize(dataset) / max(samples, 1) / BYTES_A_TOKEN)), max_seq_len)
        whence = f"{samples:,} lines of {os.path.basename(dataset)}"
    if wanted:
        samples = int(wanted)
        whence = f"--max-samples {samples:,}"
    known = f"assumed: {whence}, {tokens} tokens each, {ASSUMED_SUPERVISED:.0%} of them supervised"
    total = samples * tokens
    return Data(samples, total, round(total * ASSUMED_SUPERVISED), max_seq_len, known, None)


# ---------------------------------------------------------------------------------------------------- disk


def prepared_bytes(data: Data, vocab_size: int) -> int:
    """What stage 01 writes."""
    counts = 8 * vocab_size + 1_700
    if data.records is not None:
        samples = sum(record["bytes"] for record in data.records)
    else:
        mean = data.tokens // max(data.samples, 1)
        samples = data.samples * len(sample_file(np.zeros(mean, np.int32), np.zeros(mean, np.bool_)))
    return samples + data.samples * INDEX_LINE["01"] + counts + min(counts, 16 * data.supervised // 8) + SUMMARY_FILES


def states_bytes(data: Data, layout: Layout) -> int:
    """What stage 02 writes."""
    if data.records is not None:
        samples = sum(layout.sample_bytes(record["tokens"], record["supervised"]) for record in data.records)
    else:
        means = data.tokens / max(data.samples, 1), data.supervised / max(data.samples, 1)
        samples = round(data.samples * layout.sample_bytes(*map(math.ceil, means)))
    return samples + data.samples * INDEX_LINE["02"] + 5_000 + SUMMARY_FILES


def map_bytes(vocab_size: int, draft_vocab_size: int) -> int:
    """What stage 03 writes: the map, a figure and a manifest."""
    return vocab_size + 8 * draft_vocab_size + 1_765 + 28_630 + 820


@dataclass(frozen=True)
class DraftBytes:
    checkpoint: int
    best: int
    export: int
    records: int

    def stays(self, checkpoints: int, held_out: bool) -> int:
        return checkpoints * self.checkpoint + held_out * self.best + self.export + self.records

    def peak(self, checkpoints: int, held_out: bool) -> int:
        """While a checkpoint, or a new export beside the old one, is being written."""
        return max(
            self.stays(checkpoints, held_out),
            (checkpoints + 1) * self.checkpoint + 2 * held_out * self.best + self.records,
        )


def draft_bytes(config: DraftConfig, trained_head: bool, itemsize: int, deepspeed: dict, steps: int) -> DraftBytes:
    """What stage 04 writes; itemsize: bytes of a weight in training."""
    weights = estimate.Weights.of(config, trained_head)
    embedding = config.vocab_size * config.hidden_size
    model = weights.trained + weights.frozen - embedding  # frozen lm_head is saved too
    one_rank = estimate.state_bytes(weights, itemsize, deepspeed, 1)
    optimizer = next(size for name, size in one_rank.items() if "AdamW" in name)
    maps = 8 * config.draft_vocab_size + config.vocab_size
    return DraftBytes(
        checkpoint=itemsize * model + optimizer + 10_000,
        best=2 * model + 3_000,
        export=2 * (model + embedding) + (maps if config.draft_vocab_size < config.vocab_size else 0) + 4_000,
        records=620 * steps + 41_000 + 10_000,  # metrics.jsonl, events, DeepSpeed's scripts, logs
    )


# -------------------------------------------------------------------------------------------------- stages


def make_plan(job: Job) -> Plan:
    """The plan of all stages that are to run. Raises UserError for flags that stages would refuse."""
    stages = {stage: StagePlan(stage, done=stage in job.finished) for stage in STAGES if stage in job.settings.stages}
    ranks = job.gpus if job.on_gpu else 1
    plan = Plan(stages, job.data, job.size, math.ceil(job.size.weights / ranks), 0.0)
    if "01" in stages:
        _plan_prepare(job, stages["01"])
    if "02" in stages:
        _plan_capture(job, stages["02"], plan.weights_a_gpu)
    if "03" in stages:
        chosen = min(job.flags["03"].draft_vocab_size, job.target.vocab_size)
        stages["03"].disk = stages["03"].peak = map_bytes(job.target.vocab_size, chosen)
        stages["03"].host, stages["03"].seconds = PROCESS, STARTUP["03"]
    if "04" in stages:
        _plan_training(job, stages["04"])
    if "check" in stages:
        _plan_check(job, stages["check"], plan.weights_a_gpu)
    for stage, one in stages.items():
        _apply_measured(job, one)
        one.there = folder_bytes(job.settings.output / FOLDERS[stage]) if stage in FOLDERS else 0
        if one.done and one.there:
            one.disk = one.peak = one.there
            one.seconds = 0.0
    variable = states_bytes(job.data, job.layout) + prepared_bytes(job.data, 0)
    plan.bytes_a_token = variable / max(job.data.tokens, 1)
    return plan


def _plan_prepare(job: Job, one: StagePlan) -> None:
    flags = job.flags["01"]
    one.tokens = job.data.tokens
    one.disk = one.peak = prepared_bytes(job.data, job.target.vocab_size)
    processes = min(os.cpu_count() or 1, 1 + job.data.samples // 2_000)
    one.host = processes * 300_000_000 + 800_000_000
    in_python = job.settings.trust and not (job.target.directory / "tokenizer.json").exists()
    rate = PREPARE_RATE_CODE * processes if in_python else PREPARE_RATE * processes
    before, tokens = next(
        ((m.seconds["01"], m.prepared) for m in job.measured if "01" in m.seconds), (STARTUP["01"], 0)
    )
    one.seconds = before + max(0, job.data.tokens - tokens) / rate
    one.notes.append(f"{rate:,} tokens/s assumed ({'a tokenizer in Python' if in_python else 'a fast tokenizer'})")
    if flags.on_policy:
        rate = _generation_rate(job)
        one.seconds += job.data.supervised / rate
        one.notes.append(f"answers at {rate:,.0f} tokens/s assumed")
        one.gpu = round(flags.gpu_memory_utilization * job.machine.gpu_bytes) if not flags.responses_endpoint else 0


def _generation_rate(job: Job) -> float:
    """Tokens/s of decoding many requests at once: a twentieth of the rate of a forward pass, at least 100."""
    return max(GENERATED, _capture_rate(job) / 20)


def _capture_rate(job: Job) -> float:
    """Tokens/s of forward passes, assumed."""
    devices = job.gpus if job.on_gpu else 1
    return CAPTURE_SHARE * job.machine.matmul * devices / (2 * job.size.active)


def _engine_memory(job: Job, one: StagePlan, weights_a_gpu: int, share: float, batch_tokens: int) -> None:
    """Memory of an engine with the target: of a GPU vLLM takes the share it may, of the host all it needs."""
    flight = batch_tokens * job.layout.sample_bytes(1000, 1000) // 1000
    if job.on_gpu:
        one.gpu = round(share * job.machine.gpu_bytes) if job.engine == "vllm" else weights_a_gpu
        one.host = (2 + job.gpus) * PROCESS + 2 * flight
        rest = one.gpu - weights_a_gpu
        captured = len(job.layout.layers) * job.target.hidden_size * BF16  # every rank caches all of a token's states
        cache = batch_tokens * (captured + job.size.cache // (1 if job.size.latent else job.gpus))
        one.notes.append(
            f"{gigabytes(weights_a_gpu)} GB of weights a GPU ({job.size.counted}) leave {gigabytes(rest)} GB of its "
            f"{share:.0%} for activations and caches; {batch_tokens:,} tokens in flight take {gigabytes(cache)} GB of "
            "them" + (": fewer are in flight at a time, lower --batch-tokens" if cache > 0.8 * rest else "")
        )
        return
    from eagle3.vllm_runtime import CPU_KV_CACHE_BYTES

    cache = CPU_KV_CACHE_BYTES if job.engine == "vllm" else 0
    one.host = 2 * PROCESS + job.size.weights + cache + 2 * flight  # vLLM fills its cache with zeros
    one.notes.append(f"{gigabytes(job.size.weights)} GB of weights ({job.size.counted})")


def _plan_capture(job: Job, one: StagePlan, weights_a_gpu: int) -> None:
    flags = job.flags["02"]
    one.tokens = job.data.tokens
    one.disk = states_bytes(job.data, job.layout)
    if flags.max_disk_gb is not None:
        one.disk = min(one.disk, round(flags.max_disk_gb * 1e9))
    one.peak = one.disk
    batch = flags.batch_tokens or (65536 if job.on_gpu else 4096)
    _engine_memory(job, one, weights_a_gpu, flags.gpu_memory_utilization, batch)
    known = next((found.capture for found in job.measured if found.capture), None)
    if known:
        rate, loading = known.tokens / known.seconds, known.loading
        one.notes.append(f"{rate:,.0f} tokens/s and {loading:.0f} s of loading measured")
    else:
        rate, loading = job.nodes * _capture_rate(job), STARTUP["02"] + job.size.weights / READ_RATE
        one.notes.append(f"{rate:,.0f} tokens/s assumed ({CAPTURE_SHARE:.0%} of the matrix products' rate)")
    one.seconds = loading + max(job.data.tokens / rate, one.disk / WRITE_RATE if not known else 0)


def _plan_training(job: Job, one: StagePlan) -> None:
    flags, machine = job.flags["04"], job.machine
    name = flags.dtype if flags.dtype != "auto" else "bfloat16" if job.on_gpu else "float32"
    itemsize, trained_head = getattr(torch, name).itemsize, flags.lm_head == "trained"
    config, deepspeed = draft_of(job), read_deepspeed_config(flags.deepspeed_config)
    ranks = job.gpus * job.nodes
    budgets = flags.max_tokens, flags.max_rows or flags.max_tokens
    micro = ranks * flags.accumulation
    cost = estimate.sample_cost(config, flags.ttt_steps, trained_head, flags.loss)
    train_tokens, steps, fullest = _packs(job, flags, budgets, micro, cost)
    held_out = flags.val_fraction > 0
    files = draft_bytes(config, trained_head, itemsize, deepspeed, steps)
    checkpoints = min(2, flags.epochs + steps // flags.save_every)
    one.disk, one.peak = files.stays(checkpoints, held_out), files.peak(checkpoints, held_out)
    one.tokens = train_tokens * flags.epochs

    weights = estimate.Weights.of(config, trained_head)
    memory = estimate.state_bytes(weights, itemsize, deepspeed, ranks)
    saved = estimate.saved_bytes(config, fullest, itemsize, recompute=flags.activation_checkpointing)
    saved += estimate.backward_bytes(config, fullest, itemsize)
    memory["activations"] = saved + estimate.input_bytes(config, fullest, itemsize)
    on_device = sum(size for part, size in memory.items() if "host memory" not in part)
    in_host = sum(memory.values()) - on_device
    head = 2 * job.target.vocab_size * job.target.hidden_size * itemsize  # embedding and lm_head, read whole
    pack = job.layout.sample_bytes(flags.max_tokens, budgets[1])
    one.host = job.gpus * (PROCESS + head + 3 * pack + in_host)
    if job.on_gpu:
        one.gpu = on_device  # without workspace and communication buckets
        one.notes.append(
            f"{gigabytes(saved)} GB of {gigabytes(on_device)} GB a GPU are activations of the fullest pack"
        )
    else:
        one.host += job.gpus * on_device
    one.notes.append(f"{steps:,} steps, {flags.epochs} epochs of {train_tokens:,} tokens on {ranks} ranks")

    known = next((found.training for found in job.measured if found.training), None)
    if known:
        one.seconds = one.tokens / known.tokens_a_second + known.other_seconds
        one.notes.append(f"{known.tokens_a_second:,.0f} tokens/s measured")
    else:
        a_token = estimate.operations(config, fullest, trained_head) / max(fullest.tokens, 1)
        rate = estimate.SHARE_OF_MATMUL_RATE * machine.matmul * (ranks if job.on_gpu else job.nodes) / a_token
        evaluation = 1 + flags.val_fraction / 2
        states = states_bytes(job.data, job.layout)
        passes = flags.epochs if states > 0.7 * machine.memory else 1  # else the page cache has them
        reading = passes * states / READ_RATE
        one.seconds = STARTUP["04"] + max(evaluation * one.tokens / rate, reading)
        one.notes.append(
            f"{rate:,.0f} tokens/s assumed (half of the matrix products' rate), "
            f"{'each epoch reads' if passes > 1 else 'states are read once,'} {gigabytes(states)} GB at "
            f"{READ_RATE / 1e9:g} GB/s"
        )


def draft_of(job: Job) -> DraftConfig:
    """The draft that the flags give. Raises UserError for one that stage 04 would refuse."""
    flags = job.flags["04"]
    norms = [key for key in NORM_KEYS if getattr(flags, key)]
    stated = read_draft_config(flags.draft_config) if flags.draft_config else None
    size = min(job.flags["03"].draft_vocab_size, job.target.vocab_size)
    return derive(job.target, size, list(job.layout.layers[:-1]), stated, norms)


def _packs(
    job: Job, flags: argparse.Namespace, budgets: tuple[int, int], micro: int, cost: packing.Cost
) -> tuple[int, int, estimate.Work]:
    """Tokens trained on in an epoch, optimizer steps of all, and the fullest micro-batch that is to be expected."""
    data, (most_tokens, most_rows) = job.data, budgets
    if data.records is not None and len({r["conversation"] for r in data.records}) > 1 and data.longest <= most_tokens:
        train, _ = packing.hold_out(data.records, flags.val_fraction, flags.seed)
        packs = packing.epoch_packs(train, *budgets, flags.seed, 0, cost)
        steps = packing.steps_per_epoch(len(packs), 1, micro)
        full = max(packs, key=lambda pack: sum(record["supervised"] for record in pack))
        tokens, supervised = (sum(record[key] for record in full) for key in ("tokens", "supervised"))
        return sum(record["tokens"] for record in train), steps * flags.epochs, _work(data, flags, tokens, supervised)
    train_tokens = round(data.tokens * (1 - flags.val_fraction))
    steps = math.ceil(train_tokens / most_tokens / micro)
    supervised = min(most_rows, round(most_tokens * min(1.0, data.share * 1.25)))  # the fullest of many
    return train_tokens, steps * flags.epochs, _work(data, flags, most_tokens, supervised)


def _work(data: Data, flags: argparse.Namespace, tokens: int, supervised: int) -> estimate.Work:
    length = max(1, data.tokens // max(data.samples, 1))
    return estimate.Work(
        tokens=tokens,
        supervised=supervised if flags.loss == "kl" else 0,
        rows=supervised,
        embedded=supervised,
        steps=flags.ttt_steps,
        seen=supervised * (length + 1) // 2,
    )


def _plan_check(job: Job, one: StagePlan, weights_a_gpu: int) -> None:
    flags = job.flags["check"]
    _engine_memory(job, one, weights_a_gpu, flags.gpu_memory_utilization, 4096)
    del one.notes[:]
    one.tokens = 2 * min(flags.max_prompts, _held_out(job)) * flags.max_new_tokens
    known = next((found.capture.loading for found in job.measured if found.capture), None)
    loading = known if known is not None else STARTUP["02"] + job.size.weights / READ_RATE
    one.seconds = 2 * loading + one.tokens / GENERATED
    one.notes.append(f"the target is loaded twice, {loading:.0f} s each; {GENERATED} answers' tokens/s assumed")


def _held_out(job: Job) -> int:
    """Samples that stage 04 holds out, of which the served check asks."""
    flags, records = job.flags["04"], job.data.records
    if records is not None and len({record["conversation"] for record in records}) > 1:
        return len(packing.hold_out(records, flags.val_fraction, flags.seed)[1])
    return math.ceil(flags.val_fraction * job.data.samples)


def _apply_measured(job: Job, one: StagePlan) -> None:
    """Memory that a stage was seen to take, and the time of one whose work does not grow with the data."""
    for found in job.measured:
        if one.stage in found.memory:
            one.host = found.memory[one.stage]
            one.notes.append("host memory measured")
            break
    for found in job.measured:
        if one.stage in ("03", "check") and one.stage in found.seconds:
            one.seconds = found.seconds[one.stage]
            one.notes.append("time measured")
            break


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f}" if size >= 1e9 else f"{size / 1e9:.3f}"
