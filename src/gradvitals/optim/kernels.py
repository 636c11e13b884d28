"""The paper's rule in one pass for sums and one to apply it, for all tensors of a share at once, on a GPU with Triton.

Gradients lie wherever autograd put them, so the kernels take a table of their addresses. Each program works on
`SPAN` elements of one tensor. Partial sums are added up in a fixed order: the same gradients give the same factors,
bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

SPAN = 4096
"""Elements one program works on."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit  # type: ignore[untyped-decorator]
def _load_pair(addresses, noise, firsts, tensor, offsets, mask, GRAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """A stretch of a tensor's gradient, where it lies, and of its noise, both in float32."""
    grad_at = tl.multiple_of(tl.load(addresses + tensor).to(tl.pointer_type(GRAD)), 16)
    noise_at = noise + tl.multiple_of(tl.load(firsts + tensor), 4)
    grad = tl.load(grad_at + offsets, mask=mask, other=0.0).to(tl.float32)
    deviations = tl.load(noise_at + offsets, mask=mask, other=0.0).to(tl.float32)
    return grad_at, noise_at, grad, deviations


@triton.jit  # type: ignore[untyped-decorator]
def _sum_ratios(  # type: ignore[no-untyped-def]
    addresses, noise, firsts, sizes, tensors, starts, sums, counts, GRAD: tl.constexpr, SPAN: tl.constexpr
):
    """Sum and number of the ratios of signal to noise in one stretch, without those that have no noise."""
    program = tl.program_id(0)
    tensor = tl.load(tensors + program)
    offsets = tl.load(starts + program) + tl.arange(0, SPAN)
    mask = offsets < tl.load(sizes + tensor)
    _, _, grad, deviations = _load_pair(addresses, noise, firsts, tensor, offsets, mask, GRAD)
    ratio = grad * grad / deviations
    counted = mask & (deviations > 0) & (ratio < float("inf"))
    tl.store(sums + program, tl.sum(tl.where(counted, ratio, 0.0), axis=0))
    tl.store(counts + program, tl.sum(tl.where(counted, 1.0, 0.0), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _invert_means(sums, counts, begins, inverses, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """One over the mean ratio of each tensor, from the sums of its stretches."""
    tensor = tl.program_id(0)
    begin, end = tl.load(begins + tensor), tl.load(begins + tensor + 1)
    total = tl.zeros((SPAN,), dtype=tl.float64)
    number = tl.zeros((SPAN,), dtype=tl.float64)
    for at in range(begin, end, SPAN):
        offsets = at + tl.arange(0, SPAN)
        mask = offsets < end
        total += tl.load(sums + offsets, mask=mask, other=0.0).to(tl.float64)
        number += tl.load(counts + offsets, mask=mask, other=0.0).to(tl.float64)
    tl.store(inverses + tensor, (tl.sum(number, axis=0) / tl.sum(total, axis=0)).to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _apply(  # type: ignore[no-untyped-def]
    addresses,
    averages,
    noise,
    firsts,
    sizes,
    tensors,
    starts,
    inverses,
    factors,
    gamma,
    weight,
    GRAD: tl.constexpr,
    AVERAGES: tl.constexpr,
    KEEP: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Multiply a stretch of the gradient by its factors, or by their moving average."""
    program = tl.program_id(0)
    tensor = tl.load(tensors + program)
    offsets = tl.load(starts + program) + tl.arange(0, SPAN)
    mask = offsets < tl.load(sizes + tensor)
    grad_at, _, grad, deviations = _load_pair(addresses, noise, firsts, tensor, offsets, mask, GRAD)
    ratio = grad * grad / deviations * tl.load(inverses + tensor)
    # Comparisons with nan are false; minimum and maximum would lose it.
    factor = tl.where((deviations > 0) & (ratio < 1.0), tl.where(ratio > gamma, ratio, gamma), 1.0)
    if KEEP:
        tl.store(factors + tl.load(firsts + tensor) + offsets, factor, mask=mask)
    if AVERAGES:
        average_at = tl.multiple_of(tl.load(averages + tensor).to(tl.pointer_type(GRAD)), 16)
        old = tl.load(average_at + offsets, mask=mask, other=0.0).to(tl.float32)
        average = (old + weight * (factor - old)).to(GRAD)
        tl.store(average_at + offsets, average, mask=mask)
        factor = average.to(tl.float32)
    tl.store(grad_at + offsets, (grad * factor).to(GRAD), mask=mask)


@dataclass(frozen=True)
class Stretches:
    """How tensors are cut into stretches, on the device: the same at every step."""

    firsts: Tensor
    """Where each tensor's noise begins."""
    sizes: Tensor
    tensors: Tensor
    """For each stretch, its tensor, and where in it the stretch starts."""
    starts: Tensor
    begins: Tensor
    """For each tensor, its first stretch."""

    @classmethod
    def cut(cls, sizes: Sequence[int], device: torch.device) -> Stretches:
        """Cut tensors of these sizes, whose noise lies one after the other."""
        firsts: list[int] = []
        tensors: list[int] = []
        starts: list[int] = []
        begins = [0]
        first = 0
        for index, size in enumerate(sizes):
            firsts.append(first)
            first += size
            mine = range(0, size, SPAN)
            tensors += [index] * len(mine)
            starts += mine
            begins.append(len(starts))
        lists = (firsts, list(sizes), tensors, starts, begins)
        return cls(*(torch.tensor(values, dtype=torch.int64, device=device) for values in lists))


class Addresses:
    """Tables of where tensors lie, on the device; sent again only when something has moved."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[list[int], Tensor]] = {}

    def table(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """The addresses of some tensors."""
        found = [tensor.data_ptr() for tensor in tensors]
        known = self._last.get(name)
        if known is None or known[0] != found:
            sent = torch.tensor(found, dtype=torch.int64).pin_memory().to(tensors[0].device, non_blocking=True)
            known = self._last[name] = (found, sent)
        return known[1]


def scale_by_the_paper(
    grads: Tensor,
    averages: Tensor | None,
    noise: Tensor,
    stretches: Stretches,
    *,
    dtype: torch.dtype,
    gamma: float,
    weight: float,
    keep: bool,
) -> Tensor | None:
    """Multiply gradients by the paper's factors, in place, and take those into their moving averages.

    Args:
        grads: addresses of the sums of parts.
        averages: addresses of the moving averages, where there are any: gradients are multiplied by these.
        noise: summed squared deviations, one tensor after the other; none where not positive.
        stretches: of these tensors.
        dtype: of gradients and averages.
        gamma: smallest factor.
        weight: of the new factors in the averages.
        keep: whether to return the factors.
    """
    num_stretches, num_tensors = len(stretches.tensors), len(stretches.sizes)
    sums, counts = torch.empty((2, num_stretches), device=noise.device)
    inverses = torch.empty(num_tensors, device=noise.device)
    factors = torch.empty_like(noise, dtype=torch.float32) if keep else None
    where = (noise, stretches.firsts, stretches.sizes, stretches.tensors, stretches.starts)
    kind = DTYPES[dtype]
    with torch.cuda.device(noise.device):
        _sum_ratios[(num_stretches,)](grads, *where, sums, counts, GRAD=kind, SPAN=SPAN, num_warps=8)
        _invert_means[(num_tensors,)](sums, counts, stretches.begins, inverses, SPAN=1024)
        _apply[(num_stretches,)](
            grads,
            grads if averages is None else averages,
            *where,
            inverses,
            noise if factors is None else factors,
            gamma,
            weight,
            GRAD=kind,
            AVERAGES=averages is not None,
            KEEP=keep,
            SPAN=SPAN,
            num_warps=8,
        )
    return factors
