"""The hostfile, and what is found out about its nodes. The run on two nodes: test_pipeline_run.py."""

import re
from pathlib import Path

import pytest
from conftest import REPOSITORY
from nodes_for_tests import FIRST, HOSTFILE, SECOND
from pipeline_for_tests import plan_for, settings_for, write_config

from eagle3.pipeline import nodes, plan
from eagle3.pipeline.settings import Usage


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


def test_what_is_wrong_with_a_node_is_said_before_anything_runs(hosts: Path, tmp_path: Path) -> None:
    """REMOTE is a program that runs what it is told in this place, or cannot."""

    def found(remote: str, model: Path = tmp_path, slots: int = 1, first: str = "localhost") -> list[str]:
        program = tmp_path / "remote"
        program.write_text(f"#!/bin/sh\nhost=$1\nshift\n{remote}\n")
        program.chmod(0o755)
        config = write_config(tmp_path / "run.env", f"REMOTE={program}\n")
        hosts.write_text(f"{first} slots={slots}\nnode-2 slots={slots}\n")
        asked = settings_for("--config", config, "--model-path", "M", "--hostfile", hosts, "--output-dir", tmp_path)
        return nodes.look(asked, model)

    assert found('exec "$@"') == []
    (no_ssh,) = found('[ $host = node-2 ] && echo "Permission denied (publickey)." >&2 && exit 255; exec "$@"')
    assert no_ssh.startswith("node node-2: Permission denied (publickey).; `") and "node-2 true` must run" in no_ssh
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
