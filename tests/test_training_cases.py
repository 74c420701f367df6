"""Odd data, targets and settings of stage 04, each from a defect report of another trainer."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from interruptions_for_tests import stage_04
from safetensors.torch import load_file, save_file
from states_for_tests import AUX_LAYERS, write_states
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3 import artifacts
from eagle3.draft.config import derive
from eagle3.draft.model import DraftModel
from eagle3.export import config_json, export_tensors, read_export, write_export
from eagle3.target import TargetHead, open_target, read_embedding, read_lm_head
from eagle3.terminal import UserError
from eagle3.training import inputs, supervision

FLAGS = ["--ttt-steps", 2, "--max-tokens", 59, "--learning-rate", 1e-2, "--val-fraction", 0]


def run(*command: object) -> subprocess.CompletedProcess:
    path = f"{REPOSITORY}:{REPOSITORY / 'tests'}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture(scope="module")
def tied_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file, no index, no lm_head: tied embeddings, 512 ids."""
    directory = tmp_path_factory.mktemp("tied")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    return directory


# ----------------------------------------------------------------------------------------- vocabulary, tied heads


@pytest.mark.slow
def test_a_tied_target_is_trained_resumed_and_loaded(tied_target: Path, tmp_path: Path) -> None:
    """T10: the draft's head is its own, of the draft vocabulary, also after a resume; the frozen embedding stays."""
    write_states(tmp_path, tied_target, count=6)
    out = tmp_path / "draft"
    assert run(*stage_04(tied_target, tmp_path, out, *FLAGS, "--epochs", 1)).returncode == 0
    resumed = run(*stage_04(tied_target, tmp_path, out, *FLAGS, "--epochs", 2))
    assert resumed.returncode == 0 and "continuing after step 6 of 12" in resumed.stdout, resumed.stderr
    described = json.loads((out / "export" / "config.json").read_text())
    assert described["tie_word_embeddings"] is False
    target = open_target(str(tied_target), weights=True)
    model = read_export(out / "export", derive(target, 64, AUX_LAYERS))  # strictly
    rows = read_lm_head(target)[artifacts.load_tensors(tmp_path / "vocab_map" / "vocab_map.pt")["t2d"]]
    assert model.lm_head.weight.shape == (64, 64) and not torch.equal(model.lm_head.weight, rows.bfloat16())
    assert torch.equal(model.embed_tokens, read_embedding(target).bfloat16())


def test_a_tied_target_with_the_full_vocabulary_is_saved(tied_target: Path, tmp_path: Path) -> None:
    """T11: embedding and head start as one tensor, and are stored as two."""
    target = open_target(str(tied_target), weights=True)
    config = derive(target, target.vocab_size, AUX_LAYERS)
    model = DraftModel(config)
    model.initialise(read_embedding(target), TargetHead(target, torch.float32, "cpu").weight, 0)
    write_export(tmp_path / "export", export_tensors(model, {}), config_json(config, target), "")
    stored = load_file(tmp_path / "export" / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], stored["embed_tokens.weight"])
    loaded = read_export(tmp_path / "export", config)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.bfloat16()), name


def test_no_map_no_training(tiny_target: Path, tmp_path: Path) -> None:
    """V04: absent, and with buffers of zeros."""
    write_states(tmp_path, tiny_target, count=3)
    target = open_target(str(tiny_target))
    with pytest.raises(UserError, match="nowhere: no such directory; expected the output of stage 03"):
        inputs.open_inputs(target, tmp_path / "hidden_states", tmp_path / "nowhere")
    path = tmp_path / "vocab_map" / "vocab_map.pt"
    zeros = {name: torch.zeros_like(tensor) for name, tensor in artifacts.load_tensors(path).items()}
    artifacts.save_tensors(path, zeros)
    with pytest.raises(UserError, match=r"d2t has 64 ids, t2d marks 0 of 49152; .*rerun stage 03"):
        inputs.open_inputs(target, tmp_path / "hidden_states", tmp_path / "vocab_map")


# ------------------------------------------------------------------------------------------------ little to learn from


@pytest.fixture(scope="module")
def few(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    """Results of few_rows_for_tests.py by the number of ranks."""
    directory, results = tmp_path_factory.mktemp("few"), {}
    write_states(directory / "states", tiny_target, count=10, unsupervised=range(6, 10))
    write_states(directory / "few", tiny_target, count=3)
    for ranks in (1, 2):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks > 1 else []
        program = REPOSITORY / "tests" / "few_rows_for_tests.py"
        places = tiny_target, directory / "states", directory / "few", directory / f"{ranks}.pt"
        result = run(sys.executable, *launcher, program, *places)
        assert result.returncode == 0, result.stderr
        results[ranks] = torch.load(directory / f"{ranks}.pt")
    return results


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_without_a_supervised_row_changes_nothing(few: dict[int, dict], ranks: int) -> None:
    """T26: its loss is 0, it is counted, and the next one is as if it had not been."""
    outcome = few[ranks]["between"]
    assert outcome["loss"] == [0, 0] and outcome["fault"] == "none of its rows is supervised"
    assert outcome["counted"] == (1, 0) and outcome["untouched"] and outcome["equal"] and outcome["moved"]


@pytest.mark.slow
def test_a_rank_without_a_supervised_row_adds_nothing(few: dict[int, dict]) -> None:
    """T25: it steps with the other one, whose rows alone the loss is divided by."""
    alone, beside = few[1]["one rank"], few[2]["one rank"]
    for name, weight in alone.items():
        torch.testing.assert_close(beside[name], weight, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_fewer_samples_than_a_step_takes_are_one_step(few: dict[int, dict], ranks: int) -> None:
    """T28: three samples, eight micro-batches a rank."""
    outcome = few[ranks]["few"]
    assert (outcome["stopped"], outcome["steps"], outcome["epochs"]) == (0, 3, 3)
    assert outcome["changed"] == outcome["all"]


@pytest.mark.parametrize("steps", [1, 3])
def test_the_last_position_has_no_target_and_a_neighbour_changes_nothing(steps: int) -> None:
    """T27: a sample whose last token is an assistant's. Nothing is padded; what is packed behind it adds its own."""

    def sample(length: int) -> dict[str, torch.Tensor]:
        mask = torch.arange(length) >= 2
        states = {"aux_hidden": torch.zeros(length, 3), "final_hidden": torch.zeros(length - 2, 1)}
        return {"input_ids": torch.arange(length, dtype=torch.int32), "loss_mask": mask} | states

    # the turn is 2 .. 7: served starts 1 .. 5 at step 0; by the mask of the input alone 1 .. 6, where 7 has its state
    for rule, counts in (("served", [5, 4, 3]), ("shifted-mask", [6, 6, 5])):
        alone = supervision.make_batch([sample(8)], steps, rule)
        assert alone.valid.sum(1).tolist() == counts[:steps]
        packed = supervision.make_batch([sample(8), sample(20)], steps, rule)
        first = packed.documents[packed.rows] == 0
        assert torch.equal(packed.valid[:, first], alone.valid) and torch.equal(packed.labels[:, first], alone.labels)


@pytest.mark.slow
def test_a_finished_run_goes_on_with_whole_epochs(tiny_target: Path, tmp_path: Path) -> None:
    """T16: two epochs of nine steps, once more, and a third epoch."""
    write_states(tmp_path, tiny_target, count=9)
    out = tmp_path / "draft"

    def steps(epochs: int) -> tuple[str, list[int]]:
        result = run(*stage_04(tiny_target, tmp_path, out, *FLAGS, "--epochs", epochs))
        assert result.returncode == 0, result.stderr
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return result.stdout, [line["step"] for line in lines if line["kind"] == "train"]

    assert steps(2)[1] == list(range(1, 19))
    text, done = steps(2)
    assert done == list(range(1, 19)) and "continuing after step 18 of 18" in text
    text, done = steps(3)
    assert done == list(range(1, 28)) and "continuing after step 18 of 27" in text


# -------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs/deepspeed").glob("*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize("world", [1, 2, 8])
def test_a_shipped_deepspeed_config_fits_any_number_of_ranks(path: Path, world: int, monkeypatch) -> None:
    """T20: nothing in it depends on their number, nothing is left to be resolved."""
    from deepspeed.runtime import config as deepspeed_config

    config = inputs.read_deepspeed_config(path)
    assert '"auto"' not in path.read_text() and not set(config) & set(inputs.OWN_DEEPSPEED_KEYS)
    assert config["zero_optimization"]["stage"] == int(path.stem[-1])
    monkeypatch.setattr(deepspeed_config.dist, "get_world_size", lambda *_: world)
    monkeypatch.setattr(deepspeed_config.dist, "get_rank", lambda *_: 0)
    whole = deepspeed_config.DeepSpeedConfig(
        config | {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3}
    )
    assert (whole.train_batch_size, whole.train_micro_batch_size_per_gpu) == (3 * world, 1)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.1, "fp16": {"enabled": true}}',
         "sets train_micro_batch_size_per_gpu, gradient_clipping, fp16; remove them, flags of stage 04 set these"),
        ('{"zero_optimisation": {"stage": 1}}', "has unknown keys zero_optimisation; known: zero_optimization, "),
        ('{"zero_optimization": {"stage": 3}}', "ZeRO stage 3; a draft is trained with 0, 1 or 2"),
        ('{"zero_optimization": {"reduce_bucket_size": "auto"}}', 'holds "auto", which only the transformers trainer'),
    ],
)  # fmt: skip
def test_a_deepspeed_config_that_contradicts_or_is_misspelt(tmp_path: Path, text: str, line: str) -> None:
    """T20, T21, T44: all mismatches in one error."""
    (tmp_path / "deepspeed.json").write_text(text)
    with pytest.raises(UserError, match=line):
        inputs.read_deepspeed_config(tmp_path / "deepspeed.json")


@pytest.mark.slow
def test_misspelt_flags_and_nested_keys_are_one_line(tiny_target: Path, tmp_path: Path) -> None:
    """T44."""
    write_states(tmp_path, tiny_target, count=3)
    command = stage_04(tiny_target, tmp_path, tmp_path / "draft", *FLAGS)
    for flag in ("--learnig-rate", "--epoch"):  # a shortened one may mean another flag tomorrow
        result = run(*command, flag, 1)
        assert result.returncode == 2 and f"unrecognized arguments: {flag} 1" in result.stderr
    (tmp_path / "deepspeed.json").write_text('{"zero_optimization": {"stage": 2, "overlap_com": false}}')
    result = run(*command, "--deepspeed-config", tmp_path / "deepspeed.json")
    assert result.returncode == 1 and "error: --deepspeed-config: overlap_com is False: Extra inputs" in result.stderr
    assert "Traceback" not in result.stderr


# ---------------------------------------------------------------------------------------------------- memory

TOO_LARGE = """
import runpy, sys, torch
from eagle3.draft import training_time_test
forward, passes = training_time_test.TrainingTimeTest.forward, [0]
def small(self, fused, *, keep):
    passes[0] += keep
    if passes[0] == 3:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return forward(self, fused, keep=keep)
training_time_test.TrainingTimeTest.forward = small
sys.argv[0] = sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_memory_that_runs_out_amid_training_names_what_fitted(tiny_target: Path, tmp_path: Path) -> None:
    write_states(tmp_path, tiny_target)
    program = tmp_path / "program.py"
    program.write_text(TOO_LARGE)
    command = stage_04(tiny_target, tmp_path, tmp_path / "draft", "--max-tokens", 120, "--max-rows", 120)
    result = run(command[0], program, *command[1:])
    assert result.returncode == 1
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    found = re.search(
        r"a micro-batch of (\d+) tokens and (\d+) draft starts did not fit, the largest that did had (\d+) and (\d+); ",
        error,
    )
    sizes = list(map(int, found.groups()))
    assert max(sizes) <= 120 and min(sizes) > 20 and "--max-tokens (now 120)" in error


MEASURE = """
import resource, sys, torch
from types import SimpleNamespace
from eagle3.target import TargetHead, open_target
from eagle3.training import loop
torch.manual_seed(0)
target, states = open_target(sys.argv[1]), torch.randn(1024, 64)
ids = torch.arange(0, 640, 10)
heads = TargetHead(target, torch.float32, "cpu", rows=ids), TargetHead(target, torch.float32, "cpu")
batch = SimpleNamespace(final_hidden=states, final_states=lambda rows, device, dtype: states[rows])
few = SimpleNamespace(final_hidden=states[:1], final_states=lambda rows, device, dtype: states[:1])
loop.normaliser(heads[1], few, "cpu", torch.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
teacher = heads[0](states)
normaliser = loop.normaliser(heads[1], batch, "cpu", torch.float32)
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
naive = torch.cat([heads[1](part).softmax(-1)[:, ids] for part in states.split(64)])
error = float(((teacher - normaliser[:, None]).exp() - naive).abs().max())
print(grown, error)
"""


@pytest.mark.slow
def test_logits_over_the_whole_vocabulary_are_never_held(tmp_path: Path) -> None:
    """T32: 1024 states and 163,840 ids, of which the draft has 64; a tensor of all would take 671 MB."""
    torch.manual_seed(0)
    vocabulary = 163840
    shape = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 8, "vocab_size": vocabulary}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 64, "rms_norm_eps": 1e-6}))
    weights = {"model.embed_tokens.weight": torch.zeros(vocabulary, 64), "model.norm.weight": torch.ones(64)}
    save_file(weights | {"lm_head.weight": torch.randn(vocabulary, 64) / 8}, tmp_path / "model.safetensors")
    result = run(sys.executable, "-c", MEASURE, tmp_path)
    assert result.returncode == 0, result.stderr
    grown, error = map(float, result.stdout.split())
    assert grown < 0.35 * 4 * 1024 * vocabulary and error < 1e-5
