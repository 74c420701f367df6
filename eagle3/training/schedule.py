"""The learning rate over the steps of a run, as a factor of its peak."""

import math

SCHEDULES = ("cosine", "linear", "wsd")
WSD_DECAY = 0.2  # share of the steps over which warm-up-stable-decay falls


def factor(schedule: str, step: int, warmup: int, total: int) -> float:
    """Factor of step 0, 1, ... of `total`, after a linear warm-up of at least one step.

    cosine falls to a tenth at `total`, linear to zero there; wsd stays at 1 and falls linearly to zero over the last
    fifth. The last step is `total` - 1, so none is taken with a rate of zero.
    """
    if step < warmup:
        return (step + 1) / warmup
    left = max(0, total - step)
    if schedule == "wsd":
        return min(1.0, left / max(1, math.ceil(WSD_DECAY * total)))
    left_of_all = left / max(1, total - warmup)
    if schedule == "linear":
        return left_of_all
    return 0.1 + 0.45 * (1 - math.cos(math.pi * left_of_all))
