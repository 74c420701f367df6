"""Steps of real DeepSpeed engines where there is little or nothing to learn from; results of rank 0 as OUT.

python few_rows_for_tests.py MODEL STATES FEW OUT          # or under torchrun

STATES has unsupervised samples beside others; FEW has fewer samples than a step of eight micro-batches takes.
"""

import sys
from pathlib import Path

import torch
from bad_steps_for_tests import same, trainer, values

from eagle3.training import engine, loop


def weights(one: loop.Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in one.model.named_parameters()}


def nothing_between_two(model: Path, states: Path) -> dict:
    """A step without a supervised row between two others, beside an engine that never saw it."""
    seen, unseen = (trainer(model, states, "float32", "2") for _ in range(2))
    silent = [record for record in seen.train_records if not record["supervised"]]
    normal = [record for record in seen.train_records if record["supervised"]]

    def step(one: loop.Trainer, records: list[dict], number: int) -> tuple:
        place = 2 * (number * one.world + one.rank)
        pair = [records[(place + i) % len(records)] for i in (0, 1)]
        return one._optimizer_step([one.source.batch([record], "served") for record in pair], 0)

    for one in (seen, unseen):
        step(one, normal, 0)
    before = values(seen)
    loss, outcome, _, _ = step(seen, silent, 0)
    untouched = same(before[:-1], values(seen)[:-1])  # but for the learning rate
    unseen.schedule.step()
    for one in (seen, unseen):
        step(one, normal, 1)
    counted = seen.guard.skipped, seen.guard.in_a_row
    return {
        "loss": loss.tolist(),
        "fault": outcome.fault,
        "untouched": untouched,
        "counted": counted,
        "equal": same(values(seen), values(unseen)),
        "moved": not same(before, values(seen)),
    }


def one_rank_has_nothing(model: Path, states: Path) -> dict[str, torch.Tensor]:
    """Weights after two steps of rank 0's batches; another rank has unsupervised samples alone."""
    one = trainer(model, states, "float32", "2")
    wanted = [record for record in one.train_records if bool(record["supervised"]) == (one.rank == 0)]
    for number in (0, 2):
        one._optimizer_step([one.source.batch([wanted[(number + i) % len(wanted)]], "served") for i in (0, 1)], 0)
    return weights(one)


def fewer_than_a_step(model: Path, few: Path, output: Path) -> dict:
    one = trainer(model, few, "float32", "2", output, accumulation=8)
    before = weights(one)
    stopped = one.run()
    changed = [name for name, tensor in weights(one).items() if not torch.equal(tensor, before[name])]
    return {"stopped": stopped, "steps": one.step, "epochs": one.epoch, "changed": changed, "all": list(before)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, states, few, out = map(Path, sys.argv[1:])
    with engine.distributed() as (rank, world):
        results = {
            "between": nothing_between_two(model, states),
            "one rank": one_rank_has_nothing(model, states),
            "few": fewer_than_a_step(model, few, out.with_suffix("")),
        }
        if rank == 0:
            torch.save(results, out)
