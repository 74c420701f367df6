"""The training code's figures of an export, and those of the second reader of its files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rescore import Export, rescore
from states_for_tests import AUX_LAYERS, write_states

from eagle3 import artifacts
from eagle3.draft.config import derive
from eagle3.draft.loss import Teacher
from eagle3.draft.model import DraftModel
from eagle3.export import config_json, draft_to_target, export_tensors, read_export, target_to_draft, write_export
from eagle3.target import TargetHead, open_target, read_embedding, read_final_norm, read_lm_head
from eagle3.training.metrics import Acceptance, measure
from eagle3.training.supervision import make_batch

YARN = {
    "rope_theta": 50000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}

NORMS = {"fc_norm": True, "norm_output": True}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of tiny products: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def follow_drafts(samples: list[dict[str, torch.Tensor]], draft: DraftModel, target_ids: torch.Tensor) -> None:
    """Rewrite the answers so that the three drafts of every fifth start are right: there must be chains to count."""
    lengths = [len(sample["input_ids"]) for sample in samples]
    for _ in range(40):  # each pass settles the next tokens, for they depend on those before
        batch = make_batch(samples, 3, "served")
        drafted = draft(batch, Teacher(torch.zeros(len(batch.final_hidden), len(target_ids)))).predicted  # [K, R]
        ids = torch.cat([sample["input_ids"] for sample in samples])
        for step in range(3):
            chosen = batch.valid[step] & (torch.arange(batch.rows.numel()) % 5 == 0)
            ids[batch.rows[chosen] + 2 + step] = target_ids[drafted[step, chosen]].int()
        for sample, part in zip(samples, ids.split(lengths), strict=True):
            sample["input_ids"] = part


@torch.no_grad()
@pytest.mark.parametrize("stated", [None, YARN, NORMS], ids=["default", "yarn", "norms"])
def test_a_second_reader_gets_the_same_loss_and_walk(tiny_target: Path, tmp_path: Path, stated: dict | None) -> None:
    """Also what T02 asks for: the shape is only in the files, and our own reader takes exactly those tensors."""
    write_states(tmp_path, tiny_target, count=2)
    target = open_target(str(tiny_target), weights=True)
    vocab = artifacts.load_tensors(tmp_path / "vocab_map" / "vocab_map.pt")
    config = derive(target, 64, AUX_LAYERS, stated)
    torch.manual_seed(0)
    model = DraftModel(config)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1))
    model.embed_tokens.copy_(read_embedding(target))
    write_export(tmp_path / "export", export_tensors(model, vocab), config_json(config, target), "card")

    samples = [artifacts.load_tensors(artifacts.sample_path(tmp_path / "hidden_states", i)) for i in range(2)]
    draft = read_export(tmp_path / "export", config).float()
    head = TargetHead(target, torch.float32, "cpu", rows=draft_to_target(vocab["d2t"]))
    inverse = target_to_draft(vocab["d2t"], target.vocab_size)
    follow_drafts(samples, draft, draft_to_target(vocab["d2t"]))
    batch, sums = make_batch(samples, 4, "served"), Acceptance(4)
    measure(draft(batch, Teacher(head(batch.final_hidden))), batch, inverse, sums)
    norm, rows = read_final_norm(target), read_lm_head(target)
    score = rescore(Export(tmp_path / "export"), samples, norm, head.eps, rows, 4)
    assert score.rows == sums.rows
    assert score.loss == pytest.approx([a / n for a, n in zip(sums.loss, sums.rows, strict=True)], rel=1e-4)
    assert (score.starts(), score.accepted()) == (sums.starts, sums.accepted)
    assert score.by_position() == sums.position
    assert all(sums.position[:3]), "no chain of right drafts, so that the walk was not tried"
