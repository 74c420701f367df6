"""Stage 01: conversations to samples, with an index to resume from and the counts that stage 03 needs.

A record of the index is one sample (index, tokens, supervised, conversation, row, source, dataset, status done, bytes
of its file, trimmed: messages left out after the last answer) or one row without samples (row, source, status skipped,
reason). `source` is the file or hub dataset that was read, `dataset` what a blend says the row is from, else the same.
`conversation` is a digest of the row's text, so duplicates and all samples of one row fall on one side when a later
stage splits by it.
"""

import re
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from eagle3 import artifacts, terminal
from eagle3.artifacts import Index, IndexWriter, sample_path
from eagle3.conversations import HubDataset, LocalFiles, Row, SkipRow, parse_row
from eagle3.masking import Masker
from eagle3.model_files import tokenizer_hash
from eagle3.target import Target, tokenizer_size
from eagle3.terminal import UserError
from eagle3.token_counts import TokenCounts, load_by_source

STAGE = "01"
MAX_SEQ_LEN = 2048  # where the user does not say
WRITERS = 8  # a sync takes milliseconds, and syncs at the same time share one commit of the file system
MOST_PENDING = 64  # samples written but not yet in the index
CHECKPOINT_EVERY = 20_000  # samples between two saves of the counts, which a resumed run need not count again

MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z][A-Z_]*\]")  # in a chat template: <think>, <|im_end|>, [TOOL_CALLS]

Place = tuple[str, int]  # source and row number


@dataclass
class Totals:
    """What an output directory holds. `skipped` maps a reason to its number of rows and the place of the first."""

    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    trimmed: int = 0  # rows with messages after the last assistant turn, which are left out
    duplicates: int = 0  # rows with the text of an earlier row
    skipped: dict[str, tuple[int, str]] = field(default_factory=dict)
    _conversations: set[int] = field(default_factory=set)

    def add_row(self, records: list[dict[str, Any]]) -> None:
        """Count one row with its samples."""
        self.samples += len(records)
        self.tokens += sum(record["tokens"] for record in records)
        self.supervised += sum(record["supervised"] for record in records)
        self.trimmed += "trimmed" in records[0]
        digest = int(records[0]["conversation"], 16)
        self.duplicates += digest in self._conversations
        self._conversations.add(digest)

    def add_skipped(self, record: dict[str, Any]) -> None:
        count, first = self.skipped.get(record["reason"], (0, f"{record['source']}:{record['row']}"))
        self.skipped[record["reason"]] = (count + 1, first)

    @property
    def skipped_rows(self) -> int:
        return sum(count for count, _ in self.skipped.values())


@dataclass
class Progress:
    """Where an earlier run stopped, as its index and files say."""

    totals: Totals = field(default_factory=Totals)  # of all rows that need no redoing
    samples: int = 0
    furthest: Place | None = None  # the last row that was begun
    damaged: int = 0  # samples whose file is missing or has another size than the index says
    redo: dict[Place, int] = field(default_factory=dict)  # rows to do again, with the index of their first sample
    whole: list[dict[str, Any]] = field(default_factory=list)  # records of the samples of all other rows, ascending


def read_progress(directory: Path) -> Progress:
    """Read the index and look at every sample file. The row begun last is done again, for it may be half done."""
    progress, samples = Progress(), {}
    for record in Index(directory).read():
        place = record["source"], record["row"]
        if record["status"] == "skipped":
            progress.totals.add_skipped(record)
        elif record["index"] in samples:  # done again by a run after the one that got furthest
            samples[record["index"]] = record
            continue
        elif record["index"] == len(samples):
            samples[record["index"]] = record
        else:
            raise UserError(f"{directory}/index.jsonl lacks sample {len(samples)}; delete {directory} and rerun")
        progress.furthest = place
    progress.samples = len(samples)
    for place, group in groupby(samples.values(), key=lambda record: (record["source"], record["row"])):
        records = list(group)
        damaged = sum(not artifacts.is_whole(directory, record) for record in records)
        progress.damaged += damaged
        if damaged or place == progress.furthest:
            progress.redo[place] = records[0]["index"]
        else:
            progress.totals.add_row(records)
            progress.whole += records
    return progress


class SampleWriter:
    """Writes sample files in threads, and their records in order, each once its file is whole."""

    def __init__(self, directory: Path, index: IndexWriter, pool: ThreadPoolExecutor) -> None:
        self._directory, self._index, self._pool = directory, index, pool
        self._pending: deque[tuple[dict[str, Any], Future | None]] = deque()

    def add(self, record: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> None:
        path = sample_path(self._directory, record.get("index", 0))
        self._pending.append((record, tensors and self._pool.submit(artifacts.save_tensors, path, tensors)))
        self.wait(MOST_PENDING)

    def close(self) -> None:
        self.wait()

    def wait(self, left: int = 0) -> None:
        """Wait until at most `left` records are not yet in the index."""
        while len(self._pending) > left:
            record, future = self._pending[0]  # stays there when its write failed: nothing later may be recorded
            self._index.add(**record, **({"bytes": future.result()} if future else {}))
            self._pending.popleft()


def prepare(
    target: Target,
    tokenizer: Any,
    dataset: LocalFiles | HubDataset,
    directory: Path,
    *,
    max_samples: int | None,
    max_seq_len: int | None,
) -> Totals | None:
    """Write the samples of `dataset` to `directory`, or continue there; None when it was finished already.

    Without `max_seq_len` it is MAX_SEQ_LEN, or what the target takes. Raises UserError when the target takes less than
    `max_seq_len`, when the directory holds something else or more samples than `max_samples`, when another process
    uses it, or when no row is usable.
    """
    positions = target.config.get("max_position_embeddings") or MAX_SEQ_LEN
    if max_seq_len is None:
        max_seq_len = min(MAX_SEQ_LEN, positions)
        if max_seq_len < MAX_SEQ_LEN:
            terminal.say(f"samples are cut to {max_seq_len} tokens instead of {MAX_SEQ_LEN}: the target takes no more")
    elif max_seq_len > positions and "max_position_embeddings" in target.config:
        raise UserError(
            f"--max-seq-len {max_seq_len}: the target takes {positions} positions (max_position_embeddings in "
            f"{target.directory}/config.json); give at most {positions}"
        )
    fingerprint = {
        "target": target.config_hash,
        "tokenizer": tokenizer_hash(target.directory),
        "dataset": dataset.identity(),
        "split": dataset.split,
        "max_seq_len": max_seq_len,
    }
    end_ids = sorted({*target.end_ids} | ({tokenizer.eos_token_id} - {None}))
    facts = {
        "max_samples": max_samples,
        "vocab_size": target.vocab_size,
        "tokenizer_size": tokenizer_size(tokenizer),
        "end_ids": end_ids,
        "forced_ids": forced_ids(tokenizer, end_ids),
    }
    with artifacts.directory_lock(directory):
        manifest = artifacts.read_manifest(directory, STAGE, missing_ok=True)
        if manifest:
            artifacts.require_same(
                directory, manifest["fingerprint"], fingerprint, "give another --output-dir, or delete this one"
            )
        elif Index(directory).path.exists():
            raise UserError(
                f"{directory} has an index.jsonl but no manifest.json; give another --output-dir or delete it"
            )
        progress = read_progress(directory)
        if max_samples is not None and progress.samples > max_samples:
            raise UserError(
                f"{directory} has {progress.samples} samples already, more than --max-samples {max_samples}; "
                f"give another --output-dir, or at least {progress.samples}"
            )
        complete = bool(manifest and manifest["complete"])
        enough = complete and (manifest["exhausted"] or progress.samples == max_samples)
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
        run = _Run(directory, Masker(tokenizer, end_ids), counts, progress, max_samples, max_seq_len)
        exhausted = run.over(dataset)
        totals = progress.totals
        if not totals.samples:
            raise UserError(_nothing_usable(fingerprint["dataset"], totals))
        counts.finish()
        artifacts.write_manifest(
            directory,
            STAGE,
            fingerprint,
            samples=totals.samples,
            tokens=totals.tokens,
            supervised=totals.supervised,
            skipped={reason: count for reason, (count, _) in totals.skipped.items()},
            **facts,
            exhausted=exhausted,
            complete=True,
        )
        counts.copy.unlink(missing_ok=True)
    return totals


@dataclass
class _Run:
    """The pass over the dataset; updates the progress it begins with."""

    directory: Path
    masker: Masker
    counts: TokenCounts
    progress: Progress
    max_samples: int | None
    max_seq_len: int

    def over(self, dataset: LocalFiles | HubDataset) -> bool:
        """Process rows until there are enough samples; returns whether the dataset came to its end."""
        counts, redo, furthest = self.counts, self.progress.redo, self.progress.furthest
        for record in self.progress.whole:
            if record["index"] >= counts.covered:
                tensors = _load_or_remove(self.directory, record, counts.vocab_size)
                counts.add(record["index"], record["dataset"], tensors)
        done, saved, passed, exhausted = self.progress.samples, counts.covered, furthest is None, True
        with (
            Index(self.directory).appending() as index_writer,
            ThreadPoolExecutor(WRITERS) as pool,
            closing(SampleWriter(self.directory, index_writer, pool)) as writer,
            closing(dataset.rows()) as rows,
            _progress_bar(dataset, self.max_samples, done) as bar,
        ):
            for row in rows:
                place = row.source, row.number
                start = redo.pop(place, done if passed else None)
                passed = passed or place == furthest
                before = done
                if start is not None:
                    done = max(done, start + self._process(row, start, writer))
                bar.update(1 if self.max_samples is None else done - before)
                if passed and not redo and done - saved >= CHECKPOINT_EVERY:
                    writer.wait()
                    counts.save_copy(done)
                    saved = done
                if done == self.max_samples and not redo:
                    exhausted = False
                    break
        if redo or (exhausted and not passed):
            raise UserError(f"{self.directory}: the dataset has fewer rows than before; delete the directory and rerun")
        return exhausted

    def _process(self, row: Row, start: int, writer: SampleWriter) -> int:
        """Write the samples of one row from index `start` on, or why there are none; returns their number."""
        place = {"row": row.number, "source": row.source}
        try:
            conversation = parse_row(row)
            samples = self.masker.samples(conversation, self.max_seq_len)
        except SkipRow as skip:
            record = {**place, "status": "skipped", "reason": str(skip)}
            self.progress.totals.add_skipped(record)
            writer.add(record)
            return 0
        dataset = conversation.origin or row.source
        common = {"conversation": conversation.digest, **place, "dataset": dataset, "status": "done"}
        if conversation.trailing:
            common["trimmed"] = conversation.trailing
        if self.max_samples is not None:
            samples = samples[: self.max_samples - start]
        records = []
        for index, sample in enumerate(samples, start):
            tensors = {
                "input_ids": torch.tensor(sample.ids, dtype=torch.int32),  # [T]
                "loss_mask": torch.tensor(sample.mask, dtype=torch.bool),  # [T]
            }
            record = {"index": index, "tokens": len(sample.ids), "supervised": sum(sample.mask), **common}
            self.counts.add(index, dataset, tensors)
            writer.add(record, tensors)
            records.append(record)
        self.progress.totals.add_row(records)
        return len(records)


def _progress_bar(dataset: LocalFiles | HubDataset, max_samples: int | None, done: int) -> Any:
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


def _nothing_usable(dataset: str, totals: Totals) -> str:
    reasons = "; ".join(f"{count} × {reason}, first {place}" for reason, (count, place) in totals.skipped.items())
    advice = "; give a larger --max-seq-len" if any("after truncation" in reason for reason in totals.skipped) else ""
    return (
        f"no usable conversation in {dataset}: {reasons or 'no rows'}{advice}; a row is "
        '{"messages": [{"role", "content"}]} or {"conversations": [{"from", "value"}]}'
    )


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
