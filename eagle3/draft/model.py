"""The Llama-type EAGLE-3 draft (Li et al. 2025, arXiv:2503.01840) and its training-time test.

Alignment, positions t of one document; x are tokens, g the target's concatenated aux states, p_t the target's
distribution at t (it predicts x[t+1]):

    step 0   fc(g[t])      with embed(x[t+1])    at rope position t      predicts x[t+2]     teacher p[t+1]
    step k   output k-1    with embed(x[t+1+k])  at rope position t+k    predicts x[t+2+k]   teacher p[t+1+k]

The output handed on is the residual stream before the final norm (what comes out of that norm if the config has
norm_output), not sent through fc again.

The step computes what the loss needs and nothing twice, exactly:

    rows        queries are those positions that start a supervised chain; a prompt token costs its step-0 key and value
    embeddings  q, k and v are linear in [norm(embed), norm(hidden)]: the half of the embedding depends on the token
                alone, is computed once, and is taken at t+1+k in step k
    attention   over the shared step-0 keys, merged with the row's own keys by log-sum-exp
    teacher     logits once, at supervised positions, for draft ids
    gradients   of the weights that all steps share are summed inside the matmuls (ops.py)
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3.draft.attention import SharedKeys, ttt_attention
from eagle3.draft.config import DraftConfig
from eagle3.draft.loss import Teacher, Text, linear_loss
from eagle3.draft.ops import linear, rms_norm, rotate, silu_times, take
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
    reach: torch.Tensor  # int64 [K, R], position t+1+k, at most T-1
    embedded: torch.Tensor  # int64 [U], the positions in reach, ascending
    embedded_index: torch.Tensor  # int64 [K, R], place of t+1+k among them
    labels: torch.Tensor  # int64 [K, R], x[t+2+k], -1 where there is none
    following: torch.Tensor  # int64 [S], the token after each supervised position, -1 at the end of a document
    aux_scale: torch.Tensor | None = None  # float32 [T, A], of fp8 states
    final_scale: torch.Tensor | None = None  # float32 [S], likewise
    shared: SharedKeys | None = None  # what each row sees of step 0, from `rows` and `documents` unless given

    def __post_init__(self) -> None:
        if self.shared is None:
            self.shared = SharedKeys.of(self.rows, self.documents, "cpu")

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Batch":
        """Move to `device`, where fp8 states are restored; aux states are cast to `dtype`."""
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if value is not None and name not in ("final_hidden", "final_scale", "shared")
        }
        aux, scale = moved["aux_hidden"], moved.pop("aux_scale", None)
        if scale is not None:
            aux = dequantise(aux.view(*scale.shape, -1), scale, dtype).flatten(1)
        moved |= {"aux_hidden": aux.to(dtype), "final_hidden": self.final_states(slice(None), device, dtype)}
        return Batch(**moved, shared=SharedKeys.of(self.rows, self.documents, device))

    def final_states(self, rows: slice, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
        """Some rows of final_hidden on `device`; fp8 is restored to `dtype`."""
        states = self.final_hidden[rows].to(device, non_blocking=True)
        if self.final_scale is None:
            return states
        return dequantise(states, self.final_scale[rows].to(device, non_blocking=True), dtype)


@dataclass
class StepOutput:
    """What the training loop and the metrics need of one forward pass."""

    loss: torch.Tensor  # float [K], KL or cross-entropy summed over the valid rows of each step
    predicted: torch.Tensor  # int64 [K, R], draft-vocabulary id of the likeliest token
    overlap: torch.Tensor | None = None  # float [K, R], Teacher.overlap, where the teacher can tell


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


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


class Layer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)


class DraftModel(nn.Module):
    """Trainable: fc, fc_norm if the config has it, midlayer, norm and (unless frozen) lm_head, as servers name them.

    The target's embedding is a buffer: frozen, and kept out of checkpoints.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = False  # activations in backward, a step at a time, instead of keeping them
        self.fc_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in config.aux_layers)
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

    def fuse(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        """What step 0 takes, [T, H], of the aux states [T, A * H]."""
        if self.fc_norm is not None:
            chunks = aux_hidden.chunk(len(self.fc_norm), dim=-1)  # A x [T, H]
            aux_hidden = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux_hidden)

    def forward(self, batch: Batch, teacher: Teacher | Text) -> StepOutput:
        """Run all TTT steps over the rows of `batch`; gradients flow through every step."""
        layer, attention, size = self.midlayer, self.midlayer.self_attn, self.config.hidden_size
        weights = _Weights(self)
        dtype = self.fc.weight.dtype
        fused = self.fuse(batch.aux_hidden)  # [T, H]
        normed = layer.hidden_norm(fused)
        embedded = layer.input_layernorm(self.embed_tokens[batch.input_ids])  # [T, H]
        # the embedding's half of q, k and v at each token; of q only where a step takes it
        parts = {
            "q": embedded.index_select(0, batch.embedded) @ attention.q_proj.weight[:, :size].T,  # [U, heads * d]
            "k": embedded @ attention.k_proj.weight[:, :size].T,  # [T, kv * d]
            "v": embedded @ attention.v_proj.weight[:, :size].T,
        }
        # keys and values of step 0: position t with the token after it; the last one of a document serves no valid row
        cos, sin = self.rotary(batch.positions, dtype)
        keys = rotate(attention.heads(weights.use("k", normed, _following(parts["k"]))), cos, sin)  # [T, kv, d]
        values = attention.heads(weights.use("v", normed, _following(parts["v"])))

        rows = batch.rows

        def one_step(step: int, hidden: torch.Tensor, own: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple:
            """Of hidden [R, H] and the (keys, values) of steps 1..step-1: all with this step's, and what it gives."""
            x = take(normed, rows)[0] if step == 0 else layer.hidden_norm(hidden)  # [R, H]
            cos, sin = self.rotary(batch.positions[rows] + step, dtype)
            half, parts["q"] = take(parts["q"], batch.embedded_index[step])
            query = rotate(attention.heads(weights.use("q", x, half)), cos, sin)  # [R, heads, d]
            if step:
                half, parts["k"] = take(parts["k"], batch.reach[step])
                key = rotate(attention.heads(weights.use("k", x, half)), cos, sin)  # [R, kv, d]
                half, parts["v"] = take(parts["v"], batch.reach[step])
                own = [*own, (key, attention.heads(weights.use("v", x, half)))]
            mixed = ttt_attention(query, keys, values, batch.shared, own)
            hidden = weights.use("o", mixed.flatten(1), hidden)
            x = layer.post_attention_layernorm(hidden)
            hidden = weights.use("down", silu_times(weights.use("gate", x), weights.use("up", x)), hidden)
            x = self.norm(hidden)
            loss, weights.head, best, overlap = linear_loss(
                x, weights.head, teacher, batch.teacher_index[step], batch.valid[step]
            )
            return x if self.config.norm_output else hidden, own, loss, best, overlap

        hidden, _ = take(fused, rows)  # [R, H]
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        outcomes = []
        for step in range(batch.valid.shape[0]):
            if self.recompute:
                hidden, own, *outcome = checkpoint(one_step, step, hidden, own, use_reentrant=False)
            else:
                hidden, own, *outcome = one_step(step, hidden, own)
            outcomes.append(outcome)
        losses, predicted, overlap = (torch.stack(part) for part in zip(*outcomes, strict=True))
        return StepOutput(losses, predicted, overlap if teacher.inside is not None else None)


class _Weights:
    """The weights that the steps share, each as its latest use left it (ops.linear)."""

    def __init__(self, model: DraftModel) -> None:
        attention, mlp, size = model.midlayer.self_attn, model.midlayer.mlp, model.config.hidden_size
        self._latest = {
            "q": attention.q_proj.weight[:, size:],  # the half of the hidden state
            "k": attention.k_proj.weight[:, size:],
            "v": attention.v_proj.weight[:, size:],
            "o": attention.o_proj.weight,
            "gate": mlp.gate_proj.weight,
            "up": mlp.up_proj.weight,
            "down": mlp.down_proj.weight,
        }
        self.head = model.lm_head.weight

    def use(self, name: str, x: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
        """x [N, I] @ weight.T + start [N, O]."""
        y, self._latest[name] = linear(x, self._latest[name], start)
        return y


def _following(x: torch.Tensor) -> torch.Tensor:
    """x [T, N] at the next position; the last one stays."""
    return torch.cat([x[1:], x[-1:]])
