"""Writes tiny random targets of the structures in use: how each norms, ties, caps, scales, routes and nests.

transformers' own classes write them, so the names, the nesting and what config.json leaves out are what a user has.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eagle3.target import NORMS_PLUS_ONE

VOCAB = 512
CAP = 5.0  # softcap; logits are about half as large
SCALING = 3.0  # Granite divides its logits by it
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGE = {"image_size": 28, "patch_size": 14}


def _llama(tied: bool) -> tuple[str, Any]:
    from transformers import LlamaConfig

    return "LlamaForCausalLM", LlamaConfig(**SIZES, tie_word_embeddings=tied)


def _qwen3() -> tuple[str, Any]:
    from transformers import Qwen3Config

    return "Qwen3ForCausalLM", Qwen3Config(**SIZES)


def _deepseek_v3() -> tuple[str, Any]:
    """MLA and experts. vLLM's CPU kernels take a cache of 512 + 64 only, and are right with YaRN rope only."""
    from transformers import DeepseekV3Config

    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    latent = {"q_lora_rank": 32, "kv_lora_rank": 512, "num_key_value_heads": 4}
    latent |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32}
    experts |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    for_vllm = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    config = DeepseekV3Config(**sizes | latent | experts | for_vllm, rope_parameters=yarn)
    return "DeepseekV3ForCausalLM", config


def _granite() -> tuple[str, Any]:
    from transformers import GraniteConfig

    multipliers = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1}
    return "GraniteForCausalLM", GraniteConfig(**SIZES, **multipliers, logits_scaling=SCALING)


def _gemma2() -> tuple[str, Any]:
    from transformers import Gemma2Config

    return "Gemma2ForCausalLM", Gemma2Config(**SIZES, query_pre_attn_scalar=32, final_logit_softcapping=CAP)


def _gemma4() -> tuple[str, Any]:
    from transformers import Gemma4TextConfig

    layers = {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 32}
    plain = {"hidden_size_per_layer_input": 0, "global_head_dim": 32}
    return "Gemma4ForCausalLM", Gemma4TextConfig(**SIZES, **layers, **plain, final_logit_softcapping=CAP)


def _gemma3_vision() -> tuple[str, Any]:
    from transformers import Gemma3Config

    vision, text = VISION | IMAGE, SIZES | {"sliding_window": 32}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return "Gemma3ForConditionalGeneration", config


def _qwen2_5_vl() -> tuple[str, Any]:
    from transformers import Qwen2_5_VLConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen2_5_VLConfig(
        text_config=SIZES | {"num_attention_heads": 2, "rope_parameters": rope},  # 32 wide heads
        vision_config=vision | {"fullatt_block_indexes": [0]},
        tie_word_embeddings=False,
    )
    return "Qwen2_5_VLForConditionalGeneration", config


def _mistral3() -> tuple[str, Any]:
    """Tied by the whole model's config, while the text model's says that it is not."""
    from transformers import Mistral3Config, MistralConfig, PixtralVisionConfig

    text = MistralConfig(**SIZES, tie_word_embeddings=False)
    config = Mistral3Config(text_config=text, vision_config=PixtralVisionConfig(**VISION, **IMAGE))
    return "Mistral3ForConditionalGeneration", config


STRUCTURES: dict[str, Callable[[], tuple[str, Any]]] = {  # name of the model's class in transformers, and its config
    "llama": lambda: _llama(tied=False),
    "llama-tied": lambda: _llama(tied=True),
    "qwen3": _qwen3,
    "deepseek-v3": _deepseek_v3,
    "granite": _granite,
    "gemma2": _gemma2,
    "gemma4": _gemma4,
    "gemma3-vision": _gemma3_vision,
    "qwen2.5-vl": _qwen2_5_vl,
    "mistral3": _mistral3,
}


def write_structure(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the target `name` of STRUCTURES and return its directory."""
    import transformers

    model_class, config = STRUCTURES[name]()
    config.dtype = dtype
    model = getattr(transformers, model_class)(config)
    centred = config.get_text_config().model_type in NORMS_PLUS_ONE
    torch.manual_seed(0)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:  # not all one: a norm left out or applied twice must show in the numbers
            torch.nn.init.uniform_(parameter, *((-0.5, 0.5) if centred else (0.5, 1.5)))
        elif "embed_tokens" in parameter_name or "lm_head" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.3)  # few near ties among the tokens
        else:
            torch.nn.init.normal_(parameter, std=0.05)
    model.to(dtype).save_pretrained(directory)
    return directory


def random_ids(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths, without the special ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
