"""The hostfile, and what is found out about its nodes. The run on two nodes: test_pipeline_run.py."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from nodes_for_tests import FIRST, HOSTFILE, SECOND
from pipeline_for_tests import plan_for, settings_for, write_config

from eagle3.pipeline import nodes, plan
from eagle3.pipeline.across import Across
from eagle3.pipeline.settings import Settings, Usage


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text(HOSTFILE)
    return path


def test_a_hostfile_is_read_as_deepspeed_does(hosts: Path) -> None:
    found = settings_for("--model-path", "M", "--hostfile", hosts)
    assert found.nodes == [FIRST, SECOND] and (found.values["GPUS"], found.origins["GPUS"]) == ("1", "hostfile")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a slots=8\nb\n", "line 2: 'b'; expected a host and its GPUs, such as node-1 slots=8"),
        ("a slots=8\na slots=8\n", "line 2: a was named before"),
        ("a slots=8\nb slots=4\n", "has slots=8, 4; expected two nodes or more, with as many slots each"),
        ("a slots=8\n", "has slots=8; expected two nodes"),
        ("-oProxyCommand=x slots=8\n", "expected a host"),
        ("# nothing\n", "has no node"),
    ],
)
def test_faults_of_a_hostfile_are_one_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(Usage, match=re.escape(line)):
        settings_for("--model-path", "M", "--hostfile", tmp_path / "hosts")
    with pytest.raises(Usage, match="cannot be read"):
        settings_for("--model-path", "M", "--hostfile", tmp_path / "none")


@pytest.fixture
def asked(hosts: Path, tmp_path: Path) -> Callable[..., Settings]:
    """Settings whose REMOTE is a shell program that runs what it is told here, or what the test makes of it."""

    def settings(remote: str = 'exec "$@"', slots: int = 1, first: str = "localhost") -> Settings:
        program = tmp_path / "remote"
        program.write_text(f"#!/bin/sh\nhost=$1\nshift\n{remote}\n")
        program.chmod(0o755)
        config = write_config(tmp_path / "run.env", f"REMOTE={program}\n")
        hosts.write_text(f"{first} slots={slots}\nnode-2 slots={slots}\n")
        return settings_for("--config", config, "--model-path", "M", "--hostfile", hosts, "--output-dir", tmp_path)

    return settings


def test_what_is_wrong_with_a_node_is_said_before_anything_runs(asked: Callable[..., Settings], tmp_path: Path) -> None:
    def found(remote: str, model: Path = tmp_path, **more: Any) -> list[str]:
        return nodes.look(asked(remote, **more), model)

    assert found('exec "$@"') == []
    (no_ssh,) = found('[ $host = node-2 ] && echo "Permission denied (publickey)." >&2 && exit 255; exec "$@"')
    assert no_ssh.startswith("node node-2: Permission denied (publickey).; `") and "node-2 true` must run" in no_ssh
    without = asked()
    without.values["REMOTE"] = "no-such-ssh -x"
    lines = nodes.look(without, tmp_path)
    assert len(lines) == 2 and lines[1].startswith(
        "node node-2: No such file or directory; `no-such-ssh -x node-2 true`"
    )
    assert "node node-2: it cannot resolve no..such, the first node" in found('exec "$@"', first="no..such")[1]
    missing = found('exec "$@"', tmp_path / "model")
    assert len(missing) == 2 and f"{tmp_path}/model is not there; all nodes need it" in missing[1]
    unshared = 'exec unshare --user --map-root-user --mount sh -c "mount -t tmpfs tmpfs $FOLDER; exec bash -s"'
    (tmp_path / "inner").mkdir()
    hidden = found(unshared.replace("$FOLDER", str(tmp_path)))
    assert len(hidden) == 2 and "is not shared with it: a file made here is not seen there" in hidden[0]
    listing = tmp_path / "bin" / "nvidia-smi"
    listing.parent.mkdir()
    listing.write_text("#!/bin/sh\necho 0\necho 1\n")
    listing.chmod(0o755)
    few = found(f'PATH={listing.parent}:$PATH exec "$@"', slots=8)
    assert "node localhost: it has 2 GPUs, the hostfile says slots=8; correct that" in few


def told(folder: Path, program: str) -> dict[str, Any]:
    """What nodes.told gives for a stage, here a program of Python."""
    facts = {"environment": {"WORD": "passed on"}, "directory": str(folder)}
    return facts | {
        "command": [sys.executable, "-c", program],
        "log": str(folder / "log"),
        "memory": f"{folder}/memory",
    }


SAVES = """
import signal, sys, time
def saved(number, frame):
    print(f"saved after {signal.Signals(number).name}", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, saved)
signal.signal(signal.SIGINT, saved)
print("at work", flush=True)
time.sleep(60)
"""


def test_a_node_that_fails_ends_the_others(
    asked: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    fails = "import os, time; time.sleep(1); print(os.environ['WORD'], flush=True); os._exit(7)"
    monkeypatch.setattr(nodes, "told", lambda *_: [told(tmp_path, SAVES), told(tmp_path, fails)])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert Across("04", asked()).run() == 7
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    said = capfd.readouterr().out.splitlines()
    assert said[:2] == ["localhost: at work", "node-2: passed on"]
    assert said[2:] == [
        "node node-2 ended with exit code 7, the others are told to stop",
        "localhost: saved after SIGTERM",
    ]


def test_a_node_whose_connection_ends_saves_and_stops(asked: Callable[..., Settings], tmp_path: Path) -> None:
    for how in ("signal", "end"):
        process = nodes.start(asked(), "node-2", told(tmp_path, SAVES), stdout=subprocess.PIPE)
        assert process.stdout.readline() == "at work\n"
        if how == "signal":
            process.stdin.write(f"{signal.SIGINT:d}\n")
            process.stdin.flush()
        else:
            process.stdout.close()  # nobody reads any more
            process.stdin.close()
        assert process.wait(20) == 143
        name = "SIGINT" if how == "signal" else "SIGTERM"
        assert (tmp_path / "log").read_text().splitlines()[-1].endswith(f"saved after {name}")


def test_the_plan_of_two_nodes(hosts: Path) -> None:
    """Half the time of what all nodes do; memory of a node, but for optimizer and gradients, which are divided."""
    hosts.write_text("a slots=8\nb slots=8\n")
    asked = ["--config", REPOSITORY / "configs/pipelines/kimi_k25_8gpu.env", "--output-dir", "OUT"]
    asked += ["--model-path", REPOSITORY / "configs/targets/kimi_k25", "--trust-remote-code"]
    asked += ["--machine", "gpus=8x96,memory=1500,disk=900"]
    one, two = (plan_for(*asked, *more)[1].stages for more in ([], ["--hostfile", hosts]))
    loading = plan.STARTUP["02"] + 554.3e9 / plan.READ_RATE
    assert two["02"].seconds - loading == pytest.approx((one["02"].seconds - loading) / 2, rel=1e-6)
    assert "on 16 ranks" in " ".join(two["04"].notes) and two["04"].seconds < 0.55 * one["04"].seconds
    assert two["04"].host == one["04"].host and one["04"].gpu - two["04"].gpu == pytest.approx(
        14 * 1.059e9 / 16, rel=0.01
    )
    assert two["check"].seconds == one["check"].seconds
