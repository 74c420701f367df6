"""The export's description: layer ids by server, rope in both forms, aux counts."""

from pathlib import Path

import pytest

from eagle3.draft.config import derive, rope_parameters
from eagle3.export import config_json
from eagle3.target import Target
from eagle3.terminal import UserError

YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
KIMI = {  # the text config of Kimi-K2.5 as far as a draft's shape goes
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "compressed-tensors"},
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "vocab_size": 1000,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "max_position_embeddings": 4096,
}


def described(config: dict, layers: list[int]) -> dict:
    target = Target("m", Path("m"), config, (1,), "hash")
    return config_json(derive(target, 320, layers), target)


def test_kimi_keeps_layer_ids_for_sglang_and_drops_mscale_and_quantisation() -> None:
    config = described(KIMI, [2, 30, 58])
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (64, 64, 128)
    assert config["rope_theta"] == 50000.0
    assert config["rope_parameters"] == config["rope_scaling"] | {"rope_theta": 50000.0}
    assert config["rope_scaling"] == {"rope_type": "yarn"} | {k: v for k, v in YARN.items() if k != "type"}
    assert "quantization_config" not in config and config["tie_word_embeddings"] is False
    with pytest.raises(UserError, match="start at 2"):
        described(KIMI, [1, 30, 58])


def test_llama_ids_are_one_less_for_sglang_and_head_dim_is_the_targets() -> None:
    config = described(LLAMA, [2, 18, 33])
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 18, 33]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 17, 32]
    assert config["head_dim"] == 128 and config["rope_scaling"] is None and config["rope_theta"] == 1e6
    assert config["vocab_size"] == 1000 and config["draft_vocab_size"] == 320
    assert "num_aux_hidden_states" not in config
    assert described(LLAMA, [2, 18])["num_aux_hidden_states"] == 2


def test_rope_is_read_in_every_form_and_unknown_types_are_refused() -> None:
    """T41: an unknown type is refused."""
    assert rope_parameters({}) == {"rope_type": "default", "rope_theta": 10000.0}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = rope_parameters({"rope_theta": 5e5, "rope_scaling": llama3})
    assert old == rope_parameters({"rope_parameters": llama3 | {"rope_theta": 5e5}}) == llama3 | {"rope_theta": 5e5}
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert rope_parameters({"rope_parameters": nested})["rope_theta"] == 1e6
    with pytest.raises(UserError, match="'made_up' is unknown"):
        rope_parameters({"rope_scaling": {"type": "made_up"}})
