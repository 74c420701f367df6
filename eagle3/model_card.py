"""The export's README.md: what the draft is, what it was trained on, how to serve it."""

import os
from typing import Any

from eagle3.draft.config import DraftConfig
from eagle3.target import Target


def model_card(
    target: Target,
    config: DraftConfig,
    training: dict[str, Any],
    report: dict[str, Any] | None,
    sources: list[str],
    note: str | None,
) -> str:
    """Markdown. `training` are the options of the run, `report` the held-out figures of the trained draft."""
    name = target.directory.name if os.path.isabs(target.name) else target.name
    steps = training["ttt_steps"]
    caveat = f"> **{note}**\n\n" if note else ""
    if report:
        lines = [
            f"- acceptance length tau (greedy walk, {steps} drafts): **{report['tau']}**, "
            f"over {report['walk_starts']} starts",
            f"- acceptance by position: {report['acceptance_by_position']}",
            f"- accuracy by TTT step: {report['accuracy_by_step']}",
            f"- plain mean over positions (not what a server counts): {report['tau_plain_mean']}",
        ]
        measured = "\n".join(lines)
    else:
        measured = "No conversation was held out, so nothing was measured."
    return f"""---
base_model: {name}
library_name: vllm
tags: [eagle3, speculative-decoding]
---
# EAGLE-3 draft for {name}

{caveat}One Llama-type decoder layer over aux hidden states {list(config.aux_layers)} of the target (vLLM's numbering:
id i enters layer i), {config.draft_vocab_size} of {config.vocab_size} vocabulary ids, trained with {steps} TTT steps,
`{training["supervision"]}` supervision, lm_head {"trained" if training["train_lm_head"] else "frozen"}.

## Held-out figures

{measured}

## Data

{chr(10).join(f"- {source}" for source in sources)}

Embedding and the start of lm_head are rows of the target: its licence applies to them.

## Serving

    vllm serve {name} --speculative-config \\
        '{{"method": "eagle3", "model": "THIS_DIRECTORY", "num_speculative_tokens": {min(steps, 3)}}}'

    python -m sglang.launch_server --model-path {name} --speculative-algorithm EAGLE3 \\
        --speculative-draft-model-path THIS_DIRECTORY --speculative-num-steps {min(steps, 3)} \\
        --speculative-eagle-topk 1 --speculative-num-draft-tokens {min(steps, 3) + 1}
"""
