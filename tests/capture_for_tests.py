"""Settings, prompts and stage 01 directories for capture engines, and deliberately broken captures."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from eagle3 import artifacts
from eagle3.artifacts import Index
from eagle3.capture.interface import Engine, EngineSettings, Sample, Scored
from eagle3.model_files import tokenizer_hash
from eagle3.states import Layout
from eagle3.target import default_aux_layers, open_target


def settings_for(model: Path, output_dir: Path, **changes) -> EngineSettings:
    """Settings of a small run; `layers`, `dtype`, `aux` and `final` go into the layout."""
    target = open_target(str(model))
    layers = changes.pop("layers", (*default_aux_layers(target.num_layers), target.num_layers))
    dtype = changes.pop("dtype", "float32")
    layout = Layout(layers, target.hidden_size, dtype, changes.pop("aux", dtype), changes.pop("final", dtype))
    output_dir.mkdir(parents=True, exist_ok=True)
    defaults = {"target": target, "layout": layout, "batch_tokens": 512, "output_dir": output_dir}
    return EngineSettings(**(defaults | changes))


def states_of(engine: Engine, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Whole states of each prompt, [T, L, H]."""
    return [scored.states for scored in engine.score(prompts, 1)]


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(20, 40000, (length,), generator=generator).tolist() for length in lengths]


def samples_of(prompts: list[list[int]], first: int = 0) -> Iterator[Sample]:
    """Prepared samples numbered from `first`; the second half of each prompt is supervised."""
    for i, prompt in enumerate(prompts, first):
        ids = torch.tensor(prompt, dtype=torch.int32)
        yield Sample({"index": i}, ids, torch.arange(len(prompt)) >= len(prompt) // 2)


def write_prepared(directory: Path, model: Path, prompts: list[list[int]], **manifest) -> Path:
    """A stage 01 directory: the second half of each prompt is supervised. More prompts than before are appended."""
    present = Index(directory).samples()
    with Index(directory).appending() as index:
        for i, prompt in enumerate(prompts):
            if i in present:
                continue
            mask = torch.arange(len(prompt)) >= len(prompt) // 2
            tensors = {"input_ids": torch.tensor(prompt, dtype=torch.int32), "loss_mask": mask}
            size = artifacts.save_tensors(artifacts.sample_path(directory, i), tensors)
            facts = {"tokens": len(prompt), "supervised": int(mask.sum()), "conversation": i}
            index.add(index=i, **facts, source="test", dataset="test", bytes=size, status="done")
    fingerprint = {"target": open_target(str(model)).config_hash, "tokenizer": tokenizer_hash(model)}
    artifacts.write_manifest(directory, "01", fingerprint, **({"complete": True, "samples": len(prompts)} | manifest))
    return directory


class Altered:
    """An engine whose states are changed on their way out."""

    def __init__(self, engine, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._engine = engine
        self._change = change
        self.name, self.version = engine.name, engine.version

    def score(self, prompts: list[list[int]], k: int) -> list[Scored]:
        scored = self._engine.score(prompts, k)
        return [Scored(self._change(one.states.clone()), one.top_ids, one.top_logprobs) for one in scored]


def post_norm(norm: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(states: torch.Tensor) -> torch.Tensor:
        last = states[:, -1].float()
        states[:, -1] = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + 1e-6) * norm
        return states

    return change


def swap_layers(first: int, second: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(states: torch.Tensor) -> torch.Tensor:
        states[:, [first, second]] = states[:, [second, first]]
        return states

    return change


def replace_layer(slot: int, by: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(states: torch.Tensor) -> torch.Tensor:
        states[:, slot] = states[:, by]
        return states

    return change
