"""Faults between stages: manifests, indexes, directories in each other's place, locks, unwritable places."""

import errno
import functools
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from capture_for_tests import settings_for
from prepare_for_tests import prepare_here

from eagle3 import artifacts, terminal, vllm_runtime
from eagle3.capture import engines, extract
from eagle3.model_files import tokenizer_hash
from eagle3.target import load_tokenizer, open_target
from eagle3.terminal import UserError
from eagle3.training import checkpoints, inputs
from eagle3.vocab_map import write_vocab_map


@functools.cache
def tokenizer_of(model: Path) -> object:
    return load_tokenizer(open_target(str(model)), trust_remote_code=False)


class Workplace:
    """A directory of each stage, and each stage as a function that reads or continues there."""

    def __init__(self, model: Path, chats: Path, place: Path) -> None:
        self.model, self.chats, self.place = model, chats, place
        self.states, self.vocab = place / "hidden_states", place / "vocab_map"
        self.prepared, self.draft = place / "prepared", place / "draft"

    def run_01(self) -> object:
        return prepare_here(self.model, self.chats, self.prepared, tokenizer=tokenizer_of(self.model))

    def run_02(self, **changes) -> None:
        extract.extract(self.prepared, "transformers", settings_for(self.model, self.states, **changes))

    def run_03(self) -> None:
        write_vocab_map(self.prepared, self.vocab, 64)

    def open_04(self) -> inputs.Inputs:
        return inputs.open_inputs(open_target(str(self.model)), self.states, self.vocab)


@pytest.fixture(scope="module")
def finished(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of stages 01 to 03, and the model they are of."""
    place = tmp_path_factory.mktemp("finished")
    shutil.copytree(tiny_target, place / "model")
    rows = [{"messages": [{"role": r, "content": f"{r} {n}"} for r in ("user", "assistant")]} for n in range(4)]
    (place / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    work = Workplace(place / "model", place / "chats.jsonl", place)
    work.run_01()
    work.run_02()
    work.run_03()
    return place


@pytest.fixture
def work(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """A copy of the outputs to break; no engine is loaded."""
    for name in ("prepared", "hidden_states", "vocab_map"):
        shutil.copytree(finished / name, tmp_path / name)
    monkeypatch.setattr(engines, "open_engine", lambda *_: pytest.fail("the engine was loaded"))
    return Workplace(finished / "model", finished / "chats.jsonl", tmp_path)


READERS = [  # the manifest that is broken, who reads it
    ("prepared", Workplace.run_01),
    ("prepared", Workplace.run_02),
    ("prepared", Workplace.run_03),
    ("hidden_states", Workplace.run_02),
    ("hidden_states", Workplace.open_04),
    ("vocab_map", Workplace.run_03),
    ("vocab_map", Workplace.open_04),
]
STAGE = {"prepared": "01", "hidden_states": "02", "vocab_map": "03"}


@pytest.mark.parametrize(("name", "read"), READERS)
@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", r"is damaged \(Expecting value.*; delete .* and rerun stage {stage}"),
        ("[]", r"is damaged \(a list\); delete .* and rerun stage {stage}"),
        (b"\xff\xfe\x00", r"is damaged \(.*; delete .* and rerun stage {stage}"),
        ({"schema_version": 2, "stage": "01"}, "has schema version 2, this program reads 1; use the program that"),
        ({"stage": "01"}, "lacks the field schema_version; delete .* and rerun stage {stage}"),
        ({"schema_version": 1}, "lacks the field stage; delete .* and rerun stage {stage}"),
        ({"schema_version": 1, "stage": None}, "lacks the field fingerprint; delete .* and rerun stage {stage}"),
        ({"schema_version": 1, "stage": None, "fingerprint": "x"}, r"is damaged \(fingerprint 'x'\)"),
    ],
    ids=lambda value: None if isinstance(value, (str, bytes)) and len(value) > 3 else str(value)[:40],
)
def test_a_damaged_manifest(work: Workplace, name: str, read: Callable, content, line: str) -> None:
    path = work.place / name / "manifest.json"
    if isinstance(content, dict):
        stage = {"stage": STAGE[name]} if "stage" in content else {}
        content = json.dumps(content | stage)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=f"^{path} {line.replace('{stage}', STAGE[name])}"):
        read(work)


@pytest.mark.parametrize(("name", "read"), [pair for pair in READERS if pair != ("vocab_map", Workplace.run_03)])
def test_every_field_that_a_stage_takes_from_a_manifest(work: Workplace, name: str, read: Callable) -> None:
    """Without any one of its fields a manifest is either good enough, or refused by the name of that field."""
    path = work.place / name / "manifest.json"
    whole = json.loads(path.read_text())
    refused = set()
    for field in whole:
        path.write_text(json.dumps({key: value for key, value in whole.items() if key != field}))
        try:
            read(work)
        except UserError as error:
            assert field in str(error), error
            refused.add(field)
    assert {"schema_version", "stage", "fingerprint"} <= refused


@pytest.mark.parametrize(
    ("name", "read", "line"),
    [
        ("prepared", Workplace.run_02, "01 again"),
        ("hidden_states", Workplace.open_04, "02 again"),
    ],
)
def test_an_index_that_lost_its_records_is_not_trusted(work: Workplace, name: str, read: Callable, line: str) -> None:
    path = work.place / name / "index.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in (0, 3):
        path.write_bytes(b"".join(lines[:kept]))
        with pytest.raises(UserError, match=rf"index\.jsonl names .*; run the command of stage {line}"):
            read(work)
    path.unlink()
    with pytest.raises(UserError, match=rf"index\.jsonl names .*; run the command of stage {line}"):
        read(work)


@pytest.mark.parametrize(("name", "read"), [READERS[i] for i in (0, 1, 4)])  # 02 makes its own again
@pytest.mark.parametrize(
    ("record", "line"),
    [
        (b"\xff\x00", r"line 2 is damaged \(.*; delete that line and rerun the stage that wrote it"),
        (b"[1]", r"line 2 is damaged \(a list, expected an object\); delete that line"),
        (b'{"index": 0}', "line 2 lacks the field (status|row|source|tokens|bytes); delete that line"),
    ],
)
def test_a_damaged_record(work: Workplace, name: str, read: Callable, record: bytes, line: str) -> None:
    path = work.place / name / "index.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], record, *lines[2:], b""]))
    with pytest.raises(UserError, match=rf"index\.jsonl {line}"):
        read(work)


def test_directories_in_each_others_place(work: Workplace, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    expected = r"expected (the output of )?stage 01 \(prepared samples\)"
    for place, line in (
        (work.states, rf"holds artifacts of stage 02 \(hidden states\), {expected}"),
        (work.vocab, rf"holds artifacts of stage 03 \(vocabulary map\), {expected}"),
        (work.model, f"is a model directory; {expected}"),
        (tmp_path / "empty", rf"has no manifest\.json, it is empty; {expected}"),
        (tmp_path / "none", f": no such directory; {expected}"),
        (tmp_path / "file", "is not a directory; give one for the prepared samples of stage 01"),
    ):
        for read in (
            lambda place=place: write_vocab_map(place, tmp_path / "out", 64),
            lambda place=place: extract.extract(place, "transformers", settings_for(work.model, tmp_path / "out2")),
        ):
            with pytest.raises(UserError, match=f"^{place} ?{line}"):
                read()
    work.states, work.vocab = work.vocab, work.states  # the flags of stage 04 mixed up
    with pytest.raises(UserError, match=r"\(vocabulary map\), expected stage 02 \(hidden states\); give another"):
        work.open_04()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"dtype": "bfloat16"}, "dtype is 'float32', this run has 'bfloat16'"),
        ({"layers": (1, 2, 3, 8)}, r"layers is \[2, 4, 5, 8\], this run has \[1, 2, 3, 8\]"),
    ],
)
def test_states_of_other_flags_are_not_continued(work: Workplace, changes: dict, line: str) -> None:
    with pytest.raises(UserError, match=f"{line}; use another --output-dir, or delete this one"):
        work.run_02(**changes)


def test_a_chat_template_that_changed_after_stage_01(work: Workplace, tmp_path: Path) -> None:
    """02 and 04 notice without a tokenizer; so does a rerun of 01."""
    before = tokenizer_hash(work.model)
    work.model = Path(shutil.copytree(work.model, tmp_path / "changed"))
    with open(work.model / "chat_template.jinja", "a") as file:
        file.write(" ")
    line = f"tokenizer is '{before}', this run has '{tokenizer_hash(work.model)}'; "
    for read, remedy in (
        (work.run_01, "give another --output-dir"),
        (work.run_02, "give the --model-path that stage 01 had, unchanged"),
        (work.open_04, "give the --model-path that stage 02 had, unchanged"),
    ):
        with pytest.raises(UserError, match=line + remedy):
            read()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "tiktoken.model", "tokenization_own.py"])
def test_every_file_of_a_tokenizer_counts(finished: Path, tmp_path: Path, name: str) -> None:
    model = Path(shutil.copytree(finished / "model", tmp_path / "model"))
    before = tokenizer_hash(model)
    with open(model / name, "a") as file:
        file.write("\n")
    assert tokenizer_hash(model) != before == tokenizer_hash(finished / "model")


@pytest.mark.parametrize("field", ["target", "tokenizer"])
def test_a_map_of_another_target_or_tokenizer(work: Workplace, field: str) -> None:
    path = work.vocab / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["fingerprint"][field] = "another"
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"vocab_map: {field} is 'another', this run has '.*'; rerun stage 03"):
        work.open_04()


def test_checkpoints_without_a_manifest_are_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "barrier", lambda: None)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step00000001")
    with pytest.raises(UserError, match=r"has checkpoints but no manifest\.json; what made them is unknown"):
        checkpoints.claim_output(tmp_path, {"seed": 0})


# ------------------------------------------------------------------------------------- rerunning the writer


def test_what_a_reader_refuses_the_writer_makes_again(finished: Path, tmp_path: Path) -> None:
    """Corrupt a file of each stage, rerun its writer: the same bytes are there again, and the next stage works."""
    for name in ("prepared", "hidden_states", "vocab_map"):
        shutil.copytree(finished / name, tmp_path / name)
    work = Workplace(finished / "model", finished / "chats.jsonl", tmp_path)
    files = [artifacts.sample_path(work.prepared, 1), work.prepared / "token_freq.pt"]
    files += [artifacts.sample_path(work.states, 2), work.vocab / "vocab_map.pt"]
    whole = [path.read_bytes() for path in files]
    for path in files:
        path.write_bytes(b"hello")
    for reader in (work.run_03, work.open_04):
        with pytest.raises(UserError, match="damaged"):
            reader()
    work.run_01()
    work.run_02()
    work.run_03()
    assert [path.read_bytes() for path in files[:2]] == whole[:2] and files[3].read_bytes() == whole[3]
    assert len(work.open_04().records) == 4
    states = artifacts.load_fields(files[2], artifacts.STATES, "02")
    before = artifacts.load_tensors(artifacts.sample_path(finished / "hidden_states", 2))
    assert all(torch.allclose(states[name], before[name], atol=1e-5) for name in states)


# ----------------------------------------------------------------------------------------- places and locks


def test_a_second_process_in_the_folder_of_each_stage(work: Workplace, chats: Path, run_script) -> None:
    holder = f"is in use by {socket.gethostname()} pid {os.getpid()}; wait for it"
    for place, run in (
        (work.prepared, work.run_01),
        (work.states, work.run_02),
        (work.vocab, work.run_03),
    ):
        with artifacts.directory_lock(place), pytest.raises(UserError, match=holder):
            run()
    with artifacts.directory_lock(work.draft):
        result = run_script(
            "04_train_draft.py", "--model-path", work.model, "--hidden-states-dir", work.states,
            "--vocab-map-dir", work.vocab, "--output-dir", work.draft, check=False,
        )  # fmt: skip
    assert result.returncode == 1 and result.stderr.strip() == f"error: {work.draft} {holder}"
    assert [path.name for path in work.draft.iterdir()] == [".lock"]


def test_an_output_path_that_is_a_file_or_inside_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "out"):
        line = f"{place} cannot be made, {tmp_path}/file is a file; give another --output-dir"
        with pytest.raises(UserError, match=line), artifacts.directory_lock(place):
            pass


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (errno.ENOSPC, "No space left on device (place); free space there, or give another folder, then run the same"),
        (errno.EROFS, "Read-only file system (place); give a folder that can be written, or mount it writable, then"),
        (errno.EACCES, "Permission denied (place); give a folder of your own, or change its permissions, then run"),
        (errno.ENOENT, "No such file or directory (place); check the path, then run the same command"),
        (errno.ENOTDIR, "Not a directory (place); check the path: a part of it is a file, then run the same command"),
        (errno.EIO, "Input/output error (place); the disk or the network share failed: look at dmesg, mend it, then"),
        (errno.ENOTEMPTY, "Directory not empty (place); mend that, then run the same command"),
    ],
)
def test_advice_fits_the_error_of_the_operating_system(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, number: int, line: str
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def main() -> None:
        raise OSError(number, os.strerror(number), "place")

    with pytest.raises(SystemExit) as end:
        terminal.run(main)
    assert end.value.code == 1 and capsys.readouterr().err.startswith(f"error: {line}")


def test_a_write_that_fails_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(OSError) as error, artifacts.atomic_file(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")  # as write and fsync raise it
    assert error.value.filename == str(tmp_path / "out") and not list(tmp_path.iterdir())


def test_no_engine_is_installed(work: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_runtime.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--engine vllm: vllm is not installed here; install it, or use --engine trans"):
        extract.extract(work.prepared, "vllm", settings_for(work.model, work.states))
