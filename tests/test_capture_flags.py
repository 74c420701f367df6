"""Stage 02's flags: layer ids, arguments for vLLM, ranges; what vLLM is started with."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_for_tests import random_prompts, settings_for, write_prepared
from conftest import REPOSITORY

from eagle3.capture import engines, extract
from eagle3.capture.vllm_engine import engine_arguments
from eagle3.target import parse_aux_layers
from eagle3.terminal import UserError

SCRIPT = REPOSITORY / "02_extract_hidden_states.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """What the script defines."""
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def given(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The parsed arguments of a command line."""

    def parse(*flags: str) -> Any:
        required = ["--model-path", "m", "--prepared-dir", "p", "--output-dir", "o"]
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *required, *flags])
        return script["parse_arguments"]()

    return parse


# ------------------------------------------------------------------------------------------------ layer ids


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--aux-layers", "default"],
        ["--aux-layers", "2,30,58"],
        ["--aux-layers", "[2, 30, 58]"],
        ["--aux-layers", "2, 30, 58"],
        ["--aux-layers", "2 30 58"],
        ["--aux-layers", "2", "30", "58"],
        ["--aux-layers", "58,2,30"],
        ["--aux-layers", "2,30,-3"],
        ["--aux-layers=-59,-31,-3"],
        ["--aux-layers", "-59", "-31", "-3"],
        ["--aux-layers", "-59, -31, -3"],
    ],
)
def test_every_form_of_the_layers_gives_the_same_ids(given: Callable, flags: list[str]) -> None:
    """Case H23, 61 layers."""
    assert parse_aux_layers(given(*flags).aux_layers, 61) == [2, 30, 58]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("low,mid,high", "--aux-layers 'low,mid,high': expected integers such as 2,15,27, or default"),
        ("2,30,5.5", "--aux-layers '2,30,5.5': expected integers"),
        ("", r"--aux-layers '': expected different ids in 1\.\.60"),
        ("2,30,61", r"expected different ids in 1\.\.60"),  # what enters no layer is the final state
        ("0,30,58", r"expected different ids in 1\.\.60"),
        ("2,30,-62", r"expected different ids in 1\.\.60"),
        ("58,2,-3", r"expected different ids in 1\.\.60"),  # 58 twice
    ],
)
def test_layers_that_cannot_be_are_refused_in_a_line(given: Callable, text: str, line: str) -> None:
    """Case H23."""
    with pytest.raises(UserError, match=line) as error:
        parse_aux_layers(given("--aux-layers", text).aux_layers, 61)
    assert "\n" not in str(error.value)


# ----------------------------------------------------------------------------------------- vLLM's arguments


def test_engine_arguments_are_json_where_they_can_be(script: dict[str, Any]) -> None:
    assert script["parse_engine_arguments"](
        [
            "max_num_batched_tokens=16384",
            "--enable-expert-parallel=true",
            "enforce_eager=False",
            "quantization=None",
            "kv_cache_dtype=auto",
            'compilation_config={"custom_ops": ["none"]}',
            "hf_overrides=a=b",
            "pipeline_parallel_size=1",
        ]
    ) == {
        "max_num_batched_tokens": 16384,
        "enable_expert_parallel": True,
        "enforce_eager": False,
        "quantization": None,
        "kv_cache_dtype": "auto",
        "compilation_config": {"custom_ops": ["none"]},
        "hf_overrides": "a=b",
        "pipeline_parallel_size": 1,
    }


@pytest.mark.parametrize(
    ("pair", "line"),
    [
        ("max_num_seqs", "--engine-arg max_num_seqs: expected KEY=VALUE, such as max_num_batched_tokens=16384"),
        ("=3", "--engine-arg =3: expected KEY=VALUE"),
        ("a b=3", "--engine-arg a b=3: expected KEY=VALUE"),
        ("tensor-parallel-size=2", "--engine-arg tensor_parallel_size: set by --tensor-parallel-size"),
        ("model=other", "--engine-arg model: set by --model-path"),
        ("max_model_len=4096", "--engine-arg max_model_len: set by the longest sample"),
        ("enable_prefix_caching=true", "--engine-arg enable_prefix_caching: set by the capture: states of cached"),
        ("pipeline_parallel_size=2", "--engine-arg pipeline_parallel_size=2: not supported, nobody has verified"),
        ("data_parallel_size=8", "--engine-arg data_parallel_size=8: not supported, one engine a shard: use --num-sh"),
    ],
)
def test_engine_arguments_that_would_break_the_capture(script: dict[str, Any], pair: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        script["parse_engine_arguments"]([pair])
    assert str(error.value).startswith(line)


def test_engine_arguments_are_vllms_alone(tiny_target: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(engines, "open_engine", lambda *_: pytest.fail("the engine was loaded"))
    settings = settings_for(tiny_target, tmp_path / "out", engine_arguments={"max_num_seqs": 3})
    prepared = write_prepared(tmp_path / "prepared", tiny_target, random_prompts([20]))
    with pytest.raises(UserError, match="--engine-arg max_num_seqs: for vLLM, the engine is transformers"):
        extract.extract(prepared, "transformers", settings)


@pytest.mark.parametrize("longest", [128, 1023, 1024, 8191, 8192, 262144])
@pytest.mark.parametrize("gpu", [False, True])
def test_each_prompt_is_computed_in_one_pass_whatever_its_length(
    tiny_target: Path, tmp_path: Path, monkeypatch, capsys, longest: int, gpu: bool
) -> None:
    """Cases H04 (no prompt in pieces, and the log says so) and H05 (room for one more token than the longest has)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    arguments = engine_arguments(settings_for(tiny_target, tmp_path), longest)
    assert arguments["max_model_len"] == longest + 1
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] >= longest + 1
    assert ("gpu_memory_utilization" in arguments) is gpu
    tokens = arguments["max_num_batched_tokens"]
    said = f"vllm: each prompt in one pass (chunked prefill off), up to {tokens} tokens a pass\n"
    assert capsys.readouterr() == (said, "")


def test_the_user_may_choose_how_prompts_are_computed(tiny_target: Path, tmp_path: Path, capsys) -> None:
    """Case H04."""

    def arguments(**given) -> dict[str, Any]:
        return engine_arguments(settings_for(tiny_target, tmp_path, engine_arguments=given), 5000)

    assert arguments(max_num_batched_tokens=5001, max_num_seqs=2)["max_num_seqs"] == 2
    assert "up to 5001 tokens a pass" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"max_num_batched_tokens=5000: the longest prompt takes 5001, .* 5001 or more"):
        arguments(max_num_batched_tokens=5000)
    for value in ("many", 0, None):
        with pytest.raises(UserError, match=f"max_num_batched_tokens={value}: expected a positive number"):
            arguments(max_num_batched_tokens=value)
    pieces = arguments(enable_chunked_prefill=True, max_num_batched_tokens=2048)
    assert pieces["enable_chunked_prefill"] and pieces["max_num_batched_tokens"] == 2048
    output, warning = capsys.readouterr()
    assert "one pass" not in output and "prompts are computed in pieces, in which some models' numbers" in warning


# --------------------------------------------------------------------------------------------------- ranges


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--num-shards", "2", "--shard-index", "2"], "--shard-index 2 --num-shards 2: expected an index from 0 to"),
        (["--shard-index", "-1"], "--shard-index -1 --num-shards 1: expected an index"),
        (["--max-disk-gb", "0"], "--max-disk-gb 0.0: expected a positive number"),
        (["--max-failed", "1.5"], "--max-failed 1.5: expected a share between 0 and 1"),
        (["--batch-tokens", "0"], "--batch-tokens 0: expected a positive number"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size 0: .* GPUs are visible"),
        (["--tensor-parallel-size", "64"], r"--tensor-parallel-size 64: \d+ GPUs are visible"),
    ],
)
def test_flags_out_of_range(script: dict[str, Any], given: Callable, flags: list[str], line: str) -> None:
    given(*flags)
    with pytest.raises(UserError, match=line):
        script["main"]()
