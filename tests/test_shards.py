"""Stage 02 by several engines on one directory: --num-shards, --shard-index, --merge."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from capture_for_tests import random_prompts, settings_for, write_prepared
from conftest import REPOSITORY
from states_for_tests import write_states

from eagle3 import artifacts
from eagle3.artifacts import WHOLE, Index, Shard
from eagle3.capture import engines, extract, shards
from eagle3.capture.run import Limits
from eagle3.target import open_target
from eagle3.terminal import UserError
from eagle3.training.inputs import open_inputs

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [40, 7, 120, 64, 5, 33, 90, 12, 20, 18]


@pytest.fixture(scope="module")
def prepared(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared"), tiny_target, random_prompts(LENGTHS))


@pytest.fixture(scope="module")
def unsharded(prepared: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unsharded")
    extract.extract(prepared, "transformers", settings_for(tiny_target, out))
    return out


@pytest.fixture(scope="module")
def divided(prepared: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three finished shards, the last one first."""
    out = tmp_path_factory.mktemp("divided")
    for index in (2, 0, 1):
        capture(prepared, tiny_target, out, Shard(index, 3))
    return out


@pytest.fixture
def out(divided: Path, tmp_path: Path) -> Path:
    return shutil.copytree(divided, tmp_path / "out")


def capture(prepared: Path, model: Path, out: Path, shard: Shard, **limits) -> bool:
    return extract.extract(prepared, "transformers", settings_for(model, out, shard=shard), Limits(**limits))


def assert_merged(out: Path, whole: Path) -> None:
    """The same index, samples and manifest as an unsharded run has."""
    assert Index(out).samples() == Index(whole).samples()
    assert [record["index"] for record in Index(out).read()] == list(range(len(LENGTHS)))
    for index in range(len(LENGTHS)):
        one, other = (artifacts.load_tensors(artifacts.sample_path(place, index)) for place in (out, whole))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    one, other = (json.loads((place / "manifest.json").read_text()) for place in (out, whole))
    assert one.pop("shards") > 1
    for manifest in (one, other):  # measured on the first samples of a shard, and of all
        assert manifest.pop("canary")["argmax_equal"] > 0 and manifest.pop("timing")["tokens"] > 0
    assert one == other


def test_shards_in_any_order_merge_to_what_one_run_writes(out: Path, unsharded: Path, capsys) -> None:
    assert not (out / "manifest.json").exists() and not (out / "index.jsonl").exists()
    for index in range(3):
        of_shard = [record["index"] for record in Index(out, Shard(index, 3)).read()]
        assert sorted(of_shard) == list(range(index, len(LENGTHS), 3))
    for _ in range(2):  # the second time changes nothing
        shards.merge(out)
        assert_merged(out, unsharded)
    assert "stage 02: shards merged" in capsys.readouterr().out


SCRIPT = """
import sys, torch, runpy
torch.set_num_threads(1)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_two_shards_at_the_same_time(prepared: Path, unsharded: Path, tiny_target: Path, tmp_path: Path) -> None:
    script = str(REPOSITORY / "02_extract_hidden_states.py")
    command = [sys.executable, "-c", SCRIPT, script, "--output-dir", str(tmp_path / "out")]
    run = [*command, "--model-path", str(tiny_target), "--prepared-dir", str(prepared)]
    run += ["--engine", "transformers", "--dtype", "float32", "--num-shards", "2", "--shard-index"]
    both = [subprocess.Popen([*run, str(index)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for index in (0, 1)]
    for process in both:
        output = process.communicate()[0].decode()
        assert process.returncode == 0 and "5 of 5, 5 in this run" in output, output
    merged = subprocess.run([*command, "--merge"], capture_output=True, text=True)
    assert merged.returncode == 0 and "shards merged" in merged.stdout, merged.stderr
    assert_merged(tmp_path / "out", unsharded)


def test_stage_04_takes_a_merged_directory(out: Path, prepared: Path, tiny_target: Path, tmp_path: Path) -> None:
    write_states(tmp_path, tiny_target)
    target, vocab = open_target(str(tiny_target)), tmp_path / "vocab_map"
    with pytest.raises(UserError, match=r"no manifest\.json"):
        open_inputs(target, out, vocab)
    shards.merge(out)
    inputs = open_inputs(target, out, vocab)
    assert [record["tokens"] for record in inputs.records] == LENGTHS and inputs.aux_layers == [2, 4, 5]


def test_a_shard_that_is_missing_or_unfinished_is_named(
    out: Path, divided: Path, prepared: Path, tiny_target: Path, tmp_path: Path
) -> None:
    for name in ("manifest.shard-1-of-3.json", "manifest.shard-2-of-3.json"):
        (out / name).unlink()
    with pytest.raises(UserError, match="shards 1, 2 of 3 are missing; run them, or copy their files here"):
        shards.merge(out)
    with pytest.raises(UserError, match=r"no manifest\.shard-\*\.json; run stage 02 with --num-shards first"):
        shards.merge(tmp_path)
    budget = 2 * artifacts.sample_path(divided, 0).stat().st_size
    other = tmp_path / "other"
    assert capture(prepared, tiny_target, other, Shard(0, 2))
    assert not capture(prepared, tiny_target, other, Shard(1, 2), disk_bytes=budget)
    with pytest.raises(UserError, match=r"manifest\.shard-1-of-2\.json: this shard has not finished; run its command"):
        shards.merge(other)
    assert not (other / "manifest.json").exists()


def test_shards_that_do_not_belong_together_are_not_merged(out: Path, divided: Path) -> None:
    path = out / "manifest.shard-1-of-3.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"fingerprint": manifest["fingerprint"] | {"dtype": "bfloat16"}}))
    with pytest.raises(UserError, match=r"shard-1-of-3\.json: dtype is 'bfloat16', this run has 'float32'; make it"):
        shards.merge(out)
    shutil.copyfile(divided / path.name, path)
    index = Index(out, Shard(1, 3)).path
    index.write_bytes(index.read_bytes().partition(b"\n")[2])
    with pytest.raises(UserError, match=r"index\.shard-1-of-3\.jsonl names 2 samples, the shard's manifest says 3"):
        shards.merge(out)
    shutil.copyfile(divided / index.name, index)
    artifacts.sample_path(out, 4).unlink()
    with pytest.raises(UserError, match=r"1 of 10 samples .* first .*00000004\.pt: missing; run the command of stage"):
        shards.merge(out)
    shutil.copyfile(divided / path.name, out / "manifest.shard-0-of-2.json")
    with pytest.raises(UserError, match="has shards of 2 and of 3; delete the wrong ones"):
        shards.merge(out)


def test_samples_that_stage_01_added_for_one_shard_alone(
    out: Path, tiny_target: Path, prepared: Path, tmp_path
) -> None:
    more = shutil.copytree(prepared, tmp_path / "more")
    write_prepared(more, tiny_target, random_prompts([*LENGTHS, 25, 30, 35]))
    assert capture(more, tiny_target, out, Shard(0, 3))  # 12 is its own, 10 and 11 are of others
    with pytest.raises(UserError, match=r"sample 10 is in no shard, for stage 01 had fewer samples .* commands again"):
        shards.merge(out)
    for index in (1, 2):
        assert capture(more, tiny_target, out, Shard(index, 3))
    shards.merge(out)
    assert list(Index(out).samples()) == list(range(13))


@pytest.mark.parametrize(
    ("shard", "line"),
    [
        (WHOLE, "is divided into 3 shards, --num-shards is not given; give --num-shards 3, or another --output-dir"),
        (Shard(0, 2), "is divided into 3 shards, --num-shards is 2; give --num-shards 3"),
    ],
)
def test_another_division_is_refused(out, prepared, tiny_target, monkeypatch, shard: Shard, line: str) -> None:
    monkeypatch.setattr(engines, "open_engine", lambda *_: pytest.fail("the engine was loaded"))
    running = out / "samples/00000/.00000001.pt.4711.tmp"  # of shard 1, which is writing
    running.write_bytes(b"half")
    with pytest.raises(UserError, match=line):
        capture(prepared, tiny_target, out, shard)
    shards.merge(out)
    running.write_bytes(b"half")
    with pytest.raises(UserError, match=line):
        capture(prepared, tiny_target, out, shard)
    assert running.exists()


def test_a_directory_of_one_run_is_not_divided_later(
    unsharded: Path, prepared: Path, tiny_target: Path, tmp_path
) -> None:
    line = "belongs to a run without --num-shards; go on without it, or give another --output-dir"
    with pytest.raises(UserError, match=line):
        capture(prepared, tiny_target, unsharded, Shard(0, 2))
    (tmp_path / "out").mkdir()
    shutil.copy(unsharded / "manifest.json", tmp_path / "out")  # its engine is being loaded: there is no index yet
    with pytest.raises(UserError, match=line):
        capture(prepared, tiny_target, tmp_path / "out", Shard(0, 2))
    with pytest.raises(UserError, match=r"--num-shards 11: .* has 10 samples"):
        capture(prepared, tiny_target, tmp_path / "new", Shard(0, 11))


def test_what_another_shard_is_writing_is_left_alone(out: Path, prepared: Path, tiny_target: Path) -> None:
    folder = out / "samples/00000"
    own, others = folder / ".00000003.pt.1.tmp", folder / ".00000004.pt.2.tmp"
    manifests = [out / f".manifest.shard-{index}-of-3.json.7.tmp" for index in (0, 1)]
    for path in (own, others, *manifests):
        path.write_bytes(b"half")
    assert capture(prepared, tiny_target, out, Shard(0, 3))
    assert [path.exists() for path in (own, others, *manifests)] == [False, True, False, True]


def test_a_merge_waits_for_running_shards(out: Path, prepared: Path) -> None:
    writing = out / "samples/00000/.00000002.pt.9.tmp"
    with artifacts.directory_lock(out, Shard(2, 3)):
        writing.write_bytes(b"half")
        with pytest.raises(UserError, match=r"is in use by .* pid"):
            shards.merge(out)
        assert writing.exists()
    shards.merge(out)
    assert not writing.exists()


def test_a_second_process_on_a_shard_is_refused_and_one_on_another_is_not(out, prepared, tiny_target) -> None:
    with artifacts.directory_lock(out, Shard(2, 3)):
        assert capture(prepared, tiny_target, out, Shard(1, 3))
        with pytest.raises(UserError, match=r"is in use by .* pid"):
            capture(prepared, tiny_target, out, Shard(2, 3))
