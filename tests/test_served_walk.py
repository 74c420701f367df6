"""The walk says what servers count: against a chain speculation written out step by step, and against vLLM."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from capture_for_tests import random_prompts
from rescore import Export
from served_walk import Answer, count_walk, open_draft, plain_answers, served
from states_for_tests import AUX_LAYERS
from transformers import AutoModelForCausalLM

from eagle3.draft.config import NORM_KEYS, derive
from eagle3.draft.loss import Teacher
from eagle3.draft.model import DraftModel
from eagle3.export import config_json, export_tensors, write_export
from eagle3.served_check import Counts
from eagle3.target import Target, TargetHead, open_target, read_embedding
from eagle3.training.supervision import make_batch

TRAINED_STEPS = 60


PROMPTS, TOKENS, DRAFTS = 12, 40, 3


@dataclass
class Plain:
    """A small random target's greedy answers: with states to train on, and as vLLM writes them."""

    target: Target
    samples: list[dict[str, torch.Tensor]]
    answers: list[Answer]


@dataclass
class Served:
    """The target with a draft that is half good at it, as vLLM served them."""

    target: Target
    export: Path
    answers: list[Answer]
    identical: int
    counts: Counts


@pytest.fixture(scope="module")
def plain(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    target = open_target(str(tiny_target), weights=True)
    prompts = random_prompts([8 + 3 * n for n in range(PROMPTS)], seed=5)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    samples = [sample_of(model, prompt, TOKENS + DRAFTS) for prompt in prompts]
    log = tmp_path_factory.mktemp("plain") / "engine.log"
    return Plain(target, samples, plain_answers(target, prompts, DRAFTS, TOKENS, log))


@pytest.fixture(scope="module", params=[(), NORM_KEYS], ids=["eagle-3", "eagle-3.1"])
def served_draft(plain: Plain, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    scratch = tmp_path_factory.mktemp("served-walk")
    export = scratch / "export"
    train_on(plain.samples, plain.target, export, request.param)
    (result,) = served(plain.target, export, [plain.answers], DRAFTS, TOKENS, scratch / "engine.log")
    return Served(plain.target, export, plain.answers, *result)


@torch.no_grad()
def sample_of(model, prompt: list[int], tokens: int) -> dict[str, torch.Tensor]:
    """A greedy answer with its states, as stage 02 would write it."""
    ids = torch.tensor([prompt])
    ids = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )
    before_norm = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0][0]))
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    hook.remove()
    return {
        "input_ids": ids[0].int(),
        "loss_mask": torch.arange(ids.shape[1]) >= len(prompt),
        "aux_hidden": torch.cat([states[layer][0] for layer in AUX_LAYERS], dim=-1),
        "final_hidden": before_norm[0][len(prompt) :],
    }


def train_on(samples: list[dict[str, torch.Tensor]], target: Target, export: Path, norms: tuple[str, ...]) -> None:
    """A draft for these answers; some of their tokens are outside its vocabulary."""
    torch.manual_seed(0)
    seen, counts = torch.cat([sample["input_ids"][sample["loss_mask"]] for sample in samples]).unique(
        return_counts=True
    )
    ids = seen[counts.argsort(descending=True)][: int(0.9 * len(seen))].sort().values.long()
    config = derive(target, len(ids), AUX_LAYERS, norms=norms)
    head = TargetHead(target, torch.float32, "cpu", rows=ids)
    draft = DraftModel(config)
    draft.initialise(read_embedding(target), head.weight, seed=0)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=5e-3)
    batch = make_batch(samples, DRAFTS, "served")
    with torch.no_grad():
        teacher = Teacher(head(batch.final_hidden))
    for _ in range(TRAINED_STEPS):
        optimizer.zero_grad()
        draft(batch, teacher).loss.sum().div(batch.valid.sum()).backward()
        optimizer.step()
    mark = torch.zeros(target.vocab_size, dtype=torch.bool)
    mark[ids] = True
    vocab = {"d2t": ids - torch.arange(len(ids)), "t2d": mark}
    write_export(export, export_tensors(draft, vocab), config_json(config, target), "made for a test")


@torch.no_grad()
def speculate(model, export: Export, aux_layers: list[int], prompt: list[int], tokens: int, drafts: int) -> list[int]:
    """Chain speculation as a server does it, by definition: accepted drafts of each step until `tokens` are out.

    Everything is computed anew from what has been written: the target's states, the draft's keys, the drafts from the
    draft's own tokens, and the target's verdict on them.
    """
    written, accepted = [], []

    def run(ids: list[int]):
        return model(input_ids=torch.tensor([ids]), output_hidden_states=True)

    written.append(int(run(prompt).logits[0, -1].argmax()))  # prefill
    while len(written) < tokens:
        known = prompt + written
        states = run(known).hidden_states
        fused = [export.fused(torch.cat([states[i][0, t] for i in aux_layers])) for t in range(len(known) - 1)]
        true = [export.projections(known[t + 1], fused[t], t) for t in range(len(known) - 1)]
        keys, values = [k for _, k, _ in true], [v for _, _, v in true]
        hidden, query, proposed = fused[-1], true[-1][0], []
        for k in range(drafts):
            if k:
                query, key, value = export.projections(proposed[-1], hidden, len(known) - 2 + k)
                keys, values = [*keys, key], [*values, value]
            hidden, logits = export.step(hidden, query, keys, values)
            proposed.append(int(export.target_ids[logits.argmax()]))
        verdict = run(known + proposed).logits[0, len(known) - 1 :].argmax(-1).tolist()
        right = next((n for n, (a, b) in enumerate(zip(proposed, verdict, strict=False)) if a != b), drafts)
        accepted.append(right)
        written += [*proposed[:right], verdict[right]]
    return accepted


@pytest.mark.slow
def test_the_walk_is_what_vllm_counts(served_draft: Served, tmp_path: Path) -> None:
    assert served_draft.identical == PROMPTS
    draft, d2t = open_draft(served_draft.target, served_draft.export)
    (walked,) = count_walk(served_draft.answers, served_draft.target, draft, d2t, [DRAFTS], tmp_path)
    assert walked == served_draft.counts
    first, *_, last = walked.report()["acceptance_by_position"]
    assert 0.2 < last < first < 0.95, "all or nothing accepted tells nothing"


@pytest.mark.slow
def test_the_walk_is_chain_speculation(served_draft: Served, tiny_target: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    export = Export(served_draft.export)
    draft, d2t = open_draft(served_draft.target, served_draft.export)
    for answer in served_draft.answers[:3]:
        steps = speculate(model, export, AUX_LAYERS, answer.prompt, answer.length, DRAFTS)
        (counts,) = count_walk([answer], served_draft.target, draft, d2t, [DRAFTS], tmp_path)
        assert (counts.drafts, counts.accepted) == (len(steps), sum(steps))
        assert counts.by_position == [sum(step > k for step in steps) for k in range(DRAFTS)]
