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

from eagle3.draft import attention, backend, loss
from eagle3.draft.attention import KEY_BLOCK, Cache, SharedKeys
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
    # over a single key the gradient of q is zero, of which rounding leaves a trace
    least = 1e-3 * max(gradient.norm() for gradient in want_gradients.values())
    for name, gradient in got.items():
        assert (gradient - want_gradients[name]).norm() < 1e-4 * max(want_gradients[name].norm(), least), name


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
    real_addmm_ = torch.Tensor.addmm_
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda s, a, b: counted.append(len(a)) or real_addmm_(s, a, b))
    real_addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda s, a, b: counted.append(len(a)) or real_addmm(s, a, b))
    random_model(config, 1)(batch, Teacher(torch.randn(10, DRAFT_VOCAB)))
    assert batch.rows.numel() == 9
    assert sorted(counted, reverse=True)[:4] == [110] * 4  # both halves of k and v
    assert max(sorted(counted)[:-4]) <= 10  # the embedding's half of q: positions t+1 to t+3 of the rows


# ---------------------------------------------------------------------------------------------- attention


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 700), min_size=1, max_size=6), share=st.floats(0.02, 1), seed=st.integers(0, 99))
def test_blocks_of_keys_know_which_rows_see_them(lengths, share, seed):
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.rand(len(documents), generator=generator) < share).nonzero()[:, 0]
    if not rows.numel():
        return
    shared = SharedKeys.of(rows, documents, "cpu")
    keys = torch.arange(len(documents))
    seen = (documents[rows][:, None] == documents[None]) & (keys[None] <= rows[:, None])  # [R, T]
    assert torch.equal(seen, (keys[None] >= shared.first[:, None]) & (keys[None] <= shared.last[:, None]))
    for block, (some, every, until, end) in zip(seen.split(KEY_BLOCK, dim=1), shared.seen_by.tolist(), strict=True):
        assert not block[:some].any() and not block[end:].any()
        assert block[every:until].all()
        before, after = block[:every], block[max(every, until) :]
        assert not before.all(1).any() and not after.all(1).any()


def random_attention(width: int, heads: int, kv_heads: int, own: int) -> tuple[torch.Tensor, Cache, SharedKeys]:
    """float64 query and cache of two documents, in which some positions have rows."""
    generator = torch.Generator().manual_seed(0)
    documents = torch.tensor([0] * 12 + [1] * 9)
    rows = torch.tensor([3, 4, 9, 11, 12, 17, 20])

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    cache = Cache(*(made(21, kv_heads, width) for _ in range(2)), *(made(own, 7, kv_heads, width) for _ in range(2)))
    return made(7, heads, width), cache, SharedKeys.of(rows, documents, "cpu")


@pytest.mark.parametrize("at_once", [attention.AT_ONCE, 1, 150])  # of 6 heads and 12 or 9 keys
@pytest.mark.parametrize("step", [0, 1, 3])
def test_attention_is_one_softmax_over_shared_and_own_keys(step, at_once, monkeypatch):
    monkeypatch.setattr(attention, "AT_ONCE", at_once)
    query, cache, shared = random_attention(8, 6, 2, 3)
    for one in (query, *vars(cache).values()):
        one.requires_grad_()
    rows = []
    for row, (first, last) in enumerate(zip(shared.first.tolist(), shared.last.tolist(), strict=True)):
        for head in range(6):
            keys = torch.cat([cache.keys[first : last + 1, head // 3], cache.own_keys[:step, row, head // 3]])
            values = torch.cat([cache.values[first : last + 1, head // 3], cache.own_values[:step, row, head // 3]])
            rows.append((keys @ query[row, head] * 8**-0.5).softmax(0) @ values)
    want = torch.stack(rows).view(7, 6, 8)
    out_grad = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want.backward(out_grad)
    with torch.no_grad():
        out = torch.empty_like(query)
        lse = attention.attend(query, cache, shared, step, out)
        grads = Cache(*(torch.ones_like(one) for one in vars(cache).values()))
        query_grad = out.clone()
        attention.attend_backward(out_grad, query, cache, shared, step, query_grad, lse, query_grad, grads)
    assert torch.allclose(out, want, atol=1e-6)
    assert torch.allclose(query_grad, query.grad, atol=1e-5)
    for name, grad in vars(grads).items():
        wanted = getattr(cache, name).grad
        assert torch.allclose(grad - 1, torch.zeros_like(grad) if wanted is None else wanted, atol=1e-5), name


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


INTERPRETED_STEP = """
import torch
from eagle3.draft import backend
assert backend.ops_work(torch.float32, "cpu") and backend.ops_work(torch.bfloat16, "cpu")
assert backend.attention_works(torch.float32, 4, 4, 16, "cpu")
assert backend.attention_works(torch.float32, 4, 2, 24, "cpu")  # a width that is no power of two
assert backend.attention_works(torch.float32, 2, 2, 136, "cpu")  # a wide one
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves run, below")
@pytest.mark.parametrize("program", [INTERPRETED, INTERPRETED_STEP], ids=["loss", "step"])
def test_kernels_are_their_twins(program):
    """By Triton's interpreter, which needs no GPU."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, env=environment, check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiles", "kernel", "width", "capability", "limit"),
    [
        ("LARGE", "query_grad", 128, 80, 166_912),  # bytes for a block on an A100
        ("LARGE", "query_grad", 128, 90, 232_448),
        ("LARGE_WIDE", "forward", 256, 80, 166_912),
        ("LARGE_WIDE", "forward", 256, 90, 232_448),
        ("SMALL", "keys_grad", 128, 86, 101_376),
        ("SMALL_WIDE", "keys_grad", 256, 86, 101_376),
    ],
)
def test_tiles_fit_into_shared_memory(tiles, kernel, width, capability, limit):
    """Those that take most, compiled for GPUs that need not be here: what does not fit would run in plain torch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from eagle3.draft import attention_kernel

    rows, keys, warps, stages = getattr(getattr(attention_kernel, tiles), kernel)
    function = getattr(attention_kernel, f"_{kernel}")
    fixed = {"ROWS": rows, "KEYS": keys, "BLOCK": KEY_BLOCK, "WIDTH": width, "PADDED": width}
    fixed = {name: value for name, value in fixed.items() if name in function.arg_names}
    kinds = dict.fromkeys(("rows", "tokens", "heads", "kv_heads", "steps"), "i32") | {"scale": "fp32"}
    kinds |= dict.fromkeys(("first_in", "last_in", "seen_by"), "*i64")
    kinds |= dict.fromkeys(("lse_in", "lse_out", "delta_in"), "*fp32") | dict.fromkeys(fixed, "constexpr")
    signature = {name: kinds.get(name, "*bf16") for name in function.arg_names}
    aligned = {(n,): [["tt.divisibility", 16]] for n, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(fn=function, signature=signature, constexprs=fixed, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared <= limit


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

    def wrong_for_text(logits, teacher, index, valid):
        return (wrong if isinstance(teacher, loss.Text) else loss.compare_plainly)(logits, teacher, index, valid)

    def no_numbers(logits, teacher, index, valid):
        kl, best, overlap = loss.compare_plainly(logits, teacher, index, valid)
        return kl, best, overlap * float("nan")

    kernels = {wrong: "off by", wrong_for_text: "off by", no_numbers: "off by nan", lambda *_: 1 / 0: "ZeroDivision"}
    for kernel, words in kernels.items():
        loss.kernel_works.cache_clear()
        monkeypatch.setattr(loss_kernel, "compare_on_gpu", kernel)
        monkeypatch.setattr(loss_kernel, "log_sum_exp", loss.log_sum_exp_plainly)
        assert not loss.kernel_works(torch.float32, "cpu")
        assert words in capsys.readouterr().err
    loss.kernel_works.cache_clear()


# --------------------------------------------------------------------------------------------------- GPU


@needs_gpu
@pytest.mark.parametrize("width", [64, 80, 112, 128, 192, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2)])
def test_kernels_work_on_this_gpu(width, heads, kv_heads):
    assert backend.ops_work(torch.bfloat16, "cuda") and backend.ops_work(torch.float32, "cuda")
    assert backend.attention_works(torch.bfloat16, heads, kv_heads, width, "cuda")
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
