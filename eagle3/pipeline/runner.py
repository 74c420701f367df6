"""The process that runs the stages, in a session of its own: no terminal's end reaches it. Light: torch stays outside.

    python -m eagle3.pipeline.runner ANSWER      # briefing.py's answer; as eagle3.pipeline starts it

Each stage is a session of its own too, and is told SIGTERM by the kernel should this process be killed. SIGINT and
SIGTERM go to the stage, which saves what it has; OUT/run.json says how far the run has come.
"""

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3 import engine_guard, terminal
from eagle3.pipeline import closing, stages, state
from eagle3.pipeline.settings import FOLDERS, Settings
from eagle3.terminal import UserError

PR_SET_PDEATHSIG = 1
MEMORY_PERIOD = 1.0  # s between two looks at the stage's memory
OPEN_FILES = 65536  # soft limit for the stages where the hard one allows it
MORE_TO_DO = 3  # exit code of stage 02 when a disk budget is reached
libc = ctypes.CDLL(None)


class Runner:
    """One run over the stages."""

    def __init__(self, answer: dict[str, Any], path: Path) -> None:
        self.settings = Settings(**answer["settings"])
        self.output = self.settings.output
        self.answer, self.answer_path = answer, path
        self.caught = 0  # the signal that is to end the run
        self.child: subprocess.Popen | None = None
        self.ran: dict[str, float] = {}  # seconds of the stages of this run
        before = state.read(self.output)
        self.state: dict[str, Any] = {
            "smoke": self.settings.smoke,
            "target": answer["target"],
            "settings": answer["settings"],
            "plan": answer["plan"],
            "runner": state.process(os.getpid()),
            "state": "running",
            "message": "",
            "began": now(),
            "stages": before.get("stages", {}),
        }

    def run(self) -> int:
        """All stages that are to run; returns the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise_open_files()
        self._remove()
        self._write()
        for stage in self.settings.stages:
            if self.caught:
                return self._end("stopped", f"stopped by {self._signal()} before stage {stage}", 128 + self.caught)
            entry = self.state["stages"].get(stage, {})
            if stage in self.answer["finished"] and entry.get("manifests") == stages.manifests(self.output, stage):
                say(f"\n=== {stage} === finished {entry['ended']} in {entry['seconds']:.0f} s, not run again")
                continue
            if code := self._run(stage):
                return code
        self._end("finished", "", 0)
        closing.close(self.settings, self.state, self.ran)
        return 0

    # ------------------------------------------------------------------------------------------- one stage

    def _run(self, stage: str) -> int:
        """Run a stage; returns 0 when it finished, else the exit code of the run."""
        command, log = stages.command(stage, self.settings), self.output / "logs" / f"{stage}.log"
        across = self.settings.nodes and stage in stages.ON_NODES
        if across:
            command = [sys.executable, "-m", "eagle3.pipeline.across", stage, str(self.answer_path)]
        say(f"\n=== {stage} === (log {log})")
        with open(log, "a") as file:
            file.write(f"\n{now()} {subprocess.list2cmdline(command)}\n")
        earlier = self.state["stages"].get(stage, {})
        entry = {
            "state": "running",
            "began": now(),
            "made_of": {source: self._made_of(source) for source in stages.upstream(stage)},
            "attempts": 1 + (earlier.get("attempts", 0) if earlier.get("state") != "finished" else 0),
        }
        self.state["stages"][stage] = entry
        started = time.monotonic()
        code, memory = self._wait(command, log, entry)
        if across:  # of the node that took most
            memory = max((int(one.read_text() or 0) for one in log.parent.glob(f"{stage}.*.memory")), default=0)
        seconds = time.monotonic() - started
        self.ran[stage] = seconds
        before = earlier.get("seconds", 0.0) if earlier.get("state") not in (None, "finished") else 0.0
        entry |= {"seconds": round(before + seconds, 1), "last_seconds": round(seconds, 1), "memory": memory}
        entry |= {"ended": now(), "code": code}
        if code == 0 and not self.caught:
            entry["state"] = "finished"
            entry["manifests"] = stages.manifests(self.output, stage)
            if earlier.get("state") == "finished" and entry["manifests"] == earlier["manifests"]:
                entry |= {key: earlier[key] for key in ("seconds", "last_seconds", "memory")}  # nothing was to do
            if stage in FOLDERS:
                entry["disk"] = closing.folder_bytes(self.output / FOLDERS[stage])
            if stage == "04":
                entry["train_tokens"] = closing.train_tokens(self.output)
            self._write()
            return 0
        return self._failed(stage, code, log)

    def _made_of(self, source: str) -> dict[str, Any]:
        """Flags that made a stage's work: those of now, or of then where it is not of this run."""
        if source in self.settings.stages:
            return self.answer["making"][source]
        return self.state["stages"].get(source, {}).get("made_of", {}).get(source, self.answer["making"][source])

    def _wait(self, command: list[str], log: Path, entry: dict[str, Any]) -> tuple[int, int]:
        """Exit code, as a shell has it, and the most memory that the stage's processes had together."""
        environment = os.environ | self.settings.environment
        if self.settings.values["GPUS"] != "1":  # torch.distributed.run would set one thread a rank, and say so
            environment.setdefault("OMP_NUM_THREADS", "4")
        stamp = Path(__file__).with_name("stamp.py")
        read, write = os.pipe()
        writer = subprocess.Popen([sys.executable, "-S", "-E", stamp, log], stdin=read, start_new_session=True)
        os.close(read)
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            env=environment,
            start_new_session=True,
            preexec_fn=end_with(os.getpid()),
        )
        os.close(write)
        entry["process"] = state.process(self.child.pid)
        self._write()
        if self.caught:  # while the stage was started
            self._pass_on(self.caught)
        memory = Memory(self.child.pid)
        code = self.child.wait()
        self.child = None
        peak = memory.stop()
        with contextlib.suppress(subprocess.TimeoutExpired):  # something that the stage started has its output still
            writer.wait(3)
        return (code if code >= 0 else 128 - code), peak

    def _failed(self, stage: str, code: int, log: Path) -> int:
        why = "failed"
        if code == 137:
            why = "was killed, perhaps by the kernel for want of memory (dmesg says so)"
        if (stage, code) == ("02", MORE_TO_DO):
            why = "reached --max-disk-gb; make room, then the same command continues"
        if self.caught:
            why = f"stopped by {self._signal()}"
        self.state["stages"][stage]["state"] = "stopped" if self.caught or code == MORE_TO_DO else "failed"
        message = f"stage {stage} {why}, exit code {code}; log {log}"
        return self._end(self.state["stages"][stage]["state"], message, 128 + self.caught if self.caught else code)

    # ---------------------------------------------------------------------------------------------- the run

    def _remove(self) -> None:
        """What --redo gives up."""
        for place in map(Path, self.answer["remove"]):
            if place.is_symlink():
                raise UserError(f"{place} is a link, which is not deleted; delete what it points to yourself")
            say(f"--redo: deleting {place}")
            shutil.rmtree(place)
        for stage, folder in FOLDERS.items():
            if str(self.output / folder) in self.answer["remove"]:
                self.state["stages"].pop(stage, None)

    def _stop(self, number: int, frame: object) -> None:
        self.caught = number
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if self.child and self.child.poll() is None:
            self.child.send_signal(number)

    def _signal(self) -> str:
        return signal.Signals(self.caught).name

    def _end(self, how: str, message: str, code: int) -> int:
        self.state |= {"state": how, "message": message, "code": code, "ended": now()}
        self._write()
        return code

    def _write(self) -> None:
        state.write(self.output, self.state)


class Memory:
    """Looks at the memory of a process and all that descend from it: private pages, and the largest shared part."""

    def __init__(self, pid: int) -> None:
        self._pid, self.peak = pid, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """The peak, bytes."""
        self._over.set()
        self._thread.join()
        return self.peak

    def _watch(self) -> None:
        page = resource.getpagesize()
        while not self._over.wait(MEMORY_PERIOD):
            seen = engine_guard.look(self._pid)
            if not seen:
                continue
            private, shared = 0, 0
            for pid in engine_guard.family({self._pid: seen[1]}):
                try:
                    _, resident, file_backed, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
                except (OSError, ValueError):
                    continue
                private += (resident - file_backed) * page
                shared = max(shared, file_backed * page)
            self.peak = max(self.peak, private + shared)


def end_with(parent: int) -> Callable[[], None]:
    """For preexec_fn: the child gets SIGTERM when the thread that started it ends, as by kill -9."""

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def raise_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    path = Path(sys.argv[1]).absolute()
    answer = json.loads(path.read_text())
    output = Settings(**answer["settings"]).output
    try:
        with state.at_work(output):
            (output / "logs" / "plan.txt").write_text("\n".join(answer["lines"]) + "\n")
            return Runner(answer, path).run()
    except state.InUse as error:  # by a run that began while this one was planned
        say(f"run_pipeline.sh: {error}")
        return 2


if __name__ == "__main__":
    terminal.run(main)
