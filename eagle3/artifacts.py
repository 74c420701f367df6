"""The artifact contract between stages: places, atomic writes, manifest, index and the lock of a directory.

    OUT/prepared/       manifest.json  index.jsonl  token_freq.pt  token_freq_by_source.pt  samples/00000/...
                        skipped.jsonl, and where the target wrote them prompts.jsonl  answers.jsonl
    OUT/hidden_states/  manifest.json  index.jsonl                                          samples/00000/...
    OUT/vocab_map/      manifest.json  vocab_map.pt  coverage.png
    OUT/draft/          manifest.json  checkpoints/  export/  metrics.jsonl  tensorboard/

Shard 0 of 4 of stage 02 has manifest.shard-0-of-4.json and index.shard-0-of-4.jsonl until the shards are merged.
A file that exists under its final name is whole: it was written under a temporary name in the same folder, synced
and renamed. Everything loads with `weights_only=True`.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from eagle3.states import FP8
from eagle3.terminal import UserError, short

SCHEMA_VERSION = 1
SAMPLES_PER_FOLDER = 1000  # directories stay listable at a million samples
CONTENT = {"01": "prepared samples", "02": "hidden states", "03": "vocabulary map", "04": "draft"}
# name -> dtypes, dimensions
PREPARED = {"input_ids": ((torch.int32,), 1), "loss_mask": ((torch.bool,), 1)}
STATES = PREPARED | dict.fromkeys(("aux_hidden", "final_hidden"), ((torch.bfloat16, torch.float32, FP8), 2))
SCALES = {"aux_hidden": ("aux_scale", ((torch.float32,), 2)), "final_hidden": ("final_scale", ((torch.float32,), 1))}
VOCAB_MAP = {"d2t": ((torch.int64,), 1), "t2d": ((torch.bool,), 1)}


@dataclass(frozen=True)
class Shard:
    """Every `count`-th sample of a stage's work on a directory, with manifest, index, lock and log of its own."""

    index: int
    count: int

    def named(self, name: str) -> str:
        """The shard's own form of a file name: index.jsonl -> index.shard-0-of-4.jsonl; of the whole, the name."""
        if self.count == 1:
            return name
        stem, dot, suffix = name.rpartition(".")
        return f"{stem}.shard-{self.index}-of-{self.count}{dot}{suffix}"

    def holds(self, sample: int) -> bool:
        return sample % self.count == self.index


WHOLE = Shard(0, 1)


class Fields(dict):
    """A JSON object of an artifact; a field that it lacks is a UserError naming the file, not a KeyError."""

    def __init__(self, values: dict[str, Any], where: str, remedy: str) -> None:
        super().__init__(values)
        self._where, self._remedy = where, remedy

    def __missing__(self, field: str) -> Any:
        raise UserError(f"{self._where} lacks the field {field}; {self._remedy}")


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
    except BaseException as error:
        with contextlib.suppress(OSError):  # whose own error must not hide the first
            temporary.unlink()
        if isinstance(error, OSError) and not error.filename:
            error.filename = str(path)  # write and fsync do not say where
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise a UserError, or the OSError behind it, for what torch and safetensors make of a write that fails."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        cause = error.__context__
        if isinstance(cause, OSError) and cause.errno:
            cause.filename = cause.filename or str(path)
            raise cause from None
        if not re.search(r"unexpected pos|iostream error|file write failed|os error", str(error)):
            raise
        free = shutil.disk_usage(next(folder for folder in path.parents if folder.exists())).free
        raise UserError(
            f"cannot write {path}: the disk is full or fails ({free / 1e6:.1f} MB free, {short(error)}); "
            "free space, then run the same command"
        ) from error


def save_tensors(path: Path, tensors: dict[str, torch.Tensor] | torch.Tensor) -> int:
    """Write a `.pt` atomically; returns its size in bytes."""
    with writing(path), atomic_file(path) as file:
        torch.save(tensors, file)
    return path.stat().st_size


def load_tensors(path: Path) -> Any:
    """Load a stage's `.pt` (tensors only, memory mapped). Raises UserError naming the file when it is damaged."""
    try:
        with open(path, "rb") as file:
            start = file.read(4)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; rerun the stage that writes it") from error
    except (PermissionError, IsADirectoryError):
        raise
    except Exception as error:
        if not start:
            cause = "it is empty"
        elif start != b"PK\3\4":
            cause = "it is no .pt file of this program"
        elif isinstance(error, pickle.UnpicklingError):
            cause = "it holds Python objects, which are never loaded"
        else:
            cause = "it was cut short or overwritten"
        raise UserError(f"{path} is damaged: {cause}; delete it and rerun the stage that wrote it") from error


def load_fields(path: Path, layout: dict[str, tuple[tuple[torch.dtype, ...], int]], stage: str) -> dict[str, Any]:
    """Load a `.pt` of named tensors and check their dtypes and dimensions. Raises UserError naming what differs."""
    tensors = load_tensors(path)
    _require_fields(path, tensors, layout, stage)
    return tensors


def _require_fields(
    path: Path, tensors: Any, layout: dict[str, tuple[tuple[torch.dtype, ...], int]], stage: str
) -> None:
    for name, (dtypes, dimensions) in layout.items():
        tensor = tensors.get(name) if isinstance(tensors, dict) else None
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in dtypes or tensor.dim() != dimensions:
            found = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else "not there"
            wanted = f"{' or '.join(map(str, dtypes))} of {dimensions} dimension{'s' if dimensions > 1 else ''}"
            raise UserError(
                f"{path} is damaged: {name} is {found}, expected {wanted}; delete it and rerun stage {stage}"
            )


def ids_digest(input_ids: torch.Tensor) -> str:
    """Of int32 ids [T]: states are matched with a sample by its tokens, never by their place or number alone."""
    return hashlib.blake2b(input_ids.numpy().tobytes(), digest_size=16).hexdigest()


def load_sample(directory: Path, stage: str, record: dict[str, Any], vocab_size: int) -> dict[str, torch.Tensor]:
    """Load one sample of stage 01 or 02 and check it against its index record: lengths, supervised count, range of ids,
    and for stage 02 that the states are of these ids.

    Raises UserError naming the file and both values.
    """
    path = sample_path(directory, record["index"])
    sample = load_fields(path, PREPARED if stage == "01" else STATES, stage)
    ids, mask = sample["input_ids"], sample["loss_mask"]
    found = {"ids": len(ids), "mask entries": len(mask), "supervised tokens": int(mask.sum())}
    wanted = {"ids": record["tokens"], "mask entries": record["tokens"], "supervised tokens": record["supervised"]}
    if stage == "02":
        found |= {"aux states": len(sample["aux_hidden"]), "final states": len(sample["final_hidden"])}
        wanted |= {"aux states": record["tokens"], "final states": record["supervised"]}
        scales = dict(SCALES[name] for name in SCALES if sample[name].dtype == FP8)
        _require_fields(path, sample, scales, stage)
        found |= {name: len(sample[name]) for name in scales}
        wanted |= {name: record["tokens" if name == "aux_scale" else "supervised"] for name in scales}
    for name, count in wanted.items():
        if found[name] != count:
            raise UserError(
                f"{path} is damaged: {found[name]} {name}, the index says {count}; delete it and rerun stage {stage}"
            )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise UserError(
            f"{path} is damaged: ids from {int(ids.min())} to {int(ids.max())}, the target has {vocab_size}; "
            f"delete it and rerun stage {stage}"
        )
    if stage == "02" and ids_digest(ids) != record["ids"]:
        raise UserError(f"{path} is damaged: its ids are not those of the index; delete it and rerun stage 02")
    return sample


def load_counts(directory: Path, vocab_size: int, supervised: int) -> torch.Tensor:
    """token_freq.pt of stage 01, int64 [V], off the file. Raises UserError unless it counts `supervised` tokens."""
    path = directory / "token_freq.pt"
    counts = load_tensors(path)
    if not isinstance(counts, torch.Tensor) or counts.shape != (vocab_size,) or counts.dtype != torch.int64:
        found = f"{counts.dtype} {tuple(counts.shape)}" if isinstance(counts, torch.Tensor) else type(counts).__name__
        raise UserError(f"{path} is {found}, expected torch.int64 {(vocab_size,)}; delete it and rerun stage 01")
    if int(counts.min()) < 0 or int(counts.sum()) != supervised:
        raise UserError(
            f"{path} is damaged: it counts {int(counts.sum())} tokens, the manifest says {supervised}; "
            "delete it and rerun stage 01"
        )
    return counts.clone()


def is_whole(directory: Path, record: dict[str, Any]) -> bool:
    """Whether a sample's file exists in the size that its index record says."""
    try:
        return sample_path(directory, record["index"]).stat().st_size == record["bytes"]
    except FileNotFoundError:
        return False


def require_whole(directory: Path, stage: str, records: list[dict[str, Any]]) -> None:
    """Look at every sample's file before hours of work begin. Raises UserError with their number and the first."""
    damaged = [record for record in records if not is_whole(directory, record)]
    if damaged:
        path = sample_path(directory, damaged[0]["index"])
        size = f"{path.stat().st_size:,} bytes, the index says {damaged[0]['bytes']:,}" if path.exists() else "missing"
        raise UserError(
            f"{len(damaged)} of {len(records)} samples of {directory} are missing or damaged, first {path}: {size}; "
            f"run the command of stage {stage} again, it redoes them"
        )


def save_json(path: Path, value: Any) -> None:
    """Write JSON atomically, indented, keys in the given order."""
    with atomic_file(path, "w") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def sample_path(directory: Path, index: int) -> Path:
    """Place of one sample: samples/<index // 1000>/<index>.pt, zero-padded."""
    return directory.joinpath("samples", f"{index // SAMPLES_PER_FOLDER:05d}", f"{index:08d}.pt")


# --------------------------------------------------------------------------------------------- manifest


def write_manifest(
    directory: Path, stage: str, fingerprint: dict[str, Any], *, shard: Shard = WHOLE, **facts: Any
) -> None:
    """Write manifest.json. `fingerprint` is what made the artifacts: a rerun or a later stage compares it."""
    save_json(
        directory / shard.named("manifest.json"),
        {"schema_version": SCHEMA_VERSION, "stage": stage, "fingerprint": fingerprint, **facts, "code": code_version()},
    )


def read_manifest(directory: Path, stage: str, *, shard: Shard = WHOLE, missing_ok: bool = False) -> Fields | None:
    """Read and check manifest.json of `stage`.

    Returns None when it is absent and `missing_ok`. Raises UserError when absent, unreadable, of another stage or
    of another schema; so does taking a field that it lacks.
    """
    path = directory / shard.named("manifest.json")
    remedy = f"delete {directory} and rerun stage {stage}"
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        if missing_ok:
            return None
        raise UserError(f"{_described(directory)}; expected the output of stage {stage} ({CONTENT[stage]})") from None
    except NotADirectoryError:
        raise UserError(f"{directory} is not a directory; give one for the {CONTENT[stage]} of stage {stage}") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); {remedy}") from error
    if not isinstance(manifest, dict):
        raise UserError(f"{path} is damaged (a {type(manifest).__name__}); {remedy}")
    manifest = Fields(manifest, str(path), remedy)
    version = manifest["schema_version"]
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}; "
            f"use the program that wrote it or another directory"
        )
    if (found := manifest["stage"]) != stage:
        raise UserError(
            f"{directory} holds artifacts of stage {found} ({CONTENT.get(found, 'unknown')}), "
            f"expected stage {stage} ({CONTENT[stage]}); give another directory"
        )
    if not isinstance(manifest["fingerprint"], dict):
        raise UserError(f"{path} is damaged (fingerprint {manifest['fingerprint']!r}); {remedy}")
    manifest["fingerprint"] = Fields(manifest["fingerprint"], f"{path}: fingerprint", remedy)
    return manifest


def _described(directory: Path) -> str:
    """What a directory without a manifest is."""
    if not directory.exists():
        return f"{directory}: no such directory"
    if (directory / "config.json").exists():
        return f"{directory} is a model directory"
    return f"{directory} has no manifest.json" + ("" if any(directory.iterdir()) else ", it is empty")


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


def parse_record(line: bytes, where: str, remedy: str) -> Fields:
    """The object of a JSON line. Raises UserError for anything else."""
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError(f"a {type(record).__name__}, expected an object")
    except ValueError as error:
        raise UserError(f"{where} is damaged ({error}); {remedy}") from error
    return Fields(record, where, remedy)


def _is_record(line: bytes) -> bool:
    try:
        return {"index", "status"} <= json.loads(line).keys()
    except (ValueError, AttributeError):
        return False


class Index:
    """index.jsonl of a stage: append only, one line a record; a later record of the same sample replaces the earlier.

    A line torn by a kill is cut off when the index is opened for writing, and ignored when only read.
    """

    def __init__(self, directory: Path, shard: Shard = WHOLE) -> None:
        self.path = directory / shard.named("index.jsonl")

    def read(self) -> list[dict[str, Any]]:
        """All whole records in file order. Raises UserError naming the line if one in the middle is damaged."""
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        records = []
        for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is torn, or empty
            where, remedy = f"{self.path} line {number}", "delete that line and rerun the stage that wrote it"
            records.append(parse_record(line, where, remedy))
        return records

    def mend(self) -> int:
        """Drop the lines that are no records and return their number. For the stage that can make what they told of."""
        if not self.path.exists():
            return 0
        *lines, torn = self.path.read_bytes().split(b"\n")
        whole = list(filter(_is_record, lines))
        if len(whole) < len(lines):
            with atomic_file(self.path) as file:
                file.write(b"\n".join([*whole, torn]))
        return len(lines) - len(whole)

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
        self.add_all([record])

    def add_all(self, records: list[dict[str, Any]]) -> None:
        """Put several records on disk in one write."""
        self._file.write(b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records))
        self._file.flush()


# ------------------------------------------------------------------------------------------------- lock


@contextlib.contextmanager
def directory_lock(directory: Path, shard: Shard = WHOLE) -> Iterator[None]:
    """Hold the lock of an output directory, or of a shard in it; a second process is refused with its host and pid.

    On one host the kernel's flock decides, so a killed process leaves nothing stale. A lock written by another host
    (shared file system) is trusted as it stands: only a person can know that it is stale.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        taken = next(path for path in (directory, *directory.parents) if path.exists())
        raise UserError(f"{directory} cannot be made, {taken} is a file; give another --output-dir") from None
    path = directory / shard.named(".lock")
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
        remove_temporaries(directory, shard)
        try:
            yield
        finally:
            file.truncate(0)


def remove_temporaries(directory: Path, shard: Shard = WHOLE) -> None:
    """Delete temporary files that a writer left behind. Only for the lock's holder, who alone writes here."""
    if shard == WHOLE:
        patterns = (".*.tmp", "samples/.*.tmp", "samples/*/.*.tmp", "checkpoints/.*.tmp")
    else:
        patterns = (*(f".{shard.named(name)}.*.tmp" for name in ("manifest.json", "index.jsonl")), "samples/*/.*.tmp")
    for pattern in patterns:
        for path in directory.glob(pattern):
            number = path.name.split(".")[1]  # other shards may be writing theirs
            if path.is_file() and (shard == WHOLE or not number.isdigit() or shard.holds(int(number))):
                path.unlink()
