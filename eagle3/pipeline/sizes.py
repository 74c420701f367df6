"""How large the target is, from its config and the headers or the index of its weights; nothing of it is loaded."""

from dataclasses import dataclass
from typing import Any

from eagle3 import model_files
from eagle3.capture import preflight
from eagle3.capture.interface import EngineSettings
from eagle3.target import Target
from eagle3.terminal import UserError

BF16 = 2  # bytes


@dataclass(frozen=True)
class TargetSize:
    weights: int  # bytes in an engine's memory
    counted: str  # where that number is from
    active: int  # parameters that one token goes through
    cache: int  # bytes of key/value cache a token, over all ranks; a latent (MLA) lies on every rank
    latent: bool


def size_of(engine: str, settings: EngineSettings) -> TargetSize:
    target = settings.target
    weights, counted = _weights(engine, settings)
    latent = bool(target.config.get("kv_lora_rank"))
    if latent:
        row = target.config["kv_lora_rank"] + target.config["qk_rope_head_dim"]
    else:
        row = 2 * _heads(target.config)[1] * _head_dim(target)
    return TargetSize(weights, counted, active_parameters(target), row * target.num_layers * BF16, latent)


def _weights(engine: str, settings: EngineSettings) -> tuple[int, str]:
    directory = settings.target.directory
    index = model_files.read_json(directory / model_files.INDEX) or {}
    try:
        files = set(model_files.weight_files(directory).values())
        if all(isinstance(model_files.read_header(path), dict) for path in files):
            return preflight.weight_bytes(engine, settings), "headers of the weight files"
    except UserError:  # no weights here
        pass
    stated = (index.get("metadata") or {}).get("total_size")
    if isinstance(stated, int | float) and stated > 0:
        return int(stated), f"total_size in {model_files.INDEX}"
    return parameters(settings.target) * settings.torch_dtype.itemsize, "config.json, no whole weights are here"


def _heads(config: dict[str, Any]) -> tuple[int, int]:
    heads = config.get("num_attention_heads") or 1
    return heads, config.get("num_key_value_heads") or heads


def _head_dim(target: Target) -> int:
    return target.config.get("head_dim") or target.hidden_size // _heads(target.config)[0]


def parameters(target: Target) -> int:
    """All weights, by the usual arithmetic of decoder layers."""
    return _parameters(target, every_expert=True)


def active_parameters(target: Target) -> int:
    """Weights that one token is multiplied with: of the experts those it is sent to; embedding rows are looked up."""
    return _parameters(target, every_expert=False)


def _parameters(target: Target, *, every_expert: bool) -> int:
    config, size = target.config, target.hidden_size
    heads, key_heads = _heads(config)
    if latent := config.get("kv_lora_rank"):
        nope, rope, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        query = config.get("q_lora_rank")
        attention = (size + heads * (nope + rope)) * query if query else size * heads * (nope + rope)
        attention += size * (latent + rope) + latent * heads * (nope + value) + heads * value * size
    else:
        attention = 2 * size * (heads + key_heads) * _head_dim(target)
    dense = 3 * size * (config.get("intermediate_size") or 4 * size)
    experts = config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts") or 0
    layers, total = target.num_layers, 0
    plain = min(layers, config.get("first_k_dense_replace") or 0) if experts else layers
    total += layers * attention + plain * dense
    if experts:
        chosen = experts if every_expert else config.get("num_experts_per_tok") or 1
        inner = config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * size
        shared = (config.get("n_shared_experts") or 0) * inner + (config.get("shared_expert_intermediate_size") or 0)
        total += (layers - plain) * (3 * size * (chosen * inner + shared) + size * experts)
    head = target.vocab_size * size
    return total + (head if not every_expert or target.tied_embeddings else 2 * head)
