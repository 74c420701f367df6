"""What capture engines share: their settings, what they give, and the check of it.

Layer ids follow vLLM: id i is the residual stream entering layer i, id N (the number of layers) is the last layer's
output before the final norm. Both engines give the same numbers within rounding.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from eagle3.target import Target


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with."""

    target: Target
    layers: tuple[int, ...]  # ids to capture, ascending; the last one is N
    dtype: str  # "bfloat16" or "float32": of weights, computation and states
    batch_tokens: int  # prompt tokens in the engine, or finished and not yet consumed, at a time
    output_dir: Path  # takes engine.log and vLLM's staging folder
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    trust_remote_code: bool = False
    device: str = "cpu"  # transformers only: "cpu" or "cuda"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes of one layer's state of one token."""
        return self.target.hidden_size * self.torch_dtype.itemsize


@dataclass
class Captured:
    """What an engine gives for one prompt; `fault` checks it before anything is believed."""

    token_ids: list[int]  # the tokens that the engine says it computed these states from
    states: torch.Tensor | None  # [T, L, H] on the CPU, layers ascending; None when the engine failed
    reason: str = ""  # why there are no states


@dataclass
class Scored:
    """Captured states with the engine's own view of what comes next; row t is the distribution after token t."""

    captured: Captured
    top_ids: torch.Tensor  # int64 [T-1, k], most probable first
    top_logprobs: torch.Tensor  # float32 [T-1, k]


class Engine(Protocol):
    """A target loaded for capture. Prompts are token ids; results come lazily, in the order of the prompts."""

    name: str
    version: str

    def capture(self, prompts: Iterable[list[int]]) -> Iterator[Captured]:
        """States of each prompt. `prompts` is drawn from as room comes free, so memory and staging stay bounded.

        A prompt that fails yields a Captured with a reason; raises UserError when the engine itself is gone.
        """
        ...

    def prompt_logprobs(self, prompts: Iterable[list[int]], k: int) -> Iterator[Scored]:
        """States of each prompt (two tokens or more) with the k most probable next tokens at each position."""
        ...

    def close(self) -> None:
        """Free the device and remove what was staged."""
        ...


def fault(captured: Captured, prompt: list[int], settings: EngineSettings) -> tuple[str, str] | None:
    """Why these are not the states of `prompt`: (reason, detail), or None when they are.

    Tokens are compared, never positions in a batch: states of another request must not pass.
    """
    states = captured.states
    if states is None:
        return "engine gave no states", captured.reason
    if captured.token_ids != prompt:
        return "states of other tokens", f"{len(captured.token_ids)} tokens for a prompt of {len(prompt)}"
    expected = (len(prompt), len(settings.layers), settings.target.hidden_size)
    if tuple(states.shape) != expected or states.dtype != settings.torch_dtype:
        return "wrong shape", f"{tuple(states.shape)} {states.dtype}, expected {expected} {settings.torch_dtype}"
    if not states.isfinite().all():
        bad = [layer for i, layer in enumerate(settings.layers) if not states[:, i].isfinite().all()]
        return "states not finite", f"layers {bad}"
    return None
