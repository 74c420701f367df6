"""What an output directory of stage 01 holds already: totals, and where an earlier run stopped.

A record of the index is one sample (index, tokens, supervised, conversation, row, source, dataset, status done, bytes
of its file, trimmed: messages left out after the last answer, cut: true when the length limit cut samples of its row,
left_out: samples of its row without supervised tokens within the limit) or one row without samples (row, source,
status skipped, reason). `source` is the file or hub dataset that was read, `dataset` what a blend says the row is
from, else the same. `conversation` is a digest of the row's text, so duplicates and all samples of one row fall on one
side when a later stage splits by it.
"""

import json
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from eagle3 import artifacts
from eagle3.artifacts import Index
from eagle3.terminal import UserError

DUPLICATE = "duplicate of an earlier row"
EXCLUDED = "a prompt of --exclude"
# Reasons that say something about the wish, not about the data
EXPECTED = (DUPLICATE, EXCLUDED, "longer than", "no assistant tokens after truncation")

Place = tuple[str, int]  # source and row number


@dataclass
class Totals:
    """What an output directory holds. `skipped` maps a reason to its number of rows and the place of the first."""

    rows: int = 0  # with samples
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    trimmed: int = 0  # rows with messages after the last assistant turn, which are left out
    cut: int = 0  # rows with a sample that the length limit cut
    left_out: int = 0  # samples that had no supervised tokens within the limit
    checked: int = 0  # assistant turns whose mask a second derivation confirmed, in this run
    by_source: dict[str, int] = field(default_factory=dict)  # samples
    skipped: dict[str, tuple[int, str]] = field(default_factory=dict)
    conversations: set[int] = field(default_factory=set)  # digests, as numbers because these are small

    def add_row(self, records: list[dict[str, Any]]) -> None:
        """Count one row with its samples."""
        first = records[0]
        self.rows += 1
        self.samples += len(records)
        self.tokens += sum(record["tokens"] for record in records)
        self.supervised += sum(record["supervised"] for record in records)
        self.trimmed += "trimmed" in first
        self.cut += "cut" in first
        self.left_out += first.get("left_out", 0)
        self.by_source[first["source"]] = self.by_source.get(first["source"], 0) + len(records)
        self.conversations.add(int(first["conversation"], 16))

    def add_skipped(self, record: dict[str, Any]) -> None:
        count, first = self.skipped.get(record["reason"], (0, f"{record['source']}:{record['row']}"))
        self.skipped[record["reason"]] = (count + 1, first)

    @property
    def skipped_rows(self) -> int:
        return sum(count for count, _ in self.skipped.values())

    @property
    def unusable(self) -> int:
        """Rows that could not be used as they are."""
        return sum(count for reason, (count, _) in self.skipped.items() if not reason.startswith(EXPECTED))

    def reasons(self) -> str:
        """Why rows were skipped, most frequent first, on one line."""
        ordered = sorted(self.skipped.items(), key=lambda item: -item[1][0])
        return "; ".join(f"{count} × {reason}, first {place}" for reason, (count, place) in ordered)


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


def write_skipped(directory: Path) -> None:
    """Write skipped.jsonl: file, line and reason of each row without samples, in the order of reading."""
    index = Index(directory).path
    if not index.exists():
        return
    with artifacts.atomic_file(directory / "skipped.jsonl", "w") as file, open(index, "rb") as lines:
        for line in lines:
            if b'"status": "skipped"' in line and (record := json.loads(line))["status"] == "skipped":
                entry = {"file": record["source"], "line": record["row"], "reason": record["reason"]}
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
