"""The orchestrator as a user runs it: the smoke run end to end with real vLLM, and its faults."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from pipeline_for_tests import plan_for

from eagle3 import artifacts, served_check, vllm_runtime
from eagle3.draft.config import derive
from eagle3.export import export_tensors, read_export
from eagle3.export_speculators import write_speculators
from eagle3.pipeline.closing import folder_bytes
from eagle3.pipeline.settings import FOLDERS
from eagle3.target import open_target
from eagle3.training.packing import hold_out

NOTE = "smoke export: it proves the path, not the draft"


def pipeline(*arguments: object, **settings) -> subprocess.CompletedProcess:
    environment = os.environ | {"EAGLE3_PYTHON": sys.executable} | settings.pop("environment", {})
    return subprocess.run(
        [str(REPOSITORY / "run_pipeline.sh"), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
        **settings,
    )


@pytest.fixture(scope="module")
def smoke(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The smoke run in a folder whose name has spaces and umlauts, started from elsewhere; output and text."""
    where = tmp_path_factory.mktemp("smoke")
    result = pipeline("--smoke", "--output-dir", "my out (v1) ü", cwd=where)
    assert result.returncode == 0, result.stdout + result.stderr
    return where / "my out (v1) ü", result.stdout


@pytest.mark.slow
def test_smoke_ends_with_a_served_draft(smoke: tuple[Path, str]) -> None:
    out, text = smoke
    report = json.loads((out / "draft" / "served_check.json").read_text())
    assert report["identical"] == report["prompts"] == 2 and report["dtype"] == "float32"
    assert report["tau"] >= 1.0 and report["drafts"] > 0 and len(report["acceptance_by_position"]) == 3
    assert f"the draft lies in {out.name}/draft/export" in text and text.rstrip().endswith(NOTE)
    assert NOTE in (out / "draft" / "export" / "README.md").read_text()
    for stage in ("01", "02", "03", "04", "check"):
        assert f"=== {stage} ===" in text and (out / "logs" / f"{stage}.log").stat().st_size > 100
    for noise in ("WARNING", "FutureWarning", "Traceback", "DeepSpeed", "Loading safetensors", "Triton"):
        assert noise not in text


@pytest.mark.slow
def test_smoke_artifacts_are_those_of_the_contract(smoke: tuple[Path, str], smollm2: Path) -> None:
    out, _ = smoke
    frequencies = torch.zeros(49152, dtype=torch.int64)
    for index in range(10):
        prepared = artifacts.load_tensors(artifacts.sample_path(out / "prepared", index))
        captured = artifacts.load_tensors(artifacts.sample_path(out / "hidden_states", index))
        tokens, supervised = len(prepared["input_ids"]), int(prepared["loss_mask"].sum())
        assert prepared["input_ids"].dtype == torch.int32 and prepared["loss_mask"].dtype == torch.bool
        assert torch.equal(prepared["input_ids"], captured["input_ids"])
        assert torch.equal(prepared["loss_mask"], captured["loss_mask"])
        assert captured["aux_hidden"].shape == (tokens, 3 * 576) and captured["aux_hidden"].dtype == torch.bfloat16
        assert captured["final_hidden"].shape == (supervised, 576)
        frequencies += torch.bincount(prepared["input_ids"][prepared["loss_mask"]].long(), minlength=49152)
    assert torch.equal(artifacts.load_tensors(out / "prepared" / "token_freq.pt"), frequencies)
    vocab = artifacts.load_tensors(out / "vocab_map" / "vocab_map.pt")
    ids = torch.arange(8000) + vocab["d2t"]
    assert torch.equal(vocab["t2d"].nonzero()[:, 0], ids)
    assert set(range(17)) <= set(ids.tolist()), "a special token is outside the draft vocabulary"
    assert artifacts.read_manifest(out / "hidden_states", "02")["aux_layers"] == [2, 15, 27]
    records = list(artifacts.Index(out / "hidden_states").samples().values())
    held_out = [record["index"] for record in hold_out(records, 0.2, 0)[1]]
    assert artifacts.read_manifest(out / "draft", "04")["held_out"] == held_out


@pytest.mark.slow
def test_the_plan_named_the_disk_that_the_run_took(smoke: tuple[Path, str], tmp_path: Path) -> None:
    """From stage 01's index alone, all that came after it; within 1%."""
    out, text = smoke
    alone = tmp_path / "out"
    shutil.copytree(out / "prepared", alone / "prepared")
    _, made = plan_for("--smoke", "--output-dir", alone, "--from", "02")
    assert made.data.known == "stage 01's index"
    taken = {stage: folder_bytes(out / folder) for stage, folder in FOLDERS.items()}
    for stage in ("02", "03", "04"):
        assert made.stages[stage].disk == pytest.approx(taken[stage], rel=0.01), stage
    _, before = plan_for("--smoke", "--output-dir", tmp_path / "nothing")
    assert before.stages["01"].disk == pytest.approx(taken["01"], rel=0.05), "lengths are assumed"
    assert text.index("plan for ") < text.index("=== 01 ===")


@pytest.mark.slow
def test_vllm_drafts_the_same_from_the_speculators_layout(
    smoke: tuple[Path, str], smollm2: Path, tmp_path: Path
) -> None:
    out, _ = smoke
    served = json.loads((out / "draft" / "served_check.json").read_text())
    target = open_target(str(smollm2), weights=True)
    config = derive(target, 8000, [2, 15, 27])
    vocab = artifacts.load_tensors(out / "vocab_map" / "vocab_map.pt")
    tensors = export_tensors(read_export(out / "draft" / "export", config), vocab)
    write_speculators(tmp_path / "export-speculators", tensors, config, target, 3, "card")
    held_out = artifacts.read_manifest(out / "draft", "04")["held_out"]
    export = tmp_path / "export-speculators"
    llm = served_check.load(target, tmp_path / "log", export, 3, dtype="float32", max_model_len=512)
    try:
        served_check.generate(llm, served_check.prompts_of(out / "prepared", held_out), 64, "speculators' layout")
        counted = served_check.counters(llm).report()
    finally:
        vllm_runtime.shutdown(llm)
    assert counted == {key: served[key] for key in counted}


@pytest.mark.slow
def test_rerun_of_finished_stages_redoes_nothing(smoke: tuple[Path, str]) -> None:
    out, _ = smoke
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.pt") if "checkpoints" not in path.parts}
    result = pipeline("--smoke", "--output-dir", out, "--to", "03")
    assert result.returncode == 0, result.stdout + result.stderr
    changed = [p for p, time in before.items() if p.stat().st_mtime_ns != time and p.name != "vocab_map.pt"]
    assert not changed


@pytest.mark.slow
def test_a_failing_stage_stops_the_run_and_is_named_with_its_log(smoke: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "prepared").mkdir(parents=True)
    (out / "prepared" / "manifest.json").write_text('{"schema_version": 99}')
    result = pipeline("--smoke", "--output-dir", out)
    assert result.returncode == 1
    assert "schema version 99" in result.stdout  # the stage's error passes through its log
    assert f"stage 01 failed, exit code 1; log {out}/logs/01.log" in result.stderr
    assert "schema version 99" in (out / "logs" / "01.log").read_text()
    assert "=== 02 ===" not in result.stdout and "Traceback" not in result.stdout


@pytest.mark.slow
def test_a_disk_budget_that_is_reached_is_no_failure(tiny_target: Path, chats: Path, tmp_path: Path) -> None:
    (tmp_path / "small.env").write_text("EXTRACT_ARGS=(--engine transformers --max-disk-gb 0.00006)\n")
    settings = ["--config", tmp_path / "small.env", "--model-path", tiny_target, "--dataset", chats]
    result = pipeline(*settings, "--output-dir", tmp_path / "out", "--to", "02")
    assert result.returncode == 3, result.stdout + result.stderr
    assert "stage 02 reached --max-disk-gb; make room, then the same command continues, exit code 3" in result.stderr
    assert 0 < artifacts.read_manifest(tmp_path / "out" / "hidden_states", "02")["samples"] < 12


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--bogus"], "unknown option --bogus"),
        (["--smoke", "--from", "07"], "no stage 07; stages are 01 02 03 04 check"),
        (["--from", "03", "--to", "01"], "--from 03 comes after --to 01"),
        (["--smoke", "--dataset", "x"], "--smoke always uses the embedded target and conversations"),
        (["--output-dir"], "--output-dir needs a value"),
        (["--config", "nowhere.env"], "--config nowhere.env: no such file"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(arguments: list[str], line: str) -> None:
    result = pipeline(*arguments)
    environment, mistake = result.stderr.splitlines()
    assert result.returncode == 2 and line in mistake and environment.startswith("environment: ")


def test_the_default_dataset_and_an_unreachable_hub_is_one_line(smollm2: Path, tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    result = pipeline(
        "--model-path", smollm2, "--output-dir", tmp_path / "out", "--max-samples", 10, environment=offline
    )
    assert result.returncode == 1
    errors = [line for line in result.stdout.splitlines() if "error" in line]
    assert len(errors) == 1 and "mlabonne/open-perfectblend" in errors[0] and "Traceback" not in result.stdout


SCRIPTS = {
    "PREPARE_ARGS": "01_prepare_dataset.py",
    "EXTRACT_ARGS": "02_extract_hidden_states.py",
    "VOCAB_ARGS": "03_build_vocab_map.py",
    "TRAIN_ARGS": "04_train_draft.py",
    "CHECK_ARGS": "eagle3/served_check.py",
}


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """--help of every stage, by script."""

    def help_of(script: str) -> str:
        command = [sys.executable, str(REPOSITORY / script), "--help"]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env=environment).stdout

    return {script: help_of(script) for script in SCRIPTS.values()}


@pytest.mark.parametrize("config", sorted((REPOSITORY / "configs/pipelines").glob("*.env")), ids=lambda path: path.stem)
def test_every_flag_and_file_in_a_pipeline_config_exists(config: Path, helps: dict[str, str]) -> None:
    """T44: of the configs."""
    shown = "".join(f' && printf "%s\\n" {name} ${{{name}[@]+"${{{name}[@]}}"}}' for name in SCRIPTS)
    result = subprocess.run(
        ["bash", "-euc", f'root={REPOSITORY} && source "$1"{shown}', "bash", config],
        capture_output=True,
        text=True,
        check=True,
    )
    script = ""
    for word in result.stdout.splitlines():
        script = SCRIPTS.get(word, script)
        if word.startswith("--"):
            assert f"{word} " in helps[script], f"{script} has no {word}"
        if word.endswith(".json"):
            assert Path(word).is_file()
    assert script == SCRIPTS["CHECK_ARGS"]


def test_every_flag_in_the_readme_exists(helps: dict[str, str]) -> None:
    """T44. A flag that a script's line or section in the README names is one that the script takes."""
    readme = (REPOSITORY / "README.md").read_text()
    commands = [line for line in readme.splitlines() if line.strip().startswith("python 0")]
    assert len(commands) == 6
    for line in commands:
        words = line.split()
        assert all(word in helps[words[1]] for word in words if word.startswith("--")), line
    table = [line.split("`")[1] for line in readme.splitlines() if line.startswith("| `--")]
    assert len(table) == 14 and all(flag in helps["04_train_draft.py"] for flag in table)
    pipeline_help = pipeline("--help").stdout
    options = ("--smoke", "--config", "--model-path", "--dataset", "--output-dir", "--max-samples", "--from", "--to")
    options += ("--only", "--args", "--plan", "--probe", "--print-config", "--force", "--redo", "--detach", "--status")
    options += ("--stop",)
    assert all(option in pipeline_help and option in readme for option in options)
