"""What storing states as fp8 loses, measured on the canary's prompts: the price is printed where it is chosen."""

from typing import Any

import torch

from eagle3.states import Layout, dequantise, quantise
from eagle3.target import TargetHead

ROWS = 64  # positions whose whole distributions are compared at a time


def measure(head: TargetHead, states: torch.Tensor, layout: Layout) -> dict[str, Any]:
    """Of states [P, L, H] as the engine gave them: what their stored form changes. Empty where nothing is fp8.

    aux_error: ||stored - state|| / ||state|| of each aux layer. teacher_kl: mean KL in nats of the teacher's
    distribution from stored final states to the one from the engine's; teacher_argmax_equal: share of positions.
    """
    report: dict[str, Any] = {}
    restored = _round_trip(states)
    if layout.aux == "fp8":
        error = (restored - states).float().norm(dim=(0, 2)) / states.float().norm(dim=(0, 2))  # [L]
        report["aux_error"] = {
            str(layer): round(one, 4) for layer, one in zip(layout.layers[:-1], error.tolist(), strict=False)
        }
    if layout.final == "fp8":
        kl, equal = 0.0, 0
        for start in range(0, len(states), ROWS):
            exact = head(states[start : start + ROWS, -1]).float().log_softmax(-1)  # [n, V]
            stored = head(restored[start : start + ROWS, -1]).float().log_softmax(-1)
            kl += (exact.exp() * (exact - stored)).sum().item()
            equal += int((exact.argmax(-1) == stored.argmax(-1)).sum())
        report |= {"teacher_kl": kl / len(states), "teacher_argmax_equal": round(equal / len(states), 4)}
    return report


def describe(report: dict[str, Any]) -> str:
    """A report in one line."""
    parts = []
    if "aux_error" in report:
        errors = ", ".join(f"{layer}: {error:.1%}" for layer, error in report["aux_error"].items())
        parts.append(f"aux states off by {errors} of their norm")
    if "teacher_kl" in report:
        parts.append(
            f"teacher KL {report['teacher_kl']:.1e} nats, same first choice at {report['teacher_argmax_equal']:.1%}"
        )
    return "; ".join(parts)


def _round_trip(states: torch.Tensor) -> torch.Tensor:
    """States [..., H] after fp8 and back, in the dtype they came in."""
    stored, scale = quantise(states, torch.linalg.vector_norm(states, float("inf"), dim=-1, dtype=torch.float32))
    return dequantise(stored, scale, states.dtype)
