"""The files of a target's directory: JSON that may be damaged, weights that may not be whole, the tokenizer's files.

Checked before an engine spends minutes on a directory that it cannot load, from sizes and headers alone.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from eagle3.terminal import UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "*.py",
)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, None when there is no such file. Raises UserError when it is not one."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:  # of JSON or of the encoding
        raise UserError(f"{path} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, expected an object; fetch it again")
    return value


def tokenizer_hash(directory: Path) -> str:
    """Digest of all files that decide how text becomes ids: vocabulary, added tokens, chat template, remote code.

    From the files alone, so that a stage without a tokenizer, or without leave to run its code, compares it too.
    """
    digest = hashlib.sha256()
    for path in sorted(path for name in TOKENIZER_FILES for path in directory.glob(name)):
        digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------------------------------------- weights


def weight_files(directory: Path) -> dict[str, Path]:
    """File of every tensor as the index says it, or of the one file. Raises UserError without usable safetensors."""
    index = read_json(directory / INDEX)
    if index is not None:
        named = index.get("weight_map")
        if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
            raise UserError(f"{directory / INDEX} has no weight_map from tensors to files; fetch it again")
        files = {file: directory / file for file in set(named.values())}
        return {name: files[file] for name, file in named.items()}
    single = directory / SINGLE
    if single.is_file():
        header = read_header(single)
        if isinstance(header, str):
            raise UserError(f"{single}: {header}; fetch it again")
        return dict.fromkeys(header, single)
    if pickles := sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern)):
        raise UserError(
            f"{directory} has its weights as pickles only ({pickles[0]}), which are never loaded because they can run "
            "any code; convert them to safetensors, or fetch a version of the model that has them"
        )
    raise UserError(f"{directory} has no weights: neither {INDEX} nor {SINGLE}; fetch them")


def read_header(path: Path) -> dict[str, dict[str, Any]] | str:
    """The header of a safetensors file (tensor -> dtype, shape, data_offsets), or what is wrong with the file."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            if start == b"version ":
                return "a git-lfs pointer in the place of the file (git lfs pull)"
            length = int.from_bytes(start, "little")
            if size < 8 or length > size - 8:
                return "empty" if size == 0 else f"no safetensors file, or cut short at {size:,} bytes"
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        wanted = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size != wanted:
            return f"{size:,} bytes, its header says {wanted:,}"
        return header
    except FileNotFoundError:
        return "missing"
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        return "no safetensors file"
    except OSError as error:
        return os.strerror(error.errno or 0)


def require_loadable(directory: Path, vocab_size: int) -> None:
    """Check what an engine needs: architectures in config.json, all weight files whole and as the index says, and an
    embedding of `vocab_size` rows. Reads only headers: well under a second for 64 files of 200,000 tensors.

    Raises UserError naming how many files are not whole and the first of them with its fault.
    """
    if not (read_json(directory / "config.json") or {}).get("architectures"):
        raise UserError(f"{directory}/config.json names no architectures, so no engine can load it; fetch it again")
    names: dict[Path, list[str]] = {}
    for name, path in weight_files(directory).items():
        names.setdefault(path, []).append(name)
    faults: dict[Path, str] = {}
    embeddings: dict[str, int] = {}  # rows
    for path in sorted(names):
        header = read_header(path)
        if isinstance(header, str):
            faults[path] = header
        elif lost := [name for name in names[path] if name not in header]:
            faults[path] = f"lacks {lost[0]}, which the index places there"
        else:
            found = [name for name in names[path] if name.endswith("embed_tokens.weight") and "layers." not in name]
            embeddings |= {name: header[name]["shape"][0] for name in found}
    if faults:
        first = next(iter(faults))
        raise UserError(
            f"{len(faults)} of {len(names)} weight files of {directory} are not usable, first {first.name}: "
            f"{faults[first]}; fetch {'it' if len(faults) == 1 else 'them'} again"
        )
    for name, rows in embeddings.items():
        if rows != vocab_size:
            raise UserError(
                f"{directory}: {name} has {rows} rows, config.json's vocab_size is {vocab_size}; "
                "they do not belong together: fetch the model again"
            )
