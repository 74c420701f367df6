"""OUT/run.json: what was run with which flags, how far it came, who is at work. Standard library alone."""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3 import engine_guard
from eagle3.terminal import UserError

NAME, LOCK = "run.json", ".run.lock"
SCHEMA_VERSION = 1


class InUse(UserError):
    """Another run is at work in the output directory: exit code 2."""


def read(output: Path) -> dict[str, Any]:
    """The state, {} where there is none. Raises UserError when it is damaged."""
    path = output / NAME
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete it: each stage then looks at what is there") from None
    if not isinstance(found, dict) or found.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"{path} is not as this program writes it; delete it, or use the program that wrote it")
    return found


def write(output: Path, content: dict[str, Any]) -> None:
    """Replace the file at once."""
    output.mkdir(parents=True, exist_ok=True)
    temporary = output / f".{NAME}.{os.getpid()}.tmp"
    with open(temporary, "w") as file:
        json.dump({"schema_version": SCHEMA_VERSION} | content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, output / NAME)


def process(pid: int) -> dict[str, Any]:
    """What tells a process from a later one with its number, and from one on another host."""
    seen = engine_guard.look(pid)
    return {"pid": pid, "start": seen[1] if seen else 0, "host": socket.gethostname()}


def alive(found: dict[str, Any] | None) -> bool:
    """Whether a recorded process still runs; one on another host is taken to."""
    if not found:
        return False
    if found["host"] != socket.gethostname():
        return True
    return bool(engine_guard.alive({found["pid"]: found["start"]}))


@contextlib.contextmanager
def at_work(output: Path) -> Iterator[None]:
    """Hold the output directory for one run; a second one is refused with the pid of the first."""
    output.mkdir(parents=True, exist_ok=True)
    with open(output / LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(output, read(output).get("runner")) from None
        yield


def in_use(output: Path, runner: dict[str, Any] | None) -> InUse:
    who = f"pid {runner['pid']} on {runner['host']}" if runner else "another process"
    return InUse(f"{output} is in use by a run ({who}); --status tells how far it is, --stop ends it")
