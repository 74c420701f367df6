"""The draft's loss: KL divergence from the target's distribution, renormalised over the draft vocabulary, or
cross-entropy with the text's own tokens.

One pass over the logits gives the loss, its gradient in the place of the logits, and what acceptance needs: the
likeliest token and sum of min(p, q). On a GPU by a Triton kernel (loss_kernel.py), else by its twin here; neither ever
holds a float32 [R, D].
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from eagle3 import terminal

AT_ONCE = 256  # rows of float32 logits at a time


class Teacher:
    """The target's next-token distribution at the supervised positions of a batch, over the draft vocabulary."""

    def __init__(self, logits: torch.Tensor, normaliser: torch.Tensor | None = None) -> None:
        """logits: [S, D], of final_norm and lm_head rows of the draft ids.

        normaliser: float [S], log of the sum of exp(logit) over all V target ids; only `overlap` needs it.
        """
        self.logits = logits
        self.lse = torch.cat([part.float().logsumexp(-1) for part in logits.split(AT_ONCE)])  # float [S]
        # share of the target's probability that lies inside the draft vocabulary, [S]
        self.inside = None if normaliser is None else (self.lse - normaliser).exp()


@dataclass(frozen=True)
class Text:
    """In a teacher's place, the text itself: the loss is the cross-entropy with the token that follows."""

    labels: torch.Tensor  # int64 [S], its draft id at each supervised position, -1 outside: that row has no loss
    inside: None = None  # the text cannot tell the target's share


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        teacher: Teacher | Text,
        index: torch.Tensor,
        valid: torch.Tensor,
    ) -> tuple:
        ctx.set_materialize_grads(False)
        logits = x @ weight.T  # [R, D]
        kl, best, overlap = compare(logits, teacher, index, valid)
        ctx.save_for_backward(x, weight, logits)  # by now the gradient
        following = weight.view_as(weight)
        # else a frozen weight would look like a trained one to its next use, which would compute its gradient
        frozen = () if ctx.needs_input_grad[1] else (following,)
        ctx.mark_non_differentiable(best, overlap, *frozen)
        return kl.sum(), following, best, overlap

    @staticmethod
    def backward(ctx: Any, loss_grad: torch.Tensor | None, later: torch.Tensor | None, *_: Any) -> tuple:
        if loss_grad is None:
            return None, later, None, None, None
        x, weight, logits_grad = ctx.saved_tensors
        x_grad = (logits_grad @ weight).mul_(loss_grad) if ctx.needs_input_grad[0] else None
        weight_grad = None
        if ctx.needs_input_grad[1]:
            scaled = x * loss_grad  # [R, H], the smaller factor, in its own dtype
            weight_grad = logits_grad.T @ scaled if later is None else later.addmm_(logits_grad.T, scaled)
        return x_grad, weight_grad, None, None, None


def linear_loss(
    x: torch.Tensor, weight: torch.Tensor, teacher: Teacher | Text, index: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """KL(target || draft), or cross-entropy, of the draft's logits x [R, H] @ weight [D, H].T, summed over valid rows.

    index int64 [R] into the teacher's positions, valid bool [R]. Returns the sum (float), the weight for its next use
    (as ops.linear), the likeliest draft id [R] and `overlap` [R]: sum of min(p, q) over the vocabulary, with p the
    target's distribution over all its ids, the chance that a sampled draft is accepted at temperature 1.
    """
    return _LinearLoss.apply(x, weight, teacher, index, valid)


def compare(
    logits: torch.Tensor, teacher: Teacher | Text, index: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per row: KL float [R], 0 where not valid; likeliest id int64 [R]; overlap float [R], 0 where there is no telling.

    Replaces logits [R, D] by the KL's gradient.
    """
    if logits.is_cuda and kernel_works(logits.dtype, "cuda"):
        from eagle3.draft.loss_kernel import compare_on_gpu

        return compare_on_gpu(logits, teacher, index, valid)
    return compare_plainly(logits, teacher, index, valid)


@cache
def kernel_works(dtype: torch.dtype, device: str) -> bool:
    """Whether the Triton kernel gives its twin's numbers here. Tried once, on a few rows; says so aloud where not."""
    try:
        from eagle3.draft.loss_kernel import compare_on_gpu

        generator = torch.Generator(device).manual_seed(0)
        logits, other = (3 * torch.randn(rows, 5000, device=device, generator=generator).to(dtype) for rows in (16, 8))
        index, valid = torch.arange(16, device=device) % 8, torch.arange(16, device=device) % 5 > 0
        kernel, twin = logits.clone(), logits.clone()
        teacher = Teacher(other, other.float().logsumexp(-1) + 0.1)
        got = [*compare_on_gpu(kernel, teacher, index, valid), kernel]
        want = [*compare_plainly(twin, teacher, index, valid), twin]
        error = max((a.float() - b.float()).abs().max().item() for a, b in zip(got, want, strict=True))
        if error < 0.01:
            return True
        problem = f"its numbers are off by {error:.2g}"
    except Exception as error:
        problem = terminal.short(error)
    terminal.warn(f"the Triton kernel of the loss does not work here ({problem}): plain torch takes its place, slower")
    return False


def compare_plainly(
    logits: torch.Tensor, teacher: Teacher | Text, index: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`compare` in plain torch, AT_ONCE rows at a time."""
    if isinstance(teacher, Text):
        valid = valid & (teacher.labels[index] >= 0)
    parts = []
    for start in range(0, len(logits), AT_ONCE):
        rows = slice(start, start + AT_ONCE)
        at = index[rows]
        log_q = logits[rows].float().log_softmax(-1)  # [r, D]
        if isinstance(teacher, Text):
            label = teacher.labels[at].clamp(min=0)[:, None]  # [r, 1]
            kl = torch.where(valid[rows], -log_q.gather(1, label)[:, 0], 0.0)
            gradient = log_q.exp().scatter_add_(1, label, torch.full_like(log_q[:, :1], -1.0))
            parts.append((kl, log_q.argmax(-1), torch.zeros_like(kl)))
            logits[rows] = (gradient * valid[rows, None]).to(logits.dtype)
            continue
        log_p = teacher.logits[at].float() - teacher.lse[at, None]
        p, q = log_p.exp(), log_q.exp()
        kl = torch.where(valid[rows], (p * (log_p - log_q)).sum(-1), 0.0)
        overlap = torch.zeros_like(kl)
        if teacher.inside is not None:
            overlap = torch.minimum(p * teacher.inside[at, None], q).sum(-1)
        parts.append((kl, log_q.argmax(-1), overlap))
        logits[rows] = ((q - p) * valid[rows, None]).to(logits.dtype)
    kl, best, overlap = (torch.cat(part) for part in zip(*parts, strict=True))
    return kl, best, overlap
