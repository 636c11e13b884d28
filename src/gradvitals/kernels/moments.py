"""Adam's moments of many tensors: sums of both in one read, and the median over coordinates of m²/v from a sample.

The sample is stretches of `BLOCK` coordinates, at most `MOST_STRETCHES` of them, spread evenly over a tensor; all of it
where it is shorter than `SPAN`. It is counted in bins whose edges are spaced like float32 numbers with three bits of
mantissa, eight to an octave; the median is found between the edges of its bin, in proportion. Nothing is added up in an
order that could change.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradvitals.kernels.reductions import KINDS, finish, load, pointer
from gradvitals.kernels.tables import Addresses, Cut, upload

MOMENT_SUMS = ("first", "second", "alive", "below_one")
"""Of m squared, of v; coordinates with a v, and those of them whose GSNR is below 1."""

BLOCK = 512
SPAN = 8192
NUM_WARPS = 4
BINS = 256
FIRST_BIN = tl.constexpr(8 * (127 - 28))
"""The bits of 2⁻²⁸ but for the last 20; smaller ratios count with it, and those from 16 on with the last bin."""
CHUNKS_AT_ONCE = 16
MOST_STRETCHES = 64
"""Where coordinates are alike, the rank of what is found is off by less than 1 % then; rows that differ add to that."""


@triton.jit  # type: ignore[untyped-decorator]
def _sums_of_chunk(  # type: ignore[no-untyped-def]
    first_at, second_at, start, end, limit, sums, num_chunks, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    first_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    second_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    counts = tl.zeros((BLOCK,), dtype=tl.int32)  # of those alive, and in the upper half of those below 1
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
    tensor = tl.load(chunks + number)
    start = tl.load(chunks + num_chunks + number)
    end = tl.load(chunks + 2 * num_chunks + number)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
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
    tensor = tl.load(chunks + number)
    start = tl.load(chunks + num_chunks + number)
    end = tl.load(chunks + 2 * num_chunks + number)
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
        counted = v > 0.0  # not where v is 0, or beyond the end
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
    share = (half - below) / inside  # nan where nothing was counted
    low = ((mine + FIRST_BIN) << 20).to(tl.float32, bitcast=True).to(tl.float64)
    high = ((mine + 1 + FIRST_BIN) << 20).to(tl.float32, bitcast=True).to(tl.float64)
    tl.store(medians + tensor, low + share * (high - low))


class MomentReader:
    """One set of moments that is read again and again."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._device = device
        self._cut = Cut(sizes, device, SPAN)
        self._firsts, self._seconds = Addresses(), Addresses()
        numbers = [end - begin for begin, end in pairwise([*self._cut.firsts, self._cut.num_chunks])]
        # Odd, and staggered within their chunks: what comes again with every row or head must not always be hit.
        taken = [range(0, number, -(-number // MOST_STRETCHES) | 1) for number in numbers]
        shifts = [
            BLOCK * (7 * place % (SPAN // BLOCK)) if place < number - 1 else 0
            for number, some in zip(numbers, taken, strict=True)
            for place in some
        ]
        which = [first + place for first, some in zip(self._cut.firsts, taken, strict=True) for place in some]
        self._stretches = self._cut.chunks[:, upload(torch.tensor(which, dtype=torch.int64), device)].contiguous()
        self._stretches[1] += upload(torch.tensor(shifts, dtype=torch.int64), device)
        per_tensor = [size if size < SPAN else BLOCK * len(some) for size, some in zip(sizes, taken, strict=True)]
        self.num_sampled = sum(per_tensor)
        """Coordinates that medians are taken of, or some more."""
        ends = list(accumulate(map(len, taken), initial=0))
        self._of_tensors = upload(torch.tensor(list(pairwise(ends)), dtype=torch.int64).reshape(-1, 2), device)

    def sums(self, firsts: Sequence[Tensor], seconds: Sequence[Tensor], limits: Tensor) -> Tensor:
        """Rows in the order of `MOMENT_SUMS`, the first of them norms; a column for each tensor, in float64.

        Args:
            firsts: Averages m of gradients, of one device and type.
            seconds: Averages v of their squares, laid out alike.
            limits: In float32, for each tensor: its GSNR is below 1 where m² is below this times v.
        """
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            mine, theirs = self._firsts.table(firsts), self._seconds.table(seconds)
            shape = (len(MOMENT_SUMS), self._cut.num_chunks)
            sums = torch.empty(shape, dtype=torch.float32, device=self._device)
            _sums[(self._cut.num_chunks,)](
                self._cut.chunks,
                mine,
                theirs,
                limits,
                sums,
                self._cut.num_chunks,
                KIND=KINDS[firsts[0].dtype],
                ALIGNED=self._firsts.aligned and self._seconds.aligned,
                BLOCK=BLOCK,
                SPAN=SPAN,
                num_warps=NUM_WARPS,
            )
            return finish(self._cut, sums, roots=1)

    def medians(self, firsts: Sequence[Tensor], seconds: Sequence[Tensor]) -> Tensor:
        """The median of m²/v over the coordinates of each tensor that have a v, in float64; nan where none has."""
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            mine, theirs = self._firsts.table(firsts), self._seconds.table(seconds)
            number = self._stretches.shape[1]
            counts = torch.empty((number, BINS), dtype=torch.int32, device=self._device)
            _count[(number,)](
                self._stretches,
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
            medians = torch.empty(self._cut.num_tensors, dtype=torch.float64, device=self._device)
            _medians[(self._cut.num_tensors,)](counts, self._of_tensors, medians, BINS=BINS, AT_ONCE=CHUNKS_AT_ONCE)
            return medians
