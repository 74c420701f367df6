"""Stage 01 in this process, and data for it."""

import json
from pathlib import Path
from typing import Any

from eagle3 import artifacts
from eagle3.prepare.progress import Totals
from eagle3.prepare.stage import Options, prepare
from eagle3.sources import open_datasets
from eagle3.target import Target, load_tokenizer, open_target


def prepare_here(
    target: Target | Path,
    dataset: str | Path | list[str],
    directory: Path,
    *,
    tokenizer: Any = None,
    shuffle: int | None = None,
    **options: Any,
) -> Totals | None:
    """Prepare one dataset, or a mixture of several; returns the totals (None when there was nothing to do)."""
    target = target if isinstance(target, Target) else open_target(str(target))
    tokenizer = tokenizer or load_tokenizer(target, trust_remote_code=False)
    datasets = open_datasets(dataset if isinstance(dataset, list) else [str(dataset)], shuffle=shuffle)
    with artifacts.directory_lock(directory):
        return prepare(target, tokenizer, datasets, directory, Options(**{"max_seq_len": 512} | options))


def content(directory: Path) -> dict[str, bytes]:
    """Bytes of all tensors by relative path."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*.pt"))}


def manifest(directory: Path) -> dict:
    return artifacts.read_manifest(directory, "01")


def write_chats(path: Path, count: int) -> Path:
    turns = [(f"Say {n}", f"It is {n} {'x' * n}") for n in range(count)]
    rows = [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in turns]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_folder(path: Path, counts: list[int]) -> Path:
    """A folder of files with so many rows each; every answer differs from those of the other files."""
    path.mkdir()
    for number, count in enumerate(counts):
        file = write_chats(path / f"{chr(ord('a') + number)}.jsonl", count)
        file.write_text(file.read_text().replace("It is", "That is " + "very " * number))
    return path
