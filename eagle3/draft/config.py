"""Shape of the draft, derived from the target: one Llama-type decoder layer of the target's width."""

from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig

from eagle3.target import Target
from eagle3.terminal import UserError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
# SGLang ignores these YaRN keys and always scales; without them vLLM, SGLang, transformers and training agree
DROPPED_ROPE_KEYS = ("mscale", "mscale_all_dim")


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


def derive(target: Target, draft_vocab_size: int, aux_layers: list[int]) -> DraftConfig:
    """The draft of `target`: its width, heads, MLP and rope.

    For MLA targets (kv_lora_rank) the config's head_dim is only the rope part: the draft takes v_head_dim and as many
    key/value heads as query heads. Raises UserError for a config without attention heads or of unknown rope type.
    """
    config = target.config
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int):
        raise UserError(f"{target.directory}/config.json has no num_attention_heads; no draft shape can be derived")
    if config.get("kv_lora_rank"):
        head_dim, kv_heads = config["v_head_dim"], heads
    else:
        head_dim = config.get("head_dim") or target.hidden_size // heads
        kv_heads = config.get("num_key_value_heads") or heads
    return DraftConfig(
        hidden_size=target.hidden_size,
        intermediate_size=config.get("intermediate_size") or 4 * target.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        rope=rope_parameters(config),
        max_position_embeddings=target.max_positions,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layers=tuple(aux_layers),
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
