"""The training-time test of a batch: all steps forward, and their gradients, both written out.

Autograd would keep more, make the gradient of a shared weight anew in every step and add it up, three passes over
1.5 GB a step at Kimi's width, and could not work in place. Here every gradient is summed inside its matmul, and what is
no longer needed is overwritten.

The step computes what the loss needs and nothing twice, exactly:

    rows        queries are those positions that start a supervised chain; a prompt token costs its step-0 key and value
    embeddings  q, k and v are linear in [norm(embed), norm(hidden)]: the half of the embedding depends on the token
                alone, is computed once, and is taken at t+1+k in step k. The embedding is frozen, so nothing flows
                back through its norm: the gradient of the norm's weight is read off that of the matrices
    attention   over the shared step-0 keys and the row's own later ones, in one softmax (attention.py)
    teacher     logits once, at supervised positions, for draft ids
    loss        its gradient takes the place of the logits in forward (loss.py)
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from eagle3.draft import backend
from eagle3.draft.attention import Cache
from eagle3.draft.loss import Teacher, Text, compare

if TYPE_CHECKING:
    from eagle3.draft.model import Batch, DraftModel

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = ("embedding", "hidden", "attention", "final")


@dataclass
class _Step:
    """What backward needs of one TTT step."""

    hidden: torch.Tensor  # [R, H], the residual stream that came in; with recomputation only this is kept
    x: torch.Tensor  # [R, H], its norm
    x_inverse: torch.Tensor | None  # float [R], None at step 0, where all positions were normed together
    query: torch.Tensor  # [R, heads, d]
    mixed: torch.Tensor  # [R, heads, d], what attention gave
    lse: torch.Tensor  # float [heads, R]
    middle: torch.Tensor  # [R, H], the stream after attention
    middle_x: torch.Tensor
    middle_inverse: torch.Tensor
    gate: torch.Tensor  # [R, I]
    up: torch.Tensor
    after: torch.Tensor  # [R, H], the stream after the MLP
    after_x: torch.Tensor
    after_inverse: torch.Tensor
    logits_grad: torch.Tensor  # [R, D], of the summed loss


class TrainingTimeTest:
    """One pass over a batch. T tokens, R rows, K steps, U positions whose embedding some row takes."""

    def __init__(self, model: "DraftModel", batch: "Batch", teacher: Teacher | Text, *, train_head: bool) -> None:
        config, layer = model.config, model.midlayer
        self.eps, self.norm_output, self.recompute = config.rms_norm_eps, config.norm_output, model.recompute
        self.size, self.width = config.hidden_size, config.head_dim
        self.heads = config.num_attention_heads, config.head_dim
        attention, mlp = layer.self_attn, layer.mlp
        linear = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        linear += (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        self.matrix = {name: one.weight for name, one in zip(MATRICES, linear, strict=True)}
        norms = (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, model.norm)
        self.norm = {name: one.weight for name, one in zip(NORMS, norms, strict=True)}
        self.head, self.embed_tokens, self.train_head = model.lm_head.weight, model.embed_tokens, train_head
        self.batch, self.teacher = batch, teacher
        self.ops, self.attention = backend.choose(
            self.head.device, self.head.dtype, config.num_attention_heads, config.num_key_value_heads, self.width
        )
        self.token_angles = model.rotary(batch.positions)  # 2 x float [T, d]
        steps = torch.arange(len(batch.valid), device=batch.rows.device)
        places = batch.positions[batch.rows] + steps[:, None]  # [K, R]
        cos, sin = model.rotary(places.flatten())
        self.angles = cos.view(*places.shape, -1), sin.view(*places.shape, -1)  # float [K, R, d]
        self.saved: list[_Step | torch.Tensor] = []

    @property
    def weights(self) -> list[torch.Tensor]:
        """What `backward` gives gradients of, in its order, after that of what step 0 takes."""
        return [*self.matrix.values(), *self.norm.values(), self.head]

    # --------------------------------------------------------------------------------------------- forward

    def forward(self, fused: torch.Tensor, *, keep: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of what step 0 takes [T, H]: loss float [K], likeliest draft id [K, R], overlap float [K, R].

        keep: what backward needs.
        """
        batch, steps, rows = self.batch, len(self.batch.valid), len(self.batch.rows)
        self.fused = fused
        normed, self.inverse = self.ops.rms_norm(fused, self.norm["hidden"], self.eps)  # [T, H]
        self.normed = normed
        embedded, _ = self.ops.rms_norm(self.embed_tokens[batch.input_ids], self.norm["embedding"], self.eps)
        self.query_part = embedded.index_select(0, batch.embedded) @ self._half("q", 0).T  # [U, heads * d]
        key_part, value_part = embedded @ self._half("k", 0).T, embedded @ self._half("v", 0).T  # [T, kv * d]
        del embedded
        # position t with the token after it; the last one of a document serves no valid row
        keys = _following(key_part).addmm_(normed, self._half("k", 1).T).view(len(normed), -1, self.width)
        values = _following(value_part).addmm_(normed, self._half("v", 1).T).view(keys.shape)
        self.ops.rotate_(keys, *self.token_angles)
        own = (steps - 1, rows, *keys.shape[1:])
        self.cache = Cache(keys, values, keys.new_empty(own), keys.new_empty(own))
        self.mixed = keys.new_empty(steps, rows, *self.heads)  # in backward the gradient of the queries

        hidden = fused.index_select(0, batch.rows)  # [R, H]
        outcomes = []
        for step in range(steps):
            if step:
                for part, buffer in ((key_part, self.cache.own_keys), (value_part, self.cache.own_values)):
                    torch.index_select(part, 0, batch.reach[step], out=buffer[step - 1].view(rows, -1))
            saved, *outcome = self._forward_step(step, hidden)
            if keep:
                self.saved.append(saved.hidden if self.recompute else saved)
            hidden = saved.after_x if self.norm_output else saved.after
            outcomes.append(outcome)
        if not (keep and self.recompute):
            del self.query_part
        loss, predicted, overlap = (torch.stack(part) for part in zip(*outcomes, strict=True))
        return loss, predicted, overlap

    def _forward_step(
        self, step: int, hidden: torch.Tensor, *, again: bool = False
    ) -> tuple[_Step, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of hidden [R, H]; from step 1 on own keys and values hold the embedding's half, unless computed `again`."""
        batch, weight = self.batch, self.matrix
        rows, angles = len(hidden), (self.angles[0][step], self.angles[1][step])
        if step:
            x, x_inverse = self.ops.rms_norm(hidden, self.norm["hidden"], self.eps)
        else:
            x, x_inverse = self.normed.index_select(0, batch.rows), None
        query = self.query_part.index_select(0, batch.embedded_index[step]).addmm_(x, self._half("q", 1).T)
        query = self.ops.rotate_(query.view(rows, -1, self.width), *angles)
        if step and not again:
            key, value = self.cache.own_keys[step - 1], self.cache.own_values[step - 1]
            key.view(rows, -1).addmm_(x, self._half("k", 1).T)
            value.view(rows, -1).addmm_(x, self._half("v", 1).T)
            self.ops.rotate_(key, *angles)
        mixed = self.mixed[step]
        lse = self.attention.attend(query, self.cache, batch.shared, step, mixed)
        middle = torch.addmm(hidden, mixed.view(rows, -1), weight["o"].T)
        middle_x, middle_inverse = self.ops.rms_norm(middle, self.norm["attention"], self.eps)
        gate, up = middle_x @ weight["gate"].T, middle_x @ weight["up"].T
        after = torch.addmm(middle, self.ops.silu_times(gate, up), weight["down"].T)
        after_x, after_inverse = self.ops.rms_norm(after, self.norm["final"], self.eps)
        logits = after_x @ self.head.T  # [R, D]
        loss, best, overlap = compare(logits, self.teacher, batch.teacher_index[step], batch.valid[step])
        saved = _Step(
            hidden, x, x_inverse, query, mixed, lse, middle, middle_x, middle_inverse, gate, up, after, after_x,
            after_inverse, logits,
        )  # fmt: skip
        return saved, loss.sum(), best, overlap

    def _half(self, name: str, number: int) -> torch.Tensor:
        """[O, H] of q, k or v: columns of the embedding (0) or of the hidden state (1)."""
        return self.matrix[name][:, number * self.size :][:, : self.size]

    # -------------------------------------------------------------------------------------------- backward

    def backward(self, loss_grad: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Gradients of what step 0 takes [T, H], and of `weights`, from loss_grad float [K]; to be called once."""
        batch = self.batch
        self.grad: dict[str, torch.Tensor] = {}  # [O, I] of q, k, v: the hidden state's half
        whole = {name: torch.empty_like(self.matrix[name]) for name in "qkv"}
        self.norm_grad = {name: torch.zeros_like(one, dtype=torch.float32) for name, one in self.norm.items()}
        self.grads = Cache(*(torch.zeros_like(one) for one in vars(self.cache).values()))
        self.halves = {name: one[:, self.size :] for name, one in whole.items()}

        later: torch.Tensor | None = None  # gradient of what the step handed on, [R, H]
        for step in reversed(range(len(batch.valid))):
            saved = self.saved.pop()
            if self.recompute:
                saved, *_ = self._forward_step(step, saved, again=True)
            x_grad, later = self._backward_step(step, saved, loss_grad[step], later)
            if step:
                later = self.ops.rms_norm_backward(
                    x_grad, saved.hidden, saved.x_inverse, self.norm["hidden"], self.norm_grad["hidden"], later
                )
        del saved
        keys_grad, values_grad = self.grads.keys, self.grads.values
        self.ops.rotate_(keys_grad, *self.token_angles, back=True)
        keys_grad, values_grad = keys_grad.view(len(keys_grad), -1), values_grad.view(len(values_grad), -1)
        self._add("k", keys_grad, self.normed)
        self._add("v", values_grad, self.normed)
        normed_grad = (keys_grad @ self._half("k", 1)).addmm_(values_grad, self._half("v", 1))  # [T, H]
        normed_grad.index_add_(0, batch.rows, x_grad)
        fused_grad = self.ops.rms_norm_backward(
            normed_grad, self.fused, self.inverse, self.norm["hidden"], self.norm_grad["hidden"]
        )
        fused_grad.index_add_(0, batch.rows, later)
        self._embedding_halves(whole, keys_grad, values_grad)
        matrices = [whole.get(name, self.grad.get(name)) for name in MATRICES]
        norms = [self.norm_grad[name].to(weight.dtype) for name, weight in self.norm.items()]
        return fused_grad, [*matrices, *norms, self.grad.get("head")]

    def _backward_step(
        self, step: int, saved: _Step, loss_grad: torch.Tensor, later: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the step's normed input [R, H], and of the stream that came in but for that.

        loss_grad: of the step's loss, float []. Leaves the query's gradient, before rotation, in self.mixed.
        """
        weight, rows = self.matrix, len(saved.hidden)
        angles = self.angles[0][step], self.angles[1][step]
        after_x_grad = self.ops.scaled(saved.logits_grad @ self.head, loss_grad)
        if self.train_head:
            self._add("head", saved.logits_grad, self.ops.scaled(saved.after_x, loss_grad))  # the smaller factor
        saved.logits_grad = None
        if self.norm_output and later is not None:
            after_x_grad += later
            later = None
        stream = self.ops.rms_norm_backward(
            after_x_grad, saved.after, saved.after_inverse, self.norm["final"], self.norm_grad["final"], later
        )
        activated = stream @ weight["down"]  # its gradient, [R, I]
        self.ops.silu_times_backward_(activated, saved.gate, saved.up)
        self._add("down", stream, activated)
        self._add("gate", saved.gate, saved.middle_x)
        self._add("up", saved.up, saved.middle_x)
        middle_x_grad = (saved.gate @ weight["gate"]).addmm_(saved.up, weight["up"])
        stream = self.ops.rms_norm_backward(
            middle_x_grad,
            saved.middle,
            saved.middle_inverse,
            self.norm["attention"],
            self.norm_grad["attention"],
            stream,
        )
        self._add("o", stream, saved.mixed.view(rows, -1))
        mixed_grad = (stream @ weight["o"]).view(saved.query.shape)
        self.attention.attend_backward(
            mixed_grad,
            saved.query,
            self.cache,
            self.batch.shared,
            step,
            saved.mixed,
            saved.lse,
            saved.mixed,
            self.grads,
        )
        query_grad = self.ops.rotate_(saved.mixed, *angles, back=True).view(rows, -1)
        self._add("q", query_grad, saved.x)
        x_grad = query_grad @ self._half("q", 1)
        if step:
            key_grad, value_grad = self.grads.own_keys[step - 1], self.grads.own_values[step - 1]
            self.ops.rotate_(key_grad, *angles, back=True)
            for name, grad in (("k", key_grad.view(rows, -1)), ("v", value_grad.view(rows, -1))):
                self._add(name, grad, saved.x)
                x_grad.addmm_(grad, self._half(name, 1))
        return x_grad, stream

    def _add(self, name: str, y_grad: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the gradient [O, I] of a matrix that took x [N, I] to y, from that of y [N, O]."""
        if name in self.grad:
            self.grad[name].addmm_(y_grad.T, x)
        elif name in self.halves:
            self.grad[name] = torch.mm(y_grad.T, x, out=self.halves[name])
        else:
            self.grad[name] = y_grad.T @ x

    def _embedding_halves(
        self, whole: dict[str, torch.Tensor], keys_grad: torch.Tensor, values_grad: torch.Tensor
    ) -> None:
        """Fills the embedding's half of the gradients of q, k and v, and gives that of its norm's weight."""
        batch = self.batch
        row_at = torch.full_like(batch.positions, -1)
        row_at[batch.rows] = torch.arange(len(batch.rows), device=row_at.device)
        ones = torch.ones_like(self.norm["embedding"])
        unit, _ = self.ops.rms_norm(self.embed_tokens[batch.input_ids], ones, self.eps)  # [T, H]
        every = torch.arange(len(unit), device=row_at.device)

        def fill(name: str, y_grad: torch.Tensor, x: torch.Tensor) -> None:
            half = torch.mm(y_grad.T, x, out=whole[name][:, : self.size])
            matrix, weight_grad = self._half(name, 0), self.norm_grad["embedding"]
            self.ops.norm_weight_backward_(half, matrix, self.norm["embedding"], weight_grad)

        query_part_grad = self.ops.gathered(self.mixed.flatten(2), row_at, batch.embedded, 0)  # [U, heads * d]
        fill("q", query_part_grad, unit.index_select(0, batch.embedded))
        del query_part_grad, self.mixed
        for name, grad, own in (("k", keys_grad, self.grads.own_keys), ("v", values_grad, self.grads.own_values)):
            part_grad = self.ops.gathered(own.flatten(2), row_at, every, 1)  # [T, kv * d]
            part_grad[1:] += grad[:-1]  # the key of position t took the token after it
            fill(name, part_grad, unit)


class _Function(torch.autograd.Function):
    """A TrainingTimeTest as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, work: TrainingTimeTest, fused: torch.Tensor, *weights: torch.Tensor) -> tuple:
        loss, predicted, overlap = work.forward(fused, keep=True)
        ctx.work = work
        ctx.mark_non_differentiable(predicted, overlap)
        ctx.set_materialize_grads(False)
        return loss, predicted, overlap

    @staticmethod
    def backward(ctx: Any, loss_grad: torch.Tensor, *_: Any) -> tuple:
        work, ctx.work = ctx.work, None  # frees what it keeps when done
        fused_grad, grads = work.backward(loss_grad)
        return None, fused_grad, *grads


def run(
    model: "DraftModel", batch: "Batch", fused: torch.Tensor, teacher: Teacher | Text
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All TTT steps over the rows of `batch`, from what step 0 takes, `fused` [T, H].

    Returns the summed loss float [K], which has a gradient, the likeliest draft id [K, R], and the overlap [K, R].
    """
    work = TrainingTimeTest(model, batch, teacher, train_head=model.lm_head.weight.requires_grad)
    if torch.is_grad_enabled():
        return _Function.apply(work, fused, *work.weights)
    return work.forward(fused, keep=False)


def _following(x: torch.Tensor) -> torch.Tensor:
    """x [T, N] at the next position; the last one stays."""
    return torch.cat([x[1:], x[-1:]])
