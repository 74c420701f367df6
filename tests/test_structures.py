"""Stage 02 on every structure of target: both engines, their canary, and the teacher that training computes."""

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch
from capture_for_tests import samples_of, settings_for
from structures_for_tests import STRUCTURES, random_ids, write_structure

from eagle3 import artifacts, vllm_runtime
from eagle3.capture import canary
from eagle3.capture.interface import Engine, EngineSettings, Written
from eagle3.capture.transformers_engine import TransformersEngine
from eagle3.draft.config import derive
from eagle3.target import NORMS_PLUS_ONE, TargetHead, default_aux_layers, open_target, parse_aux_layers

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_ids([100, 80, 61])
# Not with vLLM: the tied Llama, since SmolLM2 is one (tests/test_capture.py), and Granite, to save the time; Gemma-2
# and Gemma-3, for vLLM 0.32 gives no aux states of theirs; the models with vision, for vLLM's code of them imports
# torchvision, and there is none beside the CPU's torch (Kimi-K2.5 does without: tests/test_kimi.py).
WITH_VLLM = ("llama", "qwen3", "deepseek-v3", "gemma4")
CHEAP = {  # one process less to start than on a real run, nothing but token ids, a small cache
    "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_seqs": 8,
}


def captured(engine: Engine, settings: EngineSettings) -> list[dict[str, torch.Tensor]]:
    """The files that the engine writes of PROMPTS."""
    outcomes = [outcome for _, outcome in engine.capture(samples_of(PROMPTS))]
    assert len(outcomes) == len(PROMPTS) and all(isinstance(outcome, Written) for outcome in outcomes)
    paths = [artifacts.sample_path(settings.output_dir, i) for i in range(len(PROMPTS))]
    return [artifacts.load_tensors(path) for path in paths]


def layers_of(sample: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The states of each layer; the last of them at supervised positions alone."""
    return [*sample["aux_hidden"].unflatten(1, (-1, 64)).unbind(1), sample["final_hidden"]]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||, of the same shape and dtype."""
    assert got.shape == want.shape and got.dtype == want.dtype
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("name", STRUCTURES)
def test_states_are_those_entering_the_layers_and_the_teacher_gives_the_models_logits(name, tmp_path):
    """H09, H10: id i enters layer i; TargetHead of the stored state N is the model's own distribution."""
    import transformers

    directory = write_structure(name, tmp_path / "target")
    settings = settings_for(directory, tmp_path / "out")
    assert settings.layout.layers == (2, 4, 5, 8)
    with contextlib.closing(TransformersEngine(settings)) as engine:
        assert canary.check(engine, settings, PROMPTS)["argmax_clear"] > 200
        samples = captured(engine, settings)

    model_class = getattr(transformers, settings.target.architectures[0])
    model = model_class.from_pretrained(directory, dtype=torch.float32).eval()
    head = TargetHead(settings.target, torch.float32, "cpu")
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        with torch.inference_mode():
            output = model(input_ids=torch.tensor([prompt]), output_hidden_states=True)
        *aux, final = layers_of(sample)
        for layer, states in zip(settings.layout.layers[:-1], aux, strict=True):
            assert relative_error(states, output.hidden_states[layer][0]) < 1e-5
        want = output.logits[0, sample["loss_mask"]]  # [S, V]
        got = head(final)
        assert torch.equal(got.argmax(-1), want.argmax(-1))
        assert (got - want).abs().max() < 1e-3


@pytest.mark.skipif(vllm_runtime.version() is None, reason="vllm is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_VLLM)
def test_vllm_gives_the_states_of_transformers(name, tmp_path, capsys):
    from eagle3.capture.vllm_engine import VllmEngine

    directory = write_structure(name, tmp_path / "target")
    ours = settings_for(directory, tmp_path / "transformers")
    with contextlib.closing(TransformersEngine(ours)) as engine:
        want = captured(engine, ours)
    theirs = settings_for(directory, tmp_path / "vllm", engine_arguments=CHEAP)
    with contextlib.closing(VllmEngine(theirs, longest=max(map(len, PROMPTS)))) as engine:
        report = canary.check(engine, theirs, PROMPTS)
        got = captured(engine, theirs)
    errors = [
        max(relative_error(*pair) for pair in zip(layers_of(one), layers_of(other), strict=True))
        for one, other in zip(got, want, strict=True)
    ]
    with capsys.disabled():
        print(f"\n  {name}: vLLM against transformers {max(errors):.1e}; canary on vLLM {canary.describe(report)}")
    assert max(errors) < 1e-4


# ------------------------------------------------------------------------------------------- target facts


def test_default_aux_layers_are_a_low_a_middle_and_a_high_one():
    """H10: [2, N // 2, N - 3], counted so that id i is the residual stream entering layer i."""
    assert default_aux_layers(61) == [2, 30, 58]  # DeepSeek-V3, Kimi-K2.5
    assert default_aux_layers(8) == [2, 4, 5]
    assert parse_aux_layers(None, 61) == parse_aux_layers("default", 61) == [2, 30, 58]
    assert parse_aux_layers("[-3, 2 30]", 61) == [2, 30, 58]


def test_what_a_nested_config_leaves_out_is_its_class_s_default(tmp_path):
    """google/gemma-3-4b-it states six values of its text model, the size of the vocabulary not among them."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    target = open_target(str(tmp_path))
    assert (target.vocab_size, target.max_positions, target.tied_embeddings) == (262208, 131072, True)
    assert (target.hidden_size, target.num_layers, target.config["rms_norm_eps"]) == (2560, 34, 1e-6)
    draft = derive(target, 1000, [2, 17, 31])
    assert (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim) == (8, 4, 256)
    assert draft.rope == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}


def test_norms_that_add_one_are_those_of_transformers():
    import transformers

    elsewhere = {
        "muse_glimmer": "inside the layers, the final norm is plain",
        "qwen4_exp": "inside the layers, there is no final norm",
        "nemotron": "a LayerNorm",
        "t5gemma": "an encoder and a decoder",
        "t5gemma2": "an encoder and a decoder",
        "videoprism": "no language model",
    }
    adds = re.compile(r"\(1(\.0)? \+ self\.weight|self\.weight(\.float\(\))? \+ 1\b")
    sources = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    found = {source.parent.name for source in sources if adds.search(source.read_text())}
    listed = {transformers.CONFIG_MAPPING[name].__module__.split(".")[-2] for name in NORMS_PLUS_ONE}
    assert found - set(elsewhere) == listed
