"""Stage 01 as a user runs it."""

import json
import os
import subprocess
import sys

import pytest
from conftest import REPOSITORY
from prepare_for_tests import manifest, prepare_here
from tokenizers_for_tests import OPENS_REASONING, write_slow_target

from eagle3.artifacts import Index, load_tensors, sample_path


def test_the_command_line(run_script, tiny_target, chats, tmp_path):
    out = tmp_path / "OUT" / "prepared"
    command = ["01_prepare_dataset.py", "--model-path", tiny_target, "--output-dir", out]
    command += ["--dataset", chats, "--max-samples", 10, "--max-seq-len", 512]
    result = run_script(*command, cwd=tmp_path, environment={"HF_HUB_OFFLINE": "1"})
    assert manifest(out)["samples"] == 10 and load_tensors(sample_path(out, 9))["loss_mask"].any()
    assert "samples" in result.stdout and "assistant tokens" in result.stdout and "skipped rows" in result.stdout
    assert "10/10" in result.stderr and "Warning" not in result.stderr


def test_an_unreachable_hub_is_one_line(run_script, tiny_target, tmp_path):
    result = run_script(
        "01_prepare_dataset.py", "--model-path", tiny_target, "--output-dir", tmp_path / "out", "--max-samples", 10,
        environment={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}, check=False, timeout=60,
    )  # fmt: skip
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert line.startswith("error: --dataset mlabonne/open-perfectblend: no such file, and the hub did not give")
    assert "HF_ENDPOINT" in line and "local" in line


def test_all_of_it_without_a_network(tiny_target, chats, tmp_path):
    """No name of a hub is looked up for local data and a local tokenizer (P35)."""
    command = [sys.executable, REPOSITORY / "01_prepare_dataset.py", "--model-path", tiny_target, "--dataset", chats]
    command += ["--output-dir", tmp_path / "out"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    blocked = ["unshare", "--user", "--net", "--map-root-user"]
    if subprocess.run([*blocked, "true"], capture_output=True).returncode:
        blocked = []  # no leave for that here: an unreachable hub still fails after retries
        environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    run = subprocess.run([*blocked, *command], capture_output=True, text=True, env=environment, timeout=60)
    assert run.returncode == 0, run.stderr
    assert len(Index(tmp_path / "out").samples()) == 12


def test_a_tokenizer_whose_code_lies_in_another_repository(run_script, chats, tmp_path):
    """Without the hub the error names the file to copy (P36)."""
    target = write_slow_target(tmp_path / "target", OPENS_REASONING)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    command = ["01_prepare_dataset.py", "--model-path", target, "--dataset", chats, "--output-dir", tmp_path / "out"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    settings["auto_map"] = {"AutoTokenizer": ["org/name--tokenization_bytes.ByteTokenizer", None]}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    result = run_script(*command, "--trust-remote-code", environment=offline, check=False)
    [line] = result.stderr.splitlines()
    assert result.returncode == 1 and f"copy that file into {target} and write tokenization_bytes.ByteTokenizer" in line
    assert line.startswith(
        "error: the tokenizer's code is tokenization_bytes.py of the hub's org/name, which cannot be"
    )


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--max-samples", 0], "--max-samples 0: expected at least 1"),
        (["--dataset", "self", "--max-samples", 5], "--dataset self stands alone, with --max-samples and --responses"),
        (["--responses", "target", "--responses-endpoint", "http://x"], "not allowed with argument"),
    ],
)
def test_flags_that_do_not_go_together(run_script, tmp_path, flags, line):
    result = run_script("01_prepare_dataset.py", "--model-path", "m", "--output-dir", tmp_path, *flags, check=False)
    assert result.returncode == 2 and line in result.stderr.splitlines()[-1]


def test_the_first_samples_are_shown(run_script, tiny_target, chats, tmp_path):
    """Of a finished run as well."""
    prepare_here(tiny_target, chats, tmp_path / "o", max_seq_len=None)
    command = ["01_prepare_dataset.py", "--model-path", tiny_target, "--dataset", chats, "--output-dir", tmp_path / "o"]
    shown = run_script(*command, "--show", 2).stdout
    assert "nothing to do" in shown and shown.count("--- sample ") == 2
    assert "assistant\n«1 plus 1 is 2, which is an even number.<|im_end|>»" in shown
