"""The rows of one local file: JSON lines (also compressed), a JSON array or parquet.

No schema is inferred, so columns whose types differ between rows or files cannot break reading. All but a JSON array
are read as streams.
"""

import hashlib
import io
import json
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from eagle3.terminal import UserError, short

SUFFIXES = (".json", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # as pyarrow calls them
BLOCK = 1 << 22  # bytes read or written at once
STREAM = 1 << 16  # the same in compressed files and parquet: the rows in the block of an error are lost


def read_values(file: Path) -> Iterator[Any]:
    """The value of each row: bytes of a line, else the object. Raises UserError at the first that cannot be read."""
    number = 0
    try:
        for value in _read_parquet(file) if file.suffix == ".parquet" else _read_json(file):
            yield value
            number += 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # the operating system's
            raise OSError(error.errno, error.strerror, str(file)) from error
        raise UserError(
            f"{file} cannot be read after row {number} ({short(error)}); mend it, fetch it again or leave it out"
        ) from error


def _read_json(file: Path) -> Iterator[Any]:
    """JSON lines, or the items of a JSON array in a .json file."""
    with _opened(file) as stream:
        if _kind(file) == ".json" and _begins_array(stream):
            yield from json.loads(stream.read())
        else:
            yield from stream


def _opened(file: Path) -> io.BufferedReader:
    if file.suffix not in COMPRESSIONS:
        return open(file, "rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(file, compression=COMPRESSIONS[file.suffix]), STREAM)


def _kind(file: Path) -> str:
    return file.with_suffix("").suffix if file.suffix in COMPRESSIONS else file.suffix


def _begins_array(stream: io.BufferedReader) -> bool:
    return stream.peek(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _read_parquet(file: Path) -> Iterator[Any]:
    from pyarrow import parquet

    # read ahead, as it does by itself, a whole file ends up in memory
    with parquet.ParquetFile(file, pre_buffer=False, buffer_size=STREAM) as table:
        for batch in table.iter_batches(batch_size=256):
            yield from map(without_nulls, batch.to_pylist())


def without_nulls(value: Any) -> Any:
    """Objects without their null fields: arrow gives every object of a column the fields of all of them."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def count_rows(file: Path) -> int | None:
    """Number of rows where it costs little to know: not of compressed files and JSON arrays."""
    if file.suffix == ".parquet":
        from pyarrow import ArrowException, parquet

        try:
            return parquet.read_metadata(file).num_rows
        except (ArrowException, OSError):
            return None  # the reader names the file when it comes to it
    if file.suffix in COMPRESSIONS:
        return None
    with open(file, "rb") as handle:
        if file.suffix == ".json" and _begins_array(handle):
            return None
        newlines, last = 0, b"\n"
        while block := handle.read(BLOCK):
            newlines, last = newlines + block.count(b"\n"), block[-1:]
    return newlines + (last != b"\n")


def content_digest(file: Path) -> bytes:
    """Digest of all bytes of a file up to 16 MiB, of 256 evenly spaced blocks of a larger one."""
    block, digest, size = 1 << 16, hashlib.sha256(), file.stat().st_size
    with open(file, "rb") as handle:
        for offset in range(0, size, max(block, size // 256)):
            handle.seek(offset)
            digest.update(handle.read(block))
    return digest.digest()


def line_starts(file: BinaryIO) -> np.ndarray:
    """int64 [lines + 1]: the offset in bytes of each line, and of the end of the last."""
    starts, size, last = [np.zeros(1, np.int64)], 0, b"\n"
    while block := file.read(BLOCK):
        starts.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + (size + 1))
        size, last = size + len(block), block[-1:]
    if last != b"\n":
        starts.append(np.array([size]))
    return np.concatenate(starts)


def copy_values(values: Iterable[Any], file: BinaryIO, folder: Path) -> np.ndarray:
    """Append each value as JSON to `file`, which has no buffer; returns what `line_starts` does.

    `folder` is named when it is full.
    """
    starts, block = array("q", [file.tell()]), bytearray()
    for value in values:
        line = value if isinstance(value, bytes) else json.dumps(value, default=str).encode()
        starts.append(starts[-1] + len(line))
        block += line
        if len(block) >= BLOCK:
            _write(block, file, folder)
            block.clear()
    _write(block, file, folder)
    return np.frombuffer(starts, np.int64)


def _write(block: bytearray, file: BinaryIO, folder: Path) -> None:
    with memoryview(block) as view:
        written = 0
        try:
            while written < len(view):
                written += file.write(view[written:])
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder)) from error
