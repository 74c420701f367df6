"""Atomic writes, manifest, index and the lock of a directory."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY

from eagle3 import artifacts
from eagle3.terminal import UserError


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    artifacts.save_json(path, {"old": 1})
    with pytest.raises(ZeroDivisionError), artifacts.atomic_file(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert json.loads(path.read_text()) == {"old": 1} and os.listdir(tmp_path) == ["value.json"]


def test_samples_lie_in_folders_of_a_thousand() -> None:
    places = [artifacts.sample_path(Path("d"), index) for index in (0, 999, 1000, 12345)]
    assert [str(place) for place in places] == [
        "d/samples/00000/00000000.pt",
        "d/samples/00000/00000999.pt",
        "d/samples/00001/00001000.pt",
        "d/samples/00012/00012345.pt",
    ]


def test_damaged_missing_and_pickled_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}/none.pt is missing"):
        artifacts.load_tensors(tmp_path / "none.pt")
    size = artifacts.save_tensors(tmp_path / "a.pt", {"x": torch.arange(100)})
    assert size == (tmp_path / "a.pt").stat().st_size
    (tmp_path / "b.pt").write_bytes((tmp_path / "a.pt").read_bytes()[: size // 2])
    torch.save({"x": Path("an object")}, tmp_path / "c.pt")
    for name in ("b.pt", "c.pt"):
        with pytest.raises(UserError, match=f"{name} is damaged"):
            artifacts.load_tensors(tmp_path / name)


def test_manifest_is_refused_by_stage_schema_and_damage(tmp_path: Path) -> None:
    artifacts.write_manifest(tmp_path, "01", {"a": 1}, complete=True)
    assert artifacts.read_manifest(tmp_path, "01")["fingerprint"] == {"a": 1}
    with pytest.raises(UserError, match=r"stage 01 \(prepared samples\), expected stage 02 \(hidden states\)"):
        artifacts.read_manifest(tmp_path, "02")
    with pytest.raises(UserError, match="a is 1, this run has 2; do this"):
        artifacts.require_same(tmp_path, {"a": 1}, {"a": 2}, "do this")
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(UserError, match="schema version 2, this program reads 1"):
        artifacts.read_manifest(tmp_path, "01")
    path.write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        artifacts.read_manifest(tmp_path, "01")
    path.unlink()
    assert artifacts.read_manifest(tmp_path, "01", missing_ok=True) is None


def test_index_forgets_a_torn_line_and_keeps_the_latest_record(tmp_path: Path) -> None:
    index = artifacts.Index(tmp_path)
    with index.appending() as writer:
        writer.add(index=1, status="failed")
        writer.add(index=0, status="done")
    with open(index.path, "ab") as file:
        file.write(b'{"index": 2, "sta')
    assert list(index.samples()) == [0, 1]
    with index.appending() as writer:
        writer.add(index=1, status="done")
    assert [r["status"] for r in index.samples().values()] == ["done", "done"] and len(index.read()) == 3
    index.path.write_bytes(b"broken\n" + index.path.read_bytes())
    with pytest.raises(UserError, match="line 1 is damaged"):
        index.read()


def test_a_second_process_is_refused_with_the_holder_and_a_dead_one_is_not_in_the_way(tmp_path: Path) -> None:
    program = "import sys; from eagle3.artifacts import directory_lock; from pathlib import Path\n"
    program += "with directory_lock(Path(sys.argv[1])): print('in', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert holder.stdout.readline() == "in\n"
    with (
        pytest.raises(UserError, match=f"in use by {socket.gethostname()} pid {holder.pid}"),
        artifacts.directory_lock(tmp_path),
    ):
        pass
    holder.kill()
    holder.wait()
    with artifacts.directory_lock(tmp_path):
        pass
    (tmp_path / ".lock").write_text("another-host pid 5")
    with pytest.raises(UserError, match="locked by another-host pid 5"), artifacts.directory_lock(tmp_path):
        pass


def test_what_a_killed_writer_left_goes_with_the_next_lock(tmp_path: Path) -> None:
    left = [
        tmp_path / name for name in (".manifest.json.1.tmp", "samples/00000/.x.pt.1.tmp", "checkpoints/.latest.1.tmp")
    ]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")
    (tmp_path / ".export.tmp").mkdir()  # of a writer that removes its own
    with artifacts.directory_lock(tmp_path):
        assert not any(path.exists() for path in left) and (tmp_path / ".export.tmp").is_dir()
