"""A stage's output on its way to terminal and log: passed on as it comes, logged by line, each with the time.

    stage 2>&1 | python eagle3/pipeline/stamp.py LOG

A process of its own, as tee would be: the stage must be able to write to its last word, whoever is killed meanwhile. Of
a progress bar, whose states end in a carriage return, the log gets one every half minute and the last.
"""

import contextlib
import os
import signal
import sys
import time

PERIOD = 30.0  # s between two states of a progress bar in the log


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the stage does
    shown, last = True, 0.0
    rest = b""
    with open(sys.argv[1], "ab", buffering=0) as log:
        while chunk := os.read(0, 1 << 16):
            if shown:
                try:
                    os.write(1, chunk)
                except OSError:
                    shown = False
            *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").splitlines(keepends=True) or [b""]
            if rest.endswith((b"\n", b"\r")):
                lines, rest = [*lines, rest], b""
            for line in lines:
                if line.endswith(b"\r"):
                    if time.monotonic() - last < PERIOD:
                        continue
                    last = time.monotonic()
                if text := line.strip(b"\r\n"):
                    with contextlib.suppress(OSError):  # a full disk: the stage itself will say so
                        log.write(time.strftime("%Y-%m-%d %H:%M:%S ").encode() + text + b"\n")
        if text := rest.strip():
            log.write(time.strftime("%Y-%m-%d %H:%M:%S ").encode() + text + b"\n")


if __name__ == "__main__":
    main()
