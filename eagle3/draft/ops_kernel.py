"""The functions of ops.py as Triton kernels: one pass over the data each, float32 inside."""

import torch
import triton
import triton.language as tl

PROGRAMS = 264  # of a reduction over rows: two for each of an H200's 132 multiprocessors
STRIP = 1024  # columns of an elementwise program


@triton.jit
def _rms_norm(x_in, weight, y_out, inverse_out, width, eps, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < width
    x = tl.load(x_in + row * width + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    y = x * inverse * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_out + row * width + at, y.to(y_out.dtype.element_ty), mask=inside)
    tl.store(inverse_out + row, inverse)


# Numbers that change from batch to batch are not specialised: a kernel is compiled once, whatever the batch
@triton.jit(do_not_specialize=["rows"])
def _rms_norm_backward(
    y_grad,  # [N, H]
    x_in,  # [N, H]
    inverse_in,  # float [N]
    weight,  # [H]
    other,  # [N, H]
    x_grad,  # [N, H]
    weight_grads,  # float [programs, H]
    rows,
    width,
    HAS_OTHER: tl.constexpr,
    WIDTH: tl.constexpr,
):
    at = tl.arange(0, WIDTH)
    inside = at < width
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    weight_grad = tl.zeros([WIDTH], tl.float32)
    long = width.to(tl.int64)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        place = row * long + at
        inverse = tl.load(inverse_in + row)
        unit = tl.load(x_in + place, mask=inside, other=0.0).to(tl.float32) * inverse
        grad = tl.load(y_grad + place, mask=inside, other=0.0).to(tl.float32)
        weight_grad += grad * unit
        grad *= scale
        grad = inverse * (grad - unit * (tl.sum(grad * unit, axis=0) / width))
        if HAS_OTHER:
            grad += tl.load(other + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_grad + place, grad.to(x_grad.dtype.element_ty), mask=inside)
    tl.store(weight_grads + tl.program_id(0) * width + at, weight_grad, mask=inside)


@triton.jit
def _norm_weight_backward(
    grad_in,  # [O, I], its rows `grad_stride` apart
    matrix,  # likewise
    weight,  # [I]
    weight_grads,  # float [programs, I]
    rows,
    width,
    grad_stride,
    matrix_stride,
    STRIP: tl.constexpr,
):
    at = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    inside = at < width
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([STRIP], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        place = grad_in + row * grad_stride + at
        grad = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        total += grad * tl.load(matrix + row * matrix_stride + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, (grad * scale).to(grad_in.dtype.element_ty), mask=inside)
    tl.store(weight_grads + tl.program_id(0) * width + at, total, mask=inside)


@triton.jit
def _scaled(x_in, factor, y_out, width, STRIP: tl.constexpr):
    column = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    at = tl.program_id(0).to(tl.int64) * width + column
    x = tl.load(x_in + at, mask=column < width, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(y_out + at, x.to(y_out.dtype.element_ty), mask=column < width)


@triton.jit
def _rotate(x, cos_in, sin_in, heads, half, sign, HEADS: tl.constexpr, HALF: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, HALF)
    cos = tl.load(cos_in + row * 2 * half + at, mask=at < half, other=0.0)[None]
    sin = tl.load(sin_in + row * 2 * half + at, mask=at < half, other=0.0)[None] * sign
    place = x + (row * heads + head[:, None]) * 2 * half + at[None]
    inside = (head[:, None] < heads) & (at[None] < half)
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (first * cos - second * sin).to(x.dtype.element_ty), mask=inside)
    tl.store(place + half, (second * cos + first * sin).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _silu_times(gate_in, up_in, y_out, width, STRIP: tl.constexpr):
    column = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    at = tl.program_id(0).to(tl.int64) * width + column
    gate = tl.load(gate_in + at, mask=column < width, other=0.0).to(tl.float32)
    up = tl.load(up_in + at, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y_out + at, (gate * tl.sigmoid(gate) * up).to(y_out.dtype.element_ty), mask=column < width)


@triton.jit
def _silu_times_backward(y_grad, gate_in, up_in, width, STRIP: tl.constexpr):
    column = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    at = tl.program_id(0).to(tl.int64) * width + column
    inside = column < width
    gate = tl.load(gate_in + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_in + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(y_grad + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    activated = gate * share
    kind = y_grad.dtype.element_ty
    tl.store(gate_in + at, (grad * up * (share + activated * (1 - share))).to(kind), mask=inside)
    tl.store(up_in + at, (grad * activated).to(kind), mask=inside)
    tl.store(y_grad + at, (activated * up).to(kind), mask=inside)


@triton.jit(do_not_specialize=["steps", "rows", "first"])
def _gathered(grads, row_at, places, total_out, steps, rows, width, first, STRIP: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    total = tl.zeros([STRIP], tl.float32)
    start = tl.load(places + part) - 1 - first  # the position whose row took this part at step `first`
    size = rows.to(tl.int64) * width
    for step in range(0, steps):
        row = tl.load(row_at + start - step, mask=start >= step, other=-1)
        if row >= 0:
            total += tl.load(grads + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        grads += size
    tl.store(total_out + part * width + at, total.to(total_out.dtype.element_ty), mask=at < width)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """ops.rms_norm of contiguous x."""
    rows, width = x.shape
    y, inverse = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    _rms_norm[(rows,)](x, weight, y, inverse, width, eps, WIDTH=triton.next_power_of_2(width), num_warps=8)
    return y, inverse


def rms_norm_backward(
    y_grad: torch.Tensor,
    x: torch.Tensor,
    inverse: torch.Tensor,
    weight: torch.Tensor,
    weight_grad: torch.Tensor,
    other: torch.Tensor | None = None,
) -> torch.Tensor:
    """ops.rms_norm_backward of contiguous tensors."""
    rows, width = x.shape
    programs = min(rows, PROGRAMS)
    x_grad, parts = torch.empty_like(x), torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _rms_norm_backward[(programs,)](
        y_grad,
        x,
        inverse,
        weight,
        x if other is None else other,  # not read
        x_grad,
        parts,
        rows,
        width,
        HAS_OTHER=other is not None,
        WIDTH=triton.next_power_of_2(width),
        num_warps=16 if width > 4096 else 8,
    )
    weight_grad += parts.sum(0)
    return x_grad


def norm_weight_backward_(
    grad: torch.Tensor, matrix: torch.Tensor, weight: torch.Tensor, weight_grad: torch.Tensor
) -> None:
    """ops.norm_weight_backward_ of matrices whose rows are contiguous."""
    rows, width = grad.shape
    programs = min(rows, PROGRAMS)
    parts = torch.empty(programs, width, dtype=torch.float32, device=grad.device)
    grid = (programs, triton.cdiv(width, STRIP))
    _norm_weight_backward[grid](grad, matrix, weight, parts, rows, width, grad.stride(0), matrix.stride(0), STRIP=STRIP)
    weight_grad += parts.sum(0)


def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """ops.scaled of contiguous x and a float factor."""
    y = torch.empty_like(x)
    _scaled[_strips(x)](x, factor, y, x.shape[1], STRIP=STRIP)
    return y


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """ops.rotate_ of contiguous tensors."""
    rows, heads, width = x.shape
    together = min(16, triton.next_power_of_2(heads))
    grid = (rows, triton.cdiv(heads, together))
    half = triton.next_power_of_2(width // 2)
    _rotate[grid](x, cos, sin, heads, width // 2, -1.0 if back else 1.0, HEADS=together, HALF=half, num_warps=4)
    return x


def silu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """ops.silu_times of contiguous tensors."""
    y = torch.empty_like(gate)
    _silu_times[_strips(y)](gate, up, y, y.shape[1], STRIP=STRIP)
    return y


def silu_times_backward_(y_grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> None:
    """ops.silu_times_backward_ of contiguous tensors."""
    _silu_times_backward[_strips(gate)](y_grad, gate, up, gate.shape[1], STRIP=STRIP)


def gathered(grads: torch.Tensor, row_at: torch.Tensor, places: torch.Tensor, first: int) -> torch.Tensor:
    """ops.gathered of contiguous tensors."""
    steps, rows, width = grads.shape
    total = grads.new_empty(len(places), width)
    _gathered[_strips(total)](grads, row_at, places, total, steps, rows, width, first, STRIP=STRIP)
    return total


def _strips(x: torch.Tensor) -> tuple[int, int]:
    """A program for each row and STRIP columns."""
    return len(x), triton.cdiv(x.shape[1], STRIP)
