"""Errors as one line, library output in a log, signals as exit codes."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPOSITORY
from interruptions_for_tests import heed_signals

from eagle3.terminal import UserError, output_to


def run_main(body: str, before: Callable[[], None] = heed_signals) -> subprocess.CompletedProcess:
    """A program whose main is `body`, run by terminal.run; `before` is called in the new process first."""
    program = f"import os, signal, time\nfrom eagle3 import terminal\ndef main():\n    {body}\nterminal.run(main)\n"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, preexec_fn=before)


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("raise terminal.UserError('no such thing: 3; give 4')", 1, "error: no such thing: 3; give 4"),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", 130, "interrupted: nothing finished is lost"),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)", 143, "terminated: nothing finished is lost"),
        ("os.kill(os.getpid(), signal.SIGHUP); time.sleep(5)", 129, "stopped because the terminal closed"),
        # a library's start-up in C makes an error of its own from the exception
        (
            "\n    try: signal.raise_signal(signal.SIGTERM)\n    except BaseException: raise RuntimeError from None",
            143,
            "terminated: nothing finished is lost",
        ),
        ("open('/nonexistent/file')", 1, "error: No such file or directory (/nonexistent/file)"),
        ("return 0", 0, ""),
    ],
)
def test_exit_codes_and_single_lines(body: str, code: int, line: str) -> None:
    result = run_main(body)
    assert result.returncode == code and line in result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr.strip().splitlines()) == (1 if line else 0)


def test_a_defect_keeps_its_traceback() -> None:
    result = run_main("return 1 / 0")
    assert result.returncode == 1 and "ZeroDivisionError" in result.stderr and "Traceback" in result.stderr


def test_a_signal_passed_on_twice_does_not_break_the_clean_up() -> None:
    body = "\n    ".join(
        [
            "try:",
            "    os.kill(os.getpid(), signal.SIGINT); time.sleep(5)",
            "finally:",
            "    os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGTERM); print('cleaned')",
        ]
    )
    result = run_main(body)
    assert result.returncode == 130 and result.stdout == "cleaned\n" and "Traceback" not in result.stderr


def test_nohup_keeps_a_stage_going() -> None:
    result = run_main(
        "os.kill(os.getpid(), signal.SIGHUP); print('goes on')", lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    assert result.returncode == 0 and result.stdout == "goes on\n"


def test_a_terminal_that_closes_ends_the_stage_cleanly(tmp_path: Path) -> None:
    """The kernel sends SIGHUP when the line drops, and every later write to the terminal is an error."""
    program = f"""
import time
from pathlib import Path
from eagle3 import terminal
def main():
    try:
        with terminal.output_to(Path("{tmp_path}/log"), "the work"):
            Path("{tmp_path}/ready").touch()
            time.sleep(30)
    finally:
        print("to a terminal that is gone", flush=True)
        Path("{tmp_path}/cleaned").touch()
terminal.run(main)
"""

    def take_terminal() -> None:
        heed_signals()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    ours, theirs = pty.openpty()
    command, ends = [sys.executable, "-c", program], dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True, preexec_fn=take_terminal, **ends)
    os.close(theirs)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.close(ours)
    assert process.wait(20) == 129 and (tmp_path / "cleaned").exists()


def test_output_of_this_process_and_its_children_goes_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    with output_to(tmp_path / "log", "the work"):
        os.write(1, b"from here\n")  # pytest has its own sys.stdout
        os.system("echo from a child; echo and its errors >&2")
    os.write(1, b"after\n")
    assert {"from here", "from a child", "and its errors"} <= set((tmp_path / "log").read_text().splitlines())
    assert capfd.readouterr().out == "after\n"


def test_a_failure_names_the_cause_that_a_worker_logged_first(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    log = tmp_path / "log"
    log.write_text("ValueError: of an earlier run\n")
    with pytest.raises(UserError) as caught, output_to(log, "starting the engine"):
        os.write(2, b"(Worker pid=7) ERROR 11-29 10:00:00 [executor.py:1] ValueError: no block size fits 16\n")
        raise RuntimeError("Engine core initialization failed. See root cause above.")
    assert str(caught.value) == f"starting the engine failed: ValueError: no block size fits 16; all of it is in {log}"
    assert "no block size" not in "".join(capfd.readouterr())
    with pytest.raises(UserError, match="mine"), output_to(log, "the work"):
        raise UserError("mine")
