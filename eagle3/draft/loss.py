"""The draft's loss: KL divergence from the target's distribution, renormalised over the draft vocabulary, or
cross-entropy with the text's own tokens.

One pass over the logits gives the loss, its gradient in the place of the logits, and what acceptance needs: the
likeliest token and sum of min(p, q). On a GPU by a Triton kernel (loss_kernel.py), else by its twin here; neither ever
holds a float32 [R, D].
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from eagle3.draft.backend import works

AT_ONCE = 256  # rows of float32 logits at a time


class Teacher:
    """The target's next-token distribution at the supervised positions of a batch, over the draft vocabulary."""

    def __init__(
        self, logits: torch.Tensor, normaliser: torch.Tensor | None = None, lse: torch.Tensor | None = None
    ) -> None:
        """logits: [S, D], of final_norm and lm_head rows of the draft ids.

        normaliser: float [S], log of the sum of exp(logit) over all V target ids; only the overlap needs it.
        lse: float [S], the same over the logits, where it is known.
        """
        self.logits = logits
        self.lse = log_sum_exp(logits) if lse is None else lse
        # share of the target's probability that lies inside the draft vocabulary, [S]
        self.inside = None if normaliser is None else (self.lse - normaliser).exp()


@dataclass(frozen=True)
class Text:
    """In a teacher's place, the text itself: the loss is the cross-entropy with the token that follows."""

    labels: torch.Tensor  # int64 [S], its draft id at each supervised position, -1 outside: that row has no loss
    inside: None = None  # the text cannot tell the target's share


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


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """Of logits [S, D] over D, float [S]."""
    if logits.is_cuda and kernel_works(logits.dtype, "cuda"):
        from eagle3.draft import loss_kernel

        return loss_kernel.log_sum_exp(logits)
    return log_sum_exp_plainly(logits)


def log_sum_exp_plainly(logits: torch.Tensor) -> torch.Tensor:
    """`log_sum_exp` in plain torch, AT_ONCE rows at a time."""
    return torch.cat([part.float().logsumexp(-1) for part in logits.split(AT_ONCE)])


@cache
def kernel_works(dtype: torch.dtype, device: str) -> bool:
    """Whether the Triton kernels of the loss give their twins' numbers here."""
    generator = torch.Generator(device).manual_seed(0)
    logits, other = (3 * torch.randn(rows, 5000, device=device, generator=generator).to(dtype) for rows in (16, 8))
    index, valid = torch.arange(16, device=device) % 8, torch.arange(16, device=device) % 5 > 0
    text = Text(torch.arange(-1, 4900, 700, device=device))

    def results(compare: Callable, log_sum_exp: Callable) -> list[torch.Tensor]:
        found = [log_sum_exp(other)]
        for teacher in (Teacher(other, found[0] + 0.1, found[0]), text):
            replaced = logits.clone()
            found += [*compare(replaced, teacher, index, valid), replaced]
        return found

    def by_kernels() -> list[torch.Tensor]:
        from eagle3.draft import loss_kernel

        return results(loss_kernel.compare_on_gpu, loss_kernel.log_sum_exp)

    return works("Triton kernels of the loss", by_kernels, lambda: results(compare_plainly, log_sum_exp_plainly))


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
