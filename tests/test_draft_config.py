"""The draft's shape: derived for the families of targets, and stated by a file."""

import json
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from rescore import inverse_frequencies
from test_export import KIMI, LLAMA
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3.draft.config import derive, read_draft_config
from eagle3.draft.model import DraftModel
from eagle3.export import config_json
from eagle3.target import Target, open_target
from eagle3.terminal import UserError

KIMI_FILE = REPOSITORY / "configs/drafts/kimi_k25.json"
QWEN3 = {  # 8B
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
}
DEEPSEEK = {  # V3
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "vocab_size": 129280,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0},
    "max_position_embeddings": 163840,
}
SMALL_LLAMA = {key: value for key, value in LLAMA.items() if key not in ("head_dim", "num_key_value_heads")}


def target_of(config: dict) -> Target:
    return Target("m", Path("m"), config, (1,), "hash")


@pytest.mark.parametrize(
    ("config", "heads", "kv_heads", "head_dim", "width", "theta"),
    [
        (LLAMA, 32, 8, 128, 9728, 1e6),
        (SMALL_LLAMA, 32, 32, 80, 9728, 1e6),
        (QWEN3, 32, 8, 128, 12288, 1e6),
        (DEEPSEEK, 128, 128, 128, 18432, 1e4),  # not its head_dim, which is the rope part
        (KIMI, 64, 64, 128, 18432, 5e4),
    ],
)
def test_derived_shape(config: dict, heads: int, kv_heads: int, head_dim: int, width: int, theta: float) -> None:
    """T03: head_dim is the target's, hidden / heads only where it states none."""
    draft = derive(target_of(config), 320, [2, 18, 33])
    assert (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim) == (heads, kv_heads, head_dim)
    assert (draft.intermediate_size, draft.rope["rope_theta"]) == (width, theta)
    assert draft.hidden_size == config["hidden_size"] and draft.vocab_size == config["vocab_size"]
    assert draft.max_position_embeddings == config["max_position_embeddings"]
    assert not {"mscale", "mscale_all_dim", "type"} & draft.rope.keys()


ROPES = {
    "default": None,
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0},
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("theta", [1e6, 5e4])
def test_training_and_export_turn_as_transformers_does(kind: str, theta: float) -> None:
    """T39, T40, T41: theta and scaling of the target's config, in training and in what is exported; two of the kinds
    are also computed here anew."""
    scaling = {"rope_type": kind} | ROPES[kind] if ROPES[kind] else None
    old = LLAMA | {"max_position_embeddings": 131072, "hidden_size": 64, "intermediate_size": 64}
    old |= {"rope_parameters": None, "rope_theta": theta, "rope_scaling": scaling}
    target = target_of(old)
    config = derive(target, 320, [2, 18, 33])
    trained, described = DraftModel(config)._rotary[0], config_json(config, target)
    theirs = {key: old[key] for key in ("rope_theta", "rope_scaling", "head_dim", "max_position_embeddings")}
    for wanted in (LlamaConfig(**theirs), LlamaConfig(**described)):
        rotary = LlamaRotaryEmbedding(wanted)
        assert torch.equal(trained.inv_freq, rotary.inv_freq) and trained.attention_scaling == rotary.attention_scaling
    if kind in ("default", "yarn"):
        frequencies, factor = inverse_frequencies(described)
        torch.testing.assert_close(trained.inv_freq, frequencies)
        assert trained.attention_scaling == pytest.approx(factor)
    assert (described["rope_scaling"] or {}).get("factor") == (scaling or {}).get("factor")


def test_nested_configs_give_the_text_model(tmp_path: Path) -> None:
    """T08: sizes and rope are those of text_config."""
    whole = {"model_type": "some_vision_model", "architectures": ["Wrapper"], "hidden_size": 9, "text_config": QWEN3}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    target = open_target(str(tmp_path))
    assert derive(target, 320, [2, 18, 33]) == derive(target_of(QWEN3), 320, [2, 18, 33])
    assert target.architectures == ["Wrapper"] and target.name == str(tmp_path)


def test_the_kimi_file_states_the_published_shape() -> None:
    draft = derive(target_of(KIMI | {"rms_norm_eps": 1e-5}), 32000, [2, 30, 58], read_draft_config(KIMI_FILE))
    assert (draft.hidden_size, draft.intermediate_size, draft.head_dim) == (7168, 12288, 128)
    assert (draft.num_attention_heads, draft.num_key_value_heads) == (64, 64)
    assert (draft.rms_norm_eps, draft.max_position_embeddings, draft.draft_vocab_size) == (1e-6, 262144, 32000)
    assert draft.rope == {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }


@pytest.mark.parametrize(
    ("size", "layers", "line"),
    [
        (16000, [2, 30, 58], "draft_vocab_size is 32000, this run has 16000"),
        (32000, [2, 30, 57], r"eagle_aux_hidden_state_layer_ids is \[2, 30, 58\], this run has \[2, 30, 57\]"),
    ],
)
def test_a_file_for_another_run_is_refused(size: int, layers: list[int], line: str) -> None:
    with pytest.raises(UserError, match=line):
        derive(target_of(KIMI), size, layers, read_draft_config(KIMI_FILE))
    with pytest.raises(UserError, match="hidden_size is 7168, this run has 2560"):
        derive(target_of(LLAMA), 32000, [2, 30, 58], read_draft_config(KIMI_FILE))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"intermediat_size": 4}', "unknown keys intermediat_size; known: intermediate_size, num_attention_heads"),
        ('{"num_attention_heads": "64"}', "num_attention_heads is '64', expected a positive integer"),
        ('{"rms_norm_eps": 1}', "rms_norm_eps is 1, expected a number such as 1e-6"),
        ('{"fc_norm": 1}', "fc_norm is 1, expected true or false"),
        ('{"norm_output": null}', "norm_output is None, expected true or false"),
        ('{"rope_scaling": {"rope_type": "yarn"}}', "rope_scaling without rope_theta"),
        ("[]", "expected a JSON object, found list"),
        ("{", "Expecting property name"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, text: str, line: str) -> None:
    """T44: a misspelt key is an error."""
    path = tmp_path / "draft.json"
    path.write_text(text)
    with pytest.raises(UserError, match=line):
        read_draft_config(path)


@pytest.mark.parametrize("key", ["fc_norm", "norm_output"])
def test_a_norm_is_on_by_file_or_flag_and_they_must_not_contradict(key: str) -> None:
    def norms(stated: dict, *flags: str) -> tuple[bool, bool]:
        draft = derive(target_of(LLAMA), 320, [2, 18, 33], stated, flags)
        return draft.fc_norm, draft.norm_output

    on = (key == "fc_norm", key == "norm_output")
    assert norms({key: True}) == norms({}, key) == norms({key: True}, key) == on
    assert norms({key: False}) == norms({}) == (False, False)
    flag = f"--{key.replace('_', '-')}"
    with pytest.raises(UserError, match=f"{flag} contradicts --draft-config, where {key} is false; drop one"):
        norms({key: False}, key)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="no draft has 32 heads, 7 key/value heads and head_dim 128"):
        derive(target_of(LLAMA), 320, [2, 18, 33], {"num_key_value_heads": 7})
