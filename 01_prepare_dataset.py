#!/usr/bin/env python3
"""Stage 01: turn conversations into token ids and loss masks for one target.

Each conversation is rendered with the target's chat template, tokenised, and cut to --max-seq-len tokens. The loss
mask covers what the target would generate: each answer with its end-of-turn token, nothing else. Rows that cannot be
used are skipped and counted by reason. Needs no GPU and not the target's weights.

Input:   a hub dataset, or local .json, .jsonl or .parquet files, with ShareGPT rows
         {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
         or chat rows {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
Output:  OUTPUT_DIR/samples/*/*.pt (input_ids, loss_mask), token_freq.pt, token_freq_by_source.pt, index.jsonl,
         manifest.json
Rerun:   the same command continues where it stopped; with a larger --max-samples it adds samples.

Example:
    python 01_prepare_dataset.py --model-path MODEL --output-dir OUT/prepared \\
        --dataset mlabonne/open-perfectblend --max-samples 10 --max-seq-len 512
"""

import argparse
import time
from pathlib import Path

from eagle3 import terminal


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True, help="target: model directory or hub name")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the samples go")
    parser.add_argument(
        "--dataset",
        default="mlabonne/open-perfectblend",
        help="hub name, a .json, .jsonl or .parquet file, or a directory of such files (default: %(default)s)",
    )
    parser.add_argument("--split", default="train", help="split of a hub dataset (default: %(default)s)")
    parser.add_argument("--max-samples", type=int, help="stop after this many samples written (default: all)")
    parser.add_argument(
        "--max-seq-len", type=int, help="tokens a sample at most (default: 2048, or the target's positions if fewer)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the tokenizer code of --model-path")
    arguments = parser.parse_args()
    if arguments.max_samples is not None and arguments.max_samples < 1:
        parser.error(f"--max-samples {arguments.max_samples}: expected at least 1")
    if arguments.max_seq_len is not None and arguments.max_seq_len < 2:
        parser.error(f"--max-seq-len {arguments.max_seq_len}: expected at least 2")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    started = time.monotonic()
    from eagle3.conversations import open_dataset
    from eagle3.prepare import prepare
    from eagle3.target import load_tokenizer, open_target

    target = open_target(arguments.model_path)
    dataset = open_dataset(arguments.dataset, arguments.split)
    tokenizer = load_tokenizer(target, trust_remote_code=arguments.trust_remote_code)
    totals = prepare(
        target,
        tokenizer,
        dataset,
        arguments.output_dir,
        max_samples=arguments.max_samples,
        max_seq_len=arguments.max_seq_len,
    )
    if totals is None:
        return
    rows: dict[str, object] = {
        "samples": f"{totals.samples:,} in {arguments.output_dir}",
        "tokens": f"{totals.tokens:,}",
        "assistant tokens": f"{totals.supervised:,} ({totals.supervised / totals.tokens:.1%}), "
        "answers with their end-of-turn token",
        "duplicate rows": f"{totals.duplicates:,}",
        "trimmed rows": f"{totals.trimmed:,}",
        "skipped rows": f"{totals.skipped_rows:,}",
    }
    rows |= {f"  {reason}": f"{count:,}, first at {place}" for reason, (count, place) in totals.skipped.items()}
    terminal.summary("stage 01: dataset prepared", rows, started)
    if totals.skipped_rows > totals.samples:
        terminal.warn("more rows were skipped than used; check the reasons above before going on")


if __name__ == "__main__":
    terminal.quiet_libraries()
    terminal.run(main)
