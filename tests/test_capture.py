"""Stage 02: states of both engines against transformers' own, the canary on vLLM, resuming."""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from capture_for_tests import (
    Altered,
    post_norm,
    random_prompts,
    samples_of,
    settings_for,
    states_of,
    swap_layers,
    write_prepared,
)
from conftest import REPOSITORY

from eagle3 import artifacts, vllm_runtime
from eagle3.artifacts import Index
from eagle3.capture import canary, engines, extract
from eagle3.capture import vllm_engine as vllm_engine_module
from eagle3.capture.interface import EngineSettings, Fault, Sample, Written
from eagle3.capture.transformers_engine import TransformersEngine
from eagle3.capture.vllm_engine import VllmEngine
from eagle3.states import FILE_OVERHEAD
from eagle3.terminal import UserError

SCRIPT = "02_extract_hidden_states.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


pytestmark = pytest.mark.usefixtures("one_thread")


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest over the layers of ||got - want|| / ||want||, both [T, L, H]."""
    difference = (got.float() - want.float()).norm(dim=(0, 2))
    return (difference / want.float().norm(dim=(0, 2))).max().item()


def sample(directory: Path, index: int) -> dict[str, torch.Tensor]:
    return artifacts.load_tensors(artifacts.sample_path(directory, index))


# ------------------------------------------------------------------------------------------ transformers


def test_transformers_states_are_the_inputs_of_the_layers_and_the_unnormed_output(tiny_target, tmp_path):
    from transformers import AutoModelForCausalLM

    prompt = random_prompts([50])[0]
    (states,) = states_of(TransformersEngine(settings_for(tiny_target, tmp_path)), [prompt])
    assert states.shape == (50, 4, 64)

    model = AutoModelForCausalLM.from_pretrained(tiny_target).eval()
    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
        for slot, layer in enumerate((2, 4, 5)):
            assert torch.allclose(states[:, slot], output.hidden_states[layer][0], atol=1e-5)
        # the last layer run by hand on its input: its output has seen no norm
        last_input = output.hidden_states[7]
        positions = torch.arange(50)[None]
        rotary = model.model.rotary_emb(last_input, positions)
        last = model.model.layers[7](last_input, position_embeddings=rotary, position_ids=positions)
        assert torch.allclose(states[:, 3], last[0], atol=1e-5)
        assert not torch.allclose(states[:, 3], output.hidden_states[8][0], atol=0.1)
        logits = model.lm_head(model.model.norm(states[:, 3]))
    assert torch.allclose(logits, output.logits[0], atol=1e-5)


# ------------------------------------------------------------------------------------------------- vLLM

needs_vllm = pytest.mark.skipif(vllm_runtime.version() is None, reason="vllm is not installed")


@pytest.fixture(scope="module")
def real_prompts(smollm2) -> list[list[int]]:
    """Twelve short conversations, token ids of the embedded target, 30 to 130 tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    topics = ["rivers", "the moon", "def f(x): return x + 1", "17 times 3", "Latin", "steam"]
    sentence = "Well, {} matters: people noticed it early, wrote it down and argued about it. "
    return [
        tokenizer.apply_chat_template(
            [
                {"role": "user", "content": f"Tell me about {topic}."},
                {"role": "assistant", "content": sentence.format(topic) * repeat},
            ],
            return_dict=True,
        )["input_ids"]
        for repeat in (1, 4)
        for topic in topics
    ]


@pytest.fixture(scope="module")
def reference_states(smollm2, real_prompts, tmp_path_factory) -> list[torch.Tensor]:
    """float32 states of transformers, [T, 4, 576] each."""
    engine = TransformersEngine(settings_for(smollm2, tmp_path_factory.mktemp("reference")))
    return states_of(engine, real_prompts)


@pytest.fixture(scope="module")
def vllm_engine(smollm2, tmp_path_factory) -> Iterator[tuple[VllmEngine, EngineSettings]]:
    settings = settings_for(smollm2, tmp_path_factory.mktemp("vllm"))
    with contextlib.closing(VllmEngine(settings, longest=160)) as engine:
        yield engine, settings
    assert not list(vllm_runtime.private_folder().glob("*.pt"))


@needs_vllm
@pytest.mark.slow
def test_vllm_writes_the_states_of_transformers(vllm_engine, real_prompts, reference_states, capsys):
    engine, settings = vllm_engine
    twice = [*real_prompts, *real_prompts[::-1]]  # equal prompts, other neighbours
    in_flight = []

    def drawn() -> Iterator[Sample]:
        for one in samples_of(twice):
            in_flight.append(one.index)
            assert sum(len(twice[i]) for i in in_flight) <= settings.batch_tokens + len(one.input_ids)
            yield one

    for one, outcome in engine.capture(drawn()):
        in_flight.remove(one.index)
        assert isinstance(outcome, Written)
        assert outcome.bytes == artifacts.sample_path(settings.output_dir, one.index).stat().st_size
    assert not in_flight
    errors = []
    for i, want in enumerate([*reference_states, *reference_states[::-1]]):
        got = sample(settings.output_dir, i)
        assert got["input_ids"].tolist() == twice[i]
        errors.append(relative_error(got["aux_hidden"].view(len(want), 3, -1), want[:, :3]))
        errors.append(relative_error(got["final_hidden"][:, None], want[got["loss_mask"]][:, 3:]))
    with capsys.disabled():
        print(f"\n  vLLM against transformers, float32: largest relative error {max(errors):.1e}")
    assert max(errors) < 1e-4


@needs_vllm
@pytest.mark.slow
def test_vllm_takes_the_longest_prompt_and_outlives_a_bad_one(vllm_engine, real_prompts):
    """Cases H05 and H06 with a real engine."""
    engine, _ = vllm_engine
    longest, too_long = random_prompts([160, 400])
    prompts = [real_prompts[0], too_long, longest, real_prompts[1]]
    outcomes = {one.index: outcome for one, outcome in engine.capture(samples_of(prompts, first=100))}
    assert [isinstance(outcomes[100 + i], Written) for i in range(4)] == [True, False, True, True]
    assert "refused" in outcomes[101].detail and "400" in outcomes[101].detail


@needs_vllm
@pytest.mark.slow
def test_vllm_never_writes_states_of_other_tokens(vllm_engine, real_prompts, monkeypatch):
    """Case H07 with a real engine."""
    engine, settings = vllm_engine
    digest = vllm_engine_module.ids_digest
    monkeypatch.setattr(vllm_engine_module, "ids_digest", lambda ids: digest(ids.flip(0) if len(ids) == 77 else ids))
    prompts = [real_prompts[0], *random_prompts([77])]
    outcomes = {one.index: outcome for one, outcome in engine.capture(samples_of(prompts, first=200))}
    assert isinstance(outcomes[200], Written) and outcomes[201].reason == "states of other tokens"
    assert not artifacts.sample_path(settings.output_dir, 201).exists()


@needs_vllm
@pytest.mark.slow
def test_canary_passes_on_vllm_and_catches_broken_states(vllm_engine, real_prompts, capsys):
    engine, settings = vllm_engine
    prompts = canary.choose_prompts(real_prompts)
    report = canary.check(engine, settings, prompts)
    with capsys.disabled():
        print(f"\n  canary, vLLM float32: {canary.describe(report)}")
    assert report["positions"] >= 300
    assert report["mean"] < canary.TOLERANCE["float32"] / 30  # the limit leaves room for other targets
    norm = canary.TargetHead(settings.target, torch.float32, "cpu").norm
    for change, cause in ((post_norm(norm), "after the final norm"), (swap_layers(2, 3), "another order")):
        with pytest.raises(UserError, match=cause):
            canary.check(Altered(engine, change), settings, prompts)


@needs_vllm
@pytest.mark.slow
def test_script_captures_bfloat16_with_vllm(run_script, smollm2, real_prompts, reference_states, tmp_path, capsys):
    prepared = write_prepared(tmp_path / "prepared", smollm2, real_prompts)
    arguments = ["--model-path", smollm2, "--prepared-dir", prepared, "--output-dir", tmp_path / "out"]
    # from another folder, with nothing on the import path: vLLM's processes must still find the connector
    result = run_script(SCRIPT, *arguments, cwd=tmp_path, environment={"PYTHONPATH": ""})
    assert "engine: vllm" in result.stdout and "(auto)" in result.stdout
    for noise in ("WARNING", "INFO", "it/s", "Rendering", "Loading safetensors"):
        assert noise not in result.stdout + result.stderr
    assert [line for line in result.stderr.splitlines() if line and "capture:" not in line] == []
    manifest = artifacts.read_manifest(tmp_path / "out", "02")
    assert manifest["complete"] and manifest["samples"] == len(real_prompts)
    assert manifest["fingerprint"]["dtype"] == "bfloat16"
    errors = []
    for i, want in enumerate(reference_states):
        got = sample(tmp_path / "out", i)
        errors.append(relative_error(got["aux_hidden"].view(len(want), 3, -1), want[:, :3]))
        errors.append(relative_error(got["final_hidden"][:, None], want[got["loss_mask"]][:, 3:]))
    with capsys.disabled():
        print(f"\n  vLLM bfloat16 against transformers float32: largest relative error {max(errors):.1e}")
        print(f"  canary, vLLM bfloat16: {canary.describe(manifest['canary'])}, {manifest['canary']['seconds']} s")
    assert max(errors) < 0.03
    assert manifest["canary"]["mean"] < canary.TOLERANCE["bfloat16"] / 4


# ------------------------------------------------------------------------------------------------ stage

LENGTHS = [40, 7, 120, 64, 1, 33, 90, 12]


@pytest.fixture
def prepared(tiny_target, tmp_path) -> Path:
    return write_prepared(tmp_path / "prepared", tiny_target, random_prompts(LENGTHS))


@pytest.fixture
def settings(tiny_target, tmp_path) -> EngineSettings:
    return settings_for(tiny_target, tmp_path / "out", batch_tokens=100)


def test_stage_writes_states_in_the_agreed_layout(prepared, settings, tiny_target):
    extract.extract(prepared, "transformers", settings)
    for i, states in enumerate(states_of(TransformersEngine(settings), random_prompts(LENGTHS))):
        got = sample(settings.output_dir, i)
        tokens = LENGTHS[i]
        assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in got.items()} == {
            "input_ids": (torch.int32, (tokens,)),
            "loss_mask": (torch.bool, (tokens,)),
            "aux_hidden": (torch.float32, (tokens, 3 * 64)),
            "final_hidden": (torch.float32, (tokens - tokens // 2, 64)),
        }
        assert got["input_ids"].tolist() == random_prompts(LENGTHS)[i]
        assert torch.equal(got["aux_hidden"], torch.cat([states[:, slot] for slot in range(3)], dim=1))
        assert torch.equal(got["final_hidden"], states[got["loss_mask"], 3])
        path = artifacts.sample_path(settings.output_dir, i)
        content = sum(tensor.nbytes for tensor in got.values())
        assert content < path.stat().st_size < content + FILE_OVERHEAD  # no storage of views
    records = Index(settings.output_dir).samples()
    assert list(records) == list(range(len(LENGTHS)))
    assert all(
        record["bytes"] == artifacts.sample_path(settings.output_dir, i).stat().st_size for i, record in records.items()
    )
    ids = torch.tensor(random_prompts(LENGTHS)[2], dtype=torch.int32)
    assert records[2] | {"bytes": 0} == {
        "index": 2,
        "tokens": 120,
        "supervised": 60,
        "source": "test",
        "dataset": "test",
        "conversation": 2,
        "ids": artifacts.ids_digest(ids),
        "bytes": 0,
        "status": "done",
    }
    manifest = artifacts.read_manifest(settings.output_dir, "02")
    assert manifest["complete"] and manifest["samples"] == 8 and manifest["tokens"] == sum(LENGTHS)
    assert manifest["failed"] == {} and manifest["aux_layers"] == [2, 4, 5] and manifest["hidden_size"] == 64
    assert manifest["canary"]["argmax_equal"] > 0
    assert manifest["fingerprint"]["layers"] == [2, 4, 5, 8] and manifest["fingerprint"]["norm"] == "pre"


def test_finished_run_again_loads_nothing_and_changes_nothing(prepared, settings, monkeypatch, capsys):
    extract.extract(prepared, "transformers", settings)
    before = {path: path.stat().st_mtime_ns for path in settings.output_dir.rglob("*.*")}
    monkeypatch.setattr(engines, "open_engine", lambda *_: pytest.fail("the engine was loaded"))
    extract.extract(prepared, "transformers", settings)
    assert "nothing to do" in capsys.readouterr().out
    assert all(path.stat().st_mtime_ns == time for path, time in before.items() if path.name != ".lock")


def test_rerun_redoes_what_is_torn_damaged_or_missing_and_nothing_else(prepared, settings, capsys):
    """Cases H14 and H16."""
    extract.extract(prepared, "transformers", settings)
    out = settings.output_dir
    paths = [artifacts.sample_path(out, i) for i in range(len(LENGTHS))]
    states = [sample(out, i)["aux_hidden"].clone() for i in range(len(LENGTHS))]
    paths[1].unlink()
    paths[3].write_bytes(paths[3].read_bytes()[:-100])
    index = Index(out).path
    index.write_bytes(index.read_bytes()[:-20])  # a kill tore the last line
    (paths[0].parent / ".00000009.pt.1.tmp").write_bytes(b"half")
    times = [path.stat().st_mtime_ns if path.exists() else 0 for path in paths]
    capsys.readouterr()

    extract.extract(prepared, "transformers", settings)
    assert "2 finished samples are missing or damaged and will be redone: 1, 3" in capsys.readouterr().out
    redone = [i for i, path in enumerate(paths) if path.stat().st_mtime_ns != times[i]]
    assert redone == [1, 3, 7]  # 7 had the torn line
    for i, want in enumerate(states):
        assert torch.allclose(sample(out, i)["aux_hidden"], want, atol=1e-5)
    assert list(Index(out).samples()) == list(range(len(LENGTHS)))
    assert not list(out.rglob("*.tmp"))


def test_more_prepared_samples_are_added(prepared, settings, tiny_target):
    extract.extract(prepared, "transformers", settings)
    paths = [artifacts.sample_path(settings.output_dir, i) for i in range(len(LENGTHS))]
    times = [path.stat().st_mtime_ns for path in paths]
    write_prepared(prepared, tiny_target, random_prompts([*LENGTHS, 25, 30]))
    extract.extract(prepared, "transformers", settings)
    assert [path.stat().st_mtime_ns for path in paths] == times
    assert artifacts.read_manifest(settings.output_dir, "02")["samples"] == len(LENGTHS) + 2


def test_other_fingerprints_are_refused_with_both_values(prepared, settings, tiny_target, tmp_path):
    extract.extract(prepared, "transformers", settings)
    for changes, message in (
        ({"dtype": "bfloat16"}, "dtype is 'float32', this run has 'bfloat16'"),
        ({"layers": (1, 4, 5, 8)}, r"layers is \[2, 4, 5, 8\], this run has \[1, 4, 5, 8\]"),
        ({"aux": "fp8"}, "store_dtype is 'float32', this run has 'fp8'"),
        ({"final": "fp8"}, "store_final_dtype is 'float32', this run has 'fp8'"),
    ):
        with pytest.raises(UserError, match=message):
            extract.extract(prepared, "transformers", settings_for(tiny_target, settings.output_dir, **changes))
    other = shutil.copytree(tiny_target, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    with pytest.raises(UserError, match=r"target is .* this run has .* --model-path that stage 01 had"):
        extract.extract(prepared, "transformers", settings_for(other, tmp_path / "out2"))
    (settings.output_dir / "manifest.json").unlink()
    with pytest.raises(UserError, match="has an index but no manifest"):
        extract.extract(prepared, "transformers", settings)


def test_prepared_samples_that_cannot_be_used_are_refused(tiny_target, settings, tmp_path):
    incomplete = write_prepared(tmp_path / "a", tiny_target, random_prompts([5]), complete=False)
    with pytest.raises(UserError, match="not complete"):
        extract.extract(incomplete, "transformers", settings)
    long = write_prepared(tmp_path / "b", tiny_target, random_prompts([5, 1025]))
    with pytest.raises(UserError, match=r"sample 1 .* has 1025 tokens, the target takes 1024"):
        extract.extract(long, "transformers", settings)
    with pytest.raises(UserError, match="names no finished sample"):
        extract.extract(write_prepared(tmp_path / "c", tiny_target, []), "transformers", settings)
    broken = write_prepared(tmp_path / "d", tiny_target, random_prompts([50, 5]))
    artifacts.sample_path(broken, 1).write_bytes(b"half")
    with pytest.raises(UserError, match=r"1 of 2 samples .* first .*00000001\.pt: 4 bytes, the index says"):
        extract.extract(broken, "transformers", settings)


class Spoiling(TransformersEngine):
    """Alters what it captured: `spoil(attempt, index, states)` gives states or a Fault; attempt counts the tries."""

    spoil: Callable[[int, int, torch.Tensor], torch.Tensor | Fault]

    def capture(self, samples):
        self.attempts = getattr(self, "attempts", {})
        for one in samples:
            self.attempts[one.index] = self.attempts.get(one.index, 0) + 1
            result = self.spoil(self.attempts[one.index], one.index, states_of(self, [one.input_ids.tolist()])[0])
            if isinstance(result, Fault):
                yield one, result
            else:
                self._states = lambda result=result: result
                yield from super().capture([one])
                del self._states


def with_faults(monkeypatch, spoil: Callable[[int, int, torch.Tensor], torch.Tensor | Fault]) -> None:
    engine = type("Engine", (Spoiling,), {"spoil": staticmethod(spoil)})
    monkeypatch.setattr(engines, "open_engine", lambda name, settings, longest: engine(settings))


def written(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in directory.glob("samples/*/*.pt"))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda states: states.index_fill(0, torch.tensor([3]), torch.nan), "states not finite"),
        (lambda states: states.index_fill(2, torch.tensor([63]), -torch.inf), "states not finite"),
        (lambda states: states[:-1], "wrong shape"),
        (lambda states: states[:, 1:], "wrong shape"),
        (lambda states: states.bfloat16(), "wrong shape"),
        (lambda states: Fault("engine gave no states", "lost"), "engine gave no states"),
    ],
)
def test_a_sample_that_fails_twice_is_skipped_with_its_reason(
    fault, reason, tiny_target, settings, tmp_path, monkeypatch, capsys
):
    prepared = write_prepared(tmp_path / "prepared", tiny_target, random_prompts([20] * 30))
    with_faults(monkeypatch, lambda attempt, index, states: fault(states) if index == 11 else states)
    extract.extract(prepared, "transformers", settings)
    assert written(settings.output_dir) == [i for i in range(30) if i != 11]
    record = Index(settings.output_dir).samples()[11]
    assert (record["status"], record["reason"]) == ("failed", reason)
    manifest = artifacts.read_manifest(settings.output_dir, "02")
    assert manifest["complete"] and manifest["samples"] == 29 and manifest["failed"] == {reason: 1}
    assert f"sample 11 skipped after two tries: {reason}" in capsys.readouterr().err
    # it is settled: the same command does not load the engine for it again
    monkeypatch.setattr(engines, "open_engine", lambda *_: pytest.fail("the engine was loaded"))
    extract.extract(prepared, "transformers", settings)
    assert "delete the failed samples' lines" in capsys.readouterr().out


def test_a_sample_that_fails_once_is_tried_again(tiny_target, settings, tmp_path, monkeypatch):
    prepared = write_prepared(tmp_path / "prepared", tiny_target, random_prompts([20] * 5))
    with_faults(monkeypatch, lambda attempt, index, states: Fault("lost", "") if attempt == 1 else states)
    extract.extract(prepared, "transformers", settings)
    assert written(settings.output_dir) == [0, 1, 2, 3, 4]
    assert artifacts.read_manifest(settings.output_dir, "02")["failed"] == {}


def test_stage_stops_when_more_than_a_tenth_fails_and_tries_again_later(tiny_target, settings, tmp_path, monkeypatch):
    prompts = random_prompts([20] * 10)
    prepared = write_prepared(tmp_path / "prepared", tiny_target, prompts)
    with monkeypatch.context() as patch:
        with_faults(
            patch, lambda _, index, states: Fault("engine gave no states", "lost") if index in (3, 4) else states
        )
        with pytest.raises(UserError, match=r"2 of 10 samples failed \(engine gave no states: 2\), more than 10%"):
            extract.extract(prepared, "transformers", settings)
    assert len(written(settings.output_dir)) == 8
    assert not artifacts.read_manifest(settings.output_dir, "02")["complete"]
    extract.extract(prepared, "transformers", settings)
    assert written(settings.output_dir) == list(range(10))
    assert artifacts.read_manifest(settings.output_dir, "02")["failed"] == {}


def test_stage_writes_nothing_when_the_canary_fails(prepared, settings, monkeypatch):
    def open_engine(name, settings, longest):
        engine = TransformersEngine(settings)
        engine.score = Altered(TransformersEngine(settings), lambda states: states.roll(1, 0)).score
        return engine

    monkeypatch.setattr(engines, "open_engine", open_engine)
    with pytest.raises(UserError, match="canary"):
        extract.extract(prepared, "transformers", settings)
    assert written(settings.output_dir) == []
    assert not artifacts.read_manifest(settings.output_dir, "02")["complete"]


def test_too_little_space_is_refused_before_anything_starts(prepared, settings, monkeypatch):
    usage = shutil.disk_usage(settings.output_dir)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    monkeypatch.setattr(engines, "open_engine", lambda *_: pytest.fail("the engine was loaded"))
    with pytest.raises(UserError, match=r"0\.10 MB free, 8 samples of 367 tokens need \d\.\d\d MB, \d of them fit"):
        extract.extract(prepared, "transformers", settings)


def test_full_disk_ends_in_one_line_and_the_same_command_continues(run_script, prepared, tiny_target, tmp_path):
    arguments = [
        "--model-path", tiny_target, "--prepared-dir", prepared, "--output-dir", tmp_path / "out",
        "--engine", "transformers", "--dtype", "float32",
    ]  # fmt: skip

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))  # sample 2 is larger

    result = run_script(SCRIPT, *arguments, check=False, preexec_fn=limit, environment=ONE_THREAD)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("error: ")
    assert 2 not in written(tmp_path / "out") and not list((tmp_path / "out").rglob("*.tmp"))
    run_script(SCRIPT, *arguments, environment=ONE_THREAD)
    assert written(tmp_path / "out") == list(range(len(LENGTHS)))
    for i in range(len(LENGTHS)):
        sample(tmp_path / "out", i)


def test_second_process_is_refused(run_script, prepared, tiny_target, tmp_path):
    with artifacts.directory_lock(tmp_path / "out"):
        result = run_script(
            SCRIPT, "--model-path", tiny_target, "--prepared-dir", prepared, "--output-dir", tmp_path / "out",
            "--engine", "transformers", check=False, environment=ONE_THREAD,
        )  # fmt: skip
    assert result.returncode == 1
    assert "in use by" in result.stderr and f"pid {os.getpid()}" in result.stderr
    assert written(tmp_path / "out") == []


def test_engine_is_chosen_by_what_is_installed(monkeypatch):
    monkeypatch.setattr(vllm_runtime, "version", lambda: "0.32.0")
    assert engines.choose("auto") == ("vllm", "0.32.0")
    assert engines.choose("transformers")[0] == "transformers"
    monkeypatch.setattr(vllm_runtime, "version", lambda: None)
    assert engines.choose("auto")[0] == "transformers"
    with pytest.raises(UserError, match="vllm is not installed"):
        engines.choose("vllm")


def test_capture_is_importable_without_vllm():
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from eagle3.capture import canary, engines, extract, transformers_engine, vllm_engine"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
