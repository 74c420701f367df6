"""Stage 02 with a byte budget: it stops before the samples take more, and goes on when there is room."""

import json
from pathlib import Path

import pytest
from capture_for_tests import random_prompts, settings_for, write_prepared

from eagle3 import artifacts
from eagle3.artifacts import Index
from eagle3.capture import engines, extract
from eagle3.capture.interface import EngineSettings, Fault
from eagle3.capture.run import Limits
from eagle3.capture.transformers_engine import TransformersEngine
from eagle3.terminal import UserError

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [40, 30, 120, 64, 5, 33, 90, 12, 20, 18]


@pytest.fixture
def prepared(tiny_target: Path, tmp_path: Path) -> Path:
    return write_prepared(tmp_path / "prepared", tiny_target, random_prompts(LENGTHS))


@pytest.fixture
def settings(tiny_target: Path, tmp_path: Path) -> EngineSettings:
    return settings_for(tiny_target, tmp_path / "out")


def sizes(settings: EngineSettings) -> list[int]:
    """What each sample's file is expected to take."""
    return [settings.layout.sample_bytes(length, length - length // 2) for length in LENGTHS]


def written(settings: EngineSettings) -> dict[int, int]:
    """Bytes of each sample's file."""
    return {int(path.stem): path.stat().st_size for path in settings.output_dir.glob("samples/*/*.pt")}


def within(prepared: Path, settings: EngineSettings, disk_bytes: int | None) -> bool:
    return extract.extract(prepared, "transformers", settings, Limits(disk_bytes=disk_bytes))


def consume(settings: EngineSettings, *samples: int) -> None:
    """What a later stage does with samples that it needs no more."""
    records = Index(settings.output_dir).samples()
    with Index(settings.output_dir).appending() as index:
        for sample in samples:
            index.add(**records[sample] | {"status": "consumed"})
            artifacts.sample_path(settings.output_dir, sample).unlink()


def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "open_engine", lambda *_: pytest.fail("the engine was loaded"))


def test_no_budget_is_ever_exceeded_and_each_is_used(prepared: Path, settings: EngineSettings, monkeypatch) -> None:
    class Watching(TransformersEngine):
        def capture(self, samples):
            for one in super().capture(samples):
                assert sum(written(settings).values()) <= budget
                yield one

    monkeypatch.setattr(engines, "open_engine", lambda name, settings, longest: Watching(settings))
    before: dict[int, int] = {}
    expected = sizes(settings)
    for budget in (sum(expected[:3]), sum(expected[:3]) + expected[3] - 1, sum(expected[:6]) + 100, sum(expected)):
        finished = within(prepared, settings, budget)
        now = written(settings)
        assert sum(now.values()) <= budget and before.items() <= now.items()
        assert list(Index(settings.output_dir).samples()) == sorted(now) == list(range(len(now)))
        manifest = artifacts.read_manifest(settings.output_dir, "02")
        assert manifest["complete"] is finished is (len(now) == len(LENGTHS))
        assert manifest["samples"] == len(now) and manifest["bytes"] == sum(now.values())
        # the next one would not have fitted: the estimate of a file is high by less than FILE_OVERHEAD
        assert finished or sum(now.values()) + expected[len(now)] > budget
        before = now
    assert len(before) == len(LENGTHS)


def test_script_says_what_is_left_and_exits_with_3(run_script, prepared, settings, tiny_target) -> None:
    arguments = ["--model-path", tiny_target, "--prepared-dir", prepared, "--output-dir", settings.output_dir]
    arguments += ["--engine", "transformers", "--dtype", "float32", "--max-disk-gb", sum(sizes(settings)[:4]) / 1e9]
    result = run_script("02_extract_hidden_states.py", *arguments, check=False, environment={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 3, result.stderr
    left = len(LENGTHS) - len(written(settings))
    assert f"{left} samples: --max-disk-gb is reached; make room, then the same command continues" in result.stdout
    assert f"{len(LENGTHS) - left} of 10, {len(LENGTHS) - left} in this run" in result.stdout and left in (5, 6)


def test_consumed_samples_make_room_and_are_not_captured_again(prepared, settings, monkeypatch, capsys) -> None:
    budget = max(sizes(settings))
    assert not within(prepared, settings, budget)
    first = sorted(written(settings))
    consume(settings, *first)
    assert written(settings) == {}
    rounds = 0
    while not within(prepared, settings, budget):
        now = written(settings)
        assert now and not now.keys() & set(first) and sum(now.values()) <= budget
        assert artifacts.read_manifest(settings.output_dir, "02")["consumed"] == len(first)
        consume(settings, *now)
        first += now
        rounds += 1
    assert rounds >= 2 and sorted([*first, *written(settings)]) == list(range(len(LENGTHS)))
    assert f"{len(first)} by a later stage" in capsys.readouterr().out
    manifest = artifacts.read_manifest(settings.output_dir, "02")
    assert manifest["complete"] and manifest["samples"] == len(written(settings))
    no_engine(monkeypatch)
    assert within(prepared, settings, budget)  # nothing to do
    consume(settings, *written(settings))
    assert within(prepared, settings, None) and written(settings) == {}


def test_a_full_budget_loads_no_engine(prepared: Path, settings: EngineSettings, monkeypatch, capsys) -> None:
    budget = sum(sizes(settings)[:3])
    assert not within(prepared, settings, budget)
    before, report = written(settings), artifacts.read_manifest(settings.output_dir, "02")["canary"]
    no_engine(monkeypatch)
    capsys.readouterr()
    assert not within(prepared, settings, budget)
    output = capsys.readouterr().out
    assert f"{len(before)} of 10, 0 in this run" in output and f"{10 - len(before)} samples: --max-disk-gb is" in output
    manifest = artifacts.read_manifest(settings.output_dir, "02")
    assert written(settings) == before and not manifest["complete"] and manifest["canary"] == report


def test_a_budget_too_small_for_a_sample_is_refused(prepared: Path, settings: EngineSettings, monkeypatch) -> None:
    """Else the same command would stop at that sample for ever."""
    no_engine(monkeypatch)
    with pytest.raises(UserError, match=r"--max-disk-gb 0\.0001: sample 2 alone needs 0\.11 MB; give more"):
        within(prepared, settings, 100_000)


def test_files_that_are_redone_do_not_count_twice(prepared: Path, settings: EngineSettings) -> None:
    """Damaged ones, and those of a killed run that did not get to write its index."""
    assert within(prepared, settings, None)
    budget = sum(written(settings).values())
    path = artifacts.sample_path(settings.output_dir, 2)
    path.write_bytes(path.read_bytes()[:-1])
    index = Index(settings.output_dir).path
    index.write_bytes(b"".join(line for line in index.open("rb") if json.loads(line)["index"] != 6))
    assert not within(prepared, settings, budget)  # 2 is done again; the estimate for 6 does not fit any more
    assert sorted(written(settings)) == list(range(10)) and sum(written(settings).values()) <= budget
    assert within(prepared, settings, budget + 3000)
    assert sum(written(settings).values()) == budget


def test_a_sample_that_failed_leaves_no_file_and_no_trouble(prepared, settings, monkeypatch) -> None:
    """A damaged file whose second capture fails is gone: nothing may take it for a sample."""

    class Failing(TransformersEngine):
        def capture(self, samples):
            for sample in samples:
                if sample.index == 4:
                    yield sample, Fault("engine gave no states", "lost")
                else:
                    yield from super().capture([sample])

    assert within(prepared, settings, None)
    path = artifacts.sample_path(settings.output_dir, 4)
    path.write_bytes(path.read_bytes()[:-1])
    with monkeypatch.context() as patch:
        patch.setattr(engines, "open_engine", lambda name, settings, longest: Failing(settings))
        with pytest.raises(UserError, match=r"1 of 1 samples failed"):
            within(prepared, settings, None)
    assert not path.exists() and Index(settings.output_dir).samples()[4]["status"] == "failed"
    assert within(prepared, settings, 10**7) and path.exists()
