"""The training step as its definition reads, without any shortcut: what the fast one must equal.

Every position at every step, attention over a dense mask, the whole width of q, k and v, float32 losses.
"""

import torch
import torch.nn.functional as F

from eagle3.draft.model import Batch, DraftModel


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos[:, None] + torch.cat([-x[..., half:], x[..., :half]], -1) * sin[:, None]


def plain_step(
    model: DraftModel, batch: Batch, teacher_logits: torch.Tensor, normaliser: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss [K], likeliest ids [K, R], overlap [K, R]) of `batch`, in the dtype of the model's weights."""
    layer, attention, eps = model.midlayer, model.midlayer.self_attn, model.config.rms_norm_eps
    ids, documents, positions = batch.input_ids, batch.documents, batch.positions
    tokens = len(ids)
    place = torch.arange(tokens, device=ids.device)
    seen = (documents[:, None] == documents[None]) & (place[None] <= place[:, None])  # [T, T]
    width = model.config.head_dim
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    log_p = teacher_logits.float().log_softmax(-1)  # [S, D]
    inside = None if normaliser is None else (teacher_logits.float().logsumexp(-1) - normaliser).exp()

    aux = batch.aux_hidden  # [T, A * H]
    if model.config.fc_norm:
        parts = aux.split(model.config.hidden_size, -1)
        aux = torch.cat([norm(part, one.weight, eps) for part, one in zip(parts, model.fc_norm, strict=True)], -1)
    hidden = model.fc(aux)  # [T, H]
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    losses, predicted, overlaps = [], [], []
    for step in range(len(batch.valid)):
        after = (place + 1 + step).clamp(max=tokens - 1)
        embedded = norm(model.embed_tokens[ids[after]], layer.input_layernorm.weight, eps)
        x = torch.cat([embedded, norm(hidden, layer.hidden_norm.weight, eps)], -1)  # [T, 2H]
        cos, sin = (part.to(x.dtype) for part in model.rotary(positions + step))
        query = rotate(attention.q_proj(x).unflatten(1, (-1, width)), cos, sin)  # [T, heads, d]
        keys.append(rotate(attention.k_proj(x).unflatten(1, (-1, width)), cos, sin).repeat_interleave(group, 1))
        values.append(attention.v_proj(x).unflatten(1, (-1, width)).repeat_interleave(group, 1))
        scale = width**-0.5
        scores = torch.einsum("rhd,thd->hrt", query, keys[0]) * scale
        scores = scores.masked_fill(~seen, float("-inf"))
        own = [(query * key).sum(-1).T[..., None] * scale for key in keys[1:]]  # k x [heads, T, 1]
        weights = torch.cat([scores, *own], -1).float().softmax(-1).to(x.dtype)  # [heads, T, T + k]
        mixed = torch.einsum("hrt,thd->rhd", weights[..., :tokens], values[0])
        for number, value in enumerate(values[1:]):
            mixed = mixed + weights[..., tokens + number].T[..., None] * value
        hidden = hidden + attention.o_proj(mixed.flatten(1))
        x = norm(hidden, layer.post_attention_layernorm.weight, eps)
        hidden = hidden + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x))
        normed = norm(hidden, model.norm.weight, eps)
        hidden = normed if model.config.norm_output else hidden
        logits = model.lm_head(normed)[batch.rows].float()  # [R, D]
        log_q = logits.log_softmax(-1)
        at = batch.teacher_index[step]
        kl = (log_p[at].exp() * (log_p[at] - log_q)).sum(-1)  # [R]
        losses.append(kl[batch.valid[step]].sum())
        predicted.append(logits.argmax(-1))
        p = log_p[at].exp() * (1 if inside is None else inside[at, None])
        overlaps.append(torch.minimum(p, log_q.exp()).sum(-1))
    return torch.stack(losses), torch.stack(predicted), torch.stack(overlaps)
