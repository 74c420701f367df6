"""The served check: real vLLM loads target and export, and must write the same tokens with and without the draft.

    python -m eagle3.served_check --model-path M --prepared-dir OUT/prepared --draft-dir OUT/draft

Prompts are those of the held-out conversations of stage 04, greedy. In float32 on CPU different tokens are an error;
on a GPU batch-dependent rounding can flip a near tie, so they are counted and shown. Writes served_check.json.
"""

import argparse
import os
import time
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from eagle3 import artifacts, terminal, vllm_runtime
from eagle3.target import Target, open_target, require_trust
from eagle3.terminal import UserError


def prompts_of(prepared: Path, indexes: list[int]) -> list[list[int]]:
    """Token ids of each sample up to its first supervised token."""
    prompts = []
    for index in indexes:
        sample = artifacts.load_tensors(artifacts.sample_path(prepared, index))
        prompts.append(sample["input_ids"][: int(sample["loss_mask"].int().argmax())].tolist())
    return prompts


def load(target: Target, log: Path, draft: Path | None = None, drafts: int = 0, **settings: Any) -> Any:
    """vLLM with the draft in directory `draft` proposing `drafts` tokens a step, or without one (vllm_runtime.load)."""
    if not torch.cuda.is_available() and target.config.get("kv_lora_rank"):
        # the CPU's MLA cache and a Llama draft's have no common block size; plain attention gives the same answers
        os.environ.setdefault("VLLM_MLA_DISABLE", "1")
    if draft:
        settings["speculative_config"] = {
            "method": "eagle3",
            "model": str(draft.resolve()),
            "num_speculative_tokens": drafts,
        }
    return vllm_runtime.load(target.directory, log, disable_log_stats=False, **settings)


def generate(
    llm: Any, prompts: list[list[int]], max_new_tokens: int, description: str
) -> tuple[list[list[int]], float]:
    """Greedy answers as token ids, and the seconds they took."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_new_tokens)
    started = time.monotonic()
    terminal.say(f"{description}: {len(prompts)} prompts")
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], time.monotonic() - started


@dataclass
class Counts:
    """Drafts and accepted tokens as a server counts them."""

    drafts: int = 0  # times that the draft proposed tokens
    accepted: int = 0
    by_position: list[int] = field(default_factory=list)  # drafts whose token k was accepted

    def __add__(self, other: "Counts") -> "Counts":
        pairs = zip_longest(self.by_position, other.by_position, fillvalue=0)
        return Counts(self.drafts + other.drafts, self.accepted + other.accepted, [a + b for a, b in pairs])

    def __sub__(self, other: "Counts") -> "Counts":
        pairs = zip_longest(self.by_position, other.by_position, fillvalue=0)
        return Counts(self.drafts - other.drafts, self.accepted - other.accepted, [a - b for a, b in pairs])

    def report(self) -> dict[str, Any]:
        """Acceptance length tau and the share of drafts whose token k was accepted."""
        drafts = max(self.drafts, 1)
        return {
            "tau": round(1 + self.accepted / drafts, 4),
            "acceptance_by_position": [round(count / drafts, 4) for count in self.by_position],
            "drafts": self.drafts,
        }


def counters(llm: Any) -> Counts:
    """The engine's own counters so far; all zero for an engine without a draft."""
    found = {metric.name: metric for metric in llm.get_metrics() if metric.name.startswith("vllm:spec_decode_")}
    if not found:
        return Counts()
    return Counts(
        int(found["vllm:spec_decode_num_drafts"].value),
        int(found["vllm:spec_decode_num_accepted_tokens"].value),
        [int(value) for value in found["vllm:spec_decode_num_accepted_tokens_per_pos"].values],
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model-path", required=True, help="target: model directory or hub name")
    parser.add_argument("--prepared-dir", type=Path, required=True, help="output of stage 01")
    parser.add_argument("--draft-dir", type=Path, required=True, help="output of stage 04")
    parser.add_argument("--num-speculative-tokens", type=int, default=3, help="drafts a step (default %(default)s)")
    parser.add_argument("--max-prompts", type=int, default=20, help="(default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(default %(default)s)")
    parser.add_argument("--tensor-parallel-size", type=int, help="default: all visible GPUs")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="share of each GPU's memory")
    parser.add_argument("--trust-remote-code", action="store_true")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    started = time.monotonic()
    if vllm_runtime.version() is None:
        raise UserError("the served check needs vLLM, which this environment lacks; run it where vLLM is installed")

    require_trust(open_target(arguments.model_path), arguments.trust_remote_code)  # before weights are fetched
    target = open_target(arguments.model_path, weights=True)
    trained = artifacts.read_manifest(arguments.draft_dir, "04")
    prepared = artifacts.read_manifest(arguments.prepared_dir, "01")
    if not trained["complete"]:
        raise UserError(f"{arguments.draft_dir}: stage 04 has not finished; rerun it")
    for directory, manifest in ((arguments.draft_dir, trained), (arguments.prepared_dir, prepared)):
        wanted = {"target": target.config_hash}
        artifacts.require_same(directory, manifest["fingerprint"], wanted, "give the --model-path it was made with")
    if not trained["held_out"]:
        raise UserError(f"{arguments.draft_dir}: no conversation was held out; train with --val-fraction above 0")
    prompts = prompts_of(arguments.prepared_dir, trained["held_out"][: arguments.max_prompts])

    on_cpu = not torch.cuda.is_available()
    dtype = "float32" if on_cpu else "bfloat16"
    log = arguments.draft_dir / "served_check.log"
    settings = {
        "dtype": dtype,
        "max_model_len": min(max(map(len, prompts)) + arguments.max_new_tokens + 16, target.max_positions),
        "trust_remote_code": arguments.trust_remote_code,
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "tensor_parallel_size": arguments.tensor_parallel_size or max(1, torch.cuda.device_count()),
    }
    plain = load(target, log, **settings)
    try:
        expected, plain_seconds = generate(plain, prompts, arguments.max_new_tokens, "without the draft")
    finally:
        vllm_runtime.shutdown(plain)
    export = arguments.draft_dir / "export"
    drafting = load(target, log, export, arguments.num_speculative_tokens, **settings)
    try:
        written, draft_seconds = generate(drafting, prompts, arguments.max_new_tokens, "with the draft")
        counts = counters(drafting)
    finally:
        vllm_runtime.shutdown(drafting)

    if not counts.drafts:
        raise UserError("vLLM made no draft at all; the answers are too short to tell anything, raise --max-new-tokens")
    report = counts.report()
    different = [place for place, (a, b) in enumerate(zip(expected, written, strict=True)) if a != b]
    report |= {
        "identical": len(prompts) - len(different),
        "prompts": len(prompts),
        "different_samples": [trained["held_out"][place] for place in different],
        "dtype": dtype,
        "engine": vllm_runtime.version(),
        "seconds_without": round(plain_seconds, 2),
        "seconds_with": round(draft_seconds, 2),
    }
    artifacts.save_json(arguments.draft_dir / "served_check.json", report)
    if different and on_cpu:
        first = different[0]
        place = next(i for i, (a, b) in enumerate(zip(expected[first], written[first], strict=False)) if a != b)
        raise UserError(
            f"served check: {len(different)} of {len(prompts)} answers differ with the draft, the first in sample "
            f"{trained['held_out'][first]} at token {place}: {expected[first][place]} without it, "
            f"{written[first][place]} with it"
        )
    terminal.summary(
        "served check: vLLM loads target and draft",
        {
            "identical answers": f"{report['identical']} of {report['prompts']} ({dtype}, greedy)",
            "tau": f"{report['tau']} over {report['drafts']} drafts of {arguments.num_speculative_tokens} tokens",
            "by position": report["acceptance_by_position"],
            "draft": arguments.draft_dir / "export",
        },
        started,
    )
    return 0


if __name__ == "__main__":
    terminal.quiet_libraries()
    terminal.run(main)
