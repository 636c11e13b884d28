"""VRGD for many tensors per launch: the paper's rule, and sums of gradients with their squared deviations.

The rule takes one pass for the mean ratio and one to apply it; partial sums have a fixed order, so the same gradients
give the same factors, bit for bit. `Adding` reads every gradient once; its sums are those of `torch.add`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from gradvitals.kernels.reductions import KINDS, chunk_of, finish, load, pointer, put
from gradvitals.kernels.tables import Addresses, Chunks, is_capturing

BLOCK = 1024
SPAN = 8192
"""The same as AdamW's, which shares its chunks."""
NUM_WARPS = 4


@triton.jit
def factor_of(grad, deviations, inverse, gamma):  # type: ignore[no-untyped-def]
    """Return the factor of each element; 1 if there is no noise, or for NaN."""
    ratio = grad * grad / deviations * inverse
    # Comparisons with NaN are false; minimum and maximum would drop it.
    return tl.where((deviations > 0) & (ratio < 1.0), tl.where(ratio > gamma, ratio, gamma), 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def updated_average(average, factor, weight, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a moving average updated with a new factor."""
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
    tensor, start, end = chunk_of(chunks, number, num_chunks, ALIGNED)
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
            average = updated_average(load(average_at, offsets, end, WHOLE), factor, weight, GRAD)
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
    tensor, start, end = chunk_of(chunks, number, num_chunks, ALIGNED)
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
    chunks: Chunks, grads: Tensor, noises: Tensor, *, dtype: torch.dtype, noise_dtype: torch.dtype, aligned: bool
) -> Tensor:
    """Return the sum of every tensor's signal-to-noise ratios, and their count: two rows, in float64.

    The tensors are given by their addresses; squared deviations have the layout of their gradients.
    """
    sums = torch.empty((2, chunks.num_chunks), dtype=torch.float32, device=grads.device)
    _sum_ratios[(chunks.num_chunks,)](
        chunks.table,
        grads,
        noises,
        sums,
        chunks.num_chunks,
        GRAD=KINDS[dtype],
        NOISE=KINDS[noise_dtype],
        ALIGNED=aligned,
        BLOCK=BLOCK,
        SPAN=SPAN,
        num_warps=NUM_WARPS,
    )
    return finish(chunks, sums)


def scale(
    chunks: Chunks,
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
    """Multiply gradients by the paper's factors, in place, and update the moving averages of the factors.

    Args:
        chunks: Of the gradients, by `SPAN`.
        grads: Addresses of the sums of parts.
        noises: Addresses of summed squared deviations, of the same layout; not positive means no noise.
        averages: Addresses of the moving averages. If given, they multiply the gradients.
        factors: Addresses of float32 tensors that receive the factors, if wanted.
        dtype: Of gradients and averages.
        noise_dtype: Of the deviations.
        gamma: Smallest factor.
        weight: Weight of the new factors in the averages.
        aligned: Whether all addresses are aligned.
    """
    ratios = sum_ratios(chunks, grads, noises, dtype=dtype, noise_dtype=noise_dtype, aligned=aligned)
    _apply[(chunks.num_chunks,)](
        chunks.table,
        grads,
        noises,
        grads if averages is None else averages,
        grads if factors is None else factors,
        ratios,
        chunks.num_chunks,
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


STAGES = 3
MAX_COUNTS = 64
"""Parts of a step to keep tables for."""


@triton.jit  # type: ignore[untyped-decorator]
def _add_chunk(  # type: ignore[no-untyped-def]
    part_at, total_at, noise_at, start, end, share, spread, rounding,
    TOTAL: tl.constexpr, NOISE: tl.constexpr, ADD: tl.constexpr, FRESH: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    length = SPAN if WHOLE else end - start
    for i in tl.range(0, length, BLOCK, num_stages=STAGES):
        offsets = start + i + tl.arange(0, BLOCK)
        part = load(part_at, offsets, end, WHOLE)
        total = load(total_at, offsets, end, WHOLE)
        if ADD:
            kept = (total + part).to(TOTAL)
            put(total_at, offsets, end, kept, WHOLE)
            total = kept.to(tl.float32)
        # Explicit fma, so that the sums are the same bit for bit, whether autograd or this kernel adds the part.
        deviation = tl.fma(total, -share, part)
        if FRESH:
            noise = spread * deviation * deviation
        else:
            noise = tl.fma(spread * deviation, deviation, load(noise_at, offsets, end, WHOLE))
        noise = tl.fma(-rounding * total, total, noise)
        put(noise_at, offsets, end, noise.to(NOISE), WHOLE)


@triton.jit  # type: ignore[untyped-decorator]
def _add(  # type: ignore[no-untyped-def]
    chunks, parts, totals, noises, num_chunks, share, spread, rounding,
    PART: tl.constexpr, TOTAL: tl.constexpr, NOISE: tl.constexpr, ADD: tl.constexpr, FRESH: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    tensor, start, end = chunk_of(chunks, number, num_chunks, ALIGNED)
    part_at = pointer(parts, tensor, PART, ALIGNED)
    total_at = pointer(totals, tensor, TOTAL, ALIGNED)
    noise_at = pointer(noises, tensor, NOISE, ALIGNED)
    if end - start == SPAN:
        _add_chunk(
            part_at, total_at, noise_at, start, end, share, spread, rounding,
            TOTAL, NOISE, ADD, FRESH, True, BLOCK, SPAN, STAGES,
        )  # fmt: skip
    else:
        _add_chunk(
            part_at, total_at, noise_at, start, end, share, spread, rounding,
            TOTAL, NOISE, ADD, FRESH, False, BLOCK, SPAN, STAGES,
        )  # fmt: skip


class Adding:
    """Adds up the gradients of one set of tensors, repeatedly."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._device = device
        self._chunks = Chunks(sizes, device, SPAN)
        self._totals, self._noises = Addresses(), Addresses()
        self._parts: dict[int, Addresses] = {}  # parts of one count most likely keep their addresses from step to step
        self.captured = False
        """Whether a CUDA graph uses the tables."""

    def add(
        self,
        parts: Sequence[Tensor],
        totals: Sequence[Tensor],
        noises: Sequence[Tensor],
        *,
        count: int,
        rounding: float,
        added: bool,
        fresh: bool,
    ) -> None:
        """Add one part of every tensor to its sum and its squared deviations, in place.

        Args:
            parts: Of one device and dtype, with the layout of the sums, without gaps. They stay unchanged.
            totals: Sums of parts, of one dtype.
            noises: Sums of squared deviations, of one dtype.
            count: Number of parts including these.
            rounding: Share of the squared sum that rounding alone may cause; it is subtracted.
            added: Whether the sums already include these parts.
            fresh: Whether `noises` are uninitialized.
        """
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            self.captured = self.captured or is_capturing(self._device)
            of_count = self._parts.setdefault(count % MAX_COUNTS, Addresses())
            given = ((of_count, parts), (self._totals, totals), (self._noises, noises))
            tables = [table.table(tensors) for table, tensors in given]
            spread = count / (count - 1)
            _add[(self._chunks.num_chunks,)](
                self._chunks.table,
                *tables,
                self._chunks.num_chunks,
                1 / count,
                spread,
                rounding * spread,
                PART=KINDS[parts[0].dtype],
                TOTAL=KINDS[totals[0].dtype],
                NOISE=KINDS[noises[0].dtype],
                ADD=not added,
                FRESH=fresh,
                ALIGNED=all(table.aligned for table, _ in given),
                BLOCK=BLOCK,
                SPAN=SPAN,
                STAGES=STAGES,
                num_warps=NUM_WARPS,
            )
        if not added:
            for total in totals:
                increment_version(total)


def can_build_tables(device: torch.device) -> bool:
    """Return whether tables of a new set can be uploaded; a CUDA graph would copy them again from freed memory."""
    return not is_capturing(device)
