"""Starting the runner apart from the terminal, following it, asking after it, ending it."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3 import engine_guard, terminal
from eagle3.pipeline import closing, state
from eagle3.pipeline.settings import FOLDERS, STAGES
from eagle3.terminal import UserError

PERIOD = 0.1  # s between two looks at the log
HANGUP_CODE = 129


@dataclass
class Running:
    process: subprocess.Popen
    output: Path
    start: int  # of this run's part of logs/run.log, bytes

    @property
    def log(self) -> Path:
        return self.output / "logs" / "run.log"


def require_free(output: Path) -> None:
    """Raises UserError while a run is at work in `output`."""
    lock = output / state.LOCK
    if lock.exists():
        with state.at_work(output):
            pass


def start(answer: dict[str, Any], output: Path) -> Running:
    """Start the runner in a session of its own; its output goes to logs/run.log."""
    logs = output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    place = logs / "answer.json"
    place.write_text(json.dumps(answer))
    with open(logs / "run.log", "ab") as log:
        begin = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "eagle3.pipeline.runner", str(place)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return Running(process, output, begin)


def announce(running: Running) -> int:
    print(
        f"the run goes on by itself as pid {running.process.pid}, log {running.log}; ask with --status, end it "
        f"with --stop, both with --output-dir {running.output}"
    )
    return 0


def follow(running: Running) -> int:
    """Show the runner's output until it ends; returns its exit code.

    SIGINT and SIGTERM are passed on, and end the run with everything saved. A terminal that closes ends this process
    alone.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: running.process.send_signal(number))
    signal.signal(signal.SIGHUP, lambda *_: os._exit(HANGUP_CODE))
    with open(running.log, "rb") as log:
        log.seek(running.start)
        while True:
            ended = running.process.poll() is not None
            while chunk := log.read(1 << 16):
                _show(chunk)
            if ended:
                break
            time.sleep(PERIOD)
    code = running.process.returncode
    code = code if code >= 0 else 128 - code
    message = state.read(running.output).get("message") if code else ""
    if code == 137 and not message:
        message = "the run was killed; its stage saves what it has and ends, the same command continues"
    if message:
        print(f"\nrun_pipeline.sh: {message}", file=sys.stderr, flush=True)
    return code


def _show(chunk: bytes) -> None:
    try:
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
    except OSError:  # nobody reads: the run goes on
        terminal.leave_terminal()
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)


def status(output: Path) -> int:
    """Print how far the run is. Exit code 0; 1 where there is none."""
    found = state.read(output)
    if not found:
        raise UserError(f"{output} holds no run; give the --output-dir (or --config) that it was started with")
    runner = found["runner"]
    at_work = found["state"] == "running" and _at_work(output)
    how = found["state"] if found["state"] != "running" or at_work else "ended without a word (killed, or a reboot)"
    print(
        f"{output}: {how}, began {found['began']}" + (f", pid {runner['pid']} on {runner['host']}" if at_work else "")
    )
    if found.get("message"):
        print(f"  {found['message']}")
    planned = found.get("plan", {})
    for stage in STAGES:
        entry = found["stages"].get(stage)
        if entry is None:
            if stage in planned:
                print(f"  {stage:<5}  to do, planned for {planned[stage]['seconds'] / 3600:.2f} h")
            continue
        shown = entry["state"]
        if shown == "running" and not at_work:
            shown = "broken off"
        parts = [f"{shown}, began {entry['began']}"]
        parts += [f"{entry['seconds']:.0f} s"] if "seconds" in entry else []
        parts += closing.facts(output, stage) if entry["state"] == "finished" else []
        print(f"  {stage:<5}  {', '.join(parts)}")
        if shown == "running" and (line := _last_line(output / "logs" / f"{stage}.log")):
            print(f"         {line}")
            if stage in FOLDERS:
                print(f"         {closing.folder_bytes(output / FOLDERS[stage]) / 1e9:.3f} GB on disk")
    return 0


def _at_work(output: Path) -> bool:
    """Whether a runner holds the directory's lock, here or on the host of its record."""
    if not state.alive(state.read(output).get("runner")):
        return False
    with open(output / state.LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True


def _last_line(log: Path) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - 4096))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return lines[-1][:200] if lines else ""


def stop(output: Path) -> int:
    """End the run as Ctrl-C does, and wait until all of it has gone."""
    found = state.read(output)
    runner = found.get("runner")
    if not runner or not _at_work(output):
        raise UserError(f"no run is at work in {output}; nothing to stop")
    if runner["host"] != state.process(os.getpid())["host"]:
        raise UserError(f"the run in {output} is on {runner['host']} (pid {runner['pid']}); stop it there")
    processes = engine_guard.family({runner["pid"]: runner["start"]})
    os.kill(runner["pid"], signal.SIGTERM)
    print(f"pid {runner['pid']} is told to stop; its stage saves what it has", flush=True)
    while engine_guard.alive(processes):
        time.sleep(PERIOD)
    print(state.read(output).get("message") or "it had just finished")
    return 0
