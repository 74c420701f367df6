"""The draft with the highest tau so far: one file beside the checkpoints, in bf16 as an export has the weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from eagle3 import artifacts
from eagle3.draft.model import DraftModel
from eagle3.terminal import UserError, short


def write(path: Path, model: DraftModel, facts: dict[str, Any]) -> None:
    """Replace the file at once: a kill leaves the old one or the new one, each with its own facts (JSON)."""
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.named_parameters()}
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"facts": json.dumps(facts)})
    with artifacts.atomic_file(path) as file:
        file.write(content)


def read(path: Path) -> dict[str, Any] | None:
    """The facts, None when there is no file. Raises UserError when it is damaged."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()["facts"])
    except (SafetensorError, TypeError, KeyError, ValueError) as error:
        raise UserError(
            f"{path}, the draft with the highest tau so far, is damaged ({short(error)}); delete it, then the best of "
            "what is still to come is exported"
        ) from error


def load(path: Path, model: DraftModel) -> None:
    """Put the weights into `model`, strictly: no missing and no extra tensor."""
    with safe_open(path, framework="pt") as file:
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()}, strict=True)  # noqa: SIM118
