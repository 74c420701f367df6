#!/usr/bin/env python3
"""Stage 02: capture the target's hidden states at every token of the prepared samples.

Reads   the output directory of stage 01 (--prepared-dir) and the target model (--model-path)
Writes  manifest.json, index.jsonl, engine.log and samples/<index // 1000>/<index>.pt in --output-dir; a sample holds
        input_ids, loss_mask, aux_hidden (the aux layers at every token) and final_hidden (the last layer before the
        final norm, where loss_mask is true)

Before the first sample a canary checks that the captured states reproduce the engine's own log probabilities.
The same command again continues: finished samples are kept, missing or damaged ones are redone.

Example
    python 02_extract_hidden_states.py --model-path M --prepared-dir OUT/prepared --output-dir OUT/hidden_states
"""

import argparse
from pathlib import Path

from eagle3 import terminal
from eagle3.terminal import UserError


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True, help="target: model directory or hub name, as for stage 01")
    parser.add_argument("--prepared-dir", type=Path, required=True, help="output directory of stage 01")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the hidden states go")
    parser.add_argument(
        "--engine", choices=["auto", "vllm", "transformers"], default="auto", help="auto: vllm where it is installed"
    )
    parser.add_argument(
        "--aux-layers",
        help="ids such as 2,15,27; id i is the residual stream entering layer i (default: 2, N/2, N-3 of N layers)",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "bfloat16", "float32"],
        default="auto",
        help="of the engine and the states; auto is bfloat16 (float16 would overflow)",
    )
    parser.add_argument(
        "--batch-tokens",
        type=int,
        help="tokens in flight between engine and disk: bounds memory and staging (default: 32768 on GPU, 4096 on CPU)",
    )
    parser.add_argument("--tensor-parallel-size", type=int, help="vllm: GPUs to shard the target over (default: all)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="vllm: share of each GPU's memory")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto", help="transformers: where to run")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the Python code in the model directory")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    terminal.quiet_libraries()
    import torch

    from eagle3.capture.extract import extract
    from eagle3.capture.interface import EngineSettings
    from eagle3.target import open_target, parse_aux_layers, require_trust

    gpus = torch.cuda.device_count()
    batch_tokens = arguments.batch_tokens or (32768 if gpus else 4096)
    if batch_tokens < 1:
        raise UserError(f"--batch-tokens {batch_tokens}: expected a positive number")
    if not 0 < arguments.gpu_memory_utilization <= 1:
        raise UserError(
            f"--gpu-memory-utilization {arguments.gpu_memory_utilization}: expected a share between 0 and 1"
        )
    tensor_parallel_size = arguments.tensor_parallel_size or max(gpus, 1)
    if not 1 <= tensor_parallel_size <= max(gpus, 1):
        raise UserError(f"--tensor-parallel-size {tensor_parallel_size}: {gpus} GPUs are visible")
    if arguments.device == "cuda" and not gpus:
        raise UserError("--device cuda: no GPU is visible")

    require_trust(open_target(arguments.model_path), arguments.trust_remote_code)  # before weights are fetched
    target = open_target(arguments.model_path, weights=True)
    layers = [*parse_aux_layers(arguments.aux_layers, target.num_layers), target.num_layers]
    extract(
        arguments.prepared_dir,
        arguments.engine,
        EngineSettings(
            target=target,
            layers=tuple(layers),
            dtype="bfloat16" if arguments.dtype == "auto" else arguments.dtype,
            batch_tokens=batch_tokens,
            output_dir=arguments.output_dir,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=arguments.gpu_memory_utilization,
            trust_remote_code=arguments.trust_remote_code,
            device=("cuda" if gpus else "cpu") if arguments.device == "auto" else arguments.device,
        ),
    )


if __name__ == "__main__":
    terminal.run(main)
