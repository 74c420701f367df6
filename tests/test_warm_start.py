"""--init-from: a draft as the start of training, its rows by target id, and what is refused."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from interruptions_for_tests import stage_04
from safetensors.torch import load_file, save_file

from eagle3 import artifacts
from eagle3.draft.config import NORM_KEYS, DraftConfig, derive
from eagle3.draft.model import DraftModel
from eagle3.export import config_json, draft_to_target, export_tensors, write_export
from eagle3.export_speculators import write_speculators
from eagle3.target import Target, open_target, read_embedding, read_lm_head
from eagle3.terminal import UserError
from eagle3.training import warm_start

IDS = torch.arange(0, 96, 3)  # draft ids of the source, 32
LAYERS = [2, 4, 5]
SHAPE = {"intermediate_size": 96, "rope_theta": 20000.0, "rms_norm_eps": 1e-6}  # not what is derived from the target


def draft_of(target: Target, ids: torch.Tensor, stated: dict, seed: int) -> tuple[DraftConfig, DraftModel]:
    torch.manual_seed(seed)
    config = derive(target, len(ids), LAYERS, stated)
    model = DraftModel(config)
    model.initialise(read_embedding(target), read_lm_head(target)[ids], seed)
    return config, model


@pytest.fixture(scope="module")
def source(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A draft with weights that no initialisation gives, in both layouts; its target and its weights in bf16."""
    target = open_target(str(tiny_target), weights=True)
    config, model = draft_of(target, IDS, SHAPE | dict.fromkeys(NORM_KEYS, True), 1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    mark = torch.zeros(target.vocab_size, dtype=torch.bool)
    mark[IDS] = True
    tensors = export_tensors(model, {"d2t": IDS - torch.arange(len(IDS)), "t2d": mark})
    folder = tmp_path_factory.mktemp("source")
    write_export(folder / "servers", tensors, config_json(config, target), "")
    write_speculators(folder / "speculators", tensors, config, target, 3, "")
    return SimpleNamespace(folder=folder, target=target, tensors=tensors)


def start(directory: Path, target: Target, ids: torch.Tensor = IDS, given: dict | None = None, flags: tuple = ()):
    """As stage 04 does it; the model, the line and the digest."""
    opened = warm_start.open_source(str(directory), target)
    stated = warm_start.stated_shape(opened, given or {})
    config = derive(target, len(ids), LAYERS, stated, flags)
    warm_start.require_fit(opened, config)
    _, model = draft_of(target, ids, stated, 2)
    return model, *warm_start.start(model, opened, ids)


@pytest.mark.parametrize("layout", ["servers", "speculators"])
def test_both_layouts_give_the_source_s_shape_and_weights(source: SimpleNamespace, layout: str) -> None:
    model, line, digest = start(source.folder / layout, source.target)
    assert (model.config.intermediate_size, model.config.rope["rope_theta"]) == (96, 20000.0)
    assert model.config.fc_norm and model.config.norm_output
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.bfloat16(), source.tensors[name]), name
    assert torch.equal(model.embed_tokens, read_embedding(source.target))
    assert line.endswith(
        "/" + layout + ": 15 tensors as they are, lm_head as it is, of the same 32 draft ids; draft ids are those of "
        "--vocab-map-dir"
    )
    assert digest == start(source.folder / "servers", source.target)[2]  # of the weights, not of the files


def test_rows_of_another_vocabulary_keep_their_token(source: SimpleNamespace, tmp_path: Path) -> None:
    """V07: a map made again from other frequencies has other places for the same ids. Where the case reuses the
    source's map, the map of stage 03 stands here and each row goes with its token."""
    ids = torch.tensor([0, 1, 6, 9, 10, 33, 95, 300])  # 0, 6, 9 and 33 are the source's
    model, line, _ = start(source.folder / "servers", source.target, ids)
    theirs = dict(zip(IDS.tolist(), source.tensors["lm_head.weight"], strict=True))
    head = read_lm_head(source.target).bfloat16()
    for target_id, row in zip(ids.tolist(), model.lm_head.weight.bfloat16(), strict=True):
        assert torch.equal(row, theirs.get(target_id, head[target_id])), target_id
    assert "lm_head by target id, 4 of 8 rows from its 32, 4 whose ids it lacks from the target's" in line

    full = torch.arange(source.target.vocab_size)  # and from the full vocabulary, which has no map
    config, large = draft_of(source.target, full, SHAPE, 3)
    torch.nn.init.normal_(large.lm_head.weight)
    tensors = export_tensors(large, {})
    assert "d2t" not in tensors
    write_export(tmp_path / "full", tensors, config_json(config, source.target), "")
    model, line, _ = start(tmp_path / "full", source.target, ids)
    assert torch.equal(model.lm_head.weight.bfloat16(), tensors["lm_head.weight"][ids]) and "8 of 8 rows" in line


# ------------------------------------------------------------------------------------------------ what is refused


def of_config(**changes: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def of_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return changed


def pickled(directory: Path) -> None:
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def absolute(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = draft_to_target(tensors["d2t"])


REFUSED = [
    (pickled, "has its weights only as pytorch_model.bin, which can run code when loaded; convert them to safetens"),
    (lambda d: (d / "model.safetensors").unlink(), "has no .safetensors file"),
    (lambda d: (d / "config.json").unlink(), "config.json cannot be read"),
    (of_config(hidden_size=128), "hidden_size is 128, this run has 64; start from a draft of this shape"),
    (of_config(target_hidden_size=32), "the width of the target's states is 32, this run has 64"),
    (of_config(vocab_size=1000), "vocab_size is 1000, this run has 49152"),
    (of_config(num_hidden_layers=2), "num_hidden_layers is 2, this run has 1"),
    (of_config(num_attention_heads=8), r"layers.0.self_attn.q_proj.weight is \[128, 128\], this run has \[256, 128\]"),
    (of_config(num_attention_heads="4"), 'num_attention_heads is "4", expected a positive number'),
    (of_config(norm_before_residual=True), "norm_before_residual is True, this run has False"),
    (of_config(attention_bias=True), "attention_bias is True, this run has False"),
    (of_config(hidden_act="gelu"), "hidden_act is 'gelu', this run has 'silu'"),
    (of_config(eagle_aux_hidden_state_layer_ids=[1, 3, 4]), r"its aux layers are \[1, 3, 4\], the states of stage 02"),
    (of_config(fc_norm=False), "has tensors that this draft does not: fc_norm.0.weight, fc_norm.1.weight, fc_norm.2"),
    (of_tensors(lambda t: t.pop("fc.weight")), "lacks fc.weight; start from a whole draft"),
    (of_tensors(lambda t: t.update(extra=torch.ones(1))), "has tensors that this draft does not: extra"),
    (of_tensors(lambda t: t.update({"fc.weight": torch.ones(64, 128)})), r"fc.weight is \[64, 128\], this run has"),
    (of_tensors(lambda t: t["fc.weight"].fill_(torch.nan)), "fc.weight holds NaN or infinity"),
    (of_tensors(lambda t: t["embed_tokens.weight"][7:10].add_(1)), "3 of 49152 rows of embed_tokens are not the targ"),
    (of_tensors(absolute), r"d2t holds target ids \(the last 93\), not offsets"),
]


@pytest.mark.parametrize(("change", "line"), REFUSED)
def test_a_draft_that_does_not_fit_is_refused(source: SimpleNamespace, tmp_path: Path, change, line: str) -> None:
    directory = Path(shutil.copytree(source.folder / "servers", tmp_path / "draft"))
    change(directory)
    with pytest.raises(UserError, match=line) as error:
        start(directory, source.target)
    assert "\n" not in str(error.value)


def test_flags_and_files_that_contradict_the_source(source: SimpleNamespace, tmp_path: Path) -> None:
    plain = Path(shutil.copytree(source.folder / "servers", tmp_path / "draft"))
    for key in NORM_KEYS:
        of_config(**{key: False})(plain)
    of_tensors(lambda t: [t.pop(f"fc_norm.{place}.weight") for place in range(3)])(plain)
    with pytest.raises(UserError, match="norm_output is False, this run has True; start from a draft of this shape"):
        start(plain, source.target, flags=("norm_output",))
    with pytest.raises(UserError, match="fc_norm is True, this run has False"):
        start(source.folder / "servers", source.target, given={"fc_norm": False})
    with pytest.raises(UserError, match="intermediate_size is 96, this run has 128"):
        start(source.folder / "servers", source.target, given={"intermediate_size": 128})
    with pytest.raises(UserError, match=r"rope is .*20000.*, this run has .*50000"):
        start(source.folder / "servers", source.target, given={"rope_theta": 50000.0})
    with pytest.raises(UserError, match="--init-from nowhere: no such directory"):
        start(Path("nowhere"), source.target)


def test_an_embedding_need_not_be_there_and_helpers_are_left_out(source: SimpleNamespace, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(source.folder / "servers", tmp_path / "draft"))
    of_tensors(lambda t: [t.pop("embed_tokens.weight"), t.update({"verifier_norm.weight": torch.ones(64)})])(directory)
    model, _, _ = start(directory, source.target)
    assert torch.equal(model.fc.weight.bfloat16(), source.tensors["fc.weight"])


# ---------------------------------------------------------------------------------------------- the whole stage


@pytest.mark.slow
def test_an_export_started_from_again_has_its_own_figures(tiny_target: Path, states: Path, tmp_path: Path) -> None:
    """The untrained draft of the second run is the first one's export; a resumed run cannot start otherwise."""

    def run(name: str, *flags: object) -> subprocess.CompletedProcess:
        fixed = ["--ttt-steps", 2, "--max-tokens", 128, "--learning-rate", 1e-2, "--epochs", 2, "--val-fraction", 0.1]
        command = stage_04(tiny_target, states, tmp_path / name, *fixed, *flags)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=120)

    assert run("first").returncode == 0
    second = run("second", "--init-from", tmp_path / "first" / "export")
    assert second.returncode == 0, second.stderr
    assert (
        f"starting from {tmp_path}/first/export: 12 tensors as they are, lm_head as it is, of the same 64"
        in second.stdout
    )
    first, again = (artifacts.read_manifest(tmp_path / name, "04") for name in ("first", "second"))
    assert again["baselines"]["untrained"] == first["report"] != first["baselines"]["untrained"]
    assert again["report"]["loss_by_step"] < first["report"]["loss_by_step"]
    constant = again["baselines"]["most_frequent_token"]
    assert constant["tau"] >= 1 and constant == first["baselines"]["most_frequent_token"]
    lines = [json.loads(line) for line in (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines[:2]] == ["untrained", "most_frequent_token"] and lines[0]["step"] == 0

    refused = run("second")
    assert refused.returncode == 1 and "init_from is '" in refused.stderr and "this run has None" in refused.stderr
    other = run("second", "--init-from", tmp_path / "second" / "export")
    assert other.returncode == 1 and "init_from is '" in other.stderr and "Traceback" not in other.stderr
