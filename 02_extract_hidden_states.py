#!/usr/bin/env python3
"""Stage 02: capture the target's hidden states at every token of the prepared samples.

Reads   the output directory of stage 01 (--prepared-dir) and the target model (--model-path)
Writes  manifest.json, index.jsonl, engine.log and samples/<index // 1000>/<index>.pt in --output-dir; a sample holds
        input_ids, loss_mask, aux_hidden (the aux layers at every token) and final_hidden (the last layer before the
        final norm, where loss_mask is true)

Before the first sample a canary checks that the captured states reproduce the engine's own log probabilities.
The same command again continues: finished samples are kept, missing or damaged ones are redone.
Exit code 3: --max-disk-gb was reached and samples are left; the same command continues when there is room.

Examples
    python 02_extract_hidden_states.py --model-path M --prepared-dir OUT/prepared --output-dir OUT/hidden_states
    python 02_extract_hidden_states.py ... --store-dtype fp8 --engine-arg max_num_batched_tokens=16384
Two engines or nodes on one directory, and the merge when both are through
    CUDA_VISIBLE_DEVICES=0,1,2,3 python 02_extract_hidden_states.py ... --num-shards 2 --shard-index 0
    CUDA_VISIBLE_DEVICES=4,5,6,7 python 02_extract_hidden_states.py ... --num-shards 2 --shard-index 1
    python 02_extract_hidden_states.py --merge --output-dir OUT/hidden_states
"""

import argparse
import json
from pathlib import Path
from typing import Any

from eagle3 import terminal
from eagle3.terminal import UserError

MORE_TO_DO = 3  # exit code
# of vLLM's arguments: what a flag of this program sets, or what the capture stands on
OWN_ARGUMENTS = {
    "model": "--model-path",
    "dtype": "--dtype",
    "tensor_parallel_size": "--tensor-parallel-size",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "trust_remote_code": "--trust-remote-code",
    "max_model_len": "the longest sample",
    "speculative_config": "the capture",
    "kv_transfer_config": "the capture",
    "enable_prefix_caching": "the capture: states of cached tokens are never computed",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model-path", help="target: model directory or hub name, as for stage 01")
    parser.add_argument(
        "--tensor",
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help="the target's embed_tokens, norm or lm_head in its weight files, where its name cannot be guessed",
    )
    parser.add_argument("--prepared-dir", type=Path, help="output directory of stage 01")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the hidden states go")
    parser.add_argument(
        "--engine", choices=["auto", "vllm", "transformers"], default="auto", help="auto: vllm where it is installed"
    )
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of vLLM's engine, as vLLM spells it, such as max_num_batched_tokens=16384; repeatable",
    )
    parser.add_argument(
        "--aux-layers",
        nargs="+",
        metavar="ID",
        help="ids such as 2,15,27; id i is the residual stream entering layer i, -3 is N-3 (--aux-layers=-28,-15,-3, "
        "with the equals sign where the first is negative); default: 2,N/2,N-3",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "bfloat16", "float32"],
        default="auto",
        help="of the engine and the states; auto is bfloat16 (float16 would overflow)",
    )
    parser.add_argument(
        "--store-dtype",
        choices=["auto", "fp8"],
        default="auto",
        help="of the aux states on disk: fp8 (e4m3, a scale for each state) halves them; auto is the engine's dtype",
    )
    parser.add_argument(
        "--store-final-dtype", choices=["auto", "fp8"], default="auto", help="of the final states on disk, likewise"
    )
    parser.add_argument(
        "--max-disk-gb", type=float, help="stop, with exit code 3, before the samples of this shard take more"
    )
    parser.add_argument("--max-failed", type=float, default=0.1, help="share of samples that may fail (default: 0.1)")
    parser.add_argument("--num-shards", type=int, default=1, help="engines or nodes that divide the samples")
    parser.add_argument("--shard-index", type=int, default=0, help="which part this command captures, from 0")
    parser.add_argument("--merge", action="store_true", help="make one manifest and index of finished shards, and end")
    parser.add_argument(
        "--batch-tokens",
        type=int,
        help="tokens between engine and disk: bounds memory (default: 65536 on GPU, 4096 on CPU)",
    )
    parser.add_argument("--tensor-parallel-size", type=int, help="vllm: GPUs to shard the target over (default: all)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="vllm: share of each GPU's memory")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto", help="transformers: where to run")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the Python code in the model directory")
    arguments = parser.parse_args()
    if arguments.aux_layers is not None:
        arguments.aux_layers = " ".join(arguments.aux_layers)
    if not arguments.merge and (arguments.model_path is None or arguments.prepared_dir is None):
        parser.error("the following arguments are required: --model-path, --prepared-dir")
    return arguments


def parse_engine_arguments(given: list[str]) -> dict[str, Any]:
    """KEY=VALUE pairs for vLLM; values are JSON where they parse as that, else strings."""
    arguments: dict[str, Any] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        key = key.strip().lstrip("-").replace("-", "_")
        if not equals or not key.isidentifier():
            raise UserError(f"--engine-arg {pair}: expected KEY=VALUE, such as max_num_batched_tokens=16384")
        if key in OWN_ARGUMENTS:
            raise UserError(f"--engine-arg {key}: set by {OWN_ARGUMENTS[key]}")
        try:
            arguments[key] = json.loads(value)
        except json.JSONDecodeError:
            arguments[key] = {"True": True, "False": False, "None": None}.get(value, value)
    for key, instead in (
        ("pipeline_parallel_size", "nobody has verified the states; use --tensor-parallel-size"),
        ("data_parallel_size", "one engine a shard: use --num-shards"),
    ):
        if arguments.get(key, 1) != 1:
            raise UserError(f"--engine-arg {key}={arguments[key]}: not supported, {instead}")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    terminal.quiet_libraries()
    import torch

    from eagle3.artifacts import Shard
    from eagle3.capture import engines, preflight, shards
    from eagle3.capture.extract import extract
    from eagle3.capture.interface import EngineSettings
    from eagle3.capture.run import Limits
    from eagle3.states import Layout
    from eagle3.target import open_target, parse_aux_layers, parse_tensor_names, require_trust

    if arguments.merge:
        shards.merge(arguments.output_dir)
        return 0
    gpus = torch.cuda.device_count()
    batch_tokens = (65536 if gpus else 4096) if arguments.batch_tokens is None else arguments.batch_tokens
    if batch_tokens < 1:
        raise UserError(f"--batch-tokens {batch_tokens}: expected a positive number")
    for flag in ("gpu_memory_utilization", "max_failed"):
        if not 0 < (share := getattr(arguments, flag)) <= 1:
            raise UserError(f"--{flag.replace('_', '-')} {share}: expected a share between 0 and 1")
    if not 0 <= arguments.shard_index < arguments.num_shards:
        raise UserError(
            f"--shard-index {arguments.shard_index} --num-shards {arguments.num_shards}: expected an index from 0 to "
            "one less than the number"
        )
    if arguments.max_disk_gb is not None and arguments.max_disk_gb <= 0:
        raise UserError(f"--max-disk-gb {arguments.max_disk_gb}: expected a positive number")
    tensor_parallel_size = max(gpus, 1) if arguments.tensor_parallel_size is None else arguments.tensor_parallel_size
    if not 1 <= tensor_parallel_size <= max(gpus, 1):
        raise UserError(f"--tensor-parallel-size {tensor_parallel_size}: {gpus} GPUs are visible")
    if arguments.device == "cuda" and not gpus:
        raise UserError("--device cuda: no GPU is visible")
    engine_arguments = parse_engine_arguments(arguments.engine_arg)

    target = open_target(arguments.model_path)  # without weights, which may have to be fetched
    require_trust(target, arguments.trust_remote_code)
    preflight.require_target_packages(engines.choose(arguments.engine)[0], target, arguments.trust_remote_code)
    target = open_target(arguments.model_path, weights=True, tensor_names=parse_tensor_names(arguments.tensor))
    dtype = "bfloat16" if arguments.dtype == "auto" else arguments.dtype
    layout = Layout(
        layers=(*parse_aux_layers(arguments.aux_layers, target.num_layers), target.num_layers),
        hidden_size=target.hidden_size,
        dtype=dtype,
        aux=dtype if arguments.store_dtype == "auto" else arguments.store_dtype,
        final=dtype if arguments.store_final_dtype == "auto" else arguments.store_final_dtype,
    )
    terminal.say(f"aux layers: {', '.join(map(str, layout.layers[:-1]))} of {target.num_layers} (vLLM's ids)")
    finished = extract(
        arguments.prepared_dir,
        arguments.engine,
        EngineSettings(
            target=target,
            layout=layout,
            batch_tokens=batch_tokens,
            output_dir=arguments.output_dir,
            shard=Shard(arguments.shard_index, arguments.num_shards),
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=arguments.gpu_memory_utilization,
            trust_remote_code=arguments.trust_remote_code,
            device=("cuda" if gpus else "cpu") if arguments.device == "auto" else arguments.device,
            engine_arguments=engine_arguments,
        ),
        Limits(
            max_failed=arguments.max_failed,
            disk_bytes=None if arguments.max_disk_gb is None else round(arguments.max_disk_gb * 1e9),
        ),
    )
    return 0 if finished else MORE_TO_DO


if __name__ == "__main__":
    terminal.run(main)
