"""A node's side of a stage that runs on several: it is told one line of JSON on stdin, and does that.

    python -m eagle3.pipeline.node      # as nodes.start runs it through ssh

Told to look, it answers with one line of JSON. Told a command, it runs it, passes on its output, which goes to a log of
this node too, and ends with its exit code. Each further line on stdin is a signal for the command. When stdin ends the
other side has gone, and the command is told to stop. Standard library alone.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from eagle3.pipeline.runner import Memory, end_with, raise_open_files


def main() -> int:
    told = json.loads(sys.stdin.readline())
    if "look" in told:
        print(json.dumps(look(told["look"])), flush=True)
        return 0
    code = run(told)
    sys.stdout.flush()
    os._exit(code)  # a thread waits on stdin still


def look(asked: dict[str, Any]) -> dict[str, Any]:
    """What is seen from here. gpus: None where nvidia-smi does not say. port: free now."""
    try:
        socket.getaddrinfo(asked["first"], None)
        unknown = ""
    except (OSError, UnicodeError):
        unknown = asked["first"]
    try:
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
        gpus = len(listed)
    except (OSError, subprocess.SubprocessError):
        gpus = None
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    missing = [place for place in asked["places"] if not Path(place).exists()]
    marker = Path(asked["marker"]).exists()
    return {"marker": marker, "missing": missing, "unknown": unknown, "gpus": gpus, "port": port}


def run(told: dict[str, Any]) -> int:
    """The exit code, as a shell has it."""
    raise_open_files()
    path = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}"  # ninja lies beside the interpreter
    # what outlives the connection writes to its log still
    stamp = [sys.executable, "-S", "-E", str(Path(__file__).with_name("stamp.py")), told["log"]]
    writer = subprocess.Popen(stamp, stdin=subprocess.PIPE, start_new_session=True)
    child = subprocess.Popen(
        told["command"],
        stdin=subprocess.DEVNULL,
        stdout=writer.stdin,
        stderr=writer.stdin,
        env=os.environ | {"PATH": path} | told["environment"],
        cwd=told["directory"],
        start_new_session=True,
        preexec_fn=end_with(os.getpid()),
    )
    writer.stdin.close()
    threading.Thread(target=heed, args=(child,), daemon=True).start()
    memory = Memory(child.pid)
    code = child.wait()
    Path(told["memory"]).write_text(str(memory.stop()))
    with contextlib.suppress(subprocess.TimeoutExpired):  # something that the command started has its output still
        writer.wait(3)
    return code if code >= 0 else 128 - code


def heed(child: subprocess.Popen) -> None:
    while line := sys.stdin.readline():
        child.send_signal(int(line))
    child.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
