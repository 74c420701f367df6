"""The content of a sample's file from states that come in pieces, several samples at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3 import artifacts
from eagle3.capture.interface import Written
from eagle3.capture.payload import Payload, fill, write
from eagle3.states import Layout, dequantise

WIDTH = 8


def layout_of(aux: str, final: str) -> Layout:
    return Layout((2, 4, 5, 8), WIDTH, "float32", aux, final)


def restored(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    stored, scale = tensors[f"{name}_hidden"], tensors.get(f"{name}_scale")
    if scale is None:
        return stored
    return dequantise(stored.view(*scale.shape, WIDTH), scale, torch.float32).view(stored.shape)


@settings(deadline=None, max_examples=60)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=4),
    room=st.integers(1, 40),
    stored=st.sampled_from(["float32", "fp8"]),
    seed=st.integers(0, 99),
)
def test_any_division_into_pieces_gives_each_sample_its_own_states(masks, room, stored, seed):
    generator = torch.Generator().manual_seed(seed)
    layout = layout_of(stored, stored)
    states = [torch.randn(len(mask), 4, WIDTH, generator=generator) for mask in masks]
    payloads = [
        Payload(layout, torch.arange(len(mask), dtype=torch.int32), torch.tensor(mask), pinned=False) for mask in masks
    ]
    pieces, parts = [], []
    for payload, own in zip(payloads, states, strict=True):
        for part in own.split(room):
            if parts and sum(map(len, parts)) + len(part) > room:
                assert fill(layout, pieces, torch.cat(parts)) is None
                pieces, parts = [], []
            pieces.append((payload, len(part)))
            parts.append(part)
    assert fill(layout, pieces, torch.cat(parts)) is None
    for payload, own, mask in zip(payloads, states, masks, strict=True):
        assert payload.fault() is None and payload.largest() == own.abs().max().item()
        tensors = payload.tensors()
        tolerance = 0 if stored == "float32" else own.abs().max().item() / 16  # three bits of mantissa
        assert (restored(tensors, "aux") - own[:, :-1].flatten(1)).abs().max() <= tolerance
        final = own[torch.tensor(mask), -1]
        assert restored(tensors, "final").shape == final.shape
        assert torch.allclose(restored(tensors, "final"), final, rtol=0, atol=tolerance)


def test_states_of_another_form_are_refused():
    layout = layout_of("float32", "float32")
    payload = Payload(layout, torch.arange(5, dtype=torch.int32), torch.ones(5, dtype=torch.bool), pinned=False)
    for states in (torch.zeros(4, 4, WIDTH), torch.zeros(5, 3, WIDTH), torch.zeros(5, 4, WIDTH).bfloat16()):
        fault = fill(layout, [(payload, 5)], states)
        assert fault.reason == "wrong shape" and "expected (5, 4, 8) torch.float32" in fault.detail
    assert payload.fault().detail == "states of 0 of 5 tokens"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("stored", ["float32", "fp8"])
def test_what_is_not_finite_is_not_written(value, stored, tmp_path):
    layout = layout_of(stored, stored)
    payload = Payload(layout, torch.arange(5, dtype=torch.int32), torch.zeros(5, dtype=torch.bool), pinned=False)
    states = torch.randn(5, 4, WIDTH)
    states[3, 1, 2] = value
    fill(layout, [(payload, 5)], states)
    fault = write(tmp_path / "samples" / "sample.pt", payload)
    assert (fault.reason, fault.detail) == ("states not finite", "layers [4]")
    assert not list(tmp_path.rglob("*.pt"))


def test_a_file_has_no_more_than_its_tensors(tmp_path):
    for stored in ("float32", "fp8"):
        layout = layout_of(stored, stored)
        payload = Payload(layout, torch.arange(300, dtype=torch.int32), torch.arange(300) >= 100, pinned=False)
        fill(layout, [(payload, 300)], torch.randn(300, 4, WIDTH))
        outcome = write(tmp_path / f"{stored}.pt", payload)
        assert isinstance(outcome, Written) and outcome.bytes == (tmp_path / f"{stored}.pt").stat().st_size
        content = sum(tensor.nbytes for tensor in artifacts.load_tensors(tmp_path / f"{stored}.pt").values())
        assert content < outcome.bytes <= layout.sample_bytes(300, 200)
