"""VRGD's rule as the paper has it, for many tensors at once: one pass for the mean ratio, one to apply it.

Partial sums are added up in a fixed order: the same gradients give the same factors, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradvitals.kernels.cut import Cut
from gradvitals.kernels.sums import KINDS, finish, load, pointer, put

BLOCK = 1024
SPAN = 8192
"""The same as AdamW's, which shares its cuts with this."""
NUM_WARPS = 4


@triton.jit
def factor_of(grad, deviations, inverse, gamma):  # type: ignore[no-untyped-def]
    """The factor of each element; 1 where there is no noise, or something that is no number."""
    ratio = grad * grad / deviations * inverse
    # Comparisons with nan are false; minimum and maximum would lose it.
    return tl.where((deviations > 0) & (ratio < 1.0), tl.where(ratio > gamma, ratio, gamma), 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def taken_in(average, factor, weight, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """A moving average with another factor in it."""
    return tl.fma(weight, factor - average, average).to(KIND)


@triton.jit  # type: ignore[untyped-decorator]
def _ratios_of_chunk(  # type: ignore[no-untyped-def]
    grad_at, noise_at, start, end, sums, num_chunks, WHOLE: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr
):
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    number = tl.zeros((BLOCK,), dtype=tl.int32)
    length = SPAN if WHOLE else end - start
    for i in range(0, length, BLOCK):
        offsets = start + i + tl.arange(0, BLOCK)
        grad = load(grad_at, offsets, end, WHOLE)
        deviations = load(noise_at, offsets, end, WHOLE)
        ratio = grad * grad / deviations
        counted = (deviations > 0) & (ratio < float("inf"))
        total += tl.where(counted, ratio, 0.0)
        number += counted.to(tl.int32)
    tl.store(sums, tl.sum(total, axis=0))
    tl.store(sums + num_chunks, tl.sum(number, axis=0).to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _sum_ratios(  # type: ignore[no-untyped-def]
    chunks, grads, noises, sums, num_chunks, GRAD: tl.constexpr, NOISE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    tensor = tl.load(chunks + number)
    start = tl.load(chunks + num_chunks + number)
    end = tl.load(chunks + 2 * num_chunks + number)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    grad_at = pointer(grads, tensor, GRAD, ALIGNED)
    noise_at = pointer(noises, tensor, NOISE, ALIGNED)
    if end - start == SPAN:
        _ratios_of_chunk(grad_at, noise_at, start, end, sums + number, num_chunks, True, BLOCK, SPAN)
    else:
        _ratios_of_chunk(grad_at, noise_at, start, end, sums + number, num_chunks, False, BLOCK, SPAN)


@triton.jit  # type: ignore[untyped-decorator]
def _apply_to_chunk(  # type: ignore[no-untyped-def]
    grad_at, noise_at, average_at, factor_at, start, end, inverse, gamma, weight,
    GRAD: tl.constexpr, AVERAGED: tl.constexpr, KEEP: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    length = SPAN if WHOLE else end - start
    for i in range(0, length, BLOCK):
        offsets = start + i + tl.arange(0, BLOCK)
        grad = load(grad_at, offsets, end, WHOLE)
        factor = factor_of(grad, load(noise_at, offsets, end, WHOLE), inverse, gamma)
        if KEEP:
            put(factor_at, offsets, end, factor, WHOLE)
        if AVERAGED:
            average = taken_in(load(average_at, offsets, end, WHOLE), factor, weight, GRAD)
            put(average_at, offsets, end, average, WHOLE)
            factor = average.to(tl.float32)
        put(grad_at, offsets, end, (grad * factor).to(GRAD), WHOLE)


@triton.jit  # type: ignore[untyped-decorator]
def _apply(  # type: ignore[no-untyped-def]
    chunks, grads, noises, averages, factors, ratios, num_chunks, num_ratios, gamma, weight,
    GRAD: tl.constexpr, NOISE: tl.constexpr, AVERAGED: tl.constexpr, KEEP: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    tensor = tl.load(chunks + number)
    start = tl.load(chunks + num_chunks + number)
    end = tl.load(chunks + 2 * num_chunks + number)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    grad_at = pointer(grads, tensor, GRAD, ALIGNED)
    noise_at = pointer(noises, tensor, NOISE, ALIGNED)
    average_at = pointer(averages, tensor, GRAD, ALIGNED)
    factor_at = pointer(factors, tensor, tl.float32, ALIGNED)
    inverse = (tl.load(ratios + num_ratios + tensor) / tl.load(ratios + tensor)).to(tl.float32)
    if end - start == SPAN:
        _apply_to_chunk(
            grad_at, noise_at, average_at, factor_at, start, end, inverse, gamma, weight,
            GRAD, AVERAGED, KEEP, True, BLOCK, SPAN,
        )  # fmt: skip
    else:
        _apply_to_chunk(
            grad_at, noise_at, average_at, factor_at, start, end, inverse, gamma, weight,
            GRAD, AVERAGED, KEEP, False, BLOCK, SPAN,
        )  # fmt: skip


def sum_ratios(
    cut: Cut, grads: Tensor, noises: Tensor, *, dtype: torch.dtype, noise_dtype: torch.dtype, aligned: bool
) -> Tensor:
    """The sum of every tensor's ratios of signal to noise, and their number: two rows, in float64.

    Args:
        cut: Of the gradients, by `SPAN`.
        grads: Where they lie.
        noises: Where their squared deviations lie, laid out alike.
        dtype: Of the gradients.
        noise_dtype: Of the deviations.
        aligned: Whether all addresses allow wide loads.
    """
    sums = torch.empty((2, cut.num_chunks), dtype=torch.float32, device=grads.device)
    _sum_ratios[(cut.num_chunks,)](
        cut.chunks,
        grads,
        noises,
        sums,
        cut.num_chunks,
        GRAD=KINDS[dtype],
        NOISE=KINDS[noise_dtype],
        ALIGNED=aligned,
        BLOCK=BLOCK,
        SPAN=SPAN,
        num_warps=NUM_WARPS,
    )
    return finish(cut, sums)


def scale(
    cut: Cut,
    grads: Tensor,
    noises: Tensor,
    averages: Tensor | None,
    factors: Tensor | None,
    *,
    dtype: torch.dtype,
    noise_dtype: torch.dtype,
    gamma: float,
    weight: float,
    aligned: bool,
) -> None:
    """Multiply gradients by the paper's factors, in place, and take those into their moving averages.

    Args:
        cut: Of the gradients, by `SPAN`.
        grads: Where the sums of parts lie.
        noises: Where summed squared deviations lie, laid out alike; none where not positive.
        averages: Where the moving averages lie, where there are any: gradients are multiplied by these.
        factors: Where to put the factors, in float32; None where they are not wanted.
        dtype: Of gradients and averages.
        noise_dtype: Of the deviations.
        gamma: Smallest factor.
        weight: Of the new factors in the averages.
        aligned: Whether all addresses allow wide loads.
    """
    ratios = sum_ratios(cut, grads, noises, dtype=dtype, noise_dtype=noise_dtype, aligned=aligned)
    _apply[(cut.num_chunks,)](
        cut.chunks,
        grads,
        noises,
        grads if averages is None else averages,
        grads if factors is None else factors,
        ratios,
        cut.num_chunks,
        ratios.shape[1],
        gamma,
        weight,
        GRAD=KINDS[dtype],
        NOISE=KINDS[noise_dtype],
        AVERAGED=averages is not None,
        KEEP=factors is not None,
        ALIGNED=aligned,
        BLOCK=BLOCK,
        SPAN=SPAN,
        num_warps=NUM_WARPS,
    )
