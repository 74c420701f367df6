#!/usr/bin/env python3
"""How fast stage 01 is: against bare tokenisation of the same texts, and against a plain `map` loop.

    python benchmarks/prepare.py --model-path M --output-dir OUT

Writes chats of several turns from the sentences of the embedded conversations, 20,000 unless told otherwise, and
measures, each in processes of its own on the same file:

  bare     nothing but the tokenizer on the rendered texts, by its fastest call: the limit
  call     the same by transformers' own call, a text at a time
  stage    stage 01, from reading the file to the last sample on the disk
  map      datasets.map as most trainers do it: render, tokenise with offsets, find the answers with a regular
           expression, arrow files instead of samples (fast tokenizers only)
  memory   the largest resident size of the stage and all its processes together, at --memory-rows
  written  samples a second where the rows are tokens already, so that little but writing is left

with one process and with --num-proc. Prints a table and writes prepare.json to --output-dir.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from eagle3 import artifacts, terminal  # noqa: E402

CHUNK = 32  # texts handed to the tokenizer at once
WRITTEN_TOKENS = 300  # tokens of a sample in `written`


def write_chats(path: Path, count: int, seed: int = 0) -> None:
    """Chats of 1 to 6 rounds, answers of 2 to 12 sentences, a system message in every fourth."""
    source = REPOSITORY / "configs" / "conversations" / "smollm2.jsonl"
    texts = [m["content"] for line in source.open() for m in json.loads(line)["messages"]]
    sentences = [s for text in texts for s in re.split(r"(?<=[.!?])\s+", text) if len(s) > 20]
    rng = random.Random(seed)

    def some(least: int, most: int) -> str:
        return " ".join(rng.choice(sentences) for _ in range(rng.randint(least, most)))

    with open(path, "w") as file:
        for number in range(count):
            messages = [{"role": "system", "content": some(1, 2)}] if number % 4 == 0 else []
            for _ in range(rng.randint(1, 6)):
                messages.append({"role": "user", "content": some(1, 3)})
                messages.append({"role": "assistant", "content": some(2, 12)})
            file.write(json.dumps({"messages": messages}) + "\n")


def write_token_rows(path: Path, count: int, vocab_size: int) -> None:
    rng = random.Random(0)
    mask = [0] * (WRITTEN_TOKENS // 2) + [1] * (WRITTEN_TOKENS - WRITTEN_TOKENS // 2)
    with open(path, "w") as file:
        for _ in range(count):
            ids = [rng.randrange(1000, vocab_size - 1000) for _ in range(WRITTEN_TOKENS)]
            file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")


# ------------------------------------------------------------------------- what is measured, in a process of its own


def measure_stage(arguments: argparse.Namespace, file: Path, scratch: Path) -> dict[str, Any]:
    from eagle3.prepare.stage import Options, prepare
    from eagle3.sources import open_datasets
    from eagle3.target import load_tokenizer, open_target

    target = open_target(arguments.model_path)
    tokenizer = load_tokenizer(target, trust_remote_code=arguments.trust_remote_code)
    options = Options(
        num_proc=arguments.num_proc, max_seq_len=arguments.max_seq_len, trust_remote_code=arguments.trust_remote_code
    )
    with artifacts.directory_lock(scratch):
        started = time.monotonic()
        totals = prepare(target, tokenizer, open_datasets([str(file)]), scratch, options)
        seconds = time.monotonic() - started
    return {"seconds": seconds, "tokens": totals.tokens, "samples": totals.samples}


def measure_bare(arguments: argparse.Namespace, file: Path, scratch: Path, fastest: bool = True) -> dict[str, Any]:
    texts = scratch / "texts.json"
    scratch.mkdir(parents=True)
    tokenizer = _tokenizer(arguments.model_path, arguments.trust_remote_code)
    chats = [json.loads(line)["messages"] for line in file.open()]
    render = {"tokenize": False, "add_generation_prompt": False}
    texts.write_text(json.dumps([tokenizer.apply_chat_template(chat, **render) for chat in chats]))
    context = multiprocessing.get_context("spawn")
    ready, go = context.Semaphore(0), context.Event()
    queue = context.Queue()
    share = (arguments.model_path, arguments.trust_remote_code, str(texts), arguments.num_proc, fastest)
    processes = [
        context.Process(target=_tokenise, args=(n, *share, ready, go, queue)) for n in range(arguments.num_proc)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    started = time.monotonic()
    go.set()
    tokens = sum(queue.get() for _ in processes)
    return {"seconds": time.monotonic() - started, "tokens": tokens, "samples": len(chats)}


def measure_call(arguments: argparse.Namespace, file: Path, scratch: Path) -> dict[str, Any]:
    return measure_bare(arguments, file, scratch, fastest=False)


def _tokenizer(model_path: str, trust: bool) -> Any:
    from eagle3.target import load_tokenizer, open_target

    return load_tokenizer(open_target(model_path), trust_remote_code=trust)


def _tokenise(
    number: int, model_path: str, trust: bool, file: str, step: int, fastest: bool, ready: Any, go: Any, queue: Any
) -> None:
    terminal.quiet_libraries()
    tokenizer = _tokenizer(model_path, trust)
    texts = json.loads(Path(file).read_text())[number::step]
    chunks = [texts[start : start + CHUNK] for start in range(0, len(texts), CHUNK)]

    def count(chunk: list[str]) -> int:
        if fastest and tokenizer.is_fast:
            return sum(
                len(e.ids) for e in tokenizer.backend_tokenizer.encode_batch_fast(chunk, add_special_tokens=False)
            )
        return sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in chunk)

    ready.release()
    go.wait()
    queue.put(sum(map(count, chunks)))


def measure_map(arguments: argparse.Namespace, file: Path, scratch: Path) -> dict[str, Any]:
    import datasets

    tokenizer = _tokenizer(arguments.model_path, arguments.trust_remote_code)
    marker = "a\0b"
    frame = tokenizer.apply_chat_template(
        [{"role": "user", "content": "u"}, {"role": "assistant", "content": marker}],
        tokenize=False,
        add_generation_prompt=False,
    )
    header, footer = frame.partition("u")[2].split(marker)
    header = header[-24:]
    answer = re.compile(re.escape(header) + r"(.*?)(?=" + re.escape(footer.strip()) + ")", re.DOTALL)

    def prepare(batch: dict[str, list]) -> dict[str, list]:
        result: dict[str, list] = {"input_ids": [], "loss_mask": []}
        for messages in batch["messages"]:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
            encoded = tokenizer(
                text,
                max_length=arguments.max_seq_len,
                truncation=True,
                return_offsets_mapping=True,
                add_special_tokens=False,
            )
            mask = [0] * len(encoded["input_ids"])
            for match in answer.finditer(text):
                for place, (begin, end) in enumerate(encoded["offset_mapping"]):
                    if begin >= match.start(1) and end <= match.end(1):
                        mask[place] = 1
            result["input_ids"].append(encoded["input_ids"])
            result["loss_mask"].append(mask)
        return result

    rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(scratch / "cache"))
    workers = arguments.num_proc if arguments.num_proc > 1 else None
    started = time.monotonic()
    done = rows.map(prepare, batched=True, num_proc=workers, remove_columns=rows.column_names)
    seconds = time.monotonic() - started
    return {"seconds": seconds, "tokens": sum(map(len, done["input_ids"])), "samples": len(done)}


# ------------------------------------------------------------------------------------------------------- the benchmark


def in_own_process(kind: str, arguments: argparse.Namespace, file: Path, num_proc: int) -> dict[str, Any]:
    """Measure one thing in a process of its own; returns its figures and largest resident size.

    What it wrote stays until the end: ext4 makes new files slowly for minutes where others were deleted.
    """
    scratch = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=arguments.output_dir)) / "out"
    command = [sys.executable, __file__, "--model-path", arguments.model_path, "--output-dir", arguments.output_dir]
    command += ["--num-proc", num_proc, "--max-seq-len", arguments.max_seq_len, "--measure", kind, file, scratch]
    command += ["--trust-remote-code"] if arguments.trust_remote_code else []
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    with open(scratch.parent / "log", "w+") as log:
        process = subprocess.Popen(
            list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        resident = 0
        while process.poll() is None:
            resident = max(resident, resident_mib(process.pid))
            time.sleep(0.5)
        log.seek(0)
        last = log.read().strip().splitlines()[-1]
    if process.returncode:
        raise terminal.UserError(f"{kind} failed: {last}; all of it is in {scratch.parent / 'log'}")
    return json.loads(last) | {"resident_mib": resident}


def resident_mib(session: int) -> int:
    """Resident memory of all processes of a session; pages that several share count for each."""
    pages = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            pages += int(fields[21]) if int(fields[3]) == session else 0
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True, help="whose tokenizer and chat template are used")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=20_000, help="chats (default %(default)s)")
    parser.add_argument("--num-proc", type=int, default=2, help="processes beside one (default %(default)s)")
    parser.add_argument("--max-seq-len", type=int, default=4096, help="(default %(default)s)")
    parser.add_argument("--memory-rows", type=int, nargs="*", default=[2_000, 50_000], help="(default 2000 50000)")
    parser.add_argument("--written", type=int, default=100_000, help="samples of `written` (default %(default)s)")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        kind, file, scratch = arguments.measure
        figures = globals()[f"measure_{kind}"](arguments, Path(file), Path(scratch))
        print(json.dumps(figures))
        return 0

    if arguments.output_dir.exists() and any(arguments.output_dir.iterdir()):
        raise terminal.UserError(f"--output-dir {arguments.output_dir} is not empty; give a new one")
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"model": Path(arguments.model_path).name, "rows": arguments.rows}
    tokenizer = _tokenizer(arguments.model_path, arguments.trust_remote_code)
    chats, tokens = arguments.output_dir / "chats.jsonl", arguments.output_dir / "tokens.jsonl"
    write_chats(chats, arguments.rows)
    for num_proc in sorted({1, arguments.num_proc}):
        for kind in ("bare", "call", "stage", "map") if tokenizer.is_fast else ("bare", "stage"):
            figures = in_own_process(kind, arguments, chats, num_proc)
            figures["tokens_per_s"] = round(figures["tokens"] / figures["seconds"])
            limit = report.get(f"bare {num_proc}", figures)["tokens_per_s"]
            report[f"{kind} {num_proc}"] = figures
            terminal.say(
                f"{kind:<6} {num_proc} processes: {figures['tokens_per_s']:>9,} tokens/s, "
                f"{figures['tokens_per_s'] / limit:.2f} of bare, {figures['seconds']:.1f} s"
            )
    gain = report[f"stage {arguments.num_proc}"]["tokens_per_s"] / report["stage 1"]["tokens_per_s"]
    terminal.say(f"stage with {arguments.num_proc} processes: {gain:.2f} of one")
    for rows in arguments.memory_rows:
        write_chats(chats, rows)
        figures = report[f"memory {rows}"] = in_own_process("stage", arguments, chats, arguments.num_proc)
        terminal.say(f"memory at {rows:,} rows: {figures['resident_mib']} MiB in all processes")
    if arguments.written:
        write_token_rows(tokens, arguments.written, len(tokenizer))
        figures = report["written"] = in_own_process("stage", arguments, tokens, arguments.num_proc)
        terminal.say(f"written: {figures['samples'] / figures['seconds']:,.0f} samples/s of {WRITTEN_TOKENS} tokens")
    for path in arguments.output_dir.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path in (chats, tokens):
            path.unlink()
    artifacts.save_json(arguments.output_dir / "prepare.json", report)
    return 0


if __name__ == "__main__":
    terminal.quiet_libraries()
    terminal.run(main)
