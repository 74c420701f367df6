"""Whether a plan fits its machine, the largest run that does, and the plan in words."""

import math
from pathlib import Path

from eagle3.capture.run import reserve
from eagle3.pipeline import plan as planning
from eagle3.pipeline.machine import existing
from eagle3.pipeline.plan import SOFT_SHARE, Finding, Job, Plan, gigabytes
from eagle3.pipeline.settings import FOLDERS
from eagle3.states import Layout


def judge(job: Job, plan: Plan) -> None:
    """Add to plan.findings what does not fit: "hard" where it is sure, "soft" where it stands on assumptions."""
    _judge_gpus(job, plan)
    _judge_host(job, plan)
    _judge_disk(job, plan)
    _judge_lengths(job, plan)


def _judge_gpus(job: Job, plan: Plan) -> None:
    machine, find = job.machine, plan.findings.append
    if job.gpus > max(machine.gpus, 1):
        find(Finding("hard", f"GPUS is {job.gpus}, {machine.gpus} are visible; set GPUS (--gpus) to what there is"))
    if not machine.gpus:
        return
    for stage in ("02", "check"):
        one = plan.stages.get(stage)
        if one and not one.done and job.size.weights > one.gpu * job.gpus and job.engine == "vllm":
            share = job.flags[stage].gpu_memory_utilization
            least = math.ceil(job.size.weights / (share * machine.gpu_bytes))
            find(
                Finding(
                    "hard",
                    f"stage {stage}: the target's weights take {gigabytes(job.size.weights)} GB, {job.gpus} GPUs may "
                    f"give {gigabytes(one.gpu * job.gpus)} GB; it takes {least} such GPUs",
                )
            )
    one = plan.stages.get("04")
    if one and not one.done and one.gpu > SOFT_SHARE * machine.gpu_bytes:
        level = "hard" if one.gpu > machine.gpu_bytes else "soft"
        tokens = job.flags["04"].max_tokens
        find(
            Finding(
                level,
                f"stage 04 takes {gigabytes(one.gpu)} GB of a GPU's {gigabytes(machine.gpu_bytes)} GB; lower "
                f"--max-tokens (now {tokens}) or --max-rows, or give --activation-checkpointing",
            )
        )


def _judge_host(job: Job, plan: Plan) -> None:
    for stage, one in plan.stages.items():
        if one.done or one.host <= SOFT_SHARE * job.machine.memory:
            continue
        weights_alone = stage in ("02", "check") and not job.machine.gpus and job.size.weights > job.machine.memory
        remedy = "take a smaller target" if weights_alone else "end what else holds it, or lower the stage's batch"
        plan.findings.append(
            Finding(
                "hard" if weights_alone else "soft",
                f"stage {stage} takes {gigabytes(one.host)} GB of host memory, {gigabytes(job.machine.memory)} GB are "
                f"available; {remedy}",
            )
        )


def _judge_disk(job: Job, plan: Plan) -> None:
    """By file system: what is missing of all stages, and the most that one of them takes for a while."""
    groups: dict[int, list[str]] = {}
    for stage in plan.stages:
        folder = job.settings.output / FOLDERS.get(stage, "")
        device = 0 if job.machine.disk is not None else existing(folder).stat().st_dev
        groups.setdefault(device, []).append(stage)
    for stages in groups.values():
        folder = job.settings.output / FOLDERS.get(stages[0], "")
        missing = {stage: max(0, plan.stages[stage].disk - plan.stages[stage].there) for stage in stages}
        while_written = max(plan.stages[stage].peak - plan.stages[stage].disk for stage in stages)
        needed, free = sum(missing.values()) + while_written, job.machine.free(folder)
        room = free - reserved(job, folder)
        if needed <= room:
            continue
        parts = ", ".join(f"{stage} {gigabytes(size)}" for stage, size in missing.items() if size > 1e6)
        text = (
            f"{folder} has {gigabytes(free)} GB free, the run needs {gigabytes(needed)} GB more ({parts}; "
            f"{gigabytes(while_written)} for a while)"
        )
        if "02" in stages:
            text += f"; {largest(job, plan, room - needed)}"
        plan.findings.append(Finding("hard" if job.data.records is not None else "soft", text))


def reserved(job: Job, folder: Path) -> int:
    """What stage 02 leaves alone of a file system."""
    if job.machine.disk is not None:
        return min(1 << 30, job.machine.disk // 100)
    import shutil

    return reserve(shutil.disk_usage(existing(folder)))


def largest(job: Job, plan: Plan, short: int) -> str:
    """The largest run that fits, in samples of the mean length, as it is stored now and as fp8; `short` is negative."""
    mean = job.data.tokens / max(job.data.samples, 1)
    fits = job.data.tokens + short / plan.bytes_a_token  # tokens
    said = [f"{_samples(fits / mean)} fits"]
    fp8 = Layout(job.layout.layers, job.layout.hidden_size, job.layout.dtype, "fp8", "fp8")
    if job.layout != fp8:
        smaller = planning.states_bytes(job.data, fp8) + planning.prepared_bytes(job.data, 0)
        room = plan.bytes_a_token * job.data.tokens + short
        with_fp8 = max(0.0, room / (smaller / max(job.data.tokens, 1)))
        said.append(f"{_samples(with_fp8 / mean)} with --store-dtype fp8 --store-final-dtype fp8")
    return ", ".join(said) + "; or stop in time with --max-disk-gb"


def _samples(count: float) -> str:
    whole = math.floor(max(count, 0.0))
    return f"--max-samples {whole}" if whole else "no sample"


def _judge_lengths(job: Job, plan: Plan) -> None:
    one = plan.stages.get("04")
    if not one or one.done or job.data.longest <= (most := job.flags["04"].max_tokens):
        return
    known = job.data.records is not None
    plan.findings.append(
        Finding(
            "hard" if known else "soft",
            f"samples have up to {job.data.longest} tokens, a micro-batch of stage 04 holds {most}; give --max-tokens "
            f"{job.data.longest} to stage 04, or --max-seq-len {most} to stage 01",
        )
    )


# ---------------------------------------------------------------------------------------------------- words


def described(job: Job, plan: Plan) -> list[str]:
    """The plan, a line each."""
    machine, data = job.machine, job.data
    heads = ["stage", "tokens", "disk GB", "peak GB", "host GB", "GPU GB each", "hours"]
    rows = []
    for stage, one in plan.stages.items():
        hours = "done" if one.done else f"{one.seconds / 3600:.2f}"
        gpu = gigabytes(one.gpu) if one.gpu else "-"
        tokens = f"{one.tokens:,}" if one.tokens else "-"
        rows.append([stage, tokens, gigabytes(one.disk), gigabytes(one.peak), gigabytes(one.host), gpu, hours])
    left = [one for one in plan.stages.values() if not one.done]
    peak = sum(one.disk for one in plan.stages.values())
    peak += max((one.peak - one.disk for one in plan.stages.values()), default=0)
    total = ["all", "", gigabytes(sum(one.disk for one in plan.stages.values())), gigabytes(peak)]
    total += [gigabytes(max((one.host for one in left), default=0))]
    total += [gigabytes(max((one.gpu for one in left), default=0)) if machine.gpus else "-"]
    total += [f"{sum(one.seconds for one in left) / 3600:.2f}"]
    table = [heads, *rows, total]
    widths = [max(len(row[place]) for row in table) for place in range(len(heads))]
    where = machine.described() + (f", {job.nodes} such nodes" if job.nodes > 1 else "")
    lines = [
        f"plan for {job.settings.output}: target {job.target.directory.name}, {where}, matrix products "
        f"at {machine.matmul / 1e12:g} TFLOP/s assumed",
        f"data: {data.samples:,} samples, {data.tokens:,} tokens, {data.supervised:,} supervised ({data.known}); "
        f"{plan.bytes_a_token:,.0f} bytes a token on disk",
    ]
    lines += ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in table]
    lines += [f"{stage}: {'; '.join(one.notes)}" for stage, one in plan.stages.items() if one.notes and not one.done]
    training = plan.stages.get("04")
    if machine.gpus and training and not training.done:
        both = plan.weights_a_gpu + training.gpu
        lines.append(
            f"stage 04 takes {gigabytes(training.gpu)} GB of each GPU without an engine beside it, "
            f"{gigabytes(both)} GB with the target's weights resident ({gigabytes(machine.gpu_bytes)} GB there)"
        )
    return lines
