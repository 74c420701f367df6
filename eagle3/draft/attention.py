"""Attention of the draft at one TTT step, plain torch.

At step k a row t attends to the step-0 keys of its own document up to t, and to its own keys of steps 1..k: accepted
tokens' draft keys are recomputed from true target states, so nothing else is ever in a server's cache.
"""

import torch


def ttt_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: torch.Tensor,
    own_keys: list[torch.Tensor],
    own_values: list[torch.Tensor],
) -> torch.Tensor:
    """One softmax over the shared step-0 keys and each row's own later keys.

    query [R, heads, d]; keys, values of step 0 [T, kv_heads, d]; allowed bool [R, T]; own_keys and own_values: one
    [R, kv_heads, d] for each of steps 1..k. Returns [R, heads, d].
    """
    rows, heads, width = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    q = query.view(rows, kv_heads, group, width).permute(1, 2, 0, 3) * width**-0.5  # [kv, group, R, d]
    scores = q.reshape(kv_heads, group * rows, width) @ keys.permute(1, 2, 0)  # [kv, group * R, T]
    scores = scores.view(kv_heads, group, rows, -1).float()
    scores = scores.masked_fill(~allowed, float("-inf"))  # [kv, group, R, T]
    own = [
        (q * key.transpose(0, 1)[:, None]).sum(-1, keepdim=True).float() for key in own_keys
    ]  # k x [kv, group, R, 1]
    weights = torch.softmax(torch.cat([scores, *own], dim=-1), dim=-1).to(query.dtype)
    shared = weights[..., : keys.shape[0]].reshape(kv_heads, group * rows, -1) @ values.transpose(0, 1)
    out = shared.view(kv_heads, group, rows, width)
    for step, value in enumerate(own_values):
        out = out + weights[..., keys.shape[0] + step, None] * value.transpose(0, 1)[:, None]
    return out.permute(2, 0, 1, 3).reshape(rows, heads, width)  # [R, heads, d]
