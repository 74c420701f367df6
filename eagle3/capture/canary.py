"""The canary: captured states must reproduce the engine's own next-token distribution before anything is extracted.

A layer off by one, a norm applied twice or never, or the head of another model would train a draft against a wrong
teacher with no error anywhere. final norm + lm_head of the captured state N, computed here in float32, is compared
with the engine's own top-k log probabilities at every position of a few whole prompts.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from eagle3.capture import storing
from eagle3.capture.interface import Engine, EngineSettings, Fault, Scored
from eagle3.target import TargetHead
from eagle3.terminal import UserError

POSITIONS = 384  # prompts are taken until there are this many, or MAX_PROMPTS
MAX_PROMPTS = 16
MAX_TOKENS = 128  # prompts are cut to this: a prefix has the same states
TOP_K = 10

# Largest mean |difference of log probabilities|, as a fraction of the mean |logit| at the same tokens: rounding grows
# with the logits. Measured with SmolLM2-135M on vLLM 0.32: float32 3e-7, bfloat16 1.8e-3 (largest single one 1.5e-2 of
# the mean logit). Layer off by one: 0.33 and more; norm applied twice: 0.5 and more.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
SINGLE = 5  # one token may be off by this many times the tolerance of the mean


def choose_prompts(prompts: Iterable[list[int]]) -> list[list[int]]:
    """The first prompts, cut to MAX_TOKENS, until they hold POSITIONS tokens. Raises UserError when none is usable."""
    chosen: list[list[int]] = []
    for prompt in prompts:
        if len(prompt) >= 2:
            chosen.append(prompt[:MAX_TOKENS])
        if len(chosen) == MAX_PROMPTS or sum(map(len, chosen)) >= POSITIONS:
            break
    if not chosen:
        raise UserError(
            "the canary needs a sample of two tokens or more, and none is prepared; check stage 01's output"
        )
    return chosen


def check(engine: Engine, settings: EngineSettings, prompts: list[list[int]]) -> dict[str, Any]:
    """Compare and report: positions, differences relative to the logits' size, argmax agreement, size of the states.

    Raises UserError with the figures and the likely cause when the states are not what they should be.
    """
    scored: list[Scored] = []
    for one in engine.score(prompts, TOP_K):
        if isinstance(one, Fault):
            raise UserError(f"canary: {engine.name} {engine.version}: {one.reason} ({one.detail})")
        scored.append(one)
    states = torch.cat([one.states[:-1] for one in scored]).float()  # [P, L, H]
    top_ids = torch.cat([one.top_ids for one in scored])  # [P, k]
    top_logprobs = torch.cat([one.top_logprobs for one in scored])  # [P, k]

    head = TargetHead(settings.target, torch.float32, "cpu")
    report = _compare(head, states[:, -1], top_ids, top_logprobs, TOLERANCE[settings.layout.dtype])
    rms = states.square().mean(dim=(0, 2)).sqrt().tolist()
    report["state_rms"] = {
        str(layer): round(value, 3) for layer, value in zip(settings.layout.layers, rms, strict=True)
    }
    report["state_max"] = round(states.abs().max().item(), 1)
    if not report.pop("passed"):
        raise UserError(
            f"canary: final norm and lm_head of state {settings.layout.layers[-1]} do not give {engine.name} "
            f"{engine.version}'s own log probabilities: {describe(report)}; likely cause: "
            f"{_likely_cause(head, states, scored, settings)}; nothing was extracted"
        )
    for i, (one, following) in enumerate(itertools.pairwise(settings.layout.layers)):
        if torch.equal(states[:, i], states[:, i + 1]):
            raise UserError(
                f"canary: {engine.name} {engine.version} gives the same states for layers {one} and {following}; "
                "choose other --aux-layers or another engine version"
            )
    report["stored"] = storing.measure(head, states, settings.layout)
    return report


def describe(report: dict[str, Any]) -> str:
    """The figures of a report in one line."""
    return (
        f"{report['positions']} positions, mean difference {report['mean']:.1e} of the logits' size (limit "
        f"{report['tolerance']:.0e}), largest {report['largest']:.1e} (limit {SINGLE * report['tolerance']:.0e}), "
        f"argmax equal at {report['argmax_equal']} of {report['argmax_clear']} clear ones"
    )


def _compare(
    head: TargetHead, states: torch.Tensor, top_ids: torch.Tensor, top_logprobs: torch.Tensor, tolerance: float
) -> dict[str, Any]:
    """Our distribution of states [P, H] against the engine's top k [P, k]."""
    logits = head(states)  # [P, V]
    size = logits.gather(1, top_ids).abs().mean()
    difference = (logits.log_softmax(-1).gather(1, top_ids) - top_logprobs).abs() / size  # [P, k]
    # rounding may swap two tokens that are closer than what a single log probability may be off
    clear = (top_logprobs[:, 0] - top_logprobs[:, 1]) / size > SINGLE * tolerance  # [P]
    equal = (logits.argmax(-1) == top_ids[:, 0]) & clear
    mean, largest = difference.mean().item(), difference.max().item()
    argmax_clear, argmax_equal = int(clear.sum()), int(equal.sum())
    return {
        "passed": mean <= tolerance and largest <= SINGLE * tolerance and argmax_equal == argmax_clear,
        "positions": len(states),
        "mean": mean,
        "largest": largest,
        "tolerance": tolerance,
        "argmax_equal": argmax_equal,
        "argmax_clear": argmax_clear,
    }


def _likely_cause(head: TargetHead, states: torch.Tensor, scored: list[Scored], settings: EngineSettings) -> str:
    """Which known fault explains states [P, L, H] that failed."""
    top_ids = torch.cat([one.top_ids for one in scored])
    top_logprobs = torch.cat([one.top_logprobs for one in scored])
    for i, layer in enumerate(settings.layout.layers[:-1]):
        if _compare(head, states[:, i], top_ids, top_logprobs, TOLERANCE[settings.layout.dtype])["passed"]:
            return f"the layers come in another order, the last one stands in place of layer {layer}"
    normed = (states[:, -1] / head.norm).square().mean(-1).sqrt()  # [P], 1 where the norm has been applied
    if ((normed - 1).abs() < 0.05).float().mean() > 0.9:
        return "the engine gave the last state after the final norm instead of before it"
    return (
        "the engine drops or shifts the last layer id (an old vLLM does for DeepSeek and Kimi targets), or lm_head and "
        "final norm in the model directory are not the ones that the engine runs"
    )
