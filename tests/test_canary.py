"""The canary against captures that are broken on purpose; tests/test_capture.py has it on vLLM."""

import dataclasses
import json
import shutil

import pytest
import torch
from capture_for_tests import Altered, post_norm, random_prompts, replace_layer, settings_for, swap_layers

from eagle3.capture import canary
from eagle3.capture.interface import EngineSettings
from eagle3.capture.transformers_engine import TransformersEngine
from eagle3.terminal import UserError


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
    from safetensors.torch import load_file, save_file

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
