"""Errors as one line, library output in a log, signals as exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

from eagle3.terminal import UserError, output_to


def run_main(body: str) -> subprocess.CompletedProcess:
    """A program whose main is `body`, run by terminal.run."""
    program = f"import os, signal, time\nfrom eagle3 import terminal\ndef main():\n    {body}\nterminal.run(main)\n"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("raise terminal.UserError('no such thing: 3; give 4')", 1, "error: no such thing: 3; give 4"),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", 130, "interrupted: nothing finished is lost"),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)", 143, "terminated: nothing finished is lost"),
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
