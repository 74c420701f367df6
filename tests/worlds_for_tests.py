"""Steps of real DeepSpeed engines that save, or continue what others saved; results as files OUT/NAME CASE.pt.

python worlds_for_tests.py MODEL STATES OUT NAME          # or under torchrun; STATES as states_for_tests.write_states

A step has six packs whatever the number of ranks. Without checkpoints in OUT two steps are taken and saved, and two
more are taken; with them two steps follow what was saved.
"""

import sys
from pathlib import Path

import bad_steps_for_tests
import torch
import torch.distributed as dist
from bad_steps_for_tests import PRECISIONS

from eagle3.training import engine, loop

PACKS = 6
CASES = [(dtype, zero) for dtype in PRECISIONS for zero in ("0", "1", "2")]


def whole(one: loop.Trainer) -> dict[str, torch.Tensor]:
    """Float32 masters, Adam's moments and its count of steps, each as one vector over all ranks, without padding."""
    optimizer, weights = one.engine.basic_optimizer, sum(p.numel() for p in one.model.parameters())
    masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    vectors = {"masters": torch.cat([parameter.detach().flatten() for parameter in masters])}
    for name in ("exp_avg", "exp_avg_sq"):
        vectors[name] = torch.cat([optimizer.state[parameter][name].flatten() for parameter in masters])
    if one.engine.zero_optimization() and one.world > 1:
        for name, vector in vectors.items():
            parts = [torch.empty_like(vector) for _ in range(one.world)]
            dist.all_gather(parts, vector)
            vectors[name] = torch.cat(parts)
    vectors = {name: vector[:weights].clone() for name, vector in vectors.items()}
    return vectors | {"steps": torch.stack([optimizer.state[parameter]["step"] for parameter in masters]).unique()}


def run(model: Path, states: Path, output: Path, dtype: str, zero: str) -> dict:
    one = bad_steps_for_tests.trainer(model, states, dtype, zero, output, PACKS // dist.get_world_size())
    packs = [[record] for record in one.train_records]

    def steps(*numbers: int) -> None:
        for number in numbers:
            places = [PACKS * number + micro * one.world + one.rank for micro in range(one.options.accumulation)]
            one._optimizer_step([one.source.batch(packs[place % len(packs)], "served") for place in places], 0)
            one.step += 1
            one.step_in_epoch += 1

    found = one.resume()
    if not found:
        steps(0, 1)
        one._save()
    at_checkpoint = whole(one)
    rate = one.schedule.get_last_lr()
    steps(2, 3)
    weights = {name: tensor.detach().clone() for name, tensor in one.model.named_parameters()}
    return {
        "found": found,
        "checkpoint": at_checkpoint,
        "rate": rate,
        "weights": weights,
        "rates": one.schedule.get_last_lr(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, states, out, name = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    with engine.distributed() as (rank, _):
        for dtype, zero in CASES:
            result = run(model, states, out / f"{dtype} {zero}", dtype, zero)
            if rank == 0:
                torch.save(result, out / f"{name} {dtype} {zero}.pt")
