"""What an output directory holds, against what is asked for now: finished, to be extended, or made otherwise."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3 import artifacts
from eagle3.pipeline import stages, state
from eagle3.pipeline.settings import FOLDERS, Settings
from eagle3.target import Target
from eagle3.terminal import UserError

MADE_AGAIN = ("03", "check")  # in seconds or minutes, and over the earlier one


@dataclass
class Review:
    finished: list[str] = field(default_factory=list)
    invalid: dict[str, list[str]] = field(default_factory=dict)  # what differs, by the stage whose work it invalidates
    notes: list[str] = field(default_factory=list)

    def folders(self, output: Path) -> list[Path]:
        """What must go before the invalid stages can be made again."""
        places = {stage: output / FOLDERS[stage] for stage in self.invalid if stage in FOLDERS}
        return [place for place in places.values() if place.exists()]


def review(settings: Settings, making: dict[str, dict[str, Any]]) -> Review:
    """`making`: the flags of each stage that make what it writes, as they are now."""
    found, recorded = Review(), state.read(settings.output).get("stages", {})
    for stage in settings.stages:
        entry = recorded.get(stage)
        if entry is None or (stage in FOLDERS and not (settings.output / FOLDERS[stage]).exists()):
            continue
        same = True
        for source in stages.upstream(stage):
            now = making[source]
            if source not in settings.stages:
                now = recorded.get(source, {}).get("made_of", {}).get(source, now)
            words, more = stages.differences(source, entry["made_of"].get(source, {}), now)
            if not words:
                continue
            same = False
            named = [f"{word} (stage {source})" for word in words]
            if more and (stage in ("01", "02") or source == stage):
                found.notes.append(f"stage {stage} goes on from what is there: {', '.join(named)}")
            elif stage in MADE_AGAIN:
                found.notes.append(f"stage {stage} is made again: {', '.join(named)}")
            else:
                found.invalid.setdefault(stage, []).extend(named)
        if same and entry.get("state") == "finished" and stage != settings.named and _is_there(settings, stage, entry):
            found.finished.append(stage)
    return found


def _is_there(settings: Settings, stage: str, entry: dict[str, Any]) -> bool:
    """Whether manifests, and the samples' files, are as when the stage finished."""
    if entry.get("manifests") != stages.manifests(settings.output, stage):
        return False
    if stage not in ("01", "02"):
        return True
    folder = settings.output / FOLDERS[stage]
    records = artifacts.Index(folder).samples().values()
    return all(artifacts.is_whole(folder, record) for record in records if record["status"] == "done")


def require_unmixed(settings: Settings, target: Target) -> None:
    """Refuse an output directory with work of another target, or of a smoke run for another run and the other way."""
    output, found = settings.output, state.read(settings.output)
    if "smoke" in found and found["smoke"] != settings.smoke:
        kinds = ("a smoke run", "another run than a smoke run")
        held, asked = kinds if found["smoke"] else kinds[::-1]
        raise UserError(f"{output} holds {held}, this is {asked}; give another --output-dir, they never mix")
    for stage, folder in FOLDERS.items():
        try:
            manifest = artifacts.read_manifest(output / folder, stage, missing_ok=True)
        except UserError:  # the stage says what is wrong with it
            continue
        made_for = manifest and manifest["fingerprint"].get("target")
        if made_for and made_for != target.config_hash:
            raise UserError(
                f"{output / folder} was made for another target (config {made_for}, {target.name} has "
                f"{target.config_hash}); give another --output-dir, or the --model-path that it was made with"
            )


def require_valid(settings: Settings, found: Review, redo: bool) -> None:
    """Refuse to touch finished work that a changed value invalidates, unless --redo says to. Names every value."""
    if not found.invalid or redo:
        return
    named = "; ".join(f"stage {stage}: {', '.join(dict.fromkeys(words))}" for stage, words in found.invalid.items())
    places = ", ".join(map(str, found.folders(settings.output))) or "nothing"
    raise UserError(
        f"{settings.output} was made with other values: {named}. Nothing was touched; give the old values, another "
        f"--output-dir, or --redo, which deletes {places} and makes these stages again"
    )
