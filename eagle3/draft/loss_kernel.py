"""The loss of loss.py as a Triton kernel: one program a row, two passes over its logits, the second one from cache."""

import torch
import triton
import triton.language as tl

from eagle3.draft.loss import Teacher, Text

WIDTH = 4096  # columns at a time


@triton.jit
def _compare(
    logits,  # [R, D], replaced by the gradient
    teacher,  # [S, D], unless the text is the teacher
    teacher_lse,  # float [S], likewise
    inside,  # float [S]
    labels,  # int64 [S], of the text
    index,  # int64 [R]
    valid,  # bool [R]
    kl_out,  # float [R]
    best_out,  # int64 [R]
    overlap_out,  # float [R]
    columns,
    HAS_INSIDE: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * columns
    offsets = tl.arange(0, WIDTH)

    highest = float("-inf")
    total = 0.0
    best = 0
    for start in range(0, columns, WIDTH):
        at = start + offsets
        x = tl.load(own + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        peak, place = tl.max(x, axis=0, return_indices=True)
        best = tl.where(peak > highest, start + place, best)
        above = tl.maximum(peak, highest)
        total = total * tl.exp(highest - above) + tl.sum(tl.exp(x - above), axis=0)
        highest = above
    lse = highest + tl.log(total)
    tl.store(best_out + row, best.to(tl.int64))

    counts = tl.load(valid + row) != 0
    place = tl.load(index + row)
    if HAS_LABELS:
        label = tl.load(labels + place)
        counts = counts & (label >= 0)
        surprise = lse - tl.load(own + tl.maximum(label, 0)).to(tl.float32)
        tl.debug_barrier()  # the logit is read before another thread replaces it
        for start in range(0, columns, WIDTH):
            at = start + offsets
            x = tl.load(own + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - lse) - tl.where(at == label, 1.0, 0.0)
            tl.store(own + at, tl.where(counts, gradient, 0.0).to(logits.dtype.element_ty), mask=at < columns)
        tl.store(kl_out + row, tl.where(counts, surprise, 0.0))
        tl.store(overlap_out + row, 0.0)
    else:
        other = teacher + place * columns
        other_lse = tl.load(teacher_lse + place)
        share = tl.load(inside + place) if HAS_INSIDE else 1.0
        kl = 0.0
        overlap = 0.0
        for start in range(0, columns, WIDTH):
            at = start + offsets
            x = tl.load(own + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            t = tl.load(other + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            q = tl.exp(x - lse)
            p = tl.exp(t - other_lse)
            kl += tl.sum(tl.where(at < columns, p * ((t - other_lse) - (x - lse)), 0.0), axis=0)
            if HAS_INSIDE:
                overlap += tl.sum(tl.minimum(p * share, q), axis=0)
            tl.store(own + at, tl.where(counts, q - p, 0.0).to(logits.dtype.element_ty), mask=at < columns)
        tl.store(kl_out + row, tl.where(counts, kl, 0.0))
        tl.store(overlap_out + row, overlap)


def compare_on_gpu(
    logits: torch.Tensor, teacher: Teacher | Text, index: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """loss.compare for contiguous logits [R, D] and teacher's logits [S, D]."""
    of_text = isinstance(teacher, Text)
    rows, columns = logits.shape
    kl = torch.empty(rows, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    overlap = torch.empty_like(kl)
    _compare[(rows,)](
        logits,
        logits if of_text else teacher.logits,  # what a form of the kernel does not read may be anything
        kl if of_text else teacher.lse,
        kl if teacher.inside is None else teacher.inside,
        teacher.labels if of_text else index,
        index,
        valid,
        kl,
        best,
        overlap,
        columns,
        HAS_INSIDE=teacher.inside is not None,
        HAS_LABELS=of_text,
        WIDTH=WIDTH,
        num_warps=8,
    )
    return kl, best, overlap
