"""Rows whose assistant turns the target writes itself: prompts out of any data, or of its own, answered and kept.

DIR/prompts.jsonl   with `--dataset self`: the prompts that the target wrote
DIR/answers.jsonl   its answers, row by row, as token ids
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import torch

from eagle3.conversations import Conversation, SkipRow, TokenRow, parse_row
from eagle3.exclusion import Exclusion
from eagle3.masking import Masker
from eagle3.model_files import tokenizer_hash
from eagle3.prepare.progress import EXCLUDED
from eagle3.prepare.stage import Options, earlier, end_ids_of, length_limit, made_by
from eagle3.responses.backends import Backend, Sampling, open_backend
from eagle3.responses.journal import Answers, Journal, Tally
from eagle3.responses.self_prompts import SelfPrompts, write_prompts
from eagle3.responses.writer import is_written, write_answers
from eagle3.sources import Datasets, Row
from eagle3.target import Target, open_target
from eagle3.terminal import UserError

PROMPT_TOKENS = 512  # of a prompt that the target writes; longer ones are texts, not questions


@dataclass(frozen=True)
class EngineChoice:
    """Who writes: the server at `endpoint`, or an engine loaded here with the other settings."""

    endpoint: str | None
    concurrency: int
    dtype: str
    tensor_parallel_size: int | None
    gpu_memory_utilization: float


@dataclass(frozen=True)
class Prompts:
    """The rows of a dataset as conversations to answer."""

    dataset: Datasets | SelfPrompts
    columns: dict[str, str] | None
    exclusion: Exclusion | None

    def rows(self, spool: Path) -> Iterator[tuple[Row, Conversation | SkipRow]]:
        """Every row, and what is in it or why it is not used."""
        with contextlib.closing(self.dataset.rows(spool)) as rows:
            for row in rows:
                try:
                    parsed = parse_row(row, self.columns, answers_needed=False)
                    if isinstance(parsed, TokenRow):
                        raise SkipRow("row is tokens already, and the target answers text")
                    if self.exclusion and self.exclusion.matches(parsed.messages):
                        raise SkipRow(EXCLUDED)
                    yield row, parsed
                except SkipRow as skip:
                    yield row, skip


class OnPolicy:
    """The answered rows as a dataset for stage 01; a row that was not used has the reason as its value."""

    def __init__(self, prompts: Prompts, answers: Answers) -> None:
        self._prompts, self._answers = prompts, answers
        self.is_all = answers.exhausted

    def identity(self) -> list[str]:
        return [self._answers.identity()]

    def total(self) -> int | None:
        return self._prompts.dataset.total()

    def rows(self, spool: Path) -> Iterator[Row]:
        with contextlib.closing(self._prompts.rows(spool)) as rows, contextlib.closing(self._answers.rows()) as answers:
            for row, parsed in rows:
                answer = Row(row.source, row.number, parsed) if isinstance(parsed, SkipRow) else next(answers, None)
                if answer is None:  # answered up to here
                    return
                yield answer


def answered(
    target: Target,
    tokenizer: Any,
    dataset: Datasets | None,
    directory: Path,
    options: Options,
    sampling: Sampling,
    choice: EngineChoice,
) -> tuple[OnPolicy, Tally | None]:
    """Have the target answer the rows of `dataset`, None for prompts of its own, or continue where a run stopped.

    Returns the answered rows, and the counts of the answers unless nothing was left to do. The caller holds the
    directory's lock. Raises UserError as open_backend, write_prompts and write_answers do.
    """
    journal = directory / "answers.jsonl"
    end_ids = end_ids_of(target, tokenizer)
    max_seq_len = length_limit(target, options.max_seq_len)
    # before hours of answering, not after them
    if earlier(directory, made_by(target, options)) and not journal.exists():
        raise UserError(f"{directory} holds samples of recorded answers; give another --output-dir, or delete it")
    begun = Journal(journal).fingerprint()
    today = begun["date"] if begun else date.today().isoformat()  # a later run must render as the first did
    common = {"target": target.config_hash, "tokenizer": tokenizer_hash(target.directory)}
    with contextlib.ExitStack() as stack:

        @cache
        def backend() -> Backend:
            whole = target if choice.endpoint else open_target(target.name, weights=True)
            opened = open_backend(
                whole,
                tokenizer,
                directory / "answers.engine.log",
                endpoint=choice.endpoint,
                concurrency=choice.concurrency,
                max_model_len=max_seq_len,
                dtype=choice.dtype,
                tensor_parallel_size=choice.tensor_parallel_size or max(1, torch.cuda.device_count()),
                gpu_memory_utilization=choice.gpu_memory_utilization,
                trust_remote_code=options.trust_remote_code,
            )
            stack.callback(opened.close)
            return opened

        if dataset is None:
            own = directory / "prompts.jsonl"
            wanted = -(-options.max_samples // sampling.samples_per_prompt)
            writing = Sampling(temperature=1.0, max_tokens=PROMPT_TOKENS, seed=sampling.seed)
            Journal(own).require_made_by(common | writing.fields())
            if not Journal(own).fingerprint() or SelfPrompts(own).total() < wanted:
                write_prompts(
                    backend(),
                    tokenizer,
                    wanted,
                    own,
                    writing,
                    fingerprint=common,
                    max_seq_len=max_seq_len,
                    end_ids=end_ids,
                )
            dataset = SelfPrompts(own)
        prompts = Prompts(dataset, options.columns, options.exclusion)
        fingerprint = common | {
            "date": today,
            "dataset": dataset.identity(),
            "columns": options.columns,
            "exclude": options.exclusion.identity() if options.exclusion else None,
        }
        wanted = {"max_samples": options.max_samples, "max_seq_len": max_seq_len}
        tally = None
        if not is_written(journal, fingerprint, sampling, **wanted):
            tally = write_answers(
                backend(),
                Masker(tokenizer, end_ids, date=today),
                tokenizer,
                ((row, parsed) for row, parsed in prompts.rows(directory) if isinstance(parsed, Conversation)),
                journal,
                sampling,
                fingerprint=fingerprint,
                end_ids=end_ids,
                total=dataset.total(),
                **wanted,
            )
    return OnPolicy(prompts, Answers(journal)), tally
