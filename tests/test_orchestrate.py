"""Faults around a run, from public bug reports: orphaned workers, lost signals, dead engines, shared machines."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from capture_for_tests import settings_for
from conftest import REPOSITORY
from interruptions_for_tests import CONVERSATIONS, Stage, stage_02, stage_04, write_prepared
from states_for_tests import write_states

from eagle3 import artifacts, engine_guard, vllm_runtime
from eagle3.capture.transformers_engine import TransformersEngine
from eagle3.terminal import UserError

# a stand-in for the package vllm: its constructor does what ENGINE says
ENGINE = """
import os, subprocess, sys, time

def child():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # engine stand-in"])

class LLM:
    def __init__(self, **arguments):
        exec(os.environ["ENGINE"], globals())
"""


@pytest.fixture
def engine(tmp_path: Path) -> dict[str, str]:
    """An environment in which `import vllm` finds the stand-in; set ENGINE in it to what the constructor does."""
    package = tmp_path / "stand-in" / "vllm" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text(ENGINE)
    return {"PYTHONPATH": os.pathsep.join([str(package.parents[1]), str(REPOSITORY)])}


@pytest.fixture(scope="module")
def prepared(tiny_target: Path, chats_of_module: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small output of stage 01."""
    return write_prepared(tmp_path_factory.mktemp("orchestrate") / "prepared", tiny_target, chats_of_module)


@pytest.fixture(scope="module")
def chats_of_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(CONVERSATIONS.read_text().splitlines(keepends=True)[:40]))
    return path


def records(directory: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in directory.glob(f"{engine_guard.PREFIX}*.json")]


def recorded(directory: Path, count: int) -> engine_guard.Processes:
    """The engine's processes in the one record of `directory`, {} while there are fewer than `count`."""
    found = records(directory)
    processes = engine_guard._processes(found[0]["engine"]) if found else {}
    return processes if len(processes) >= count else {}


def wait_until(event, seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while not event() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(event())


# ---------------------------------------------------------------------------------------------- orphaned workers

GUARDED = """
import subprocess, sys, time
from pathlib import Path
from eagle3.engine_guard import EngineGuard
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
before = subprocess.Popen(sleeper)
guard = EngineGuard(Path(sys.argv[1]) / "engine.log")
engine = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", engine, *sleeper])
print(before.pid, flush=True)
sys.stdin.readline()
guard.close(failed=True)
print("closed", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def guarded(tmp_path: Path):
    """A process with a child of its own and, under guard, an engine process that has a child."""
    command = [sys.executable, "-c", GUARDED, tmp_path]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    other = int(process.stdout.readline())
    assert wait_until(lambda: recorded(tmp_path, 2))
    yield process, other, recorded(tmp_path, 2)
    process.kill()
    process.wait()
    os.kill(other, signal.SIGKILL)


def test_a_killed_stage_leaves_no_engine_and_nothing_else_is_touched(guarded, tmp_path: Path) -> None:
    process, other, processes = guarded
    assert other not in processes and engine_guard.alive(processes) == processes
    process.kill()
    assert wait_until(lambda: not engine_guard.alive(processes))
    assert engine_guard.look(other)
    assert wait_until(lambda: not records(tmp_path))
    assert engine_guard.survivors(tmp_path) == {}


def test_engines_started_at_the_last_moment_are_ended_too(tmp_path: Path) -> None:
    """The watcher has not yet looked around: one process is forked, the other a new program, as vLLM does both."""
    program = """
import os, subprocess, sys, time
from pathlib import Path
from eagle3.engine_guard import EngineGuard
guard = EngineGuard(Path(sys.argv[1]) / "engine.log")
sleeper, quiet = [sys.executable, "-c", "import time; time.sleep(600)"], subprocess.DEVNULL
engine = subprocess.Popen(sleeper, stdout=quiet, stderr=quiet)
if not (forked := os.fork()):
    os.closerange(1, 3)
    time.sleep(600)
print(engine.pid, forked, flush=True)
os.kill(os.getpid(), 9)
"""
    result = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, cwd=REPOSITORY)
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 2, result.stderr
    try:
        assert wait_until(lambda: not any(map(engine_guard.look, pids)))
    finally:
        engine_guard.end({pid: seen[1] for pid in pids if (seen := engine_guard.look(pid))})


def test_a_failed_start_ends_what_it_started(guarded, tmp_path: Path) -> None:
    process, other, processes = guarded
    (record,) = records(tmp_path)
    assert record["host"] == socket.gethostname() and str(process.pid) in record["stage"]
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "closed\n"
    assert not engine_guard.alive(processes) and engine_guard.look(other)
    assert not records(tmp_path) and not engine_guard.alive(engine_guard._processes(record["watcher"]))


def test_survivors_of_stage_and_watcher_are_named_until_they_are_gone(guarded, tmp_path: Path) -> None:
    process, _, processes = guarded
    assert engine_guard.survivors(tmp_path) == {}, "a run at work is not a survivor"
    for pid in (*records(tmp_path)[0]["watcher"], process.pid):  # the watcher first
        os.kill(int(pid), signal.SIGKILL)
    process.wait()
    left = engine_guard.survivors(tmp_path)
    assert left.keys() == processes.keys() and all("import" in command for command in left.values())
    (path,) = tmp_path.glob(f"{engine_guard.PREFIX}*.json")
    reused = json.loads(path.read_text())
    reused["engine"] = {pid: start - 1 for pid, start in reused["engine"].items()}
    (tmp_path / f"{engine_guard.PREFIX}1.json").write_text(json.dumps(reused | {"stage": {}}))
    assert engine_guard.survivors(tmp_path) == left, "another process with a pid of the record was taken for the engine"
    assert len(records(tmp_path)) == 1
    engine_guard.end(processes)
    assert engine_guard.survivors(tmp_path) == {} and not records(tmp_path)


def test_a_rerun_reports_the_worker_that_survived_and_goes_on(engine, tiny_target, prepared, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    command = stage_02(tiny_target, prepared, out, "vllm")
    stage = Stage(command, log, **engine, ENGINE="child(); time.sleep(600)")
    stage.wait_for(lambda: recorded(out, 1))
    (worker,) = recorded(out, 1)
    for pid in (*records(out)[0]["watcher"], stage.process.pid):
        os.kill(int(pid), signal.SIGKILL)
    stage.process.wait()
    again = Stage(command, log, **engine, ENGINE="raise ValueError('the second engine was reached')")
    assert again.process.wait(60) == 1
    try:
        (warning,) = [line for line in log.read_text().splitlines() if line.startswith("warning: ")]
        assert f"{worker} (" in warning and "-c import time" in warning and warning.endswith(f": kill {worker}")
        assert "starting vLLM failed: ValueError: the second engine was reached" in log.read_text()
        assert engine_guard.look(worker), "it was killed, and could have been anybody's"
    finally:
        os.kill(worker, signal.SIGKILL)


def test_ctrl_c_while_the_engine_starts_and_an_engine_that_dies(engine, tiny_target, prepared, tmp_path: Path) -> None:
    """A SIGINT to the orchestrator alone, then the same command with an engine that ends at once."""
    out, log, settings = tmp_path / "out", tmp_path / "log", tmp_path / "run.env"
    out.mkdir()
    (out / "prepared").symlink_to(prepared)
    settings.write_text(f"MODEL_PATH={tiny_target}\nGPUS=1\nEXTRACT_ARGS=(--engine vllm)\n")
    command = [REPOSITORY / "run_pipeline.sh", "--config", settings, "--output-dir", out, "--from", "02"]
    pipeline = Stage(command, log, **engine, ENGINE="child(); child(); time.sleep(600)")
    pipeline.wait_for(lambda: recorded(out / "hidden_states", 2))
    workers, began = recorded(out / "hidden_states", 2), time.monotonic()
    assert pipeline.stop(signal.SIGINT) == 130 and time.monotonic() - began < 15
    assert not engine_guard.alive(workers)
    text = log.read_text()
    assert "interrupted: nothing finished is lost" in text and "stage 02 stopped by SIGINT, exit code 130" in text
    assert "Traceback" not in text
    left = {path.name for path in (out / "hidden_states").iterdir()}
    assert left == {".lock", "engine.log", "manifest.json"}

    dies = "subprocess.run([sys.executable, '-c', 'raise OSError(\"no such device: 7\")']); sys.exit(1)"
    again = Stage(command, log, **engine, ENGINE=dies)
    assert again.process.wait(30) == 1
    text = log.read_text().removeprefix(text)
    assert (
        f"error: starting vLLM failed: OSError: no such device: 7; all of it is in {out}/hidden_states/engine.log"
        in text
    )
    assert "stage 02 failed, exit code 1" in text and "=== 03 ===" not in text and "Traceback" not in text


# ------------------------------------------------------------------------------------------- versions and memory


@pytest.mark.parametrize(
    ("installed", "outcome"),
    [
        ("0.25.1", "vllm 0.25.1 is older than 0.26 .* install vllm 0.26 to 0.33, or use --engine transformers"),
        ("0.26.0", ""),
        ("0.33.2+cu130", ""),
        ("0.34.0rc1", "vllm 0.34.0rc1 is newer than 0.33, the last one tried here; the canary of stage 02 decides"),
        ("0.1.dev1+gabcdef", "vllm 0.1.dev1\\+gabcdef does not tell its release; the canary"),
    ],
)
def test_versions_of_vllm(installed: str, outcome: str, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")
    facts = tmp_path / f"vllm-{installed}.dist-info" / "METADATA"
    facts.parent.mkdir()
    facts.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {installed}\n")
    monkeypatch.syspath_prepend(tmp_path)
    if "older" in outcome:
        with pytest.raises(UserError, match=outcome):
            vllm_runtime.load(tmp_path, tmp_path / "log", dtype="float32", max_model_len=8)
        return
    vllm_runtime.require_version()
    said = capsys.readouterr().err
    assert re.search(outcome, said) if outcome else said == ""


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        (
            "ValueError: Free memory on device cuda:0 (3.1/139.8 GiB) on startup is less than desired GPU memory "
            "utilization (0.9, 125.8 GiB).",
            "another process may hold the memory (nvidia-smi lists them): end it, or lower --gpu-memory-utilization",
        ),
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
            "raise --gpu-memory-utilization, or shard over more GPUs with --tensor-parallel-size",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "else lower --gpu-memory-utilization, or shard over more GPUs with --tensor-parallel-size",
        ),
        (
            "ValueError: Available memory on node 0 (1.31/23.54 GiB) on kv cache allocation is less than requested "
            "memory for kv (2.0 GiB).",
            "the host's memory is full: end what else holds it (top shows it), or take a smaller target",
        ),
        (
            "RuntimeError: Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested",
            "so it serves no EAGLE-3 draft of it either; stage 02 can do without vLLM: --engine transformers",
        ),
    ],
)
def test_an_engine_that_cannot_start_says_what_to_do(cause: str, advice: str, tmp_path, monkeypatch, capfd) -> None:
    def start(**arguments: object) -> None:
        os.write(2, f"(EngineCore pid=7) ERROR 11-29 10:00:00 [core.py:1] {cause}\n".encode())
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=start, __spec__=True))
    monkeypatch.setattr(vllm_runtime, "version", lambda: "0.32.0")
    with pytest.raises(UserError) as caught:
        vllm_runtime.load(tmp_path, tmp_path / "log", dtype="float32", max_model_len=8)
    assert cause.split(":")[1][:40] in str(caught.value) and str(caught.value).endswith(advice)
    assert advice in str(vllm_runtime.died(tmp_path / "log", 0)) and not records(tmp_path)


def allocate(*arguments: object, **settings: object) -> torch.Tensor:
    return torch.empty(1 << 60, dtype=torch.uint8)  # more than any machine has


def test_training_without_memory_names_the_knobs(tiny_target, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("eagle3.training.inputs.open_inputs", allocate)
    monkeypatch.setattr(sys, "argv", [*map(str, stage_04(tiny_target, tmp_path, tmp_path, "--max-tokens", 999)[1:])])
    script = SourceFileLoader("stage_04", str(REPOSITORY / "04_train_draft.py")).load_module()
    with pytest.raises(
        UserError, match=r"out of memory \(RuntimeError: .*--max-tokens \(now 999\) and --ttt-steps \(now 5"
    ):
        script.main()
    monkeypatch.setattr("eagle3.training.inputs.open_inputs", lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):  # another fault of torch stays itself
        script.main()


def test_capture_without_memory_names_the_way_out(tiny_target, tmp_path) -> None:
    engine = TransformersEngine(settings_for(tiny_target, tmp_path))
    with pytest.raises(UserError, match=r"a prompt of 3 tokens does not fit in memory .*use --engine vllm, or shorter"):
        engine._forward(allocate, [1, 2, 3])


# ------------------------------------------------------------------------------------------------ several ranks

RANKS = """
import os, runpy, sys
from eagle3.training import loop
whole = loop.Trainer._optimizer_step
def step(self, *arguments):
    if self.rank == 1 and self.step == 2:
        raise RuntimeError("rank 1 has had enough")
    return whole(self, *arguments)
loop.Trainer._optimizer_step = step
sys.argv[0] = sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_one_rank_dies_and_all_end_with_its_trace(tiny_target, tmp_path: Path) -> None:
    write_states(tmp_path, tiny_target)
    program = tmp_path / "program.py"
    program.write_text(RANKS)
    command = stage_04(tiny_target, tmp_path, tmp_path / "draft", "--max-tokens", 128, ranks=2)
    place = command.index(REPOSITORY / "04_train_draft.py")
    stage = Stage([*command[:place], program, *command[place:]], tmp_path / "log", PYTHONPATH=str(REPOSITORY))
    stage.wait_for(lambda: "rank 1 has had enough" in stage.log.read_text())
    ranks, began = stage.family(), time.monotonic()
    assert stage.process.wait(30) != 0
    assert wait_until(lambda: not engine_guard.alive(ranks), 30 - (time.monotonic() - began))
    assert "RuntimeError: rank 1 has had enough" in stage.log.read_text() and "in step" in stage.log.read_text()


# ------------------------------------------------------------------------------------------------ shared machines


@pytest.mark.slow
def test_no_gpu_odd_paths_and_sigterm_while_training(tiny_target: Path, chats_of_module: Path, tmp_path: Path) -> None:
    """The orchestrator without GPU and with a vLLM that must not be imported; names with spaces, quotes and umlauts,
    a relative target behind a link; the lock while it trains; caches elsewhere; SIGTERM."""
    poison = tmp_path / "poison" / "vllm" / "__init__.py"
    poison.parent.mkdir(parents=True)
    poison.write_text("raise ImportError('vllm was imported')")
    here = tmp_path / 'it\'s "here" ü'
    here.mkdir()
    (here / "my target").symlink_to(tiny_target)
    (here / "some chats.jsonl").symlink_to(chats_of_module)
    settings = here / "run of mine.env"

    settings.write_text(
        "GPUS=1\nPREPARE_ARGS=(--max-seq-len 128)\nEXTRACT_ARGS=(--engine transformers)\n"
        "VOCAB_ARGS=(--draft-vocab-size 400)\nTRAIN_ARGS=(--ttt-steps 2 --epochs 1000)\n"
    )
    out, home = here / "my out (v1)", tmp_path / "home"
    home.mkdir()
    command = [REPOSITORY / "run_pipeline.sh", "--config", settings.name, "--output-dir", out.name, "--to", "04"]
    command += ["--model-path", "./my target", "--dataset", "some chats.jsonl"]
    caches = dict.fromkeys(("HF_HOME", "MPLCONFIGDIR", "TRITON_HOME", "XDG_CACHE_HOME"), str(tmp_path / "caches"))
    machine = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(poison.parents[1]), "HOME": str(home)}
    pipeline = Stage(command, tmp_path / "log", cwd=here, **machine, **caches)
    pipeline.wait_for(lambda: len(metrics(out / "draft")) > 5)

    with pytest.raises(UserError, match="in use by") as refused, artifacts.directory_lock(out / "draft"):
        pass
    trainers = [pid for pid in pipeline.family() if "04_train" in engine_guard._command(pid)]
    assert any(f"{socket.gethostname()} pid {pid};" in str(refused.value) for pid in trainers)

    assert pipeline.stop(signal.SIGTERM) == 143
    text = pipeline.log.read_text()
    assert "checkpoint written, the same command continues" in text and "stage 04 stopped by SIGTERM" in text
    assert "vllm was imported" not in text
    checkpoint = out / "draft" / "checkpoints" / (out / "draft" / "checkpoints" / "latest").read_text()
    assert int(checkpoint.name.removeprefix("step")[:8]) == metrics(out / "draft")[-1]["step"]
    assert all(zipfile.ZipFile(path).testzip() is None for path in checkpoint.iterdir())
    with artifacts.directory_lock(out / "draft"):
        pass
    [dataset] = artifacts.read_manifest(out / "prepared", "01")["fingerprint"]["dataset"]
    assert dataset["name"] == "some chats.jsonl" and str(here) not in json.dumps(dataset), "a path is saved"
    assert list(home.iterdir()) == [], "a cache that cannot be moved elsewhere"


def metrics(directory: Path) -> list[dict]:
    """The whole training lines of metrics.jsonl."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [line for line in map(json.loads, lines) if line["kind"] == "train"]


def test_help_of_all_imports_neither_torch_nor_vllm() -> None:
    program = """
import runpy, sys
sys.modules["torch"] = sys.modules["vllm"] = None
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, script
"""
    scripts = sorted(map(str, REPOSITORY.glob("0?_*.py")))
    assert len(scripts) == 4
    result = subprocess.run([sys.executable, "-c", program, *scripts], capture_output=True, text=True, cwd=REPOSITORY)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("--output-dir") >= 4
