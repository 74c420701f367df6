"""What the person at the terminal sees: one-line errors, quiet libraries, progress bars, closing summaries."""

import contextlib
import ctypes
import errno
import math
import os
import re
import signal
import stat
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

REMEDIES = {  # of the operating system's errors
    errno.ENOSPC: "free space there, or give another folder",
    errno.EDQUOT: "free space within your quota, or give another folder",
    errno.EROFS: "give a folder that can be written, or mount it writable",
    errno.EACCES: "give a folder of your own, or change its permissions",
    errno.EPERM: "give a folder of your own, or change its permissions",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path: a part of it is a file",
    errno.EISDIR: "check the path: a file is expected there",
    errno.EIO: "the disk or the network share failed: look at dmesg, mend it",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


class UserError(Exception):
    """A fault the user can mend. Its text is one line: what is wrong, with the values, and what to do."""


def quiet_libraries() -> None:
    """Keep library chatter off the terminal. Call before importing torch, transformers, datasets, deepspeed or vllm.

    Only defaults are set: whoever exports one of these variables keeps the value.
    """
    if "PYTHONWARNINGS" not in os.environ:  # which the interpreter reads at its start: for children
        warnings.simplefilter("ignore")
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_VERBOSITY": "error",  # else every retry of an unreachable hub is a line
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",  # warns after a fork otherwise
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONWARNINGS": "ignore",
    }.items():
        os.environ.setdefault(name, value)


PATIENCE = 3  # s after a signal in which the same news from a launcher or shell is no second wish
SIGNALS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "stopped because the terminal closed (SIGHUP; start it under nohup or tmux to go on without)",
}

_terminal_closed = False


class Stopped(BaseException):
    """A signal as an exception, so that `finally` blocks run. No KeyboardInterrupt: vLLM swallows that at its start."""


def run(main: Callable[[], int | None]) -> None:
    """Run a script's main and exit: 0, 1 after a user error, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.

    Anything else keeps its traceback, for it is a defect of the program.
    """
    stopper = _Stopper()
    try:
        on_signals(stopper)
        code = main() or 0
    except (Exception, Stopped) as error:
        # after a signal any error is its consequence: a library's start-up may make one of its own from it
        code = _stopped(stopper.number) if stopper.number else _failed(error)
    sys.exit(code)


def _stopped(number: int) -> int:
    return _fail(f"{SIGNALS[number]}: nothing finished is lost; the same command continues", 128 + number)


def _failed(error: BaseException) -> int:
    if isinstance(error, UserError):
        return _fail(f"error: {error}", 1)
    if not isinstance(error, OSError) or error.errno is None:
        raise error
    if os.environ.get("EAGLE3_DEBUG"):
        traceback.print_exc()
    where = f" ({error.filename})" if error.filename else ""
    remedy = REMEDIES.get(error.errno, "mend that")
    return _fail(f"error: {error.strerror}{where}; {remedy}, then run the same command", 1)


def on_signals(handler: Callable[[int, object], None]) -> None:
    """Send SIGINT, SIGTERM and SIGHUP to `handler`; a SIGHUP that nohup has switched off stays so."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


class _Stopper:
    """Raises at the first signal; one soon after it must not break the clean-up."""

    def __init__(self) -> None:
        self.number: int | None = None  # of the last signal
        self._since = -math.inf

    def __call__(self, number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        if time.monotonic() - self._since > PATIENCE:
            self.number, self._since = number, time.monotonic()
            raise Stopped


def end_with_parent() -> None:
    """Have this process terminated, as by SIGTERM, when its parent ends, or now when that has ended already. Linux."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() == 1 != os.getpgrp():  # handed to init; a container's launcher may be process 1, in group 1
        os.kill(os.getpid(), signal.SIGTERM)


def leave_terminal() -> None:
    """Send to nowhere what would go to a terminal that has closed: writing to it is an error."""
    global _terminal_closed
    _terminal_closed = True
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def _fail(line: str, code: int) -> int:
    print(f"\n{line}" if code > 1 else line, file=sys.stderr, flush=True)
    return code


def short(error: BaseException) -> str:
    """Type and first line of another library's error, for use inside a one-line message."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else ''}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU (torch.OutOfMemoryError) or the host (torch: a plain RuntimeError) had no memory left."""
    said = ("out of memory", "can't allocate memory", "Cannot allocate memory")
    return isinstance(error, MemoryError) or any(words in str(error) for words in said)


def progress(total: int | None, unit: str, description: str, done: int = 0) -> tqdm:
    """A bar with a rate and, where `total` is known, an ETA; `done` items of an earlier run count for neither."""
    return tqdm(
        total=total, initial=done, unit=unit, desc=description, dynamic_ncols=True, smoothing=0.1, mininterval=0.5
    )


def say(text: str) -> None:
    """A line on standard output that does not tear a progress bar."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


def warn(text: str) -> None:
    """A warning line on standard error."""
    tqdm.write(f"warning: {text}", file=sys.stderr)


def summary(title: str, rows: dict[str, object], started: float) -> None:
    """The closing summary of a stage: one aligned line a row, then the seconds since `started` (time.monotonic)."""
    width = max(map(len, [*rows, "took"]))
    lines = [f"{title}", *(f"  {key:<{width}}  {value}" for key, value in rows.items())]
    say("\n".join([*lines, f"  {'took':<{width}}  {time.monotonic() - started:.1f} s"]))


@contextlib.contextmanager
def output_to(log: Path, what: str) -> Iterator[None]:
    """Send this process's and its new children's output to `log` (appended) while the block runs.

    For libraries that print from C or from worker processes: a child started inside keeps writing to the log after
    the block. An exception inside becomes a UserError with the cause that the log shows; a UserError stays itself.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with open(log, "ab", buffering=0) as sink:
        start = sink.tell()
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            traceback.print_exc()  # into the log
            raise UserError(f"{what} failed: {cause_in(log, start) or short(error)}; all of it is in {log}") from error
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for old, descriptor in zip(saved, (1, 2), strict=True):
                os.dup2(old, descriptor)
                os.close(old)
            if _terminal_closed:
                leave_terminal()


def cause_in(log: Path, start: int) -> str:
    """The first error that a traceback in `log` names after byte `start`, for later ones only pass it on."""
    with open(log, "rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    found = re.search(r"^(?:.*\] |\(.*?\) )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", text, re.MULTILINE)
    return found[1].strip()[:300].rstrip(".") if found else ""
