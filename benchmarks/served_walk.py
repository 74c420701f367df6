#!/usr/bin/env python3
"""Is the walk what a server counts? The drafts that real vLLM accepts, against the walk over the same answers.

    python benchmarks/served_walk.py --model-path M --draft OUT/draft/export --prompts FILE.jsonl --max-prompts 100

1. vLLM without the draft, greedy: each prompt's answer and K tokens beyond its end, where a server still drafts.
2. vLLM with the draft and K drafts: the answers again, and the engine's counters of accepted drafts by position.
3. The target's states of 1. (transformers engine of stage 02), and the walk of design section 4 over the answers with
   the training code's draft, read from the export.
In float32 on CPU the counts are equal up to near ties between draft tokens. Written to OUTPUT_DIR/served_walk.json.
"""

import argparse
import contextlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors import safe_open
from serve import read_prompts

from eagle3 import artifacts, served_check, terminal, vllm_runtime
from eagle3.capture import interface
from eagle3.capture.transformers_engine import TransformersEngine
from eagle3.draft.config import NORM_KEYS, SIZE_KEYS, derive
from eagle3.draft.loss import Teacher
from eagle3.draft.model import DraftModel
from eagle3.export import read_export, target_to_draft
from eagle3.served_check import Counts
from eagle3.states import Layout
from eagle3.target import Target, TargetHead, load_tokenizer, open_target
from eagle3.terminal import UserError
from eagle3.training.metrics import walk
from eagle3.training.supervision import make_batch


@dataclass(frozen=True)
class Answer:
    """A prompt, what the target writes after it, and how much of that is the answer; the rest lies beyond its end."""

    prompt: list[int]
    written: list[int]
    length: int


def answers_beyond_the_end(
    llm: Any, prompts: list[list[int]], ends: tuple[int, ...], max_new_tokens: int, drafts: int
) -> list[Answer]:
    """Greedy answers of at most `max_new_tokens` tokens with `drafts` more tokens each."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_new_tokens + drafts, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    answers = []
    for prompt, output in zip(prompts, outputs, strict=True):
        written = list(output.outputs[0].token_ids)
        end = next((n for n, token in enumerate(written, 1) if token in ends), max_new_tokens)
        length = min(end, max_new_tokens)
        answers.append(Answer(prompt, written[: length + drafts], length))
    return answers


@torch.no_grad()
def count_walk(
    answers: list[Answer], target: Target, draft: DraftModel, d2t: torch.Tensor, drafts: list[int], scratch: Path
) -> list[Counts]:
    """What servers would count that propose so many tokens a step."""
    layers = (*draft.config.aux_layers, target.num_layers)
    layout = Layout(layers, target.hidden_size, "float32", "float32", "float32")
    settings = interface.EngineSettings(target, layout, 1, scratch)
    head = TargetHead(target, torch.float32, "cpu", rows=torch.arange(len(d2t)) + d2t)
    to_draft = target_to_draft(d2t, target.vocab_size)
    counts = [Counts(0, 0, [0] * most) for most in drafts]
    with (
        contextlib.closing(TransformersEngine(settings)) as engine,
        terminal.progress(len(answers), "answer", "walking") as bar,
    ):
        for answer in answers:
            ids = torch.tensor(answer.prompt + answer.written, dtype=torch.int32)  # [T]
            (scored,) = engine.score([ids.tolist()], 1)
            mask = torch.arange(len(ids)) >= len(answer.prompt)  # [T]
            sample = {
                "input_ids": ids,
                "loss_mask": mask,
                "aux_hidden": scored.states[:, :-1].flatten(1),
                "final_hidden": scored.states[:, -1][mask],
            }
            batch = make_batch([sample], max(drafts), "served")
            output = draft(batch, Teacher(head(batch.final_hidden)))
            wanted = to_draft[batch.labels.clamp(min=0)]
            right = batch.valid & (output.predicted == wanted) & (wanted >= 0)  # [K, R]
            accepted = right.long().cumprod(0).sum(0).tolist()  # of the starts after the answer's first token, ...
            for place, most in enumerate(drafts):
                taken = [min(count, most) for count in accepted]
                for start in walk(taken):
                    if start + 1 >= answer.length:  # so many tokens are out: the server has stopped
                        break
                    counts[place] += Counts(1, taken[start], [int(taken[start] > k) for k in range(most)])
            bar.update(1)
    return counts


def open_draft(target: Target, directory: Path) -> tuple[DraftModel, torch.Tensor]:
    """The draft of an export in float32, and its d2t, int64 [D]."""
    described = json.loads((directory / "config.json").read_text())
    keys = (*SIZE_KEYS, "rms_norm_eps", *NORM_KEYS, "rope_theta", "rope_scaling")
    stated = {key: described[key] for key in keys if key in described}
    size = described["draft_vocab_size"]
    config = derive(target, size, described["eagle_aux_hidden_state_layer_ids"], stated)
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        d2t = file.get_tensor("d2t") if size < target.vocab_size else torch.zeros(size, dtype=torch.int64)
    return read_export(directory, config).float(), d2t


def load(target: Target, log: Path, prompts: list[list[int]], tokens: int, *draft: Any) -> Any:
    """vLLM in float32 with room for `tokens` after each prompt; `draft` as in served_check.load."""
    length = min(max(map(len, prompts)) + tokens + 16, target.max_positions)
    return served_check.load(target, log, *draft, dtype="float32", max_model_len=length)


def plain_answers(
    target: Target, prompts: list[list[int]], drafts: int, max_new_tokens: int, log: Path
) -> list[Answer]:
    """What vLLM writes without a draft."""
    llm = load(target, log, prompts, max_new_tokens + drafts)
    try:
        return answers_beyond_the_end(llm, prompts, target.end_ids, max_new_tokens, drafts)
    finally:
        vllm_runtime.shutdown(llm)


def served(
    target: Target, draft: Path, sets: list[list[Answer]], drafts: int, max_new_tokens: int, log: Path
) -> list[tuple[int, Counts]]:
    """Of each set how many answers vLLM writes identically with the draft, and its counters."""
    llm = load(target, log, [one.prompt for answers in sets for one in answers], max_new_tokens + drafts, draft, drafts)
    from vllm import SamplingParams  # not before the output goes to the log

    results, before = [], Counts(0, 0, [0] * drafts)
    try:
        sampling = SamplingParams(temperature=0, max_tokens=max_new_tokens, detokenize=False)
        for answers in sets:
            outputs = llm.generate([{"prompt_token_ids": one.prompt} for one in answers], sampling, use_tqdm=False)
            identical = sum(
                list(output.outputs[0].token_ids) == answer.written[: answer.length]
                for answer, output in zip(answers, outputs, strict=True)
            )
            now = served_check.counters(llm)  # of the engine's whole life
            results.append((identical, now - before))
            before = now
    finally:
        vllm_runtime.shutdown(llm)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True, help="target: model directory or hub name")
    parser.add_argument("--draft", type=Path, required=True, help="export of stage 04")
    parser.add_argument(
        "--prompts", type=Path, action="append", required=True, help="jsonl as for benchmarks/serve.py, repeatable"
    )
    parser.add_argument(
        "--skip", type=int, default=0, help="prompts to leave out at the beginning, such as trained ones"
    )
    parser.add_argument("--max-prompts", type=int, default=100, help="of each set (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="(default %(default)s)")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3], help="drafts a step, several in turn (default 3)")
    parser.add_argument("--output-dir", type=Path, default=Path("output/served_walk"), help="(default %(default)s)")
    arguments = parser.parse_args()
    started = time.monotonic()
    if torch.cuda.is_available():
        raise UserError("this comparison needs float32 on CPU: set CUDA_VISIBLE_DEVICES=''")
    target = open_target(arguments.model_path, weights=True)
    tokenizer = load_tokenizer(target, trust_remote_code=False)
    most, skip = arguments.skip + arguments.max_prompts, arguments.skip
    sets = [read_prompts(path, tokenizer, most)[skip:] for path in arguments.prompts]
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    log, tokens = arguments.output_dir / "engine.log", arguments.max_new_tokens
    together = iter(
        plain_answers(target, [ids for prompts in sets for ids in prompts], max(arguments.drafts), tokens, log)
    )
    answers = [[next(together) for _ in prompts] for prompts in sets]
    draft, d2t = open_draft(target, arguments.draft)
    walks = [count_walk(ones, target, draft, d2t, arguments.drafts, arguments.output_dir) for ones in answers]
    results, rows = [], {}
    for place, drafts in enumerate(arguments.drafts):
        counted = served(target, arguments.draft, answers, drafts, tokens, log)
        for path, ones, walked, (identical, of_server) in zip(arguments.prompts, answers, walks, counted, strict=True):
            of_walk = walked[place]
            result = {"set": path.stem, "drafts": drafts, "prompts": len(ones), "identical_answers": identical}
            result["tokens"] = sum(answer.length for answer in ones)
            result |= {"served": vars(of_server) | of_server.report(), "walk": vars(of_walk) | of_walk.report()}
            results.append(result)
            artifacts.save_json(arguments.output_dir / "served_walk.json", results)
            rows[f"{path.stem}, {drafts} drafts"] = (
                f"tau {of_server.report()['tau']} served, {of_walk.report()['tau']} walked; by position "
                f"{of_server.by_position} of {of_server.drafts}, {of_walk.by_position} of {of_walk.drafts}; "
                f"{identical} of {len(ones)} answers identical"
            )
    terminal.summary("served and predicted", rows, started)


if __name__ == "__main__":
    terminal.quiet_libraries()
    terminal.run(main)
