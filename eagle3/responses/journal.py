"""answers.jsonl: one line for each conversation the target has written, in the order they finished; append only.

Line 1     {"fingerprint": {...}}: what made the answers
then       {"order", "draw", "source", "row", "origin", "samples": [{"input_ids", "runs"}], "stopped", "messages"} or
           {"order", "draw", "source", "row", "failed": reason}
at the end {"finished": {"exhausted": bool}}: failed rows above it are settled, others are tried again

`order` is the row's place in the input, from 0; `draw` counts the conversations written for one row; `runs` are the
places [begin, end) of the turns in input_ids. With `messages` the lines are chat rows that a person, or --dataset, can
read. A later line of the same row and draw replaces the earlier one.
"""

import contextlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from eagle3 import artifacts
from eagle3.artifacts import IndexWriter
from eagle3.conversations import SkipRow, TokenRow
from eagle3.sources import Row
from eagle3.terminal import UserError

UNKNOWN = -1  # offset of a row that has no line yet
FORM = "on-policy answers"


class Journal:
    """A file of JSON lines whose first one tells what made it. A line torn by a kill is cut off before appending."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Byte offset and object of each whole line. Raises UserError naming a damaged one."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return
        offset = 0
        with file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return  # torn
                yield offset, self._parsed(line, number)
                offset += len(line)

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        where, remedy = f"{self.path} line {number}", "delete that line, then the same command writes it again"
        record = artifacts.parse_record(line, where, remedy)
        if (number == 1) != ("fingerprint" in record):
            raise UserError(f"{self.path} line 1 does not say what made the file; delete the file")
        return record

    def fingerprint(self) -> dict[str, Any] | None:
        """What made the file; None where there is none yet."""
        return next((record["fingerprint"] for _, record in self.read()), None)

    def require_made_by(self, fingerprint: dict[str, Any]) -> None:
        """Refuse to continue what other settings made. Raises UserError naming the field and both values."""
        made_by = self.fingerprint()
        if made_by is not None:
            artifacts.require_same(self.path, made_by, fingerprint, "give another --output-dir, or delete this file")

    @contextlib.contextmanager
    def appending(self, fingerprint: dict[str, Any]) -> Iterator[IndexWriter]:
        """Open for appending; yields a writer whose `add` puts one line on disk."""
        self.require_made_by(fingerprint)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+") as file:
            file.truncate(_end_of_lines(file))
            writer = IndexWriter(file)
            if not file.tell():
                writer.add(fingerprint=fingerprint)
            yield writer
            os.fsync(file.fileno())


def _end_of_lines(file: Any) -> int:
    """Offset after the last newline, found from the end: journals are long."""
    end = file.seek(0, os.SEEK_END)
    block = 1 << 20
    while end:
        start = max(0, end - block)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    file.seek(end)
    return end


class Places:
    """Where the journal has each row and draw, in a few bytes each: the tokens stay on disk."""

    def __init__(self, journal: Journal, draws: int) -> None:
        self.draws = draws
        self.finished = self.exhausted = False  # as the last line says
        self.tally = Tally()
        self._offsets, self._samples, self._digests = array("q"), array("i"), array("Q")  # by order * draws + draw
        settled: dict[int, str] = {}
        failed: dict[int, str] = {}
        for offset, record in journal.read():
            if "finished" in record:
                self.finished, self.exhausted = True, record["finished"]["exhausted"]
                settled, failed = settled | failed, {}
            elif "order" in record:
                self.finished = self.exhausted = False
                place = record["order"] * draws + record["draw"]
                settled.pop(place, None)
                failed.pop(place, None)
                self.note(record, offset)
                if "failed" in record:
                    failed[place] = record["failed"]
                else:
                    self.tally.add(record)
        self.tally.failed.update(settled.values())
        for place in failed:  # to be tried again
            self._offsets[place] = UNKNOWN

    def note(self, record: dict[str, Any], offset: int = 0) -> None:
        """Remember a line of the journal."""
        place = record["order"] * self.draws + record["draw"]
        for values, nothing in ((self._offsets, UNKNOWN), (self._samples, 0), (self._digests, 0)):
            values.extend([nothing] * (place + 1 - len(values)))
        samples = record.get("samples", [])
        self._offsets[place] = offset
        self._samples[place] = len(samples)
        self._digests[place] = int(artifacts.digest(samples), 16)

    def has(self, order: int, draw: int) -> bool:
        place = order * self.draws + draw
        return place < len(self._offsets) and self._offsets[place] != UNKNOWN

    def samples(self, order: int) -> int:
        """Samples of a row's draws so far; equal draws count once."""
        places = range(order * self.draws, min((order + 1) * self.draws, len(self._offsets)))
        return sum({self._digests[place]: self._samples[place] for place in places}.values())

    def settled(self) -> Iterator[int]:
        """The orders from 0 on up to the first row that is not settled."""
        return takewhile(self.has_all, count())

    def has_all(self, order: int) -> bool:
        return all(self.has(order, draw) for draw in range(self.draws))

    def offsets(self, order: int) -> list[int]:
        """Offsets of the lines with samples, equal ones once; where there are none, of a line that says why."""
        places = range(order * self.draws, (order + 1) * self.draws)
        by_content = {self._digests[place]: self._offsets[place] for place in reversed(places) if self._samples[place]}
        return list(reversed(by_content.values())) or [self._offsets[places[0]]]


@dataclass
class Tally:
    """Counts over the conversations of a journal; `generated` and `seconds` are of one run alone."""

    conversations: int = 0
    samples: int = 0
    turns: int = 0  # supervised ones
    tokens: int = 0  # of these turns
    stopped: Counter = field(default_factory=Counter)  # conversations that ended early, by reason
    failed: Counter = field(default_factory=Counter)  # conversations without samples after two tries, by reason
    generated: int = 0
    seconds: float = 0.0

    def add(self, record: dict[str, Any]) -> None:
        """Count a line of the journal."""
        if "failed" in record:
            self.failed[record["failed"]] += 1
            return
        runs = [run for sample in record["samples"] for run in sample["runs"]]
        self.conversations += 1
        self.samples += len(record["samples"])
        self.turns += len(runs)
        self.tokens += sum(end - begin for begin, end in runs)
        if record["stopped"]:
            self.stopped[record["stopped"]] += 1

    @property
    def rate(self) -> float:
        """Tokens a second of the run."""
        return self.generated / self.seconds if self.seconds else 0.0

    def lines(self) -> dict[str, object]:
        """For the closing summary."""
        lines: dict[str, object] = {
            "answers": f"{self.turns:,} turns of {self.conversations:,} conversations, {self.tokens:,} tokens",
            "generated": f"{self.generated:,} tokens in {self.seconds:.1f} s, {self.rate:,.0f} tokens/s",
        }
        lines |= {f"ended early, {reason}": f"{number:,}" for reason, number in self.stopped.most_common()}
        return lines | {f"failed, {reason}": f"{number:,}" for reason, number in self.failed.most_common()}


class Answers:
    """The finished answers, row by row in the order of the input."""

    def __init__(self, path: Path) -> None:
        """Raises UserError when the answers are not finished."""
        self._path = path
        journal = Journal(path)
        self._fingerprint = journal.fingerprint()
        if self._fingerprint is None:
            raise UserError(f"{path} is missing or empty; run the same command, it writes the answers")
        self._places = Places(journal, self._fingerprint["samples_per_prompt"])
        if not self._places.finished:
            raise UserError(f"{path} is not finished; run the same command, it continues")

    @property
    def exhausted(self) -> bool:
        """Whether every row of the input was answered."""
        return self._places.exhausted

    def identity(self) -> str:
        return f"{FORM} {artifacts.digest(self._fingerprint)}"

    def rows(self) -> Iterator[Row]:
        """Every answered row: its value is a TokenRow of all its draws, or the SkipRow that says why there is none."""
        with open(self._path, "rb") as file:
            for order in self._places.settled():
                records = []
                for offset in self._places.offsets(order):
                    file.seek(offset)
                    records.append(json.loads(file.readline()))
                samples = tuple(_masked(sample) for record in records for sample in record.get("samples", []))
                first = records[0]
                if samples:
                    value: TokenRow | SkipRow = TokenRow(samples, first["origin"], FORM)
                else:
                    value = SkipRow(f"not answered: {first.get('failed') or first['stopped']}")
                yield Row(first["source"], first["row"], value)


def _masked(sample: dict[str, Any]) -> tuple[list[int], list[bool]]:
    ids = sample["input_ids"]
    mask = [False] * len(ids)
    for begin, end in sample["runs"]:
        mask[begin:end] = [True] * (end - begin)
    return ids, mask
