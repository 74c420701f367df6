"""The draft with the highest tau is the one exported, also when the run was killed after it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from interruptions_for_tests import stage_04
from safetensors.torch import load_file
from states_for_tests import write_states

from eagle3 import artifacts
from eagle3.draft.config import DraftConfig
from eagle3.draft.model import DraftModel
from eagle3.terminal import UserError
from eagle3.training import best

FLAGS = ["--ttt-steps", 2, "--max-tokens", 128, "--learning-rate", 1e-2]
# random states give every draft a tau of 1; the weights of each evaluation are kept for the comparison
PROGRAM = """
import os, runpy, sys, torch
from eagle3.training import loop
taus = [float(tau) for tau in os.environ["TAUS"].split()]
evaluate, save = loop.Trainer.evaluate, loop.Trainer._save
def scripted(self, model, stop=None):
    report = evaluate(self, model, stop)
    if stop is not None:  # of an epoch, not of the exported files
        weights = {name: tensor.detach().bfloat16() for name, tensor in model.named_parameters()}
        torch.save(weights, self.output / f"epoch{self.epoch + 1}.pt")
        report["tau"] = taus[self.epoch]
    return report
def killed(self):
    if self.epoch == int(os.environ.get("KILLED", -1)):
        os.kill(os.getpid(), 9)
    save(self)
loop.Trainer.evaluate, loop.Trainer._save = scripted, killed
sys.argv[0] = sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(command: list[object], program: Path, **environment: object) -> subprocess.CompletedProcess:
    program.write_text(PROGRAM)
    variables = {name: str(value) for name, value in environment.items()}
    return subprocess.run(
        [sys.executable, str(program), *map(str, command[1:])],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | variables,
        timeout=120,
    )


def exported_from(output: Path, epoch: int) -> bool:
    export, evaluated = load_file(output / "export" / "model.safetensors"), torch.load(output / f"epoch{epoch}.pt")
    return all(torch.equal(export[name], tensor) for name, tensor in evaluated.items())


@pytest.mark.slow
def test_the_best_is_exported_after_a_kill_too(tiny_target: Path, tmp_path: Path) -> None:
    """Of taus 1.5, 2.5, 2.5 and 2 the third is the later of the best; the kill is between evaluation and checkpoint.

    T29: with nothing held out the last one is exported, which is said."""
    write_states(tmp_path, tiny_target)
    output = tmp_path / "draft"
    command = stage_04(tiny_target, tmp_path, output, *FLAGS, "--epochs", 4)
    first = run(command, tmp_path / "program.py", TAUS="1.5 2.5 2.5 2", KILLED=4)
    assert first.returncode == -9 and best.read(output / "checkpoints" / "best.safetensors")["epoch"] == 3
    result = run(command, tmp_path / "program.py", TAUS="1.5 2.5 2.5 2")
    assert result.returncode == 0, result.stderr
    steps = artifacts.read_manifest(output, "04")["steps"]
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    (third, *_) = [line for line in lines if line["kind"] == "held_out" and line["epoch"] == 3]
    assert f"continuing after step {third['step']} of {steps}" in result.stdout
    assert exported_from(output, 3) and not exported_from(output, 2) and not exported_from(output, 4)
    manifest = artifacts.read_manifest(output, "04")
    assert manifest["exported"] == {"epoch": 3, "step": third["step"], "tau": 2.5}
    assert manifest["last"] == {"epoch": 4, "step": steps, "tau": 2.0}
    assert f"epoch 3, step {third['step']}: the highest tau, 2.5; the last had 2.0" in result.stdout
    assert "2 drafts): **2.5**" in (output / "export" / "README.md").read_text()
    card = (output / "export" / "README.md").read_text()
    assert f"accuracy by TTT step: {third['accuracy_by_step']}" in card  # all its figures are of that epoch

    other = tmp_path / "other"
    command = stage_04(tiny_target, tmp_path, other, *FLAGS, "--epochs", 1, "--val-fraction", 0)
    result = run(command, tmp_path / "program.py", TAUS="")
    assert result.returncode == 0, result.stderr
    steps = artifacts.read_manifest(other, "04")["steps"]
    assert f"epoch 1, step {steps}: the last, for nothing was held out" in result.stdout
    assert artifacts.read_manifest(other, "04")["exported"] == {"epoch": 1, "step": steps, "tau": None}
    assert not (other / "checkpoints" / "best.safetensors").exists()


def model_of(seed: int) -> DraftModel:
    torch.manual_seed(seed)
    model = DraftModel(
        DraftConfig(
            hidden_size=16,
            intermediate_size=32,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            rms_norm_eps=1e-6,
            rope={"rope_type": "default", "rope_theta": 10000.0},
            max_position_embeddings=64,
            vocab_size=40,
            draft_vocab_size=20,
            aux_layers=(1, 2, 3),
        )
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def test_the_file_is_replaced_at_once_and_a_damaged_one_is_named(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "checkpoints" / "best.safetensors"
    assert best.read(path) is None
    first, second = model_of(1), model_of(2)
    best.write(path, first, {"epoch": 1})
    with monkeypatch.context() as patch:
        patch.setattr(artifacts.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            best.write(path, second, {"epoch": 2})
    assert best.read(path) == {"epoch": 1} and [one.name for one in path.parent.iterdir()] == [path.name]
    best.load(path, second)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), other.bfloat16())
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(
        UserError, match=r"best.safetensors, the draft with the highest tau so far, is damaged \(.*dele"
    ):
        best.read(path)
