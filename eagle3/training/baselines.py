"""What a draft that has learned nothing reaches on the held-out conversations."""

from pathlib import Path
from typing import Any

import torch

from eagle3 import artifacts
from eagle3.draft.model import StepOutput
from eagle3.training.metrics import Acceptance, measure
from eagle3.training.supervision import make_batch


def most_frequent_token(
    directory: Path, held_out: list[dict[str, Any]], target_to_draft: torch.Tensor, steps: int
) -> dict[str, Any]:
    """Figures of a draft that always says the same token: that which the held-out answers have most often.

    Being picked from them, it is the best of its kind. target_to_draft: int64 [V], -1 outside the draft vocabulary.
    No states are read. A report as of metrics.Acceptance, without a loss, which is infinite.
    """
    batches = []
    for record in held_out:
        sample = artifacts.load_fields(artifacts.sample_path(directory, record["index"]), artifacts.PREPARED, "02")
        ids = {name: sample[name] for name in artifacts.PREPARED}
        nothing = {"aux_hidden": torch.empty(record["tokens"], 0), "final_hidden": torch.empty(record["supervised"], 0)}
        batches.append(make_batch([ids | nothing], steps, "served"))
    following = torch.cat([batch.labels[0][batch.valid[0]] for batch in batches])
    drafted = target_to_draft[following]
    counts = torch.bincount(drafted[drafted >= 0], minlength=1)
    token, sums = int(counts.argmax()), Acceptance(steps)
    for batch in batches:
        predicted = torch.full_like(batch.labels, token)
        measure(StepOutput(torch.zeros(steps), predicted), batch, target_to_draft, sums)
    report = sums.report()
    del report["loss_by_step"]
    return report | {"token": int((target_to_draft == token).nonzero()[0])}
