"""One pass over many tensors: squares, extremes, counts and inner products of each, in two launches.

Every program reads one chunk and writes its sums; a second kernel adds up the chunks of each tensor in float64. The
order is fixed, so the same tensors give the same sums, bit for bit. `ChangeReader` compares a few coordinates of each
tensor with those of its last call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradvitals.kernels.tables import Addresses, Chunks, upload

KINDS: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

GRADIENT_SUMS = ("square", "largest", "nonzero", "nonfinite", "inner", "other_square")
"""Rows that `_chunk_sums` writes; the last two only with `others`."""

LARGEST = GRADIENT_SUMS.index("largest")
NUM_WARPS = 8
BLOCK = 2048
SPAN = 8 * BLOCK
FINISH_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def chunk_of(chunks, number, num_chunks, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the tensor of a chunk, its start and its end."""
    start = tl.load(chunks + num_chunks + number)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return tl.load(chunks + number), start, tl.load(chunks + 2 * num_chunks + number)


@triton.jit  # type: ignore[untyped-decorator]
def pointer(addresses, tensor, KIND: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a tensor's address."""
    at = tl.load(addresses + tensor).to(tl.pointer_type(KIND))
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    return at


@triton.jit  # type: ignore[untyped-decorator]
def load(at, offsets, end, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load elements as float32, zeros beyond the end. WHOLE chunks need no mask, so their loads are wide."""
    if WHOLE:
        return tl.load(at + offsets).to(tl.float32)
    return tl.load(at + offsets, mask=offsets < end, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def put(at, offsets, end, x, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store elements, none beyond the end."""
    if WHOLE:
        tl.store(at + offsets, x)
    else:
        tl.store(at + offsets, x, mask=offsets < end)


@triton.jit
def absolute_bits(x):  # type: ignore[no-untyped-def]
    """Return the bits of |x|. As integers they sort like the values, with inf above all numbers and NaN above inf."""
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
    tensor, start, end = chunk_of(chunks, program, num_chunks, ALIGNED)
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
    """Sum one row of one tensor over its chunks, or take the maximum; then take the root if it is in ROOTS."""
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


def finish(chunks: Chunks, sums: Tensor, *, maxima: int = 0, roots: int = 0) -> Tensor:
    """Return the sums over chunks, in float64: a row per number, a column per tensor and then per slice.

    Args:
        chunks: Of the tensors.
        sums: A row per number, a column per chunk.
        maxima: Bit mask of the rows to take the maximum of instead.
        roots: Bit mask of the rows to take the square root of.
    """
    out = torch.empty((len(sums), chunks.num_ranges), dtype=torch.float64, device=sums.device)
    _finish[(chunks.num_ranges, len(sums))](
        sums, chunks.ranges, out, chunks.num_chunks, chunks.num_ranges, MAXIMA=maxima, ROOTS=roots, BLOCK=FINISH_BLOCK
    )
    return out


def chunk_sums(
    chunks: Chunks,
    addresses: Tensor,
    dtype: torch.dtype,
    *,
    counts: bool,
    others: Tensor | None = None,
    other_dtype: torch.dtype | None = None,
    aligned: bool = True,
) -> Tensor:
    """Return the sums of every chunk, a row for each of `GRADIENT_SUMS` that was requested.

    `others` has the address of one tensor for each, of the same layout, for inner products.
    """
    rows = 6 if others is not None else 4 if counts else 1
    sums = torch.empty((rows, chunks.num_chunks), dtype=torch.float32, device=addresses.device)
    _chunk_sums[(chunks.num_chunks,)](
        chunks.table,
        addresses,
        addresses if others is None else others,
        sums,
        chunks.num_chunks,
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


class Reader:
    """Reads one set of tensors repeatedly. A new set replaces the old one."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._slices: Mapping[int, int] = {}
        self._chunks: Chunks | None = None
        self._mine, self._others = Addresses(), Addresses()

    def _split(self, tensors: Sequence[Tensor], slices: Mapping[int, int] | None) -> Chunks:
        sizes = [tensor.numel() for tensor in tensors]
        slices = slices or {}
        if self._chunks is None or sizes != self._sizes or slices != self._slices:
            self._sizes, self._slices = sizes, dict(slices)
            self._chunks = Chunks(sizes, tensors[0].device, SPAN, slices)
        return self._chunks

    def read(
        self,
        tensors: Sequence[Tensor],
        *,
        counts: bool = False,
        others: Sequence[Tensor] | None = None,
        slices: Mapping[int, int] | None = None,
        norms: bool = True,
    ) -> Tensor:
        """Return sums of each tensor, in two launches: rows in the order of `GRADIENT_SUMS`.

        Args:
            tensors: Of one device and dtype, all `kernels.usable`.
            counts: Whether to compute more than norms.
            others: One tensor for each, of one dtype and the same layout, for inner products.
            slices: Number of equal slices by position, of the tensors to read by slice too. Their columns come last.
            norms: Whether the first row has norms instead of squared norms.
        """
        chunks = self._split(tensors, slices)
        device = tensors[0].device
        with torch.cuda.device(device if device.type == "cuda" else -1):
            mine = self._mine.table(tensors)
            theirs = None if others is None else self._others.table(others)
            sums = chunk_sums(
                chunks,
                mine,
                tensors[0].dtype,
                counts=counts,
                others=theirs,
                other_dtype=None if others is None else others[0].dtype,
                aligned=self._mine.aligned and (others is None or self._others.aligned),
            )
            return finish(chunks, sums, maxima=1 << LARGEST, roots=1 if norms else 0)


@triton.jit  # type: ignore[untyped-decorator]
def _compare(  # type: ignore[no-untyped-def]
    addresses, strides, lengths, before, last, sums, num_tensors, KIND: tl.constexpr, COORDINATES: tl.constexpr
):
    tensor = tl.program_id(0)
    places = tl.arange(0, COORDINATES)
    inside = places < tl.load(lengths + tensor)
    at = pointer(addresses, tensor, KIND, False)
    now = tl.load(at + places * tl.load(strides + tensor), mask=inside, other=0.0).to(tl.float32)
    mine = tensor * COORDINATES + places
    change = now - tl.load(before + mine)
    tl.store(sums + tensor, tl.sum(change * change, axis=0))
    tl.store(sums + num_tensors + tensor, tl.sum(change * tl.load(last + mine), axis=0))
    tl.store(before + mine, now)
    tl.store(last + mine, change)


class ChangeReader:
    """Compares sampled coordinates of a set of tensors with those of the last call, in one launch.

    Args:
        tensors: Flat tensors of one device and dtype.
        strides: Distance between sampled coordinates, per tensor.
        coordinates: Most coordinates per tensor, a power of two.
    """

    def __init__(self, tensors: Sequence[Tensor], strides: Sequence[int], coordinates: int) -> None:
        self._tensors = list(tensors)
        self._coordinates = coordinates
        self._device = tensors[0].device
        lengths = [-(-tensor.numel() // stride) for tensor, stride in zip(tensors, strides, strict=True)]
        self._strides, self._lengths = (
            upload(torch.tensor(numbers, dtype=torch.int64), self._device) for numbers in (strides, lengths)
        )
        self._addresses = Addresses().table(self._tensors)
        size = len(tensors) * coordinates
        self._memory = torch.zeros((2, size), dtype=torch.float32, device=self._device)
        self._before, self._last = self._memory
        self._stream = self._current_stream()
        self.look()

    def look(self) -> Tensor:
        """Return the sum of squared changes per tensor, then the inner product with the previous changes."""
        number, stream = len(self._tensors), self._current_stream()
        if stream is not None and stream != self._stream:  # its memory must not be reused before this stream is done
            self._memory.record_stream(stream)
        sums = torch.empty((2, number), dtype=torch.float32, device=self._device)
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            _compare[(number,)](
                self._addresses,
                self._strides,
                self._lengths,
                self._before,
                self._last,
                sums,
                number,
                KIND=KINDS[self._tensors[0].dtype],
                COORDINATES=self._coordinates,
                num_warps=max(1, self._coordinates // 512),
            )
        return sums

    def _current_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None


TABLE_ENTRIES = 8


@triton.jit(do_not_specialize=["at", "a", "b", "c", "d", "e", "f", "g", "h"])
def _put_table(table, at, a, b, c, d, e, f, g, h):  # type: ignore[no-untyped-def]
    tl.store(table + at, a)
    tl.store(table + at + 1, b)
    tl.store(table + at + 2, c)
    tl.store(table + at + 3, d)
    tl.store(table + at + 4, e)
    tl.store(table + at + 5, f)
    tl.store(table + at + 6, g)
    tl.store(table + at + 7, h)


def put_table(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return a table of integers on the device, passed as kernel arguments: a CUDA graph can capture only that."""
    padded = [*numbers, *[0] * (-len(numbers) % TABLE_ENTRIES)]
    table = torch.empty(len(padded), dtype=torch.int64, device=device)
    for at in range(0, len(padded), TABLE_ENTRIES):
        _put_table[(1,)](table, at, *padded[at : at + TABLE_ENTRIES])
    return table
