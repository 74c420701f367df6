"""The pass over a dataset: rows to samples, with an index to resume from and the counts that stage 03 needs."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from eagle3 import artifacts, terminal
from eagle3.artifacts import Index, IndexWriter, sample_path
from eagle3.exclusion import Exclusion
from eagle3.model_files import tokenizer_hash
from eagle3.prepare import progress as resume
from eagle3.prepare import workers
from eagle3.prepare.progress import Progress, Totals
from eagle3.prepare.rows import CHECKED_EVERY, CHECKED_FIRST, Job, Outcome, RowSettings, Written
from eagle3.prepare.workers import Workers
from eagle3.sources import Datasets
from eagle3.target import Target, tokenizer_size
from eagle3.templates import MARKER
from eagle3.terminal import UserError
from eagle3.token_counts import TokenCounts, load_by_source

STAGE = "01"
MAX_SEQ_LEN = 2048  # where the user does not say
SYNCERS = 8  # a sync takes milliseconds, and syncs at the same time share one commit of the file system
MOST_PENDING = 256  # samples written but not yet in the index
CHECKPOINT_EVERY = 20_000  # samples between two saves of the counts, which a resumed run need not count again
JUDGED_FROM = 100  # rows after which the share of unusable ones says something


@dataclass(frozen=True)
class Options:
    """What the user may choose. Everything but the first three decides which samples come out, or in which order."""

    max_samples: int | None = None
    num_proc: int | None = None  # None: all cores that this process may use
    max_skipped: float = 0.5  # share of unusable rows above which the run stops
    max_seq_len: int | None = None  # None: MAX_SEQ_LEN, or the target's positions if fewer
    overflow: str = "truncate"
    columns: dict[str, str] | None = None
    keep_duplicates: bool = False
    exclusion: Exclusion | None = None
    trust_remote_code: bool = False


def prepare(target: Target, tokenizer: Any, dataset: Datasets, directory: Path, options: Options) -> Totals | None:
    """Write the samples of `dataset` to `directory`, or continue there; None when it was finished already.

    The caller holds the directory's lock. Raises UserError when the target takes less than `max_seq_len`, when the
    directory holds something else or more samples than `max_samples`, when no row is usable, or too few are.
    """
    max_seq_len = length_limit(target, options.max_seq_len)
    if options.max_seq_len is None and max_seq_len < MAX_SEQ_LEN:
        terminal.say(f"samples have at most {max_seq_len} tokens instead of {MAX_SEQ_LEN}: the target takes no more")
    fingerprint = made_by(target, options) | {
        "dataset": dataset.identity(),
        "columns": options.columns,
        "exclude": options.exclusion.identity() if options.exclusion else None,
    }
    end_ids = end_ids_of(target, tokenizer)
    manifest = earlier(directory, fingerprint)
    facts = {
        "max_samples": options.max_samples,
        # a template may print today's date: a run that goes on tomorrow must render as it began
        "date": manifest["date"] if manifest else date.today().isoformat(),
        "vocab_size": target.vocab_size,
        "tokenizer_size": tokenizer_size(tokenizer),
        "end_ids": end_ids,
        "forced_ids": forced_ids(tokenizer, end_ids),
    }
    progress = resume.read_progress(directory)
    if options.max_samples is not None and progress.samples > options.max_samples:
        raise UserError(
            f"{directory} has {progress.samples} samples already, more than --max-samples {options.max_samples}; "
            f"give another --output-dir, or at least {progress.samples}"
        )
    complete = bool(manifest and manifest["complete"])
    enough = complete and (manifest["exhausted"] or progress.samples == options.max_samples)
    counted = None
    if complete and manifest["samples"] == progress.samples:
        with suppress(UserError):  # missing or damaged: the samples are counted again
            total = artifacts.load_counts(directory, target.vocab_size, manifest["supervised"])
            counted = load_by_source(directory, total)
    if enough and not progress.damaged and counted is not None:
        terminal.say(
            f"{directory} is finished: {manifest['samples']:,} samples, {manifest['tokens']:,} tokens, "
            f"{manifest['supervised']:,} of them assistant tokens; nothing to do"
        )
        return None
    counts = TokenCounts(directory, target.vocab_size, progress.samples, counted)
    artifacts.write_manifest(directory, STAGE, fingerprint, **facts, complete=False)
    for index in range(progress.samples, progress.samples + MOST_PENDING + 1):
        sample_path(directory, index).unlink(missing_ok=True)  # written by a killed run that did not get to say so
    samples_dir = directory / "samples"
    samples_dir.mkdir(exist_ok=True)
    settings = RowSettings(
        target=target,
        trust_remote_code=options.trust_remote_code,
        end_ids=tuple(end_ids),
        date=facts["date"],
        columns=options.columns,
        exclusion=options.exclusion,
        max_seq_len=max_seq_len,
        overflow=options.overflow,
        samples_dir=samples_dir,
    )
    run = _Run(directory, settings, tokenizer, options, counts, progress)
    try:
        exhausted = run.over(dataset)
    except BaseException:
        with suppress(OSError):  # whose own error must not hide the first
            resume.write_skipped(directory)
        raise
    finally:
        artifacts.remove_temporaries(directory)  # of rows that were under way when it stopped
    resume.write_skipped(directory)
    totals = progress.totals
    if not totals.samples:
        raise UserError(_nothing_usable(totals))
    counts.finish()
    artifacts.sync_folder(samples_dir)
    artifacts.write_manifest(
        directory,
        STAGE,
        fingerprint,
        samples=totals.samples,
        tokens=totals.tokens,
        supervised=totals.supervised,
        skipped={reason: count for reason, (count, _) in totals.skipped.items()},
        **facts,
        exhausted=exhausted and dataset.is_all,
        complete=True,
    )
    counts.copy.unlink(missing_ok=True)
    return totals


def end_ids_of(target: Target, tokenizer: Any) -> list[int]:
    """Every id that ends an answer, ascending."""
    return sorted({*target.end_ids} | ({tokenizer.eos_token_id} - {None}))


def length_limit(target: Target, max_seq_len: int | None) -> int:
    """Tokens a sample at most. Raises UserError when the target takes fewer than the user wants."""
    positions = target.config.get("max_position_embeddings") or MAX_SEQ_LEN
    if max_seq_len is None:
        return min(MAX_SEQ_LEN, positions)
    if max_seq_len > positions and "max_position_embeddings" in target.config:
        raise UserError(
            f"--max-seq-len {max_seq_len}: the target takes {positions} positions (max_position_embeddings in "
            f"{target.directory}/config.json); give at most {positions}"
        )
    return max_seq_len


def made_by(target: Target, options: Options) -> dict[str, Any]:
    """The part of the fingerprint that says nothing of the rows."""
    return {
        "target": target.config_hash,
        "tokenizer": tokenizer_hash(target.directory),
        "max_seq_len": length_limit(target, options.max_seq_len),
        "overflow": options.overflow,
        "keep_duplicates": options.keep_duplicates,
    }


def earlier(directory: Path, fingerprint: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of an earlier run. Raises UserError when that run was about something else."""
    manifest = artifacts.read_manifest(directory, STAGE, missing_ok=True)
    if manifest:
        artifacts.require_same(
            directory, manifest["fingerprint"], fingerprint, "give another --output-dir, or delete this one"
        )
    elif Index(directory).path.exists():
        raise UserError(f"{directory} has an index.jsonl but no manifest.json; give another --output-dir or delete it")
    return manifest


class SampleFiles:
    """Gives synced sample files their names, in threads, and then puts their records into the index, in order."""

    def __init__(self, directory: Path, index: IndexWriter, pool: ThreadPoolExecutor) -> None:
        self._directory, self._index, self._pool = directory, index, pool
        self._pending: deque[tuple[dict[str, Any], Future | None]] = deque()
        self._folders: set[str] = set()

    def add(self, record: dict[str, Any], written: Written | None = None) -> None:
        future = None
        if written:
            folder, name = os.path.split(sample_path(self._directory, record["index"]))
            if folder not in self._folders:
                os.makedirs(folder, exist_ok=True)
                self._folders.add(folder)
            future = self._pool.submit(_sync_and_name, written.path, f"{folder}/{name}")
        self._pending.append((record, future))
        if len(self._pending) > MOST_PENDING:
            self.wait(MOST_PENDING // 2)

    def close(self) -> None:
        self.wait()
        for folder in self._folders:
            artifacts.sync_folder(Path(folder))

    def wait(self, left: int = 0) -> None:
        """Wait until at most `left` records are not yet in the index."""
        named: list[dict[str, Any]] = []
        try:
            while len(self._pending) > left:
                record, future = self._pending[0]  # stays there when its write failed: nothing later may be recorded
                if future:
                    future.result()
                named.append(record)
                self._pending.popleft()
        finally:
            self._index.add_all(named)


def _sync_and_name(temporary: str, path: str) -> None:
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(descriptor)
    os.replace(temporary, path)


@dataclass
class _Run:
    """The pass over the dataset; updates the progress it begins with."""

    directory: Path
    settings: RowSettings
    tokenizer: Any
    options: Options
    counts: TokenCounts
    progress: Progress
    done: int = 0  # samples
    passed: bool = False  # whether the row that an earlier run began last has been read
    forms: set[str] = field(default_factory=set)  # how rows were read, as far as it was said

    def over(self, dataset: Datasets) -> bool:
        """Process rows until there are enough samples; returns whether the dataset came to its end."""
        counts, progress, most = self.counts, self.progress, self.options.max_samples
        for record in progress.whole:
            if record["index"] >= counts.covered:
                tensors = _load_or_remove(self.directory, record, counts.vocab_size)
                counts.add(record["index"], record["dataset"], tensors["input_ids"][tensors["loss_mask"]])
        self.done, self.passed = progress.samples, progress.furthest is None
        saved, redo_left = counts.covered, len(progress.redo)
        expected = [number for number in (dataset.total(), most) if number is not None]
        count = workers.count_for(self.options.num_proc, min(expected, default=None))
        with (
            Index(self.directory).appending() as index,
            ThreadPoolExecutor(SYNCERS) as pool,
            closing(SampleFiles(self.directory, index, pool)) as files,
            closing(Workers(self.settings, self.tokenizer, count)) as at_work,
            closing(dataset.rows(self.directory)) as rows,
            _progress_bar(dataset, most, self.done) as bar,
            closing(at_work.outcomes(self._jobs(rows, bar), self._wanted)) as outcomes,
        ):
            for (place, start), outcome in outcomes:
                if outcome.failure:
                    raise outcome.failure
                before = self.done
                redone = start is not None
                start = self.done if start is None else start
                self.done = max(self.done, start + self._take(place, start, outcome, files, redone))
                redo_left -= redone
                bar.update(1 if most is None else self.done - before)
                if self.passed and not redo_left and self.done - saved >= CHECKPOINT_EVERY:
                    files.wait()
                    counts.save_copy(self.done)
                    saved = self.done
                if self.done == most and self.passed and not redo_left:
                    return False
        if redo_left or not self.passed:
            raise UserError(f"{self.directory}: the dataset has fewer rows than before; delete the directory and rerun")
        return True

    def _wanted(self) -> int | None:
        most = self.options.max_samples
        return most - self.done if most is not None and self.passed else None

    def _jobs(self, rows: Iterator[Any], bar: Any) -> Iterator[tuple[tuple[resume.Place, int | None], Job]]:
        """The rows that are to be done, with the index of the first sample of those that are done again."""
        redo, furthest = self.progress.redo, self.progress.furthest
        for seen, row in enumerate(rows):
            place = row.source, row.number
            again, new = redo.pop(place, None), self.passed
            self.passed = self.passed or place == furthest
            if new or again is not None:
                yield (place, again), (row, seen < CHECKED_FIRST or seen % CHECKED_EVERY == 0)
            elif self.options.max_samples is None:
                bar.update(1)

    def _take(self, place: resume.Place, start: int, outcome: Outcome, files: SampleFiles, redone: bool) -> int:
        """Record the samples of one row from index `start` on, or why there are none; returns their number."""
        totals, common = self.progress.totals, {"row": place[1], "source": place[0]}
        reason = outcome.reason
        if outcome.form and outcome.form not in self.forms:
            self.forms.add(outcome.form)
            terminal.say(f"reading {outcome.form}")
        twice = not reason and int(outcome.digest, 16) in totals.conversations
        if twice and not redone and not self.options.keep_duplicates:
            reason = resume.DUPLICATE
            for written in outcome.samples:
                os.unlink(written.path)
        if reason:
            record = {**common, "status": "skipped", "reason": reason}
            totals.add_skipped(record)
            files.add(record)
            self._judge()
            return 0
        dataset = outcome.origin or place[0]
        common = {"conversation": outcome.digest, **common, "dataset": dataset, "status": "done"}
        common |= {"trimmed": outcome.trailing} if outcome.trailing else {}
        common |= {"cut": True} if outcome.cut else {}
        common |= {"left_out": outcome.left_out} if outcome.left_out else {}
        kept = outcome.samples
        if self.options.max_samples is not None:
            kept = kept[: self.options.max_samples - start]
        records = []
        for index, written in enumerate(kept, start):
            supervised = torch.from_numpy(written.supervised_ids)  # [S]
            record = {"index": index, "tokens": written.tokens, "supervised": len(supervised), **common}
            record["bytes"] = written.size
            self.counts.add(index, dataset, supervised)
            files.add(record, written)
            records.append(record)
        totals.checked += outcome.checked
        totals.add_row(records)
        return len(records)

    def _judge(self) -> None:
        """Stop a run that skips most rows: the data is not what it was taken for."""
        totals = self.progress.totals
        rows, most = totals.rows + totals.unusable, self.options.max_skipped
        if rows >= JUDGED_FROM and totals.unusable > most * rows:
            raise UserError(
                f"{totals.unusable:,} of {rows:,} rows cannot be used, more than --max-skipped {most}: "
                f"{totals.reasons()}; {self.directory}/skipped.jsonl names each; mend the data, say its --columns, "
                "or raise the share"
            )


def _progress_bar(dataset: Datasets, max_samples: int | None, done: int) -> Any:
    if max_samples is None:  # how many samples there will be is not known, how many rows often is
        return terminal.progress(dataset.total(), "row", "preparing")
    return terminal.progress(max_samples, "sample", "preparing", done)


def _load_or_remove(directory: Path, record: dict[str, Any], vocab_size: int) -> dict[str, torch.Tensor]:
    """Load a sample of an earlier run; a damaged file is removed, so that the next run makes it again."""
    try:
        return artifacts.load_sample(directory, STAGE, record, vocab_size)
    except UserError as error:
        path = sample_path(directory, record["index"])
        path.unlink()
        raise UserError(f"{path} was damaged and has been removed; run the same command, it makes it again") from error


def _nothing_usable(totals: Totals) -> str:
    advice = "; give a larger --max-seq-len" if any("after truncation" in reason for reason in totals.skipped) else ""
    return f"no usable row in the dataset: {totals.reasons() or 'no rows'}{advice}; README, 01, lists what a row may be"


def forced_ids(tokenizer: Any, end_ids: list[int]) -> list[int]:
    """Ids that must be in the draft vocabulary: end ids and all special and added tokens (roles, tools, thinking).

    Some tokenizers have such a token as an ordinary one: what the chat template writes like a marker (<think>, [INST])
    and the vocabulary has as one token is taken too.
    """
    ids = {*end_ids, *tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    templates = tokenizer.chat_template or ""
    vocabulary = tokenizer.get_vocab()
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        ids |= {vocabulary[marker] for marker in MARKER.findall(template) if marker in vocabulary}
    size = tokenizer_size(tokenizer)
    return sorted(token for token in ids if token < size)
