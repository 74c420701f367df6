"""A process in a mount namespace of its own, in which tests mount small and read-only file systems without privileges.

The numbered scripts run there in forks of one process that has imported the libraries already: a full disk needs eight
runs, and eight interpreters with torch, transformers and DeepSpeed would take a minute. Everything else is the script's
own: its arguments, its `terminal.run`, its exit code.
"""

import json
import os
import runpy
import shlex
import subprocess
import sys
import traceback
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


class Namespace:
    """Raises OSError with the kernel's words where it does not allow such a namespace."""

    def __init__(self) -> None:
        command = ["unshare", "--user", "--map-root-user", "--mount"]
        probe = subprocess.run([*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
        if probe.returncode:
            raise OSError(probe.stderr.strip())
        self._process = subprocess.Popen(
            [*command, sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPOSITORY)},
        )

    def shell(self, command: str) -> str:
        """Output of a shell command, which must succeed."""
        code, output = self._ask(["sh", "-ec", command])
        assert code == 0, f"{command}: {output}"
        return output.strip()

    def stage(self, script: str, *arguments: object) -> tuple[int, str]:
        """Exit code and output, both streams, of a numbered script."""
        return self._ask([script, *map(str, arguments)])

    def tmpfs(self, place: Path, options: str) -> None:
        """Mount a small file system, or give the one there other limits."""
        place.mkdir(exist_ok=True)
        where = shlex.quote(str(place))
        self.shell(f"mount -o remount,{options} {where} 2>/dev/null || mount -t tmpfs -o {options} tmpfs {where}")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _ask(self, command: list[str]) -> tuple[int, str]:
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return tuple(json.loads(self._process.stdout.readline()))


def _serve() -> None:
    """Run the commands that come in as lines of JSON; [exit code, output] goes out for each."""
    from eagle3 import terminal

    terminal.quiet_libraries()
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    for line in sys.stdin:
        command = json.loads(line)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(write, 1)
            os.dup2(write, 2)
            _run(command)
        os.close(write)
        with open(read, errors="replace") as pipe:
            output = pipe.read()
        _, status = os.waitpid(child, 0)
        answers.write(json.dumps([os.waitstatus_to_exitcode(status), output]) + "\n")


def _run(command: list[str]) -> None:
    if not command[0].endswith(".py"):
        os.execvp(command[0], command)
    sys.argv = command
    code = 1
    try:
        runpy.run_path(str(REPOSITORY / command[0]), run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
