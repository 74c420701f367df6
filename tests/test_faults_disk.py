"""Full disks and folders that cannot be written, on real small file systems: one line, exit 1, and the same command
continues once there is room. Every earlier good file stays as it was."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from capture_for_tests import random_prompts, write_prepared
from namespace_for_tests import Namespace
from safetensors.torch import load_file
from states_for_tests import write_states

from eagle3 import artifacts


@pytest.fixture
def disk(namespace: Namespace, tmp_path: Path) -> Iterator[Path]:
    """A mount point that tests fill; what is on it is seen by `namespace` alone."""
    place = tmp_path / "disk"
    place.mkdir()
    yield place
    namespace.shell(f"umount '{place}' 2>/dev/null || true")


def sums(namespace: Namespace, folder: Path) -> set[str]:
    """Checksum and name of every file that a rerun or a later stage reads."""
    lines = namespace.shell(f"cd '{folder}' && find . -type f -not -name .lock -not -name engine.log | xargs md5sum")
    return set(lines.splitlines())


def taken_out(namespace: Namespace, folder: Path, to: Path) -> Path:
    namespace.shell(f"cp -r '{folder}' '{to}'")
    return to


def kib_used(namespace: Namespace, place: Path) -> int:
    return int(namespace.shell(f"df -k --output=used '{place}' | tail -1"))


def the_error(answer: tuple[int, str]) -> str:
    """The one line of a failed run."""
    code, output = answer
    assert code == 1 and "Traceback" not in output, output
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    return line


def same_tensors(one: Path, other: Path) -> bool:
    files = [path.relative_to(one) for path in sorted(one.rglob("*.pt"))]
    assert files and files == [path.relative_to(other) for path in sorted(other.rglob("*.pt"))]
    return all((one / file).read_bytes() == (other / file).read_bytes() for file in files)


@pytest.fixture(scope="module")
def prepare(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> list:
    chats = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = [[("user", f"What is {n} plus {n}?"), ("assistant", f"{n} plus {n} is {2 * n}. " * n)] for n in range(1, 13)]
    messages = [[{"role": role, "content": content} for role, content in row] for row in rows]
    chats.write_text("".join(json.dumps({"messages": row}) + "\n" for row in messages))
    return ["01_prepare_dataset.py", "--model-path", tiny_target, "--dataset", chats, "--max-seq-len", 512]


@pytest.fixture(scope="module")
def prepared(namespace: Namespace, prepare: list, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prepared") / "out"
    assert namespace.stage(*prepare, "--output-dir", directory)[0] == 0
    return directory


def test_stage_01(namespace: Namespace, disk: Path, prepare: list, prepared: Path, tmp_path: Path) -> None:
    out = ["--output-dir", disk / "out"]
    namespace.tmpfs(disk, "size=1m")
    assert namespace.stage(*prepare, *out, "--max-samples", 4)[0] == 0
    before = sums(namespace, disk / "out/samples")
    assert len(before) == 4
    namespace.tmpfs(disk, f"size={kib_used(namespace, disk) + 12}k")
    line = the_error(namespace.stage(*prepare, *out))
    assert "No space left on device (" in line and "free space there" in line and str(disk / "out") in line
    assert before < sums(namespace, disk / "out/samples") and not namespace.shell(f"find '{disk}' -name '*.tmp'")
    namespace.tmpfs(disk, "size=1m")
    assert namespace.stage(*prepare, *out)[0] == 0
    assert same_tensors(taken_out(namespace, disk / "out", tmp_path / "copy"), prepared)


def test_stage_02(namespace: Namespace, disk: Path, prepared: Path, tiny_target: Path, tmp_path: Path) -> None:
    """Case H15: refused before the start with what fits, and in the middle; no broken file, and room completes it."""
    command = ["02_extract_hidden_states.py", "--model-path", tiny_target, "--prepared-dir", prepared]
    command += ["--engine", "transformers", "--dtype", "float32", "--output-dir"]
    namespace.tmpfs(disk, "size=400k")
    line = the_error(namespace.stage(*command, disk / "out"))  # before the engine is loaded
    said = re.search(
        rf"{disk}/out has 0\.4\d MB free, 12 samples of ([\d,]+) tokens need (\d\.\d\d) MB, (\d) of them fit; free "
        r"space, store less \(--store-dtype fp8\), stop before it is full \(--max-disk-gb\), or prepare fewer",
        line,
    )
    tokens, needed, fit = said.groups()
    assert float(needed) == pytest.approx(int(tokens.replace(",", "")) * 64 * 4 * 3.7 / 1e6, rel=0.1) and int(fit) > 3
    namespace.shell(f"rm -r '{disk}/out'")
    namespace.tmpfs(disk, "size=20m,nr_inodes=14")  # room for six files, which no look at the free bytes foresees
    line = the_error(namespace.stage(*command, disk / "out"))
    assert "No space left on device (" in line
    before = sums(namespace, disk / "out/samples")
    assert 0 < len(before) < 12 and not namespace.shell(f"find '{disk}' -name '*.tmp'")
    namespace.tmpfs(disk, "size=20m,nr_inodes=100")
    code, output = namespace.stage(*command, disk / "out")
    assert code == 0 and f"12 of 12, {12 - len(before)} in this run" in output
    assert before < sums(namespace, disk / "out/samples")
    assert namespace.stage(*command, tmp_path / "unbroken")[0] == 0
    assert same_tensors(taken_out(namespace, disk / "out", tmp_path / "copy"), tmp_path / "unbroken")


def test_stage_02_when_something_else_fills_the_disk(
    namespace: Namespace, disk: Path, tiny_target: Path, tmp_path: Path
) -> None:
    """Case H15: it stops before the last byte, says what is left, and the same command goes on; no file is broken."""
    count = 300
    prepared = write_prepared(tmp_path / "prepared", tiny_target, random_prompts([40] * count))
    command = ["02_extract_hidden_states.py", "--model-path", tiny_target, "--prepared-dir", prepared]
    command += ["--engine", "transformers", "--dtype", "float32", "--batch-tokens", 1, "--output-dir"]
    out, filler = disk / "out", disk / "filler"
    namespace.tmpfs(disk, "size=30m")
    wait = f"until [ -f '{artifacts.sample_path(out, 20)}' ]; do :; done"
    fill = f"fallocate -l $(($(df -B1 --output=avail '{disk}' | tail -1) - 1500000)) '{filler}'"
    namespace.shell(f"({wait}; {fill}) >/dev/null 2>&1 &")
    line = the_error(namespace.stage(*command, out))
    said = re.search(
        rf"the disk is nearly full: {out} has (0\.\d\d) MB free, (\d+) samples are left and need (\d+\.\d\d) MB", line
    )
    free, left, needed = float(said[1]), int(said[2]), float(said[3])
    assert 30 * 2**20 / 100 / 1e6 <= free < 0.5 and line.endswith("free space, then the same command continues")
    finished = sums(namespace, out / "samples")
    assert 20 < len(finished) < count and left == count - len(finished)
    assert needed == pytest.approx(left * 40 * 64 * 4 * 3.5 / 1e6, rel=0.15)
    assert not namespace.shell(f"find '{out}' -name '*.tmp'")
    copy = taken_out(namespace, out, tmp_path / "copy")
    records = artifacts.Index(copy).samples()
    assert list(records) == list(range(len(finished))) and not artifacts.read_manifest(copy, "02")["complete"]
    for record in records.values():
        artifacts.load_sample(copy, "02", record, 49152)
    namespace.shell(f"rm '{filler}'")
    code, output = namespace.stage(*command, out)
    assert code == 0 and f"{count} of {count}, {left} in this run" in output
    assert finished < sums(namespace, out / "samples")


def test_stage_03(namespace: Namespace, disk: Path, prepared: Path, tmp_path: Path) -> None:
    command = ["03_build_vocab_map.py", "--prepared-dir", prepared, "--output-dir", disk / "out"]
    namespace.tmpfs(disk, "size=1m")
    assert namespace.stage(*command, "--draft-vocab-size", 64)[0] == 0
    before = sums(namespace, disk / "out")
    namespace.tmpfs(disk, f"size={kib_used(namespace, disk) + 20}k")
    line = the_error(namespace.stage(*command, "--draft-vocab-size", 100))
    assert "No space left on device (" in line and sums(namespace, disk / "out") == before
    namespace.tmpfs(disk, "size=1m")
    assert namespace.stage(*command, "--draft-vocab-size", 100)[0] == 0
    copy = taken_out(namespace, disk / "out", tmp_path / "copy")
    assert len(artifacts.load_fields(copy / "vocab_map.pt", artifacts.VOCAB_MAP, "03")["d2t"]) == 100
    assert artifacts.read_manifest(copy, "03")["fingerprint"]["draft_vocab_size"] == 100


def test_stage_04(namespace: Namespace, disk: Path, tiny_target: Path, tmp_path: Path) -> None:
    """Full while a first checkpoint, a later one, and the export are written: `latest` always loads."""
    write_states(tmp_path, tiny_target)
    command = ["04_train_draft.py", "--model-path", tiny_target, "--hidden-states-dir", tmp_path / "hidden_states"]
    command += ["--vocab-map-dir", tmp_path / "vocab_map", "--epochs", 2, "--ttt-steps", 2, "--max-tokens", 128]
    command.append("--output-dir")
    assert namespace.stage(*command, tmp_path / "unbroken")[0] == 0
    checkpoint = sum(path.stat().st_size for path in (tmp_path / "unbroken/checkpoints").glob("step*/*.pt")) // 2048

    out, latest = disk / "out", disk / "out/checkpoints/latest"
    namespace.tmpfs(disk, f"size={checkpoint * 3 // 4}k")
    assert f"cannot write {out}/checkpoints/step" in the_error(namespace.stage(*command, out))
    assert namespace.shell(f"cat '{latest}' 2>/dev/null || echo none") == "none"

    namespace.tmpfs(disk, f"size={checkpoint * 7 // 4}k")
    assert f"cannot write {out}/checkpoints/step" in the_error(namespace.stage(*command, out))
    first = namespace.shell(f"cat '{latest}'")

    namespace.tmpfs(disk, f"size={checkpoint * 3}k")
    answer = namespace.stage(*command, out)
    line = the_error(answer)
    assert f"continuing after step {int(first.removeprefix('step')[:8])} " in answer[1]
    assert "export" in line and "cannot write" in line and namespace.shell(f"cat '{latest}'") > first
    assert namespace.shell(f"ls '{out}/export' 2>/dev/null || echo none") == "none"

    namespace.tmpfs(disk, "size=100m")
    assert namespace.stage(*command, out)[0] == 0
    copy = taken_out(namespace, out, tmp_path / "copy")
    assert artifacts.read_manifest(copy, "04")["complete"]
    straight = load_file(tmp_path / "unbroken/export/model.safetensors")
    resumed = load_file(copy / "export/model.safetensors")
    assert all((straight[name].float() - resumed[name].float()).abs().max() <= 1e-6 for name in straight)


def test_read_only_folders(namespace: Namespace, disk: Path, prepare: list, prepared: Path, tiny_target: Path) -> None:
    """A stage that cannot write says so before it loads the target."""
    shutil.copytree(prepared, disk / "prepared")
    namespace.shell(f"mount --bind '{disk}' '{disk}' && mount -o remount,bind,ro '{disk}'")
    model = ["--model-path", tiny_target]
    inputs = ["--prepared-dir", disk / "prepared"]
    for command in (
        prepare,
        ["02_extract_hidden_states.py", *model, *inputs, "--engine", "transformers"],
        ["03_build_vocab_map.py", *inputs, "--draft-vocab-size", 64],
    ):
        answer = namespace.stage(*command, "--output-dir", disk / "out")
        assert f"Read-only file system ({disk}/out); give a folder that can be written" in the_error(answer)
        assert "loading" not in answer[1]
    # a finished folder on a read-only share is still good as an input
    assert (
        namespace.stage("03_build_vocab_map.py", *inputs, "--draft-vocab-size", 64, "--output-dir", disk.parent / "v")[
            0
        ]
        == 0
    )
