#!/usr/bin/env python3
"""Stage 04 as a whole at Kimi-K2.5's shape, by its own command line, on random states.

    python benchmarks/train_run.py --output-dir OUT                    # about 4 minutes on one H200, 60 GB in OUT
    python benchmarks/train_run.py --output-dir OUT --store fp8        # the states in fp8: 45 GB

Writes what stage 04 reads: embedding, final norm and lm_head of a target of 7168 hidden numbers and 163,840 tokens,
states of documents of 2,048 tokens (half supervised), and a vocabulary map of 32,000 ids. Then runs its dry run, and a
training of one epoch, 8,192 tokens a step on one GPU. Prints seconds a step, tokens a second, the share of the step
that waited for data, and the highest use of GPU memory. OUT in /dev/shm leaves the disk out.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from eagle3 import artifacts  # noqa: E402
from eagle3.model_files import tokenizer_hash  # noqa: E402
from eagle3.states import quantise  # noqa: E402
from eagle3.target import open_target  # noqa: E402

HIDDEN, VOCAB, DRAFT_VOCAB, LAYERS, AUX_LAYERS = 7168, 163840, 32000, 61, [2, 30, 58]
TOKENS = 2048  # of a document
DISTINCT = 4  # documents that are drawn; the others are copies
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": HIDDEN,
    "intermediate_size": 18432,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_target(directory: Path, device: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))

    def drawn() -> torch.Tensor:
        return (0.02 * torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16, device=device)).cpu()

    tensors = {"model.embed_tokens.weight": drawn(), "lm_head.weight": drawn()}
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors")


def document(store: str, device: str) -> dict[str, torch.Tensor]:
    """One sample as stage 02 leaves it, its second half supervised."""
    mask = torch.arange(TOKENS) >= TOKENS // 2
    sample = {"input_ids": torch.randint(0, VOCAB, (TOKENS,), dtype=torch.int32), "loss_mask": mask}
    aux = torch.randn(TOKENS, len(AUX_LAYERS), HIDDEN, dtype=torch.bfloat16, device=device)
    if store == "fp8":
        aux, scale = quantise(aux, aux.abs().amax(-1))
        sample["aux_scale"] = scale.cpu()
    sample["aux_hidden"] = aux.flatten(1).cpu()
    sample["final_hidden"] = torch.randn(TOKENS // 2, HIDDEN, dtype=torch.bfloat16, device=device).cpu()
    return sample


def write_inputs(out: Path, count: int, store: str, device: str) -> None:
    """hidden_states/ and vocab_map/ for the target in out/target."""
    target = open_target(str(out / "target"), weights=True)
    this = {"target": target.config_hash, "tokenizer": tokenizer_hash(target.directory)}
    states = out / "hidden_states"
    documents = [document(store, device) for _ in range(DISTINCT)]
    with artifacts.Index(states).appending() as index:
        for number in range(count):
            sample = documents[number % DISTINCT]
            size = artifacts.save_tensors(artifacts.sample_path(states, number), sample)
            facts = {"tokens": TOKENS, "supervised": TOKENS // 2, "bytes": size, "status": "done"}
            names = {"source": "random", "dataset": "random", "conversation": f"random:{number}"}
            index.add(index=number, ids=artifacts.ids_digest(sample["input_ids"]), **names, **facts)
    made_from = this | {"layers": [*AUX_LAYERS, LAYERS]}
    artifacts.write_manifest(states, "02", made_from, aux_layers=AUX_LAYERS, samples=count, complete=True)
    mark = torch.arange(VOCAB) < DRAFT_VOCAB
    tensors = {"d2t": torch.zeros(DRAFT_VOCAB, dtype=torch.long), "t2d": mark}
    artifacts.save_tensors(out / "vocab_map" / "vocab_map.pt", tensors)
    artifacts.write_manifest(out / "vocab_map", "03", this | {"draft_vocab_size": DRAFT_VOCAB})


def peak_memory(process: subprocess.Popen) -> list[int]:
    """The GPU's used bytes, seen while `process` runs, in a list of one that grows with the highest."""
    highest = [0]

    def watch() -> None:
        while process.poll() is None:
            free, total = torch.cuda.mem_get_info()
            highest[0] = max(highest[0], total - free)
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()
    return highest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps of 8,192 tokens (default %(default)s)")
    parser.add_argument("--store", choices=("bfloat16", "fp8"), default="bfloat16", help="form of the aux states")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: no GPU is visible; this benchmark measures one")
    out = arguments.output_dir
    torch.manual_seed(0)
    write_target(out / "target", "cuda")
    write_inputs(out, 4 * arguments.steps + 4, arguments.store, "cuda")
    torch.cuda.empty_cache()
    command = [sys.executable, REPOSITORY / "04_train_draft.py", "--model-path", out / "target"]
    command += ["--hidden-states-dir", out / "hidden_states", "--vocab-map-dir", out / "vocab_map"]
    command += ["--output-dir", out / "draft", "--draft-config", REPOSITORY / "configs/drafts/kimi_k25.json"]
    command += ["--epochs", "1", "--max-tokens", "8192", "--ttt-steps", "7"]
    command += ["--val-fraction", str(4 / (4 * arguments.steps + 4))]
    command = list(map(str, command))
    print(subprocess.run([*command, "--dry-run"], stdout=subprocess.PIPE, text=True, check=True).stdout, flush=True)
    started = time.monotonic()
    process = subprocess.Popen(command)
    highest = peak_memory(process)
    if process.wait():
        sys.exit(f"error: stage 04 ended with exit code {process.returncode}")
    seconds = time.monotonic() - started
    records = [json.loads(line) for line in (out / "draft" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record.get("kind") == "train"][5:]  # the first ones compile kernels
    print(json.dumps({"seconds_in_all": round(seconds), "peak_bytes": highest[0], "last_step": steps[-1]}), flush=True)
    durations = sorted(record["seconds"] for record in steps)
    median = durations[len(durations) // 2]
    print(f"{len(steps)} steps: {median:.3f} s a step (median), {8192 / median:,.0f} tok/s")
    print(f"peak memory of the GPU {highest[0] / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
