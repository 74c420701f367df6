"""No engine process outlives its stage. vLLM computes in child processes, which survive a kill -9 and hold the GPU.

While an engine lives a watcher process notes which processes descend from the stage, and when the stage is gone it ends
exactly those, known by pid and start time, never by name. Its record lies beside the engine's log, so that a run after
a kill of stage and watcher both can say what was left. Linux; standard library alone, for this file is the watcher's
program.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import resource_tracker
from pathlib import Path

PREFIX = ".engine-"  # of a record's name; the stage's pid follows
MARK = "EAGLE3_ENGINE_OF"  # environment variable: pid and start time of the stage
PERIOD = 0.5  # s between two looks; of what is younger, forked processes report themselves, others bear the mark
GRACE = 5.0  # s between SIGTERM and SIGKILL

_open: set["EngineGuard"] = set()
Processes = dict[int, int]  # pid -> start time, in clock ticks since boot: a pid used again has another


def look(pid: int) -> tuple[int, int] | None:
    """(parent, start time) of a process; None when it has ended, a zombie too."""
    with contextlib.suppress(OSError):
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()  # the name may hold anything
        if fields[0] not in "ZX":
            return int(fields[1]), int(fields[19])
    return None


def alive(processes: Processes) -> Processes:
    """Those of `processes` that still run."""
    return {pid: start for pid, start in processes.items() if (seen := look(pid)) and seen[1] == start}


def family(roots: Processes) -> Processes:
    """Those of `roots` that still run, and all their descendants."""
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    table = {pid: seen for pid in pids if (seen := look(pid))}
    found, more = {}, alive(roots)
    while more:
        found |= more
        more = {pid: start for pid, (parent, start) in table.items() if parent in found and pid not in found}
    return found


def end(processes: Processes) -> None:
    """End these processes and their descendants: SIGTERM, then SIGKILL for what is left after GRACE seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        told: Processes = {}
        deadline = time.monotonic() + GRACE
        while (processes := family(processes)) and time.monotonic() < deadline:
            for pid in processes.keys() - told.keys():
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
            told |= processes
            time.sleep(0.05)


class EngineGuard:
    """Made before an engine starts and closed after it has ended, in the process that starts it."""

    def __init__(self, log: Path) -> None:
        """`log` is the engine's: the record lies in its folder."""
        resource_tracker.ensure_running()  # one a process, started at need: it is no engine process and ends by itself
        self._stage = _this_process()
        self._others = family(self._stage)  # itself and what it has started so far
        self._record = (log.parent / f"{PREFIX}{os.getpid()}.json").resolve()
        arguments = [json.dumps(self._stage), json.dumps(self._others), str(self._record)]
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C and a closed terminal are not for it
        )
        _open.add(self)
        os.environ[MARK] = _mark(self._stage)

    def report(self) -> None:
        """Called in a process just forked, which keeps the environment that its parent began with."""
        with contextlib.suppress(OSError):
            os.write(self._watcher.stdin.fileno(), b"%d\n" % os.getpid())

    def close(self, failed: bool = False) -> None:
        """Stop watching; after a failed start end first what that has left."""
        if failed:
            left = family(self._stage)
            end({pid: start for pid, start in left.items() if pid not in self._others and pid != self._watcher.pid})
        _open.discard(self)
        os.environ.pop(MARK, None)
        self._watcher.kill()
        self._watcher.communicate()
        for path in (self._record, self._record.with_suffix(".tmp")):
            path.unlink(missing_ok=True)


os.register_at_fork(after_in_child=lambda: [guard.report() for guard in _open])


def survivors(directory: Path) -> dict[int, str]:
    """Engine processes (pid -> command) that killed runs left in spite of all, by their records in `directory`.

    Waits for those that a watcher is ending just now. Records without a living process are removed.
    """
    found: dict[int, str] = {}
    for path in directory.glob(f"{PREFIX}*.json"):
        record = json.loads(path.read_text())
        if record["host"] != socket.gethostname() or alive(_processes(record["stage"])):
            continue  # another machine's, or a run at work
        deadline = time.monotonic() + 3 * GRACE
        while alive(_processes(record["watcher"])) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = alive(_processes(record["engine"]))
        found |= {pid: record["commands"][str(pid)] for pid in left}
        if not left:
            path.unlink(missing_ok=True)
    return found


def _this_process() -> Processes:
    return {os.getpid(): look(os.getpid())[1]}


def _processes(read: dict[str, int]) -> Processes:
    return {int(pid): start for pid, start in read.items()}  # JSON's keys are text


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
        return b" ".join(words).decode(errors="replace").strip()[:160]
    return "?"


def _mark(stage: Processes) -> str:
    return " ".join(map(str, *stage.items()))


def _marked(mark: str) -> Processes:
    """Processes started, not forked, by the stage or its descendants since the guard was made."""
    wanted, found = f"{MARK}={mark}".encode(), {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # ended, or another user's
            if wanted in Path("/proc", str(pid), "environ").read_bytes().split(b"\0") and (seen := look(pid)):
                found[pid] = seen[1]
    return found


def _reported() -> Processes:
    """What has reported itself since the last call."""
    with contextlib.suppress(BlockingIOError):
        return {pid: seen[1] for pid in map(int, os.read(0, 1 << 16).split()) if (seen := look(pid))}
    return {}


def watch(stage: Processes, others: Processes, record: Path) -> None:
    """The watcher: keep `record` up to date until the stage is gone, then end the engine's processes."""
    os.set_blocking(0, False)
    events = select.poll()
    events.register(0, select.POLLIN)
    with contextlib.suppress(OSError, AttributeError):  # gone already, or a kernel without pidfd: PERIOD must do
        events.register(os.pidfd_open(next(iter(stage))), select.POLLIN)
    me = _this_process()
    engine: Processes = {}
    while alive(stage):
        now = family(stage | engine | _reported())
        now = {pid: start for pid, start in now.items() if pid not in others | me}
        if now != engine:
            engine = now
            facts = {"host": socket.gethostname(), "stage": stage, "watcher": me, "engine": engine}
            temporary = record.with_suffix(".tmp")
            with contextlib.suppress(OSError):  # a full disk must not end the watch
                temporary.write_text(json.dumps(facts | {"commands": {pid: _command(pid) for pid in engine}}))
                temporary.replace(record)
        events.poll(PERIOD * 1000)
    deadline = time.monotonic() + 1  # for one that was just being started
    while time.monotonic() < deadline:
        end(engine | _reported() | _marked(_mark(stage)))
        time.sleep(0.1)
    record.unlink(missing_ok=True)


if __name__ == "__main__":
    watch(_processes(json.loads(sys.argv[1])), _processes(json.loads(sys.argv[2])), Path(sys.argv[3]))
