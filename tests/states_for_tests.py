"""Artifacts of stages 02 and 03 in their real layout, with random states, for tests of stage 04."""

from collections.abc import Collection
from pathlib import Path

import torch

from eagle3 import artifacts
from eagle3.model_files import tokenizer_hash
from eagle3.target import open_target

AUX_LAYERS = [2, 4, 5]


def write_states(
    directory: Path,
    model: Path,
    count: int = 12,
    draft_vocab_size: int = 64,
    seed: int = 0,
    unsupervised: Collection[int] = (),
) -> None:
    """hidden_states/ and vocab_map/ under `directory` for the target `model`; ids come from 100 frequent ones.

    The samples `unsupervised` have no assistant token.
    """
    target = open_target(str(model), weights=True)
    generator = torch.Generator().manual_seed(seed)
    states = directory / "hidden_states"
    this = {"target": target.config_hash, "tokenizer": tokenizer_hash(model)}
    made_from = this | {"layers": [*AUX_LAYERS, target.num_layers]}
    with artifacts.Index(states).appending() as index:
        for number in range(count):
            tokens = int(torch.randint(30, 60, (1,), generator=generator))
            ids = torch.randint(0, 100, (tokens,), generator=generator, dtype=torch.int32)
            mask = torch.zeros(tokens, dtype=torch.bool)
            mask[10:20] = True
            mask[25 : tokens - 1] = True
            if number in unsupervised:
                mask[:] = False
            hidden = target.hidden_size
            size = artifacts.save_tensors(
                artifacts.sample_path(states, number),
                {
                    "input_ids": ids,
                    "loss_mask": mask,
                    "aux_hidden": torch.randn(tokens, len(AUX_LAYERS) * hidden, generator=generator),
                    "final_hidden": torch.randn(int(mask.sum()), hidden, generator=generator),
                },
            )
            index.add(
                index=number,
                tokens=tokens,
                supervised=int(mask.sum()),
                ids=artifacts.ids_digest(ids),
                source="made for tests",
                dataset="made for tests",
                conversation=f"made:{number}",
                bytes=size,
                status="done",
            )
    artifacts.write_manifest(states, "02", made_from, aux_layers=AUX_LAYERS, samples=count, complete=True)

    ids = torch.cat([torch.arange(0, 2 * draft_vocab_size - 20, 2), torch.arange(1, 20, 2)]).unique()
    assert ids.numel() == draft_vocab_size
    mark = torch.zeros(target.vocab_size, dtype=torch.bool)
    mark[ids] = True
    vocab = directory / "vocab_map"
    artifacts.save_tensors(vocab / "vocab_map.pt", {"d2t": ids - torch.arange(draft_vocab_size), "t2d": mark})
    artifacts.write_manifest(vocab, "03", this | {"draft_vocab_size": draft_vocab_size})
