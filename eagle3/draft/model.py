"""The Llama-type EAGLE-3 draft (Li et al. 2025, arXiv:2503.01840) and its training-time test (training_time_test.py).

Alignment, positions t of one document; x are tokens, g the target's concatenated aux states, p_t the target's
distribution at t (it predicts x[t+1]):

    step 0   fc(g[t])      with embed(x[t+1])    at rope position t      predicts x[t+2]     teacher p[t+1]
    step k   output k-1    with embed(x[t+1+k])  at rope position t+k    predicts x[t+2+k]   teacher p[t+1+k]

The output handed on is the residual stream before the final norm (what comes out of that norm if the config has
norm_output), not sent through fc again.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3.draft import training_time_test
from eagle3.draft.attention import SharedKeys
from eagle3.draft.config import DraftConfig
from eagle3.draft.loss import Teacher, Text
from eagle3.states import dequantise


@dataclass
class Batch:
    """Packed documents and the rows (start positions of drafts) that are computed. T tokens, R rows (one or more: see
    `supervision.empty_batch`), K steps."""

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
    overlap: torch.Tensor | None = None  # float [K, R], sum of min(p, q), where the teacher can tell


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """q, k and v take [norm(embed), norm(hidden)], twice the width."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        query = config.num_attention_heads * config.head_dim
        key = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)


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

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float [N, d], at integer positions [N]."""
        rotary = self._rotary[0].to(positions.device)
        cos, sin = rotary(torch.empty(0, device=positions.device), positions[None])
        return cos[0], sin[0]

    def fuse(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        """What step 0 takes, [T, H], of the aux states [T, A * H]."""
        if self.fc_norm is not None:
            chunks = aux_hidden.chunk(len(self.fc_norm), dim=-1)  # A x [T, H]
            aux_hidden = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux_hidden)

    def forward(self, batch: Batch, teacher: Teacher | Text) -> StepOutput:
        """Run all TTT steps over the rows of `batch`; gradients flow through every step."""
        loss, predicted, overlap = training_time_test.run(self, batch, self.fuse(batch.aux_hidden), teacher)
        return StepOutput(loss, predicted, overlap if teacher.inside is not None else None)
