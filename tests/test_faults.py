"""Faults of model directories, datasets and tensor files: one line with the place, the values and what to do."""

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from capture_for_tests import random_prompts, settings_for, write_prepared
from prepare_for_tests import prepare_here
from states_for_tests import AUX_LAYERS, write_states

from eagle3 import artifacts, default_target, model_files
from eagle3.capture import engines, extract
from eagle3.capture.run import load
from eagle3.capture.transformers_engine import TransformersEngine
from eagle3.draft.config import derive
from eagle3.prepare.progress import Totals
from eagle3.sources import open_datasets
from eagle3.target import load_tokenizer, open_target, read_embedding, read_final_norm, read_lm_head
from eagle3.terminal import UserError
from eagle3.training.inputs import Inputs, open_inputs
from eagle3.training.supervision import load_sample
from eagle3.vocab_map import write_vocab_map

Change = Callable[[Path], object]


class Marker:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (str(self.path), "w")


def edit_json(name: str, **values: object) -> Change:
    """Sets fields of a JSON file; None takes one out."""

    def change(directory: Path) -> None:
        path = directory / name
        content = json.loads(path.read_text()) | values
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return change


def write(name: str, content: str | bytes) -> Change:
    return lambda directory: (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(name: str, size: int) -> Change:
    return lambda directory: os.truncate(directory / name, size)


def remove(*patterns: str) -> Change:
    return lambda directory: [path.unlink() for pattern in patterns for path in directory.glob(pattern)]


# ---------------------------------------------------------------------------------------- model directory


@pytest.fixture
def model(tiny_target: Path, tmp_path: Path) -> Path:
    """A copy of the tiny target to break."""
    return Path(shutil.copytree(tiny_target, tmp_path / "model"))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (remove("config.json"), r"--model-path .*model has no config\.json; give the directory of a whole model"),
        (remove("*"), r"has no config\.json, it is empty; give"),
        (write("config.json", '{"a": '), r"config\.json is not valid JSON \(Expecting value.*; fetch it again"),
        (write("config.json", b"\xff\x00"), r"config\.json is not valid JSON .*; fetch it again"),
        (write("config.json", "[1]"), r"config\.json holds a list, expected an object; fetch it again"),
        (edit_json("config.json", hidden_size=None), r"config\.json: hidden_size is None, expected a positive integer"),
        (edit_json("config.json", vocab_size="many"), r"config\.json: vocab_size is 'many', expected"),
        (edit_json("config.json", text_config="x"), r"text_config is 'x', expected an object"),
    ],
)
def test_what_is_no_model_is_named(model: Path, change: Change, line: str) -> None:
    change(model)
    with pytest.raises(UserError, match=line):
        open_target(str(model))


def test_a_model_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, line in ((tmp_path / "file", "is a file; give the directory"), ("nowhere", "no such directory; give a")):
        with pytest.raises(UserError, match=f"--model-path {path}:? {line}"):
            open_target(str(path))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (remove("token*", "*.jinja"), r"has no tokenizer files \(tokenizer\.json, \.\.\.\); fetch them beside config"),
        (write("tokenizer.json", '{"a'), r"the tokenizer does not load \(JSONDecodeError.*; fetch its files again"),
        (write("tokenizer_config.json", "[]"), r"tokenizer_config\.json holds a list, expected an object"),
        (remove("chat_template.jinja"), r"has no chat template; put the model's chat_template\.jinja there"),
        (
            edit_json("config.json", vocab_size=4000),
            r"tokenizer has ids up to 49151, config\.json's vocab_size is 4000",
        ),
    ],
)
def test_a_tokenizer_that_is_not_there_or_not_the_models(model: Path, change: Change, line: str) -> None:
    change(model)
    with pytest.raises(UserError, match=line):
        load_tokenizer(open_target(str(model)), trust_remote_code=False)


SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12583032\n"
WEIGHT_FAULTS = [
    (remove(SHARD), f"1 of 3 weight files of .* first {SHARD}: missing; fetch it again"),
    (write(SHARD, ""), f"first {SHARD}: empty"),
    (cut(SHARD, 5_000_000), rf"first {SHARD}: 5,000,000 bytes, its header says 12,583,\d\d\d; fetch it"),
    (cut(SHARD, 30), f"first {SHARD}: no safetensors file, or cut short at 30 bytes"),
    (write(SHARD, LFS), f"first {SHARD}: a git-lfs pointer in the place of the file .*; fetch it again"),
    (write(SHARD, b"\x10" + b"\0" * 7 + b"x" * 40), f"first {SHARD}: no safetensors file"),
    (remove("model-*"), "3 of 3 weight files of .* first model-00001-of-00003.safetensors: missing; fetch them again"),
    (write(INDEX, "{}"), f"{INDEX} has no weight_map from tensors to files; fetch it again"),
    (write(INDEX, json.dumps({"weight_map": {"x": SHARD}})), "lacks x, which the index places there"),
    (remove("model*"), f"has no weights: neither {INDEX} nor model.safetensors; fetch them"),
    (edit_json("config.json", architectures=None), "names no architectures, so no engine can load it"),
    (edit_json("config.json", vocab_size=49280), "has 49152 rows, config.json's vocab_size is 49280"),
]


@pytest.mark.parametrize(("change", "line"), WEIGHT_FAULTS)
def test_every_weight_file_is_looked_at(model: Path, change: Change, line: str) -> None:
    """T09: a missing or damaged shard is named."""
    change(model)
    with pytest.raises(UserError, match=line):
        model_files.require_loadable(model, open_target(str(model)).vocab_size)


def test_stage_02_looks_before_an_engine_is_loaded(
    tiny_target: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = write_prepared(tmp_path / "prepared", tiny_target, random_prompts([40]))
    monkeypatch.setattr(engines, "open_engine", lambda *_: pytest.fail("the engine was loaded"))
    (model / SHARD).unlink()
    with pytest.raises(UserError, match=f"first {SHARD}: missing"):
        extract.extract(prepared, "transformers", settings_for(model, tmp_path / "out"))


def test_headers_of_a_huge_model_are_read_in_a_moment(tmp_path: Path) -> None:
    """64 files of 40,000 tensors and 550 GB, as holes: no second of reading, and the one short file found."""
    files = [f"model-{i:05d}.safetensors" for i in range(64)]
    size, places = 13_750_000, {}
    for number, name in enumerate(files):
        names = [f"model.layers.{number}.experts.{i}.weight" for i in range(625)]
        header = {
            tensor: {"dtype": "I8", "shape": [size], "data_offsets": [i * size, i * size + size]}
            for i, tensor in enumerate(names)
        }
        text = json.dumps(header).encode()
        (tmp_path / name).write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(tmp_path / name, 8 + len(text) + 625 * size)
        places |= dict.fromkeys(names, name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    started = time.perf_counter()
    model_files.require_loadable(tmp_path, 100)
    assert time.perf_counter() - started < 2  # 0.15 s on an idle machine
    os.truncate(tmp_path / files[40], 1_000_000_000)
    with pytest.raises(UserError, match=r"1 of 64 .* first model-00040\.safetensors: 1,000,000,000 bytes, its header"):
        model_files.require_loadable(tmp_path, 100)


def test_stage_04_needs_only_the_files_that_it_reads(model: Path) -> None:
    """T09: a shard that was cut short is named."""
    target = open_target(str(model))
    index = json.loads((model / INDEX).read_text())
    index["weight_map"]["model.layers.7.other.weight"] = "model-00009.safetensors"
    (model / INDEX).write_text(json.dumps(index))
    assert read_embedding(target).shape == read_lm_head(target).shape and read_final_norm(target).shape == (64,)
    os.truncate(model / index["weight_map"]["lm_head.weight"], 3_000_000)
    with pytest.raises(UserError, match=r"cannot read lm_head\.weight \(3,000,000 bytes, its header says .*fetch it"):
        read_lm_head(target)


def test_a_tensor_that_the_index_forgot_is_reported(model: Path) -> None:
    """T09: it is in a shard, but nothing says so."""
    index = json.loads((model / INDEX).read_text())
    del index["weight_map"]["model.embed_tokens.weight"]
    (model / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"0 tensors ...embed_tokens.weight, expected one; candidates: .*lm_head"):
        read_embedding(open_target(str(model)))


def test_an_architecture_that_transformers_does_not_know(model: Path, tmp_path: Path) -> None:
    edit_json("config.json", model_type="made_up", architectures=["MadeUpForCausalLM"])(model)
    with pytest.raises(UserError, match=r"transformers cannot load .*made_up"):
        TransformersEngine(settings_for(model, tmp_path / "out"))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (write("config.json", "{"), "is not valid JSON"),
        (cut(SHARD, 1000), "1 of 3 weight files"),
        (remove("tokenizer.json"), "tokenizer.json is missing"),
    ],
)
def test_a_damaged_embedded_target_is_converted_again(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, change: Change, line: str
) -> None:
    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path))
    monkeypatch.setattr(
        default_target, "_convert", lambda gguf, to: shutil.copytree(tiny_target, to, dirs_exist_ok=True)
    )
    cached = default_target.default_target()
    assert cached.parent == tmp_path and default_target.default_target() == cached and not capsys.readouterr().err
    change(cached)
    assert default_target.default_target() == cached
    error = capsys.readouterr().err
    assert f"{cached} is damaged" in error and line in error and "converting the embedded target again" in error
    assert default_target.default_target() == cached and not capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ datasets


@pytest.mark.parametrize("name", ["rows.pkl", "rows.pt", "rows.bin", "rows.csv", "only-pickles"])
def test_a_pickle_given_as_a_dataset_is_never_opened(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if not path.suffix:
        path.mkdir()
        path /= "rows.pkl"
    path.write_bytes(pickle.dumps(Marker(tmp_path / "marker")))
    with pytest.raises(UserError, match=rf"--dataset .*{name}: (expected a file that ends in|no) \.json, \.jsonl"):
        open_datasets([str(tmp_path / name)])
    assert not (tmp_path / "marker").exists()


def test_pickles_beside_the_rows_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "b.pkl").write_bytes(pickle.dumps(Marker(tmp_path / "marker")))
    assert [row.place for row in open_datasets([str(tmp_path)]).rows(tmp_path)] == ["a.jsonl:1"]
    assert not (tmp_path / "marker").exists()


def test_a_hub_dataset_in_a_format_that_unpickles_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The datasets library has a builder that unpickles; `pandas` by its name, reading the files of this folder."""
    import datasets

    (tmp_path / "train.pkl").write_bytes(pickle.dumps(Marker(tmp_path / "marker")))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--dataset pandas is of the format pandas, which is not read; give"):
        open_datasets(["pandas"])
    assert not (tmp_path / "marker").exists()
    with pytest.raises(AttributeError):  # what is refused would have run the code
        list(datasets.load_dataset("pandas", split="train", streaming=True))
    assert (tmp_path / "marker").exists()


def test_a_hub_dataset_of_any_other_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.csv").write_text("a,b\n1,2\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is of the format csv, which is not read"):
        open_datasets(["csv"])


# -------------------------------------------------------------------------------------- damaged tensors


SAMPLE = "samples/00000/00000001.pt"
DAMAGES = {
    "short": lambda path: os.truncate(path, path.stat().st_size - 100),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("hello"),
    "gone": Path.unlink,
    "other": lambda path: torch.save({"a": torch.zeros(3)}, path),
    "tensor": lambda path: torch.save(torch.zeros(3), path),
    "list": lambda path: torch.save([1], path),
}


@pytest.fixture
def prepared(tiny_target: Path, tmp_path: Path) -> Path:
    return write_prepared(tmp_path / "prepared", tiny_target, random_prompts([40, 30]))


@pytest.fixture
def states(tiny_target: Path, tmp_path: Path) -> Path:
    """A directory with hidden_states/ and vocab_map/."""
    write_states(tmp_path, tiny_target, count=3)
    return tmp_path


def opened(model: Path, states: Path) -> Inputs:
    return open_inputs(open_target(str(model)), states / "hidden_states", states / "vocab_map")


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_samples_are_counted_before_the_work_begins(
    tiny_target: Path, prepared: Path, states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(engines, "open_engine", lambda *_: pytest.fail("the engine was loaded"))
    DAMAGES[damage](prepared / SAMPLE)
    line = rf"1 of 2 samples of .* first .*{SAMPLE}: (missing|[\d,]+ bytes, .*); run the command of stage 01 again"
    with pytest.raises(UserError, match=line):
        extract.extract(prepared, "transformers", settings_for(tiny_target, tmp_path / "out"))
    DAMAGES[damage](states / "hidden_states" / SAMPLE)
    with pytest.raises(UserError, match=r"1 of 3 samples of .*; run the command of stage 02 again, it redoes them"):
        opened(tiny_target, states)


def altered(path: Path, **values: torch.Tensor) -> None:
    torch.save({name: tensor.clone() for name, tensor in artifacts.load_tensors(path).items()} | values, path)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"input_ids": torch.full((30,), 49152, dtype=torch.int32)}, "ids from 49152 to 49152, the target has 49152"),
        ({"input_ids": torch.full((30,), -1, dtype=torch.int32)}, "ids from -1 to -1"),
        ({"input_ids": torch.zeros(30)}, r"input_ids is torch\.float32 \(30,\), expected torch\.int32 of 1 dimension"),
        ({"input_ids": torch.zeros(29, dtype=torch.int32)}, "29 ids, the index says 30"),
        ({"loss_mask": torch.ones(30, dtype=torch.int32)}, r"loss_mask is torch\.int32"),
        ({"loss_mask": torch.ones(30, dtype=torch.bool)}, "30 supervised tokens, the index says 15"),
        ({"loss_mask": torch.ones(1, 30, dtype=torch.bool)}, r"loss_mask is torch\.bool \(1, 30\)"),
    ],
)
def test_a_prepared_sample_of_the_right_size_with_the_wrong_content(prepared: Path, values: dict, line: str) -> None:
    altered(prepared / SAMPLE, **values)
    with pytest.raises(UserError, match=rf"{SAMPLE} is damaged: {line}.*; delete it and rerun stage 01"):
        load(prepared, artifacts.Index(prepared).samples()[1], 49152)


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        ("input_ids", lambda t: t + 49152, "ids from .* the target has 49152"),
        ("aux_hidden", lambda t: t * float("nan"), "aux_hidden is not finite"),
        ("final_hidden", lambda t: t.index_fill(0, torch.tensor([3]), float("inf")), "final_hidden is not finite"),
        ("aux_hidden", lambda t: t[:, 1:].clone(), "aux_hidden is 191 wide, expected 192"),
        ("final_hidden", lambda t: t[:, 1:].clone(), "final_hidden is 63 wide, expected 64"),
        ("final_hidden", lambda t: t[1:].clone(), "25 final states, the index says 26"),
        ("aux_hidden", lambda t: t[1:].clone(), "41 aux states, the index says 42"),
        ("aux_hidden", lambda t: t.int(), r"aux_hidden is torch\.int32 .* expected torch\.bfloat16 or torch\.float32"),
    ],
)
def test_a_states_sample_of_the_right_size_with_the_wrong_content(
    tiny_target: Path, states: Path, name: str, change: Callable, line: str
) -> None:
    path = states / "hidden_states" / SAMPLE
    altered(path, **{name: change(artifacts.load_tensors(path)[name].clone())})
    config = derive(open_target(str(tiny_target)), 64, AUX_LAYERS)
    with pytest.raises(UserError, match=rf"{SAMPLE} is damaged: {line}.*; delete it and rerun stage 02"):
        load_sample(states / "hidden_states", artifacts.Index(states / "hidden_states").samples()[1], config)


@pytest.mark.parametrize("damage", [*DAMAGES, "float", "outside", "int mask"])
def test_a_damaged_vocabulary_map(tiny_target: Path, states: Path, damage: str) -> None:
    """V04: no training without a map that is one."""
    path = states / "vocab_map" / "vocab_map.pt"
    if damage in DAMAGES:
        DAMAGES[damage](path)
    elif damage == "float":
        altered(path, d2t=torch.zeros(64))
    elif damage == "outside":
        altered(path, d2t=torch.full((64,), 10**7))
    else:
        altered(path, t2d=artifacts.load_tensors(path)["t2d"].int())
    with pytest.raises(UserError, match=r"vocab_map\.pt(:| is) .*rerun (stage 03|the stage that writes it|.*wrote it)"):
        opened(tiny_target, states)


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> object:
    return load_tokenizer(open_target(str(tiny_target)), trust_remote_code=False)


@pytest.mark.parametrize("damage", [*DAMAGES, "negative", "zero"])
def test_damaged_counts_are_refused_by_03_and_counted_again_by_01(
    tiny_target: Path, tokenizer: object, chats: Path, tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "prepared"

    def run() -> Totals | None:
        return prepare_here(tiny_target, chats, out, tokenizer=tokenizer)

    run()
    path = out / "token_freq.pt"
    whole = path.read_bytes()
    if damage in DAMAGES:
        DAMAGES[damage](path)
    else:
        counts = artifacts.load_tensors(path)
        torch.save(counts - 1 if damage == "negative" else counts * 0, path)
    with pytest.raises(UserError, match=r"token_freq\.pt is .*rerun (stage 01|the stage)"):
        write_vocab_map(out, tmp_path / "map", 64)
    artifacts.save_tensors(out / "token_freq.partial.pt", {"samples": torch.tensor(3)})  # damaged as well
    assert run().samples == 12 and path.read_bytes() == whole and run() is None
    assert write_vocab_map(out, tmp_path / "map", 64).size == 64


def test_pickles_in_the_place_of_artifacts_are_never_loaded(
    tiny_target: Path, prepared: Path, states: Path, tmp_path: Path
) -> None:
    marker = Marker(tmp_path / "marker")
    target = open_target(str(tiny_target))
    config = derive(target, 64, AUX_LAYERS)
    hidden = states / "hidden_states"
    places = {
        prepared / SAMPLE: lambda: load(prepared, artifacts.Index(prepared).samples()[1], 49152),
        prepared / "token_freq.pt": lambda: artifacts.load_counts(prepared, 49152, 1),
        hidden / SAMPLE: lambda: load_sample(hidden, artifacts.Index(hidden).samples()[1], config),
        states / "vocab_map" / "vocab_map.pt": lambda: opened(tiny_target, states),
    }
    for path, read in places.items():
        for save, cause in (
            (lambda path: path.write_bytes(pickle.dumps(marker)), "it is no .pt file of this program"),
            (lambda path: torch.save({"input_ids": marker}, path), "it holds Python objects, which are never loaded"),
        ):
            save(path)
            with pytest.raises(UserError, match=f"{path} is damaged: {cause}; delete it and rerun"):
                read()
    assert not marker.path.exists()


def test_a_model_whose_weights_are_pickles_is_refused(model: Path, tmp_path: Path) -> None:
    remove("model*")(model)
    torch.save({"model.embed_tokens.weight": Marker(tmp_path / "marker")}, model / "pytorch_model.bin")
    line = r"weights as pickles only \(pytorch_model\.bin\), which are never loaded .*; convert them to safetensors"
    for read in (
        lambda: model_files.require_loadable(model, 49152),  # stage 02
        lambda: read_embedding(open_target(str(model))),  # stage 04
    ):
        with pytest.raises(UserError, match=line):
            read()
    with pytest.raises(UserError, match=r"transformers cannot load|loading the target failed"):
        TransformersEngine(settings_for(model, tmp_path / "out"))
    assert not (tmp_path / "marker").exists()
