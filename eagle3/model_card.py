"""The export's README.md: what the draft is, what it was trained on, how to serve it."""

import os
from typing import Any

from eagle3.draft.config import NORM_KEYS, DraftConfig
from eagle3.target import Target

MLA_NOTE = """- The target has MLA, the draft plain attention: SGLang is told a backend, `fa3` on Hopper, else `triton`.
  vLLM chooses one unless `--attention-backend` names one; then add `"attention_backend": "FLASH_ATTN"` to the JSON.
"""


def model_card(
    target: Target,
    config: DraftConfig,
    training: dict[str, Any],
    report: dict[str, Any] | None,
    sources: list[str],
    longest: int,
    note: str | None,
) -> str:
    """Markdown. `training` are the options of the run, `report` the held-out figures of the trained draft, `longest`
    the tokens of the longest conversation it was trained on."""
    name = target.directory.name if os.path.isabs(target.name) else target.name
    steps = training["ttt_steps"]
    drafts = min(steps, 3)
    norms = [f"`{key}`" for key in NORM_KEYS if getattr(config, key)]
    backend = mla = ""
    if target.config.get("kv_lora_rank"):
        backend = " --speculative-draft-attention-backend fa3"
        mla = MLA_NOTE
    caveat = f"> **{note}**\n\n" if note else ""
    if report:
        lines = [
            f"- acceptance length tau (greedy walk, {steps} drafts): **{report['tau']}**, "
            f"over {report['walk_starts']} starts",
            f"- tau by number of drafts, 1 to {steps}: {report['tau_by_drafts']}",
            f"- acceptance by position: {report['acceptance_by_position']}",
            f"- expected when sampling at temperature 1, an estimate: {report['tau_sampled_estimate_by_drafts']}",
            f"- tau by tokens before the draft: {report['tau_by_tokens_before']}",
            f"- steps that end at a token outside the draft vocabulary: {report['lost_to_vocabulary']:.1%}",
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

Their licences are not recorded here: look where each came from. Embedding and the start of lm_head are rows of the
target: its licence applies to them.

## Serving

    vllm serve {name} --speculative-config \\
        '{{"method": "eagle3", "model": "THIS_DIRECTORY", "num_speculative_tokens": {drafts}}}'

    python -m sglang.launch_server --model-path {name} --speculative-algorithm EAGLE3 \\
        --speculative-draft-model-path THIS_DIRECTORY --speculative-num-steps {drafts} \\
        --speculative-eagle-topk 1 --speculative-num-draft-tokens {drafts + 1} \\
        --speculative-draft-model-quantization unquant{backend}

- From vLLM 0.32 and SGLang 0.5.14 on: those two were checked for this layout and target, vLLM by serving small targets
  on CPU, SGLang by reading its source. Older ones were not.
- Only these servers load it: q, k and v take twice the hidden size, which transformers' generic classes do not know.
- Norms beyond EAGLE-3's: {", ".join(norms) or "none"}; `norm_before_residual` and `norm_before_fc` are off, for SGLang
  has neither.
- The draft is not quantised; without `unquant` SGLang would give it the target's `--quantization`.
{mla}- Trained on conversations of up to {longest} tokens; beyond, nothing was measured and acceptance tends to fall.
"""
