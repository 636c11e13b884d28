"""Adam's moments of many tensors: sums of both in one read, and the median of m²/v over a sample of coordinates.

The sample consists of at most `MAX_RUNS` runs of `BLOCK` coordinates, spread evenly over a tensor, or of the whole
tensor if it is shorter than `SPAN`. It is counted in bins whose edges are float32 numbers with three bits of mantissa,
eight per octave; the median is interpolated within its bin. All sums have a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradvitals.kernels.reductions import KINDS, chunk_of, finish, load, pointer
from gradvitals.kernels.tables import Addresses, Chunks, upload

MOMENT_SUMS = ("first", "second", "alive", "below_one")
"""Sums of m² and of v; counts of coordinates with v > 0, and of those whose GSNR is below 1."""

BLOCK = 512
SPAN = 8192
NUM_WARPS = 4
BINS = 256
FIRST_BIN = tl.constexpr(8 * (127 - 28))
"""The bits of 2⁻²⁸ without the last 20. Smaller ratios go into this bin, and those from 16 up into the last."""
CHUNKS_AT_ONCE = 16
MAX_RUNS = 64
"""If coordinates are alike, the rank of the result is then off by less than 1%; rows that differ add to that."""


@triton.jit  # type: ignore[untyped-decorator]
def _sums_of_chunk(  # type: ignore[no-untyped-def]
    first_at, second_at, start, end, limit, sums, num_chunks, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    first_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    second_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    counts = tl.zeros((BLOCK,), dtype=tl.int32)  # of those alive; the upper half counts those below 1
    length = SPAN if WHOLE else end - start
    for i in range(0, length, BLOCK):
        offsets = start + i + tl.arange(0, BLOCK)
        m = load(first_at, offsets, end, WHOLE)
        v = load(second_at, offsets, end, WHOLE)
        first_sum += m * m
        second_sum += v
        counts += (v > 0.0).to(tl.int32) + ((v > 0.0) & (m * m < limit * v)).to(tl.int32) * 0x10000
    tl.store(sums, tl.sum(first_sum, axis=0))
    tl.store(sums + num_chunks, tl.sum(second_sum, axis=0))
    number_of = tl.sum(counts, axis=0)
    tl.store(sums + 2 * num_chunks, (number_of & 0xFFFF).to(tl.float32))
    tl.store(sums + 3 * num_chunks, (number_of >> 16).to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    chunks, firsts, seconds, limits, sums, num_chunks, KIND: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    tensor, start, end = chunk_of(chunks, number, num_chunks, ALIGNED)
    first_at = pointer(firsts, tensor, KIND, ALIGNED)
    second_at = pointer(seconds, tensor, KIND, ALIGNED)
    limit = tl.load(limits + tensor)
    if end - start == SPAN:
        _sums_of_chunk(first_at, second_at, start, end, limit, sums + number, num_chunks, True, BLOCK, SPAN)
    else:
        _sums_of_chunk(first_at, second_at, start, end, limit, sums + number, num_chunks, False, BLOCK, SPAN)


@triton.jit  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    chunks, firsts, seconds, counts, num_chunks, KIND: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    tensor, start, end = chunk_of(chunks, number, num_chunks, False)
    first_at = pointer(firsts, tensor, KIND, ALIGNED)
    second_at = pointer(seconds, tensor, KIND, ALIGNED)
    whole_tensor = (start == 0) & (end < SPAN)
    length = tl.where(whole_tensor, end, tl.minimum(end - start, BLOCK))
    found = tl.zeros((BINS,), dtype=tl.int32)
    for i in range(0, length, BLOCK):
        offsets = start + i + tl.arange(0, BLOCK)
        m = load(first_at, offsets, end, False)
        v = load(second_at, offsets, end, False)
        ratio = m * m / v
        which = (ratio.to(tl.int32, bitcast=True) >> 20) - FIRST_BIN
        counted = v > 0.0  # not if v is 0, or beyond the end
        which = tl.where(counted, tl.minimum(tl.maximum(which, 0), BINS - 1), 0)
        idle = BLOCK - tl.sum(counted.to(tl.int32), axis=0)
        found += tl.histogram(which, BINS) - tl.where(tl.arange(0, BINS) == 0, idle, 0)
    tl.store(counts + number * BINS + tl.arange(0, BINS), found)


@triton.jit  # type: ignore[untyped-decorator]
def _medians(  # type: ignore[no-untyped-def]
    counts, ranges, medians, BINS: tl.constexpr, AT_ONCE: tl.constexpr
):
    tensor = tl.program_id(0)
    begin, end = tl.load(ranges + 2 * tensor), tl.load(ranges + 2 * tensor + 1)
    bins = tl.arange(0, BINS)
    many = tl.zeros((AT_ONCE, BINS), dtype=tl.int32)
    for at in range(begin, end, AT_ONCE):
        chunk = at + tl.arange(0, AT_ONCE)
        place = counts + chunk[:, None] * BINS + bins[None, :]
        many += tl.load(place, mask=chunk[:, None] < end, other=0)
    found = tl.sum(many, axis=0).to(tl.float64)
    up_to = tl.cumsum(found, axis=0)
    half = tl.sum(found, axis=0) / 2.0
    mine = tl.sum((up_to < half).to(tl.int32), axis=0)
    below = tl.max(tl.where(bins < mine, up_to, 0.0), axis=0)
    inside = tl.sum(tl.where(bins == mine, found, 0.0), axis=0)
    share = (half - below) / inside  # NaN if nothing was counted
    low = ((mine + FIRST_BIN) << 20).to(tl.float32, bitcast=True).to(tl.float64)
    high = ((mine + 1 + FIRST_BIN) << 20).to(tl.float32, bitcast=True).to(tl.float64)
    tl.store(medians + tensor, low + share * (high - low))


class MomentReader:
    """Reads one set of moments repeatedly."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._device = device
        self._chunks = Chunks(sizes, device, SPAN)
        self._firsts, self._seconds = Addresses(), Addresses()
        numbers = [end - begin for begin, end in pairwise([*self._chunks.firsts, self._chunks.num_chunks])]
        # An odd stride, staggered within chunks, so that samples do not align with rows or heads.
        taken = [range(0, number, -(-number // MAX_RUNS) | 1) for number in numbers]
        shifts = [
            BLOCK * (7 * place % (SPAN // BLOCK)) if place < number - 1 else 0
            for number, some in zip(numbers, taken, strict=True)
            for place in some
        ]
        which = [first + place for first, some in zip(self._chunks.firsts, taken, strict=True) for place in some]
        self._runs = self._chunks.table[:, upload(torch.tensor(which, dtype=torch.int64), device)].contiguous()
        self._runs[1] += upload(torch.tensor(shifts, dtype=torch.int64), device)
        per_tensor = [size if size < SPAN else BLOCK * len(some) for size, some in zip(sizes, taken, strict=True)]
        self.num_sampled = sum(per_tensor)
        """Upper bound of the number of coordinates in the sample."""
        ends = list(accumulate(map(len, taken), initial=0))
        self._of_tensors = upload(torch.tensor(list(pairwise(ends)), dtype=torch.int64).reshape(-1, 2), device)

    def sums(self, firsts: Sequence[Tensor], seconds: Sequence[Tensor], limits: Tensor) -> Tensor:
        """Return rows in the order of `MOMENT_SUMS`, the first as norms, with a column per tensor, in float64.

        Args:
            firsts: Averages m of gradients, of one device and dtype.
            seconds: Averages v of their squares, of the same layout.
            limits: In float32, per tensor: the GSNR is below 1 if m² is below this times v.
        """
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            mine, theirs = self._firsts.table(firsts), self._seconds.table(seconds)
            shape = (len(MOMENT_SUMS), self._chunks.num_chunks)
            sums = torch.empty(shape, dtype=torch.float32, device=self._device)
            _sums[(self._chunks.num_chunks,)](
                self._chunks.table,
                mine,
                theirs,
                limits,
                sums,
                self._chunks.num_chunks,
                KIND=KINDS[firsts[0].dtype],
                ALIGNED=self._firsts.aligned and self._seconds.aligned,
                BLOCK=BLOCK,
                SPAN=SPAN,
                num_warps=NUM_WARPS,
            )
            return finish(self._chunks, sums, roots=1)

    def medians(self, firsts: Sequence[Tensor], seconds: Sequence[Tensor]) -> Tensor:
        """Return the median of m²/v over each tensor's coordinates with v > 0, in float64; NaN if there are none."""
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            mine, theirs = self._firsts.table(firsts), self._seconds.table(seconds)
            number = self._runs.shape[1]
            counts = torch.empty((number, BINS), dtype=torch.int32, device=self._device)
            _count[(number,)](
                self._runs,
                mine,
                theirs,
                counts,
                number,
                KIND=KINDS[firsts[0].dtype],
                ALIGNED=self._firsts.aligned and self._seconds.aligned,
                BLOCK=BLOCK,
                SPAN=SPAN,
                BINS=BINS,
                num_warps=NUM_WARPS,
            )
            medians = torch.empty(self._chunks.num_tensors, dtype=torch.float64, device=self._device)
            _medians[(self._chunks.num_tensors,)](counts, self._of_tensors, medians, BINS=BINS, AT_ONCE=CHUNKS_AT_ONCE)
            return medians
