"""The export: one directory that vLLM and SGLang load as it is (design: plain Hugging Face layout, bf16 safetensors).

Read against vLLM 0.32 (model_executor/models/llama_eagle3.py, and served by it) and SGLang 0.5.14
(srt/models/llama_eagle3.py; layer ids: set_eagle3_layers_to_capture of each model there).
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from eagle3 import artifacts
from eagle3.draft.config import NORM_KEYS, DraftConfig
from eagle3.draft.model import DraftModel
from eagle3.target import Target
from eagle3.terminal import UserError

# SGLang captures before layer id on these targets (deepseek_v2.py, glm4_moe_lite.py), and before layer id + 1 on all
# others (it adds one itself)
SGLANG_UNSHIFTED = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_k2", "kimi_k25")


def draft_to_target(d2t: torch.Tensor) -> torch.Tensor:
    """Target ids of the draft ids, int64 [D], from offsets d2t int64 [D]."""
    return torch.arange(d2t.shape[0]) + d2t


def target_to_draft(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Draft ids of the target ids, int64 [V], -1 for ids outside the draft vocabulary."""
    inverse = torch.full((vocab_size,), -1, dtype=torch.long)
    inverse[draft_to_target(d2t)] = torch.arange(d2t.shape[0])
    return inverse


def config_json(config: DraftConfig, target: Target) -> dict[str, Any]:
    """config.json of the export. Raises UserError where SGLang would shift the layer ids."""
    layers = list(config.aux_layers)
    if target.model_type in SGLANG_UNSHIFTED:
        if layers[0] == 1:
            raise UserError(
                f"aux layers {layers}: SGLang shifts ids that start at 1 on {target.model_type}; start at 2"
            )
        sglang_layers = layers
    else:
        sglang_layers = [layer - 1 for layer in layers]
    rope = config.rope
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    described: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": sglang_layers},
    }
    if len(layers) != 3:
        described["num_aux_hidden_states"] = len(layers)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if target.config.get(key) is not None:
            described[key] = target.config[key]
    return described


def export_tensors(model: DraftModel, vocab: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What an export holds, on the CPU: weights in bf16 and, unless the vocabulary is full, d2t and t2d of `vocab`."""
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.named_parameters()}
    tensors["embed_tokens.weight"] = model.embed_tokens.to("cpu", torch.bfloat16)
    if model.config.draft_vocab_size < model.config.vocab_size:
        tensors |= {"d2t": vocab["d2t"], "t2d": vocab["t2d"]}  # int64 and bool: bf16 would corrupt the offsets
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def write_export(directory: Path, tensors: dict[str, torch.Tensor], described: dict[str, Any], card: str) -> None:
    """Write the export that vLLM and SGLang load; an earlier one is replaced.

    `described` is what config_json gave, `card` is the text of README.md.
    """
    with whole_directory(directory) as work:
        save_file(tensors, work / "model.safetensors", {"format": "pt"})
        artifacts.save_json(work / "config.json", described)
        (work / "README.md").write_text(card)


@contextlib.contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """A directory to write into, which takes the place of `directory` when the block has ended well.

    A kill between the removal of the old one and the renaming leaves none: a manifest must not say complete meanwhile.
    """
    work = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    with artifacts.writing(work / "model.safetensors"):
        yield work
        for path in work.iterdir():
            artifacts.sync_folder(path)  # a file as well
    shutil.rmtree(directory, ignore_errors=True)
    work.rename(directory)
    artifacts.sync_folder(directory.parent)


def read_export(directory: Path, config: DraftConfig) -> DraftModel:
    """Load an export's weights from its files alone, strictly: no missing and no extra tensor."""
    described = json.loads((directory / "config.json").read_text())
    for key in ("vocab_size", "draft_vocab_size", *NORM_KEYS):  # norm_output has no tensor that would tell
        found, wanted = described.get(key, False), getattr(config, key)  # a norm that is not stated is off
        if found != wanted:
            raise UserError(f"{directory}/config.json: {key} is {found}, expected {wanted}")
    model = DraftModel(config).to(torch.bfloat16)
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    model.embed_tokens.copy_(tensors.pop("embed_tokens.weight"))
    tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    model.load_state_dict(tensors, strict=True)
    return model
