#!/usr/bin/env python3
"""How fast the training step is: forward and backward of the draft, against speculators 0.9.0 and SpecForge 0.2.0.

    python benchmarks/train_step.py --output-dir OUT                   # everything, about 20 minutes on one H200
    python benchmarks/train_step.py --output-dir OUT --cases half-7-trained --steps ours
    python benchmarks/train_step.py --output-dir OUT --profile half-7-trained

The draft of Kimi-K2.5 (hidden 7168, 64 heads of 128, MLP 12288, 32000 draft ids), bfloat16, random states, no
optimizer.

  half-7-trained, half-7-frozen, half-3-trained, half-3-frozen
                 4 documents of 2048 tokens, the second half of each supervised; TTT steps; lm_head trained or frozen
  share-25, share-74, share-100
                 the same with other supervised shares, TTT 7, lm_head trained
  realistic      48 documents, lengths log-normal (median 700, at most 8192), supervised share 0.3 to 0.9 each, TTT 7:
                 ours packs them to 8192 tokens, speculators packs and pads to 8192, SpecForge pads 4 to the longest

Prints milliseconds, tokens a second (real ones), peak memory, and for ours the share of the measured matmul rates (of
single products, and of products back to back for a second) that its own floating-point operations reach, and how many
kernels random batches compiled anew. Each case and step runs in a process of its own; a peer that is not installed
is named and left out. Results go to OUT/train_step.json as they come.
"""

import argparse
import dataclasses
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from eagle3 import artifacts  # noqa: E402
from eagle3.draft.config import DraftConfig  # noqa: E402
from eagle3.draft.loss import Teacher  # noqa: E402
from eagle3.draft.model import Batch, DraftModel  # noqa: E402
from eagle3.training.estimate import Work, matmul_rate, operations  # noqa: E402
from eagle3.training.packing import pack  # noqa: E402
from eagle3.training.supervision import make_batch  # noqa: E402

PACK = 8192  # tokens
STEPS = {"ours": None, "speculators": "speculators", "specforge": "specforge"}  # the module each needs


@dataclasses.dataclass(frozen=True)
class Case:
    documents: tuple[tuple[int, int], ...]  # tokens, of which the last so many are supervised
    ttt: int = 7
    trained: bool = True  # lm_head


def realistic() -> tuple[tuple[int, int], ...]:
    rng = random.Random(0)
    lengths = [min(PACK, max(16, round(rng.lognormvariate(6.55, 0.9)))) for _ in range(48)]  # exp(6.55) is 700
    return tuple((length, max(4, round(length * rng.uniform(0.3, 0.9)))) for length in lengths)


def equal(share: float) -> tuple[tuple[int, int], ...]:
    return ((2048, round(2048 * share)),) * 4


CASES = {
    "half-7-trained": Case(equal(0.5)),
    "half-7-frozen": Case(equal(0.5), trained=False),
    "half-3-trained": Case(equal(0.5), ttt=3),
    "half-3-frozen": Case(equal(0.5), ttt=3, trained=False),
    "share-25": Case(equal(0.25)),
    "share-74": Case(equal(0.74)),
    "share-100": Case(equal(1.0)),
    "realistic": Case(realistic()),
}
SHAPE = DraftConfig(
    hidden_size=7168,
    intermediate_size=12288,
    num_attention_heads=64,
    num_key_value_heads=64,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope={"rope_type": "default", "rope_theta": 50000.0},
    max_position_embeddings=PACK,
    vocab_size=163840,
    draft_vocab_size=32000,
    aux_layers=(2, 30, 58),
)


def mask_of(document: tuple[int, int]) -> torch.Tensor:
    tokens, supervised = document
    return torch.arange(tokens) >= tokens - supervised


def packs(case: Case) -> list[list[dict[str, int]]]:
    """Places of the documents in packs of at most PACK tokens."""
    documents = enumerate(case.documents)
    records = [{"index": i, "tokens": tokens, "supervised": supervised} for i, (tokens, supervised) in documents]
    return pack(records, PACK, PACK)


def timed(run: Callable[[], Any], repeats: int = 5, warm: int = 3) -> tuple[float, float]:
    """Median milliseconds and peak GiB of `run`."""
    for _ in range(warm):
        run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), torch.cuda.max_memory_allocated() / 2**30


# --------------------------------------------------------------------------------------------------- ours


def random_draft(trained: bool) -> DraftModel:
    with torch.device("cuda"):
        model = DraftModel(SHAPE).bfloat16()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    model.embed_tokens.normal_(std=0.02)
    model.lm_head.weight.requires_grad_(trained)
    return model


def our_batches(case: Case) -> list[Batch]:
    batches = []
    for group in packs(case):
        samples = []
        for record in group:
            mask = mask_of(case.documents[record["index"]])
            samples.append(
                {
                    "input_ids": torch.randint(0, SHAPE.vocab_size, (len(mask),), dtype=torch.int32),
                    "loss_mask": mask,
                    "aux_hidden": torch.randn(len(mask), 3 * SHAPE.hidden_size, dtype=torch.bfloat16),
                    "final_hidden": torch.randn(int(mask.sum()), SHAPE.hidden_size, dtype=torch.bfloat16),
                }
            )
        batches.append(make_batch(samples, case.ttt, "served").to("cuda", torch.bfloat16))
    return batches


def our_step(case: Case) -> tuple[Callable[[], None], float]:
    model, batches = random_draft(case.trained), our_batches(case)
    head = torch.randn(SHAPE.draft_vocab_size, SHAPE.hidden_size, device="cuda", dtype=torch.bfloat16) * 0.02

    def run() -> None:
        for batch in batches:
            for parameter in model.parameters():
                parameter.grad = None
            teacher = Teacher(batch.final_hidden @ head.T)
            output = model(batch, teacher)
            (output.loss / batch.valid.sum(1)).sum().backward()

    return run, sum(operations(SHAPE, Work.of(batch), case.trained) for batch in batches)


# -------------------------------------------------------------------------------------------------- peers


def llama_config(attention: str) -> Any:
    config = SHAPE.llama()
    config._attn_implementation = attention
    return config


def speculators_step(case: Case) -> Callable[[], None]:
    """Its packed batches, padded to a fixed length. Its fused loss stays outside torch.compile: torch 2.11 cannot."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses.fused import fused_kl_div_loss
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    described = Eagle3SpeculatorConfig(
        transformer_layer_config=llama_config("simple_flex_attention"),
        draft_vocab_size=SHAPE.draft_vocab_size,
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=list(SHAPE.aux_layers),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=case.ttt)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Eagle3DraftModel(described)
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    model.lm_head.weight.requires_grad_(case.trained)
    loss_config = {"kl_div": (torch.compiler.disable(fused_kl_div_loss), 1.0)}
    batches = []
    for group in packs(case):
        lengths = [record["tokens"] for record in group]
        mask = torch.zeros(PACK, dtype=torch.bool)
        mask[: sum(lengths)] = torch.cat([mask_of(case.documents[record["index"]]) for record in group])
        numbers = torch.full((PACK,), -1)
        numbers[: sum(lengths)] = torch.repeat_interleave(torch.arange(len(group)), torch.tensor(lengths))
        positions = torch.zeros(PACK, dtype=torch.long)
        positions[: sum(lengths)] = torch.cat([torch.arange(length) for length in lengths])
        states = torch.randn(1, PACK, 4 * SHAPE.hidden_size, device="cuda", dtype=torch.bfloat16)
        ids = torch.randint(0, SHAPE.vocab_size, (1, PACK), device="cuda")
        batches.append((states, ids, *(part[None].cuda() for part in (numbers, mask, positions))))

    def run() -> None:
        for states, ids, numbers, mask, positions in batches:
            for parameter in model.parameters():
                parameter.grad = None
            _, loss, _ = model(
                states[..., SHAPE.hidden_size :],
                ids,
                numbers,
                loss_mask=mask,
                position_ids=positions,
                verifier_last_hidden_states=states[..., : SHAPE.hidden_size],
                ttt_steps=case.ttt,
                loss_config=loss_config,
            )
            loss.backward()

    return run


def specforge_step(case: Case) -> Callable[[], None]:
    """Its batches of 4, padded to the longest; it has no frozen lm_head."""
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    config = llama_config("eager")  # transformers' own, which its layer does not use
    config.draft_vocab_size, config.pad_token_id = SHAPE.draft_vocab_size, 0
    config.rope_theta, config.rope_scaling = SHAPE.rope["rope_theta"], None
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        draft = LlamaForCausalLMEagle3(config, attention_backend="flex_attention")
    torch.set_default_dtype(torch.float32)
    draft.embed_tokens.weight.requires_grad_(False)
    inside = torch.arange(SHAPE.vocab_size, device="cuda") < SHAPE.draft_vocab_size
    draft.t2d.copy_(inside)
    model = OnlineEagle3Model(draft, length=case.ttt, attention_backend="flex_attention")
    head = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, device="cuda", dtype=torch.bfloat16) * 0.02
    batches = []
    for start in range(0, len(case.documents), 4):
        group = case.documents[start : start + 4]
        longest = max(tokens for tokens, _ in group)
        mask, seen = torch.zeros(len(group), longest, dtype=torch.int), torch.zeros(len(group), longest).long()
        for row, document in enumerate(group):
            mask[row, : document[0]], seen[row, : document[0]] = mask_of(document).int(), 1
        states = torch.randn(len(group), longest, 4 * SHAPE.hidden_size, device="cuda", dtype=torch.bfloat16)
        ids = torch.randint(0, SHAPE.vocab_size, (len(group), longest), device="cuda")
        batches.append((states, ids, mask[..., None].cuda(), seen.cuda()))

    def run() -> None:
        for states, ids, mask, seen in batches:
            for parameter in model.parameters():
                parameter.grad = None
            output = model(
                input_ids=ids,
                attention_mask=seen,
                target=None,
                loss_mask=mask,
                hidden_states=states[..., SHAPE.hidden_size :],
                target_hidden_for_compact=states[..., : SHAPE.hidden_size],
                target_head_weight=head,
            )
            sum(output[0]).backward()

    return run


# --------------------------------------------------------------------------------------------------- main


def sustained_rate(seconds: float = 1.5) -> float:
    """Floating-point operations a second of products like matmul_rate's, back to back: the chip's power limit shows."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    started, done = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        for _ in range(10):
            a @ b
        torch.cuda.synchronize()
        done += 10
    return done * 2 * 8192**3 / (time.perf_counter() - started)


def measure(name: str, step: str) -> dict[str, Any]:
    case = CASES[name]
    torch.manual_seed(0)
    made = {"ours": our_step, "speculators": speculators_step, "specforge": specforge_step}[step](case)
    run, flops = made if isinstance(made, tuple) else (made, None)
    rate = matmul_rate(torch.bfloat16)
    ms, memory = timed(run)
    tokens = sum(length for length, _ in case.documents)
    result = {"ms": ms, "tokens_per_second": tokens / ms * 1e3, "peak_gib": memory, "matmul_tflops": rate / 1e12}
    if flops:
        sustained = sustained_rate()
        result |= {"tflop": flops / 1e12, "share_of_matmul_rate": flops / (ms / 1e3) / rate}
        result |= {"sustained_tflops": sustained / 1e12, "share_of_sustained_rate": flops / (ms / 1e3) / sustained}
        result["recompiled"] = recompiled(case)
    return result


def recompiled(case: Case) -> int:
    """Kernels compiled anew over random batches after those of the case have run."""
    import triton

    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(facts)
    rng = random.Random(1)
    for _ in range(8):
        documents = tuple((n, rng.randint(8, n)) for n in (rng.randint(16, 900) for _ in range(rng.randint(1, 5))))
        our_step(dataclasses.replace(case, documents=documents))[0]()
    return len(compiled)


def profile(name: str) -> None:
    """Where the time of our step goes, by kind of kernel."""
    run, _ = our_step(CASES[name])
    for _ in range(3):
        run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    print(recorded.key_averages().table(sort_by="self_cuda_time_total", row_limit=80, max_name_column_width=110))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--profile", choices=CASES, help="instead: kernels of our step in this case")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "STEP"), help=argparse.SUPPRESS)  # in this process
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: no GPU is visible; this benchmark measures one")
    if arguments.profile:
        profile(arguments.profile)
        return
    if arguments.one:
        print(json.dumps(measure(*arguments.one)))
        return
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": {}}
    for name in arguments.cases:
        found: dict[str, Any] = {}
        results["cases"][name] = found
        for step in arguments.steps:
            if STEPS[step] and importlib.util.find_spec(STEPS[step]) is None:
                print(f"{name:<16} {step:<12} not installed", flush=True)
                continue
            if step == "specforge" and not CASES[name].trained:
                continue
            command = [sys.executable, __file__, "--output-dir", arguments.output_dir, "--one", name, step]
            done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"{name:<16} {step:<12} failed, see above", flush=True)
                continue
            found[step] = one = json.loads(done.stdout.strip().splitlines()[-1])
            share = ""
            if step == "ours":
                share = f", {one['share_of_matmul_rate']:.0%} of the matmul rate, "
                share += f"{one['share_of_sustained_rate']:.0%} of the sustained one, {one['recompiled']} recompiled"
            times = f", {one['ms'] / found['ours']['ms']:.2f} x ours" if step != "ours" and "ours" in found else ""
            print(
                f"{name:<16} {step:<12} {one['ms']:8.1f} ms {one['tokens_per_second']:10,.0f} tok/s "
                f"{one['peak_gib']:6.1f} GiB{share}{times}",
                flush=True,
            )
            artifacts.save_json(arguments.output_dir / "train_step.json", results)


if __name__ == "__main__":
    main()
