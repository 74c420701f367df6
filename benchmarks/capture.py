#!/usr/bin/env python3
"""How fast stage 02 is: against plain prefill of the same prompts, and against vLLM's own hidden-states connector.

    python benchmarks/capture.py --output-dir OUT                      # on a GPU: a random Llama of 1B parameters
    python benchmarks/capture.py --output-dir OUT --model-path M       # a target of yours

Each case has an engine of its own, one after another on the same machine, with the same prompts and batches:

  plain        vLLM, max_tokens 1, no capture: the limit
  stage        stage 02, from the first prompt to the last file under its name
  stage-fp8    the same with --store-dtype fp8
  stock        vLLM's ExampleHiddenStatesConnector, its files then read and removed one at a time
  speculators  speculators' client against a vLLM server with that connector, where both are installed

Every case runs its prompts --passes times after a warm-up and reports the median, tokens a second. Results are written
to OUT/capture.json as they come; files go to OUT as well, so a slow disk is part of what is measured (/dev/shm leaves
it out).
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from eagle3 import artifacts, terminal, vllm_runtime  # noqa: E402
from eagle3.artifacts import Index  # noqa: E402
from eagle3.capture.interface import EngineSettings  # noqa: E402
from eagle3.capture.run import DEFAULT_LIMITS, Run  # noqa: E402
from eagle3.capture.vllm_engine import VllmEngine, engine_arguments  # noqa: E402
from eagle3.states import Layout  # noqa: E402
from eagle3.target import default_aux_layers, open_target  # noqa: E402

CASES = ("plain", "stage", "stage-fp8", "stock", "speculators")
SERVER_START = 180  # s
CONCURRENCY = 64  # requests that speculators' client keeps open
RANDOM_LLAMA = {  # the shape of Llama-3.2-1B
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_random_llama(directory: Path) -> Path:
    """A model directory of RANDOM_LLAMA with normal(0, 0.02) weights, 2.5 GB."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    size, inner = RANDOM_LLAMA["hidden_size"], RANDOM_LLAMA["intermediate_size"]
    key = RANDOM_LLAMA["num_key_value_heads"] * RANDOM_LLAMA["head_dim"]
    shapes = {"model.embed_tokens.weight": (RANDOM_LLAMA["vocab_size"], size), "model.norm.weight": (size,)}
    for i in range(RANDOM_LLAMA["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (size,),
            f"{layer}.post_attention_layernorm.weight": (size,),
            f"{layer}.self_attn.q_proj.weight": (size, size),
            f"{layer}.self_attn.k_proj.weight": (key, size),
            f"{layer}.self_attn.v_proj.weight": (key, size),
            f"{layer}.self_attn.o_proj.weight": (size, size),
            f"{layer}.mlp.gate_proj.weight": (inner, size),
            f"{layer}.mlp.up_proj.weight": (inner, size),
            f"{layer}.mlp.down_proj.weight": (size, inner),
        }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        made = torch.ones(shape) if len(shape) == 1 else torch.empty(shape, device=device)
        tensors[name] = (made if len(shape) == 1 else made.normal_(0, 0.02, generator=generator)).bfloat16().cpu()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(RANDOM_LLAMA))
    return directory


def write_prepared(directory: Path, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Samples as stage 01 leaves them, the second half of each prompt supervised. Returns their records."""
    records = []
    for index, prompt in enumerate(prompts):
        mask = torch.arange(len(prompt)) >= len(prompt) // 2
        tensors = {"input_ids": torch.tensor(prompt, dtype=torch.int32), "loss_mask": mask}
        size = artifacts.save_tensors(artifacts.sample_path(directory, index), tensors)
        facts = {"tokens": len(prompt), "supervised": int(mask.sum()), "bytes": size, "status": "done"}
        records.append({"index": index, **facts})
    return records


def random_prompts(count: int, tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, vocab_size, (count, tokens), generator=generator).tolist()


# -------------------------------------------------------------------------------------------------- cases


def settings_of(arguments: argparse.Namespace, *, fp8: bool = False) -> EngineSettings:
    target = open_target(str(arguments.model_path))
    layers = (*default_aux_layers(target.num_layers), target.num_layers)
    out = arguments.output_dir / "states"
    out.mkdir(parents=True, exist_ok=True)
    return EngineSettings(
        target=target,
        layout=Layout(layers, target.hidden_size, "bfloat16", "fp8" if fp8 else "bfloat16", "bfloat16"),
        batch_tokens=arguments.batch_tokens,
        output_dir=out,
        tensor_parallel_size=arguments.tensor_parallel_size,
        gpu_memory_utilization=0.8,
        engine_arguments={"skip_tokenizer_init": True} | arguments.engine_arg,
    )


def timed(arguments: argparse.Namespace, once: Callable[[], None]) -> float:
    """Median tokens a second of `once`, which takes all prompts through."""
    rates = []
    for _ in range(arguments.passes):
        started = time.perf_counter()
        once()
        rates.append(arguments.prompts * arguments.tokens / (time.perf_counter() - started))
    return statistics.median(rates)


def load_plain(arguments: argparse.Namespace, **capture: Any) -> Any:
    """vLLM as stage 02 starts it, with another connector or none."""
    settings = settings_of(arguments)
    return vllm_runtime.load(
        settings.target.directory,
        settings.log,
        dtype="bfloat16",
        **(engine_arguments(settings, arguments.tokens) | capture),
    )


def run_plain(arguments: argparse.Namespace, prompts: list[list[int]]) -> float:
    from vllm import SamplingParams

    llm = load_plain(arguments)
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    def once() -> None:
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    once()
    rate = timed(arguments, once)
    vllm_runtime.shutdown(llm)
    return rate


def run_stage(arguments: argparse.Namespace, prompts: list[list[int]], *, fp8: bool) -> float:
    settings = settings_of(arguments, fp8=fp8)
    prepared = arguments.output_dir / "prepared"
    records = write_prepared(prepared, prompts)
    with contextlib.closing(VllmEngine(settings, arguments.tokens)) as engine:

        def once() -> None:
            run = Run(prepared, records, 0, settings, DEFAULT_LIMITS)
            run.over(engine)
            if run.settled != len(prompts) or len(Index(settings.output_dir).samples()) != len(prompts):
                raise SystemExit(f"{run.settled} of {len(prompts)} samples were written")

        once()
        rate = timed(arguments, once)
    shutil.rmtree(settings.output_dir / "samples")
    shutil.rmtree(prepared)
    return rate


def stock_connector(staging: Path) -> dict[str, Any]:
    """vLLM's own connector; on a CPU, which it cannot serve, with its two CUDA calls replaced."""
    config = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    if not torch.cuda.is_available():
        config |= {"kv_connector": "StockOnCpu", "kv_connector_module_path": "benchmarks.stock_on_cpu"}
    return config | {"kv_connector_extra_config": {"shared_storage_path": str(staging)}}


def run_stock(arguments: argparse.Namespace, prompts: list[list[int]]) -> float:
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        cleanup_hidden_states,
        load_hidden_states,
    )

    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    staging = arguments.output_dir / "staging"
    staging.mkdir(parents=True, exist_ok=True)
    llm = load_plain(
        arguments,
        speculative_config=extraction(settings_of(arguments).layout),
        kv_transfer_config=stock_connector(staging),
    )
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    def once() -> None:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        for output in outputs:
            path = output.kv_transfer_params["hidden_states_path"]
            if load_hidden_states(path)["hidden_states"].shape[0] != arguments.tokens:
                raise SystemExit(f"{path} has the states of other tokens")
            cleanup_hidden_states(path)

    once()
    rate = timed(arguments, once)
    vllm_runtime.shutdown(llm)
    return rate


def extraction(layout: Layout) -> dict[str, Any]:
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layout.layers)}},
    }


def run_speculators(arguments: argparse.Namespace, prompts: list[list[int]]) -> float:
    import openai
    from speculators.data_generation.vllm_client import generate_hidden_states_async, wait_for_lock_async

    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    staging, kept = arguments.output_dir / "staging", arguments.output_dir / "kept"
    staging.mkdir(parents=True, exist_ok=True)
    settings = settings_of(arguments)
    flags = engine_arguments(settings, arguments.tokens)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", arguments.model_path]
    command += ["--port", "8127", "--dtype", "bfloat16", "--no-enable-prefix-caching", "--no-enable-chunked-prefill"]
    command += ["--enforce-eager", "--skip-tokenizer-init", "--max-model-len", flags["max_model_len"]]
    command += ["--max-num-batched-tokens", flags["max_num_batched_tokens"]]
    command += ["--tensor-parallel-size", arguments.tensor_parallel_size]
    if torch.cuda.is_available():
        command += ["--gpu-memory-utilization", settings.gpu_memory_utilization]
    else:
        command += ["--kv-cache-memory-bytes", vllm_runtime.CPU_KV_CACHE_BYTES]
    command += ["--speculative-config", json.dumps(extraction(settings.layout))]
    command += ["--kv-transfer-config", json.dumps(stock_connector(staging))]
    address = "http://127.0.0.1:8127"
    with open(settings.log, "ab") as log:
        server = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)

    async def one(client: Any, room: asyncio.Semaphore, number: int) -> None:
        async with room:
            item = {"input_ids": prompts[number]}
            path, _ = await generate_hidden_states_async(client, str(arguments.model_path), item)
            await wait_for_lock_async(f"{path}.lock", poll_interval=0.01)
            shutil.move(path, kept / f"hs_{number}.safetensors")  # as its offline generation keeps them

    async def all_of_them() -> None:
        async with openai.AsyncClient(base_url=f"{address}/v1", api_key="none") as client:
            room = asyncio.Semaphore(CONCURRENCY)
            await asyncio.gather(*(one(client, room, number) for number in range(len(prompts))))

    def once() -> None:
        kept.mkdir(exist_ok=True)
        asyncio.run(all_of_them())
        shutil.rmtree(kept)

    try:
        deadline = time.monotonic() + SERVER_START
        while True:
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"no server (exit code {server.poll()}); its output is in {settings.log}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=2)
                break
            time.sleep(1)
        once()
        return timed(arguments, once)
    finally:
        server.terminate()
        server.wait()


# --------------------------------------------------------------------------------------------------- main


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--model-path", type=Path, help="default: a random Llama, made in --output-dir")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024, help="of each prompt")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=131072, help="of stage 02")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument(
        "--engine-arg", type=json.loads, default={}, metavar="JSON", help="of all cases, e.g. '{\"max_num_seqs\": 64}'"
    )
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)  # this process measures one
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> float:
    vocab_size = open_target(str(arguments.model_path)).vocab_size
    prompts = random_prompts(arguments.prompts, arguments.tokens, vocab_size, seed=1)
    if arguments.case == "plain":
        return run_plain(arguments, prompts)
    if arguments.case == "stock":
        return run_stock(arguments, prompts)
    if arguments.case == "speculators":
        return run_speculators(arguments, prompts)
    return run_stage(arguments, prompts, fp8=arguments.case == "stage-fp8")


def main() -> None:
    arguments = parse_arguments()
    terminal.quiet_libraries()
    arguments.output_dir = arguments.output_dir.resolve()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    if arguments.case:
        print(json.dumps({"tokens_per_second": measure(arguments)}))
        return
    if arguments.model_path is None:
        arguments.model_path = write_random_llama(arguments.output_dir / "model")
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "vllm": vllm_runtime.version(),
        "prompts": arguments.prompts,
        "tokens": arguments.tokens,
        "tokens_per_second": {},
    }
    rates = results["tokens_per_second"]
    given = sys.argv[1:]
    quiet = os.environ | {"TQDM_DISABLE": "1"}
    for case in arguments.cases:
        if case == "speculators" and importlib.util.find_spec("speculators") is None:
            print(f"{case:<12} not installed", flush=True)
            continue
        command = [sys.executable, __file__, *given, "--model-path", arguments.model_path, "--case", case]
        done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, env=quiet)
        if done.returncode:
            print(
                f"{case:<12} failed; see the lines above and {arguments.output_dir / 'states/engine.log'}", flush=True
            )
            continue
        rates[case] = json.loads(done.stdout.strip().splitlines()[-1])["tokens_per_second"]
        shares = [f"{rates[case] / rates[other]:.2f} of {other}" for other in ("plain", "stock") if other in rates]
        print(f"{case:<12} {rates[case]:>10,.0f} tok/s   {', '.join(shares)}", flush=True)
        artifacts.save_json(arguments.output_dir / "capture.json", results)


if __name__ == "__main__":
    main()
