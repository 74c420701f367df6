"""Steps of real DeepSpeed engines with a bad one among them, beside engines that never saw it. Prints JSON on rank 0.

python bad_steps_for_tests.py MODEL STATES        # or under torchrun; STATES as states_for_tests.write_states
"""

import copy
import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from eagle3.draft.config import derive
from eagle3.draft.model import Batch, DraftModel
from eagle3.export import draft_to_target, target_to_draft
from eagle3.target import TargetHead, open_target, read_embedding
from eagle3.training import engine, inputs, loop

ACCUMULATION = 2
PRECISIONS = ("float32", "bfloat16")
OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
ZERO = {str(stage): {"zero_optimization": {"stage": stage}} for stage in (0, 1, 2)}
ZERO["2-offload"] = OFFLOAD | {"zero_force_ds_cpu_optimizer": False}


def trainer(
    model: Path, states: Path, dtype: str, zero: str, output: Path = Path("unused"), accumulation: int = ACCUMULATION
) -> loop.Trainer:
    target = open_target(str(model), weights=True)
    opened = inputs.open_inputs(target, states / "hidden_states", states / "vocab_map")
    ids, precision, device = draft_to_target(opened.d2t), getattr(torch, dtype), engine.device()
    config = derive(target, ids.numel(), opened.aux_layers, None, [])
    head = TargetHead(target, precision, device, rows=ids)
    draft = DraftModel(config)
    draft.initialise(read_embedding(target), head.weight, 0)
    options = loop.TrainOptions(
        **dict.fromkeys(loop.TrainOptions.__dataclass_fields__)
        | {"epochs": 3, "learning_rate": 1e-2, "warmup_ratio": 0.0, "weight_decay": 0.1, "clip": 0.5, "max_tokens": 60}
        | {"max_rows": 60, "accumulation": accumulation, "ttt_steps": 2, "step_decay": 1.0, "loss": "kl", "seed": 0}
        | {"loss_norm": "per-step", "supervision": "served", "train_lm_head": True, "dtype": dtype}
        | {"schedule": "cosine"}
    )
    places = target_to_draft(opened.d2t, target.vocab_size)
    arguments = ZERO[zero], opened.directory, output, opened.records, [], places, 100
    return loop.Trainer(draft.to(precision), head, None, options, *arguments)


def values(one: loop.Trainer) -> list[torch.Tensor]:
    """Weights, float32 masters, Adam's state and step counts, learning rate."""
    optimizer = one.engine.basic_optimizer
    masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = [tensor for parameter in masters for tensor in optimizer.state[parameter].values()]
    rate = torch.tensor(one.schedule.get_last_lr())
    return [tensor.detach().clone() for tensor in (*one.model.parameters(), *masters, *state, rate)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def run(model: Path, states: Path, dtype: str, zero: str, fault: str) -> dict:
    seen, unseen = (trainer(model, states, dtype, zero) for _ in range(2))
    packs = [[record] for record in seen.train_records]

    def step(number: int) -> list[Batch]:
        places = [(ACCUMULATION * number + micro) * seen.world + seen.rank for micro in range(ACCUMULATION)]
        return [seen.source.batch(packs[place % len(packs)], "served") for place in places]

    for number in (0, 1):
        for one in (seen, unseen):
            one._optimizer_step(step(number), 0)
    before = values(seen)
    bad, state = step(2), copy.deepcopy(seen.guard.state())
    if fault == "loss" and seen.rank == seen.world - 1:  # one micro-batch of one rank
        bad[0] = dataclasses.replace(bad[0], aux_hidden=torch.full_like(bad[0].aux_hidden, torch.nan))
    if fault == "norm":
        seen.guard.restore(state | {"norms": [state["norms"][0] / 1000] * 20})
    _, outcome, suspects, _ = seen._optimizer_step(bad, 0)
    after = values(seen)
    seen.guard.restore(seen.guard.state() | {"norms": state["norms"]})
    unseen.schedule.step()
    counts = seen.guard.skipped, seen.guard.in_a_row
    for one in (seen, unseen):
        one._optimizer_step(step(3), 0)
    return {
        "fault": outcome.fault,
        "suspects": suspects,
        "counts": counts,
        "in_a_row_after_a_good_step": seen.guard.in_a_row,
        "untouched": same(before[:-1], after[:-1]),  # but for the learning rate
        "equal": same(values(seen), values(unseen)),
        "moved": not same(after, values(seen)),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with engine.distributed() as (rank, world):
        stages = ZERO if world == 1 else ("0", "2")
        cases = [(dtype, zero, fault) for dtype in PRECISIONS for zero in stages for fault in ("loss", "norm")]
        results = {" ".join(map(str, case)): run(Path(sys.argv[1]), Path(sys.argv[2]), *case) for case in cases}
        everyone = [None] * world
        dist.all_gather_object(everyone, results)
        if rank == 0:
            print(json.dumps(everyone))
