"""Rows to messages: ShareGPT and chat rows of local files or a hub dataset, read one by one.

Local files go through no schema inference, so columns whose types differ between rows or files cannot break loading.
A row that cannot be used is never mended silently: it is skipped with a reason that can be counted.
"""

import contextlib
import gc
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3 import terminal
from eagle3.terminal import UserError, short

SUFFIXES = (".json", ".jsonl", ".parquet")
# Builders of the datasets library that hold conversations and unpickle nothing; its pandas builder unpickles
HUB_FORMATS = ("json", "parquet", "arrow")
ROLES = {  # the names that ShareGPT and chat rows use for the roles of chat templates
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class SkipRow(Exception):
    """A row that is not used. Its text is the reason: short, and equal for equal faults."""


@dataclass(frozen=True)
class Row:
    """One row of a source: `number` counts from 1 (in JSON lines it is the line), `value` is not parsed yet."""

    source: str  # file name, or the dataset's name on the hub
    number: int
    value: Any  # bytes of a JSON line, or the object itself

    @property
    def place(self) -> str:
        return f"{self.source}:{self.number}"


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template: role, content (a string), and reasoning_content, tool_calls where there are any."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    origin: str | None = None  # the dataset that a blend names in its "source" column

    @property
    def trailing(self) -> int:
        """Number of messages after the last assistant turn."""
        return next(n for n, message in enumerate(reversed(self.messages)) if message["role"] == "assistant")

    @property
    def digest(self) -> str:
        """Equal for conversations with equal text, so that duplicates can be kept together."""
        text = json.dumps([self.messages, self.tools], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------- sources


class LocalFiles:
    """A .json, .jsonl or .parquet file, or all such files of one directory in the order of their names."""

    split = None

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.files = [self.path]
        if self.path.is_dir():
            self.files = sorted(file for file in self.path.iterdir() if file.suffix in SUFFIXES and file.is_file())
        elif self.path.suffix not in SUFFIXES:
            raise UserError(f"--dataset {path}: expected a file that ends in {', '.join(SUFFIXES)}, or a directory")
        if not self.files:
            raise UserError(f"--dataset {path}: no {', '.join(SUFFIXES)} files directly in this directory")

    def identity(self) -> str:
        """The absolute path and a digest of names, sizes and content."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            digest.update(_content_digest(file))
        return f"{self.path} (sha256 {digest.hexdigest()[:16]})"

    def total(self) -> int | None:
        """Number of rows where it costs little to know, for the progress bar."""
        counts = [_count_rows(file) for file in self.files]
        return None if None in counts else sum(counts)

    def rows(self) -> Iterator[Row]:
        for file in self.files:
            for number, value in enumerate(_READERS[file.suffix](file), 1):
                yield Row(file.name, number, value)


def _content_digest(file: Path) -> bytes:
    """Digest of all bytes of a file up to 16 MiB, of 256 evenly spaced blocks of a larger one."""
    block, digest, size = 1 << 16, hashlib.sha256(), file.stat().st_size
    with open(file, "rb") as handle:
        for offset in range(0, size, max(block, size // 256)):
            handle.seek(offset)
            digest.update(handle.read(block))
    return digest.digest()


def _read_lines(file: Path) -> Iterator[bytes]:
    with open(file, "rb") as handle:
        yield from handle


def _read_json(file: Path) -> Iterator[Any]:
    """A JSON array, otherwise JSON lines."""
    if not _is_array(file):
        yield from _read_lines(file)
        return
    try:
        yield from json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON ({error}); mend it, or write one row a line") from error


def _is_array(file: Path) -> bool:
    with open(file, "rb") as handle:
        return handle.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _read_parquet(file: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=256):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{file} is not a readable parquet file ({short(error)}); fetch it again") from error


_READERS = {".jsonl": _read_lines, ".json": _read_json, ".parquet": _read_parquet}


def _count_rows(file: Path) -> int | None:
    if file.suffix == ".parquet":
        from pyarrow import ArrowException, parquet

        try:
            return parquet.read_metadata(file).num_rows
        except ArrowException:
            return None  # the reader names the file when it comes to it
    if file.suffix == ".json" and _is_array(file):
        return None
    newlines, last = 0, b"\n"
    with open(file, "rb") as handle:
        while block := handle.read(1 << 22):
            newlines, last = newlines + block.count(b"\n"), block[-1:]
    return newlines + (last != b"\n")


class HubDataset:
    """A dataset of the Hugging Face hub, streamed: only what is read is downloaded."""

    def __init__(self, name: str, split: str) -> None:
        import datasets

        self.name, self.split = name, split
        terminal.say(f"opening {name} on the hub")
        try:
            builder = datasets.load_dataset_builder(name)
            kind = type(builder).__module__.rpartition(".")[2]
            self._rows = builder.as_streaming_dataset(split=split) if kind in HUB_FORMATS else None
        except Exception as error:
            raise UserError(
                f"--dataset {name}: no such file, and the hub did not give split {split!r} ({short(error)}); "
                "give a local .jsonl, .json or .parquet file or a directory of them, check the name, "
                "or set HF_ENDPOINT, HF_TOKEN or HF_HOME"
            ) from error
        if self._rows is None:
            raise UserError(
                f"--dataset {name} is of the format {kind}, which is not read; "
                f"give a dataset of {', '.join(HUB_FORMATS)} files, or a local .jsonl, .json or .parquet file"
            )

    def identity(self) -> str:
        return self.name

    def total(self) -> int | None:
        splits = getattr(getattr(self._rows, "info", None), "splits", None) or {}
        return splits[self.split].num_examples if self.split in splits else None

    def rows(self) -> Iterator[Row]:
        iterator, number = iter(self._rows), 0
        try:
            for value in iterator:
                number += 1
                yield Row(self.name, number, value)
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


def open_dataset(dataset: str, split: str) -> LocalFiles | HubDataset:
    """Open a local file or directory, otherwise a hub dataset. Raises UserError when there is neither."""
    path = Path(dataset).expanduser()
    if path.exists():
        return LocalFiles(path)
    if dataset.startswith((".", "/", "~")) or dataset.count("/") > 1 or path.suffix in SUFFIXES:
        raise UserError(f"--dataset {dataset}: no such file or directory")
    return HubDataset(dataset, split)


# ------------------------------------------------------------------------------------------- row to chat


def parse_row(row: Row) -> Conversation:
    """The conversation of one row. Raises SkipRow with the reason when it cannot be used as it stands."""
    value = row.value
    if isinstance(value, bytes):
        if not value.strip():
            raise SkipRow("blank line")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise SkipRow("invalid JSON") from None
    if not isinstance(value, dict):
        raise SkipRow("row is not an object")
    field = next((name for name in ("messages", "conversations") if value.get(name) is not None), None)
    if field is None:
        columns = ", ".join(_valid_text(str(name))[:30] for name in sorted(value, key=str)[:6])
        raise SkipRow(f"no messages or conversations (columns: {columns})" if value else "no messages or conversations")
    if not isinstance(value[field], list):
        raise SkipRow(f"{field} is not a list")
    messages = [_message(message) for message in value[field]]
    if not messages:
        raise SkipRow(f"{field} is empty")
    if messages[0]["role"] == "assistant":
        raise SkipRow("conversation starts with the assistant")
    if not any(message["role"] == "assistant" for message in messages):
        raise SkipRow("no assistant turn")
    origin = value.get("source")
    return Conversation(messages, _tools(value.get("tools")), origin if isinstance(origin, str) and origin else None)


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise SkipRow("message is not an object")
    name_key, text_key = ("from", "value") if "from" in message else ("role", "content")
    if name_key not in message:
        keys = ", ".join(_valid_text(str(key))[:30] for key in sorted(message, key=str)[:6])
        raise SkipRow(f"message without role (keys: {keys})")
    name = message.get(name_key)
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise SkipRow(f"unknown role {_valid_text(repr(name)[:60])}")
    calls = _tool_calls(message.get("tool_calls"))
    content = message.get(text_key)
    result = {"role": role, "content": "" if content is None and calls else _content(content, role)}
    if role == "assistant":
        if not result["content"].strip() and not calls:
            raise SkipRow("assistant content is empty")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning is not None and not isinstance(reasoning, str):
            raise SkipRow(f"assistant reasoning of type {type(reasoning).__name__}")
        if reasoning and reasoning.strip():
            result["reasoning_content"] = _valid_text(reasoning)
        if calls:
            result["tool_calls"] = calls
    if role == "tool":
        result |= {key: message[key] for key in ("tool_call_id", "name") if isinstance(message.get(key), str)}
    return result


def _content(content: Any, role: str) -> str:
    if content is None:
        raise SkipRow(f"{role} content is null")
    if isinstance(content, str):
        return _valid_text(content)
    if not isinstance(content, list):
        raise SkipRow(f"{role} content of type {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise SkipRow(f"{role} content part of type {str(kind)[:40]}")
        texts.append(_valid_text(part["text"]))
    return "".join(texts)


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as an object, which chat templates expect and servers pass."""
    if not calls:
        return []
    try:
        result = []
        for call in _parsed(calls):
            function = dict(call["function"])
            function["arguments"] = _parsed(function.get("arguments") or {})
            if not isinstance(function["name"], str):
                raise TypeError
            result.append({**call, "function": function})
        return _valid_values(result)
    except (TypeError, KeyError, ValueError):
        raise SkipRow("malformed tool_calls") from None


def _tools(tools: Any) -> list[Any] | None:
    try:
        tools = _parsed(tools)
    except ValueError:
        tools = ""
    if tools is not None and not isinstance(tools, list):
        raise SkipRow("tools is not a list")
    return _valid_values(tools) or None


def _parsed(value: Any) -> Any:
    """Columns of one type carry nested values as JSON text."""
    return json.loads(value) if isinstance(value, str) else value


def _valid_text(text: str) -> str:
    """Text without lone surrogates, which no tokenizer takes: U+FFFD stands for them."""
    return LONE_SURROGATE.sub("\ufffd", text)


def _valid_values(value: Any) -> Any:
    if isinstance(value, str):
        return _valid_text(value)
    if isinstance(value, list):
        return [_valid_values(item) for item in value]
    if isinstance(value, dict):
        return {_valid_values(key): _valid_values(item) for key, item in value.items()}
    return value
