"""Rows of local files and hub datasets, read one by one in an order that can be repeated.

Local files never touch the hub. A file is opened when its turn comes; memory does not grow with the number of rows,
apart from 16 bytes a row where local rows are shuffled.
"""

import contextlib
import gc
import hashlib
import itertools
import math
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from eagle3 import row_files, terminal
from eagle3.row_files import SUFFIXES
from eagle3.terminal import UserError, short

# Builders of the datasets library that hold conversations and unpickle nothing; its pandas builder unpickles
HUB_FORMATS = ("json", "parquet", "arrow")
HUB_SETTINGS = ("config", "split", "revision")
BUFFER = 10_000  # rows of a hub dataset from which a random one leaves
MOST_OPEN = 256  # files that stay open while their rows are shuffled


@dataclass(frozen=True)
class Row:
    """One row of a source: `number` counts from 1 (in JSON lines it is the line), `value` is not parsed yet.

    `source` and `number` together name one row of all datasets of a run.
    """

    source: str  # path of the file within the dataset, or the dataset's name on the hub
    number: int
    value: Any  # bytes of a JSON line, or the object itself

    @property
    def place(self) -> str:
        return f"{self.source}:{self.number}"


# ------------------------------------------------------------------------------------------- local files


class LocalFiles:
    """One file of JSON lines, a JSON array or parquet, or all such files below a directory, by relative path.

    `flag` is where the user gave the path, for errors.
    """

    def __init__(self, path: Path, flag: str = "--dataset") -> None:
        self.path = Path(os.path.abspath(path.expanduser()))  # links are kept: their targets may lack the suffix
        self.label = _printable(self.path.name)
        self.prefix = ""  # of all sources, where a run has several datasets
        if self.path.is_dir():
            found = {_printable(file.relative_to(self.path).as_posix()): file for file in _files_below(self.path)}
            self.files = dict(sorted(found.items()))
        elif self.path.name.endswith(SUFFIXES):
            self.files = {self.label: self.path}
        else:
            raise UserError(f"{flag} {path}: expected a file that ends in {', '.join(SUFFIXES)}, or a directory")
        if not self.files:
            raise UserError(f"{flag} {path}: no {', '.join(SUFFIXES)} files in this directory")

    def rename(self, label: str) -> None:
        """Name the dataset `label`, also in the sources of its rows."""
        self.label = label
        if self.path.is_dir():
            self.prefix = f"{label}/"
        else:
            self.files = {label: self.path}

    def identity(self) -> dict[str, Any]:
        """The number of files and a digest of their names, sizes and content."""
        digest = hashlib.sha256()
        for name, file in self.files.items():
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            digest.update(row_files.content_digest(file))
        return {"name": self.label, "files": len(self.files), "sha256": digest.hexdigest()[:16]}

    def total(self) -> int | None:
        """Number of rows where it costs little to know, for the progress bar."""
        total = 0
        for file in self.files.values():
            count = row_files.count_rows(file)
            if count is None:
                return None
            total += count
        return total

    def rows(self) -> Iterator[Row]:
        for name, file in self.files.items():
            for number, value in enumerate(row_files.read_values(file), 1):
                yield Row(self.prefix + name, number, value)

    def shuffled_rows(self, seed: int, spool: Path) -> Iterator[Row]:
        """All rows in one random order. What cannot be read by offset is copied to a nameless file in `spool` first."""
        in_place = {name for name, file in self.files.items() if file.suffix == ".jsonl"}
        if len(in_place) > MOST_OPEN:
            in_place = set()
        copied = len(self.files) - len(in_place)
        if copied:
            terminal.say(f"{self.label}: copying {copied} file{'s' * (copied > 1)} to {spool}, to be shuffled")
        with contextlib.ExitStack() as stack:
            copy = stack.enter_context(tempfile.TemporaryFile(dir=spool, buffering=0)) if copied else None
            handles, starts = [], []  # of each file: where its lines are, and the offset of each and of their end
            for name, file in self.files.items():
                if name in in_place:
                    handles.append(stack.enter_context(open(file, "rb", buffering=0)))
                    starts.append(row_files.line_starts(handles[-1]))
                else:
                    handles.append(copy)
                    starts.append(row_files.copy_values(row_files.read_values(file), copy, spool))
            names = [self.prefix + name for name in self.files]
            for which, line in _shuffled([len(offsets) - 1 for offsets in starts], seed):
                begin, end = starts[which][line : line + 2].tolist()
                yield Row(names[which], line + 1, os.pread(handles[which].fileno(), end - begin, begin))


def _printable(name: str) -> str:
    """A file's name as valid text: bytes that are not UTF-8 as escapes."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _files_below(directory: Path) -> Iterator[Path]:
    """Files with rows, in folders and linked folders too; hidden ones are left out."""
    seen = set()  # links may form a circle
    for folder, folders, files in os.walk(directory, onerror=_raise, followlinks=True):
        real = os.path.realpath(folder)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        if real not in seen:
            yield from (Path(folder, name) for name in files if name.endswith(SUFFIXES) and not name.startswith("."))
        seen.add(real)


def _raise(error: OSError) -> None:
    raise error


def _shuffled(counts: list[int], seed: int) -> Iterator[tuple[int, int]]:
    """(file, line from 0) of all lines of files with so many lines each, in one uniformly random order."""
    bounds = np.cumsum([0, *counts])
    # sorting a bit generator's raw numbers: only these stay the same from one numpy to the next
    order = np.argsort(np.random.PCG64(seed).random_raw(int(bounds[-1])), kind="stable")
    for begin in range(0, len(order), 1 << 16):
        part = order[begin : begin + (1 << 16)]
        files = np.searchsorted(bounds, part, side="right") - 1
        yield from zip(files.tolist(), (part - bounds[files]).tolist(), strict=True)


# --------------------------------------------------------------------------------------------------- hub


class HubDataset:
    """A dataset of the Hugging Face hub, streamed: only what is read is downloaded."""

    def __init__(self, name: str, config: str | None = None, split: str = "train", revision: str | None = None) -> None:
        import datasets

        self.name = self.label = name
        self.config, self.split, self.revision = config, split, revision
        terminal.say(f"opening {name} on the hub")
        try:
            builder = datasets.load_dataset_builder(name, config, revision=revision)
            kind = type(builder).__module__.rpartition(".")[2]
            self._rows = builder.as_streaming_dataset(split=split) if kind in HUB_FORMATS else None
        except Exception as error:
            # the library names the configs and splits that there are on further lines
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            raise UserError(
                f"--dataset {name}: no such file, and the hub did not give split {split!r} ({said}); "
                f"give a local file ({', '.join(SUFFIXES)}) or a directory of them, check the name, "
                "give NAME,config=C,split=S, or set HF_ENDPOINT, HF_TOKEN or HF_HOME"
            ) from error
        if self._rows is None:
            raise UserError(
                f"--dataset {name} is of the format {kind}, which is not read; "
                f"give a dataset of {', '.join(HUB_FORMATS)} files, or a local file ({', '.join(SUFFIXES)})"
            )

    def rename(self, label: str) -> None:
        """Name the dataset `label`, also in its rows."""
        self.label = label

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "config": self.config, "split": self.split, "revision": self.revision}

    def total(self) -> int | None:
        splits = getattr(getattr(self._rows, "info", None), "splits", None) or {}
        return splits[self.split].num_examples if self.split in splits else None

    def rows(self) -> Iterator[Row]:
        iterator, number = iter(self._rows), 0
        try:
            for value in iterator:
                number += 1
                yield Row(self.label, number, row_files.without_nulls(value))
        except Exception as error:
            raise UserError(
                f"--dataset {self.name}: reading failed after row {number} ({short(error)}); the same command "
                "continues; if it fails there again, download the files and give their directory"
            ) from error
        finally:
            # a parquet scanner left to the interpreter's shutdown hangs or aborts it (apache/arrow#45214)
            with contextlib.suppress(AttributeError):
                iterator.close()
            del iterator
            gc.collect()

    def shuffled_rows(self, seed: int, spool: Path) -> Iterator[Row]:
        """All rows, each a random one of the BUFFER that were read before it and did not leave yet."""
        generator, buffer = random.Random(seed), []

        def leave() -> Row:
            index = int(generator.random() * len(buffer))  # only random() stays the same from one Python to the next
            buffer[index], buffer[-1] = buffer[-1], buffer[index]
            return buffer.pop()

        with closing(self.rows()) as rows:
            for row in rows:
                buffer.append(row)
                if len(buffer) > BUFFER:
                    yield leave()
        while buffer:
            yield leave()


# ---------------------------------------------------------------------------------------------- datasets


class Datasets:
    """One or more datasets as one sequence of rows."""

    is_all = True  # `rows` gives every row there is

    def __init__(
        self, datasets: list[LocalFiles | HubDataset], weights: list[Fraction], shuffle: int | None = None
    ) -> None:
        """`weights`: shares of the rows, in any unit; `shuffle`: a seed."""
        self._datasets, self._weights, self._shuffle = datasets, weights, shuffle

    def __str__(self) -> str:
        return ", ".join(dataset.label for dataset in self._datasets)

    def identity(self) -> list[dict[str, Any]]:
        """What is read and in which order, as a JSON value for a fingerprint."""
        return [
            {**dataset.identity(), "weight": float(weight), "shuffle": self._shuffle}
            for dataset, weight in zip(self._datasets, self._weights, strict=True)
        ]

    def total(self) -> int | None:
        """Number of rows where it costs little to know."""
        totals = [dataset.total() for dataset in self._datasets]
        return None if None in totals else sum(totals)

    def rows(self, spool: Path) -> Iterator[Row]:
        """All rows, always in the same order. `spool` is a folder for temporary files, which end with the iterator."""
        with contextlib.ExitStack() as stack:
            streams = [
                stack.enter_context(
                    closing(dataset.rows() if self._shuffle is None else dataset.shuffled_rows(self._shuffle, spool))
                )
                for dataset in self._datasets
            ]
            yield from _interleaved(streams, self._weights)


def _interleaved(streams: list[Iterator[Row]], weights: list[Fraction]) -> Iterator[Row]:
    """Rows of all streams, at every prefix less than one row away from their shares, until the first stream ends.

    From there on the others go on in the same way. Of the streams that are below their share, the one whose next row
    is due first is taken, the first given of equal ones: the quota method of Balinski and Young (1975). Taking always
    the largest deficit strays by more than a row from ten streams on.
    """
    scale = math.lcm(*(weight.denominator for weight in weights))
    active = [(stream, int(weight * scale)) for stream, weight in zip(streams, weights, strict=True)]
    while active:
        whole, taken = sum(weight for _, weight in active), [0] * len(active)
        for number in itertools.count(1):
            _, index = min(
                ((taken[index] + 1) / weight, index)
                for index, (_, weight) in enumerate(active)
                if taken[index] * whole < number * weight
            )
            row = next(active[index][0], None)
            if row is None:
                del active[index]
                break
            taken[index] += 1
            yield row


def open_datasets(specs: list[str], *, shuffle: int | None = None) -> Datasets:
    """Open the datasets that `specs` name: PATH[:WEIGHT] or NAME[,config=C][,split=S][,revision=R][:WEIGHT].

    A path that exists as given is always that path. Raises UserError for what is no dataset, and for rows that would
    be read twice.
    """
    if shuffle is not None and shuffle < 0:
        raise UserError(f"seed {shuffle} of the shuffle: expected at least 0")
    opened, weights, texts = [], [], []
    for spec in specs:
        text, weight = _split_weight(spec)
        opened.append(_open(text))
        weights.append(weight)
        texts.append(text)
    _refuse_twice(opened)
    if len(opened) > 1:
        labels = [dataset.label for dataset in opened]
        for dataset, label in zip(opened, labels if len({*labels}) == len(labels) else texts, strict=True):
            dataset.rename(_printable(label))
    return Datasets(opened, weights, shuffle)


def _split_weight(spec: str) -> tuple[str, Fraction]:
    text, colon, number = spec.rpartition(":")
    if os.path.exists(os.path.expanduser(spec)) or not colon or "/" in number:
        return spec, Fraction(1)
    try:
        if 0 < float(number) < math.inf:
            return text, Fraction(number)
    except ValueError:
        pass
    raise UserError(f"--dataset {spec}: weight {number!r}, expected a number above 0")


def _open(text: str) -> LocalFiles | HubDataset:
    if os.path.exists(os.path.expanduser(text)):
        return LocalFiles(Path(text))
    name, *pairs = text.split(",")
    settings = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in HUB_SETTINGS or not value or key in settings:
            raise UserError(f"--dataset {text}: {pair!r}, expected each of {', '.join(HUB_SETTINGS)} once, as split=S")
        settings[key] = value
    if settings and os.path.exists(os.path.expanduser(name)):
        raise UserError(f"--dataset {text}: {', '.join(settings)} only fit hub datasets, {name} is local; leave it out")
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(SUFFIXES):
        raise UserError(f"--dataset {name}: no such file or directory")
    return HubDataset(name, **settings)


def _refuse_twice(datasets: list[LocalFiles | HubDataset]) -> None:
    for dataset in datasets:
        if isinstance(dataset, HubDataset) and sum(other.identity() == dataset.identity() for other in datasets) > 1:
            raise UserError(f"--dataset {dataset.name} is given twice; give it once, with a weight")
    files: Counter[str] = Counter()
    for dataset in datasets:
        if isinstance(dataset, LocalFiles):
            files.update({os.path.realpath(file) for file in dataset.files.values()})
    for file, times in files.items():
        if times > 1:
            raise UserError(f"--dataset: {file} is in {times} of the given datasets; leave it out of all but one")
