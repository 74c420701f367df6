"""The export's README.md and what it says of serving, and the export as other programs open it."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_export import KIMI, LLAMA
from transformers import AutoConfig, AutoModelForCausalLM

from eagle3.draft.config import derive
from eagle3.draft.model import DraftModel
from eagle3.export import config_json, export_tensors, read_export, write_export
from eagle3.model_card import model_card
from eagle3.target import Target, open_target, read_embedding
from eagle3.terminal import UserError

TRAINING = {"ttt_steps": 5, "supervision": "served", "train_lm_head": True}


def card_of(config: dict, norms: tuple[str, ...] = ()) -> str:
    target = Target("owner/model", Path("m"), config, (1,), "hash")
    draft = derive(target, 320, [2, 18, 33], norms=norms)
    return model_card(target, draft, TRAINING, None, ["some rows"], 4096, None)


def test_serving_lines_name_method_versions_and_length() -> None:
    """S05, S09, S10, S21: the method's name, the length trained on, no inherited quantisation, least versions."""
    card = card_of(LLAMA)
    assert '"method": "eagle3"' in card and "--speculative-algorithm EAGLE3" in card
    assert "--speculative-num-steps 3" in card and "--speculative-num-draft-tokens 4" in card
    assert "conversations of up to 4096 tokens" in card
    assert "--speculative-draft-model-quantization unquant" in card
    assert "From vLLM 0.32 and SGLang 0.5.14 on" in card
    assert "attention-backend" not in card
    assert "Norms beyond EAGLE-3's: none;" in card
    assert "Norms beyond EAGLE-3's: `fc_norm`, `norm_output`;" in card_of(LLAMA, ("fc_norm", "norm_output"))


def test_mla_targets_get_a_backend_for_the_draft() -> None:
    """S11: SGLang's draft takes the target's backend otherwise, which may be one for MLA."""
    card = card_of(KIMI)
    assert "--speculative-draft-attention-backend fa3" in card and '"attention_backend": "FLASH_ATTN"' in card


@pytest.mark.parametrize("config", [LLAMA, KIMI], ids=["llama", "kimi"])
def test_config_has_the_names_servers_know_and_no_optional_norm(config: dict) -> None:
    """S05, S06, S10: architecture, flags off under the servers' names, nothing of the target's quantisation."""
    target = Target("m", Path("m"), config | {"quantization_config": {"quant_method": "fp8"}}, (1,), "hash")
    described = config_json(derive(target, 320, [2, 18, 33]), target)
    (name,) = described["architectures"]
    vllm = Path(importlib.util.find_spec("vllm").origin).parent / "model_executor" / "models"
    assert f'"{name}": ("llama_eagle3"' in (vllm / "registry.py").read_text()
    reader = (vllm / "llama_eagle3.py").read_text()
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert described[flag] is False and f'"{flag}"' in reader
    assert "quantization_config" not in described and described["model_type"] == "llama"


@pytest.mark.parametrize("norms", [(), ("fc_norm", "norm_output")], ids=["eagle-3", "eagle-3.1"])
def test_the_export_opens_as_its_own_class_only(tiny_target: Path, tmp_path: Path, norms: tuple[str, ...]) -> None:
    """T02, S14: config.json loads strictly; weights go into our reader, tensor for tensor, not into a plain Llama."""
    target = open_target(str(tiny_target), weights=True)
    config = derive(target, target.vocab_size, [2, 4, 5], norms=norms)
    model = DraftModel(config)
    model.embed_tokens.copy_(read_embedding(target))
    tensors = export_tensors(model, {})
    write_export(tmp_path / "a", tensors, config_json(config, target), "card")
    loaded = AutoConfig.from_pretrained(tmp_path / "a")
    assert loaded.hidden_size == target.hidden_size and loaded.dtype == torch.bfloat16
    assert loaded.rope_parameters == json.loads((tmp_path / "a" / "config.json").read_text())["rope_parameters"]
    for key in ("fc_norm", "norm_output"):  # the second leaves no trace in the tensors
        with pytest.raises(UserError, match=f"{key} is {key in norms}, expected {key not in norms}"):
            read_export(tmp_path / "a", replace(config, **{key: key not in norms}))
    weights = read_export(tmp_path / "a", config).state_dict()
    assert all(torch.equal(weights[name], tensors[name]) for name in weights)
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert "fc.weight" in loading["unexpected_keys"] and "model.layers.0.mlp.up_proj.weight" in loading["missing_keys"]
    changed = ({"extra.weight": torch.ones(1)}, {"norm.weight": None})
    for number, change in enumerate(changed):
        kept = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        write_export(tmp_path / f"b{number}", kept, config_json(config, target), "card")
        with pytest.raises(RuntimeError, match=r"Unexpected key|Missing key"):
            read_export(tmp_path / f"b{number}", config)
