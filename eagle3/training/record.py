"""The written record of a run: metrics.jsonl and TensorBoard events."""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class Record:
    """Appends to both. After a resume, steps beyond the checkpoint are written again: the later line counts."""

    def __init__(self, directory: Path, step: int) -> None:
        """`step`: optimizer steps already done; TensorBoard drops what it had beyond."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        if path.exists() and not (text := path.read_bytes()).endswith(b"\n"):
            os.truncate(path, text.rfind(b"\n") + 1)  # a line torn by a kill
        self._file = path.open("a")
        self._board = SummaryWriter(directory / "tensorboard", purge_step=step)

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        self._board.close()

    def add(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """One line of `kind` ("train" or "held_out"); a value is a number, a list or a dict of numbers."""
        self._write(kind, step, values)
        for key, value in values.items():
            named = dict(enumerate(value)) if isinstance(value, list) else value
            numbers = {f"{key}/{name}": v for name, v in named.items()} if isinstance(named, dict) else {key: named}
            for name, number in numbers.items():
                self._board.add_scalar(f"{kind}/{name}", number, step)
        self._board.flush()

    def skipped(self, step: int, values: dict[str, Any]) -> None:
        """One line about a step that was left out, "skipped" of `values` being the count of them so far."""
        self._write("skipped", step, values)
        self._board.add_scalar("train/skipped", values["skipped"], step)

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind, "step": step} | values) + "\n")
        self._file.flush()
