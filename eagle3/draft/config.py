"""Shape of the draft: one Llama-type decoder layer of the target's width, derived from it or read from a file."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from eagle3.target import Target
from eagle3.terminal import UserError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
# SGLang ignores these YaRN keys and always scales; without them vLLM, SGLang, transformers and training agree
DROPPED_ROPE_KEYS = ("mscale", "mscale_all_dim")
# What a draft config file may say: the shape, and facts of the run that it was written for
SIZE_KEYS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
NORM_KEYS = ("fc_norm", "norm_output")  # EAGLE-3.1
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
FACT_KEYS = (
    "hidden_size",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
    "eagle_aux_hidden_state_layer_ids",
)


@dataclass(frozen=True)
class DraftConfig:
    """Everything that fixes the draft's tensors and arithmetic."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict[str, Any]  # transformers' rope_parameters: rope_type, rope_theta and the type's own keys
    max_position_embeddings: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    aux_layers: tuple[int, ...]  # vLLM's convention, ascending
    fc_norm: bool = False  # each aux layer's states have an RMSNorm of their own before fc
    norm_output: bool = False  # the next step takes the final norm's output, not the residual stream before it

    def llama(self) -> LlamaConfig:
        """The same shape as a transformers LlamaConfig of one layer."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters=dict(self.rope),
            max_position_embeddings=self.max_position_embeddings,
            vocab_size=self.vocab_size,
            num_hidden_layers=1,
            tie_word_embeddings=False,
            attention_bias=False,
            mlp_bias=False,
            hidden_act="silu",
        )


def read_draft_config(path: Path) -> dict[str, Any]:
    """A draft config file: a JSON object with keys of the export's config.json.

    Raises UserError naming every key that is none of SIZE_KEYS, NORM_KEYS, ROPE_KEYS, FACT_KEYS or rms_norm_eps, and
    values of the wrong kind: a misspelt key must not leave the derived value in place.
    """
    try:
        stated = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--draft-config {path}: {error}") from error
    if not isinstance(stated, dict):
        raise UserError(f"--draft-config {path}: expected a JSON object, found {type(stated).__name__}")
    known = (*SIZE_KEYS, "rms_norm_eps", *NORM_KEYS, *ROPE_KEYS, *FACT_KEYS)
    if unknown := [key for key in stated if key not in known]:
        raise UserError(f"--draft-config {path} has unknown keys {', '.join(unknown)}; known: {', '.join(known)}")
    for key in SIZE_KEYS:
        if key in stated and (type(stated[key]) is not int or stated[key] < 1):
            raise UserError(f"--draft-config {path}: {key} is {stated[key]!r}, expected a positive integer")
    for key in NORM_KEYS:
        if type(stated.get(key, False)) is not bool:
            raise UserError(f"--draft-config {path}: {key} is {stated[key]!r}, expected true or false")
    eps = stated.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise UserError(f"--draft-config {path}: rms_norm_eps is {eps!r}, expected a number such as 1e-6")
    rope = {key: stated[key] for key in ROPE_KEYS if stated.get(key) is not None}
    if rope and not (rope.get("rope_theta") or (rope.get("rope_parameters") or {}).get("rope_theta")):
        raise UserError(
            f"--draft-config {path} has {', '.join(rope)} without rope_theta; state the whole rope or nothing"
        )
    return stated


def derive(
    target: Target,
    draft_vocab_size: int,
    aux_layers: list[int],
    stated: dict[str, Any] | None = None,
    norms: Collection[str] = (),
) -> DraftConfig:
    """The draft of `target`: its width, heads, MLP and rope; what `stated` (a draft config file) says wins.

    `norms` are those of NORM_KEYS that flags ask for.

    For MLA targets (kv_lora_rank) the config's head_dim is only the rope part: the draft takes v_head_dim and as many
    key/value heads as query heads. Raises UserError for a config without attention heads or of unknown rope type, and
    for a stated fact that is not this run's, such as a norm that is off in the file and asked for.
    """
    config, stated = target.config, stated or {}
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int):
        raise UserError(f"{target.directory}/config.json has no num_attention_heads; no draft shape can be derived")
    if config.get("kv_lora_rank"):
        head_dim, kv_heads = config["v_head_dim"], heads
    else:
        head_dim = config.get("head_dim") or target.hidden_size // heads
        kv_heads = config.get("num_key_value_heads") or heads
    facts = (target.hidden_size, target.vocab_size, draft_vocab_size, target.max_positions, list(aux_layers))
    for key, value in zip(FACT_KEYS, facts, strict=True):
        if key in stated and stated[key] != value:
            raise UserError(
                f"--draft-config: {key} is {stated[key]!r}, this run has {value!r}; give a file made for it"
            )
    for key in norms:
        if stated.get(key) is False:
            raise UserError(f"--{key.replace('_', '-')} contradicts --draft-config, where {key} is false; drop one")
    sizes = {
        "intermediate_size": config.get("intermediate_size") or 4 * target.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    } | {key: stated[key] for key in SIZE_KEYS if key in stated}
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"] or sizes["head_dim"] % 2:
        raise UserError(
            f"no draft has {sizes['num_attention_heads']} heads, {sizes['num_key_value_heads']} key/value heads and "
            f"head_dim {sizes['head_dim']}: heads must be a multiple of key/value heads and head_dim even; "
            "set them with --draft-config"
        )
    return DraftConfig(
        hidden_size=target.hidden_size,
        **sizes,
        rms_norm_eps=stated.get("rms_norm_eps") or float(config.get("rms_norm_eps") or 1e-6),
        rope=rope_parameters(stated if any(stated.get(key) for key in ROPE_KEYS) else config),
        max_position_embeddings=target.max_positions,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layers=tuple(aux_layers),
        **{key: key in norms or stated.get(key, False) for key in NORM_KEYS},
    )


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The rope of a target config in one form, whether it has rope_parameters or rope_theta with rope_scaling."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope = dict(rope.get("full_attention", rope))  # Gemma-3 nests one set per layer type
    rope_type = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope["rope_type"] = rope.get("rope_type") or rope_type
    rope["rope_theta"] = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if rope["rope_type"] not in ROPE_TYPES:
        raise UserError(f"rope type {rope['rope_type']!r} is unknown; known: {', '.join(ROPE_TYPES)}")
    for key in DROPPED_ROPE_KEYS:
        rope.pop(key, None)
    return rope
