"""Attention of the draft at one TTT step: over the shared step-0 keys, and each row's own keys of later steps.

At step k a row t attends to the step-0 keys of its own document up to t, and to its own keys of steps 1..k: accepted
tokens' draft keys are recomputed from true target states, so nothing else is ever in a server's cache. One softmax is
over both; no key tensor grows from step to step.

In plain torch; attention_kernel.py has the same functions as Triton kernels, backend.py chooses.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

KEY_BLOCK = 128  # keys that attention_kernel's gradient knows the rows of
AT_ONCE = 2**26  # float32 scores at a time, in plain torch


@dataclass(frozen=True)
class SharedKeys:
    """Which step-0 keys each row sees: those of its document up to itself, a range."""

    first: torch.Tensor  # int64 [R], first position of the row's document
    last: torch.Tensor  # int64 [R], the row's own position, ascending
    # int64 [key blocks, 4], rows of each block of KEY_BLOCK keys: from column 0 up to column 3 rows see some of the
    # keys; of these, from column 1 up to column 2 they see all
    seen_by: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, documents: torch.Tensor, device: torch.device | str) -> "SharedKeys":
        """Of rows int64 [R] among ascending document numbers int64 [T], both on the CPU."""
        first = torch.searchsorted(documents, documents[rows])  # [R]
        low = torch.arange(0, len(documents), KEY_BLOCK)  # first key of each block
        high = (low + KEY_BLOCK - 1).clamp(max=len(documents) - 1)
        seen_by = [torch.searchsorted(rows, low), torch.searchsorted(rows, high)]
        seen_by += [torch.searchsorted(first, low, right=True), torch.searchsorted(first, high, right=True)]
        return cls(first.to(device), rows.to(device), torch.stack(seen_by, 1).to(device))


@dataclass(frozen=True)
class Cache:
    """Keys and values that the rows of a batch attend to; of gradients, the same shapes."""

    keys: torch.Tensor  # [T, kv_heads, d], of step 0
    values: torch.Tensor
    own_keys: torch.Tensor  # [K - 1, R, kv_heads, d], of steps 1 to K - 1
    own_values: torch.Tensor


def attend(query: torch.Tensor, cache: Cache, shared: SharedKeys, step: int, out: torch.Tensor) -> torch.Tensor:
    """Fills out for query, both [R, heads, d], at `step`. Returns the log-sum-exp of all scores, float [heads, R]."""
    rows, heads, width = query.shape
    lse = torch.empty(heads, rows, dtype=torch.float32, device=query.device)
    for part, q, k, v, unseen in _documents(query, cache, shared):
        scores = (q @ k.transpose(-1, -2)).float().masked_fill(unseen, float("-inf"))  # [kv, group, r, t]
        own = torch.einsum("kgrd,srkd->kgrs", q, cache.own_keys[:step, part]).float()  # [kv, group, r, step]
        total = torch.cat([scores, own], -1).logsumexp(-1)  # [kv, group, r]
        mixed = (scores - total[..., None]).exp().to(v.dtype) @ v  # [kv, group, r, d]
        weights = (own - total[..., None]).exp().to(v.dtype)
        mixed += torch.einsum("kgrs,srkd->kgrd", weights, cache.own_values[:step, part])
        out[part] = mixed.permute(2, 0, 1, 3).reshape(-1, heads, width)
        lse[:, part] = total.reshape(heads, -1).to(lse.dtype)
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
    """The gradient of `attend` from that of its output: fills query_grad [R, heads, d] and adds to `grads`.

    query_grad may be the same memory as `out`.
    """
    heads, width = query.shape[1:]
    kv_heads = cache.keys.shape[1]
    for part, q, k, v, unseen in _documents(query, cache, shared):
        grad = out_grad[part].view(-1, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3)  # [kv, group, r, d]
        mixed = out[part].view(-1, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3)
        total = lse[:, part].view(kv_heads, heads // kv_heads, -1, 1)
        delta = (grad.float() * mixed.float()).sum(-1, keepdim=True)  # [kv, group, r, 1]
        scores = (q @ k.transpose(-1, -2)).float().masked_fill(unseen, float("-inf"))
        weights = (scores - total).exp()  # [kv, group, r, t]
        scores_grad = (weights * ((grad @ v.transpose(-1, -2)).float() - delta)).to(v.dtype)
        keys, values = cache.own_keys[:step, part], cache.own_values[:step, part]  # [step, r, kv, d]
        own = (torch.einsum("kgrd,srkd->kgrs", q, keys).float() - total).exp()  # [kv, group, r, step]
        own_grad = (own * (torch.einsum("kgrd,srkd->kgrs", grad, values).float() - delta)).to(v.dtype)
        q_grad = (scores_grad @ k + torch.einsum("kgrs,srkd->kgrd", own_grad, keys)) * width**-0.5
        query_grad[part] = q_grad.permute(2, 0, 1, 3).reshape(-1, heads, width)
        start, end = int(shared.first[part.start]), int(shared.last[part.stop - 1]) + 1
        grads.keys[start:end] += (scores_grad.transpose(-1, -2) @ q).sum(1).transpose(0, 1)
        grads.values[start:end] += (weights.to(v.dtype).transpose(-1, -2) @ grad).sum(1).transpose(0, 1)
        grads.own_keys[:step, part] += torch.einsum("kgrs,kgrd->srkd", own_grad, q)
        grads.own_values[:step, part] += torch.einsum("kgrs,kgrd->srkd", own.to(v.dtype), grad)


def _documents(query: torch.Tensor, cache: Cache, shared: SharedKeys) -> Iterator[tuple]:
    """Each document that has rows by itself, or some rows of a long one: their range, query times the scale
    [kv, group, r, d], keys and values up to the last row [kv, 1, t, d], and which of these each row does not see,
    bool [r, t]."""
    _, heads, width = query.shape
    kv_heads = cache.keys.shape[1]
    stop = 0
    starts, counts = shared.first.unique_consecutive(return_counts=True)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        begin, stop = stop, stop + count
        most = max(1, AT_ONCE // (heads * (int(shared.last[stop - 1]) + 1 - start)))  # rows
        for part in (slice(row, min(row + most, stop)) for row in range(begin, stop, most)):
            end = int(shared.last[part.stop - 1]) + 1
            q = query[part].view(-1, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3) * width**-0.5
            k, v = (one[start:end].transpose(0, 1)[:, None] for one in (cache.keys, cache.values))
            yield part, q, k, v, torch.arange(start, end, device=query.device) > shared.last[part][:, None]
