"""Stage 04 through its own command line: real DeepSpeed, one rank and two over gloo, on random states."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import REPOSITORY
from rescore import Export, rescore
from safetensors.torch import load_file
from states_for_tests import AUX_LAYERS, write_states
from transformers import AutoModelForCausalLM

from eagle3 import artifacts
from eagle3.draft.config import derive
from eagle3.draft.model import DraftModel
from eagle3.target import open_target, read_embedding, read_lm_head
from eagle3.terminal import UserError
from eagle3.training import inputs, loop

FLAGS = ["--epochs", 6, "--ttt-steps", 3, "--learning-rate", 1e-2, "--max-tokens", 128, "--val-fraction", 0.1]


def command(model: Path, states: Path, output: Path, *extra: object, ranks: int = 1) -> list[str]:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    arguments = [*FLAGS, *extra]
    paths = ["--hidden-states-dir", states / "hidden_states", "--vocab-map-dir", states / "vocab_map"]
    script = [str(REPOSITORY / "04_train_draft.py"), "--model-path", model, *paths, "--output-dir", output]
    return [*launcher, *map(str, script), *map(str, arguments)]


def train(*arguments, check: bool = True, **settings) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command(*arguments, **settings), capture_output=True, text=True, env=environment, timeout=300
    )
    if check and result.returncode:
        raise AssertionError(f"exited {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result


def wait_for_steps(output: Path, process: subprocess.Popen) -> None:
    """Until a few optimizer steps are in metrics.jsonl."""
    deadline = time.monotonic() + 120
    while not (output / "metrics.jsonl").exists() or (output / "metrics.jsonl").stat().st_size < 300:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)


def largest_difference(one: Path, other: Path) -> float:
    """Largest difference of any float weight of two exports."""
    a, b = (load_file(directory / "export" / "model.safetensors") for directory in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a if a[name].is_floating_point())


def metrics(output: Path, kind: str) -> list[dict]:
    return [r for r in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()) if r["kind"] == kind]


@pytest.fixture(scope="module")
def straight(tiny_target: Path, states: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An unbroken run of one rank, accumulating two micro-batches; its directory and output."""
    output = tmp_path_factory.mktemp("straight") / "draft"
    result = train(tiny_target, states, output, "--accumulation", 2)
    return output, result.stdout


def test_training_lowers_the_loss_and_says_what_it_did(straight: tuple[Path, str]) -> None:
    output, text = straight
    losses = [record["loss_by_step"][0] for record in metrics(output, "train")]
    assert losses[-1] < 0.9 * losses[0]
    assert "embeddings frozen" in text and "lm_head trained" in text and "(walk)" in text
    assert "tokens/s" in text and "of the step time" in text
    held_out = metrics(output, "held_out")
    assert len(held_out) == 6 and held_out[-1]["walk_starts"] > 0
    assert list((output / "tensorboard").glob("events*"))


def test_every_step_tells_its_tokens_and_its_wait_for_data(straight: tuple[Path, str], states: Path) -> None:
    """Each sample is in one step of each epoch. On CPU there is no peak to have a share of."""
    held_out = artifacts.read_manifest(straight[0], "04")["held_out"]
    index = artifacts.Index(states / "hidden_states").samples().values()
    tokens = sum(record["tokens"] for record in index if record["index"] not in held_out)
    records = metrics(straight[0], "train")
    for epoch in range(6):
        assert sum(record["tokens"] for record in records if record["epoch"] == epoch) == tokens
    for record in records:
        assert 0 <= record["data_wait"] <= record["seconds"] + 1e-3 and "share_of_peak" not in record
        least, most = (record["tokens"] / (record["seconds"] + rounded) for rounded in (6e-4, -6e-4))
        assert least <= record["tokens_per_second"] <= most


def test_the_terminal_is_free_of_library_noise(straight: tuple[Path, str]) -> None:
    for word in ("DeepSpeed", "WARNING", "built successfully", "accelerator"):
        assert word not in straight[1]


def test_export_is_what_servers_read(straight: tuple[Path, str], tiny_target: Path, states: Path) -> None:
    """T01, T45: the target's attention shape in names and shapes; its embedding as it is, all else trained."""
    export = straight[0] / "export"
    tensors = load_file(export / "model.safetensors")
    layer = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    layer += ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    names = ["fc", "norm", "lm_head", "embed_tokens", *(f"midlayer.{name}" for name in layer)]
    assert set(tensors) == {f"{name}.weight" for name in names} | {"d2t", "t2d"}
    assert {str(tensor.dtype) for name, tensor in tensors.items() if name.endswith("weight")} == {"torch.bfloat16"}
    vocab = artifacts.load_tensors(states / "vocab_map" / "vocab_map.pt")
    assert tensors["d2t"].dtype == torch.int64 and torch.equal(tensors["d2t"], vocab["d2t"])
    assert tensors["t2d"].dtype == torch.bool and torch.equal(tensors["t2d"], vocab["t2d"])

    target = open_target(str(tiny_target), weights=True)
    assert torch.equal(tensors["embed_tokens.weight"], read_embedding(target).bfloat16())
    start = DraftModel(derive(target, 64, AUX_LAYERS))
    start.initialise(read_embedding(target), read_lm_head(target)[vocab["t2d"]], seed=0)
    for name, tensor in start.named_parameters():
        assert tensors[name].shape == tensor.shape and not torch.equal(tensors[name], tensor.bfloat16()), name

    config = json.loads((export / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert (config["vocab_size"], config["draft_vocab_size"]) == (target.vocab_size, 64)
    assert config["tie_word_embeddings"] is False and "quantization_config" not in config
    attention = [tensors[f"midlayer.self_attn.{name}_proj.weight"].shape for name in "qkvo"]
    assert config["head_dim"] == 32 and attention == [(128, 128), (64, 128), (64, 128), (64, 128)]
    assert config["rope_theta"] == 50000.0 == config["rope_parameters"]["rope_theta"]
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["max_position_embeddings"] == target.max_positions
    assert config["eagle_aux_hidden_state_layer_ids"] == AUX_LAYERS
    assert config["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in AUX_LAYERS],  # SGLang adds one on Llama targets
    }


def test_reported_figures_are_those_of_the_exported_files(straight, tiny_target: Path, states: Path) -> None:
    """T48. Held-out loss and walks once more by a reader of its own: from export/ and transformers' own target."""
    output, _ = straight
    manifest = artifacts.read_manifest(output, "04")
    target = AutoModelForCausalLM.from_pretrained(tiny_target)
    norm, head = target.model.norm, target.lm_head.weight
    samples = [artifacts.load_tensors(artifacts.sample_path(states / "hidden_states", i)) for i in manifest["held_out"]]
    score = rescore(Export(output / "export"), samples, norm.weight, norm.variance_epsilon, head, 3)
    report = manifest["report"]
    assert manifest["complete"] and report["walk_starts"] == score.starts()[-1] > 0
    assert report["loss_by_step"] == pytest.approx(score.loss, rel=1e-4)
    taus = [1 + accepted / starts for accepted, starts in zip(score.accepted(), score.starts(), strict=True)]
    assert report["tau_by_drafts"] == [
        round(tau, 4) for tau in taus
    ]  # all 1 on random states; tests/test_rescore.py has chains
    assert report["acceptance_by_position"] == [round(n / score.starts()[-1], 5) for n in score.by_position()]
    assert metrics(output, "held_out")[-1]["loss_by_step"] == pytest.approx(score.loss, rel=0.02)


def test_the_whole_vocabulary_is_normalised_in_float32() -> None:
    """A rounded normaliser would put several percent of the target's probability in or out of the draft vocabulary."""
    torch.manual_seed(0)
    states, weight = torch.randn(20, 16), torch.randn(5000, 16)

    def head(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight.T).bfloat16()

    batch = SimpleNamespace(final_hidden=states, final_states=lambda rows, device, dtype: states[rows])
    reader = contextlib.nullcontext([SimpleNamespace(batches=[batch])])
    trainer = SimpleNamespace(whole_head=lambda: head, device="cpu", dtype=torch.bfloat16, _reader=lambda *_: reader)
    (normaliser,) = loop.Trainer._normalise(trainer, [[]])
    assert normaliser.dtype == torch.float32
    torch.testing.assert_close(normaliser, head(states).float().logsumexp(-1), rtol=0, atol=1e-5)


def test_loss_weights_are_decay_over_the_count_of_rows() -> None:
    """T25: the divisor is global, whatever a rank has."""
    fields = dict.fromkeys(loop.TrainOptions.__dataclass_fields__)
    rows = torch.tensor([10.0, 8.0, 0.0], dtype=torch.float64)
    for norm, divisors in (("per-step", [10, 8, 1]), ("first-step", [10, 10, 10])):
        options = loop.TrainOptions(**fields | {"step_decay": 0.5, "loss_norm": norm})
        expected = [weight / divisor for weight, divisor in zip([1, 0.5, 0.25], divisors, strict=True)]
        assert loop.loss_weights(rows, options).tolist() == pytest.approx(expected)


@pytest.mark.slow
def test_a_frozen_lm_head_stays_the_targets_and_norms_are_trained(
    tiny_target: Path, states: Path, tmp_path: Path
) -> None:
    shape = tmp_path / "draft.json"
    shape.write_text('{"intermediate_size": 96, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "norm_output": true}')
    changes = ["--draft-config", shape, "--fc-norm", "--format", "speculators"]
    result = train(tiny_target, states, tmp_path / "draft", "--lm-head", "frozen", "--epochs", 2, *changes)
    tensors = load_file(tmp_path / "draft" / "export" / "model.safetensors")
    rows = read_lm_head(open_target(str(tiny_target), weights=True))[tensors["t2d"]].bfloat16()
    assert torch.equal(tensors["lm_head.weight"], rows) and "lm_head frozen" in result.stdout
    assert not torch.equal(tensors["norm.weight"], torch.ones_like(tensors["norm.weight"]))
    assert tensors["midlayer.mlp.up_proj.weight"].shape == (96, 64)
    for place in range(3):  # of three aux layers
        assert not torch.equal(tensors[f"fc_norm.{place}.weight"], torch.ones(64, dtype=torch.bfloat16))
    described = json.loads((tmp_path / "draft" / "export" / "config.json").read_text())
    assert described["fc_norm"] is True and described["norm_output"] is True
    assert "rope theta is 10000.0, the target's 50000.0; right only if" in result.stderr  # the check of the export
    other = load_file(tmp_path / "draft" / "export-speculators" / "model.safetensors")
    assert torch.equal(other["layers.0.mlp.up_proj.weight"], tensors["midlayer.mlp.up_proj.weight"])


@pytest.mark.slow
def test_bfloat16_trains_like_float32(straight, tiny_target: Path, states: Path, tmp_path: Path) -> None:
    """The precision of GPUs: bf16 weights with float32 masters follow the float32 run."""
    train(tiny_target, states, tmp_path / "draft", "--accumulation", 2, "--dtype", "bfloat16")
    exact, rounded = metrics(straight[0], "train"), metrics(tmp_path / "draft", "train")
    for a, b in zip(exact, rounded, strict=True):
        assert b["loss_by_step"] == pytest.approx(a["loss_by_step"], rel=0.1)


@pytest.mark.slow
def test_two_ranks_give_the_weights_of_one(straight, tiny_target: Path, states: Path, tmp_path: Path) -> None:
    """T42. Two ranks of one micro-batch are one rank of two: the loss is divided by the global count of rows."""
    train(tiny_target, states, tmp_path / "draft", ranks=2)
    alone, together = metrics(straight[0], "train"), metrics(tmp_path / "draft", "train")
    assert [r["step"] for r in alone] == [r["step"] for r in together]
    for a, b in zip(alone, together, strict=True):
        assert a["loss_by_step"] == pytest.approx(b["loss_by_step"], rel=1e-3)
        assert a["tokens"] == b["tokens"]  # of both ranks
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-3)  # Adam alone would hide its scale
    assert largest_difference(straight[0], tmp_path / "draft") < 5e-3  # bf16 rounding of weights up to 1


@pytest.mark.slow
def test_killed_and_resumed_equals_unbroken(straight, tiny_target: Path, states: Path, tmp_path: Path) -> None:
    """T12, T13. kill -9 at a moment that is no checkpoint, then the same command: the weights of the unbroken run."""
    output = tmp_path / "draft"
    flags = ("--accumulation", 2, "--save-every", 2)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command(tiny_target, states, output, *flags),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    deadline = time.monotonic() + 120
    while not (output / "checkpoints" / "latest").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not artifacts.read_manifest(output, "04")["complete"], "the run ended before it was killed"
    # what kills at other moments leave: a torn line, checkpoints half written at later steps
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    halves = [output / "checkpoints" / name for name in ("step00000098", "step00000099")]
    for half in halves:
        half.mkdir()
        (half / "mp_rank_00_model_states.pt").write_bytes(b"half")
    result = train(tiny_target, states, output, *flags)
    assert "continuing after step" in result.stdout
    kept = [path.name for path in (output / "checkpoints").glob("step*")]
    assert (
        len(kept) == 2 and (output / "checkpoints" / "latest").read_text() in kept and not any(map(Path.exists, halves))
    )
    assert largest_difference(straight[0], output) <= 1e-6
    rates = {r["step"]: r["learning_rate"] for r in metrics(output, "train")}
    assert rates == {r["step"]: r["learning_rate"] for r in metrics(straight[0], "train")}


@pytest.mark.slow
def test_ctrl_c_to_a_launcher_and_its_ranks_saves(tiny_target: Path, states: Path, tmp_path: Path) -> None:
    """All ranks stop after the same step, and the checkpoint is that of the last step in the metrics."""
    output = tmp_path / "draft"
    process = subprocess.Popen(
        command(tiny_target, states, output, "--epochs", 400, ranks=2),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    wait_for_steps(output, process)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "the same command continues" in out
    saved = int((output / "checkpoints" / "latest").read_text().removeprefix("step"))
    assert saved == metrics(output, "train")[-1]["step"]


def test_only_a_later_second_signal_is_impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun passes on at once what the terminal has already sent."""
    clock, exits = [100.0], []
    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(loop.os, "_exit", exits.append)
    stop = loop.StopRequested()
    for delay in (0.0, 0.1, 1.0):
        clock[0] += delay
        stop._note(signal.SIGINT, None)
    assert stop.signal == signal.SIGINT and exits == []
    clock[0] += 5
    stop._note(signal.SIGINT, None)
    assert exits == [130]


@pytest.mark.slow
def test_a_sample_that_stage_02_failed_leaves_a_hole(straight, tiny_target: Path, states: Path, tmp_path: Path) -> None:
    """The same plan without it: the same number of steps, of the same tokens but for those of the failed one."""
    damaged = tmp_path / "states"
    shutil.copytree(states, damaged)
    failed = next(i for i in range(12) if i not in artifacts.read_manifest(straight[0], "04")["held_out"])
    kept = artifacts.Index(damaged / "hidden_states").samples()[failed]
    with artifacts.Index(damaged / "hidden_states").appending() as index:
        index.add(**{key: value for key, value in kept.items() if key not in ("ids", "bytes")} | {"status": "failed"})
    artifacts.sample_path(damaged / "hidden_states", failed).unlink()
    manifest = damaged / "hidden_states" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"samples": 12', '"samples": 11'))
    output = tmp_path / "draft"
    train(tiny_target, damaged, output, "--accumulation", 2, "--epochs", 2)
    whole, without = metrics(straight[0], "train"), metrics(output, "train")
    steps = len(without)
    lost = [a["tokens"] - b["tokens"] for a, b in zip(whole[:steps], without, strict=True)]
    assert sorted(lost) == [0] * (steps - 2) + [kept["tokens"]] * 2 and whole[steps]["epoch"] == 2
    held_out = [artifacts.read_manifest(directory, "04")["held_out"] for directory in (straight[0], output)]
    assert held_out[0] == held_out[1]


@pytest.mark.slow
def test_sigterm_saves_and_more_epochs_continue(tiny_target: Path, states: Path, tmp_path: Path) -> None:
    """T13: more epochs are another plan, which is said."""
    output = tmp_path / "draft"
    process = subprocess.Popen(
        command(tiny_target, states, output, "--epochs", 400), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for_steps(output, process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "the same command continues" in out
    saved = int((output / "checkpoints" / "latest").read_text().removeprefix("step"))
    assert saved == metrics(output, "train")[-1]["step"]
    epochs = metrics(output, "train")[-1]["epoch"] + 2
    result = train(tiny_target, states, output, "--epochs", epochs)
    assert f"continuing after step {saved}" in result.stdout
    assert "learning rate follows the new plan" in result.stderr


@pytest.mark.slow
def test_a_kill_while_the_export_is_exchanged_is_noticed(straight, tiny_target: Path, states: Path, tmp_path) -> None:
    """The finished run once more, killed between the removal of the old export and the renaming of the new one."""
    output = tmp_path / "draft"
    shutil.copytree(straight[0], output)
    program = """
import os, runpy, shutil, sys
remove = shutil.rmtree
def killed(path, *arguments, **settings):
    remove(path, *arguments, **settings)
    if path.name == "export":
        os.kill(os.getpid(), 9)
shutil.rmtree = killed
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    flags = command(tiny_target, states, output, "--accumulation", 2)[1:]
    result = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True, cwd=REPOSITORY)
    assert result.returncode == -9 and not (output / "export").exists()
    assert not artifacts.read_manifest(output, "04")["complete"], "the served check would look for the export"


def test_other_flags_or_states_are_refused(straight, tiny_target: Path, states: Path, tmp_path: Path) -> None:
    """V02: a map whose parts disagree is refused with both numbers."""
    other = train(tiny_target, states, straight[0], "--accumulation", 2, "--seed", 5, check=False)
    assert other.returncode == 1 and "seed is 0, this run has 5" in other.stderr and "Traceback" not in other.stderr

    def refused() -> str:
        """What stage 04 says of the inputs, which it opens first."""
        with pytest.raises(UserError) as error:
            inputs.open_inputs(open_target(str(tiny_target)), wrong / "hidden_states", wrong / "vocab_map")
        return str(error.value)

    wrong = tmp_path / "wrong"
    write_states(wrong, tiny_target, count=4)
    vocab = wrong / "vocab_map" / "vocab_map.pt"
    tensors = {name: value.clone() for name, value in artifacts.load_tensors(vocab).items()}
    tensors["t2d"][:60] = False
    artifacts.save_tensors(vocab, tensors)
    assert "d2t has 64 ids, t2d marks" in refused()

    write_states(wrong, tiny_target, count=4)
    sample = artifacts.sample_path(wrong / "hidden_states", 2)
    sample.write_bytes(sample.read_bytes()[:1000])
    assert f"1 of 4 samples of {wrong}/hidden_states are missing or damaged, first {sample}: 1,000" in refused()
