"""One pass over many tensors: squares, extremes, counts and inner products of each, in two launches.

Every program reads one chunk and writes its sums; a second kernel adds the chunks of each tensor up in float64. Both
in a fixed order: the same tensors give the same sums, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradvitals.kernels.cut import Cut

KINDS: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

GRADIENT_SUMS = ("square", "largest", "nonzero", "nonfinite", "inner", "other_square")
"""What `_chunk_sums` writes: the last two where there is another tensor beside each."""

LARGEST = GRADIENT_SUMS.index("largest")
NUM_WARPS = 8
BLOCK = 2048
SPAN = 8 * BLOCK
FINISH_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def pointer(addresses, tensor, KIND: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a tensor lies."""
    at = tl.load(addresses + tensor).to(tl.pointer_type(KIND))
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    return at


@triton.jit  # type: ignore[untyped-decorator]
def load(at, offsets, end, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some elements in float32; zeros beyond the end. Without a mask, where there is no end, loads are wide."""
    if WHOLE:
        return tl.load(at + offsets).to(tl.float32)
    return tl.load(at + offsets, mask=offsets < end, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def put(at, offsets, end, x, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store some elements; nothing beyond the end."""
    if WHOLE:
        tl.store(at + offsets, x)
    else:
        tl.store(at + offsets, x, mask=offsets < end)


@triton.jit
def absolute_bits(x):  # type: ignore[no-untyped-def]
    """The bits of |x|: as whole numbers they are in order, with inf above all numbers and nan above inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit  # type: ignore[untyped-decorator]
def _sums_of_chunk(  # type: ignore[no-untyped-def]
    at, other, start, end, sums, num_chunks, COUNTS: tl.constexpr, OTHER: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    square = tl.zeros((BLOCK,), dtype=tl.float32)
    bits = tl.zeros((BLOCK,), dtype=tl.int32)
    nonzero = tl.zeros((BLOCK,), dtype=tl.int32)
    nonfinite = tl.zeros((BLOCK,), dtype=tl.int32)
    inner = tl.zeros((BLOCK,), dtype=tl.float32)
    other_square = tl.zeros((BLOCK,), dtype=tl.float32)
    length = SPAN if WHOLE else end - start
    for i in range(0, length, BLOCK):
        offsets = start + i + tl.arange(0, BLOCK)
        x = load(at, offsets, end, WHOLE)
        square += x * x
        if COUNTS:
            found = absolute_bits(x)
            bits = tl.maximum(bits, found)
            nonzero += (found != 0).to(tl.int32)
            nonfinite += (found >= 0x7F800000).to(tl.int32)
        if OTHER:
            y = load(other, offsets, end, WHOLE)
            inner += x * y
            other_square += y * y
    tl.store(sums, tl.sum(square, axis=0))
    if COUNTS:
        tl.store(sums + num_chunks, tl.max(bits, axis=0).to(tl.float32, bitcast=True))
        tl.store(sums + 2 * num_chunks, tl.sum(nonzero, axis=0).to(tl.float32))
        tl.store(sums + 3 * num_chunks, tl.sum(nonfinite, axis=0).to(tl.float32))
    if OTHER:
        tl.store(sums + 4 * num_chunks, tl.sum(inner, axis=0))
        tl.store(sums + 5 * num_chunks, tl.sum(other_square, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _chunk_sums(  # type: ignore[no-untyped-def]
    chunks, addresses, others, sums, num_chunks, KIND: tl.constexpr, OTHER_KIND: tl.constexpr, COUNTS: tl.constexpr,
    OTHER: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor = tl.load(chunks + program)
    start = tl.load(chunks + num_chunks + program)
    end = tl.load(chunks + 2 * num_chunks + program)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    at = pointer(addresses, tensor, KIND, ALIGNED)
    other = pointer(others, tensor, OTHER_KIND, ALIGNED)
    if end - start == SPAN:
        _sums_of_chunk(at, other, start, end, sums + program, num_chunks, COUNTS, OTHER, True, BLOCK, SPAN)
    else:
        _sums_of_chunk(at, other, start, end, sums + program, num_chunks, COUNTS, OTHER, False, BLOCK, SPAN)


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    sums, ranges, out, num_chunks, num_ranges, MAXIMA: tl.constexpr, ROOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add up one number of one tensor over its chunks, or take the largest; and its root, where a norm is wanted."""
    which, number = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(ranges + 2 * which), tl.load(ranges + 2 * which + 1)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    largest = tl.zeros((BLOCK,), dtype=tl.int32)
    for at in range(begin, end, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        x = tl.load(sums + number * num_chunks + offsets, mask=offsets < end, other=0.0)
        total += x.to(tl.float64)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True))
    value = tl.sum(total, axis=0)
    if (MAXIMA >> number) & 1:
        value = tl.max(largest, axis=0).to(tl.float32, bitcast=True).to(tl.float64)
    if (ROOTS >> number) & 1:
        value = tl.sqrt(value)
    tl.store(out + number * num_ranges + which, value)


def finish(cut: Cut, sums: Tensor, *, maxima: int = 0, roots: int = 0) -> Tensor:
    """Add the numbers of all chunks up: a row for each number, a column for each tensor and slice, in float64.

    Args:
        cut: What the chunks are of.
        sums: A row for each number, a column for each chunk.
        maxima: A bit for each number of which the largest is wanted instead.
        roots: A bit for each number of which the square root is wanted.
    """
    out = torch.empty((len(sums), cut.num_ranges), dtype=torch.float64, device=sums.device)
    _finish[(cut.num_ranges, len(sums))](
        sums, cut.ranges, out, cut.num_chunks, cut.num_ranges, MAXIMA=maxima, ROOTS=roots, BLOCK=FINISH_BLOCK
    )
    return out


def chunk_sums(
    cut: Cut,
    addresses: Tensor,
    dtype: torch.dtype,
    *,
    counts: bool,
    others: Tensor | None = None,
    other_dtype: torch.dtype | None = None,
    aligned: bool = True,
) -> Tensor:
    """The sums of every chunk, a row for each of `GRADIENT_SUMS`; those not asked for are left out.

    Args:
        cut: Of the tensors.
        addresses: Where they lie.
        dtype: Of the tensors.
        counts: Whether to take more than squares.
        others: Addresses of a tensor beside each, laid out alike, to take inner products with.
        other_dtype: Of these.
        aligned: Whether all addresses allow wide loads.
    """
    rows = 6 if others is not None else 4 if counts else 1
    sums = torch.empty((rows, cut.num_chunks), dtype=torch.float32, device=addresses.device)
    _chunk_sums[(cut.num_chunks,)](
        cut.chunks,
        addresses,
        addresses if others is None else others,
        sums,
        cut.num_chunks,
        KIND=KINDS[dtype],
        OTHER_KIND=KINDS[other_dtype or dtype],
        COUNTS=counts or others is not None,
        OTHER=others is not None,
        ALIGNED=aligned,
        BLOCK=BLOCK,
        SPAN=SPAN,
        num_warps=NUM_WARPS,
    )
    return sums
