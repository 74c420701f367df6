"""Kimi-K2.5 through all stages: the commands a user types, both engines, INT4, and which files are opened."""

import contextlib
import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from capture_for_tests import Altered, post_norm, replace_layer, settings_for, swap_layers
from conftest import REPOSITORY
from kimi_for_tests import NAMED, RESERVED
from safetensors.torch import save_file
from test_pipeline import pipeline

from eagle3 import artifacts, vllm_runtime
from eagle3.capture import canary, transformers_engine
from eagle3.capture.transformers_engine import TransformersEngine
from eagle3.draft.config import derive
from eagle3.export import config_json
from eagle3.target import (
    TargetHead,
    open_target,
    parse_tensor_names,
    read_embedding,
    read_final_norm,
    read_lm_head,
)
from eagle3.terminal import UserError

HEAD, EMBEDDING = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
SETTINGS = """
GPUS=1
PREPARE_ARGS=(--max-seq-len 256)
EXTRACT_ARGS=(--dtype float32)
VOCAB_ARGS=(--draft-vocab-size 512)
TRAIN_ARGS=(--epochs 2 --ttt-steps 3 --learning-rate 1e-3 --max-tokens 512 --val-fraction 0.3)
CHECK_ARGS=(--max-new-tokens 32)
"""

needs_vllm = pytest.mark.skipif(vllm_runtime.version() is None, reason="vllm is not installed")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def kimi_chats(tmp_path_factory) -> Path:
    """Eight conversations with reasoning, every second of two turns, and two with a tool call."""
    rows = []
    for n in range(8):
        asked = {"role": "user", "content": f"What is {n} plus {n}? Answer in one sentence."}
        said = {"role": "assistant", "content": f"That makes {2 * n}, an even number.", "reasoning_content": "A sum."}
        messages = [asked, said]
        if n % 4 == 1:
            call = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": {"a": n}}}
            messages.insert(1, {"role": "assistant", "reasoning_content": "I add.", "tool_calls": [call]})
            messages.insert(2, {"role": "tool", "tool_call_id": "functions.add:0", "content": str(2 * n)})
        if n % 2:
            messages += [{"role": "user", "content": "Doubled?"}, {"role": "assistant", "content": f"Then {4 * n}."}]
        rows.append({"messages": messages})
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def run(tiny_kimi, kimi_chats, tmp_path_factory) -> tuple[Path, str]:
    """All stages and the served check by the orchestrator; output directory and all that the terminal showed."""
    where = tmp_path_factory.mktemp("pipeline")
    (where / "kimi.env").write_text(SETTINGS)
    arguments = ["--model-path", tiny_kimi, "--dataset", kimi_chats, "--output-dir", "out", "--trust-remote-code"]
    result = pipeline("--config", where / "kimi.env", *arguments, cwd=where)
    assert result.returncode == 0, result.stdout + result.stderr
    return where / "out", result.stdout + result.stderr


def stage(script: str, *arguments: object) -> None:
    """A stage in this process."""
    before, sys.argv = sys.argv, [script, *map(str, arguments)]
    try:
        runpy.run_path(str(REPOSITORY / script), run_name="script")["main"]()
    finally:
        sys.argv = before


def states(directory: Path) -> list[torch.Tensor]:
    """aux_hidden and final_hidden of all samples in one row each."""
    samples = (
        artifacts.load_tensors(artifacts.sample_path(directory, i)) for i in artifacts.Index(directory).samples()
    )
    return [torch.cat([sample["aux_hidden"].flatten(), sample["final_hidden"].flatten()]) for sample in samples]


def largest_error(got: Path, want: Path) -> float:
    """Largest over the samples of ||got - want|| / ||want||."""
    pairs = list(zip(states(got), states(want), strict=True))
    assert pairs and all(a.dtype == b.dtype == torch.float32 for a, b in pairs)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


# -------------------------------------------------------------------------------------------- the pipeline


@needs_vllm
@pytest.mark.slow
def test_all_stages_and_a_served_draft(run, capsys):
    out, text = run
    report = json.loads((out / "draft" / "served_check.json").read_text())
    assert report["identical"] == report["prompts"] >= 2 and report["dtype"] == "float32" and report["drafts"] > 0
    captured = artifacts.read_manifest(out / "hidden_states", "02")
    assert captured["fingerprint"]["engine"] == "vllm" and captured["aux_layers"] == [2, 4, 5]
    assert captured["samples"] == 8 + 4 and not captured["failed"]  # a second turn after reasoning is a sample more
    with capsys.disabled():
        print(f"\n  Kimi, vLLM float32: {canary.describe(captured['canary'])}")
        print(f"  served: {report['identical']} of {report['prompts']} identical, tau {report['tau']}")
    for noise in ("Calling super", "Traceback", "WARNING", "FutureWarning", "Warning", "INFO", "Loading", "error"):
        assert noise not in text, [line for line in text.splitlines() if noise in line]


@needs_vllm
@pytest.mark.slow
def test_the_draft_is_described_for_kimi(run, tiny_kimi):
    out, _ = run
    described = json.loads((out / "draft" / "export" / "config.json").read_text())
    target = open_target(str(tiny_kimi))
    assert described["head_dim"] == 128  # v_head_dim; MLA has no other
    assert (described["num_attention_heads"], described["num_key_value_heads"]) == (2, 2)
    assert (described["vocab_size"], described["draft_vocab_size"]) == (target.vocab_size, 512)
    assert described["hidden_size"] == 64 and described["max_position_embeddings"] == 262144
    yarn = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0}
    assert described["rope_scaling"] == yarn and described["rope_theta"] == 50000.0
    assert described["rope_parameters"] == yarn | {"rope_theta": 50000.0}
    assert described["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert described["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # SGLang shifts none on Kimi
    assert "quantization_config" not in described
    vocabulary = artifacts.load_tensors(out / "vocab_map" / "vocab_map.pt")
    assert vocabulary["t2d"][[target.vocab_size - RESERVED + place for place in NAMED]].all()


@needs_vllm
@pytest.mark.slow
def test_transformers_gives_the_states_of_vllm(run, tiny_kimi, tmp_path, capsys, monkeypatch):
    out, _ = run
    load = transformers_engine._load

    def with_the_eps_of_vllm(settings):
        """Norms inside MLA: vLLM takes rms_norm_eps, transformers 1e-6 as Moonshot's own code (3e-5 in the states)."""
        model = load(settings)
        norms = [m for name, m in model.named_modules() if name.endswith(("q_a_layernorm", "kv_a_layernorm"))]
        assert len(norms) == 2 * 8 and {norm.variance_epsilon for norm in norms} == {1e-6}
        for norm in norms:
            norm.variance_epsilon = settings.target.config["rms_norm_eps"]
        return model

    monkeypatch.setattr(transformers_engine, "_load", with_the_eps_of_vllm)
    flags = ["--engine", "transformers", "--dtype", "float32", "--trust-remote-code"]
    stage(
        "02_extract_hidden_states.py",
        *("--model-path", tiny_kimi, "--prepared-dir", out / "prepared", "--output-dir", tmp_path / "states", *flags),
    )
    error = largest_error(tmp_path / "states", out / "hidden_states")
    report = artifacts.read_manifest(tmp_path / "states", "02")["canary"]
    with capsys.disabled():
        print(f"\n  Kimi, transformers float32: {canary.describe(report)}")
        print(f"  vLLM against transformers: largest relative error {error:.1e}")
    assert error < 1e-5


def test_the_canary_catches_broken_states_of_kimi(tiny_kimi, tmp_path):
    settings = settings_for(tiny_kimi, tmp_path)
    with contextlib.closing(TransformersEngine(settings)) as engine:
        prompts = [torch.randint(0, 600, (100,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 2)]
        assert canary.check(engine, settings, prompts)["argmax_clear"] > 150
        norm = read_final_norm(settings.target).float()
        for change, cause in (
            (post_norm(norm), "after the final norm"),
            (swap_layers(2, 3), "another order"),
            (replace_layer(3, by=2), "an old vLLM does for DeepSeek and Kimi targets"),  # id N dropped
        ):
            with pytest.raises(UserError, match=cause):
                canary.check(Altered(engine, change), settings, prompts)


# -------------------------------------------------------------------------------------------------- INT4


@pytest.mark.slow
def test_int4_gives_the_states_of_the_same_weights_unpacked(tiny_kimi_int4, kimi_chats, run_script, tmp_path, capsys):
    """With transformers: vLLM's CPU engine takes packed experts only where the processor has AMX."""
    captured = {}
    for model in tiny_kimi_int4:
        out = tmp_path / model.name
        common = ["--model-path", model, "--trust-remote-code"]
        stage("01_prepare_dataset.py", *common, "--output-dir", out / "prepared", "--dataset", kimi_chats)
        captured[model] = [*common, "--prepared-dir", out / "prepared", "--output-dir", out / "states"]
        captured[model] += ["--engine", "transformers", "--dtype", "float32"]
    packed, unpacked = tiny_kimi_int4
    result = run_script("02_extract_hidden_states.py", *captured[packed])
    stage("02_extract_hidden_states.py", *captured[unpacked])
    error = largest_error(tmp_path / packed.name / "states", tmp_path / unpacked.name / "states")
    report = artifacts.read_manifest(tmp_path / packed.name / "states", "02")["canary"]
    with capsys.disabled():
        print(f"\n  Kimi INT4, transformers float32: {canary.describe(report)}")
        print(f"  INT4 against unpacked: largest relative error {error:.1e}")
    assert error < 1e-6
    targets = [open_target(str(model)) for model in (packed, unpacked)]
    assert targets[0].config_hash != targets[1].config_hash
    described = [config_json(derive(target, 512, [2, 4, 5]), target) for target in targets]
    assert described[0] == described[1]  # quantisation is the target's alone
    assert [line for line in result.stderr.splitlines() if line and "capture:" not in line] == []


# ------------------------------------------------------------------------------------- embedding, norm, head


def tensors_of(directory: Path) -> tuple[torch.Tensor, ...]:
    target = open_target(str(directory))
    return read_embedding(target), read_final_norm(target), read_lm_head(target)


@pytest.mark.parametrize("fate", ["removed", "damaged"])
def test_only_the_shard_with_embedding_norm_and_head_is_opened(tiny_kimi, tmp_path, fate):
    """T09: a shard that cannot be read is named."""
    directory = shutil.copytree(tiny_kimi, tmp_path / "kimi")
    shards = sorted(directory.glob("model-*.safetensors"))
    assert len(shards) == 11
    for number, shard in enumerate(shards, 1):
        if number == 9:
            continue
        if fate == "removed":
            shard.unlink()
        else:
            shard.write_bytes(b"not safetensors")
    want = tensors_of(tiny_kimi)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(directory), want, strict=True))
    logits = TargetHead(open_target(str(directory)), torch.float32, "cpu")(torch.ones(1, 64))
    assert logits.shape == (1, len(want[0]))
    shards[8].write_bytes(b"not safetensors")
    with pytest.raises(UserError, match=rf"{shards[8].name}: cannot read {EMBEDDING} .*; fetch it again"):
        tensors_of(directory)


NAMES = {  # prefix of embedding and norm, prefix of lm_head
    "Kimi": ("language_model.model.", "language_model."),
    "Llama": ("model.", ""),
    "no prefix": ("", ""),
    "transformers 5 multimodal": ("model.language_model.", ""),
}


def write_names(directory: Path, names: dict[str, torch.Tensor], **config: object) -> Path:
    """A model directory of one shard with these tensors, [8, 4] but for the norm, and of layers nowhere."""
    directory.mkdir()
    described = {"model_type": "llama", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 2} | config
    (directory / "config.json").write_text(json.dumps(described))
    save_file(names, directory / "a.safetensors")
    elsewhere = ["layers.0.input_layernorm.weight", "layers.2.embed_tokens.weight", "layers.2.shared_head.norm.weight"]
    index = dict.fromkeys(names, "a.safetensors") | {f"model.{name}": "b.safetensors" for name in elsewhere}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return directory


@pytest.mark.parametrize("names", NAMES)
def test_whatever_the_prefix(names, tmp_path):
    """T05: found by itself."""
    decoder, head = NAMES[names]
    tensors = {f"{decoder}embed_tokens.weight": torch.rand(8, 4), f"{decoder}norm.weight": torch.rand(4)}
    tensors |= {f"{head}lm_head.weight": torch.rand(8, 4), "vision_tower.norm.weight": torch.rand(7)}
    read = tensors_of(write_names(tmp_path / "target", tensors))
    assert all(torch.equal(a, b) for a, b in zip(read, tensors.values(), strict=False))


def test_missing_and_ambiguous_names_list_the_candidates(tmp_path):
    """T05, T06: and the flag that names one."""
    embedding, norm = {"model.embed_tokens.weight": torch.rand(8, 4)}, {"model.norm.weight": torch.rand(4)}
    twice = write_names(tmp_path / "twice", {**embedding, "audio.embed_tokens.weight": torch.rand(8, 4)})
    with pytest.raises(UserError) as ambiguous:
        read_embedding(open_target(str(twice)))
    assert str(ambiguous.value) == (
        f"{twice}: 2 tensors ...embed_tokens.weight, expected one; "
        "candidates: model.embed_tokens.weight, audio.embed_tokens.weight; "
        "name it with --tensor embed_tokens=NAME (stages 02 and 04)"
    )
    bare = write_names(tmp_path / "bare", {**embedding, "model.final_norm.weight": torch.rand(4)})
    with pytest.raises(UserError, match=r"0 tensors model.norm.weight, expected one; .*model.final_norm.weight;"):
        read_final_norm(open_target(str(bare)))
    headless = write_names(tmp_path / "headless", embedding | norm, tie_word_embeddings=False)
    with pytest.raises(UserError, match=r"0 tensors ...lm_head.weight, expected one \(config.json does not tie it"):
        read_lm_head(open_target(str(headless)))


def test_names_that_cannot_be_guessed_are_stated(tmp_path):
    """T06: for a backbone that names its embedding and norm in its own way."""
    tensors = {"backbone.embeddings.weight": torch.rand(8, 4), "backbone.norm_f.weight": torch.rand(4)}
    directory = write_names(tmp_path / "target", tensors, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"candidates: backbone.embeddings.weight, backbone.norm_f.weight; name it"):
        read_embedding(open_target(str(directory)))
    names = parse_tensor_names(["embed_tokens=backbone.embeddings.weight", "norm=backbone.norm_f.weight"])
    target = open_target(str(directory), tensor_names=names)
    embedding, norm = tensors.values()
    assert torch.equal(read_embedding(target), embedding) and torch.equal(read_final_norm(target), norm)
    assert torch.equal(read_lm_head(target), embedding)
    with pytest.raises(UserError, match=r"--tensor lm_head=nowhere: .* has no tensor of that name"):
        read_lm_head(open_target(str(directory), tensor_names={"lm_head": "nowhere"}))
    for text in ("head=x", "norm", "norm="):
        with pytest.raises(UserError, match=f"--tensor {text}: expected one of embed_tokens=NAME, norm=NAME, lm_head="):
            parse_tensor_names([text])


@pytest.mark.parametrize(
    ("top", "text", "tied"),
    [
        ({"tie_word_embeddings": True}, {}, True),
        ({}, {"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, True),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": False}, False),
        ({}, {}, False),
    ],
)
def test_the_head_is_the_checkpoint_s_own_or_what_the_config_ties(tmp_path, top, text, tied):
    """T08: the flag may sit in text_config alone."""
    tensors = {EMBEDDING: torch.rand(8, 4), HEAD: torch.rand(8, 4)}
    shape = {"model_type": "kimi_k2", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 2}
    config = {"model_type": "kimi_k25", "text_config": shape | text, **top}
    both = open_target(str(write_names(tmp_path / "both", tensors, **config)))
    assert torch.equal(read_lm_head(both), tensors[HEAD])  # as transformers 5 and vLLM do
    headless = open_target(str(write_names(tmp_path / "headless", {EMBEDDING: tensors[EMBEDDING]}, **config)))
    if tied:
        assert torch.equal(read_lm_head(headless), tensors[EMBEDDING])
    else:
        with pytest.raises(UserError, match="0 tensors"):
            read_lm_head(headless)
