"""Before a run: resolve its settings, look at what is there, print plan and findings. A process of its own, so that
neither torch nor CUDA stays in memory beside the run for a day.

    python -m eagle3.pipeline.briefing ANSWER < settings.json      # as eagle3.pipeline starts it

Exit codes: 0 go on, 2 a mistake, a hard limit or a finding that is sure to fail, 4 a soft one without --force.
"""

import argparse
import json
import sys
from pathlib import Path

from eagle3 import terminal
from eagle3.pipeline import history, stages
from eagle3.pipeline.settings import FOLDERS, PLAIN, ROOT, STAGES, Settings
from eagle3.terminal import UserError

HARD, SOFT = 2, 4  # exit codes


def main() -> int:
    asked = json.load(sys.stdin)
    settings = Settings(**asked["settings"])
    try:
        if asked["action"] == "print-config":
            print_config(settings)
            return 0
        return brief(settings, asked, Path(sys.argv[1]))
    except UserError as error:
        print(f"run_pipeline.sh: {error}", file=sys.stderr)
        return HARD


def print_config(settings: Settings) -> None:
    """Every value and where it came from."""
    settings.values["GPUS"] = settings.values["GPUS"] or "1"
    lines = []
    for name in PLAIN:
        value = settings.values[name]
        shown = str(settings.output) if name == "OUTPUT_DIR" else value
        if name == "GPUS" and settings.origins[name] == "default":
            shown = "all that are visible"
        lines.append((name, shown or "not given", settings.origins[name]))
    for name, value in settings.environment.items():
        lines.append((f"environment {name}", value, "config"))
    for stage in STAGES:
        for name, (value, origin) in stages.origins(stage, settings, stages.flags_of(stage, settings)).items():
            flag = f"{stage} --{name.replace('_', '-')}"
            if name not in ("on_policy", "local_rank"):
                lines.append((flag, stages.shown(value), origin))
    widths = [max(len(line[place]) for line in lines) for place in (0,)]
    for name, value, origin in lines:
        terminal.say(f"{name:<{widths[0]}}  {value}  [{origin}]")


def brief(settings: Settings, asked: dict, answer: Path) -> int:
    """Plan and preflight; `answer` gets the resolved settings and what the runner does."""
    job, engine_settings, found = open_job(settings, redo=asked["redo"])
    from eagle3.pipeline import plan, preflight, verdict

    made = plan.make_plan(job)
    verdict.judge(job, made)
    if not settings.machine:
        made.findings += preflight.look(job, engine_settings)
    words = {"hard": "refused", "soft": "in doubt", "note": "note"}
    lines = [*verdict.described(job, made), *found.notes]
    lines += [f"{words[finding.level]}: {finding.text}" for finding in made.findings]
    if settings.machine:
        lines.append("preflight: not made, it is another machine")
    elif not made.findings:
        lines.append("preflight: nothing is in the way")
    terminal.say("\n".join(lines))
    answer.write_text(
        json.dumps(
            {
                "settings": settings.plain(),
                "making": {stage: stages.making(flags) for stage, flags in job.flags.items()},
                "finished": found.finished,
                "remove": [str(path) for path in found.folders(settings.output)],
                "lines": lines,
                "target": {"name": job.target.name, "hash": job.target.config_hash},
                "plan": {
                    stage: {
                        "disk": one.disk,
                        "peak": one.peak,
                        "host": one.host,
                        "gpu": one.gpu,
                        "seconds": one.seconds,
                    }
                    for stage, one in made.stages.items()
                },
            }
        )
    )
    level = made.level()
    if level == "hard":
        return HARD
    return SOFT if level == "soft" and not asked["force"] else 0


def open_job(settings: Settings, *, redo: bool):
    """The job of the plan, stage 02's engine settings, and what the output directory holds already.

    Raises UserError for an output directory of something else, and without `redo` for work that other values made.
    """
    from eagle3.pipeline.machine import said_machine, this_machine
    from eagle3.target import open_target

    machine = said_machine(settings.machine) if settings.machine else this_machine()
    if not settings.values["GPUS"]:
        settings.values["GPUS"] = str(max(1, machine.gpus))
    resolve(settings)
    flags = {stage: stages.flags_of(stage, settings) for stage in STAGES}
    target = open_target(settings.values["MODEL_PATH"])
    history.require_unmixed(settings, target)
    found = history.review(settings, {stage: stages.making(flags[stage]) for stage in STAGES})
    history.require_valid(settings, found, redo)
    return *job_of(settings, flags, target, machine, found.finished), found


def resolve(settings: Settings) -> None:
    """Names of what is embedded become places."""
    values = settings.values
    if values["MODEL_PATH"] == "embedded":
        output = str(settings.output)
        from eagle3.default_target import default_target

        values["MODEL_PATH"], values["OUTPUT_DIR"] = str(default_target()), output
    values["OUTPUT_DIR"] = str(settings.output)
    if values["DATASET"] == "embedded":
        values["DATASET"] = str(ROOT / "configs/conversations/smollm2.jsonl")


def job_of(settings: Settings, flags: dict[str, argparse.Namespace], target, machine, finished: list[str]):
    """The job of the plan, and stage 02's engine settings."""
    from eagle3 import artifacts
    from eagle3.capture import engines
    from eagle3.capture.interface import EngineSettings
    from eagle3.pipeline import plan
    from eagle3.pipeline.measured import measured
    from eagle3.pipeline.sizes import size_of
    from eagle3.prepare.stage import length_limit
    from eagle3.states import Layout
    from eagle3.target import parse_aux_layers

    asked = flags["02"]
    dtype = "bfloat16" if asked.dtype == "auto" else asked.dtype
    layout = Layout(
        layers=(*parse_aux_layers(asked.aux_layers, target.num_layers), target.num_layers),
        hidden_size=target.hidden_size,
        dtype=dtype,
        aux=dtype if asked.store_dtype == "auto" else asked.store_dtype,
        final=dtype if asked.store_final_dtype == "auto" else asked.store_final_dtype,
    )
    if settings.machine:
        engine = "vllm"
    else:
        try:
            engine = engines.choose(asked.engine)[0]
        except UserError:
            engine = asked.engine  # a finding of the preflight
    on_gpu = machine.gpus > 0
    engine_settings = EngineSettings(
        target=target,
        layout=layout,
        batch_tokens=asked.batch_tokens or (65536 if on_gpu else 4096),
        output_dir=settings.output / FOLDERS["02"],
        tensor_parallel_size=int(settings.values["GPUS"]),
        gpu_memory_utilization=asked.gpu_memory_utilization,
        trust_remote_code=settings.trust,
        device="cuda" if on_gpu and asked.device != "cpu" else "cpu",
    )
    data = None
    prepared = settings.output / FOLDERS["01"]
    try:
        manifest = artifacts.read_manifest(prepared, "01", missing_ok=True)
        whole = manifest is not None and manifest["complete"] and ("01" in finished or "01" not in settings.stages)
        if whole:
            records = [record for record in artifacts.Index(prepared).samples().values() if record["status"] == "done"]
            data = plan.data_of(records, "stage 01's index")
    except UserError:  # stage 01 says what is wrong
        pass
    if data is None or not data.samples:
        data = plan.assumed_data(settings, length_limit(target, flags["01"].max_seq_len))
    job = plan.Job(
        settings=settings,
        flags=flags,
        target=target,
        size=size_of(engine, engine_settings),
        layout=layout,
        machine=machine,
        data=data,
        measured=measured(settings.output),
        finished=frozenset(finished),
        engine=engine,
    )
    return job, engine_settings


if __name__ == "__main__":
    terminal.quiet_libraries()
    terminal.run(main)
