#!/usr/bin/env python3
"""Stage 01: turn conversations into token ids and loss masks for one target.

Each conversation is rendered with the target's chat template and tokenised. The loss mask covers what the target would
generate: each answer with its end-of-turn token, nothing else. Rows that cannot be used are skipped, counted by reason
and listed in skipped.jsonl. Recorded answers need no GPU and not the target's weights; better ones, which the target
writes itself, need an engine here (--responses target) or a running vLLM server (--responses-endpoint URL).

Input:   a hub dataset, local files (.json, .jsonl, .jsonl.gz, .jsonl.zst, .parquet) or a directory of them, with rows
         {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
         {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
         {"prompt": "...", "response": "..."}    {"input_ids": [...], "loss_mask": [...]}
         The README lists all of them. `--dataset self` needs none: the target writes prompts and answers.
Output:  OUTPUT_DIR/samples/*/*.pt (input_ids, loss_mask), token_freq.pt, token_freq_by_source.pt, index.jsonl,
         skipped.jsonl, manifest.json; answers.jsonl where the target wrote the answers
Rerun:   the same command continues where it stopped; with a larger --max-samples it adds samples.

Examples:
    python 01_prepare_dataset.py --model-path MODEL --output-dir OUT/prepared \\
        --dataset mlabonne/open-perfectblend --max-samples 10 --max-seq-len 512
    python 01_prepare_dataset.py --model-path MODEL --output-dir OUT/prepared \\
        --dataset chats.jsonl.zst:0.7 --dataset org/name,config=en,split=train_sft:0.3 --shuffle 1 --show 3
    python 01_prepare_dataset.py --model-path MODEL --output-dir OUT/prepared \\
        --dataset prompts.jsonl --responses-endpoint http://localhost:8000 --temperature 0.6
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from eagle3 import terminal


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model-path", required=True, help="target: model directory or hub name")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the samples go")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the tokenizer code of --model-path")
    parser.add_argument("--max-samples", type=int, help="stop after this many samples written (default: all)")
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="print the first N samples, supervised in colour"
    )
    parser.add_argument("--num-proc", type=int, help="processes (default: all cores, fewer for little data)")

    rows = parser.add_argument_group("rows")
    rows.add_argument(
        "--dataset",
        action="append",
        metavar="D[:WEIGHT]",
        help="file, directory, hub name[,config=C][,split=S][,revision=R], or self: the target writes the prompts; "
        "several are mixed by their weights (default: mlabonne/open-perfectblend)",
    )
    rows.add_argument(
        "--columns", metavar="KIND=NAME,...", help="where the columns have other names: prompt=question,..."
    )
    rows.add_argument("--shuffle", type=int, metavar="SEED", help="random order of rows (default: as they are)")
    rows.add_argument("--keep-duplicates", action="store_true", help="keep rows with the text of an earlier one")
    rows.add_argument(
        "--exclude", type=Path, action="append", default=[], metavar="FILE", help="prompts never to train on: test sets"
    )
    rows.add_argument(
        "--max-skipped", type=float, default=0.5, metavar="SHARE", help="stop when more rows are unusable (%(default)s)"
    )

    length = parser.add_argument_group("length")
    length.add_argument(
        "--max-seq-len", type=int, help="tokens a sample at most (default: 2048, or the target's positions if fewer)"
    )
    length.add_argument(
        "--overflow",
        choices=("truncate", "split", "drop"),
        default="truncate",
        help="longer conversations are cut, split between turns, or dropped (default: %(default)s)",
    )

    answers = parser.add_argument_group("answers that the target writes")
    source = answers.add_mutually_exclusive_group()
    source.add_argument(
        "--responses",
        choices=("recorded", "target"),
        default="recorded",
        help="the answers of the data, or the target's own, by an engine loaded here (default: %(default)s)",
    )
    source.add_argument(
        "--responses-endpoint", metavar="URL", help="the target's own, by a vLLM server that runs already"
    )
    answers.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    answers.add_argument("--top-p", type=float, default=1.0, help="(default: %(default)s)")
    answers.add_argument("--max-new-tokens", type=int, default=1024, help="tokens of an answer at most (%(default)s)")
    answers.add_argument("--samples-per-prompt", type=int, default=1, help="answers to each row (default: %(default)s)")
    answers.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    answers.add_argument("--concurrency", type=int, default=64, help="requests to the server at once (%(default)s)")
    answers.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="the engine's")
    answers.add_argument("--tensor-parallel-size", type=int, help="GPUs of the engine (default: all visible ones)")
    answers.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="share of each GPU's memory")

    arguments = parser.parse_args()
    for name, least in (("max_samples", 1), ("max_seq_len", 2), ("num_proc", 1), ("samples_per_prompt", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} {value}: expected at least {least}")
    arguments.dataset = arguments.dataset or ["mlabonne/open-perfectblend"]
    arguments.on_policy = arguments.responses == "target" or arguments.responses_endpoint is not None
    if "self" in arguments.dataset and (
        len(arguments.dataset) > 1 or not arguments.on_policy or not arguments.max_samples
    ):
        parser.error(
            "--dataset self stands alone, with --max-samples and --responses target or --responses-endpoint URL"
        )
    return arguments


def main() -> None:
    arguments = parse_arguments()
    started = time.monotonic()
    from eagle3 import artifacts
    from eagle3.conversations import parse_columns
    from eagle3.exclusion import load_exclusion
    from eagle3.prepare.show import show
    from eagle3.prepare.stage import Options, prepare
    from eagle3.sources import open_datasets
    from eagle3.target import load_tokenizer, open_target

    target = open_target(arguments.model_path)
    options = Options(
        max_samples=arguments.max_samples,
        num_proc=arguments.num_proc,
        max_skipped=arguments.max_skipped,
        max_seq_len=arguments.max_seq_len,
        overflow=arguments.overflow,
        columns=parse_columns(arguments.columns) if arguments.columns else None,
        keep_duplicates=arguments.keep_duplicates,
        exclusion=load_exclusion(arguments.exclude) if arguments.exclude else None,
        trust_remote_code=arguments.trust_remote_code,
    )
    if options.exclusion:
        terminal.say(f"--exclude names {len(options.exclusion):,} prompts; rows that ask one of them are left out")
    own_prompts = arguments.dataset == ["self"]
    dataset = None if own_prompts else open_datasets(arguments.dataset, shuffle=arguments.shuffle)
    tokenizer = load_tokenizer(target, trust_remote_code=arguments.trust_remote_code)
    tally = None
    with artifacts.directory_lock(arguments.output_dir):
        if arguments.on_policy:
            from eagle3.prepare.on_policy import EngineChoice, answered
            from eagle3.responses.backends import Sampling

            sampling = Sampling(
                temperature=arguments.temperature,
                top_p=arguments.top_p,
                max_tokens=arguments.max_new_tokens,
                samples_per_prompt=arguments.samples_per_prompt,
                seed=arguments.seed,
            )
            choice = EngineChoice(
                endpoint=arguments.responses_endpoint,
                concurrency=arguments.concurrency,
                dtype=arguments.dtype,
                tensor_parallel_size=arguments.tensor_parallel_size,
                gpu_memory_utilization=arguments.gpu_memory_utilization,
            )
            dataset, tally = answered(target, tokenizer, dataset, arguments.output_dir, options, sampling, choice)
            options = replace(options, columns=None, exclusion=None)  # which were for the prompts
        totals = prepare(target, tokenizer, dataset, arguments.output_dir, options)
    for text in show(arguments.output_dir, tokenizer, arguments.show, target.vocab_size):
        terminal.say(text)
    if totals is None:
        return
    rows: dict[str, object] = {
        "samples": f"{totals.samples:,} in {arguments.output_dir}",
        "tokens": f"{totals.tokens:,}",
        "assistant tokens": f"{totals.supervised:,} ({totals.supervised / totals.tokens:.1%}), "
        "answers with their end-of-turn token",
        **(tally.lines() if tally else {}),
        "masks confirmed": f"{totals.checked:,} turns, by a second derivation",
        "cut rows": f"{totals.cut:,}",
        "trimmed rows": f"{totals.trimmed:,}",
        "skipped rows": f"{totals.skipped_rows:,}",
    }
    rows |= {f"  {reason}": f"{count:,}, first at {place}" for reason, (count, place) in totals.skipped.items()}
    if not arguments.on_policy:
        terminal.say(
            "recorded answers: those that the target writes itself usually gain acceptance (one public report: about "
            "10% for a 72B target); --responses target or --responses-endpoint URL"
        )
    terminal.summary("stage 01: dataset prepared", rows, started)
    if totals.unusable > totals.rows:
        terminal.warn("more rows were skipped than used; check the reasons above before going on")


if __name__ == "__main__":
    terminal.quiet_libraries()
    terminal.run(main)
