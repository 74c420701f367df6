"""Which draft starts count, and batches built from samples of stage 02.

Positions of one document, with the assistant turn in brackets (t is a draft start, step k predicts x[t+2+k]):

    x      p0  p1  p2 [a3  a4  a5  a6]  p7
    k = 0           t=2 -> a4 ... t=4 -> a6     x[t+1] is the first token the target sampled itself
    k = 1           t=2 -> a5, t=3 -> a6        nothing is drafted after the end-of-turn token a6

served: (t, k) counts if x[t+1] .. x[t+2+k] are all tokens of one assistant turn, which is what a server drafts.
shifted-mask: (t, k) counts if x[t+1+k] is supervised, as speculators 0.9 does.
"""

from pathlib import Path

import torch

from eagle3 import artifacts
from eagle3.draft.config import DraftConfig
from eagle3.draft.model import Batch
from eagle3.states import all_finite
from eagle3.terminal import UserError

SUPERVISION = ("served", "shifted-mask")


def turn_ids(loss_mask: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Number of the assistant turn at each position, int64 [T]; 0 outside. A turn ends with its run or document."""
    before = torch.zeros_like(loss_mask)
    before[1:] = loss_mask[:-1] & (documents[1:] == documents[:-1])
    return torch.where(loss_mask, (loss_mask & ~before).cumsum(0), 0)


def valid_steps(loss_mask: torch.Tensor, documents: torch.Tensor, steps: int, supervision: str) -> torch.Tensor:
    """bool [steps, T]: whether start t counts at step k, by the rules above. loss_mask bool [T], documents [T]."""
    length = loss_mask.shape[0]
    turns = turn_ids(loss_mask, documents)
    valid = torch.zeros(steps, length, dtype=torch.bool)
    for step in range(steps):
        if supervision == "served":
            reach = step + 2  # the drafted token lies this far ahead of t
            if length <= reach:
                continue
            first, drafted = turns[1 : length - step - 1], turns[reach:]
            same_document = documents[:-reach] == documents[reach:]
            valid[step, :-reach] = (first > 0) & (first == drafted) & same_document
        else:
            reach = step + 1
            if length <= reach:
                continue
            valid[step, :-reach] = loss_mask[reach:] & (documents[:-reach] == documents[reach:])
    return valid


def make_batch(samples: list[dict[str, torch.Tensor]], steps: int, supervision: str) -> Batch:
    """Pack samples (stage 02's tensors) into one batch of `steps` TTT steps; no padding."""
    lengths = torch.tensor([sample["input_ids"].shape[0] for sample in samples])
    input_ids = torch.cat([sample["input_ids"] for sample in samples]).long()  # [T]
    loss_mask = torch.cat([sample["loss_mask"] for sample in samples])  # [T]
    documents = torch.repeat_interleave(torch.arange(len(samples)), lengths)  # [T]
    positions = torch.cat([torch.arange(int(length)) for length in lengths])  # [T]
    valid = valid_steps(loss_mask, documents, steps, supervision)  # [K, T]
    rows = valid.any(0).nonzero()[:, 0]  # [R]
    valid = valid[:, rows]
    last = input_ids.shape[0] - 1
    reach = rows[None] + torch.arange(steps)[:, None] + 1  # [K, R], position t+1+k
    embedded, embedded_index = reach.clamp(max=last).unique(return_inverse=True)  # [U], [K, R]
    place = loss_mask.cumsum(0) - 1  # row of final_hidden at a supervised position
    teacher_index = torch.where(valid, place[reach.clamp(max=last)], 0)
    drafted = (reach + 1).clamp(max=last)
    has_label = (reach < last) & (documents[drafted] == documents[rows][None])
    labels = torch.where(has_label, input_ids[drafted], -1)
    supervised = loss_mask.nonzero()[:, 0]  # [S]
    after = (supervised + 1).clamp(max=last)
    return Batch(
        input_ids=input_ids,
        positions=positions,
        documents=documents,
        aux_hidden=torch.cat([sample["aux_hidden"] for sample in samples]),
        final_hidden=torch.cat([sample["final_hidden"] for sample in samples]),
        rows=rows,
        valid=valid,
        teacher_index=teacher_index,
        reach=reach.clamp(max=last),
        embedded=embedded,
        embedded_index=embedded_index,
        labels=labels,
        following=torch.where(documents[after] == documents[supervised], input_ids[after], -1).masked_fill(
            after == supervised, -1
        ),
        aux_scale=torch.cat([sample["aux_scale"] for sample in samples]) if "aux_scale" in samples[0] else None,
        final_scale=torch.cat([sample["final_scale"] for sample in samples]) if "final_scale" in samples[0] else None,
    )


def empty_batch(config: DraftConfig, steps: int) -> Batch:
    """A batch of two tokens of which nothing counts, for a rank that has no rows left.

    It runs the whole model: DeepSpeed reduces gradients in the order backward makes them, which must be the same on
    every rank.
    """
    zeros = torch.zeros(steps, 1, dtype=torch.long)
    return Batch(
        input_ids=torch.zeros(2, dtype=torch.long),
        positions=torch.arange(2),
        documents=torch.zeros(2, dtype=torch.long),
        aux_hidden=torch.zeros(2, len(config.aux_layers) * config.hidden_size),
        final_hidden=torch.zeros(1, config.hidden_size),
        rows=torch.zeros(1, dtype=torch.long),
        valid=torch.zeros(steps, 1, dtype=torch.bool),
        teacher_index=zeros,
        reach=zeros + 1,
        embedded=torch.ones(1, dtype=torch.long),
        embedded_index=zeros,
        labels=zeros - 1,
        following=torch.tensor([-1]),
    )


def load_sample(directory: Path, record: dict, config: DraftConfig) -> dict[str, torch.Tensor]:
    """Read one sample of stage 02 and check it against its index record and the draft's widths.

    Raises UserError naming the file where lengths, widths or ids are off, or a state is not finite.
    """
    sample = artifacts.load_sample(directory, "02", record, config.vocab_size)
    aux = len(config.aux_layers)
    widths = {"aux_hidden": (aux * config.hidden_size,), "final_hidden": (config.hidden_size,)}
    widths |= {"aux_scale": (aux,), "final_scale": ()}  # of fp8
    for name, width in widths.items():
        if (tensor := sample.get(name)) is None:
            continue
        if tensor.shape[1:] != width or not all_finite(tensor):
            found = "not finite" if tensor.shape[1:] == width else f"{tensor.shape[-1]} wide, expected {width[-1]}"
            path = artifacts.sample_path(directory, record["index"])
            raise UserError(f"{path} is damaged: {name} is {found}; delete it and rerun stage 02")
    return sample
