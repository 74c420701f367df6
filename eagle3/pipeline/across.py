"""A stage on several nodes, to the runner as one process: their output with the node's name before each line.

    python -m eagle3.pipeline.across STAGE ANSWER      # as the runner starts it

Stage 02 is divided into a shard a node and merged; stage 04 is one training, a torch.distributed.run on each node. The
first node that fails ends the others, which save what they have, as a signal to this process does.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from eagle3.pipeline import nodes, stages
from eagle3.pipeline.settings import FOLDERS, ROOT, Settings

MORE_TO_DO = 3  # exit code of stage 02 when a disk budget is reached
PERIOD = 0.1  # s between two looks at the nodes


class Across:
    """One stage on all nodes."""

    def __init__(self, stage: str, settings: Settings) -> None:
        self.stage, self.settings = stage, settings
        self.processes: dict[str, subprocess.Popen] = {}
        self.caught = 0  # the signal that is to end the stage

    def run(self) -> int:
        """The exit code of the first node that failed, else 3 where one has more to do, else 0."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        first = self.settings.nodes[0]
        here = {"first": first, "places": [], "marker": str(ROOT)}
        port = nodes.ask(self.settings, first, {"look": here})["port"]
        readers = []
        for host, told in zip(self.settings.nodes, nodes.told(self.stage, self.settings, port), strict=True):
            if self.caught:
                break
            process = nodes.start(self.settings, host, told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            self.processes[host] = process
            readers.append(threading.Thread(target=show, args=(host, process), daemon=True))
            readers[-1].start()
        if self.caught:  # while they were started
            self._tell(self.caught)
        code = self._wait()
        for reader in readers:
            reader.join(3)
        if self.caught:
            return 128 + self.caught
        return code or (merge(self.settings) if self.stage == "02" else 0)

    def _wait(self) -> int:
        failed = 0
        while True:
            codes = [process.poll() for process in self.processes.values()]
            bad = [(host, code) for host, code in zip(self.processes, codes, strict=True) if code not in (None, 0, 3)]
            if bad and not failed:
                host, failed = bad[0]
                failed = failed if failed > 0 else 128 - failed
                if None in codes and not self.caught:
                    print(f"node {host} ended with exit code {failed}, the others are told to stop", flush=True)
                    self._tell(signal.SIGTERM)
            if None not in codes:
                return failed or (MORE_TO_DO if MORE_TO_DO in codes else 0)
            time.sleep(PERIOD)

    def _stop(self, number: int, frame: object) -> None:
        self.caught = number
        self._tell(number)

    def _tell(self, number: int) -> None:
        for process in self.processes.values():
            with contextlib.suppress(OSError):  # it has ended
                os.write(process.stdin.fileno(), b"%d\n" % number)


def show(host: str, process: subprocess.Popen) -> None:
    for line in process.stdout:
        print(f"{host}: {line.rstrip()}", flush=True)


def merge(settings: Settings) -> int:
    script, folder = str(ROOT / stages.SCRIPTS["02"]), str(settings.output / FOLDERS["02"])
    return subprocess.run([sys.executable, script, "--merge", "--output-dir", folder]).returncode


def main() -> int:
    stage, answer = sys.argv[1:]
    return Across(stage, Settings(**json.loads(Path(answer).read_text())["settings"])).run()


if __name__ == "__main__":
    from eagle3 import terminal

    terminal.run(main)
