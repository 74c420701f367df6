"""Attention of the draft at one TTT step: over the shared step-0 keys, and each row's own keys of later steps.

At step k a row t attends to the step-0 keys of its own document up to t, and to its own keys of steps 1..k: accepted
tokens' draft keys are recomputed from true target states, so nothing else is ever in a server's cache. The shared part
comes with its log-sum-exp, by which the own keys are merged: no key tensor grows from step to step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from eagle3 import terminal
from eagle3.draft.ops import compiles, fused

BLOCK = 128  # rows and keys of a FlexAttention block


@dataclass(frozen=True)
class SharedKeys:
    """Which step-0 keys each row sees: those of its document up to itself, a range."""

    first: torch.Tensor  # int64 [R], first position of the row's document
    last: torch.Tensor  # int64 [R], the row's own position, ascending
    mask: BlockMask | None = None  # on a GPU

    @classmethod
    def of(cls, rows: torch.Tensor, documents: torch.Tensor, device: torch.device | str) -> "SharedKeys":
        """Of rows int64 [R] among ascending document numbers int64 [T], both on the CPU."""
        first = torch.searchsorted(documents, documents[rows])  # [R]
        on_device = first.to(device), rows.to(device)
        if torch.device(device).type == "cpu" or not compiles():
            return cls(*on_device)
        return cls(*on_device, _block_mask(first, rows, len(documents), on_device))


def _block_mask(
    first: torch.Tensor, last: torch.Tensor, tokens: int, on_device: tuple[torch.Tensor, torch.Tensor]
) -> BlockMask:
    """The blocks of keys that blocks of rows see in part or in full; built from the ends of ranges, never [R, T]."""
    tops = torch.arange(0, len(last), BLOCK)  # first row of each block
    bottoms = (tops + BLOCK - 1).clamp(max=len(last) - 1)
    keys = torch.arange(0, tokens, BLOCK)  # first key of each block
    low, high = first[tops], last[bottoms]  # ranges ascend: the union of a block's is [low, high]
    some = (keys[None] <= high[:, None]) & (keys[None] + BLOCK > low[:, None])  # [row blocks, key blocks]
    # all rows see all keys: the last row's document has begun, and the first row is past them
    full = some & (keys[None] >= first[bottoms][:, None]) & (keys[None] + BLOCK - 1 <= last[tops][:, None])
    rows_first, rows_last = on_device

    def sees(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (rows_first[row] <= key) & (key <= rows_last[row])

    parts = []
    for blocks in (some & ~full, full):
        order = blocks.int().argsort(dim=1, descending=True, stable=True)  # seen blocks first, ascending
        parts += [blocks.sum(1).int()[None, None], order.int()[None, None]]
    return BlockMask.from_kv_blocks(
        *(part.to(rows_first.device) for part in parts),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(last), tokens),
    )


def ttt_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    shared: SharedKeys,
    own: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """One softmax over the shared step-0 keys and each row's own later keys.

    query [R, heads, d]; keys, values of step 0 [T, kv_heads, d]; own: keys and values [R, kv_heads, d] of each of steps
    1..k. Returns [R, heads, d].
    """
    flexible = shared.mask is not None and flex_fits(*query.shape[1:], keys.shape[1], query.dtype)
    over = _flex if flexible else _over_shared
    out, lse = over(query, keys, values, shared)
    return merge(out, lse, query, own) if own else out


def _over_shared(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shared: SharedKeys
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each document by itself: on a CPU FlexAttention has no backward. Returns out [R, heads, d] and lse [R, heads]."""
    rows, heads, width = query.shape
    kv_heads = keys.shape[1]
    outs, sums = [], []
    starts, counts = shared.first.unique_consecutive(return_counts=True)
    for start, part in zip(
        starts.tolist(), torch.arange(rows, device=query.device).split(counts.tolist()), strict=True
    ):
        end = int(shared.last[part[-1]]) + 1
        q = query[part].view(len(part), kv_heads, -1, width).permute(1, 2, 0, 3) * width**-0.5  # [kv, group, r, d]
        k, v = keys[start:end].transpose(0, 1)[:, None], values[start:end].transpose(0, 1)[:, None]  # [kv, 1, t, d]
        scores = (q @ k.transpose(-1, -2)).float()  # [kv, group, r, t]
        unseen = torch.arange(start, end, device=query.device) > shared.last[part][:, None]  # [r, t]
        scores = scores.masked_fill(unseen, float("-inf"))
        lse = scores.logsumexp(-1)  # [kv, group, r]
        out = (scores - lse[..., None]).exp().to(v.dtype) @ v  # [kv, group, r, d]
        outs.append(out.permute(2, 0, 1, 3).reshape(len(part), heads, width))
        sums.append(lse.permute(2, 0, 1).reshape(len(part), heads))
    return torch.cat(outs), torch.cat(sums)


def _flex(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shared: SharedKeys
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlexAttention over the blocks of `shared`. Returns out [R, heads, d] and lse float [R, heads]."""
    out, extra = _flex_kernel()(
        query.transpose(0, 1)[None],  # [1, heads, R, d]
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        block_mask=shared.mask,
        enable_gqa=query.shape[1] != keys.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return out[0].transpose(0, 1), extra.lse[0].transpose(0, 1)


@cache
def _flex_kernel() -> Callable:
    return torch.compile(flex_attention, dynamic=True)


@cache
@torch.enable_grad()  # the first batch may be one of an evaluation
def flex_fits(heads: int, width: int, kv_heads: int, dtype: torch.dtype) -> bool:
    """Whether FlexAttention gives the right numbers on this GPU for heads of this form; says so aloud where not.

    Tried once, forward and backward, on two small documents: its tiles do not fit the shared memory of every GPU.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    group = heads // kv_heads
    documents = torch.tensor([0] * 200 + [1] * 190)
    rows = torch.tensor([*range(90, 200), *range(260, 390)])

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_()

    query, keys, values = drawn(len(rows), 2 * group, width), drawn(390, 2, width), drawn(390, 2, width)
    shared = SharedKeys.of(rows, documents, "cuda")

    def results(over: Callable, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [one.detach().to(dtype).requires_grad_() for one in (query, keys, values)]
        out, lse = over(*inputs, shared)
        (out.float().square().sum() + lse.square().sum()).backward()
        return [out.detach(), lse.detach(), *(one.grad for one in inputs)]

    try:
        pairs = zip(results(_flex, dtype), results(_over_shared, torch.float32), strict=True)
        error = max(((got.float() - want).norm() / want.norm()).item() for got, want in pairs)
        if error < 0.03:  # bfloat16 rounds by 0.004
            return True
        problem = f"its numbers are off by {error:.1%}"
    except Exception as error:
        problem = terminal.short(error)
    terminal.warn(
        f"FlexAttention does not work on this GPU for {heads} heads of {width} ({problem}): attention goes document by "
        "document, slower"
    )
    return False


@fused
def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    own: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Bring the row's own keys into a softmax that is complete over others.

    out [R, heads, d] with log-sum-exp lse float [R, heads]; own: k x (keys, values), [R, kv_heads, d] each.
    """
    rows, heads, width = query.shape
    kv_heads = own[0][0].shape[1]
    q = query.view(rows, kv_heads, heads // kv_heads, width).float() * width**-0.5
    scores = torch.stack([(q * key[:, :, None].float()).sum(-1) for key, _ in own], dim=-1)  # [R, kv, group, k]
    lse = lse.view(rows, kv_heads, -1)
    total = torch.logaddexp(lse, scores.logsumexp(-1))  # [R, kv, group]
    merged = out.view(q.shape).float() * (lse - total).exp()[..., None]
    weights = (scores - total[..., None]).exp()
    for step, (_, value) in enumerate(own):
        merged = merged + weights[..., step, None] * value[:, :, None].float()
    return merged.to(out.dtype).view(rows, heads, width)
