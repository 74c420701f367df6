"""The orchestrator's plan in this process, and its command for others."""

from pathlib import Path

from conftest import REPOSITORY

from eagle3.capture.interface import EngineSettings
from eagle3.pipeline import briefing, plan, settings, verdict
from eagle3.pipeline.plan import Job, Plan
from eagle3.pipeline.settings import Settings

COMMAND = REPOSITORY / "run_pipeline.sh"


def settings_for(*arguments: object) -> Settings:
    """What the command line gives."""
    return settings.settings_of(settings.parser().parse_args(list(map(str, arguments))))


def job_for(*arguments: object) -> tuple[Job, EngineSettings]:
    return briefing.open_job(settings_for(*arguments), redo=False)[:2]


def plan_for(*arguments: object) -> tuple[Job, Plan]:
    """A plan with what the limits say of it."""
    job, _ = job_for(*arguments)
    made = plan.make_plan(job)
    verdict.judge(job, made)
    return job, made


def write_config(place: Path, text: str) -> Path:
    place.write_text(text)
    return place
