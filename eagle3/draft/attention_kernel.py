"""The functions of attention.py as Triton kernels: the scores never leave a multiprocessor.

Shared keys go through tiles as in FlashAttention (Dao 2023, arXiv:2307.08691). What is special: rows are any ascending
positions of packed documents, each of which sees one range of keys, so that the tiles that need a mask are known from
the ends of ranges; and a row's own keys of later steps enter the same softmax before the row is written. Backward needs
no more than the final output and the log-sum-exp over both kinds of keys.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from eagle3.draft.attention import KEY_BLOCK, Cache, SharedKeys

LOG2_E = 1.4426950408889634
OWN_ROWS = 16  # rows of a program over own keys


# Numbers that change from batch to batch are not specialised: a kernel is compiled once, whatever the batch
of_a_batch = triton.jit(do_not_specialize=["rows", "tokens", "steps"])


@dataclass(frozen=True)
class Tiles:
    """Rows and keys of a tile, warps and pipeline stages of the three kernels over shared keys."""

    forward: tuple[int, int, int, int]
    query_grad: tuple[int, int, int, int]
    keys_grad: tuple[int, int, int, int]  # its keys divide KEY_BLOCK


LARGE = Tiles((128, 64, 8, 3), (128, 64, 8, 3), (64, 128, 8, 2))  # measured on an H200 with heads of 128
SMALL = Tiles((64, 64, 4, 2), (64, 32, 4, 2), (32, 128, 8, 1))  # GPUs with 100 KB of shared memory
# Heads over 128, up to 256: what fits into the same memory
LARGE_WIDE = Tiles((64, 64, 8, 2), (64, 32, 8, 2), (32, 64, 8, 2))
SMALL_WIDE = Tiles((64, 32, 8, 2), (32, 32, 4, 2), (16, 64, 8, 1))


@cache
def _tiles(width: int) -> Tiles:
    small, large = (SMALL_WIDE, LARGE_WIDE) if width > 128 else (SMALL, LARGE)
    if not torch.cuda.is_available():  # Triton's interpreter
        return small
    return large if torch.cuda.get_device_properties().shared_memory_per_block_optin > 160_000 else small


@triton.jit
def _load(base, rows, stride, limit, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """[rows, PADDED] of a matrix whose rows lie `stride` apart; beyond WIDTH columns and `limit` rows zeros."""
    columns = tl.arange(0, PADDED)
    place = base + rows[:, None] * stride + columns[None]
    if PADDED != WIDTH:
        return tl.load(place, mask=(rows[:, None] < limit) & (columns[None] < WIDTH), other=0.0)
    if MASKED:
        return tl.load(place, mask=rows[:, None] < limit, other=0.0)
    return tl.load(place)


@triton.jit
def _block_of_rows(block, first_in, last_in, rows, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Its rows, which of them exist, and the keys that each sees, from first to last. Tiles of KEYS keys go from `low`
    to `end`; those from `full` up to `rest` are seen by all rows."""
    begin = block * ROWS
    final = tl.minimum(begin + ROWS, rows) - 1
    at = begin + tl.arange(0, ROWS)
    exists = at < rows
    first = tl.load(first_in + at, mask=exists, other=0).to(tl.int32)
    last = tl.load(last_in + at, mask=exists, other=-1).to(tl.int32)
    low, latest = tl.load(first_in + begin).to(tl.int32), tl.load(first_in + final).to(tl.int32)
    earliest, end = tl.load(last_in + begin).to(tl.int32), tl.load(last_in + final).to(tl.int32) + 1
    full = low + tl.cdiv(latest - low, KEYS) * KEYS
    rest = full + tl.maximum(earliest + 1 - full, 0) // KEYS * KEYS
    return at, exists, first, last, low, full, rest, end


@triton.jit
def _forward_tile(
    mixed, total, highest, q, key, value, start, end, first, last, stride, scale,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    places = start + tl.arange(0, KEYS)
    k = _load(key, places, stride, end, WIDTH, PADDED, MASKED)
    scores = tl.dot(q, tl.trans(k)) * scale  # [rows, keys], in powers of 2
    if MASKED:
        scores = tl.where((places[None] >= first[:, None]) & (places[None] <= last[:, None]), scores, float("-inf"))
    above = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - above[:, None])
    fade = tl.exp2(highest - above)
    v = _load(value, places, stride, end, WIDTH, PADDED, MASKED)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None])
    return mixed, total * fade + tl.sum(weights, 1), above


@of_a_batch
def _forward(
    query, key, value, own_key, own_value, first_in, last_in, out, lse_out, rows, heads, kv_heads, steps, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    head = tl.program_id(1)
    kv_head = head // (heads // kv_heads)
    at, exists, first, last, low, full, rest, end = _block_of_rows(block, first_in, last_in, rows, ROWS, KEYS)

    q = _load(query + head * WIDTH, at.to(tl.int64), heads * WIDTH, rows, WIDTH, PADDED, True)
    key += kv_head * WIDTH
    value += kv_head * WIDTH
    stride = kv_heads * WIDTH
    mixed = tl.zeros([ROWS, PADDED], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    highest = tl.full([ROWS], -1e30, tl.float32)
    for start in range(low, tl.minimum(full, end), KEYS):
        mixed, total, highest = _forward_tile(
            mixed, total, highest, q, key, value, start, end, first, last, stride, scale, KEYS, WIDTH, PADDED, True
        )
    for start in range(full, rest, KEYS):
        mixed, total, highest = _forward_tile(
            mixed, total, highest, q, key, value, start, end, first, last, stride, scale, KEYS, WIDTH, PADDED, False
        )
    for start in range(rest, end, KEYS):
        mixed, total, highest = _forward_tile(
            mixed, total, highest, q, key, value, start, end, first, last, stride, scale, KEYS, WIDTH, PADDED, True
        )
    wide = q.to(tl.float32)
    columns = tl.arange(0, PADDED)
    inside = exists[:, None] & (columns[None] < WIDTH)
    place = at.to(tl.int64)[:, None] * stride + kv_head * WIDTH + columns[None]
    for _ in range(0, steps):
        k = tl.load(own_key + place, mask=inside, other=0.0).to(tl.float32)
        score = tl.sum(wide * k, 1) * scale
        above = tl.maximum(highest, score)
        weight, fade = tl.exp2(score - above), tl.exp2(highest - above)
        v = tl.load(own_value + place, mask=inside, other=0.0).to(tl.float32)
        mixed = mixed * fade[:, None] + weight[:, None] * v
        total = total * fade + weight
        highest = above
        own_key += rows * stride
        own_value += rows * stride
    place = (at.to(tl.int64) * heads + head)[:, None] * WIDTH + columns[None]
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(lse_out + head * rows + at, (highest + tl.log2(total)) / 1.4426950408889634, mask=exists)


@of_a_batch
def _own_backward(
    out_grad, query, own_key, own_value, out, lse_in, delta_out, query_grad, own_key_grad, own_value_grad,
    rows, heads, kv_heads, steps, scale,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Gradients that pass through a row's own keys, and delta, the sum of output times its gradient."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kv_head = tl.program_id(1)
    exists = at < rows
    columns = tl.arange(0, PADDED)
    inside = exists[:, None] & (columns[None] < WIDTH)
    group = heads // kv_heads
    for head in range(kv_head * group, (kv_head + 1) * group):
        place = (at.to(tl.int64) * heads + head)[:, None] * WIDTH + columns[None]
        q = tl.load(query + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(out_grad + place, mask=inside, other=0.0).to(tl.float32)
        delta = tl.sum(grad * tl.load(out + place, mask=inside, other=0.0).to(tl.float32), 1)
        lse = tl.load(lse_in + head * rows + at, mask=exists, other=0.0)
        tl.store(delta_out + head * rows + at, delta, mask=exists)
        q_grad = tl.zeros([ROWS, PADDED], tl.float32)
        own = (at.to(tl.int64) * kv_heads + kv_head)[:, None] * WIDTH + columns[None]
        for _ in range(0, steps):
            k = tl.load(own_key + own, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(own_value + own, mask=inside, other=0.0).to(tl.float32)
            weight = tl.exp(tl.sum(q * k, 1) * scale - lse)
            score_grad = weight * (tl.sum(grad * v, 1) - delta) * scale
            q_grad += score_grad[:, None] * k
            k_grad = tl.load(own_key_grad + own, mask=inside, other=0.0).to(tl.float32) + score_grad[:, None] * q
            v_grad = tl.load(own_value_grad + own, mask=inside, other=0.0).to(tl.float32) + weight[:, None] * grad
            tl.store(own_key_grad + own, k_grad.to(own_key_grad.dtype.element_ty), mask=inside)
            tl.store(own_value_grad + own, v_grad.to(own_value_grad.dtype.element_ty), mask=inside)
            own += (rows * kv_heads * WIDTH).to(tl.int64)
        tl.store(query_grad + place, q_grad.to(query_grad.dtype.element_ty), mask=inside)


@triton.jit
def _query_grad_tile(
    q_grad, q, grad, lse, delta, key, value, start, end, first, last, stride, scale,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    places = start + tl.arange(0, KEYS)
    k = _load(key, places, stride, end, WIDTH, PADDED, MASKED)
    v = _load(value, places, stride, end, WIDTH, PADDED, MASKED)
    weights = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
    if MASKED:
        weights = tl.where((places[None] >= first[:, None]) & (places[None] <= last[:, None]), weights, 0.0)
    score_grad = weights * (tl.dot(grad, tl.trans(v)) - delta[:, None])
    return tl.dot(score_grad.to(k.dtype), k, q_grad)


@of_a_batch
def _query_grad(
    out_grad, query, key, value, first_in, last_in, lse_in, delta_in, query_grad, rows, heads, kv_heads, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Adds what passes through the shared keys to query_grad."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    at, exists, first, last, low, full, rest, end = _block_of_rows(block, first_in, last_in, rows, ROWS, KEYS)

    q = _load(query + head * WIDTH, at.to(tl.int64), heads * WIDTH, rows, WIDTH, PADDED, True)
    grad = _load(out_grad + head * WIDTH, at.to(tl.int64), heads * WIDTH, rows, WIDTH, PADDED, True)
    lse = tl.load(lse_in + head * rows + at, mask=exists, other=0.0) * 1.4426950408889634
    delta = tl.load(delta_in + head * rows + at, mask=exists, other=0.0)
    kv_head = head // (heads // kv_heads)
    key += kv_head * WIDTH
    value += kv_head * WIDTH
    stride = kv_heads * WIDTH
    factor = scale * 1.4426950408889634
    q_grad = tl.zeros([ROWS, PADDED], tl.float32)
    for start in range(low, tl.minimum(full, end), KEYS):
        q_grad = _query_grad_tile(
            q_grad, q, grad, lse, delta, key, value, start, end, first, last, stride, factor, KEYS, WIDTH, PADDED, True
        )
    for start in range(full, rest, KEYS):
        q_grad = _query_grad_tile(
            q_grad, q, grad, lse, delta, key, value, start, end, first, last, stride, factor, KEYS, WIDTH, PADDED, False
        )
    for start in range(rest, end, KEYS):
        q_grad = _query_grad_tile(
            q_grad, q, grad, lse, delta, key, value, start, end, first, last, stride, factor, KEYS, WIDTH, PADDED, True
        )
    columns = tl.arange(0, PADDED)
    place = query_grad + (at.to(tl.int64) * heads + head)[:, None] * WIDTH + columns[None]
    inside = exists[:, None] & (columns[None] < WIDTH)
    q_grad = q_grad * scale + tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, q_grad.to(query_grad.dtype.element_ty), mask=inside)


@triton.jit
def _keys_grad_tile(
    k_grad, v_grad, k, v, places, query, out_grad, first_in, last_in, lse_in, delta_in, begin, rows, stride, scale,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    at = begin + tl.arange(0, ROWS)
    q = _load(query, at.to(tl.int64), stride, rows, WIDTH, PADDED, MASKED)
    grad = _load(out_grad, at.to(tl.int64), stride, rows, WIDTH, PADDED, MASKED)
    if MASKED:
        lse = tl.load(lse_in + at, mask=at < rows, other=0.0)
        delta = tl.load(delta_in + at, mask=at < rows, other=0.0)
    else:
        lse = tl.load(lse_in + at)
        delta = tl.load(delta_in + at)
    weights = tl.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None] * 1.4426950408889634)  # [keys, rows]
    if MASKED:
        first = tl.load(first_in + at, mask=at < rows, other=0)
        last = tl.load(last_in + at, mask=at < rows, other=-1)
        weights = tl.where((places[:, None] >= first[None]) & (places[:, None] <= last[None]), weights, 0.0)
    v_grad = tl.dot(weights.to(grad.dtype), grad, v_grad)
    score_grad = weights * (tl.dot(v, tl.trans(grad)) - delta[None])
    return tl.dot(score_grad.to(q.dtype), q, k_grad), v_grad


@of_a_batch
def _keys_grad(
    out_grad, query, key, value, first_in, last_in, seen_by, lse_in, delta_in, key_grad, value_grad,
    rows, tokens, heads, kv_heads, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Adds to the gradients of shared keys and values."""
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    places = block * KEYS + tl.arange(0, KEYS)
    seen_by += block * KEYS // BLOCK * 4  # of the block that these keys are part of
    some = tl.load(seen_by).to(tl.int32)
    every = tl.load(seen_by + 1).to(tl.int32)
    until = tl.load(seen_by + 2).to(tl.int32)
    end = tl.load(seen_by + 3).to(tl.int32)
    full = some + tl.cdiv(every - some, ROWS) * ROWS
    rest = full + tl.maximum(tl.minimum(until, end) - full, 0) // ROWS * ROWS

    kv_stride = kv_heads * WIDTH
    k = _load(key + kv_head * WIDTH, places, kv_stride, tokens, WIDTH, PADDED, True)
    v = _load(value + kv_head * WIDTH, places, kv_stride, tokens, WIDTH, PADDED, True)
    k_grad = tl.zeros([KEYS, PADDED], tl.float32)
    v_grad = tl.zeros([KEYS, PADDED], tl.float32)
    stride = heads * WIDTH
    factor = scale * 1.4426950408889634
    group = heads // kv_heads
    for head in range(kv_head * group, (kv_head + 1) * group):
        q, grad = query + head * WIDTH, out_grad + head * WIDTH
        lse, delta = lse_in + head * rows, delta_in + head * rows
        for begin in range(some, tl.minimum(full, end), ROWS):
            k_grad, v_grad = _keys_grad_tile(
                k_grad, v_grad, k, v, places, q, grad, first_in, last_in, lse, delta, begin, rows, stride, factor,
                ROWS, WIDTH, PADDED, True,
            )  # fmt: skip
        for begin in range(full, rest, ROWS):
            k_grad, v_grad = _keys_grad_tile(
                k_grad, v_grad, k, v, places, q, grad, first_in, last_in, lse, delta, begin, rows, stride, factor,
                ROWS, WIDTH, PADDED, False,
            )  # fmt: skip
        for begin in range(rest, end, ROWS):
            k_grad, v_grad = _keys_grad_tile(
                k_grad, v_grad, k, v, places, q, grad, first_in, last_in, lse, delta, begin, rows, stride, factor,
                ROWS, WIDTH, PADDED, True,
            )  # fmt: skip
    columns = tl.arange(0, PADDED)
    place = places.to(tl.int64)[:, None] * kv_stride + kv_head * WIDTH + columns[None]
    inside = (places[:, None] < tokens) & (columns[None] < WIDTH)
    k_grad = k_grad * scale + tl.load(key_grad + place, mask=inside, other=0.0).to(tl.float32)
    v_grad += tl.load(value_grad + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(key_grad + place, k_grad.to(key_grad.dtype.element_ty), mask=inside)
    tl.store(value_grad + place, v_grad.to(value_grad.dtype.element_ty), mask=inside)


def attend(query: torch.Tensor, cache: Cache, shared: SharedKeys, step: int, out: torch.Tensor) -> torch.Tensor:
    """attention.attend of contiguous tensors."""
    rows, heads, width = query.shape
    lse = torch.empty(heads, rows, dtype=torch.float32, device=query.device)
    block, keys, warps, stages = _tiles(width).forward
    _forward[(triton.cdiv(rows, block), heads)](
        query,
        cache.keys,
        cache.values,
        cache.own_keys,
        cache.own_values,
        shared.first,
        shared.last,
        out,
        lse,
        rows,
        heads,
        cache.keys.shape[1],
        step,
        width**-0.5 * LOG2_E,
        ROWS=block,
        KEYS=keys,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        num_warps=warps,
        num_stages=stages,
    )
    return lse


def attend_backward(
    out_grad: torch.Tensor,
    query: torch.Tensor,
    cache: Cache,
    shared: SharedKeys,
    step: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    query_grad: torch.Tensor,
    grads: Cache,
) -> None:
    """attention.attend_backward of contiguous tensors."""
    rows, heads, width = query.shape
    tokens, kv_heads, _ = cache.keys.shape
    sizes = {"WIDTH": width, "PADDED": triton.next_power_of_2(width)}
    scale, delta = width**-0.5, torch.empty_like(lse)
    _own_backward[(triton.cdiv(rows, OWN_ROWS), kv_heads)](
        out_grad,
        query,
        cache.own_keys,
        cache.own_values,
        out,
        lse,
        delta,
        query_grad,
        grads.own_keys,
        grads.own_values,
        rows,
        heads,
        kv_heads,
        step,
        scale,
        ROWS=OWN_ROWS,
        num_warps=4,
        **sizes,
    )
    block, keys, warps, stages = _tiles(width).query_grad
    _query_grad[(triton.cdiv(rows, block), heads)](
        out_grad,
        query,
        cache.keys,
        cache.values,
        shared.first,
        shared.last,
        lse,
        delta,
        query_grad,
        rows,
        heads,
        kv_heads,
        scale,
        ROWS=block,
        KEYS=keys,
        num_warps=warps,
        num_stages=stages,
        **sizes,
    )
    block, keys, warps, stages = _tiles(width).keys_grad
    _keys_grad[(triton.cdiv(tokens, keys), kv_heads)](
        out_grad,
        query,
        cache.keys,
        cache.values,
        shared.first,
        shared.last,
        shared.seen_by,
        lse,
        delta,
        grads.keys,
        grads.values,
        rows,
        tokens,
        heads,
        kv_heads,
        scale,
        ROWS=block,
        KEYS=keys,
        BLOCK=KEY_BLOCK,
        num_warps=warps,
        num_stages=stages,
        **sizes,
    )
