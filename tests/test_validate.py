"""Every fault that the validator knows, planted in a good export: that one is found, and no other."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from safetensors.torch import load_file, save_file
from test_export import KIMI

from eagle3.draft.config import NORM_KEYS, derive, read_draft_config
from eagle3.draft.model import DraftModel
from eagle3.export import config_json, draft_to_target, export_tensors, write_export
from eagle3.export_speculators import write_speculators
from eagle3.target import Target, open_target, read_embedding
from eagle3.terminal import UserError
from eagle3.validate import findings, require_servable
from eagle3.validate.__main__ import main

AUX = [2, 4, 6]  # not the default of 8 layers, which is [2, 4, 5]
DRAFT_VOCAB = 300
IDS = "eagle_aux_hidden_state_layer_ids"
BOTH = ("vllm", "sglang")
Config, Tensors = dict, dict[str, torch.Tensor]


def random_draft(config) -> DraftModel:
    model = DraftModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02).add_(parameter.dim() == 1)
    return model


def vocab_map(vocab_size: int) -> Tensors:
    """Ids 0 to 99 and every second from 100 on."""
    ids = torch.cat([torch.arange(100), torch.arange(100, 100 + 2 * (DRAFT_VOCAB - 100), 2)])
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": t2d}


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return open_target(str(tiny_target), weights=True)


def make_export(
    directory: Path, target: Target, layers: list[int], draft_vocab: int = DRAFT_VOCAB, norms: tuple = ()
) -> Path:
    config = derive(target, draft_vocab, layers, norms=norms)
    model = random_draft(config)
    model.embed_tokens.copy_(read_embedding(target))
    tensors = export_tensors(model, vocab_map(target.vocab_size))
    write_export(directory, tensors, config_json(config, target), "card")
    return directory


@pytest.fixture(scope="module")
def good(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_export(tmp_path_factory.mktemp("good") / "export", target, AUX)


def codes(directory: Path, target: Target, servers: tuple[str, ...] = BOTH) -> list[str]:
    """Severity's first letter and code of each finding."""
    return [f"{finding.severity[0]} {finding.code}" for finding in findings(directory, target, servers)]


def rewritten(good: Path, directory: Path, change: Callable[[Config, Tensors], None]) -> Path:
    """A copy of the export with `change` made to config and tensors."""
    config, tensors = json.loads((good / "config.json").read_text()), load_file(good / "model.safetensors")
    change(config, tensors)
    write_export(directory, {name: tensor.contiguous() for name, tensor in tensors.items()}, config, "card")
    return directory


def stated(**values) -> Callable[[Config, Tensors], None]:
    """Config keys set; None deletes."""

    def change(config: Config, tensors: Tensors) -> None:
        for key, value in values.items():
            config.pop(key) if value is None else config.update({key: value})

    return change


def tensors_changed(edit: Callable[[Tensors], object]) -> Callable[[Config, Tensors], None]:
    return lambda config, tensors: edit(tensors)


def ids(top: list[int] | None, nested: list[int] | None) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        for holder, value in ((config, top), (config["eagle_config"], nested)):
            holder.pop(IDS) if value is None else holder.update({IDS: value})

    return change


def replaced(name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Config, Tensors], None]:
    return tensors_changed(lambda tensors: tensors.update({name: edit(tensors[name])}))


def absolute(config: Config, tensors: Tensors) -> None:
    tensors["d2t"] = draft_to_target(tensors["d2t"])


def swap(tensor: torch.Tensor, one: int, other: int) -> torch.Tensor:
    """Two entries in each other's place, for a mark that moves or ids out of order."""
    tensor = tensor.clone()
    tensor[[one, other]] = tensor[[other, one]]
    return tensor


def fill(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[3:5] = value
    return tensor


def rename(old: str, new: str) -> Callable[[Config, Tensors], None]:
    return tensors_changed(lambda t: [t.update({n.replace(old, new, 1): t.pop(n)}) for n in list(t) if old in n])


def prefixed(config: Config, tensors: Tensors) -> None:
    for name in list(tensors):
        if name not in ("lm_head.weight", "d2t", "t2d"):
            tensors[f"model.{name}"] = tensors.pop(name)


def full_vocabulary(config: Config, tensors: Tensors) -> None:
    """A full head with a map beside it, the identity."""
    size = config["draft_vocab_size"] = config["vocab_size"]
    tensors["lm_head.weight"] = torch.full((size, 64), 0.01, dtype=torch.bfloat16)
    tensors |= {"d2t": torch.zeros(size, dtype=torch.int64), "t2d": torch.ones(size, dtype=torch.bool)}


def two_states(config: Config, tensors: Tensors) -> None:
    ids([2, 4], [1, 3])(config, tensors)
    tensors["fc.weight"] = tensors["fc.weight"][:, :128]


def with_bias(config: Config, tensors: Tensors) -> None:
    config["attention_bias"] = True
    for part in "qkvo":
        rows = tensors[f"midlayer.self_attn.{part}_proj.weight"].shape[0]
        tensors[f"midlayer.self_attn.{part}_proj.bias"] = torch.ones(rows, dtype=torch.bfloat16)


def with_norm_before_fc(config: Config, tensors: Tensors) -> None:
    config["norm_before_fc"] = True
    tensors["input_norm.weight"] = torch.ones(192, dtype=torch.bfloat16)


def fc_norms(count: int, width: int = 64, **values) -> Callable[[Config, Tensors], None]:
    """So many norms before fc added, and config keys set."""

    def change(config: Config, tensors: Tensors) -> None:
        config.update(values)
        tensors |= {f"fc_norm.{place}.weight": torch.ones(width).bfloat16() for place in range(count)}

    return change


def nested(**values) -> Callable[[Config, Tensors], None]:
    return lambda config, tensors: config["eagle_config"].update(values)


def sglangs_fc_norms(config: Config, tensors: Tensors) -> None:
    fc_norms(3, use_aux_norm=True)(config, tensors)
    for place, name in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{place}.weight")


def own_embedding(config: Config, tensors: Tensors) -> None:
    tensors["embed_tokens.weight"] = torch.randn_like(tensors["embed_tokens.weight"])


Q = "midlayer.self_attn.q_proj.weight"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
MSCALE = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
NO_THETA = {"rope_type": "default"}


def both_ropes(scaling: dict) -> Callable[[Config, Tensors], None]:
    return stated(rope_scaling=scaling, rope_parameters=scaling | {"rope_theta": 50000.0})


# name: change, what vLLM has, what SGLang has; e error, w warning
FAULTS: dict[str, tuple[Callable[[Config, Tensors], None], str, str]] = {
    "d2t absolute": (absolute, "e d2t-absolute", "e d2t-absolute"),
    "d2t in bf16": (replaced("d2t", torch.Tensor.bfloat16), "e d2t-type", "e d2t-type"),
    "d2t in float32": (replaced("d2t", torch.Tensor.float), "e d2t-type", "e d2t-type"),
    "d2t in int32": (replaced("d2t", torch.Tensor.int), "w d2t-type", "w d2t-type"),
    "d2t missing": (tensors_changed(lambda t: t.pop("d2t")), "e d2t-missing", "e d2t-missing"),
    "d2t with a full vocabulary": (full_vocabulary, "e d2t-full", "w d2t-full"),
    "a draft id twice (V11)": (replaced("d2t", lambda d: fill(d, -1)), "e d2t-ids", "e d2t-ids"),
    "a target id out of range (V11)": (replaced("d2t", lambda d: fill(d, 10**6)), "e d2t-ids", "e d2t-ids"),
    "d2t not ascending": (
        replaced("d2t", lambda d: swap(draft_to_target(d), 3, 7) - torch.arange(DRAFT_VOCAB)),
        "w d2t-order",
        "w d2t-order",
    ),
    "d2t too short": (replaced("d2t", lambda d: d[:-1]), "e shape", "e shape"),
    "t2d of other ids": (replaced("t2d", lambda t: swap(t, 3, 101)), "e t2d-disagrees", "e t2d-disagrees"),
    "t2d missing": (tensors_changed(lambda t: t.pop("t2d")), "w t2d-missing", "w t2d-missing"),
    "t2d as integers (S17)": (replaced("t2d", torch.Tensor.long), "w t2d-type", "w t2d-type"),
    "lm_head missing": (tensors_changed(lambda t: t.pop("lm_head.weight")), "e lm-head", "e lm-head"),
    "head tied to the embedding": (stated(tie_word_embeddings=True), "", "e tied"),
    "head_dim of the hidden size": (stated(head_dim=16), "e qkv-width*4", "e qkv-width*4"),
    "kv heads as many as heads": (stated(num_key_value_heads=4), "e qkv-width*2", "e qkv-width*2"),
    "q of the hidden state alone": (replaced(Q, lambda q: q[:, :64]), "e qkv-width", "e qkv-width"),
    "a norm missing": (
        tensors_changed(lambda t: t.pop("midlayer.hidden_norm.weight")),
        "e missing-tensor",
        "e missing-tensor",
    ),
    "MLP of another width": (replaced("midlayer.mlp.up_proj.weight", lambda w: w[:-2]), "e shape", "e shape"),
    "model. before the names": (prefixed, "e prefix", ""),
    "helper tensors (S16)": (
        tensors_changed(lambda t: t.update({"verifier_norm.weight": torch.ones(3).bfloat16()})),
        "e extra-tensor",
        "w extra-tensor",
    ),
    "speculators' layer names": (rename("midlayer.", "layers.0."), "", ""),
    "rope theta lost": (stated(rope_theta=None, rope_parameters=None), "e rope-theta", "e rope-theta"),
    "rope theta only where rope_scaling hides it": (
        stated(rope_theta=None, rope_scaling=YARN, rope_parameters=YARN | {"rope_theta": 50000.0}),
        "e rope-theta",
        "e rope-theta",
    ),
    "rope theta not at top level": (stated(rope_theta=None), "w rope-old-form", "w rope-old-form"),
    "rope theta not in rope_parameters": (stated(rope_parameters=NO_THETA), "w rope-forms", "w rope-forms"),
    "rope only in the old form": (stated(rope_parameters=None), "", ""),
    "rope theta of another model": (
        stated(rope_theta=10000.0, rope_parameters=NO_THETA | {"rope_theta": 10000.0}),
        "w rope-target",
        "w rope-target",
    ),
    "two rope thetas": (stated(rope_theta=10000.0), "e rope-forms", "e rope-forms"),
    "two rope scalings": (stated(rope_scaling=YARN), "e rope-forms", "e rope-forms"),
    "yarn in both forms": (both_ropes(YARN), "", ""),
    "mscale": (both_ropes(MSCALE), "", "e mscale"),
    "layer ids missing": (ids(None, None), "w layer-ids-missing", "w layer-ids-missing"),
    "layer ids only for SGLang": (ids(None, [1, 3, 5]), "e layer-ids-place", ""),
    "layer ids only for vLLM (S19)": (ids(AUX, None), "", "e layer-ids-place"),
    "default layer ids only for vLLM": (ids([2, 4, 5], None), "", "w layer-ids-place"),
    "layer ids unsorted": (ids([6, 4, 2], [1, 3, 5]), "e layer-ids-order", "e layer-ids-order"),
    "layer id N": (ids([2, 4, 8], [1, 3, 7]), "e layer-ids-range*2", "e layer-ids-range*2"),
    "layer id 0": (ids([0, 4, 6], [-1, 3, 5]), "e layer-ids-range*2", "e layer-ids-range*2"),
    "a layer id twice": (ids([2, 2, 6], [1, 3, 5]), "e layer-ids-twice", "e layer-ids-twice"),
    "vLLM's ids for SGLang (S19)": (ids(AUX, [2, 4, 5]), "w layer-ids-convention", "w layer-ids-convention"),
    "SGLang's ids for vLLM (S19)": (ids([1, 3, 5], [1, 3, 5]), "w layer-ids-convention", "w layer-ids-convention"),
    "one more (S20)": (ids([3, 5, 7], [1, 3, 5]), "w layer-ids-convention", "w layer-ids-convention"),
    "SGLang's default ids for vLLM": (ids([1, 3, 4], [0, 2, 3]), "w layer-ids-convention", ""),
    "vLLM's default ids for SGLang": (
        ids(None, [2, 4, 5]),
        "e layer-ids-place",
        "w layer-ids-convention",
    ),
    "two aux layers, not counted": (two_states, "w num-aux", "w num-aux, w aux-count"),
    "two aux layers, counted as three": (
        lambda c, t: [two_states(c, t), c.update(num_aux_hidden_states=3)],
        "e num-aux",
        "e num-aux, w aux-count",
    ),
    "fc of two states": (replaced("fc.weight", lambda w: w[:, :128]), "e fc-width", "e fc-width"),
    "no aux states": (
        stated(eagle_config={"use_aux_hidden_state": False, IDS: [1, 3, 5]}),
        "e use-aux",
        "e use-aux",
    ),
    "aux states not stated": (stated(eagle_config={IDS: [1, 3, 5]}), "", "w use-aux"),
    "the draft's vocab_size": (stated(vocab_size=DRAFT_VOCAB), "e vocab-size*1", "e vocab-size*1"),
    "no draft_vocab_size": (
        lambda c, t: [full_vocabulary(c, t), t.pop("d2t"), t.pop("t2d"), c.pop("draft_vocab_size")],
        "",
        "e draft-vocab",
    ),
    "quantised as the target (S10)": (
        stated(quantization_config={"quant_method": "compressed-tensors"}),
        "e quantization",
        "e quantization",
    ),
    "fewer positions (S08)": (stated(max_position_embeddings=512), "w positions", "e positions"),
    "NaN": (replaced("norm.weight", lambda w: fill(w, float("nan"))), "e not-finite", "e not-finite"),
    "infinity": (replaced(Q, lambda w: fill(w, -float("inf"))), "e not-finite", "e not-finite"),
    "a matrix of zeros": (replaced(Q, torch.zeros_like), "e all-zero", "e all-zero"),
    "norm_before_residual (S06)": (stated(norm_before_residual=True), "", "e norm-before-residual"),
    "norm_before_fc (S06)": (with_norm_before_fc, "", "e norm-before-fc"),
    "attention_bias": (with_bias, "", "e attention-bias"),
    "fc_norm without its tensors": (stated(fc_norm=True), "e missing-tensor", "e missing-tensor"),
    "fc_norm's tensors without fc_norm": (fc_norms(3), "e fc-norm", "e fc-norm"),
    "fc_norm of two states": (fc_norms(2, fc_norm=True), "e missing-tensor", "e missing-tensor"),
    "fc_norm of four states": (fc_norms(4, fc_norm=True), "e fc-norm", "e fc-norm"),
    "fc_norm over all states": (fc_norms(3, 192, fc_norm=True), "e shape*3", "e shape*3"),
    "fc_norm inside eagle_config": (nested(fc_norm=True), "e fc-norm, e missing-tensor", "e fc-norm, e missing-tensor"),
    "fc_norm under SGLang's old names": (sglangs_fc_norms, "e fc-norm*2", ""),
    "norm_output inside eagle_config": (nested(norm_output=True), "e norm-output", "e norm-output"),
    "norm_output as a number": (stated(norm_output=1), "e config-type", "e config-type"),
    "no dtype": (stated(dtype=None, torch_dtype=None), "w dtype", "e dtype"),
    "dtype under one name (S17)": (stated(torch_dtype=None), "w dtype", "w dtype"),
    "two dtypes (S17)": (stated(torch_dtype="float16"), "e dtype", "e dtype"),
    "dtype not that of the tensors (S17)": (
        stated(dtype="float16", torch_dtype="float16"),
        "w dtype-stored",
        "e dtype-stored",
    ),
    "a number as a string (S14)": (stated(hidden_size="64"), "e config-type", "e config-type"),
    "no heads (S14)": (stated(num_attention_heads=0), "e config-type", "e config-type"),
    "a flag as a number (S14)": (stated(use_cache=1), "e config-type", "e config-type"),
    "NaN in config.json (S14)": (stated(rms_norm_eps=float("nan")), "e config-type", "e config-type"),
    "a string in rope (S14)": (both_ropes(YARN | {"factor": "4"}), "e config-type*2", "e config-type*2"),
    "no intermediate_size": (stated(intermediate_size=None), "e config-type", "e config-type"),
    "another architecture (S05)": (stated(architectures=["EagleModel"]), "e architecture", "e architecture"),
    "vLLM's own name (S05)": (stated(architectures=["Eagle3LlamaForCausalLM"]), "", "e architecture"),
    "no model_type (S05)": (stated(model_type=None), "e architecture", "e architecture"),
    "no embedding (S02)": (tensors_changed(lambda t: t.pop("embed_tokens.weight")), "w embed-missing", ""),
    "own embedding": (own_embedding, "w embed-rows", "e embed-rows"),
    "embedding of the draft ids": (replaced("embed_tokens.weight", lambda w: w[:DRAFT_VOCAB]), "e shape", "e shape"),
    "another target's width (S02)": (
        stated(target_hidden_size=32),
        "e hidden-size, e fc-width",
        "e hidden-size, e fc-width",
    ),
}


def spelt_out(text: str) -> list[str]:
    """ "e a*2, w b" as ["e a", "e a", "w b"]."""
    parts = [part.split("*") for part in text.split(", ") if part]
    return [name for name, *times in parts for _ in range(int(times[0]) if times else 1)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_the_one_finding(fault: str, good: Path, target: Target, tmp_path: Path) -> None:
    change, *expected = FAULTS[fault]
    directory = rewritten(good, tmp_path / "export", change)
    for server, wanted in zip(BOTH, expected, strict=True):
        assert sorted(codes(directory, target, (server,))) == sorted(spelt_out(wanted)), server
    together = codes(directory, target)
    assert {code[2:] for code in together} <= {code[2:] for text in expected for code in spelt_out(text)}
    for finding in findings(directory, target):
        assert "\n" not in str(finding) and str(finding).startswith(f"{finding.severity}: ")


def test_ids_that_contradict_are_an_error_when_both_servers_matter(good: Path, target: Target, tmp_path: Path) -> None:
    """S19, S20: which of two lists is wrong only who trained it knows, but for both servers one is."""
    directory = rewritten(good, tmp_path / "export", ids([2, 4, 6], [2, 4, 6]))
    (found,) = findings(directory, target)
    assert found.severity == "error" and found.code == "layer-ids-convention"
    assert "[2, 4, 6]" in found.text and "[3, 5, 7]" in found.text and "ids one less" in found.text


@pytest.mark.parametrize("norms", [(), NORM_KEYS], ids=["eagle-3", "eagle-3.1"])
@pytest.mark.parametrize("layers", [[2, 4, 6], [2, 4, 5], [1, 3, 7]])
def test_a_good_export_has_no_finding(layers: list[int], norms: tuple, target: Target, tmp_path: Path) -> None:
    """S19, S20: the ids of stage 02 stand at top level as they are, and name the same states for SGLang."""
    directory = make_export(tmp_path / "export", target, layers, norms=norms)
    assert codes(directory, target) == []
    described = json.loads((directory / "config.json").read_text())
    assert described[IDS] == layers and [i + 1 for i in described["eagle_config"][IDS]] == layers
    require_servable(directory, target)


def test_a_full_vocabulary_has_no_map_and_no_finding(target: Target, tmp_path: Path) -> None:
    directory = make_export(tmp_path / "export", target, AUX, target.vocab_size)
    assert not {"d2t", "t2d"} & load_file(directory / "model.safetensors").keys()
    assert codes(directory, target) == []


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    """A target of Kimi-K2.5's config at a small width, with an embedding to compare, and its export."""
    root = tmp_path_factory.mktemp("kimi")
    small = KIMI | {"hidden_size": 64, "vocab_size": 1024, "intermediate_size": 96, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 4, "v_head_dim": 16, "architectures": ["KimiK25ForConditionalGeneration"]}
    torch.manual_seed(1)
    embedding = torch.randn(1024, 64).bfloat16()
    save_file({"language_model.model.embed_tokens.weight": embedding}, root / "model.safetensors")
    (root / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": small}))
    target = open_target(str(root))
    return target, make_export(root / "export", target, [2, 30, 58])


def test_kimi_has_no_finding_and_its_ids_start_at_two(kimi: tuple[Target, Path], tmp_path: Path) -> None:
    """S19: SGLang shifts on these targets if the first id is 1, so that what it captures depends on the version."""
    target, export = kimi
    assert codes(export, target) == []
    for nested, vllm, sglang in (
        ([1, 30, 58], "w layer-ids-convention", "e layer-ids-first"),
        ([1, 29, 57], "", "w layer-ids-first"),
        ([3, 31, 59], "w layer-ids-convention", "w layer-ids-convention"),
    ):
        directory = rewritten(export, tmp_path / "export", ids([2, 30, 58], nested))
        assert codes(directory, target, ("vllm",)) == spelt_out(vllm)
        assert codes(directory, target, ("sglang",)) == spelt_out(sglang)


def test_kimis_published_shape_has_no_finding_in_its_config(tmp_path: Path) -> None:
    """The 4.5 GB of its tensors are not written here: the config alone, and a directory without weights."""
    target = Target("m", tmp_path, KIMI, (1,), "hash")
    shape = read_draft_config(REPOSITORY / "configs/drafts/kimi_k25.json")
    described = config_json(derive(target, 32000, [2, 30, 58], shape), target)
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert codes(tmp_path, target) == ["e no-weights"]


@pytest.mark.parametrize(("layers", "norms"), [(AUX, ()), ([2, 6], NORM_KEYS)])
def test_speculators_layout_is_for_vllm_alone(layers: list[int], norms: tuple, target: Target, tmp_path: Path) -> None:
    config = derive(target, DRAFT_VOCAB, layers, norms=norms)
    model = random_draft(config)
    model.embed_tokens.copy_(read_embedding(target))
    tensors = export_tensors(model, vocab_map(target.vocab_size))
    write_speculators(tmp_path / "export", tensors, config, target, 3, "card")
    assert codes(tmp_path / "export", target, ("vllm",)) == []
    assert codes(tmp_path / "export", target) == ["e layout"]


def test_pickled_and_missing_and_damaged_weights(good: Path, target: Target, tmp_path: Path) -> None:
    directory = tmp_path / "export"
    shutil.copytree(good, directory)
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"model.safetensors is damaged .*; fetch or export it again"):
        findings(directory, target)
    weights.unlink()
    assert codes(directory, target) == ["e no-weights"]
    torch.save({}, directory / "pytorch_model.bin")
    assert codes(directory, target) == ["e pickled"]
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        findings(tmp_path, target)


def test_a_draft_in_several_files_is_read_whole(good: Path, target: Target, tmp_path: Path) -> None:
    tensors = load_file(good / "model.safetensors")
    shutil.copy(good / "config.json", tmp_path)
    for number, names in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, tmp_path / f"model-{number}.safetensors")
    assert codes(tmp_path, target) == []


def test_without_the_targets_weights_the_embedding_is_not_compared(good: Path, target: Target, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((target.directory / "config.json").read_bytes())
    assert codes(good, open_target(str(tmp_path))) == ["w embed-unchecked"]


def test_a_draft_of_another_width_brings_its_embedding(good: Path, target: Target, tmp_path: Path) -> None:
    """S02: target_hidden_size says whose states fc takes; without the embedding no server could share one."""
    wide = replace(target, config=target.config | {"hidden_size": 96})

    def change(config: Config, tensors: Tensors) -> None:
        config["target_hidden_size"] = 96
        tensors["fc.weight"] = torch.ones(64, 3 * 96, dtype=torch.bfloat16)

    assert codes(rewritten(good, tmp_path / "export", change), wide) == []
    without = rewritten(tmp_path / "export", tmp_path / "b", tensors_changed(lambda t: t.pop("embed_tokens.weight")))
    assert codes(without, wide) == ["e embed-missing"]


def test_the_command_prints_a_line_a_finding_and_counts(
    good: Path, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = rewritten(good, tmp_path / "export", stated(tie_word_embeddings=True, torch_dtype=None))
    command = [sys.executable, "-m", "eagle3.validate", str(directory), "--model-path", str(target.directory)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert found.returncode == 1 and found.stderr == ""
    lines = found.stdout.splitlines()
    assert lines[0].startswith("error: tie_word_embeddings is true: SGLang takes the embedding") and len(lines) == 3
    assert lines[1].startswith("warning: no torch_dtype")
    assert lines[2] == f"{directory}: 1 errors, 1 warnings for vllm and sglang"
    monkeypatch.setattr(sys, "argv", [*command[2:], "--server", "vllm"])
    assert main() == 0 and capsys.readouterr().out.splitlines()[-1].endswith("0 errors, 1 warnings for vllm")


def test_stage_04_stops_at_an_error_and_goes_on_after_a_warning(
    good: Path, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    directory = rewritten(good, tmp_path / "a", stated(tie_word_embeddings=True, torch_dtype=None))
    with pytest.raises(UserError, match=r"a: tie_word_embeddings is true.*write false$"):
        require_servable(directory, target)
    assert f"warning: {directory}: no torch_dtype" in capsys.readouterr().err
    directory = rewritten(directory, tmp_path / "b", tensors_changed(lambda t: t.pop("d2t")))
    with pytest.raises(UserError, match=r"\(2 errors; python -m eagle3.validate lists them\)"):
        require_servable(directory, target)
    require_servable(rewritten(good, tmp_path / "c", stated(torch_dtype=None)), target)
