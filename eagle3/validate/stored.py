"""A draft as its files have it: config.json in the plain layout's terms, and headers of the tensors.

Nothing is loaded until asked for: a draft of a large target is gigabytes.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eagle3.terminal import UserError, short

IDS = "eagle_aux_hidden_state_layer_ids"
FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # names in safetensors and in config.json
# vllm/transformers_utils/configs/speculators/algos.py update_eagle3: norm_before_residual is true where unstated
SPECULATORS_FLAGS = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
SPECULATORS_ARCHITECTURES = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
# names that servers replace (srt/models/llama_eagle3.py load_weights; vLLM the first alone)
RENAMED = {
    "midlayer.": "layers.0.",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}
UNUSED = "rotary_emb.inv_freq"  # old files have it; every loader drops it


@dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: BF16, F32, I64, BOOL ...

    def read(self) -> torch.Tensor:
        """All of it, mapped from the file. Raises UserError naming the file when it is damaged."""
        with self._reading(), safe_open(self.file, framework="pt") as file:
            return file.get_tensor(self.name)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows start to stop, [stop - start, ...]."""
        with self._reading(), safe_open(self.file, framework="pt") as file:
            return file.get_slice(self.name)[start:stop]

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.file}: cannot read {self.name} ({short(error)}); fetch it again") from error


@dataclass(frozen=True)
class StoredDraft:
    directory: Path
    config: dict[str, Any]  # as a server sees it
    speculators: bool  # whether the files are in that library's layout
    not_finite: list[str]  # NaN or Infinity in config.json
    tensors: dict[str, Stored]  # by the name that servers give them, without model.
    prefixed: list[str]  # names in the files that start with model.
    pickled: list[str]  # weight files other than safetensors, where there are none of those


def open_draft(directory: Path) -> StoredDraft:
    """Read config.json and the headers. Raises UserError when there is none or one is damaged."""
    path = directory / "config.json"
    not_finite: list[str] = []

    def note(constant: str) -> float:
        not_finite.append(constant)
        return 1.0

    try:
        raw = json.loads(path.read_text(), parse_constant=note)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({short(error)}); DIR must hold a draft") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds {type(raw).__name__}, expected a JSON object")
    files = sorted(directory.glob("*.safetensors"))
    other = sorted(file.name for end in ("bin", "pt", "pth") for file in directory.glob(f"*.{end}"))
    headers = {name: stored for file in files for name, stored in _headers(file).items() if not name.endswith(UNUSED)}
    speculators = "speculators_model_type" in raw
    return StoredDraft(
        directory=directory,
        config=_flat(path, raw) if speculators else raw,
        speculators=speculators,
        not_finite=not_finite,
        tensors={_served_name(name): stored for name, stored in headers.items()},
        prefixed=sorted(name for name in headers if name.startswith("model.")),
        pickled=[] if files else other,
    )


def _headers(file: Path) -> dict[str, Stored]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
            return {
                name: Stored(file, name, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged ({short(error)}); fetch or export it again") from error


def _served_name(name: str) -> str:
    name = name.removeprefix("model.")
    for old, new in RENAMED.items():
        name = name.replace(old, new, 1)
    return name


def _flat(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """config.json of speculators' layout as vLLM turns it into a plain one."""
    kind, layer = raw["speculators_model_type"], raw.get("transformer_layer_config")
    if kind != "eagle3" or not isinstance(layer, dict):
        raise UserError(
            f"{path}: speculators_model_type {kind!r}; only eagle3 with transformer_layer_config is checked"
        )
    kept = {key: raw[key] for key in ("target_hidden_size", IDS) if raw.get(key)}
    name = SPECULATORS_ARCHITECTURES.get(layer.get("model_type", "llama"), layer.get("model_type"))
    return (
        layer
        | {key: raw.get(key, value) for key, value in SPECULATORS_FLAGS.items()}
        | {"draft_vocab_size": raw.get("draft_vocab_size"), "architectures": [name]}
        | kept
    )
