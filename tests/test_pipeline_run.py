"""A run that can be left alone: continues, passes over what is finished, names what a change invalidates, outlives its
terminal, stops clean. Real stages on a tiny target."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nodes_for_tests
import pytest
from conftest import REPOSITORY
from interruptions_for_tests import CONVERSATIONS, Stage, assert_same_samples
from pipeline_for_tests import COMMAND, write_config

from eagle3 import engine_guard
from eagle3.pipeline import runner, state
from eagle3.pipeline.measured import measured
from eagle3.terminal import UserError

SETTINGS = """MODEL_PATH={model}
DATASET={data}
MAX_SAMPLES=40
GPUS=1
PREPARE_ARGS=(--max-seq-len 128)
EXTRACT_ARGS=(--engine transformers --dtype float32)
VOCAB_ARGS=(--draft-vocab-size 400)
TRAIN_ARGS=(--epochs {epochs} --ttt-steps 2 --max-tokens 128 --val-fraction 0.1)
NOTE="a note"
"""
LONG = ["--args", "04", "--epochs 2000"]  # more epochs go on from a finished run; these take minutes


def command(config: Path, out: Path, *more: object) -> list[object]:
    return [COMMAND, "--config", config, "--output-dir", out, "--to", "04", *more]


def pipeline(*arguments: object) -> subprocess.CompletedProcess:
    environment = os.environ | {"EAGLE3_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.run(list(map(str, arguments)), capture_output=True, text=True, env=environment, timeout=300)


@pytest.fixture(scope="module")
def config(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = SETTINGS.format(model=tiny_target, data=CONVERSATIONS, epochs=2)
    return write_config(tmp_path_factory.mktemp("config") / "run.env", text)


@pytest.fixture(scope="module")
def finished(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A whole run, and what it said. Tests copy it before they change it."""
    out = tmp_path_factory.mktemp("finished") / "out"
    result = pipeline(*command(config, out))
    assert result.returncode == 0, result.stdout + result.stderr
    return out, result.stdout


@pytest.fixture
def out(finished: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished[0], tmp_path / "out", copy_function=shutil.copy2))


def stages_run(text: str) -> list[str]:
    """The stages that a run's output says were run."""
    return re.findall(r"^=== (\w+) === \(log", text, re.MULTILINE)


def steps(out: Path) -> int:
    """Lines of training so far."""
    return (out / "draft" / "metrics.jsonl").read_text().count("\n")


def wait_for(event, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not event():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------ state, continuing


@pytest.mark.slow
def test_a_run_says_what_it_planned_and_did(finished: tuple[Path, str]) -> None:
    out, text = finished
    assert text.index("plan for ") < text.index("=== 01 ===") and stages_run(text) == ["01", "02", "03", "04"]
    found = state.read(out)
    assert found["state"] == "finished" and not state.alive(found["runner"])
    for stage, entry in found["stages"].items():
        assert entry["state"] == "finished" and entry["seconds"] > 0 and entry["disk"] > 0
        stamped = [line for line in (out / "logs" / f"{stage}.log").read_text().splitlines() if line]
        assert len(stamped) > 2 and all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in stamped)
        assert re.search(rf"^  {stage} +\d+ s, 0\.\d+ GB on disk", text, re.MULTILINE)
    assert found["stages"]["04"]["memory"] > 100e6
    assert "tau 1." in text and "% of the answers' tokens covered" in text and "0 rows skipped" in text
    assert "vllm serve " in text and (out / "report.html").exists() and text.rstrip().endswith("a note")
    page = (out / "report.html").read_text()
    for entry in found["stages"].values():
        assert f">{entry['seconds']:,.0f} s</td>" in page and ">finished</td>" in page
    assert "host memory at most" in page
    (known,) = measured(out)
    assert known.capture.tokens == json.loads((out / "hidden_states" / "manifest.json").read_text())["tokens"]
    assert known.training.tokens_a_second > 0 and known.memory["04"] == found["stages"]["04"]["memory"]


@pytest.mark.slow
def test_finished_stages_are_passed_over_and_named_ones_run(config: Path, out: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.pt")}
    began = time.monotonic()
    result = pipeline(*command(config, out))
    assert result.returncode == 0 and time.monotonic() - began < 30
    assert stages_run(result.stdout) == [] and result.stdout.count("not run again") == 4
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.pt")} == before
    seconds = state.read(out)["stages"]["01"]["seconds"]

    result = pipeline(*command(config, out)[:-2], "--only", "01")
    assert result.returncode == 0 and stages_run(result.stdout) == ["01"] and "nothing to do" in result.stdout
    assert state.read(out)["stages"]["01"]["seconds"] == seconds, "a run that did nothing is no measurement"

    next((out / "hidden_states" / "samples").rglob("*.pt")).unlink()
    result = pipeline(*command(config, out)[:-1], "03")
    assert result.returncode == 0, result.stdout + result.stderr
    assert stages_run(result.stdout) == ["02"] and "1 finished samples are missing or damaged" in result.stdout


@pytest.mark.slow
def test_a_changed_value_is_named_before_anything_is_touched(config: Path, out: Path) -> None:
    kept = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and "logs" not in path.parts}
    result = pipeline(*command(config, out, "--args", "04", "--ttt-steps 3"))
    assert result.returncode == 2
    assert "stage 04: --ttt-steps was 2, is 3 (stage 04). Nothing was touched" in result.stderr
    assert f"--redo, which deletes {out}/draft" in result.stderr
    result = pipeline(*command(config, out, "--args", "01", "--max-seq-len 64"))
    assert result.returncode == 2 and re.search(
        "stage 01: --max-seq-len was 128, is 64 .*stage 02: .*04: ", result.stderr
    )
    now = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and "logs" not in path.parts}
    assert now == kept

    result = pipeline(*command(config, out, "--args", "04", "--ttt-steps 3", "--redo"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"--redo: deleting {out}/draft" in result.stdout and stages_run(result.stdout) == ["04"]
    assert json.loads((out / "draft" / "manifest.json").read_text())["fingerprint"]["ttt_steps"] == 3

    result = pipeline(*command(config, out, "--max-samples", "44", "--args", "04", "--ttt-steps 3"))
    assert result.returncode == 2 and "stage 04: --max-samples was 40, is 44 (stage 01)" in result.stderr
    assert "stage 01" not in result.stderr.partition("Nothing")[0].replace("(stage 01)", ""), "more samples only add"


@pytest.mark.slow
def test_runs_of_different_kinds_never_mix(config: Path, out: Path, tiny_target: Path, tmp_path: Path) -> None:
    result = pipeline(COMMAND, "--smoke", "--output-dir", out)
    assert result.returncode == 2 and "holds another run than a smoke run, this is a smoke run" in result.stderr
    other = Path(shutil.copytree(tiny_target, tmp_path / "other"))
    facts = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(facts | {"rms_norm_eps": 1e-3}))
    result = pipeline(*command(config, out, "--model-path", other))
    assert result.returncode == 2 and f"{out}/prepared was made for another target" in result.stderr
    (out / state.NAME).unlink()
    assert "made for another target" in pipeline(*command(config, out, "--model-path", other)).stderr


def test_a_state_file_that_is_damaged_is_one_line(tmp_path: Path) -> None:
    (tmp_path / state.NAME).write_text("{")
    with pytest.raises(UserError, match=r"run\.json is damaged .*delete it"):
        state.read(tmp_path)
    (tmp_path / state.NAME).write_text('{"schema_version": 99}')
    with pytest.raises(UserError, match="not as this program writes it"):
        state.read(tmp_path)


# -------------------------------------------------------------------------------------------------- two nodes


@pytest.mark.slow
def test_two_nodes(finished: tuple[Path, str], out: Path, config: Path, tmp_path: Path) -> None:
    """States by a shard each, one training of both; Ctrl-C ends all of it, and the same command continues."""
    if why := nodes_for_tests.fault():
        pytest.skip(f"the kernel lets no network namespaces be made here: {why}")
    (tmp_path / "hosts").write_text(nodes_for_tests.HOSTFILE)
    more = write_config(tmp_path / "nodes.env", config.read_text() + nodes_for_tests.CONFIG)
    for folder in ("hidden_states", "draft"):
        shutil.rmtree(out / folder)
    asked = [*nodes_for_tests.TWO_NODES, *command(more, out, "--hostfile", tmp_path / "hosts")]
    run = Stage([*asked, "--args", "04", "--epochs 10"], tmp_path / "log")
    run.wait_for(lambda: (out / "draft" / "metrics.jsonl").exists() and steps(out) > 3)
    assert run.stop(signal.SIGINT, group=True) == 130, run.log.read_text()
    text = run.log.read_text()
    assert stages_run(text) == ["02", "04"] and "stage 02: shards merged" in text
    for host in (nodes_for_tests.FIRST, nodes_for_tests.SECOND):
        assert f"{host}: stage 02: hidden states captured" in text
        assert "hidden states captured" in (out / "logs" / f"02.{host}.log").read_text()
    assert_same_samples(finished[0] / "hidden_states", out / "hidden_states", tolerance=1e-4)
    assert json.loads((out / "hidden_states" / "manifest.json").read_text())["shards"] == 2
    assert f"{nodes_for_tests.FIRST}: stopped after step" in text and "2 ranks on cpu" in text

    again = Stage([*asked, "--args", "04", "--epochs 10"], tmp_path / "log2")
    assert again.process.wait(120) == 0, again.log.read_text()
    assert stages_run(again.log.read_text()) == ["04"] and "continuing after step" in again.log.read_text()
    assert json.loads((out / "draft" / "manifest.json").read_text())["ranks"] == 2
    assert all(state.read(out)["stages"][stage]["memory"] > 100e6 for stage in ("02", "04"))


# ---------------------------------------------------------------------------------- detached, stopped, killed


@pytest.mark.slow
def test_a_detached_run_is_asked_after_and_stopped(config: Path, out: Path) -> None:
    before = steps(out)
    began = time.monotonic()
    result = pipeline(*command(config, out, *LONG, "--detach"))
    assert result.returncode == 0 and time.monotonic() - began < 30 and "goes on by itself as pid" in result.stdout
    pid = int(re.search(r"pid (\d+)", result.stdout)[1])
    wait_for(lambda: steps(out) > before + 3)
    runner_and_stage = engine_guard.family({pid: engine_guard.look(pid)[1]})
    assert len(runner_and_stage) >= 3

    told = pipeline(COMMAND, "--config", config, "--output-dir", out, "--status")
    assert told.returncode == 0 and f"{out}: running, began" in told.stdout and f"pid {pid} on" in told.stdout
    assert "samples of" in told.stdout and re.search(r"04 +running, began .*\n +\d{4}-.*", told.stdout)
    second = pipeline(*command(config, out))
    assert second.returncode == 2 and re.search(rf"is in use by a run \(pid {pid} on .*--stop ends it", second.stderr)

    stopped = pipeline(COMMAND, "--output-dir", out, "--stop")
    assert stopped.returncode == 0 and "stage 04 stopped by SIGTERM, exit code 143" in stopped.stdout
    assert not engine_guard.alive(runner_and_stage)
    assert "checkpoint written, the same command continues" in (out / "logs" / "run.log").read_text()
    step = int(re.search(r"step(\d+)", (out / "draft" / "checkpoints" / "latest").read_text())[1])
    assert step == json.loads((out / "draft" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    told = pipeline(COMMAND, "--output-dir", out, "--status").stdout
    assert f"{out}: stopped, began" in told and re.search("04 +stopped", told)
    again = pipeline(COMMAND, "--output-dir", out, "--stop")
    assert again.returncode == 1 and "no run is at work" in again.stderr


@pytest.mark.slow
def test_a_run_outlives_its_terminal(config: Path, out: Path) -> None:
    """A terminal of its own, closed while the run trains: all that shared it gets SIGHUP, and the run ends well."""
    child, terminal = pty.fork()
    if not child:
        os.environ |= {"EAGLE3_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        os.execv("/bin/bash", ["bash", *map(str, command(config, out, "--args", "04", "--epochs 12"))])
    seen = b""
    deadline = time.monotonic() + 90
    while b"training:" not in seen:
        seen += os.read(terminal, 1 << 16)
        assert time.monotonic() < deadline
    at_work = state.read(out)["runner"]
    os.close(terminal)  # hangs up
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (129, -signal.SIGHUP)
    assert state.alive(at_work), "the run ended with its terminal"
    wait_for(lambda: not state.alive(at_work))
    found = state.read(out)
    assert found["state"] == "finished", found["message"]
    assert json.loads((out / "draft" / "manifest.json").read_text())["epochs"] == 12


@pytest.mark.slow
def test_ctrl_c_saves_and_a_killed_runner_leaves_no_worker(config: Path, out: Path, tmp_path: Path) -> None:
    before = steps(out)
    run = Stage(command(config, out, *LONG), tmp_path / "log")
    run.wait_for(lambda: steps(out) > before + 3)
    assert run.stop(signal.SIGINT, group=True) == 130  # as a terminal sends it; nothing of the family is left
    text = run.log.read_text()
    assert "stage 04 goes on from what is there: --epochs was 2, is 2000" in text and stages_run(text) == ["04"]
    assert "checkpoint written, the same command continues" in text and "stage 04 stopped by SIGINT" in text

    again = Stage(command(config, out, *LONG), tmp_path / "log2")
    again.wait_for(lambda: "continuing after step" in again.log.read_text())
    before = steps(out)
    again.wait_for(lambda: steps(out) > before + 3)
    family = again.family()
    os.kill(state.read(out)["runner"]["pid"], signal.SIGKILL)
    assert again.process.wait(30) == 137
    wait_for(lambda: not engine_guard.alive(family), 30)
    assert "the run was killed; its stage saves what it has and ends" in again.log.read_text()
    assert (out / "logs" / "04.log").read_text().count("checkpoint written") == 2
    told = pipeline(COMMAND, "--output-dir", out, "--status").stdout
    assert "ended without a word" in told and re.search("04 +broken off", told)


def test_memory_counts_all_processes_of_a_stage_and_what_they_share_once() -> None:
    hold = "import os, time; b = bytearray(60_000_000); pid = os.fork(); c = bytearray(30_000_000); time.sleep(4)"
    process = subprocess.Popen([sys.executable, "-c", hold])
    watch = runner.Memory(process.pid)
    time.sleep(2.5)
    peak = watch.stop()
    process.kill()
    assert 120e6 < peak < 260e6


def test_logs_get_a_stamp_a_line_and_few_states_of_a_bar(tmp_path: Path) -> None:
    text = b"one\n" + b"".join(b"\rbar %d" % n for n in range(500)) + b"\ntwo\nlast"
    stamp = REPOSITORY / "eagle3/pipeline/stamp.py"
    result = subprocess.run([sys.executable, stamp, tmp_path / "log"], input=text, capture_output=True)
    assert result.stdout == text
    lines = [line[20:] for line in (tmp_path / "log").read_text().splitlines()]
    assert lines[0] == "one" and lines[-3:] == ["bar 499", "two", "last"] and len(lines) < 7
