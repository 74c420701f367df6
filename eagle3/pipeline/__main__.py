"""run_pipeline.sh in Python: plan, then start the runner and follow it, or one of --plan, --status, --stop.

python -m eagle3.pipeline OPTIONS      # as run_pipeline.sh, in the environment that it sets up
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from eagle3 import terminal
from eagle3.pipeline import detach, settings, state
from eagle3.pipeline.settings import Settings, Usage

HARD, SOFT = 2, 4  # exit codes of the briefing


def main() -> int:
    try:
        given = settings.parser().parse_args()
        asked = settings.settings_of(given)
        if asked.machine and not given.plan:
            raise Usage("--machine is for --plan")
        if given.probe is not None and given.probe < 2:
            raise Usage(f"--probe {given.probe}: expected at least 2 samples")
        if given.status:
            return detach.status(asked.output)
        if given.stop:
            return detach.stop(asked.output)
        if given.probe is not None:
            if code := run(probe(asked, given.probe), force=given.force, redo=True, detached=False):
                return code
            return brief(asked, "plan", force=True, redo=True)[0]
        if given.plan or given.print_config:
            action = "plan" if given.plan else "print-config"
            return brief(asked, action, force=True, redo=given.redo)[0]
        return run(asked, force=given.force, redo=given.redo, detached=given.detach)
    except (Usage, state.InUse) as error:
        print(f"run_pipeline.sh: {error}", file=sys.stderr)
        return HARD


def probe(asked: Settings, samples: int) -> Settings:
    """The same run with a few samples and one epoch, in OUT/probe: what it measures is the plan's."""
    copy = Settings(**json.loads(json.dumps(asked.plain())))
    copy.values |= {"OUTPUT_DIR": str(asked.output / "probe"), "MAX_SAMPLES": str(samples)}
    copy.arguments["04"] += ["--epochs", "1"]
    copy.first, copy.last, copy.named = "01", "04", ""
    return copy


def brief(asked: Settings, action: str, *, force: bool, redo: bool) -> tuple[int, dict[str, Any]]:
    """Plan and preflight in a process of their own, on this terminal; exit code, and the answer where it got so far."""
    with tempfile.TemporaryDirectory(prefix="eagle3-") as folder:
        answer = Path(folder) / "answer.json"
        told = {"settings": asked.plain(), "action": action, "force": force, "redo": redo}
        command = [sys.executable, "-m", "eagle3.pipeline.briefing", str(answer)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
            try:
                process.stdin.write(json.dumps(told))
                process.stdin.close()
                code = process.wait()
            except BaseException:
                process.terminate()
                raise
        return code, json.loads(answer.read_text()) if answer.exists() else {}


def run(asked: Settings, *, force: bool, redo: bool, detached: bool) -> int:
    """Plan, then run; with `detached` only the start of it. Returns the exit code."""
    detach.require_free(asked.output)
    code, answer = brief(asked, "run", force=force, redo=redo)
    if code == HARD and answer:
        print("run_pipeline.sh: refused, nothing was started; mend what is refused above", file=sys.stderr)
    if code == SOFT:
        print("run_pipeline.sh: in doubt, nothing was started; --force runs all the same", file=sys.stderr)
        return HARD
    if code:
        return code if code > 0 else 128 - code
    runner = detach.start(answer, Settings(**answer["settings"]).output)
    return detach.announce(runner) if detached else detach.follow(runner)


if __name__ == "__main__":
    terminal.run(main)
