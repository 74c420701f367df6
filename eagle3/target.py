"""Facts about the target: nested config, tokenizer, layer ids, and the three tensors the draft shares.

Nothing here loads the whole model: the config is read as JSON, and embedding, final norm and lm_head come from the
shards that hold them.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eagle3 import model_files
from eagle3.model_files import read_json
from eagle3.packages import require_packages
from eagle3.terminal import UserError, short

# Final norms that multiply by 1 + weight (transformers 5.19; gemma3n and gemma4 do not)
NORMS_PLUS_ONE = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "minimax_m3_vl_text",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
    "step3p5",
    "vaultgemma",
)

# What the stages read of every target; nested configs may leave it to the defaults of their class
NEEDED_KEYS = (
    "hidden_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)


ROLES = ("embed_tokens", "norm", "lm_head")  # the three tensors that the stages read


@dataclass(frozen=True)
class Target:
    """One target model directory and the facts the stages need. `config` is the text model's part of config.json."""

    name: str  # as a server would be given it: hub name, or absolute path of the directory
    directory: Path
    config: dict[str, Any]
    end_ids: tuple[int, ...]  # every id that ends a generation, ascending
    config_hash: str
    tensor_names: dict[str, str] = field(default_factory=dict)  # of ROLES, where they cannot be told from the files

    @property
    def model_type(self) -> str:
        return self.config.get("model_type", "")

    @property
    def architectures(self) -> list[str]:
        """Names of the whole model's class, as servers know it."""
        return self.config.get("architectures") or []

    @property
    def hidden_size(self) -> int:
        return self._number("hidden_size")

    @property
    def num_layers(self) -> int:
        return self._number("num_hidden_layers")

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: the config's number, which may exceed the tokenizer's."""
        return self._number("vocab_size")

    @property
    def max_positions(self) -> int:
        return self._number("max_position_embeddings")

    @property
    def tied_embeddings(self) -> bool:
        """Whether the config says that lm_head is the embedding, or leaves it to a class of transformers that does."""
        if "tie_word_embeddings" in self.config:
            return bool(self.config["tie_word_embeddings"])
        from transformers import CONFIG_MAPPING

        return self.model_type in CONFIG_MAPPING and bool(
            getattr(CONFIG_MAPPING[self.model_type], "tie_word_embeddings", False)
        )

    def _number(self, key: str) -> int:
        value = self.config.get(key)
        if not isinstance(value, int) or value < 1:
            raise UserError(
                f"{self.directory}/config.json: {key} is {value!r}, expected a positive integer; "
                "is this the directory of a language model?"
            )
        return value


def parse_tensor_names(given: list[str]) -> dict[str, str]:
    """`--tensor ROLE=NAME` as a dict. Raises UserError for another form or role."""
    names = dict(text.partition("=")[::2] for text in given)
    if wrong := [text for text in given if text.partition("=")[0] not in ROLES or not text.partition("=")[2]]:
        raise UserError(f"--tensor {wrong[0]}: expected one of {', '.join(f'{role}=NAME' for role in ROLES)}")
    return names


def open_target(model_path: str, *, weights: bool = False, tensor_names: dict[str, str] | None = None) -> Target:
    """Open a local model directory or a hub name (downloaded to the hub cache; weights only when asked for).

    tensor_names: of ROLES, for a model that names them in its own way. Raises UserError with the path and what to do
    when it is not a model.
    """
    small = ["*.json", "*.jinja", "*.py", "tokenizer*", "*.model", "*.txt"]
    directory = local_directory(model_path, "--model-path", None if weights else small)
    raw = read_json(directory / "config.json")
    if raw is None:
        raise UserError(
            f"--model-path {directory} has no config.json"
            + ("" if any(directory.iterdir()) else ", it is empty")
            + "; give the directory of a whole model, or a hub name"
        )
    text = raw.get("text_config") or raw
    if not isinstance(text, dict):
        raise UserError(f"{directory}/config.json: text_config is {text!r}, expected an object; fetch it again")
    text = dict(text)
    text["architectures"] = raw.get("architectures")  # what servers load is the whole model
    # the whole model's flag decides in transformers 5, older ones wrote it beside the text model's sizes
    if stated := [part["tie_word_embeddings"] for part in (raw, text) if "tie_word_embeddings" in part]:
        text["tie_word_embeddings"] = any(stated)
    if "text_config" in raw and any(key not in text for key in NEEDED_KEYS):
        text = _with_defaults(text)
    generation = read_json(directory / "generation_config.json") or {}
    ends: set[int] = set()
    for value in (raw.get("eos_token_id"), text.get("eos_token_id"), generation.get("eos_token_id")):
        ends.update([value] if isinstance(value, int) else value or [])
    digest = hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()[:16]
    name = str(directory) if os.path.isdir(model_path) else model_path
    target = Target(name, directory, text, tuple(sorted(ends)), digest, tensor_names or {})
    _ = target.hidden_size, target.num_layers, target.vocab_size  # each raises where the config lacks it
    return target


def _with_defaults(text: dict[str, Any]) -> dict[str, Any]:
    """A text model's config with what it leaves out: Gemma-3's states only what differs from transformers' defaults."""
    from transformers import CONFIG_MAPPING

    if text.get("model_type") not in CONFIG_MAPPING:
        return text
    try:
        return CONFIG_MAPPING[text["model_type"]](**text).to_dict() | text
    except Exception:  # of the checks of config classes; what is missing is named where it is needed
        return text


def local_directory(name: str, flag: str, patterns: list[str] | None) -> Path:
    """A local directory, or that of a hub name, whose files (all, or those of `patterns`) are fetched into its cache.

    Raises UserError naming `flag`.
    """
    if os.path.isdir(name):
        return Path(name).resolve()
    if os.path.isfile(name):
        raise UserError(f"{flag} {name} is a file; give the directory of the model")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"{flag} {name}: no such directory; give a model directory or a hub name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"{flag} {name}: no such directory, and the hub did not give it ({short(error)}); "
            "give a local model directory"
        ) from error


# ------------------------------------------------------------------------------------------ remote code


def require_trust(target: Target, trust_remote_code: bool) -> None:
    """Refuse a target that needs Python code of its own directory, unless the user allows it.

    To be called before anything of transformers or vLLM opens the directory: both would build a different fast
    tokenizer in the place of a remote one, and say nothing. A config class that the installed transformers has itself
    needs no code, whatever auto_map names. Raises UserError naming the file.
    """
    if trust_remote_code:
        return
    raw = read_json(target.directory / "config.json") or {}
    if code := _tokenizer_code(target):
        what = "tokenizer"
    elif code := (raw.get("auto_map") or {}).get("AutoConfig"):
        from transformers import CONFIG_MAPPING

        if raw.get("model_type") in CONFIG_MAPPING:
            return
        what = f"config class (model_type {raw.get('model_type')!r} is not one of transformers)"
    else:
        return
    file = target.directory / (code.rpartition(".")[0].rpartition("--")[2] + ".py")
    raise UserError(f"the {what}, {file}, is remote code; read it, then give --trust-remote-code")


def _tokenizer_code(target: Target) -> str | None:
    """The tokenizer's class where it is remote code, such as tokenization_kimi.TikTokenTokenizer."""
    declared = (read_json(target.directory / "tokenizer_config.json") or {}).get("auto_map") or {}
    if isinstance(declared, dict):
        declared = declared.get("AutoTokenizer") or ()
    slow_and_fast = [declared] if isinstance(declared, str) else declared
    return next((name for name in reversed(slow_and_fast) if name), None)


# -------------------------------------------------------------------------------------------- tokenizer


def load_tokenizer(target: Target, *, trust_remote_code: bool) -> Any:
    """The target's tokenizer. Raises UserError without one, without a package it needs, or without a chat template."""
    require_trust(target, trust_remote_code)
    if trust_remote_code:
        require_packages(target.directory, ("AutoTokenizer",))
    from transformers import AutoTokenizer

    if not any(any(target.directory.glob(name)) for name in model_files.TOKENIZER_FILES):
        raise UserError(
            f"{target.directory} has no tokenizer files (tokenizer.json, ...); fetch them beside config.json"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(target.directory, trust_remote_code=trust_remote_code)
    except Exception as error:
        repository, elsewhere, code = (_tokenizer_code(target) or "").partition("--")
        if elsewhere:
            file = code.rpartition(".")[0] + ".py"
            raise UserError(
                f"the tokenizer's code is {file} of the hub's {repository}, which cannot be fetched ({short(error)}); "
                f"copy that file into {target.directory} and write {code} for it in tokenizer_config.json's auto_map"
            ) from error
        remedy = "install what it names" if isinstance(error, ImportError) else "fetch its files again"
        raise UserError(f"{target.directory}: the tokenizer does not load ({short(error)}); {remedy}") from error
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {target.directory} has no chat template; put the model's chat_template.jinja there"
        )
    if (size := tokenizer_size(tokenizer)) > target.vocab_size:
        raise UserError(
            f"{target.directory}: the tokenizer has ids up to {size - 1}, config.json's vocab_size is "
            f"{target.vocab_size}; they do not belong together"
        )
    return tokenizer


def tokenizer_size(tokenizer: Any) -> int:
    """One more than the largest id: len() counts ids, and some tokenizers have gaps between them."""
    return 1 + max((tokenizer.get_vocab() | tokenizer.get_added_vocab()).values())


# -------------------------------------------------------------------------------------------- layer ids


def default_aux_layers(num_layers: int) -> list[int]:
    """Aux layers of EAGLE-3 in vLLM's convention (id i is the residual stream entering layer i): [2, N/2, N-3]."""
    layers = [2, num_layers // 2, num_layers - 3]
    if not layers[0] < layers[1] < layers[2]:
        raise UserError(f"no default aux layers for a target of {num_layers} layers; give --aux-layers, e.g. 1,2,3")
    return layers


def parse_aux_layers(text: str | None, num_layers: int) -> list[int]:
    """`--aux-layers` as ascending ids in 1..N-1: a list, negative ids counted from N, or the default.

    Not given, or "default", is the default. Raises UserError for anything else.
    """
    if text is None or text.strip() == "default":
        return default_aux_layers(num_layers)
    try:
        given = [int(part) for part in text.strip().strip("[]").replace(",", " ").split()]
    except ValueError:
        raise UserError(f"--aux-layers {text!r}: expected integers such as 2,15,27, or default") from None
    layers = sorted(layer + num_layers if layer < 0 else layer for layer in given)
    if not layers or len(set(layers)) != len(layers) or not 1 <= layers[0] <= layers[-1] < num_layers:
        raise UserError(f"--aux-layers {text!r}: expected different ids in 1..{num_layers - 1}")
    return layers


# ---------------------------------------------------------------------------------------------- tensors


def _files_outside_layers(target: Target) -> dict[str, Path]:
    """File of every tensor that is not inside a layer; MTP layers bring an embedding and a head of their own."""
    return {name: file for name, file in model_files.weight_files(target.directory).items() if "layers." not in name}


def _named(names: Iterable[str], wanted: str) -> list[str]:
    return [name for name in names if name == wanted or name.endswith("." + wanted)]


def _find_tensor(target: Target, wanted: str, *, prefix: str | None = None, note: str = "") -> tuple[str, Path]:
    """Name and file of the one tensor `wanted` outside the layers, with this prefix or any."""
    role = wanted.removesuffix(".weight")
    if stated := target.tensor_names.get(role):
        files = model_files.weight_files(target.directory)
        if stated not in files:
            raise UserError(f"--tensor {role}={stated}: {target.directory} has no tensor of that name")
        return stated, files[stated]
    files = _files_outside_layers(target)
    if prefix is None:
        names = _named(files, wanted)
    else:
        names = [name for name in files if name == prefix + wanted]
    if len(names) != 1:
        found = names or [name for name in files if any(word in name for word in ("embed", "head", "norm"))]
        looked_for = ("..." if prefix is None else prefix) + wanted
        raise UserError(
            f"{target.directory}: {len(names)} tensors {looked_for}, expected one{note}; "
            f"candidates: {', '.join(found[:8]) or 'none'}; name it with --tensor {role}=NAME (stages 02 and 04)"
        )
    return names[0], files[names[0]]


@contextlib.contextmanager
def _opened(name: str, path: Path) -> Iterator[Any]:
    """The file that holds tensor `name`. Raises UserError naming both, and what is wrong, when it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        fault = model_files.read_header(path)
        reason = fault if isinstance(fault, str) else short(error)
        raise UserError(f"{path}: cannot read {name} ({reason}); fetch it again") from error


def _read_tensor(target: Target, name: str, path: Path, shape: tuple[int, ...]) -> torch.Tensor:
    with _opened(name, path) as file:
        tensor = file.get_tensor(name)
    if tuple(tensor.shape) != shape:
        raise UserError(f"{target.directory}: {name} is {tuple(tensor.shape)}, config.json says {shape}")
    return tensor


def read_embedding_rows(target: Target, starts: list[int], count: int) -> torch.Tensor:
    """Rows start to start + count of the input embedding for each start, one after the other, [starts * count, H]."""
    name, path = _find_tensor(target, "embed_tokens.weight")
    with _opened(name, path) as file:
        rows = file.get_slice(name)
        return torch.cat([rows[start : start + count] for start in starts])


def read_embedding(target: Target) -> torch.Tensor:
    """Input embedding, [V, H]."""
    name, path = _find_tensor(target, "embed_tokens.weight")
    return _read_tensor(target, name, path, (target.vocab_size, target.hidden_size))


def read_lm_head(target: Target) -> torch.Tensor:
    """Output head, [V, H]: the checkpoint's lm_head; where it holds none, the embedding if the config ties them.

    A config may tie what the checkpoint holds apart (fine-tuned heads). transformers 5 and vLLM 0.32 then run the
    checkpoint's lm_head. Raises UserError when there is none and the config does not tie.
    """
    stated = "lm_head" in target.tensor_names
    if target.tied_embeddings and not stated and not _named(_files_outside_layers(target), "lm_head.weight"):
        return read_embedding(target)
    name, path = _find_tensor(target, "lm_head.weight", note=" (config.json does not tie it to the embedding)")
    return _read_tensor(target, name, path, (target.vocab_size, target.hidden_size))


def read_final_norm(target: Target) -> torch.Tensor:
    """Weight of the final RMSNorm, [H], beside the embedding; as stored, without the 1 that NORMS_PLUS_ONE add."""
    embedding, _ = _find_tensor(target, "embed_tokens.weight")
    prefix, found, _ = embedding.rpartition("embed_tokens.weight")
    name, path = _find_tensor(target, "norm.weight", prefix=prefix if found else None)
    return _read_tensor(target, name, path, (target.hidden_size,))


class TargetHead:
    """Final norm and lm_head of the target: states of the last layer before the norm -> logits.

    Besides RMSNorm and the matrix it does what the target does: Gemma's (1 + w), logit scale, softcap. The capture's
    canary proves it against the engine's own log probabilities.
    """

    def __init__(
        self, target: Target, dtype: torch.dtype, device: torch.device | str, rows: torch.Tensor | None = None
    ):
        """`rows` selects vocabulary ids (int64 [D]); None keeps all."""
        config = target.config
        head = read_lm_head(target)
        self.weight = (head if rows is None else head[rows]).to(device, dtype)  # [D, H]
        norm = read_final_norm(target).float()
        if target.model_type in NORMS_PLUS_ONE:
            norm = norm + 1
        self.norm = norm.to(device)  # [H], float32
        self.eps = float(config.get("rms_norm_eps") or config.get("norm_eps") or 1e-6)
        self.scale = float(config.get("logit_scale") or 1.0) / float(config.get("logits_scaling") or 1.0)
        self.softcap = config.get("final_logit_softcapping")

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """[S, H] -> float logits [S, D] in the dtype of the head."""
        x = states.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.norm
        logits = torch.nn.functional.linear(x.to(self.weight.dtype), self.weight)  # [S, D]
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits
