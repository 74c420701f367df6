"""The artifact contract between stages: places, atomic writes, manifest, index and the lock of a directory.

    OUT/prepared/       manifest.json  index.jsonl  token_freq.pt  samples/00000/00000000.pt ...
    OUT/hidden_states/  manifest.json  index.jsonl                 samples/00000/00000000.pt ...
    OUT/vocab_map/      manifest.json  vocab_map.pt
    OUT/draft/          manifest.json  checkpoints/  export/  metrics.jsonl  tensorboard/

A file that exists under its final name is whole: it was written under a temporary name in the same folder, synced
and renamed. Everything loads with `weights_only=True`.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from eagle3.terminal import UserError, short

SCHEMA_VERSION = 1
SAMPLES_PER_FOLDER = 1000  # directories stay listable at a million samples


# ------------------------------------------------------------------------------------------------ files


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "wb") -> Iterator[Any]:
    """Open a temporary file beside `path`; on success it is synced and takes that name, on failure it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_tensors(path: Path, tensors: dict[str, torch.Tensor] | torch.Tensor) -> int:
    """Write a `.pt` atomically; returns its size in bytes."""
    try:
        with atomic_file(path) as file:
            torch.save(tensors, file)
    except RuntimeError as error:
        # torch's zip writer hides the errno of a full disk behind a RuntimeError
        raise UserError(f"cannot write {path}: {short(error)}; is the disk full? free space and rerun") from error
    return path.stat().st_size


def load_tensors(path: Path) -> Any:
    """Load a stage's `.pt` (tensors only, memory mapped). Raises UserError naming the file when it is damaged."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; run the stage that writes it") from error
    except Exception as error:
        raise UserError(f"{path} is damaged ({short(error)}); rerun the stage that wrote it") from error


def save_json(path: Path, value: Any) -> None:
    """Write JSON atomically, indented, keys in the given order."""
    with atomic_file(path, "w") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def sample_path(directory: Path, index: int) -> Path:
    """Place of one sample: samples/<index // 1000>/<index>.pt, zero-padded."""
    return directory / "samples" / f"{index // SAMPLES_PER_FOLDER:05d}" / f"{index:08d}.pt"


# --------------------------------------------------------------------------------------------- manifest


def write_manifest(directory: Path, stage: str, fingerprint: dict[str, Any], **facts: Any) -> None:
    """Write manifest.json. `fingerprint` is what made the artifacts: a rerun or a later stage compares it."""
    save_json(
        directory / "manifest.json",
        {"schema_version": SCHEMA_VERSION, "stage": stage, "fingerprint": fingerprint, **facts, "code": code_version()},
    )


def read_manifest(directory: Path, stage: str, *, missing_ok: bool = False) -> dict[str, Any] | None:
    """Read and check manifest.json of `stage`.

    Returns None when it is absent and `missing_ok`. Raises UserError when absent, unreadable, of another stage or
    of a newer schema.
    """
    path = directory / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        if missing_ok:
            return None
        raise UserError(f"{path} is missing; run stage {stage} with this directory first") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}); delete {directory} and rerun stage {stage}") from error
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}; "
            f"use the program that wrote it or another directory"
        )
    if manifest["stage"] != stage:
        raise UserError(f"{directory} holds artifacts of stage {manifest['stage']}, expected stage {stage}")
    return manifest


def require_same(where: Path, have: dict[str, Any], want: dict[str, Any], remedy: str) -> None:
    """Refuse artifacts made from something else: names the first differing field and both values."""
    for field, value in want.items():
        if have.get(field) != value:
            raise UserError(f"{where}: {field} is {have.get(field)!r}, this run has {value!r}; {remedy}")


def digest(value: Any) -> str:
    """Short digest of a JSON value, for fingerprints."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def code_version() -> str:
    """Git hash of this program (with -dirty), or 'unknown' outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


# ------------------------------------------------------------------------------------------------ index


class Index:
    """index.jsonl of a stage: append only, one line a record; a later record of the same sample replaces the earlier.

    A line torn by a kill is cut off when the index is opened for writing, and ignored when only read.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "index.jsonl"

    def read(self) -> list[dict[str, Any]]:
        """All whole records in file order. Raises UserError naming the line if one in the middle is damaged."""
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        records = []
        for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is torn, or empty
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise UserError(
                    f"{self.path} line {number} is damaged ({error}); delete that line and rerun"
                ) from error
        return records

    def samples(self) -> dict[int, dict[str, Any]]:
        """The latest record of each sample, by index, ascending."""
        latest = {record["index"]: record for record in self.read() if "index" in record}
        return dict(sorted(latest.items()))

    @contextlib.contextmanager
    def appending(self) -> Iterator["IndexWriter"]:
        """Open for appending; yields a writer whose `add` puts one record on disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+") as file:
            file.seek(0)
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
            yield IndexWriter(file)
            os.fsync(file.fileno())


class IndexWriter:
    def __init__(self, file: Any) -> None:
        self._file = file

    def add(self, **record: Any) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()


# ------------------------------------------------------------------------------------------------- lock


@contextlib.contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Hold the one lock of an output directory; a second process is refused with the holder's host and pid.

    On one host the kernel's flock decides, so a killed process leaves nothing stale. A lock written by another host
    (shared file system) is trusted as it stands: only a person can know that it is stale.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ".lock"
    me = f"{socket.gethostname()} pid {os.getpid()}"
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{directory} is in use by {file.read().strip() or 'another process'}; wait for it"
            ) from None
        file.seek(0)
        holder = file.read().strip()
        if holder and holder.split(" pid ")[0] != socket.gethostname():
            raise UserError(f"{directory} is locked by {holder}; if that run is over, delete {path}")
        file.truncate(0)
        file.write(me)
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def remove_stale_temporaries(directory: Path) -> None:
    """Delete temporary files that a killed writer left; call it while holding the directory's lock."""
    for path in directory.glob("samples/*/.*.tmp"):
        path.unlink(missing_ok=True)
