"""Building blocks of the training step with their gradients, written out: norm, rotation, activation, sums over steps.

In plain torch; ops_kernel.py has the same functions as Triton kernels, backend.py chooses. What happens in place saves
a tensor of rows times width, and a pass over it.
"""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, H] over the root of its mean square, times weight [H]; computed in float32.

    Returns that and the inverse roots, float [N].
    """
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1) + eps)  # [N]
    return (wide * inverse[:, None] * weight.float()).to(x.dtype), inverse


def rms_norm_backward(
    y_grad: torch.Tensor,
    x: torch.Tensor,
    inverse: torch.Tensor,
    weight: torch.Tensor,
    weight_grad: torch.Tensor,
    other: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of x [N, H] from that of the norm's output, plus `other` [N, H]; adds to weight_grad float [H]."""
    wide = y_grad.float()
    unit = x.float() * inverse[:, None]  # [N, H]
    weight_grad += (wide * unit).sum(0)
    wide = wide * weight.float()
    x_grad = inverse[:, None] * (wide - unit * (wide * unit).mean(-1, keepdim=True))
    return (x_grad if other is None else x_grad + other).to(x.dtype)


def norm_weight_backward_(
    grad: torch.Tensor, matrix: torch.Tensor, weight: torch.Tensor, weight_grad: torch.Tensor
) -> None:
    """Of y = (unit * weight) @ matrix.T where unit [N, I], what came out of a norm, takes no gradient.

    grad: y's gradient, transposed, times unit, [O, I]; replaced by the gradient of `matrix`, which is it times weight.
    That of the norm's weight, the sum over rows of matrix * grad, is added to weight_grad float [I].
    """
    weight_grad += (grad * matrix).sum(0, dtype=weight_grad.dtype)
    grad.mul_(weight)


def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x [N, H] times a single number, float []."""
    return (x.float() * factor).to(x.dtype)  # the factor itself stays unrounded


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """Rotary position embedding in place, half-split layout: x [N, heads, d]; cos, sin float [N, d], equal halves.

    back: the transposed map, which a gradient takes.
    """
    first, second = x.float().chunk(2, dim=-1)
    sin = -sin if back else sin
    return x.copy_(x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None])


def silu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, both [N, I]."""
    return F.silu(gate) * up


def silu_times_backward_(y_grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> None:
    """Replaces gate and up [N, I] by their gradients, and y_grad by silu(gate) * up, which a weight's needs."""
    share = gate.sigmoid()
    activated = gate * share
    gate_grad = y_grad * up * (share + activated * (1 - share))
    y = activated * up
    torch.mul(y_grad, activated, out=up)
    gate.copy_(gate_grad)
    y_grad.copy_(y)


def gathered(grads: torch.Tensor, row_at: torch.Tensor, places: torch.Tensor, first: int) -> torch.Tensor:
    """What each token's part gets back from the rows that took it.

    Number i of grads [n, R, W] belongs to step first + i, in which the row of position t took the part of t+1+step.
    row_at int64 [T]: row at each position, -1 where there is none; places int64 [U], the parts' positions. Returns
    [U, W].
    """
    total = grads.new_zeros(len(places), grads.shape[2])
    for number, grad in enumerate(grads):
        start = places - 1 - first - number  # [U]
        row = torch.where(start < 0, -1, row_at[start.clamp(min=0)])
        taken = (row >= 0).nonzero()[:, 0]
        total[taken] += grad[row[taken]]
    return total
