"""The export in speculators' layout: that library computes the same logits from its files, and vLLM the same drafts."""

import json
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from test_golden import STEPS, reference_loss, samples

from eagle3.draft import loss, training_time_test
from eagle3.draft.config import derive
from eagle3.draft.loss import Teacher
from eagle3.draft.model import DraftModel
from eagle3.export import export_tensors
from eagle3.export_speculators import write_speculators
from eagle3.target import open_target
from eagle3.training.supervision import make_batch

DRAFT_VOCAB = 96
YARN = json.loads((REPOSITORY / "configs/drafts/kimi_k25.json").read_text())["rope_scaling"]


def vocab_map(vocab_size: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(0, 3 * DRAFT_VOCAB, 3)
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": t2d}


@torch.no_grad()
@pytest.mark.parametrize(
    "stated",
    [None, {"rope_theta": 50000.0, "rope_scaling": YARN, "head_dim": 16}, {"fc_norm": True, "norm_output": True}],
)
def test_speculators_gives_the_same_logits(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: dict | None
) -> None:
    torch.manual_seed(3)
    target = open_target(str(tiny_target), weights=True)
    config = derive(target, DRAFT_VOCAB, [2, 4, 5], stated)
    ours = DraftModel(config)
    for parameter in ours.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1))
    ours.embed_tokens.copy_(torch.randn_like(ours.embed_tokens) * 0.1)
    ours.to(torch.bfloat16).float()  # an export is bf16
    vocab = vocab_map(target.vocab_size)
    directory = tmp_path / "export-speculators"
    write_speculators(directory, export_tensors(ours, vocab), config, target, STEPS, "card")
    assert sorted(path.name for path in directory.iterdir()) == ["README.md", "config.json", "model.safetensors"]

    described = Eagle3SpeculatorConfig.from_pretrained(directory)
    described.transformer_layer_config._attn_implementation = "eager"
    theirs = Eagle3DraftModel.from_pretrained(directory, config=described).float()
    assert torch.equal(theirs.d2t, vocab["d2t"]) and torch.equal(theirs.t2d, vocab["t2d"])
    logits: dict[str, list[torch.Tensor]] = {"ours": [], "theirs": []}

    def compare(own: torch.Tensor, *others: object) -> object:
        logits["ours"].append(own.clone())  # the loss puts its gradient in their place
        return loss.compare(own, *others)

    monkeypatch.setattr(training_time_test, "compare", compare)
    theirs.lm_head.register_forward_hook(lambda module, args, output: logits["theirs"].append(output[0]))
    documents = samples()[:1]
    reference_loss(theirs, documents)
    picked = [d | {"final_hidden": d["final_hidden"][d["loss_mask"]]} for d in documents]
    batch = make_batch(picked, STEPS, "served")
    ours(batch, Teacher(torch.zeros(len(picked[0]["final_hidden"]), DRAFT_VOCAB)))
    assert len(logits["ours"]) == len(logits["theirs"]) == STEPS
    for step, (mine, reference) in enumerate(zip(logits["ours"], logits["theirs"], strict=True)):
        counted = batch.valid[step]
        # its rows are shifted by one: row t holds the states at t and the token at t+1
        wanted = reference[batch.rows[counted]]
        assert wanted.std() > 0.05
        torch.testing.assert_close(mine[counted], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norms", [{}, {"fc_norm"}, {"norm_output"}], ids=["none", "fc_norm", "norm_output"])
def test_every_norm_flag_is_stated_and_no_remote_code_comes_along(
    tiny_target: Path, tmp_path: Path, norms: set[str]
) -> None:
    target = open_target(str(tiny_target), weights=True)
    config = derive(target, target.vocab_size, [2, 4, 5], norms=norms)
    write_speculators(tmp_path / "x", export_tensors(DraftModel(config), {}), config, target, 3, "card")
    described = json.loads((tmp_path / "x" / "config.json").read_text())
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert described[flag] is (flag in norms)
    assert "auto_map" not in described and described["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert described["speculators_config"]["verifier"] == {
        "name_or_path": str(tiny_target),
        "architectures": ["LlamaForCausalLM"],
    }
