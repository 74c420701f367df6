"""Stage 02 after a kill, with damaged files, with an engine that dies, in the directory of something else."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from capture_for_tests import random_prompts, settings_for, write_prepared
from conftest import REPOSITORY
from states_for_tests import write_states

from eagle3 import artifacts
from eagle3.artifacts import Index
from eagle3.capture import engines, extract
from eagle3.capture.interface import EngineDied, EngineSettings, Fault, Sample
from eagle3.capture.run import KILLED, Limits
from eagle3.capture.transformers_engine import TransformersEngine
from eagle3.draft.config import derive
from eagle3.model_files import tokenizer_hash
from eagle3.target import open_target
from eagle3.terminal import UserError
from eagle3.training.inputs import open_inputs
from eagle3.training.supervision import load_sample

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [40, 30, 120, 64, 5, 33, 90, 12, 20, 18]


@pytest.fixture(scope="module")
def prepared(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared"), tiny_target, random_prompts(LENGTHS))


@pytest.fixture
def settings(tiny_target: Path, tmp_path: Path) -> EngineSettings:
    return settings_for(tiny_target, tmp_path / "out")


@pytest.fixture(scope="module")
def finished(prepared: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    extract.extract(prepared, "transformers", settings_for(tiny_target, out))
    return out


@pytest.fixture
def out(finished: Path, settings: EngineSettings) -> Path:
    """The output directory of `settings`, with all samples."""
    return shutil.copytree(finished, settings.output_dir, dirs_exist_ok=True)


def assert_whole(directory: Path) -> None:
    """Ten entries, and every file is what its entry says."""
    records = Index(directory).samples()
    assert list(records) == list(range(10)) and not list(directory.rglob("*.tmp"))
    for index, record in records.items():
        assert record["status"] == "done" and record["tokens"] == LENGTHS[index]
        tensors = artifacts.load_sample(directory, "02", record, 49152)
        assert record["bytes"] == artifacts.sample_path(directory, index).stat().st_size
        assert len(tensors["aux_hidden"]) == LENGTHS[index]
        assert len(tensors["final_hidden"]) == record["supervised"] == int(tensors["loss_mask"].sum())
    manifest = artifacts.read_manifest(directory, "02")
    assert manifest["complete"] and manifest["samples"] == 10 and manifest["tokens"] == sum(LENGTHS)


# ------------------------------------------------------------------------------------- kills, damaged files

STOPS_IN_THE_SIXTH_WRITE = """
import io, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, "tests")
from capture_for_tests import settings_for
from eagle3.capture import extract
save, prepared, model, out = torch.save, *map(Path, sys.argv[1:])
def half(tensors, file):
    if len(list(out.glob("samples/*/*.pt"))) < 5:
        return save(tensors, file)
    whole = io.BytesIO()
    save(tensors, whole)
    file.write(whole.getvalue()[:len(whole.getvalue()) // 2])
    file.flush()
    print("half", flush=True)
    time.sleep(60)
torch.save = half
extract.extract(prepared, "transformers", settings_for(model, out, batch_tokens=1))
"""


def test_a_kill_in_the_middle_of_a_write(prepared: Path, settings: EngineSettings, tiny_target: Path, tmp_path) -> None:
    """Cases H14 (the index is whole after a resume), H16 (no half file under a sample's name; 04 names a bad one)."""
    out = settings.output_dir
    command = [sys.executable, "-c", STOPS_IN_THE_SIXTH_WRITE, prepared, tiny_target, out]
    with subprocess.Popen(list(map(str, command)), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert any(line == "half\n" for line in process.stdout)
        process.send_signal(signal.SIGKILL)
    [half] = out.rglob("*.pt.*.tmp")
    assert half.name.startswith(".00000005.pt.") and half.stat().st_size > 10_000
    assert sorted(path.stem for path in out.glob("samples/*/*.pt")) == [f"{index:08d}" for index in range(5)]
    assert list(Index(out).samples()) == list(range(5)) and not artifacts.read_manifest(out, "02")["complete"]
    times = {path: path.stat().st_mtime_ns for path in out.glob("samples/*/*.pt")}

    extract.extract(prepared, "transformers", settings)
    assert_whole(out)
    assert times == {path: path.stat().st_mtime_ns for path in times}, "finished samples were captured again"

    write_states(tmp_path / "other", tiny_target)
    target, vocab = open_target(str(tiny_target)), tmp_path / "other/vocab_map"
    path = artifacts.sample_path(out, 6)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])  # a disk that lost a part of it
    with pytest.raises(UserError, match=rf"1 of 10 samples .* first {path}: .* run the command of stage 02 again"):
        open_inputs(target, out, vocab)
    extract.extract(prepared, "transformers", settings)
    assert_whole(out)
    assert path.stat().st_size == len(whole) and len(open_inputs(target, out, vocab).records) == 10
    path.write_bytes(whole[: len(whole) // 2].ljust(len(whole), b"\0"))  # of the right size
    record, config = Index(out).samples()[6], derive(target, 64, [2, 4, 5])
    with pytest.raises(UserError, match=rf"{path} is damaged: .*; delete it and rerun the stage that wrote it"):
        load_sample(out, record, config)


@pytest.mark.parametrize("damage", [b"\xff\x00", b"[1]", b'{"index": 3}', b"{", b'"index status"', b"\r\xfe"])
def test_a_damaged_index_is_made_again(prepared, settings: EngineSettings, out: Path, capsys, damage: bytes) -> None:
    """Case H14: not fatal; what its lines told of is captured again, and nothing else."""
    lines = Index(out).path.read_bytes().splitlines()
    Index(out).path.write_bytes(b"\n".join([*lines[:3], damage, damage, *lines[5:], lines[0][:20]]))
    times = {path: path.stat().st_mtime_ns for path in out.glob("samples/*/*.pt")}
    capsys.readouterr()
    extract.extract(prepared, "transformers", settings)
    assert f"{Index(out).path}: damaged lines dropped: 2; their samples are captured" in capsys.readouterr().out
    assert_whole(out)
    redone = {int(path.stem) for path in times if path.stat().st_mtime_ns != times[path]}
    assert redone == {json.loads(line)["index"] for line in lines[3:5]}


# ------------------------------------------------------------------------------------- engines that die


class Mortal(TransformersEngine):
    """Takes samples three at a time and dies of some."""

    opened: list["Mortal"]
    deadly: dict[int, int]  # sample -> how many engines it ends

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.together: list[int] = []  # how many samples were in flight when each began
        self.closed = False
        self.opened.append(self)

    def capture(self, samples: Iterator[Sample]) -> Iterator:
        flight: list[Sample] = []
        samples = iter(samples)
        while True:
            while len(flight) < 3 and (one := next(samples, None)):
                flight.append(one)
            if not flight:
                return
            self.together.append(len(flight))
            first = flight.pop(0)
            if self.deadly.get(first.index, 0) > 0:
                self.deadly[first.index] -= 1
                raise EngineDied("vLLM died while computing (illegal memory access); its output is in engine.log")
            yield from super().capture([first])

    def close(self) -> None:
        self.closed = True
        super().close()


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> type[Mortal]:
    engine = type("Engine", (Mortal,), {"opened": [], "deadly": {}})
    monkeypatch.setattr(engines, "open_engine", lambda name, settings, longest: engine(settings))
    return engine


def test_an_engine_that_dies_is_started_again_once(prepared, settings: EngineSettings, mortal, capsys) -> None:
    mortal.deadly[4] = 1
    assert extract.extract(prepared, "transformers", settings)
    assert_whole(settings.output_dir)
    first, second = mortal.opened
    assert first.closed and second.closed
    assert second.together[:3] == [1, 1, 1], "each of the three that were in the engine goes alone"
    assert max(second.together[3:]) == 3
    assert "illegal memory access" in (warning := capsys.readouterr().err)
    assert "samples 4, 5, 6 were in it: starting it again, with each of them alone" in warning


def test_a_sample_that_ends_two_engines_is_left_out(prepared, settings: EngineSettings, mortal, capsys) -> None:
    mortal.deadly[5] = 1000
    out = settings.output_dir
    with pytest.raises(EngineDied, match=r"memory access.*; sample 5 ended it twice and is left out from now on"):
        extract.extract(prepared, "transformers", settings)
    assert len(mortal.opened) == 2 and mortal.deadly[5] == 998 and all(engine.closed for engine in mortal.opened)
    record = Index(out).samples()[5]
    assert (record["status"], record["reason"]) == ("failed", KILLED) and KILLED == "engine died"
    assert not artifacts.read_manifest(out, "02")["complete"] and not artifacts.sample_path(out, 5).exists()

    assert extract.extract(prepared, "transformers", settings)  # the same command goes on with the others
    assert len(mortal.opened) == 3 and mortal.deadly[5] == 998
    manifest = artifacts.read_manifest(out, "02")
    assert manifest["complete"] and manifest["samples"] == 9 and manifest["failed"] == {KILLED: 1}
    assert sorted(path.stem for path in out.glob("samples/*/*.pt")) == [f"{n:08d}" for n in range(10) if n != 5]
    assert "engine died: 1" in capsys.readouterr().out
    assert extract.extract(prepared, "transformers", settings) and len(mortal.opened) == 3


def test_an_engine_that_dies_of_two_samples_needs_the_command_again(prepared, settings, mortal) -> None:
    mortal.deadly |= {1: 1, 8: 1}
    with pytest.raises(EngineDied, match=r"memory access.*engine\.log$"):  # which of three it was is not known
        extract.extract(prepared, "transformers", settings)
    assert len(mortal.opened) == 2 and all(record["status"] == "done" for record in Index(settings.output_dir).read())
    assert extract.extract(prepared, "transformers", settings)
    assert_whole(settings.output_dir)


def test_what_was_in_a_dead_engine_fits_the_budget_still(prepared, settings: EngineSettings, mortal) -> None:
    """The files that it was to write are not expected any more."""
    mortal.deadly[1] = 1
    sizes = [settings.layout.sample_bytes(length, length - length // 2) for length in LENGTHS]
    assert not extract.extract(prepared, "transformers", settings, Limits(disk_bytes=sum(sizes[:4])))
    assert list(Index(settings.output_dir).samples()) == [0, 1, 2, 3]


def test_one_death_and_one_failure_are_not_two_deaths(prepared, settings: EngineSettings, mortal, monkeypatch) -> None:
    """A sample that failed once, and is then alone in an engine that dies for another reason, gets another try."""
    capture = mortal.capture
    faults = [9]

    def failing(self, samples):
        for sample, outcome in capture(self, samples):
            if sample.index in faults:
                faults.remove(sample.index)
                artifacts.sample_path(settings.output_dir, sample.index).unlink()
                mortal.deadly[9] = 1
                outcome = Fault("engine gave no states", "lost")
            yield sample, outcome

    monkeypatch.setattr(mortal, "capture", failing)
    assert extract.extract(prepared, "transformers", settings)
    assert len(mortal.opened) == 2
    assert_whole(settings.output_dir)


# ----------------------------------------------------------------------------------- of something else


def test_a_directory_of_something_else_is_refused_and_left_as_it_is(
    prepared: Path, settings: EngineSettings, out: Path, tiny_target: Path, tmp_path: Path, monkeypatch
) -> None:
    """Case H17: hidden size 128 instead of 64, other layer ids, another maximal length."""
    monkeypatch.setattr(engines, "open_engine", lambda *_: pytest.fail("the engine was loaded"))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    wide = shutil.copytree(tiny_target, tmp_path / "wide")
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    of_wide = write_prepared(tmp_path / "of-wide", wide, random_prompts(LENGTHS))
    shorter = shutil.copytree(prepared, tmp_path / "shorter")
    manifest = json.loads((shorter / "manifest.json").read_text())
    manifest["fingerprint"]["max_seq_len"] = 64
    (shorter / "manifest.json").write_text(json.dumps(manifest))
    hashes = settings.target.config_hash, open_target(str(wide)).config_hash
    for source, model, changes, line in (
        (of_wide, wide, {}, f"target is '{hashes[0]}', this run has '{hashes[1]}'"),
        (prepared, tiny_target, {"layers": (1, 4, 5, 8)}, r"layers is \[2, 4, 5, 8\], this run has \[1, 4, 5, 8\]"),
        (shorter, tiny_target, {}, "prepared is '.*', this run has '.*'"),
    ):
        with pytest.raises(UserError, match=f"{line}; use another --output-dir, or delete this one"):
            extract.extract(source, "transformers", settings_for(model, out, **changes))
        assert before == {path: path.read_bytes() for path in before}
    assert tokenizer_hash(wide) == tokenizer_hash(tiny_target), "the tokenizer must not be what was refused"


def test_other_tokens_of_the_same_number_are_refused(settings: EngineSettings, out: Path) -> None:
    """Case H18: states of a sample that differs in one token are not trained on."""
    config = derive(settings.target, 64, [2, 4, 5])
    record = Index(out).samples()[3]
    load_sample(out, record, config)
    path = artifacts.sample_path(out, 3)
    tensors = {name: tensor.clone() for name, tensor in artifacts.load_tensors(path).items()}
    tensors["input_ids"][17] += 1
    torch.save(tensors, path)
    with pytest.raises(UserError, match=rf"{path} is damaged: its ids are not those of the index; delete it and rerun"):
        load_sample(out, record, config)
