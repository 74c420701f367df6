#!/usr/bin/env python3
"""What a draft gains when it serves: real vLLM with and without it, or the counters of a server that runs already.

    python benchmarks/serve.py --model-path M --draft OUT/draft/export --prompts gsm8k.jsonl --prompts mt-bench.jsonl
    python benchmarks/serve.py --model-path M --endpoint http://localhost:8000 --prompts gsm8k.jsonl

Both engines get the same prompts and settings, greedy. By prompt set: answers identical to those without the draft,
acceptance length tau and acceptance by position, tokens/s and seconds a batch of answers at batch 1 and 8, speed-up;
then tau and speed for several numbers of drafts on the first set. Written to OUTPUT_DIR/serve.json and serve.png.

Prompts: jsonl with "prompt" (text), "turns" (the first one is used) or "messages" (up to the last user turn). With
--endpoint nothing is loaded but the target's tokenizer. vLLM's figures are then the difference of its /metrics before
and after, so nobody else may use it meanwhile; SGLang counts each answer in its reply (/generate).
"""

import argparse
import contextlib
import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eagle3 import artifacts, served_check, terminal, vllm_runtime
from eagle3.served_check import Counts
from eagle3.target import Target, load_tokenizer, open_target
from eagle3.terminal import UserError

BATCHES = (1, 8)


@dataclass
class Answers:
    """Greedy answers to one prompt set at one batch size."""

    ids: list[list[int]]
    latency: list[float]  # seconds of each batch
    counts: Counts

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.ids)) / sum(self.latency)


Server = Callable[[list[list[int]], int], Answers]  # prompts as token ids, and batch size


# ------------------------------------------------------------------------------------------------- servers


@contextlib.contextmanager
def loaded_vllm(arguments: argparse.Namespace, target: Target, longest: int, drafts: int) -> Iterator[Server]:
    """vLLM in this process, with the draft proposing `drafts` tokens a step, or without it when 0."""
    llm = served_check.load(
        target,
        arguments.output_dir / "engine.log",
        arguments.draft if drafts else None,
        drafts,
        dtype=arguments.dtype,
        max_model_len=min(longest + arguments.max_new_tokens + 16, target.max_positions),
        tensor_parallel_size=arguments.tensor_parallel_size,
        trust_remote_code=arguments.trust_remote_code,
    )
    from vllm import SamplingParams  # not before the output goes to the log

    sampling = SamplingParams(temperature=0, max_tokens=arguments.max_new_tokens, detokenize=False)

    def answer(prompts: list[list[int]], batch: int) -> Answers:
        before = served_check.counters(llm)
        ids, latency = [], []
        for start in range(0, len(prompts), batch):
            began = time.monotonic()
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts[start : start + batch]]
            ids += [list(one.outputs[0].token_ids) for one in llm.generate(inputs, sampling, use_tqdm=False)]
            latency.append(time.monotonic() - began)
        return Answers(ids, latency, served_check.counters(llm) - before)

    try:
        yield answer
    finally:
        vllm_runtime.shutdown(llm)


def running_server(url: str, max_new_tokens: int) -> Server:
    """A vLLM or SGLang that runs already. Raises UserError when it is neither or does not draft."""
    if (info := request(f"{url}/server_info", missing_ok=True)) and "speculative_algorithm" in info:
        if not info["speculative_algorithm"]:
            raise UserError(f"--endpoint {url}: SGLang runs without --speculative-algorithm; start it with the draft")
        one, counters = sglang_answer, None
    elif "vllm:spec_decode_num_drafts" in (metrics := request(f"{url}/metrics", missing_ok=True) or ""):
        name = request(f"{url}/v1/models")["data"][0]["id"]
        one, counters = vllm_answer, lambda: vllm_counters(request(f"{url}/metrics"))
    else:
        what = (
            "vLLM runs without a draft" if "vllm:" in metrics else "neither vLLM's /metrics nor SGLang's /server_info"
        )
        raise UserError(f"--endpoint {url}: {what}; give the base URL of a server that was started with the draft")

    def answer(prompts: list[list[int]], batch: int) -> Answers:
        before = counters() if counters else Counts()
        ids, latency, own = [], [], Counts()
        with ThreadPoolExecutor(batch) as pool:
            for start in range(0, len(prompts), batch):
                began = time.monotonic()
                jobs = [
                    pool.submit(one, url, prompt, max_new_tokens, None if counters is None else name)
                    for prompt in prompts[start : start + batch]
                ]
                for job in jobs:
                    tokens, counted = job.result()
                    ids.append(tokens)
                    own += counted
                latency.append(time.monotonic() - began)
        return Answers(ids, latency, counters() - before if counters else own)

    return answer


def vllm_answer(url: str, prompt: list[int], max_new_tokens: int, model: str | None) -> tuple[list[int], Counts]:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": max_new_tokens, "return_token_ids": True}
    return request(f"{url}/v1/completions", body)["choices"][0]["token_ids"], Counts()


def vllm_counters(text: str) -> Counts:
    """The counters in vLLM's /metrics, summed over its engines."""
    sums: dict[str, float] = {}
    for name, position, value in re.findall(
        r'^vllm:spec_decode_num_(\w+)_total\{(?:[^}]*position="(\d+)")?[^}]*\} (\S+)$', text, re.MULTILINE
    ):
        sums[name + position] = sums.get(name + position, 0) + float(value)
    by_position = [sums[name] for name in sorted(n for n in sums if n.startswith("accepted_tokens_per_pos"))]
    return Counts(int(sums["drafts"]), int(sums["accepted_tokens"]), list(map(int, by_position)))


def sglang_answer(url: str, prompt: list[int], max_new_tokens: int, model: str | None) -> tuple[list[int], Counts]:
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens}}
    reply = request(f"{url}/generate", body)
    meta = reply["meta_info"]
    steps = meta.get("spec_correct_drafts_histogram", [])  # entry n: verify steps that accepted n drafts
    by_position = [sum(steps[k + 1 :]) for k in range(len(steps) - 1)]
    return reply["output_ids"], Counts(
        meta.get("spec_verify_ct", 0), meta.get("spec_num_correct_drafts", 0), by_position
    )


def request(url: str, body: dict[str, Any] | None = None, *, missing_ok: bool = False) -> Any:
    """GET, or POST of JSON; the reply as JSON where it is that, else as text."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=600
        ) as reply:
            text = reply.read().decode()
    except urllib.error.HTTPError as error:
        if missing_ok:
            return None
        raise UserError(f"{url}: HTTP {error.code}: {error.read().decode(errors='replace')[:200]}") from error
    except (urllib.error.URLError, OSError) as error:
        raise UserError(f"{url} does not answer ({error}); is the server running?") from error
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


# -------------------------------------------------------------------------------------------------- prompts


def read_prompts(path: Path, tokenizer: Any, most: int) -> list[list[int]]:
    """The first `most` prompts of a jsonl as token ids, with the target's template and generation prompt."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()][:most]
    except (OSError, ValueError) as error:
        raise UserError(f"--prompts {path}: {error}") from error
    prompts = []
    for number, row in enumerate(rows, 1):
        if isinstance(row.get("messages"), list):
            last = max((n for n, one in enumerate(row["messages"], 1) if one.get("role") == "user"), default=0)
            messages = row["messages"][:last]
        else:
            text = row.get("prompt") or (row.get("turns") or [None])[0]
            messages = [{"role": "user", "content": text}] if isinstance(text, str) else []
        if not messages:
            raise UserError(f'--prompts {path}:{number} has no "prompt", "turns" or "messages" with a user turn')
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not prompts:
        raise UserError(f"--prompts {path} is empty")
    return prompts


# --------------------------------------------------------------------------------------------------- report


def measure(server: Server, sets: dict[str, list[list[int]]]) -> dict[str, dict[int, Answers]]:
    """Answers by set and batch size, after one answer that warms up."""
    server(next(iter(sets.values()))[:1], 1)
    results: dict[str, dict[int, Answers]] = {}
    with terminal.progress(len(sets) * len(BATCHES), "run", "serving") as bar:
        for name, prompts in sets.items():
            results[name] = {}
            for batch in BATCHES:
                results[name][batch] = server(prompts, batch)
                bar.update(1)
    return results


def compare(drafted: dict[int, Answers], plain: dict[int, Answers] | None) -> dict[str, Any]:
    """Figures of one prompt set."""
    one = drafted[1]
    report: dict[str, Any] = {"prompts": len(one.ids), "tokens": sum(map(len, one.ids)), **one.counts.report()}
    for batch, answers in drafted.items():
        entry = {
            "tokens_per_second": round(answers.tokens_per_second, 1),
            "seconds": round(sum(answers.latency) / len(answers.latency), 3),
        }
        if plain:
            base = plain[batch]
            differing = [place for place, (a, b) in enumerate(zip(base.ids, answers.ids, strict=True)) if a != b]
            entry |= {
                "tokens_per_second_without": round(base.tokens_per_second, 1),
                "seconds_without": round(sum(base.latency) / len(base.latency), 3),
                "speed_up": round(answers.tokens_per_second / base.tokens_per_second, 3),
                "identical": len(base.ids) - len(differing),
                "differing": {
                    place: next(
                        n for n, (a, b) in enumerate(zip(base.ids[place], answers.ids[place], strict=False)) if a != b
                    )
                    for place in differing
                    if base.ids[place][: len(answers.ids[place])] != answers.ids[place][: len(base.ids[place])]
                },  # prompt: first token that differs
            }
        report[f"batch_{batch}"] = entry
    return report


def table(reports: dict[str, dict[str, Any]]) -> str:
    lines = [
        f"{'set':<16} {'batch':>5} {'tau':>6} {'tok/s':>8} {'without':>8} {'speed-up':>8} {'identical':>9}  by position"
    ]
    for name, report in reports.items():
        for batch in BATCHES:
            entry = report[f"batch_{batch}"]
            same = f"{entry['identical']}/{report['prompts']}" if "identical" in entry else "-"
            lines.append(
                f"{name:<16} {batch:>5} {report['tau']:>6.3f} {entry['tokens_per_second']:>8.1f} "
                f"{entry.get('tokens_per_second_without', '-'):>8} {entry.get('speed_up', '-'):>8} {same:>9}  "
                + " ".join(f"{rate:.3f}" for rate in report["acceptance_by_position"])
            )
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name, report in result["sets"].items():
        axes[0].plot(
            range(1, len(report["acceptance_by_position"]) + 1), report["acceptance_by_position"], "o-", label=name
        )
    axes[0].set(title="acceptance by position", xlabel="draft token", ylim=(0, 1))
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend()
    names = list(result["sets"])
    for shift, batch in enumerate(BATCHES):
        entries = [result["sets"][name][f"batch_{batch}"] for name in names]
        key = "speed_up" if "speed_up" in entries[0] else "tokens_per_second"
        places = [n + 0.4 * shift - 0.2 for n in range(len(names))]
        axes[1].bar(places, [entry[key] for entry in entries], 0.38, label=f"batch {batch}")
    axes[1].set(title=key.replace("_", " "), xticks=range(len(names)), xticklabels=names)
    axes[1].legend()
    if result["sweep"]:
        drafts = [int(k) for k in result["sweep"]]
        axes[2].plot(drafts, [result["sweep"][k]["tau"] for k in result["sweep"]], "o-", label="tau")
        for batch in BATCHES:
            speed = [result["sweep"][k][f"batch_{batch}"]["speed_up"] for k in result["sweep"]]
            axes[2].plot(drafts, speed, "s--", label=f"speed-up, batch {batch}")
        axes[2].set(title=f"drafts a step, {names[0]}", xlabel="drafts", xticks=drafts)
        axes[2].legend()
    else:
        axes[2].axis("off")
    with artifacts.atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=120)


# ----------------------------------------------------------------------------------------------------- main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True, help="target: model directory or hub name")
    parser.add_argument("--draft", type=Path, help="the export, or a published EAGLE-3 draft")
    parser.add_argument("--endpoint", help="base URL of a server that runs already, instead of loading one")
    parser.add_argument("--prompts", type=Path, action="append", required=True, help="jsonl, repeatable: a set each")
    parser.add_argument("--output-dir", type=Path, default=Path("output/serve"), help="(default %(default)s)")
    parser.add_argument("--num-speculative-tokens", type=int, default=3, help="drafts a step (default %(default)s)")
    parser.add_argument("--sweep", default="1,2,3,5,7", help="numbers of drafts tried on the first set; '' for none")
    parser.add_argument("--max-prompts", type=int, default=20, help="of each set (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(default %(default)s)")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="auto: float32 on CPU")
    parser.add_argument("--tensor-parallel-size", type=int, help="default: all visible GPUs")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the Python code in the model directory")
    arguments = parser.parse_args()
    started = time.monotonic()
    if (arguments.draft is None) == (arguments.endpoint is None):
        parser.error("give either --draft or --endpoint")
    if arguments.draft and not (arguments.draft / "config.json").is_file():
        raise UserError(
            f"--draft {arguments.draft} has no config.json; give a draft's directory, such as OUT/draft/export"
        )

    import torch

    gpus = torch.cuda.device_count()
    arguments.tensor_parallel_size = arguments.tensor_parallel_size or max(1, gpus)
    if arguments.dtype == "auto":
        arguments.dtype = "bfloat16" if gpus else "float32"
    target = open_target(arguments.model_path, weights=arguments.draft is not None)
    tokenizer = load_tokenizer(target, trust_remote_code=arguments.trust_remote_code)
    sets = {path.stem: read_prompts(path, tokenizer, arguments.max_prompts) for path in arguments.prompts}
    longest = max(len(prompt) for prompts in sets.values() for prompt in prompts)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"target": target.name, "max_new_tokens": arguments.max_new_tokens, "sweep": {}}

    if arguments.endpoint:
        drafted = measure(running_server(arguments.endpoint.rstrip("/"), arguments.max_new_tokens), sets)
        result |= {"endpoint": arguments.endpoint, "sets": {name: compare(drafted[name], None) for name in sets}}
    else:
        main_drafts = arguments.num_speculative_tokens
        first = next(iter(sets))
        results = {}
        for drafts in [0, main_drafts, *(int(k) for k in arguments.sweep.split(",") if k and int(k) != main_drafts)]:
            terminal.say(f"vLLM {vllm_runtime.version()}, " + (f"{drafts} drafts a step" if drafts else "no draft"))
            asked = sets if drafts in (0, main_drafts) else {first: sets[first]}
            with loaded_vllm(arguments, target, longest, drafts) as server:
                results[drafts] = measure(server, asked)
        plain = results.pop(0)
        result |= {
            "draft": str(arguments.draft.resolve()),
            "engine": f"vllm {vllm_runtime.version()}",
            "dtype": arguments.dtype,
            "drafts": main_drafts,
            "sets": {name: compare(results[main_drafts][name], plain[name]) for name in sets},
        }
        if arguments.sweep:
            result["sweep"] = {str(k): compare(results[k][first], plain[first]) for k in sorted(results)}
    artifacts.save_json(arguments.output_dir / "serve.json", result)
    draw(result, arguments.output_dir / "serve.png")
    terminal.say(table(result["sets"]))
    if result["sweep"]:
        terminal.say(table({f"{first} K={k}": report for k, report in result["sweep"].items()}))
    terminal.summary("figures and curves written", {"to": arguments.output_dir}, started)


if __name__ == "__main__":
    terminal.quiet_libraries()
    terminal.run(main)
