"""The loss of loss.py as a Triton kernel: one program a row, two passes over its logits, the second one from cache."""

import torch
import triton
import triton.language as tl

from eagle3.draft.loss import Teacher, Text

WIDTH = 2048  # columns at a time
LOWEST = -1e30  # in the place of minus infinity, which minus itself is no number


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
    LOWEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * columns
    offsets = tl.arange(0, WIDTH)

    # each lane by itself, and one reduction at the end
    peak = tl.full([WIDTH], LOWEST, tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    place = tl.zeros([WIDTH], tl.int32)
    for start in range(0, columns, WIDTH):
        at = start + offsets
        x = tl.load(own + at, mask=at < columns, other=LOWEST).to(tl.float32)
        place = tl.where(x > peak, at, place)
        above = tl.maximum(peak, x)
        total = total * tl.exp(peak - above) + tl.exp(x - above)
        peak = above
    highest = tl.max(peak, axis=0)
    lse = highest + tl.log(tl.sum(total * tl.exp(peak - highest), axis=0))
    best = tl.min(tl.where(peak == highest, place, columns), axis=0)  # the first of equal ones
    tl.store(best_out + row, best.to(tl.int64))

    counts = tl.load(valid + row) != 0
    source = tl.load(index + row)
    if HAS_LABELS:
        label = tl.load(labels + source)
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
        other = teacher + source * columns
        other_lse = tl.load(teacher_lse + source)
        share = tl.load(inside + source) if HAS_INSIDE else 1.0
        kl = tl.zeros([WIDTH], tl.float32)
        overlap = tl.zeros([WIDTH], tl.float32)
        for start in range(0, columns, WIDTH):
            at = start + offsets
            x = tl.load(own + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            t = tl.load(other + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            q = tl.exp(x - lse)
            p = tl.exp(t - other_lse)
            kl += tl.where(at < columns, p * ((t - other_lse) - (x - lse)), 0.0)
            if HAS_INSIDE:
                overlap += tl.minimum(p * share, q)
            tl.store(own + at, tl.where(counts, q - p, 0.0).to(logits.dtype.element_ty), mask=at < columns)
        tl.store(kl_out + row, tl.where(counts, tl.sum(kl, axis=0), 0.0))
        tl.store(overlap_out + row, tl.sum(overlap, axis=0))


@triton.jit
def _log_sum_exp(logits, lse_out, columns, WIDTH: tl.constexpr, LOWEST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, WIDTH)
    peak = tl.full([WIDTH], LOWEST, tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    for start in range(0, columns, WIDTH):
        at = start + offsets
        x = tl.load(logits + row * columns + at, mask=at < columns, other=LOWEST).to(tl.float32)
        above = tl.maximum(peak, x)
        total = total * tl.exp(peak - above) + tl.exp(x - above)
        peak = above
    highest = tl.max(peak, axis=0)
    tl.store(lse_out + row, highest + tl.log(tl.sum(total * tl.exp(peak - highest), axis=0)))


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """Of contiguous logits [S, D], float [S]."""
    rows, columns = logits.shape
    lse = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _log_sum_exp[(rows,)](logits, lse, columns, WIDTH=WIDTH, LOWEST=LOWEST, num_warps=8)
    return lse


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
        LOWEST=LOWEST,
        num_warps=8,
    )
    return kl, best, overlap
