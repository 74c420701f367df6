"""How states are stored: sizes, fp8 and back, through stage 02 and into stage 04; states that 04 must not take."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from capture_for_tests import random_prompts, settings_for, states_of, write_prepared
from conftest import REPOSITORY
from states_for_tests import write_states

from eagle3 import artifacts
from eagle3.artifacts import Index
from eagle3.capture import engines, extract
from eagle3.capture.interface import EngineSettings
from eagle3.capture.payload import Payload, fill, write
from eagle3.capture.transformers_engine import TransformersEngine
from eagle3.draft.config import derive
from eagle3.states import FILE_OVERHEAD, FP8, Layout, all_finite, dequantise, quantise
from eagle3.terminal import UserError
from eagle3.training.supervision import load_sample, make_batch

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [40, 30, 64, 33]
FORMS = {"bfloat16": {}, "fp8 aux": {"aux": "fp8"}, "fp8": {"aux": "fp8", "final": "fp8"}}


def layout(dtype: str = "bfloat16", aux: str = "", final: str = "", hidden_size: int = 7168) -> Layout:
    return Layout((2, 30, 58, 61), hidden_size, dtype, aux or dtype, final or dtype)


# --------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("form", "supervised", "content"),
    [
        (layout(), 1.0, 57_344),  # the peers' form, with all final states
        (layout(), 0.5, 50_176),
        (layout(aux="fp8"), 0.5, 28_684),
        (layout(aux="fp8", final="fp8"), 0.5, 25_102),
    ],
)
def test_bytes_a_token_of_kimis_shape(tmp_path: Path, form: Layout, supervised: float, content: int) -> None:
    """The figures of the design, as estimated before a run (case H15: 57 KB a token) and as written."""
    tokens = 200
    mask = torch.arange(tokens) < tokens * supervised
    ids_and_mask = 5 * tokens
    assert form.sample_bytes(tokens, int(mask.sum())) == content * tokens + ids_and_mask + FILE_OVERHEAD
    payload = Payload(form, torch.arange(tokens, dtype=torch.int32), mask, pinned=False)
    for part in torch.randn(tokens, 4, 7168).bfloat16().split(64):
        assert fill(form, [(payload, len(part))], part) is None
    size = write(tmp_path / "sample.pt", payload).bytes
    assert size == (tmp_path / "sample.pt").stat().st_size
    assert content * tokens + ids_and_mask < size <= form.sample_bytes(tokens, int(mask.sum()))


# ------------------------------------------------------------------------------------------- fp8 and back


def round_trip(states: torch.Tensor) -> torch.Tensor:
    stored, scale = quantise(states, states.abs().amax(-1))
    assert stored.dtype == FP8 and scale.dtype == torch.float32 and scale.shape == states.shape[:-1]
    assert all_finite(stored) and all_finite(scale)
    return dequantise(stored, scale, states.dtype)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest over the states of ||got - want|| / ||want||."""
    difference = (got.float() - want.float()).norm(dim=-1)
    return (difference / want.float().norm(dim=-1)).max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("change", "largest_error"),
    [
        (lambda states: states, 0.03),
        (lambda states: states * 1e5 / states.abs().max(), 0.03),  # case H19: more than float16 holds
        (lambda states: states * 1e-6, 0.03),
        (lambda states: states * 10.0 ** torch.arange(-4, 4).repeat(8)[:, None, None], 0.03),  # a scale for each
        (lambda states: states.index_fill(-1, torch.tensor([3, 900]), 1000.0), 0.03),  # outliers, as targets have
    ],
)
def test_fp8_keeps_a_state_within_a_few_percent(change: Callable, largest_error: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    states = change(torch.randn(64, 3, 2048)).to(dtype)
    restored = round_trip(states)
    assert restored.dtype == dtype and error(restored, states) < largest_error
    # e4m3: three bits after the leading one, and below 2^-6 of its unit steps of 2^-9
    unit = states.float().abs().amax(-1, keepdim=True) / 448
    bound = states.float().abs() / 16 + unit * 2**-10 + (restored.float().abs() / 256 if dtype != torch.float32 else 0)
    assert bool(((restored.float() - states.float()).abs() <= bound * 1.001).all())
    largest = states.float().abs().amax(-1)
    assert torch.allclose(restored.float().abs().amax(-1), largest, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_the_small_numbers_beside_an_outlier_are_kept_too() -> None:
    """A scale for the whole token would lose them to an outlier of 1000 times their size."""
    torch.manual_seed(0)
    states = torch.randn(64, 3, 2048)
    states[..., 7] = 1000.0
    restored = round_trip(states)
    others = torch.arange(2048) != 7
    assert error(restored[..., others], states[..., others]) < 0.03
    assert torch.allclose(restored[..., 7], states[..., 7], rtol=1e-6)


def test_zeros_and_the_smallest_numbers_stay_finite() -> None:
    states = torch.zeros(4, 2, 64)
    assert torch.equal(round_trip(states), states)
    states[1] = torch.finfo(torch.float32).tiny
    states[2] = 1e-40  # not normal
    restored = round_trip(states)
    assert torch.equal(restored[0], states[0]) and all_finite(restored)
    assert torch.allclose(restored[1], states[1], rtol=1 / 16)


@pytest.mark.parametrize("bits", [0x7F, 0xFF])
def test_a_nan_in_fp8_is_found(bits: int) -> None:
    stored, _ = quantise(torch.randn(5, 64), torch.ones(5))
    assert all_finite(stored)
    stored.view(torch.uint8)[3, 11] = bits
    assert stored.float().isnan().sum() == 1 and not all_finite(stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    for place in (0, 1, 15, 63, 64, 1000, 5 * 203 - 1):  # in and beside what is taken at a time
        states = torch.randn(5, 203).to(dtype)
        assert all_finite(states)
        states.view(-1)[place] = value
        assert not all_finite(states)
    assert all_finite(torch.empty(0, 203, dtype=dtype))


def test_states_whose_sum_overflows_are_finite() -> None:
    assert all_finite(torch.full((64, 64), 3e38))


# ------------------------------------------------------------------------------- through stages 02 and 04


@pytest.fixture(scope="module")
def prepared(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared"), tiny_target, random_prompts(LENGTHS))


@pytest.fixture(scope="module")
def captured(prepared: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineSettings]:
    """A directory of each form."""
    made = {}
    for name, form in FORMS.items():
        made[name] = settings_for(tiny_target, tmp_path_factory.mktemp("out"), dtype="bfloat16", **form)
        extract.extract(prepared, "transformers", made[name])
    return made


def test_files_of_each_form(captured: dict[str, EngineSettings]) -> None:
    for name, settings in captured.items():
        for index, tokens in enumerate(LENGTHS):
            sample = artifacts.load_tensors(artifacts.sample_path(settings.output_dir, index))
            supervised = tokens - tokens // 2
            aux, final = (FP8 if part in FORMS[name] else torch.bfloat16 for part in ("aux", "final"))
            expected = {"aux_hidden": (aux, (tokens, 3 * 64)), "final_hidden": (final, (supervised, 64))}
            if aux == FP8:
                expected["aux_scale"] = (torch.float32, (tokens, 3))
            if final == FP8:
                expected["final_scale"] = (torch.float32, (supervised,))
            found = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in sample.items()}
            assert found == expected | {
                "input_ids": (torch.int32, (tokens,)),
                "loss_mask": (torch.bool, (tokens,)),
            }
        manifest = artifacts.read_manifest(settings.output_dir, "02")
        fingerprint = manifest["fingerprint"]
        assert fingerprint["dtype"] == "bfloat16"
        assert fingerprint["store_dtype"] == FORMS[name].get("aux", "bfloat16")
        assert fingerprint["store_final_dtype"] == FORMS[name].get("final", "bfloat16")


def test_stage_04_restores_what_was_stored(captured: dict[str, EngineSettings]) -> None:
    exact: dict[str, torch.Tensor] = {}
    for name, settings in captured.items():
        config = derive(settings.target, 64, [2, 4, 5])
        records = Index(settings.output_dir).samples()
        samples = [load_sample(settings.output_dir, records[index], config) for index in (0, 2)]
        batch = make_batch(samples, 3, "served")
        parts = [batch.final_states(slice(start, start + 7), "cpu", torch.float32) for start in range(0, 52, 7)]
        batch = batch.to("cpu", torch.float32)
        aux, final = batch.aux_hidden.view(104, 3, 64), batch.final_hidden
        assert aux.dtype == torch.float32 and batch.aux_scale is None and batch.final_scale is None
        assert torch.equal(torch.cat(parts).float(), final.float())
        if name == "bfloat16":
            exact = {"aux": aux, "final": final}
            states = states_of(TransformersEngine(settings), [random_prompts(LENGTHS)[index] for index in (0, 2)])
            assert torch.equal(torch.cat(states)[:, :3].float(), aux)
            continue
        assert 0.005 < error(aux, exact["aux"]) < 0.04
        assert (error(final, exact["final"]) > 0.005) == (name == "fp8")
        scales = torch.cat([one["aux_scale"] for one in samples])  # each state has its own
        assert torch.allclose(scales, exact["aux"].abs().amax(-1) / 448)
        assert error(final, exact["final"]) < 0.04


def test_the_price_of_fp8_is_measured_and_said(
    captured: dict[str, EngineSettings], prepared: Path, tiny_target: Path, tmp_path: Path, capsys
) -> None:
    settings = settings_for(tiny_target, tmp_path / "out", dtype="bfloat16", **FORMS["fp8"])
    extract.extract(prepared, "transformers", settings)
    output = capsys.readouterr().out
    report = artifacts.read_manifest(settings.output_dir, "02")["canary"]["stored"]
    errors = report["aux_error"]
    assert set(errors) == {"2", "4", "5"} and all(0.01 < value < 0.04 for value in errors.values())
    assert 0 < report["teacher_kl"] < 0.01 and 0.5 < report["teacher_argmax_equal"] <= 1
    said = (
        "aux states off by " + ", ".join(f"{layer}: {value:.1%}" for layer, value in errors.items()) + " of their norm"
    )
    assert f"stored as fp8: {said}; teacher KL {report['teacher_kl']:.1e} nats" in output
    assert output.count(said) == 2  # where it is chosen, and in the summary
    # the same figures from the files of this run and of the one that stored bfloat16
    got, want = (
        torch.cat([states_of_file(one.output_dir, index)[0] for index in range(4)])
        for one in (settings, captured["bfloat16"])
    )
    for slot, value in enumerate(errors.values()):
        measured = (got[:, slot] - want[:, slot]).norm() / want[:, slot].norm()
        assert measured.item() == pytest.approx(value, abs=0.003)
    assert artifacts.read_manifest(captured["bfloat16"].output_dir, "02")["canary"]["stored"] == {}
    aux_alone = artifacts.read_manifest(captured["fp8 aux"].output_dir, "02")["canary"]["stored"]
    assert set(aux_alone) == {"aux_error"}


def states_of_file(directory: Path, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Aux states [T, 3, 64] and final states [S, 64] of a file, read without the product's functions."""
    sample = artifacts.load_tensors(artifacts.sample_path(directory, index))
    aux = sample["aux_hidden"].float().view(-1, 3, 64) * sample.get("aux_scale", torch.ones(1, 1))[..., None]
    return aux, sample["final_hidden"].float() * sample.get("final_scale", torch.ones(1))[..., None]


DAMAGES = [
    ("aux_hidden", lambda t: nan_at(t, 5), "aux_hidden is not finite"),
    ("final_hidden", lambda t: nan_at(t, 2), "final_hidden is not finite"),
    ("aux_scale", lambda t: None, r"aux_scale is not there, expected torch\.float32 of 2 dimensions"),
    ("final_scale", lambda t: None, r"final_scale is not there, expected torch\.float32 of 1 dimension"),
    ("aux_scale", lambda t: t[:-1], "39 aux_scale, the index says 40"),
    ("final_scale", lambda t: t[:-1], "19 final_scale, the index says 20"),
    ("aux_scale", lambda t: t[:, :2], "aux_scale is 2 wide, expected 3"),
    ("aux_scale", lambda t: t * torch.inf, "aux_scale is not finite"),
    ("final_scale", lambda t: t * torch.nan, "final_scale is not finite"),
    ("aux_scale", lambda t: t.bfloat16(), r"aux_scale is torch\.bfloat16 \(40, 3\), expected torch\.float32"),
    ("aux_hidden", lambda t: t[:-1], "39 aux states, the index says 40"),  # case H18: shorter than the sample
    ("final_hidden", lambda t: t[1:], "19 final states, the index says 20"),
    ("input_ids", lambda t: t + (torch.arange(40) == 7), "its ids are not those of the index"),  # case H18
    ("loss_mask", lambda t: t.index_fill(0, torch.tensor([0]), True), "21 supervised tokens, the index says 20"),
]


def nan_at(stored: torch.Tensor, row: int) -> torch.Tensor:
    stored.view(torch.uint8)[row, 9] = 0x7F
    return stored


@pytest.mark.parametrize(("name", "change", "line"), DAMAGES)
def test_stage_04_refuses_states_that_are_not_the_samples(
    captured: dict[str, EngineSettings], tmp_path: Path, name: str, change: Callable, line: str
) -> None:
    """Case H18 and its kin, in fp8: the line names the file, by its sample."""
    settings = captured["fp8"]
    record, config = Index(settings.output_dir).samples()[0], derive(settings.target, 64, [2, 4, 5])
    tensors = artifacts.load_tensors(artifacts.sample_path(settings.output_dir, 0))
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.to(tensors.get(name, changed).dtype).contiguous()
    if name == "input_ids":
        tensors[name] = tensors[name].int()
    path = artifacts.sample_path(tmp_path, 0)
    artifacts.save_tensors(path, tensors)
    with pytest.raises(UserError, match=rf"{path} is damaged: {line}.*; delete it and rerun stage 02"):
        load_sample(tmp_path, record, config)


# ----------------------------------------------------------------------------------------- large states


class Large(TransformersEngine):
    """States so large that the largest is some 1e5; final norm and lm_head make the same of them."""

    def _states(self) -> torch.Tensor:
        return super()._states() * 2**15.5


TRAINING = """
import os, runpy, sys
from eagle3.terminal import quiet_libraries
quiet_libraries()
import deepspeed, torch, transformers
torch.set_num_threads(1)
for arguments in {runs!r}:
    if not (child := os.fork()):
        sys.argv = ["{root}/04_train_draft.py", *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_states_beyond_float16_are_kept_and_trained_on(
    prepared: Path, tiny_target: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Case H19, in bfloat16 and in fp8: no cast to float16, a warning with the magnitude, 20 finite steps."""
    monkeypatch.setattr(engines, "open_engine", lambda name, settings, longest: Large(settings))
    prepared = write_prepared(tmp_path / "prepared", tiny_target, random_prompts([60] * 12))
    write_states(tmp_path, tiny_target)
    engine = Large(settings_for(tiny_target, tmp_path, dtype="bfloat16"))
    maxima = [states.abs().max().item() for states in states_of(engine, random_prompts([60] * 12))]
    runs = []
    for name in ("bfloat16", "fp8"):
        out = tmp_path / name
        extract.extract(prepared, "transformers", settings_for(tiny_target, out, dtype="bfloat16", **FORMS[name]))
        output, errors = capsys.readouterr()
        assert all(part.isfinite().all() for index in range(12) for part in states_of_file(out, index))
        assert 65504 < max(states_of_file(out, index)[0].abs().max() for index in range(12)) < 2e5
        [warning] = [line for line in errors.splitlines() if line.startswith("warning: ")]
        first = next(index for index in range(12) if maxima[index] > 65504)
        assert warning == (
            f"warning: sample {first} has states up to {maxima[first]:.3g}, more than float16 holds; they are stored "
            f"as {name}, which keeps them"
        )
        largest = max(maxima)
        assert f"{largest:.4g}" in next(line for line in output.splitlines() if "largest state" in line)
        arguments = ["--model-path", tiny_target, "--hidden-states-dir", out, "--vocab-map-dir", tmp_path / "vocab_map"]
        arguments += ["--output-dir", tmp_path / f"draft-{name}", "--epochs", 4, "--ttt-steps", 2, "--max-tokens", 128]
        runs.append(list(map(str, arguments)))
    code = TRAINING.format(runs=runs, root=REPOSITORY)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    losses = {name: losses_of(tmp_path / f"draft-{name}") for name in ("bfloat16", "fp8")}
    for loss in losses.values():
        assert len(loss) >= 20 and loss.isfinite().all() and loss[-4:].mean() < loss[:4].mean()
    assert torch.allclose(losses["bfloat16"], losses["fp8"], rtol=0.05)  # what fp8 costs here


def losses_of(draft: Path) -> torch.Tensor:
    """Loss of the first draft token at each optimizer step."""
    import json

    records = map(json.loads, (draft / "metrics.jsonl").read_text().splitlines())
    return torch.tensor([record["loss_by_step"][0] for record in records if record["kind"] == "train"])
