"""Building blocks of the fast training step: matmuls and gathers whose gradients are summed in place, fused arithmetic.

All TTT steps share one set of weights. Autograd would make a weight's gradient anew in every step and add them up,
three passes over 1.5 GB a step at Kimi's width. Here a weight is passed on from use to use, (y, w) = linear(x, w), so
that backward, which comes through the uses in reverse, adds each one's share to the buffer it receives, inside its own
matmul.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F

from eagle3 import terminal


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor | None) -> tuple:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        y = x @ weight.T if start is None else torch.addmm(start, x, weight.T)
        return y, weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, y_grad: torch.Tensor | None, later: torch.Tensor | None) -> tuple:
        if y_grad is None:
            return None, later, None
        x, weight = ctx.saved_tensors
        x_grad = y_grad @ weight if ctx.needs_input_grad[0] else None
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = y_grad.T @ x if later is None else later.addmm_(y_grad.T, x)
        return x_grad, weight_grad, y_grad if ctx.needs_input_grad[2] else None


def linear(
    x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, I] times weight [O, I] transposed, plus `start` [N, O]. Returns y [N, O], and the weight for its next use.

    The weight that is returned must be used at most once: its gradient is the buffer that this use adds to.
    """
    return _Linear.apply(x, weight, start)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, index: torch.Tensor) -> tuple:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(index)
        ctx.shape = source.shape
        return source.index_select(0, index), source.view_as(source)

    @staticmethod
    def backward(ctx: Any, taken_grad: torch.Tensor | None, later: torch.Tensor | None) -> tuple:
        if taken_grad is None:
            return later, None
        (index,) = ctx.saved_tensors
        total = taken_grad.new_zeros(ctx.shape) if later is None else later
        return total.index_add_(0, index, taken_grad), None


def take(source: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `index` (int64 [N]) of source [P, O]. Returns them [N, O], and the source for its next use, as `linear`."""
    return _Take.apply(source, index)


@cache
def compiles() -> bool:
    """Whether torch.compile makes GPU kernels here. Tried once, forward and backward; says so aloud where not."""
    try:
        # of one function, which has a form for each TTT step, with gradient and without
        torch._dynamo.config.recompile_limit = 64
        with torch.enable_grad():  # the first batch may be one of an evaluation
            x = torch.ones(8, 8, device="cuda", requires_grad=True)
            torch.compile(lambda x: F.silu(x) * x)(x).sum().backward()
        return True
    except Exception as error:  # of the compiler, its back end or the C compiler behind it
        terminal.warn(
            f"torch.compile does not work on this GPU ({terminal.short(error)}): training goes on in plain torch, "
            "slower; it needs triton and a C compiler"
        )
        return False


def fused(function: Callable) -> Callable:
    """Elementwise arithmetic as one kernel on a GPU, whatever the number of rows; plain torch elsewhere."""

    @cache
    def compiled() -> Callable:
        return torch.compile(function, dynamic=True)

    @wraps(function)
    def call(first: torch.Tensor, *others: Any) -> Any:
        return (compiled() if first.is_cuda and compiles() else function)(first, *others)

    return call


@fused
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [N, H] over the root of its mean square, times weight [H]; computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


@fused
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, half-split layout: x [N, heads, d]; cos, sin [N, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


@fused
def silu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, both [N, I]."""
    return F.silu(gate) * up
