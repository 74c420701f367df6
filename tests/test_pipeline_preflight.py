"""Each finding of the preflight, provoked: the real fault where a machine allows it."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from namespace_for_tests import Namespace
from pipeline_for_tests import job_for, settings_for
from test_preflight import Machine

from eagle3.capture import preflight as capture
from eagle3.pipeline import preflight
from eagle3.pipeline.plan import Finding
from eagle3.terminal import UserError


@pytest.fixture
def flags(tiny_target: Path, chats: Path, tmp_path: Path) -> list[object]:
    return ["--model-path", tiny_target, "--dataset", chats, "--output-dir", tmp_path / "out"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    (tmp_path / "smi").mkdir()
    return Machine(tmp_path / "smi", monkeypatch)


def look(*arguments: object) -> list[Finding]:
    found = preflight.look(*job_for(*arguments))
    assert all("\n" not in finding.text for finding in found)
    return found


def the_one(*arguments: object) -> tuple[str, str]:
    """The only finding."""
    (finding,) = look(*arguments)
    return finding.level, finding.text


def test_nothing_in_the_way_is_no_finding(flags: list) -> None:
    assert look(*flags) == []


def test_a_server_that_holds_a_gpu_is_named_and_left_alone(machine: Machine, flags: list) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        machine.show({0: 20.5}, [0], f"0, {sleeper.pid}, /opt/venv/bin/python, serve, 77100")
        level, text = the_one(*flags)
        assert sleeper.poll() is None
        assert (
            level == "hard" and f"in the way: pid {sleeper.pid} (/opt/venv/bin/python, serve, 77100 MiB); end" in text
        )
        # the server that writes the answers of stage 01 stops after it
        endpoint = ["--args", "01", "--responses-endpoint http://localhost:1"]
        assert the_one(*flags, *endpoint) == ("note", text)
        assert look(*flags, "--only", "03") == []  # needs no GPU
        sleeper.kill()


def test_shared_memory(machine: Machine, flags: list, monkeypatch, tmp_path: Path) -> None:
    machine.show({0: 95.9, 1: 95.9}, [0, 1])
    monkeypatch.setattr(capture, "SHARED_MEMORY", tmp_path / "none")
    level, text = the_one(*flags)
    assert level == "hard" and "has 0 MB free, several GPUs need" in text and "--shm-size=16g" in text
    assert look(*flags, "--gpus", "1") == []


def test_a_taken_port(flags: list, monkeypatch) -> None:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        level, text = the_one(*flags)
        assert level == "note" and text.startswith(f"MASTER_PORT is {port}, which another process is using; unset it")


@pytest.mark.parametrize(("version", "level"), [("0.25.1", "hard"), ("0.34.0", "note")])
def test_the_version_of_vllm(version: str, level: str, flags: list, tmp_path: Path, monkeypatch) -> None:
    facts = tmp_path / f"vllm-{version}.dist-info" / "METADATA"
    facts.parent.mkdir()
    facts.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found, text = the_one(*flags)
    assert found == level and text.startswith(f"vllm {version} is ")


def test_a_driver_that_torch_cannot_use(flags: list, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 535.54.03\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    level, text = the_one(*flags)
    assert level == "hard" and text.startswith("nvidia-smi lists 1 GPUs with driver 535.54.03, torch ")
    assert text.endswith("or set CUDA_VISIBLE_DEVICES= to run without")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert look(*flags) == []


def test_a_tokenizer_that_does_not_fit_the_embedding(flags: list, tiny_target: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tiny_target, tmp_path / "other"))
    facts = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(facts | {"vocab_size": 40000}))
    texts = [finding.text for finding in look(*flags, "--model-path", other)]
    assert any("the tokenizer has ids up to 49151, config.json's vocab_size is 40000" in text for text in texts)
    assert any("embed_tokens.weight has 49152 rows, config.json's vocab_size is 40000" in text for text in texts)
    (other / "tokenizer.json").write_text("{")
    assert any("the tokenizer does not load" in finding.text for finding in look(*flags, "--model-path", other))


def test_lengths_layers_and_shapes_that_the_target_does_not_have(flags: list) -> None:
    with pytest.raises(UserError, match="--max-seq-len 4096: the target takes 1024 positions"):
        job_for(*flags, "--args", "01", "--max-seq-len 4096")
    with pytest.raises(UserError, match=r"--aux-layers '2,99': expected different ids in 1\.\.7"):
        job_for(*flags, "--args", "02", "--aux-layers 2,99")


def test_weights_that_are_not_whole(flags: list, tiny_target: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tiny_target, tmp_path / "other"))
    shard = sorted(other.glob("model-*.safetensors"))[0]
    os.truncate(shard, shard.stat().st_size - 100)
    texts = [finding.text for finding in look(*flags, "--model-path", other)]
    assert any(f"weight files of {other} are not usable, first {shard.name}" in text for text in texts)


def test_open_files(flags: list, tmp_path: Path) -> None:
    """In a process whose hard limit is low, and through the orchestrator: refused, nothing started."""
    asked = json.dumps({"settings": settings_for(*flags).plain(), "action": "run", "force": True, "redo": False})
    command = [sys.executable, "-m", "eagle3.pipeline.briefing", tmp_path / "answer"]
    result = subprocess.run(
        command,
        input=asked,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512)),
    )
    assert result.returncode == 2
    assert "refused: 512 files may be open at once, 1024 are needed; raise it: ulimit -Hn" in result.stdout


# ------------------------------------------------------------------------------------------- real file systems


def briefing(namespace: Namespace, tmp_path: Path, *flags: object, environment: str = "") -> str:
    """What the briefing says in the namespace; its exit code is the last line."""
    asked = {"settings": settings_for(*flags).plain(), "action": "run", "force": True, "redo": False}
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    command = f"{sys.executable} -m eagle3.pipeline.briefing {tmp_path}/answer < {tmp_path}/asked.json 2>&1"
    return namespace.shell(f"{environment} {command} && echo 0 || echo $?")


@pytest.mark.slow
def test_disks_that_are_full_or_read_only(namespace: Namespace, flags: list, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    namespace.tmpfs(disk, "size=3m")
    said = briefing(namespace, tmp_path, *flags, "--output-dir", disk / "out", environment=f"TMPDIR={disk}")
    assert said.endswith("0"), "--force was given, and lengths are assumed"
    assert f"in doubt: {disk}/out/prepared has 0.003 GB free, the run needs 0." in said
    assert f"in doubt: {disk} has 3 MB free, 210 MB are wanted for temporary files and caches" in said
    namespace.tmpfs(disk, "ro")
    said = briefing(namespace, tmp_path, *flags, "--output-dir", disk / "out")
    assert (
        said.endswith("2") and f"refused: {disk} cannot be written (Read-only file system); give a folder that" in said
    )
    namespace.shell(f"umount {disk}")
