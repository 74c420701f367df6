"""Writes a tiny random stand-in for Kimi-K2.5: everything that differs from other targets is there, the sizes are not.

Nested config, tensor names, one shard a layer, slow tokenizer as remote code, chat template, INT4 experts. The MLA
cache keeps the real 512 + 64, the only width that vLLM's CPU kernel takes.
"""

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from kimi_code_for_tests import CHAT_TEMPLATE, CONFIGURATION, TEXT_CONFIGURATION, TOKENIZATION, TOOL_DECLARATION
from safetensors.torch import save_file

RESERVED = 256  # ids after the base vocabulary, most of them without a name
# place among the reserved ids: text, and whether it is flagged special; the real repository's
NAMED = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_user|>", True),
    4: ("<|im_assistant|>", True),
    6: ("<|start_header_id|>", True),
    7: ("<|end_header_id|>", True),
    9: ("[EOT]", True),
    10: ("<|im_system|>", True),
    11: ("<|tool_calls_section_begin|>", False),
    12: ("<|tool_calls_section_end|>", False),
    13: ("<|tool_call_begin|>", False),
    14: ("<|tool_call_argument_begin|>", False),
    15: ("<|tool_call_end|>", False),
    17: ("<|im_middle|>", True),
    18: ("<|media_begin|>", True),
    19: ("<|media_content|>", True),
    20: ("<|media_end|>", True),
    21: ("<|media_pad|>", True),
    22: ("<think>", False),
    23: ("</think>", False),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}
WORDS = """ user assistant system tool think answer question number plus is the and of to that makes an even sentence
 river sea lighthouse story print( return import json weather city temperature I need sum first then so it should be
 What Doubled Answer in one 你好 世界 模型 思考""".split()
LAYERS, HIDDEN, HEADS, EXPERTS, EXPERT_WIDTH, MLP, GROUP = 8, 64, 2, 4, 32, 128, 32
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 32, 512, 128, 64, 128
VISION, VISION_MLP = 32, 64


def write_kimi(directory: Path, *, experts: str = "bfloat16", tiktoken: Path | None = None) -> Path:
    """Write the model directory and return it.

    `experts`: bfloat16; int4 (compressed-tensors, packed); or dequantised, the values of int4 unpacked. `tiktoken` is
    a vocabulary file to use in place of the synthetic one.
    """
    directory.mkdir(parents=True)
    vocabulary = directory / "tiktoken.model"
    if tiktoken:
        shutil.copyfile(tiktoken, vocabulary)
    else:
        vocabulary.write_text(
            "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(_tokens()))
        )
    base = len(vocabulary.read_bytes().split()) // 2
    ids = {name: base + place for place, (name, _) in NAMED.items()}
    config = _config(ids, base + RESERVED, quantised=experts == "int4")
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"max_length": 262144, "eos_token_id": ids["<|im_end|>"]})
    media = {"patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 16384, "patch_limit_on_one_side": 512}
    media |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "in_patch_limit_each_frame": 4096, "sample_fps": 2.0}
    media |= {"temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff"}
    absent = ("fixed_output_tokens", "in_patch_limit_video", "max_num_frames_each_video")
    _write_json(directory / "preprocessor_config.json", {"media_proc_cfg": media | dict.fromkeys(absent)})
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(base))
    for name, text in {
        "chat_template.jinja": CHAT_TEMPLATE,
        "configuration_deepseek.py": TEXT_CONFIGURATION,
        "configuration_kimi_k25.py": CONFIGURATION,
        "tokenization_kimi.py": TOKENIZATION,
        "tool_declaration_ts.py": TOOL_DECLARATION,
    }.items():
        (directory / name).write_text(text)
    _write_shards(directory, list(_shards(base + RESERVED, experts)))
    return directory


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2))


# ------------------------------------------------------------------------------------------- vocabulary


def _tokens() -> list[bytes]:
    """All bytes, then the growing beginnings of a few words, with and without a space before them."""
    spelled = [text.encode() for word in WORDS for text in (f" {word}", word)]
    beginnings = [word[:length] for word in spelled for length in range(2, len(word) + 1)]
    return [*(bytes([byte]) for byte in range(256)), *dict.fromkeys(beginnings)]


def _tokenizer_config(base: int) -> dict:
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {
        "added_tokens_decoder": {
            str(base + place): {"content": name, "special": special, **plain}
            for place, (name, special) in NAMED.items()
        },
        "additional_special_tokens": [name for name, special in NAMED.values() if special][2:-2],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1000000000000000019884624838656,
    }


# ----------------------------------------------------------------------------------------------- config


def _config(ids: dict[str, int], vocab_size: int, *, quantised: bool) -> dict:
    special = {"bos_token_id": ids["[BOS]"], "eos_token_id": ids["[EOS]"], "pad_token_id": ids["[PAD]"]}
    text = {
        **special,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_WIDTH,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 262144,
        "attention_bias": False,
        "hidden_act": "silu",
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if quantised:
        text["quantization_config"] = _quantization()
    vision = {
        "patch_size": 14,
        "merge_kernel_size": [2, 2],
        "vt_hidden_size": VISION,
        "vt_intermediate_size": VISION_MLP,
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": 1,
        "mm_hidden_size": VISION,
        "text_hidden_size": HIDDEN,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "init_pos_emb_time": 4,
        # transformers' names of the same; the real file does without, its sizes are that class's defaults
        "hidden_size": VISION,
        "intermediate_size": VISION_MLP,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "pos_emb_height": 8,
        "pos_emb_width": 8,
        "pos_emb_time": 4,
    }
    return {
        **special,
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "media_placeholder_token_id": ids["<|media_pad|>"],
        "image_token_id": ids["<|media_pad|>"],  # these two are not in the real file either, for the same reason
        "projection_hidden_size": VISION,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": vision,
    }


def _quantization() -> dict:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    weights |= {"dynamic": False, "observer": "minmax"}
    kept = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": kept,
        "kv_cache_scheme": None,
    }


# ---------------------------------------------------------------------------------------------- tensors


def _shards(vocab_size: int, experts: str) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors of each file, in the real order: the layers, then embedding, norm and head, projector, vision tower."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, std: float = 0.05) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    def norm(size: int) -> torch.Tensor:  # not exactly one: a norm left out must show in the numbers
        return (1 + random(size, std=0.1)).bfloat16()

    def mlp(prefix: str, width: int) -> dict[str, torch.Tensor]:
        shapes = {"gate_proj": (width, HIDDEN), "up_proj": (width, HIDDEN), "down_proj": (HIDDEN, width)}
        return {f"{prefix}.{name}.weight": random(*shape) for name, shape in shapes.items()}

    for layer in range(LAYERS):
        prefix = f"language_model.model.layers.{layer}"
        attention = {
            "q_a_proj": random(Q_RANK, HIDDEN),
            "q_a_layernorm": norm(Q_RANK),
            "q_b_proj": random(HEADS * (NOPE + ROPE), Q_RANK),
            "kv_a_proj_with_mqa": random(KV_RANK + ROPE, HIDDEN),
            "kv_a_layernorm": norm(KV_RANK),
            "kv_b_proj": random(HEADS * (NOPE + VALUE), KV_RANK),
            "o_proj": random(HIDDEN, HEADS * VALUE),
        }
        tensors = {f"{prefix}.self_attn.{name}.weight": tensor for name, tensor in attention.items()}
        tensors |= {f"{prefix}.{name}.weight": norm(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}
        if layer == 0:
            tensors |= mlp(f"{prefix}.mlp", MLP)
        else:
            tensors[f"{prefix}.mlp.gate.weight"] = random(EXPERTS, HIDDEN)
            tensors |= mlp(f"{prefix}.mlp.shared_experts", EXPERT_WIDTH)
            for expert in range(EXPERTS):
                for name, tensor in mlp(f"{prefix}.mlp.experts.{expert}", EXPERT_WIDTH).items():
                    tensors |= _expert(name, tensor, experts)
            bias = {f"{prefix}.mlp.gate.e_score_correction_bias": random(EXPERTS, std=0.01)}  # stays float32
        kept = {name: t for name, t in tensors.items() if "experts." in name and ".shared_" not in name}
        yield kept | _bfloat16({n: t for n, t in tensors.items() if n not in kept}) | (bias if layer else {})

    yield _bfloat16(
        {
            "language_model.lm_head.weight": random(vocab_size, HIDDEN, std=0.3),  # few near ties among the tokens
            "language_model.model.embed_tokens.weight": random(vocab_size, HIDDEN),
            "language_model.model.norm.weight": norm(HIDDEN),
        }
    )
    joined = 4 * VISION  # patches merge two by two
    yield _bfloat16(
        {
            "mm_projector.pre_norm.weight": norm(VISION),
            "mm_projector.pre_norm.bias": torch.zeros(VISION),
            "mm_projector.proj.0.weight": random(joined, joined),
            "mm_projector.proj.0.bias": torch.zeros(joined),
            "mm_projector.proj.2.weight": random(HIDDEN, joined),
            "mm_projector.proj.2.bias": torch.zeros(HIDDEN),
        }
    )
    tower = {
        "encoder.blocks.0.norm0": norm(VISION),
        "encoder.blocks.0.norm1": norm(VISION),
        "encoder.blocks.0.wqkv": random(3 * VISION, VISION),
        "encoder.blocks.0.wo": random(VISION, VISION),
        "encoder.blocks.0.mlp.fc0": random(VISION_MLP, VISION),
        "encoder.blocks.0.mlp.fc1": random(VISION, VISION_MLP),
        "encoder.final_layernorm": norm(VISION),
        "patch_embed.proj": random(VISION, 3, 14, 14),
    }
    biases = {f"vision_tower.{name}.bias": torch.zeros(len(tensor)) for name, tensor in tower.items()}
    weights = {f"vision_tower.{name}.weight": tensor for name, tensor in tower.items()}
    yield _bfloat16(weights | biases | {"vision_tower.patch_embed.pos_emb.weight": random(8, 8, VISION)})


def _bfloat16(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def _expert(name: str, weight: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    """One expert matrix [out, in] as it is stored: eight 4-bit values in an int32, one scale for each GROUP inputs."""
    if kind == "bfloat16":
        return {name: weight.bfloat16()}
    groups = weight.unflatten(1, (-1, GROUP))  # [out, in / GROUP, GROUP]
    scale = (groups.abs().amax(-1) / 7.5).bfloat16()  # [out, in / GROUP]
    values = (groups / scale.float()[..., None]).round().clamp(-8, 7)
    if kind == "dequantised":
        return {name: (values * scale.float()[..., None]).flatten(1).bfloat16()}
    nibbles = (values.flatten(1).long() + 8).unflatten(1, (-1, 8))  # [out, in / 8, 8]
    packed = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
    return {
        f"{name}_packed": packed,
        f"{name}_scale": scale,
        f"{name}_shape": torch.tensor(weight.shape, dtype=torch.int32),
    }


def _write_shards(directory: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    files = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / name, {"format": "pt"})
        files |= dict.fromkeys(tensors, name)
    _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": dict(sorted(files.items()))})
