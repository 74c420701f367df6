"""Stage 02: run the target over the prepared samples and write its hidden states, one file a sample.

What a sample's file holds is in payload.py, and what happens to one sample after another in run.py.
"""

import contextlib
import itertools
import shutil
import time
from pathlib import Path
from typing import Any

from eagle3 import artifacts, model_files, terminal
from eagle3.artifacts import Index
from eagle3.capture import canary, engines, preflight, shards, storing
from eagle3.capture.interface import EngineDied, EngineSettings
from eagle3.capture.run import CARRIED_FIELDS, DEFAULT_LIMITS, KILLED, Limits, Run, load, readable, reserve
from eagle3.terminal import UserError


def extract(prepared_dir: Path, engine_name: str, settings: EngineSettings, limits: Limits = DEFAULT_LIMITS) -> bool:
    """Bring settings.output_dir up to date with the prepared samples: finished samples stay, the rest is captured.

    `engine_name` is auto, vllm or transformers. Returns whether all of the shard is settled: False when
    limits.disk_bytes left some to do. Raises UserError for artifacts that do not belong together, states that fail the
    canary, too many failing samples, an engine that dies again, or a full disk; what is finished by then stays.
    """
    started = time.monotonic()
    output_dir, shard = settings.output_dir, settings.shard
    prepared = _read_prepared(prepared_dir, settings)
    samples = _read_samples(prepared_dir, prepared["samples"], settings)
    engine, version = engines.choose(engine_name)
    terminal.say(f"engine: {engine} {version}" + (" (auto)" if engine_name == "auto" else ""))
    if engine != "vllm" and settings.engine_arguments:
        raise UserError(f"--engine-arg {next(iter(settings.engine_arguments))}: for vLLM, the engine is {engine}")
    layout = settings.layout
    fingerprint = {
        "target": settings.target.config_hash,
        "tokenizer": prepared["fingerprint"].get("tokenizer"),
        "prepared": artifacts.digest(prepared["fingerprint"]),
        "layers": list(layout.layers),
        "norm": "pre",  # final_hidden is the state before the final norm
        "dtype": layout.dtype,
        "store_dtype": layout.aux,
        "store_final_dtype": layout.final,
        "engine": engine,
        "engine_version": version,
    }
    shards.require_same_division(output_dir, shard)  # before the lock, whose holder clears away temporary files
    with artifacts.directory_lock(output_dir, shard):
        earlier = _read_earlier(settings, fingerprint)
        todo = _unfinished(samples, settings, settle_failed=bool(earlier.get("complete")))
        report, timing = earlier.get("canary"), earlier.get("timing")
        used = _used(settings, todo)
        run = Run(prepared_dir, todo, used, settings, limits)
        seconds = 0.0
        if todo:
            artifacts.require_whole(prepared_dir, "01", todo)
            model_files.require_loadable(settings.target.directory, settings.target.vocab_size)
            _require_space(todo, used, settings, limits)
            if run.has_room():
                preflight.check(engine, settings)
            _write_manifest(settings, fingerprint, samples, report, timing, complete=False)
        if run.has_room():
            report, seconds = _capture_all(prepared_dir, samples, todo, engine, settings, run)
            timing = {"tokens": run.tokens, "seconds": round(seconds, 1)}
        if todo or not earlier.get("complete"):
            _write_manifest(settings, fingerprint, samples, report, timing, complete=not run.left)
        _summarise(settings, len(samples), run, seconds, started)
        return not run.left


def _read_samples(prepared_dir: Path, count: int, settings: EngineSettings) -> list[dict[str, Any]]:
    """Records of the shard's prepared samples. Raises UserError when some are missing, or too long for the target."""
    samples = [record for record in Index(prepared_dir).samples().values() if record["status"] == "done"]
    if not samples:
        raise UserError(f"{prepared_dir}/index.jsonl names no finished sample; run the command of stage 01 again")
    if len(samples) != count:
        raise UserError(
            f"{prepared_dir}/index.jsonl names {len(samples)} samples, manifest.json says {count}; "
            "run the command of stage 01 again"
        )
    if settings.shard.count > len(samples):
        raise UserError(f"--num-shards {settings.shard.count}: {prepared_dir} has {len(samples)} samples")
    too_long = max(samples, key=lambda record: record["tokens"])
    if too_long["tokens"] > (limit := settings.target.max_positions):
        raise UserError(
            f"sample {too_long['index']} of {prepared_dir} has {too_long['tokens']} tokens, the target takes {limit}; "
            f"rerun stage 01 with --max-seq-len {limit} or less"
        )
    return [record for record in samples if settings.shard.holds(record["index"])]


def _read_prepared(prepared_dir: Path, settings: EngineSettings) -> dict[str, Any]:
    manifest = artifacts.read_manifest(prepared_dir, "01")
    if not manifest["complete"]:
        raise UserError(f"{prepared_dir} is not complete; run the command of stage 01 again until it finishes")
    artifacts.require_same(
        prepared_dir / "manifest.json",
        manifest["fingerprint"],
        {"target": settings.target.config_hash, "tokenizer": model_files.tokenizer_hash(settings.target.directory)},
        "give the --model-path that stage 01 had, unchanged, or prepare for this one in another directory",
    )
    return manifest


def _read_earlier(settings: EngineSettings, fingerprint: dict[str, Any]) -> dict[str, Any]:
    """The manifest that an earlier run left, {} when there is none."""
    output_dir, shard = settings.output_dir, settings.shard
    index = Index(output_dir, shard)
    manifest = artifacts.read_manifest(output_dir, "02", shard=shard, missing_ok=True)
    if manifest is None:
        if index.path.exists():
            raise UserError(
                f"{output_dir} has an index but no manifest.json; what made its samples is unknown: delete it"
            )
        return {}
    artifacts.require_same(
        output_dir / shard.named("manifest.json"),
        manifest["fingerprint"],
        fingerprint,
        "use another --output-dir, or delete this one",
    )
    if dropped := index.mend():
        terminal.say(f"{index.path}: damaged lines dropped: {dropped}; their samples are captured again")
    return manifest


def _unfinished(samples: list[dict[str, Any]], settings: EngineSettings, settle_failed: bool) -> list[dict[str, Any]]:
    """Records of stage 01 without a whole file here that are not settled otherwise.

    Settled are samples that a later stage has consumed, those that ended an engine, and after a complete run all that
    failed.
    """
    done = Index(settings.output_dir, settings.shard).samples()
    todo, damaged = [], []
    for record in samples:
        mine = done.get(record["index"])
        if mine is None:
            todo.append(record)
            continue
        if mine["status"] != "done":
            if mine["status"] == "failed" and not settle_failed and mine["reason"] != KILLED:
                todo.append(record)
            continue
        if not artifacts.is_whole(settings.output_dir, mine) or any(
            mine.get(field) != record.get(field) for field in CARRIED_FIELDS
        ):
            todo.append(record)
            damaged.append(record["index"])
    if damaged:
        some = ", ".join(map(str, damaged[:8])) + (", ..." if len(damaged) > 8 else "")
        terminal.say(f"{len(damaged)} finished samples are missing or damaged and will be redone: {some}")
    return todo


def _used(settings: EngineSettings, todo: list[dict[str, Any]]) -> int:
    """Bytes of the sample files that stay: those of `todo` are replaced."""
    used = 0
    for index in Index(settings.output_dir, settings.shard).samples().keys() - {record["index"] for record in todo}:
        with contextlib.suppress(FileNotFoundError):  # failed, or consumed
            used += artifacts.sample_path(settings.output_dir, index).stat().st_size
    return used


def _require_space(todo: list[dict[str, Any]], used: int, settings: EngineSettings, limits: Limits) -> None:
    """Refuse work that the disk or the limit can never take; says how much fits."""
    sizes = [settings.layout.sample_bytes(record["tokens"], record["supervised"]) for record in todo]
    if limits.disk_bytes is not None and max(sizes) > limits.disk_bytes:
        raise UserError(
            f"--max-disk-gb {limits.disk_bytes / 1e9:g}: sample {todo[sizes.index(max(sizes))]['index']} alone needs "
            f"{readable(max(sizes))}; give more"
        )
    disk = shutil.disk_usage(settings.output_dir)
    free = disk.free - reserve(disk)
    needed = sum(sizes)
    if limits.disk_bytes is not None:
        needed = min(needed, limits.disk_bytes - used)
    if needed > free:
        fit = sum(total <= free for total in itertools.accumulate(sizes))
        raise UserError(
            f"{settings.output_dir} has {readable(disk.free)} free, {len(todo)} samples of "
            f"{sum(record['tokens'] for record in todo):,} tokens need {readable(sum(sizes))}, {fit} of them fit; free "
            "space, store less (--store-dtype fp8), stop before it is full (--max-disk-gb), or prepare fewer samples "
            "(--max-samples of stage 01)"
        )


def _capture_all(
    prepared_dir: Path,
    samples: list[dict[str, Any]],
    todo: list[dict[str, Any]],
    name: str,
    settings: EngineSettings,
    run: Run,
) -> tuple[dict[str, Any], float]:
    """Load the engine, run the canary, capture `todo`; a second time when the engine dies.

    Returns the canary's report and the seconds of capturing.
    """
    longest = max(max(record["tokens"] for record in todo), canary.MAX_TOKENS)
    vocab_size = settings.target.vocab_size
    prompts = canary.choose_prompts(load(prepared_dir, record, vocab_size).input_ids.tolist() for record in samples)
    seconds = 0.0
    for attempt in (1, 2):
        terminal.say(f"loading {settings.target.directory.name} ({settings.layout.dtype}); log: {settings.log}")
        with contextlib.closing(engines.open_engine(name, settings, longest)) as engine:
            checked = time.monotonic()
            report = canary.check(engine, settings, prompts)
            report["seconds"] = round(time.monotonic() - checked, 1)
            terminal.say(f"canary passed: {canary.describe(report)}")
            if report["stored"]:
                terminal.say(f"stored as fp8: {storing.describe(report['stored'])}")
            started = time.monotonic()
            try:
                run.over(engine)
                break
            except EngineDied as error:
                if attempt == 2:
                    raise
                terminal.warn(
                    f"{error}; samples {run.suspects()} were in it: starting it again, with each of them alone"
                )
            finally:
                seconds += time.monotonic() - started
    return report, seconds


def _totals(samples: list[dict[str, Any]], settings: EngineSettings) -> dict[str, Any]:
    """Counts over the index."""
    index = Index(settings.output_dir, settings.shard).samples()
    records = [index[record["index"]] for record in samples if record["index"] in index]
    return shards.totals(records)


def _write_manifest(
    settings: EngineSettings,
    fingerprint: dict[str, Any],
    samples: list[dict[str, Any]],
    report: dict[str, Any] | None,
    timing: dict[str, Any] | None,
    *,
    complete: bool,
) -> None:
    """`timing`: tokens and seconds of the last run's capturing, without loading: what a plan takes for a rate."""
    artifacts.write_manifest(
        settings.output_dir,
        "02",
        fingerprint,
        shard=settings.shard,
        complete=complete,
        wanted=len(samples),
        **_totals(samples, settings),
        hidden_size=settings.target.hidden_size,
        vocab_size=settings.target.vocab_size,
        aux_layers=list(settings.layout.layers[:-1]),
        canary=report,
        timing=timing,
    )


def _summarise(settings: EngineSettings, wanted: int, run: Run, seconds: float, started: float) -> None:
    manifest = artifacts.read_manifest(settings.output_dir, "02", shard=settings.shard)
    failed = manifest["failed"]
    report = manifest["canary"]
    rows: dict[str, object] = {
        "samples": f"{manifest['samples']} of {wanted}"
        + (f", {run.settled} in this run" if seconds or run.left else ", nothing to do"),
        "tokens": f"{manifest['tokens']:,} ({manifest['supervised']:,} supervised)",
        "failed": ", ".join(f"{reason}: {count}" for reason, count in failed.items()) or 0,
        "bytes per token": manifest["bytes_per_token"],
        "canary": f"{canary.describe(report)}, {report['seconds']} s" if report else "not run",
    }
    if run.settled:
        rows["largest state"] = f"{run.largest:.4g}"
    if report and report["stored"]:
        rows["fp8"] = storing.describe(report["stored"])
    if manifest["consumed"]:
        rows["consumed"] = f"{manifest['consumed']} by a later stage"
    if seconds:
        rows["tokens/s"] = f"{run.tokens / seconds:,.0f}"
    if failed:
        rows["to retry"] = "delete the failed samples' lines from the index and run the same command"
    if run.left:
        rows["more to do"] = f"{run.left} samples: --max-disk-gb is reached; make room, then the same command continues"
    terminal.summary("stage 02: hidden states captured", {"hidden states": settings.output_dir} | rows, started)
