"""What capture engines share: their settings, what they are given, what they give.

Layer ids follow vLLM: id i is the residual stream entering layer i, id N (the number of layers) is the last layer's
output before the final norm. Both engines give the same numbers within rounding.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from eagle3.artifacts import WHOLE, Shard, ids_digest
from eagle3.states import Layout
from eagle3.target import Target
from eagle3.terminal import UserError


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with."""

    target: Target
    layout: Layout
    batch_tokens: int  # prompt tokens between the engine's queue and the disk at a time
    output_dir: Path  # takes engine.log and the samples
    shard: Shard = WHOLE
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    trust_remote_code: bool = False
    device: str = "cpu"  # transformers only: "cpu" or "cuda"
    engine_arguments: dict[str, Any] = field(default_factory=dict)  # vLLM's own, over what this program sets

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.layout.dtype)

    @property
    def log(self) -> Path:
        """What the engine and its processes print."""
        return self.output_dir / self.shard.named("engine.log")


@dataclass(frozen=True)
class Sample:
    """One prepared sample on its way through an engine."""

    record: dict[str, Any]  # of stage 01's index
    input_ids: torch.Tensor  # int32 [T]
    loss_mask: torch.Tensor  # bool [T]

    @property
    def index(self) -> int:
        return self.record["index"]

    @property
    def digest(self) -> str:
        return ids_digest(self.input_ids)


@dataclass(frozen=True)
class Fault:
    """Why there is no file of a sample: reasons are counted, details are shown."""

    reason: str
    detail: str


@dataclass(frozen=True)
class Written:
    """A sample's file stands under its name."""

    bytes: int
    largest: float  # magnitude among all its states


@dataclass
class Scored:
    """States with the engine's own view of what comes next; row t is the distribution after token t."""

    states: torch.Tensor  # [T, L, H], layers ascending, on the CPU
    top_ids: torch.Tensor  # int64 [T-1, k], most probable first
    top_logprobs: torch.Tensor  # float32 [T-1, k]


class EngineDied(UserError):
    """The engine's process ended while it computed; another engine may take over."""


class Engine(Protocol):
    """A target loaded for capture."""

    name: str
    version: str

    def capture(self, samples: Iterable[Sample]) -> Iterator[tuple[Sample, Written | Fault]]:
        """Write the file of each sample under settings.output_dir, and say so, in the order in which they finish.

        `samples` is drawn from as room comes free, so memory stays bounded; a slow disk slows the engine. Raises
        EngineDied when the engine is gone, UserError or OSError when the disk does not take the files.
        """
        ...

    def score(self, prompts: list[list[int]], k: int) -> list[Scored | Fault]:
        """States of prompts (two tokens or more) with the k most probable next tokens at each position."""
        ...

    def close(self) -> None:
        """Free the device; what is being written is finished first."""
        ...
