"""The Llama-type EAGLE-3 draft (Li et al. 2025, arXiv:2503.01840) and its training-time test.

Alignment, positions t of one document; x are tokens, g the target's concatenated aux states, p_t the target's
distribution at t (it predicts x[t+1]):

    step 0   fc(g[t])      with embed(x[t+1])    at rope position t      predicts x[t+2]     teacher p[t+1]
    step k   output k-1    with embed(x[t+1+k])  at rope position t+k    predicts x[t+2+k]   teacher p[t+1+k]

The output handed on is the residual stream before the final norm, not sent through fc again.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3.draft.attention import ttt_attention
from eagle3.draft.config import DraftConfig
from eagle3.draft.loss import Teacher
from eagle3.states import dequantise


@dataclass
class Batch:
    """Packed documents and the rows (start positions of drafts) that are computed. T tokens, R rows, K steps."""

    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T], position inside the document
    documents: torch.Tensor  # int64 [T], ascending document number
    aux_hidden: torch.Tensor  # [T, A * H]; as stored until `to` restores fp8
    final_hidden: torch.Tensor  # [S, H], states of the supervised positions before the target's final norm; likewise
    rows: torch.Tensor  # int64 [R], positions t that start a draft
    valid: torch.Tensor  # bool [K, R], whether (t, k) counts
    teacher_index: torch.Tensor  # int64 [K, R], row of final_hidden at t+1+k (0 where not valid)
    next_ids: torch.Tensor  # int64 [K, R], x[t+1+k] (0 where there is none)
    labels: torch.Tensor  # int64 [K, R], x[t+2+k], -1 where there is none
    aux_scale: torch.Tensor | None = None  # float32 [T, A], of fp8 states
    final_scale: torch.Tensor | None = None  # float32 [S], likewise

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Batch":
        """Move to `device`, where fp8 states are restored; aux states are cast to `dtype`."""
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if value is not None and name not in ("final_hidden", "final_scale")
        }
        aux, scale = moved["aux_hidden"], moved.pop("aux_scale", None)
        if scale is not None:
            aux = dequantise(aux.view(*scale.shape, -1), scale, dtype).flatten(1)
        moved |= {"aux_hidden": aux.to(dtype), "final_hidden": self.final_states(slice(None), device, dtype)}
        return Batch(**moved)

    def final_states(self, rows: slice, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
        """Some rows of final_hidden on `device`; fp8 is restored to `dtype`."""
        states = self.final_hidden[rows].to(device, non_blocking=True)
        if self.final_scale is None:
            return states
        return dequantise(states, self.final_scale[rows].to(device, non_blocking=True), dtype)


@dataclass
class StepOutput:
    """What the training loop and the metrics need of one forward pass."""

    loss: torch.Tensor  # float [K], KL summed over the valid rows of each step
    predicted: torch.Tensor  # int64 [K, R], draft-vocabulary id of the likeliest token
    overlap: torch.Tensor | None = None  # float [K, R], Teacher.overlap, where the teacher can tell


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, half-split layout: x [N, heads, d]; cos, sin [N, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


class Attention(nn.Module):
    """q, k and v take [norm(embed), norm(hidden)], twice the width."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query = config.num_attention_heads * config.head_dim
        key = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[N, heads * d] -> [N, heads, d]."""
        return x.view(x.shape[0], -1, self.head_dim)


class MLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)


class DraftModel(nn.Module):
    """Trainable: fc, midlayer, norm and (unless frozen) lm_head, under the names servers read.

    The target's embedding is a buffer: frozen, and kept out of checkpoints.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.aux_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("embed_tokens", torch.empty(config.vocab_size, config.hidden_size), persistent=False)
        # A plain attribute: a buffer's inverse frequencies would be cast to bf16 with the module
        self._rotary = [LlamaRotaryEmbedding(config.llama())]

    @torch.no_grad()
    def initialise(self, embedding: torch.Tensor, head_rows: torch.Tensor, seed: int) -> None:
        """Fresh weights: matrices normal(0, 0.02), norms one; embedding [V, H] is the target's, and lm_head starts as
        the target's rows [D, H]."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
        self.embed_tokens.copy_(embedding)
        self.lm_head.weight.copy_(head_rows)

    def rotary(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [N, d] at integer positions [N]."""
        rotary = self._rotary[0].to(positions.device)
        probe = torch.empty(0, dtype=dtype, device=positions.device)
        cos, sin = rotary(probe, positions[None])
        return cos[0], sin[0]

    def forward(self, batch: Batch, teacher: Teacher) -> StepOutput:
        """Run all TTT steps over the rows of `batch`; gradients flow through every step."""
        layer, attention = self.midlayer, self.midlayer.self_attn
        dtype = self.fc.weight.dtype
        hidden = self.fc(batch.aux_hidden)  # [T, H]
        # the token after each position; the last of a document is never read by a valid row
        following = batch.input_ids.roll(-1)  # [T]
        x = torch.cat(
            [layer.input_layernorm(self.embed_tokens[following]), layer.hidden_norm(hidden)], dim=-1
        )  # [T, 2H]
        cos, sin = self.rotary(batch.positions, dtype)
        keys = rotate(attention.heads(attention.k_proj(x)), cos, sin)  # [T, kv, d]
        values = attention.heads(attention.v_proj(x))  # [T, kv, d]

        rows = batch.rows
        column = torch.arange(batch.input_ids.shape[0], device=rows.device)
        same = batch.documents[rows][:, None] == batch.documents[None]
        allowed = same & (column[None] <= rows[:, None])  # [R, T]
        hidden, x, cos, sin = hidden[rows], x[rows], cos[rows], sin[rows]
        own_keys: list[torch.Tensor] = []
        own_values: list[torch.Tensor] = []
        losses, predicted, overlap = [], [], []
        for step in range(batch.valid.shape[0]):
            if step:
                embedded = layer.input_layernorm(self.embed_tokens[batch.next_ids[step]])
                x = torch.cat([embedded, layer.hidden_norm(hidden)], dim=-1)  # [R, 2H]
                cos, sin = self.rotary(batch.positions[rows] + step, dtype)
                own_keys.append(rotate(attention.heads(attention.k_proj(x)), cos, sin))  # [R, kv, d]
                own_values.append(attention.heads(attention.v_proj(x)))  # [R, kv, d]
            query = rotate(attention.heads(attention.q_proj(x)), cos, sin)  # [R, heads, d]
            mixed = ttt_attention(query, keys, values, allowed, own_keys, own_values)
            hidden = hidden + attention.o_proj(mixed.flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))  # [R, H]
            logits = self.lm_head(self.norm(hidden))  # [R, D]
            kl = teacher.kl(logits, batch.teacher_index[step])  # [R]
            losses.append(torch.where(batch.valid[step], kl, 0.0).sum())
            predicted.append(logits.detach().argmax(-1))
            if teacher.inside is not None:
                overlap.append(teacher.overlap(logits.detach(), batch.teacher_index[step]))
        return StepOutput(torch.stack(losses), torch.stack(predicted), torch.stack(overlap) if overlap else None)
