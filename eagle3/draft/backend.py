"""Which form of the training step's arithmetic runs: Triton kernels on a GPU where they work, else plain torch.

A kernel is tried once on a little work, against its twin in plain torch; where it does not run or is wrong, the twin
takes its place, and that is said aloud.
"""

from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch

from eagle3 import terminal
from eagle3.draft import attention, ops


def works(kernel: str, got: Callable[[], list[torch.Tensor]], wanted: Callable[[], list[torch.Tensor]]) -> bool:
    """Whether `got`, by a kernel, gives the tensors of `wanted` but for rounding; says so where not."""
    try:
        pairs = [(a.float(), b.float()) for a, b in zip(got(), wanted(), strict=True)]
        errors = [(a - b).norm() / b.norm().clamp_min(1e-30) for a, b in pairs]
        error = torch.stack(errors).max().item()  # torch's maximum, unlike Python's, is never blind to NaN
        if error < 0.02:  # bfloat16 rounds by 0.004
            return True
        problem = f"its numbers are off by {error:.1%}"
    except Exception as error:  # of Triton's compiler, the C compiler behind it, or the GPU's limits
        problem = terminal.short(error)
    terminal.warn(f"the {kernel} do not work here ({problem}): plain torch takes their place, slower")
    return False


def choose(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int
) -> tuple[ModuleType, ModuleType]:
    """The modules for ops and attention: ops.py or ops_kernel.py, attention.py or attention_kernel.py."""
    if device.type != "cuda":
        return ops, attention
    chosen_ops, chosen_attention = ops, attention
    if ops_work(dtype, "cuda"):
        from eagle3.draft import ops_kernel as chosen_ops
    if attention_works(dtype, heads, kv_heads, width, "cuda"):
        from eagle3.draft import attention_kernel as chosen_attention
    return chosen_ops, chosen_attention


@cache
def ops_work(dtype: torch.dtype, device: str) -> bool:
    """Whether ops_kernel.py works here."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    x, other, grad, weight, steps = drawn(37, 200), drawn(37, 200), drawn(37, 200), drawn(200), drawn(3, 5, 70)
    cos, sin = (drawn(37, 10).float().repeat(1, 2) for _ in range(2))
    row_at = torch.tensor([0, -1, 1, 2, -1, 3, -1, -1, 4, -1], device=device)
    places = torch.tensor([0, 2, 3, 4, 5, 7, 8, 9], device=device)

    def results(form: ModuleType) -> list[torch.Tensor]:
        y, inverse = form.rms_norm(x, weight, 1e-6)
        weight_grad = torch.zeros(200, device=device)
        x_grads = [form.rms_norm_backward(grad, x, inverse, weight, weight_grad, part) for part in (None, other)]
        turned = [form.rotate_(x.clone().view(37, 10, 20), cos, sin, back=back) for back in (False, True)]
        replaced = [grad.clone(), x.clone(), other.clone()]
        form.silu_times_backward_(*replaced)
        summed = form.gathered(steps, row_at, places, 1)
        whole = torch.cat([grad, other], 1)
        form.norm_weight_backward_(whole[:, :200], torch.cat([x, x], 1)[:, 200:], weight, weight_grad)
        norms = [y, inverse, *x_grads, weight_grad, whole]
        return [*norms, *turned, form.silu_times(x, other), *replaced, summed, form.scaled(x, weight_grad[3])]

    def by_kernels() -> list[torch.Tensor]:
        from eagle3.draft import ops_kernel

        return results(ops_kernel)

    return works("Triton kernels of norm, rotation and activation", by_kernels, lambda: results(ops))


@cache
def attention_works(dtype: torch.dtype, heads: int, kv_heads: int, width: int, device: str) -> bool:
    """Whether attention_kernel.py works here for heads of this form."""
    if dtype == torch.float32 and device == "cuda":
        terminal.warn("attention in float32 goes document by document in plain torch: exact, and slow")
        return False
    group = heads // kv_heads
    generator = torch.Generator(device).manual_seed(0)
    documents = torch.tensor([0] * 290 + [1] * 100)
    rows = torch.tensor([*range(90, 290), *range(320, 390)])  # tiles with a mask and without, for any of Tiles
    shared = attention.SharedKeys.of(rows, documents, device)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    query, out_grad = drawn(len(rows), 2 * group, width), drawn(len(rows), 2 * group, width)
    cache_of = attention.Cache(
        *(drawn(390, 2, width) for _ in range(2)), *(drawn(2, len(rows), 2, width) for _ in "kv")
    )

    def results(form: ModuleType) -> list[torch.Tensor]:
        found = []
        for step in (0, 2):
            grads = attention.Cache(*(torch.ones_like(one) for one in vars(cache_of).values()))
            out = torch.empty_like(query)
            lse = form.attend(query, cache_of, shared, step, out)
            query_grad = out.clone()
            form.attend_backward(out_grad, query, cache_of, shared, step, query_grad, lse, query_grad, grads)
            found += [out, lse, query_grad, *vars(grads).values()]
        return found

    def by_kernels() -> list[torch.Tensor]:
        from eagle3.draft import attention_kernel

        return results(attention_kernel)

    kernel = f"Triton kernels of attention for {heads} heads of {width}"
    return works(kernel, by_kernels, lambda: results(attention))
