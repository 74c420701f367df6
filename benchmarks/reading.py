#!/usr/bin/env python3
"""How fast stage 04 reads its samples: against plain reads of the same files, and against what training needs.

    python benchmarks/reading.py --output-dir OUT

Writes random samples of Kimi-K2.5's shape (hidden size 7168, 3 aux layers, half of the tokens supervised) with states
in bf16, and with aux states in fp8: 20,000 tokens each unless told otherwise, 1.6 GB in all. Then measures, with 1, 2,
4 and 8 threads:

  reader   stage 04's own, from the file to the micro-batch of 8192 tokens: every check, and on a GPU the copy there
  plain    each file read whole into a buffer, nothing else

each from the disk (the files are first dropped from the page cache) and from the page cache. Prints a table and what a
training step needs, and writes reading.json to --output-dir.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from train_step import PACK, SHAPE

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from eagle3 import artifacts  # noqa: E402
from eagle3.states import quantise  # noqa: E402
from eagle3.training import packing, reading  # noqa: E402

STEP_SECONDS = 0.25  # that an H200 takes for a pack, 7 TTT steps (docs/train_step.md)
DOCUMENT = 1000  # tokens
STORED = ("bf16", "fp8")


def write_samples(directory: Path, tokens: int, stored: str) -> list[dict[str, Any]]:
    """Samples of DOCUMENT tokens as stage 02 writes them; their index records."""
    records = []
    for index in range(max(1, tokens // DOCUMENT)):
        mask = torch.arange(DOCUMENT) >= DOCUMENT // 2
        ids = torch.randint(0, SHAPE.vocab_size, (DOCUMENT,), dtype=torch.int32)
        aux = torch.randn(DOCUMENT, len(SHAPE.aux_layers), SHAPE.hidden_size).bfloat16()
        final = torch.randn(int(mask.sum()), SHAPE.hidden_size).bfloat16()
        sample = {"input_ids": ids, "loss_mask": mask, "aux_hidden": aux, "final_hidden": final}
        if stored == "fp8":
            sample["aux_hidden"], sample["aux_scale"] = quantise(aux, aux.abs().amax(-1))
        sample["aux_hidden"] = sample["aux_hidden"].flatten(1)
        size = artifacts.save_tensors(artifacts.sample_path(directory, index), sample)
        record = {"index": index, "tokens": DOCUMENT, "supervised": int(mask.sum()), "bytes": size}
        records.append(record | {"ids": artifacts.ids_digest(ids)})
    return records


def read_as_stage_04(directory: Path, records: list[dict[str, Any]], threads: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reading.THREADS = threads
    packs = packing.pack(records, PACK, PACK)
    with reading.Reader(reading.Source(directory, SHAPE, 7, device), [[pack] for pack in packs], "served") as steps:
        for step in steps:
            if device.type == "cuda":
                step.batches[0].to(device, torch.bfloat16)
    if device.type == "cuda":
        torch.cuda.synchronize()


def read_plainly(directory: Path, records: list[dict[str, Any]], threads: int) -> None:
    def read(place: int) -> None:
        buffer = bytearray(max(record["bytes"] for record in records))
        for record in records[place::threads]:
            with open(artifacts.sample_path(directory, record["index"]), "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))


def drop_from_cache(directory: Path, records: list[dict[str, Any]]) -> None:
    for record in records:
        descriptor = os.open(artifacts.sample_path(directory, record["index"]), os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def gigabytes_a_second(read: Callable, directory: Path, records: list[dict[str, Any]], threads: int) -> list[float]:
    """From the disk, then from the page cache."""
    drop_from_cache(directory, records)
    rates = []
    for _ in range(2):
        started = time.perf_counter()
        read(directory, records, threads)
        rates.append(sum(record["bytes"] for record in records) / (time.perf_counter() - started) / 1e9)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20_000, help="of each form (default %(default)s)")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}
    for stored in STORED:
        directory = arguments.output_dir / stored
        records = write_samples(directory, arguments.tokens, stored)
        size = sum(record["bytes"] for record in records) / sum(record["tokens"] for record in records)
        needed = size * PACK / STEP_SECONDS / 1e9
        results[stored] = found = {"bytes_a_token": size, "needed_gb_s": needed, "threads": {}}
        print(
            f"{stored}: {size:,.0f} bytes a token; {PACK} tokens in {STEP_SECONDS} s need {needed:.2f} GB/s a GPU",
            flush=True,
        )
        for threads in (1, 2, 4, 8):
            rates = {}
            for name, read in (("reader", read_as_stage_04), ("plain", read_plainly)):
                rates[name] = dict(
                    zip(("disk", "cache"), gigabytes_a_second(read, directory, records, threads), strict=True)
                )
            found["threads"][threads] = rates
            parts = [f"{name} {r['disk']:6.2f} disk {r['cache']:6.2f} cache" for name, r in rates.items()]
            print(f"{stored} {threads} threads  GB/s: {'; '.join(parts)}", flush=True)
        shutil.rmtree(directory)
        artifacts.save_json(arguments.output_dir / "reading.json", results)


if __name__ == "__main__":
    main()
