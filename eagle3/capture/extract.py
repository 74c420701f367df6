"""Stage 02: run the target over the prepared samples and write its hidden states, one file a sample.

A sample's file holds input_ids int32 [T], loss_mask bool [T], aux_hidden [T, A*H] (aux layers ascending, side by side)
and final_hidden [S, H] (state N, before the final norm, where loss_mask is true), both in the engine's dtype.
"""

import contextlib
import shutil
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3 import artifacts, model_files, terminal
from eagle3.artifacts import Index
from eagle3.capture import canary, engines, interface, vllm_engine
from eagle3.capture.interface import Captured, Engine, EngineSettings
from eagle3.terminal import UserError

WRITERS = 4  # threads that check and write: the copy is memory bound, the rest waits for the disk
MAX_FAILED = 0.1  # of the samples attempted; more means that the engine, not a sample, is at fault
FILE_OVERHEAD = 2500  # bytes a `.pt` of four tensors takes besides their content
CARRIED_FIELDS = ("tokens", "supervised", "source", "dataset", "conversation")  # of stage 01's records


@dataclass
class _Sample:
    """One prepared sample on its way through the engine."""

    record: dict[str, Any]  # of stage 01's index
    input_ids: torch.Tensor  # int32 [T]
    loss_mask: torch.Tensor  # bool [T]
    prompt: list[int]

    @property
    def index(self) -> int:
        return self.record["index"]


def extract(prepared_dir: Path, engine_name: str, settings: EngineSettings) -> None:
    """Bring settings.output_dir up to date with the prepared samples: finished samples stay, the rest is captured.

    `engine_name` is auto, vllm or transformers. Raises UserError for artifacts that do not belong together, states
    that fail the canary, too many failing samples, or a full disk; what is finished by then stays.
    """
    started = time.monotonic()
    output_dir = settings.output_dir
    prepared = _read_prepared(prepared_dir, settings)
    samples = [record for record in Index(prepared_dir).samples().values() if record["status"] == "done"]
    if not samples:
        raise UserError(f"{prepared_dir}/index.jsonl names no finished sample; run the command of stage 01 again")
    if len(samples) != prepared["samples"]:
        raise UserError(
            f"{prepared_dir}/index.jsonl names {len(samples)} samples, manifest.json says {prepared['samples']}; "
            "run the command of stage 01 again"
        )
    too_long = max(samples, key=lambda record: record["tokens"])
    if too_long["tokens"] > (limit := settings.target.max_positions):
        raise UserError(
            f"sample {too_long['index']} of {prepared_dir} has {too_long['tokens']} tokens, the target takes {limit}; "
            f"rerun stage 01 with --max-seq-len {limit} or less"
        )
    engine, version = engines.choose(engine_name)
    terminal.say(f"engine: {engine} {version}" + (" (auto)" if engine_name == "auto" else ""))
    fingerprint = {
        "target": settings.target.config_hash,
        "tokenizer": prepared["fingerprint"].get("tokenizer"),
        "prepared": artifacts.digest(prepared["fingerprint"]),
        "layers": list(settings.layers),
        "norm": "pre",  # final_hidden is the state before the final norm
        "dtype": settings.dtype,
        "engine": engine,
        "engine_version": version,
    }
    with artifacts.directory_lock(output_dir):
        vllm_engine.remove_staging(output_dir)
        earlier = _read_earlier(output_dir, fingerprint)
        todo = _unfinished(samples, settings, settle_failed=bool(earlier.get("complete")))
        report = earlier.get("canary")
        seconds = 0.0
        if todo:
            artifacts.require_whole(prepared_dir, "01", todo)
            model_files.require_loadable(settings.target.directory, settings.target.vocab_size)
            _require_space(todo, settings)
            _write_manifest(settings, fingerprint, samples, report, complete=False)
            report, seconds = _capture_all(prepared_dir, samples, todo, engine, settings)
        if todo or not earlier.get("complete"):
            _write_manifest(settings, fingerprint, samples, report, complete=True)
        _summarise(settings, len(samples), todo, seconds, started)


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


def _read_earlier(output_dir: Path, fingerprint: dict[str, Any]) -> dict[str, Any]:
    """The manifest that an earlier run left, {} when there is none."""
    manifest = artifacts.read_manifest(output_dir, "02", missing_ok=True)
    if manifest is None:
        if Index(output_dir).path.exists():
            raise UserError(
                f"{output_dir} has an index but no manifest.json; what made its samples is unknown: delete it"
            )
        return {}
    artifacts.require_same(
        output_dir / "manifest.json",
        manifest["fingerprint"],
        fingerprint,
        "use another --output-dir, or delete this one",
    )
    return manifest


def _unfinished(samples: list[dict[str, Any]], settings: EngineSettings, settle_failed: bool) -> list[dict[str, Any]]:
    """Records of stage 01 without a whole file here; samples that failed count as settled after a complete run."""
    done = Index(settings.output_dir).samples()
    todo, damaged = [], []
    for record in samples:
        mine = done.get(record["index"])
        if mine is None or mine["status"] == "failed":
            if mine is None or not settle_failed:
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


def _sample_bytes(record: dict[str, Any], settings: EngineSettings) -> int:
    """Size of a sample's file."""
    states = record["tokens"] * (len(settings.layers) - 1) + record["supervised"]
    return states * settings.state_bytes + record["tokens"] * 5 + FILE_OVERHEAD  # int32 id and bool mask


def _longest(records: list[dict[str, Any]]) -> int:
    return max(record["tokens"] for record in records)


def _readable(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def _require_space(todo: list[dict[str, Any]], settings: EngineSettings) -> None:
    tokens = sum(record["tokens"] for record in todo)
    staged = min(tokens, max(settings.batch_tokens, _longest(todo))) * len(settings.layers) * settings.state_bytes
    needed = sum(_sample_bytes(record, settings) for record in todo) + staged
    free = shutil.disk_usage(settings.output_dir).free
    if needed > free:
        raise UserError(
            f"{settings.output_dir} has {_readable(free)} free, {len(todo)} samples of {tokens} tokens need "
            f"{_readable(needed)}; free space, or prepare fewer samples (--max-samples of stage 01)"
        )


def _capture_all(
    prepared_dir: Path, samples: list[dict[str, Any]], todo: list[dict[str, Any]], name: str, settings: EngineSettings
) -> tuple[dict[str, Any], float]:
    """Load the engine, run the canary, capture `todo`. Returns the canary's report and the seconds of capturing."""
    terminal.say(
        f"loading {settings.target.directory.name} ({settings.dtype}); log: {settings.output_dir / 'engine.log'}"
    )
    longest = max(_longest(todo), canary.MAX_TOKENS)
    with contextlib.closing(engines.open_engine(name, settings, longest)) as engine:
        checked = time.monotonic()
        prompts = canary.choose_prompts(
            _load(prepared_dir, record, settings.target.vocab_size).prompt for record in samples
        )
        report = canary.check(engine, settings, prompts)
        report["seconds"] = round(time.monotonic() - checked, 1)
        terminal.say(f"canary passed: {canary.describe(report)}")
        started = time.monotonic()
        _Run(prepared_dir, todo, engine, settings).run()
        return report, time.monotonic() - started


def _load(prepared_dir: Path, record: dict[str, Any], vocab_size: int) -> _Sample:
    """Read one prepared sample. Raises UserError when it is damaged."""
    tensors = artifacts.load_sample(prepared_dir, "01", record, vocab_size)
    ids, mask = tensors["input_ids"], tensors["loss_mask"]
    return _Sample(record, ids, mask, ids.tolist())


class _Run:
    """One pass over the unfinished samples: the engine computes while threads check and write what it gave."""

    def __init__(
        self, prepared_dir: Path, todo: list[dict[str, Any]], engine: Engine, settings: EngineSettings
    ) -> None:
        self._prepared_dir = prepared_dir
        self._engine = engine
        self._settings = settings
        self._queue = deque(todo)
        self._tokens = sum(record["tokens"] for record in todo)
        self._in_engine: deque[_Sample] = deque()  # oldest first
        self._writing: deque[tuple[_Sample, Future]] = deque()  # oldest first
        self._tried: set[int] = set()  # samples that failed once
        self._settled = 0
        self._failed: Counter = Counter()

    def run(self) -> None:
        with (
            terminal.progress(self._tokens, "tok", "capture") as self._bar,
            Index(self._settings.output_dir).appending() as self._index,
            ThreadPoolExecutor(WRITERS) as pool,
        ):
            try:
                while self._queue:  # again when the last ones failed and are to be retried
                    for captured in self._engine.capture(self._prompts()):
                        sample = self._in_engine.popleft()
                        self._writing.append((sample, pool.submit(_store, sample, captured, self._settings)))
                        while self._writing and (
                            self._writing[0][1].done() or self._writing_tokens() > self._settings.batch_tokens
                        ):
                            self._settle()
                    while self._writing:
                        self._settle()
            finally:
                while self._writing:  # after an error: what is written shall count
                    self._settle()
        if sum(self._failed.values()) > MAX_FAILED * self._settled:
            self._give_up()

    def _prompts(self) -> Iterator[list[int]]:
        """Drawn by the engine as room comes free: only samples in flight are in memory."""
        while self._queue:
            sample = _load(self._prepared_dir, self._queue.popleft(), self._settings.target.vocab_size)
            self._in_engine.append(sample)
            yield sample.prompt

    def _writing_tokens(self) -> int:
        return sum(sample.record["tokens"] for sample, _ in self._writing)

    def _settle(self) -> None:
        """Wait for the oldest write and put its outcome into the index; a first failure goes back into the queue."""
        sample, future = self._writing.popleft()
        outcome = future.result()
        kept = {field: sample.record.get(field) for field in CARRIED_FIELDS}
        if isinstance(outcome, int):
            self._index.add(index=sample.index, **kept, bytes=outcome, status="done")
        else:
            reason, detail = outcome
            self._require_disk(sample)
            if sample.index not in self._tried:
                self._tried.add(sample.index)
                self._queue.append(sample.record)
                return
            self._failed[reason] += 1
            self._index.add(index=sample.index, **kept, status="failed", reason=reason, detail=detail)
            terminal.warn(f"sample {sample.index} skipped after two tries: {reason} ({detail})")
        self._settled += 1
        self._bar.update(sample.record["tokens"])
        if self._settled >= 20 and sum(self._failed.values()) > MAX_FAILED * self._settled:
            self._give_up()

    def _require_disk(self, sample: _Sample) -> None:
        """An engine that cannot stage its states looks like a failing sample: tell the two apart."""
        needed = sample.record["tokens"] * len(self._settings.layers) * self._settings.state_bytes
        free = shutil.disk_usage(self._settings.output_dir).free
        if free < needed:
            raise UserError(
                f"the disk is full: {self._settings.output_dir} has {_readable(free)} free, the next sample needs "
                f"{_readable(needed)}; free space, then the same command continues"
            )

    def _give_up(self) -> None:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self._failed.most_common())
        raise UserError(
            f"{sum(self._failed.values())} of {self._settled} samples failed ({reasons}), more than "
            f"{MAX_FAILED:.0%}; see {self._settings.output_dir / 'engine.log'} and index.jsonl; "
            "the same command tries them again"
        )


def _store(sample: _Sample, captured: Captured, settings: EngineSettings) -> int | tuple[str, str]:
    """Check and write one sample. Returns the file's bytes, or reason and detail of what is wrong with the states."""
    if problem := interface.fault(captured, sample.prompt, settings):
        return problem
    states = captured.states  # [T, L, H]
    # clones: a view would put the storage of all layers into the file
    aux = states[:, :-1].clone(memory_format=torch.contiguous_format).flatten(1)  # [T, A*H]
    final = states[:, -1][sample.loss_mask]  # [S, H]
    return artifacts.save_tensors(
        artifacts.sample_path(settings.output_dir, sample.index),
        {
            "input_ids": sample.input_ids.to(torch.int32, copy=True),
            "loss_mask": sample.loss_mask.clone(),
            "aux_hidden": aux,
            "final_hidden": final,
        },
    )


def _totals(samples: list[dict[str, Any]], output_dir: Path) -> tuple[dict[str, Any], int]:
    """Counts over the index, and the bytes of all files."""
    wanted = {record["index"] for record in samples}
    records = [record for index, record in Index(output_dir).samples().items() if index in wanted]
    done = [record for record in records if record["status"] == "done"]
    tokens, size = sum(record["tokens"] for record in done), sum(record["bytes"] for record in done)
    return {
        "samples": len(done),
        "tokens": tokens,
        "supervised": sum(record["supervised"] for record in done),
        "failed": dict(Counter(record["reason"] for record in records if record["status"] == "failed")),
        "bytes_per_token": round(size / tokens, 1) if tokens else None,
    }, size


def _write_manifest(
    settings: EngineSettings,
    fingerprint: dict[str, Any],
    samples: list[dict[str, Any]],
    report: dict[str, Any] | None,
    *,
    complete: bool,
) -> None:
    artifacts.write_manifest(
        settings.output_dir,
        "02",
        fingerprint,
        complete=complete,
        **_totals(samples, settings.output_dir)[0],
        hidden_size=settings.target.hidden_size,
        vocab_size=settings.target.vocab_size,
        aux_layers=list(settings.layers[:-1]),
        canary=report,
    )


def _summarise(
    settings: EngineSettings, wanted: int, todo: list[dict[str, Any]], seconds: float, started: float
) -> None:
    manifest = artifacts.read_manifest(settings.output_dir, "02")
    failed = manifest["failed"]
    report = manifest["canary"]
    rows: dict[str, object] = {
        "samples": f"{manifest['samples']} of {wanted}" + (f", {len(todo)} in this run" if todo else ", nothing to do"),
        "tokens": f"{manifest['tokens']:,} ({manifest['supervised']:,} supervised)",
        "failed": ", ".join(f"{reason}: {count}" for reason, count in failed.items()) or 0,
        "bytes per token": manifest["bytes_per_token"],
        "canary": f"{canary.describe(report)}, {report['seconds']} s" if report else "not run",
        "largest state": report["state_max"] if report else "not measured",
    }
    if seconds:
        rows["tokens/s"] = f"{sum(record['tokens'] for record in todo) / seconds:,.0f}"
    if failed:
        rows["to retry"] = "delete the failed samples' lines from index.jsonl and run the same command"
    terminal.summary("stage 02: hidden states captured", {"hidden states": settings.output_dir} | rows, started)
