"""The canary against captures that are broken on purpose; tests/test_capture.py has it on vLLM."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from capture_for_tests import Altered, post_norm, random_prompts, replace_layer, settings_for, swap_layers
from safetensors.torch import load_file, save_file
from structures_for_tests import STRUCTURES, VOCAB, random_ids, write_structure

from eagle3 import target as target_module
from eagle3.capture import canary
from eagle3.capture.interface import EngineSettings
from eagle3.capture.transformers_engine import TransformersEngine
from eagle3.target import TargetHead, read_embedding, read_lm_head
from eagle3.terminal import UserError

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_ids([100, 100])


@pytest.fixture
def tiny_engine(tiny_target, tmp_path) -> tuple[TransformersEngine, EngineSettings]:
    settings = settings_for(tiny_target, tmp_path / "engine", layers=(2, 4, 7, 8))  # 7 is the one before N
    return TransformersEngine(settings), settings


def test_canary_passes_and_reports_what_it_compared(tiny_engine):
    engine, settings = tiny_engine
    report = canary.check(engine, settings, random_prompts([100, 100, 100]))
    assert report["positions"] == 297 and report["argmax_equal"] == report["argmax_clear"] > 100
    assert report["mean"] < 1e-6
    assert list(report["state_rms"]) == ["2", "4", "7", "8"] and report["state_max"] > 0
    json.dumps(report)


def test_canary_catches_a_layer_off_by_one(tiny_engine):
    engine, settings = tiny_engine
    with pytest.raises(UserError, match=r"state 8 do not give transformers.*drops or shifts.*nothing was extracted"):
        canary.check(Altered(engine, replace_layer(3, by=2)), settings, random_prompts([100]))


def test_canary_catches_a_norm_applied_already(tiny_engine):
    engine, settings = tiny_engine
    norm = canary.TargetHead(settings.target, torch.float32, "cpu").norm
    with pytest.raises(UserError, match="after the final norm instead of before"):
        canary.check(Altered(engine, post_norm(norm)), settings, random_prompts([100]))


def test_canary_catches_layers_in_another_order(tiny_engine):
    engine, settings = tiny_engine
    with pytest.raises(UserError, match="another order, the last one stands in place of layer 4"):
        canary.check(Altered(engine, swap_layers(1, 3)), settings, random_prompts([100]))


def test_canary_catches_equal_aux_layers(tiny_engine):
    engine, settings = tiny_engine
    with pytest.raises(UserError, match="same states for layers 2 and 4"):
        canary.check(Altered(engine, replace_layer(1, by=0)), settings, random_prompts([100]))


def test_canary_catches_states_of_the_next_row(tiny_engine):
    engine, settings = tiny_engine
    with pytest.raises(UserError, match="do not give"):
        canary.check(Altered(engine, lambda states: states.roll(1, 0)), settings, random_prompts([100]))


def test_canary_catches_the_head_of_another_model(tiny_engine, tiny_target, tmp_path):
    engine, settings = tiny_engine
    other = shutil.copytree(tiny_target, tmp_path / "other")
    index = json.loads((other / "model.safetensors.index.json").read_text())
    shard = other / index["weight_map"]["lm_head.weight"]
    tensors = load_file(shard)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)
    save_file(tensors, shard)
    settings = dataclasses.replace(settings, target=dataclasses.replace(settings.target, directory=other))
    with pytest.raises(UserError, match="not the ones that the engine runs"):
        canary.check(engine, settings, random_prompts([100]))


def test_canary_takes_whole_prompts_until_it_has_enough_positions():
    chosen = canary.choose_prompts(random_prompts([1, 50, 300, 300, 300, 300]))
    assert [len(prompt) for prompt in chosen] == [50, 128, 128, 128]
    with pytest.raises(UserError, match="two tokens"):
        canary.choose_prompts(random_prompts([1, 1]))


# --------------------------------------------------------------------------------- faults on every structure


def engine_of(directory: Path, dtype: str = "float32") -> tuple[TransformersEngine, EngineSettings]:
    settings = settings_for(directory, directory.parent / "out", layers=(2, 4, 7, 8), dtype=dtype)
    return TransformersEngine(settings), settings


@pytest.fixture(
    scope="module", params=[(name, dtype) for name in STRUCTURES for dtype in canary.TOLERANCE], ids="-".join
)
def structure(request, tmp_path_factory) -> tuple[TransformersEngine, EngineSettings]:
    """Each structure of target in each dtype, captured soundly: the canary is content."""
    name, dtype = request.param
    directory = write_structure(name, tmp_path_factory.mktemp("structure") / "target", getattr(torch, dtype))
    engine, settings = engine_of(directory, dtype)
    assert canary.check(engine, settings, PROMPTS)["mean"] < canary.TOLERANCE[dtype] / 5
    return engine, settings


def must_fail(engine: TransformersEngine | Altered, settings: EngineSettings) -> None:
    with pytest.raises(UserError, match=r"canary: .* do not give transformers .*; nothing was extracted"):
        canary.check(engine, settings, PROMPTS)


def without(settings: EngineSettings, key: str) -> EngineSettings:
    """The same target, whose config does not say `key`."""
    config = dict(settings.target.config)
    assert config.pop(key)
    return dataclasses.replace(settings, target=dataclasses.replace(settings.target, config=config))


def test_a_layer_off_by_one(structure):
    engine, settings = structure
    must_fail(Altered(engine, replace_layer(3, by=2)), settings)


def test_a_norm_applied_twice(structure):
    """H09: the engine gives the state after the norm, and the teacher norms it again."""
    engine, settings = structure
    norm = TargetHead(settings.target, torch.float32, "cpu").norm
    must_fail(Altered(engine, post_norm(norm)), settings)


def test_a_norm_never_applied(structure, monkeypatch):
    """H09: the teacher multiplies the state with lm_head as it is."""

    class WithoutNorm(TargetHead):
        def __call__(self, states: torch.Tensor) -> torch.Tensor:
            logits = states.float() @ self.weight.T * self.scale
            return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    engine, settings = structure
    monkeypatch.setattr(canary, "TargetHead", WithoutNorm)
    must_fail(engine, settings)


def test_another_lm_head(structure, monkeypatch):
    engine, settings = structure
    monkeypatch.setattr(target_module, "read_lm_head", lambda target: read_lm_head(target).roll(1, 0))
    must_fail(engine, settings)


# ------------------------------------------------------------------ faults that only some structures can have


@pytest.mark.parametrize(
    ("name", "taken_for"), [("gemma2", ()), ("gemma3-vision", ()), ("llama", ("llama",)), ("gemma4", ("gemma4_text",))]
)
def test_a_norm_of_the_other_kind(name, taken_for, tmp_path, monkeypatch):
    """Gemma's 1 + weight taken for the weight alone, and the reverse."""
    engine, settings = engine_of(write_structure(name, tmp_path / "target"))
    monkeypatch.setattr(target_module, "NORMS_PLUS_ONE", taken_for)
    must_fail(engine, settings)


def test_a_logit_scale_ignored(tmp_path):
    engine, settings = engine_of(write_structure("granite", tmp_path / "target"))
    must_fail(engine, without(settings, "logits_scaling"))


@pytest.mark.parametrize("name", ["gemma2", "gemma4"])
def test_a_softcap_ignored(name, tmp_path):
    engine, settings = engine_of(write_structure(name, tmp_path / "target"))
    must_fail(engine, without(settings, "final_logit_softcapping"))


def test_a_head_that_the_config_ties_and_the_checkpoint_does_not(tmp_path, monkeypatch):
    """transformers runs the checkpoint's lm_head, whatever the config says: so must the teacher."""
    directory = write_structure("llama", tmp_path / "target")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    engine, settings = engine_of(directory)
    assert settings.target.tied_embeddings
    assert canary.check(engine, settings, PROMPTS)["mean"] < 1e-6
    monkeypatch.setattr(target_module, "read_lm_head", read_embedding)
    must_fail(engine, settings)


# ------------------------------------------------------------------------------------------------ near ties


def test_tokens_closer_than_bfloat16_tells_apart_are_no_fault(tmp_path, capsys):
    """Most tokens have a twin with the same row of lm_head, and two with rows that are one bit smaller."""
    directory = write_structure("llama", tmp_path / "target", torch.bfloat16)
    tensors = load_file(directory / "model.safetensors")
    rows = tensors["lm_head.weight"][: VOCAB * 3 // 4]
    rows[1::4] = rows[0::4]
    rows[2::4] = rows[3::4] = (rows[0::4].float() * (1 - 2**-8)).bfloat16()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    engine, settings = engine_of(directory, "bfloat16")
    best = torch.cat([one.top_logprobs for one in engine.score(PROMPTS, 4)])  # [P, 4]
    tied = int((best[:, 0] == best[:, 1]).sum())
    assert 50 < tied < 150
    report = canary.check(engine, settings, PROMPTS)
    with capsys.disabled():
        print(f"\n  canary, bfloat16, the best two equal at {tied} positions: {canary.describe(report)}")
    assert 20 < report["argmax_clear"] <= 198 - tied
