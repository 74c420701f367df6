"""Settings and where they come from; the plan against what stages write; limits and the largest run that fits."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from pipeline_for_tests import plan_for, settings_for, write_config
from states_for_tests import write_states

from eagle3.draft.config import derive
from eagle3.pipeline import briefing, plan, stages, verdict
from eagle3.pipeline.closing import folder_bytes
from eagle3.pipeline.settings import PLAIN, STAGES, Usage
from eagle3.target import open_target
from eagle3.terminal import UserError

TARGETS = REPOSITORY / "configs" / "targets"
BOX = "gpus=8x96,memory=1500,disk=900"
KIMI = ["--config", REPOSITORY / "configs/pipelines/kimi_k25_8gpu.env", "--model-path", TARGETS / "kimi_k25"]
KIMI += ["--trust-remote-code", "--output-dir", "OUT", "--machine"]


# ------------------------------------------------------------------------------------------------ settings


def test_the_command_line_wins_over_the_config_over_the_default(tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "a b.env",
        'MODEL_PATH=from/config\nMAX_SAMPLES=$((2 * 5))\nPREPARE_ARGS=(--max-seq-len 512 --columns "prompt=a b")\n'
        'PREPARE_ARGS+=(--shuffle 3)\nVOCAB_ARGS=()\nexport SOME_CACHE="$root/x y"\n',
    )
    found = settings_for("--config", config, "--model-path", "mine", "--args", "01", "--max-seq-len 256")
    assert (found.values["MODEL_PATH"], found.origins["MODEL_PATH"]) == ("mine", "command line")
    assert (found.values["MAX_SAMPLES"], found.origins["MAX_SAMPLES"]) == ("10", "config")
    assert (found.values["DATASET"], found.origins["DATASET"]) == (PLAIN["DATASET"], "default")
    assert found.environment == {"SOME_CACHE": f"{REPOSITORY}/x y"}
    found.values["GPUS"] = "1"
    flags = stages.flags_of("01", found)
    assert (flags.max_seq_len, flags.columns, flags.shuffle, flags.overflow) == (256, "prompt=a b", 3, "truncate")
    origins = {name: origin for name, (_, origin) in stages.origins("01", found, flags).items()}
    named = ("max_seq_len", "shuffle", "overflow", "dataset")
    assert [origins[name] for name in named] == ["command line", "config", "default", "run_pipeline.sh"]


def test_print_config_says_every_value_and_its_origin(tmp_path: Path, capsys) -> None:
    config = write_config(tmp_path / "run.env", "TRAIN_ARGS=(--epochs 7)\n")
    briefing.print_config(settings_for("--config", config, "--model-path", "M", "--max-samples", 5))
    lines = capsys.readouterr().out.splitlines()
    assert any(re.fullmatch(r"GPUS +all that are visible  \[default\]", line) for line in lines)
    assert any(re.fullmatch(r"04 --epochs +7  \[config\]", line) for line in lines)
    assert any(re.fullmatch(r"04 --ttt-steps +5  \[default\]", line) for line in lines)
    assert any(re.fullmatch(r"MAX_SAMPLES +5  \[command line\]", line) for line in lines)
    names = {line.partition(" ")[0] for line in lines}
    assert set(PLAIN) <= names and set(STAGES) <= names


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("EPOCHS=3\n", "sets EPOCHS, which is no setting; known: MODEL_PATH"),
        ("MAX_SAMPLES=many\n", r"max-samples many (config): expected a number from 1"),
        ("if\n", "syntax error"),
        ("echo $nothing_set\n", "nothing_set: unbound variable"),
    ],
)
def test_faults_of_a_config_are_one_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(Usage) as refused:
        settings_for("--config", write_config(tmp_path / "run.env", text), "--model-path", "M")
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_a_flag_that_a_stage_does_not_take_is_found_before_anything_runs(tmp_path: Path) -> None:
    found = settings_for(
        "--config", write_config(tmp_path / "run.env", "TRAIN_ARGS=(--epoch-count 3)"), "--model-path", "M"
    )
    found.values["GPUS"] = "1"
    with pytest.raises(
        Usage, match=r"TRAIN_ARGS \(config\): unrecognized arguments: --epoch-count 3; 04_train_draft.py"
    ):
        stages.flags_of("04", found)


def test_every_option_is_in_the_help() -> None:
    from eagle3.pipeline.settings import parser

    shown = subprocess.run(
        [REPOSITORY / "run_pipeline.sh", "--help"], capture_output=True, text=True, check=True
    ).stdout
    options = [option for action in parser()._actions for option in action.option_strings]
    assert len(options) > 20 and [option for option in options if option not in shown] == []


# ------------------------------------------------------------------------------------- the plan's own figures


def test_kimi_on_eight_gpus_fits_as_its_config_says() -> None:
    job, made = plan_for(*KIMI, BOX)
    assert not made.findings and made.weights_a_gpu == 554_300_000_000 // 8
    assert 31e9 < job.size.active < 34e9, "the published 32 B that a token goes through"
    assert job.size.cache == (512 + 64) * 61 * 2
    states = job.layout.sample_bytes(1000, 1000) - 3000
    assert states == 1000 * 57_349
    assert made.stages["02"].disk == pytest.approx(12.8e6 * (3 + 0.6) * 14_336, rel=2e-3)
    draft = 1.059e9  # trained weights
    assert made.stages["04"].peak - made.stages["04"].disk == pytest.approx((14 + 2) * draft - 4.47e9, rel=0.01)
    said = "\n".join(verdict.described(job, made))
    both = made.weights_a_gpu + made.stages["04"].gpu
    assert f"{both / 1e9:,.1f} GB with the target's weights resident (96.0 GB there)" in said


def test_the_size_of_published_models_from_their_shape_alone() -> None:
    from eagle3.pipeline import sizes

    for name, billions in (("llama3_8b", 8.03), ("llama3_70b", 70.55), ("kimi_k25", 1026)):
        assert sizes.parameters(open_target(str(TARGETS / name))) == pytest.approx(billions * 1e9, rel=5e-3)


def test_too_small_a_disk_names_the_largest_run_that_fits() -> None:
    small = BOX.replace("disk=900", "disk=300")
    _, made = plan_for(*KIMI, small)
    (finding,) = made.findings
    assert finding.level == "soft", "lengths are assumed"
    fits, with_fp8 = map(int, re.findall(r"--max-samples (\d+)", finding.text))
    assert 4000 < fits < with_fp8
    assert not plan_for(*KIMI, small, "--max-samples", fits)[1].findings
    assert plan_for(*KIMI, small, "--max-samples", round(fits * 1.01))[1].findings
    fp8 = ["--args", "02", "--store-dtype fp8 --store-final-dtype fp8"]
    assert not plan_for(*KIMI, small, *fp8, "--max-samples", with_fp8)[1].findings
    assert plan_for(*KIMI, small, *fp8, "--max-samples", round(with_fp8 * 1.01))[1].findings
    assert not plan_for(*KIMI, small, "--args", "02", "--max-disk-gb 200")[1].findings


@pytest.mark.parametrize(
    ("machine", "more", "level", "line"),
    [
        (
            "gpus=8x48,memory=1500,disk=900",
            [],
            "hard",
            "weights take 554.3 GB, 8 GPUs may give 353.3 GB; it takes 13 such",
        ),
        ("gpus=4x96,memory=1500,disk=900", [], "hard", "GPUS is 8, 4 are visible; set GPUS (--gpus)"),
        (BOX, ["--args", "04", "--max-tokens 131072 --ttt-steps 7"], "hard", "of a GPU's 96.0 GB; lower --max-tokens"),
        ("gpus=8x96,memory=40,disk=900", [], "soft", "stage 04 takes 53.6 GB of host memory, 40.0 GB are available"),
        (
            BOX,
            ["--args", "01", "--max-seq-len 8192"],
            "soft",
            "micro-batch of stage 04 holds 4096; give --max-tokens 8192",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_figures(machine: str, more: list, level: str, line: str) -> None:
    _, made = plan_for(*KIMI, machine, *more)
    assert made.level() == level
    assert any(line in finding.text and finding.level == level for finding in made.findings), made.findings


def test_a_machine_that_is_described_wrongly() -> None:
    with pytest.raises(UserError, match="--machine gpus=8: expected gpus=8x96,memory=1000,disk=900 in GB"):
        plan_for(*KIMI, "gpus=8")


def test_a_limit_is_an_exit_code(tiny_target: Path, chats: Path, tmp_path: Path) -> None:
    """Through the command: 2 for a hard limit, nothing started; a soft one likewise until --force."""
    out = tmp_path / "out"

    def answer(machine: str, action: str = "run", force: bool = False) -> subprocess.CompletedProcess:
        found = settings_for("--model-path", tiny_target, "--dataset", chats, "--output-dir", out, "--machine", machine)
        asked = json.dumps({"settings": found.plain(), "action": action, "force": force, "redo": False})
        command = [sys.executable, "-m", "eagle3.pipeline.briefing", tmp_path / "answer"]
        return subprocess.run(command, input=asked, capture_output=True, text=True, cwd=REPOSITORY)

    hard, soft = "gpus=1x0.01,memory=64,disk=900", "gpus=0x0,memory=64,disk=0.001"
    result = answer(hard)
    assert result.returncode == 2 and "refused: stage 02: the target's weights take" in result.stdout
    result = answer(soft)
    assert result.returncode == 4 and "in doubt: " in result.stdout and "no sample" in result.stdout
    assert answer(soft, force=True).returncode == 0 and not out.exists()


# ----------------------------------------------------------------------------------------- against real files


def test_disk_of_the_draft_is_what_is_written(tiny_target: Path, tmp_path: Path, run_script) -> None:
    """Checkpoints, best draft and export; frozen head too. (The whole smoke run: test_pipeline.py.)"""
    write_states(tmp_path, tiny_target, count=12)
    flags = ["--epochs", 2, "--ttt-steps", 2, "--max-tokens", 256, "--lm-head", "frozen"]
    flags += ["--hidden-states-dir", tmp_path / "hidden_states", "--vocab-map-dir", tmp_path / "vocab_map"]
    run_script("04_train_draft.py", "--model-path", tiny_target, *flags, "--output-dir", tmp_path / "draft")
    manifest = json.loads((tmp_path / "draft" / "manifest.json").read_text())
    vocab = json.loads((tmp_path / "vocab_map" / "manifest.json").read_text())["fingerprint"]["draft_vocab_size"]
    layers = json.loads((tmp_path / "hidden_states" / "manifest.json").read_text())["aux_layers"]
    config = derive(open_target(str(tiny_target)), vocab, layers)
    deepspeed = json.loads((REPOSITORY / "configs/deepspeed/zero2.json").read_text())
    expected = plan.draft_bytes(config, False, 4, deepspeed, manifest["steps"]).stays(2, True)
    assert expected == pytest.approx(folder_bytes(tmp_path / "draft"), rel=0.01)


def test_a_command_of_the_plan_in_the_papers_runs() -> None:
    """docs/scale.md states the command that prints its figures: they are the plan's."""
    text = (REPOSITORY / "docs" / "scale.md").read_text()
    commands = re.findall(r"^    \./run_pipeline\.sh --plan ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        words = [word for word in shlex.split(command.replace("\\\n", " "))]
        words = [str(REPOSITORY / word) if word.startswith("configs/") else word for word in words]
        job, made = plan_for(*words)
        table = [line for line in verdict.described(job, made) if re.match(r"\w+ {2,}", line)]
        assert len(table) == 7
        missing = [line for line in table if line.strip() not in text]
        assert not missing, f"docs/scale.md is not what the plan says now: {missing}"
