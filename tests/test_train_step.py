"""The fast training step against its plain definition: losses, predictions, overlap and every gradient.

Runs on the CPU in float32, and where there is a GPU on it too, in bfloat16 against float32.
"""

import copy
import os
import subprocess
import sys

import pytest
import torch
from conftest import REPOSITORY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_draft_for_tests import plain_step

from eagle3.draft import attention, loss, ops
from eagle3.draft.attention import BLOCK, SharedKeys, ttt_attention
from eagle3.draft.config import DraftConfig
from eagle3.draft.loss import Teacher
from eagle3.draft.model import Batch, DraftModel
from eagle3.training.supervision import empty_batch, make_batch

VOCAB, DRAFT_VOCAB = 128, 48
pytestmark = pytest.mark.usefixtures("one_thread")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def config_of(
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    draft_vocab: int = DRAFT_VOCAB,
    norms: tuple[bool, bool] = (False, False),
) -> DraftConfig:
    """`norms`: fc_norm and norm_output."""
    return DraftConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=4096,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
        aux_layers=(1, 2, 3),
        fc_norm=norms[0],
        norm_output=norms[1],
    )


def random_model(config: DraftConfig, seed: int, *, train_head: bool = True) -> DraftModel:
    torch.manual_seed(seed)
    model = DraftModel(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.embed_tokens.normal_()
    model.lm_head.weight.requires_grad_(train_head)
    return model


def random_batch(config: DraftConfig, masks: list[list[bool]], steps: int, supervision: str, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for mask in masks:
        loss_mask = torch.tensor(mask)
        ids = torch.randint(0, VOCAB, (len(mask),), generator=generator, dtype=torch.int32)
        aux = torch.randn(len(mask), len(config.aux_layers) * config.hidden_size, generator=generator)
        final = torch.randn(int(loss_mask.sum()), config.hidden_size, generator=generator)
        samples.append({"input_ids": ids, "loss_mask": loss_mask, "aux_hidden": aux, "final_hidden": final})
    return make_batch(samples, steps, supervision)


def turns(*runs: int) -> list[bool]:
    """A loss mask of runs of prompt and answer tokens, by turns."""
    return [bool(number % 2) for number, run in enumerate(runs) for _ in range(run)]


def gradients(model: DraftModel, losses: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a sum with a weight for each step, as the training loop makes it."""
    model.zero_grad()
    (losses * torch.linspace(1.0, 0.3, len(losses), device=losses.device)).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-12)).item()


def teacher_of(config: DraftConfig, batch: Batch, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [S, D] and a normaliser [S] that leaves some probability outside the draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(len(batch.final_hidden), config.draft_vocab_size, generator=generator)
    return logits, logits.logsumexp(-1) + torch.rand(len(logits), generator=generator)


# --------------------------------------------------------------------------------------------------- CPU


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    masks=st.lists(st.lists(st.integers(1, 14), min_size=2, max_size=6), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (8, 2)]),
    steps=st.integers(1, 8),
    supervision=st.sampled_from(["served", "shifted-mask"]),
    train_head=st.booleans(),
    recompute=st.booleans(),
    norms=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 999),
)
def test_equals_the_plain_step(masks, heads, steps, supervision, train_head, recompute, norms, seed):
    config = config_of(heads=heads[0], kv_heads=heads[1], norms=norms)
    batch = random_batch(config, [turns(*runs) for runs in masks], steps, supervision, seed)
    if not batch.rows.numel():
        return
    model = random_model(config, seed, train_head=train_head)
    model.recompute = recompute
    logits, normaliser = teacher_of(config, batch, seed)
    want, want_best, want_overlap = plain_step(model, batch, logits, normaliser)
    want_gradients = gradients(model, want)
    output = model(batch, Teacher(logits, normaliser))
    assert torch.allclose(output.loss, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(output.predicted[batch.valid], want_best[batch.valid])
    assert torch.allclose(output.overlap[batch.valid], want_overlap[batch.valid], atol=1e-5)
    got = gradients(model, output.loss)
    assert got.keys() == want_gradients.keys() and ("lm_head.weight" in got) == train_head
    for name, gradient in got.items():
        assert difference(gradient, want_gradients[name]) < 1e-4, name


def test_two_backward_passes_add_up():
    """Gradient accumulation: what is summed in place must not be the parameter's own gradient."""
    config = config_of()
    model = random_model(config, 1)
    batches = [random_batch(config, [turns(5, 9, 3, 6)], 3, "served", seed) for seed in (1, 2)]
    teachers = [teacher_of(config, batch, 3)[0] for batch in batches]
    single = []
    for batch, logits in zip(batches, teachers, strict=True):
        single.append(gradients(model, model(batch, Teacher(logits)).loss))
    model.zero_grad()
    for batch, logits in zip(batches, teachers, strict=True):
        (model(batch, Teacher(logits)).loss * torch.linspace(1.0, 0.3, 3)).sum().backward()
    for name, parameter in model.named_parameters():
        assert difference(parameter.grad, single[0][name] + single[1][name]) < 1e-5, name


def test_an_empty_batch_runs_the_whole_model():
    """Of a rank without rows: every parameter gets a gradient, of zeros."""
    config = config_of()
    model = random_model(config, 1)
    batch = empty_batch(config, 4)
    model(batch, Teacher(torch.randn(1, DRAFT_VOCAB))).loss.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_prompt_tokens_cost_no_query(monkeypatch):
    """Rows of every matmul but fc and those of step 0's keys and values follow the supervised positions."""
    config = config_of()
    batch = random_batch(config, [turns(100, 10)], 3, "served", 1)
    counted = []
    real = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: counted.append(len(a)) or real(a, b))
    real_addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda s, a, b: counted.append(len(a)) or real_addmm(s, a, b))
    random_model(config, 1)(batch, Teacher(torch.randn(10, DRAFT_VOCAB)))
    assert batch.rows.numel() == 9
    assert sorted(counted, reverse=True)[:4] == [110] * 4  # both halves of k and v
    assert max(sorted(counted)[:-4]) <= 10  # the embedding's half of q: positions t+1 to t+3 of the rows


# -------------------------------------------------------------------------------------------- block masks


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 700), min_size=1, max_size=6), share=st.floats(0.02, 1), seed=st.integers(0, 99))
def test_block_masks_hold_what_rows_see(lengths, share, seed):
    """Blocks said to be full are full, and all that is seen lies in the blocks that are named."""
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.rand(len(documents), generator=generator) < share).nonzero()[:, 0]
    if not rows.numel():
        return
    from eagle3.draft.attention import _block_mask

    plain = SharedKeys.of(rows, documents, "cpu")
    mask = _block_mask(plain.first, plain.last, len(documents), (plain.first, plain.last))
    column = torch.arange(len(documents))
    seen = (column[None] >= plain.first[:, None]) & (column[None] <= plain.last[:, None])  # [R, T]
    row_blocks, key_blocks = -(-len(rows) // BLOCK), -(-len(documents) // BLOCK)
    padded = torch.zeros(row_blocks * BLOCK, key_blocks * BLOCK, dtype=torch.bool)
    padded[: len(rows), : len(documents)] = seen
    blocks = padded.view(row_blocks, BLOCK, key_blocks, BLOCK)
    named = torch.zeros(row_blocks, key_blocks, dtype=torch.int)
    for counts, indices, kind in (
        (mask.kv_num_blocks, mask.kv_indices, 1),
        (mask.full_kv_num_blocks, mask.full_kv_indices, 2),
    ):
        for block in range(row_blocks):
            at = indices[0, 0, block, : int(counts[0, 0, block])].long()
            assert not named[block, at].any()
            named[block, at] = kind
    assert not (blocks.any(1).any(-1) & (named == 0)).any()
    for block, key in (named == 2).nonzero().tolist():
        inside = min(len(rows), (block + 1) * BLOCK) - block * BLOCK
        assert blocks[block, :inside, key].all() and (key + 1) * BLOCK <= len(documents)
    for row in range(0, len(rows), 37):
        got = mask.mask_mod(torch.tensor(0), torch.tensor(0), torch.tensor(row), column)
        assert torch.equal(got, seen[row])


def test_merging_by_log_sum_exp_is_one_softmax():
    generator = torch.Generator().manual_seed(0)
    rows, heads, kv_heads, width, tokens, own = 7, 6, 2, 8, 20, 3

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, keys, values = made(rows, heads, width), made(tokens, kv_heads, width), made(tokens, kv_heads, width)
    own_keys, own_values = made(own, rows, kv_heads, width), made(own, rows, kv_heads, width)
    shared = SharedKeys.of(torch.arange(5, 12), torch.zeros(tokens, dtype=torch.long), "cpu")
    got = ttt_attention(query, keys, values, shared, list(zip(own_keys, own_values, strict=True)))
    for row in range(rows):
        end = int(shared.last[row]) + 1
        for head in range(heads):
            kv = head // (heads // kv_heads)
            k = torch.cat([keys[:end, kv], own_keys[:, row, kv]])
            v = torch.cat([values[:end, kv], own_values[:, row, kv]])
            want = (k @ query[row, head] * width**-0.5).softmax(0) @ v
            assert torch.allclose(got[row, head], want, atol=1e-6)


# -------------------------------------------------------------------------------------------------- loss

INTERPRETED = """
import torch
from eagle3.draft.loss import Teacher, Text, compare, kernel_works
from eagle3.draft.loss_kernel import compare_on_gpu
torch.manual_seed(0)
for columns, dtype in ((1000, torch.float32), (9001, torch.bfloat16), (4096, torch.float32)):
    logits, other = 3 * torch.randn(17, columns, dtype=dtype), 3 * torch.randn(9, columns, dtype=dtype)
    logits[3, 5] = logits[3, 700] = 40.0  # the first of equal ones is the likeliest
    index, valid = torch.randint(0, 9, (17,)), torch.rand(17) < 0.7
    labels = torch.randint(0, columns, (9,)).index_fill(0, torch.tensor([2, 6]), -1)
    for teacher in (Teacher(other), Teacher(other, other.float().logsumexp(-1) + 0.3), Text(labels)):
        twin, kernel = logits.clone(), logits.clone()
        for want, got in zip(
            compare(twin, teacher, index, valid),
            compare_on_gpu(kernel, teacher, index, valid),
            strict=True,
        ):
            assert torch.allclose(want.float(), got.float(), atol=1e-5), (want, got)
        assert (twin.float() - kernel.float()).abs().max() < (1e-6 if dtype == torch.float32 else 1e-2)
        assert not kernel[~valid].any() and kernel[valid].any()
assert kernel_works(torch.bfloat16, "cpu") and kernel_works(torch.float32, "cpu")
"""


@pytest.mark.slow
def test_the_kernel_is_its_twin():
    """By Triton's interpreter, which needs no GPU."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-c", INTERPRETED], cwd=REPOSITORY, env=environment, check=True)


def test_the_twin_leaves_the_gradient_in_the_place_of_the_logits(monkeypatch):
    monkeypatch.setattr(loss, "AT_ONCE", 4)  # several chunks
    logits = torch.randn(11, 50, dtype=torch.float64, requires_grad=True)
    other = torch.randn(6, 50, dtype=torch.float64)
    index, valid = torch.randint(0, 6, (11,)), torch.arange(11) % 3 > 0
    log_p = other[index].log_softmax(-1)
    kl = log_p.exp() * (log_p - logits.log_softmax(-1))  # [R, D]
    kl.sum(-1)[valid].sum().backward()
    replaced = logits.detach().clone()
    got, best, _ = loss.compare(replaced, Teacher(other), index, valid)
    assert torch.allclose(got[valid], kl.sum(-1)[valid].float(), atol=1e-5) and not got[~valid].any()
    assert torch.equal(best, logits.argmax(-1))
    assert torch.allclose(replaced, logits.grad, atol=1e-6)


def test_cross_entropy_is_torchs(monkeypatch):
    monkeypatch.setattr(loss, "AT_ONCE", 4)
    logits = torch.randn(11, 50, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([3, -1, 49, 0, 7, -1])
    index, valid = torch.arange(11) % 6, torch.arange(11) % 3 > 0
    counts = valid & (labels[index] >= 0)
    wanted = torch.nn.functional.cross_entropy(logits, labels[index], ignore_index=-1, reduction="none")
    wanted[counts].sum().backward()
    replaced = logits.detach().clone()
    got, best, _ = loss.compare(replaced, loss.Text(labels), index, valid)
    assert torch.allclose(got, torch.where(counts, wanted, 0.0).float(), atol=1e-5)
    assert torch.equal(best, logits.argmax(-1)) and torch.allclose(replaced, logits.grad, atol=1e-6)


def test_a_frozen_lm_head_gets_no_gradient_at_any_step():
    """What is handed on to the next step is frozen too: else that one computes a [D, H] gradient for nothing."""
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8)
    teacher, index, valid = Teacher(torch.randn(4, 16)), torch.arange(4), torch.ones(4, dtype=torch.bool)
    for frozen in (True, False):
        _, following, _, _ = loss.linear_loss(x, weight.requires_grad_(not frozen), teacher, index, valid)
        assert following.requires_grad is not frozen


def test_the_text_after_each_supervised_position():
    config = config_of()
    batch = random_batch(config, [turns(2, 3, 1, 2), turns(1, 4)], 2, "served", 1)
    ids = batch.input_ids.tolist()
    assert batch.following.tolist() == [ids[3], ids[4], ids[5], ids[7], -1, ids[10], ids[11], ids[12], -1]


def test_a_kernel_that_is_wrong_or_does_not_run_is_not_used(monkeypatch, capsys):
    from eagle3.draft import loss_kernel

    def wrong(logits, teacher, index, valid):
        kl, best, overlap = loss.compare_plainly(logits, teacher, index, valid)
        return 1.1 * kl, best, overlap

    for kernel, words in ((wrong, "its numbers are off by"), (lambda *_: 1 / 0, "ZeroDivisionError")):
        loss.kernel_works.cache_clear()
        monkeypatch.setattr(loss_kernel, "compare_on_gpu", kernel)
        assert not loss.kernel_works(torch.float32, "cpu")
        assert words in capsys.readouterr().err
    loss.kernel_works.cache_clear()


# --------------------------------------------------------------------------------------------------- GPU


@needs_gpu
def test_the_compiled_parts_work_also_if_an_evaluation_comes_first():
    attention.flex_fits.cache_clear()
    ops.compiles.cache_clear()
    with torch.no_grad():
        assert ops.compiles() and attention.flex_fits(8, 128, 2, torch.bfloat16)
    assert loss.kernel_works(torch.bfloat16, "cuda")


@needs_gpu
@pytest.mark.parametrize("head_dim", [64, 112, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2)])
@pytest.mark.parametrize("steps", [1, 4, 8])
@pytest.mark.parametrize(("train_head", "norms"), [(True, (False, False)), (False, (True, True))])
def test_bfloat16_on_a_gpu_agrees_with_float32(head_dim, heads, kv_heads, steps, train_head, norms):
    config = config_of(256, heads, kv_heads, head_dim, draft_vocab=1000, norms=norms)
    batch = random_batch(config, [turns(150, 130, 40, 99), turns(9, 300), turns(500, 20)], steps, "served", steps)
    exact = random_model(config, 1, train_head=train_head).cuda()
    rounded = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict(rounded.state_dict())  # the same weights
    exact.embed_tokens.copy_(rounded.embed_tokens)
    logits, normaliser = (part.cuda() for part in teacher_of(config, batch, 5))
    on_gpu = batch.to("cuda", torch.bfloat16)
    wide = batch.to("cuda", torch.float32)
    wide.aux_hidden = on_gpu.aux_hidden.float()
    want, want_best, want_overlap = plain_step(exact, wide, logits.bfloat16().float(), normaliser)
    want_gradients = gradients(exact, want)
    output = rounded(on_gpu, Teacher(logits.bfloat16(), normaliser))
    assert torch.allclose(output.loss, want, rtol=0.01)
    valid = on_gpu.valid
    assert (output.predicted == want_best)[valid].float().mean() > 0.95
    assert (output.overlap - want_overlap)[valid].abs().mean() < 0.01
    for name, gradient in gradients(rounded, output.loss).items():
        assert difference(gradient, want_gradients[name]) < 0.05, name
