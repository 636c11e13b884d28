"""Gradients added up and held against their mean (VRGD), for many tensors in one launch.

The sum is that of `torch.add`, bit for bit. Every gradient is read once; what it adds to the squared deviations is
worked out from the registers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from gradvitals.kernels.cut import Addresses, Cut, is_capturing
from gradvitals.kernels.sums import KINDS, load, pointer, put

BLOCK = 1024
SPAN = 8192
NUM_WARPS = 4
STAGES = 3
MOST_COUNTS = 64
"""Parts of a step that tables are kept for."""


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
        # Spelt out, so that the sums are the same, bit for bit, whoever has added the part.
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
    tensor = tl.load(chunks + number)
    start = tl.load(chunks + num_chunks + number)
    end = tl.load(chunks + 2 * num_chunks + number)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
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
    """One set of tensors whose gradients are added up again and again."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._device = device
        self._cut = Cut(sizes, device, SPAN)
        self._totals, self._noises = Addresses(), Addresses()
        self._parts: dict[int, Addresses] = {}  # those of one count lie where they lay a step ago, most likely
        self.captured = False
        """Whether a CUDA graph uses its tables."""

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
        """Take one part of every tensor into its sum and its squared deviations, in place.

        Args:
            parts: Of one device and type, laid out like the sums, without gaps. They are left as they are.
            totals: Sums of parts, of one type.
            noises: Sums of squared deviations, of one type.
            count: Parts there are with these.
            rounding: Share of the squared sum that rounding alone may amount to; it is taken off.
            added: Whether the sums hold these parts already.
            fresh: Whether there is nothing in `noises` yet, whatever they hold.
        """
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            self.captured = self.captured or is_capturing(self._device)
            of_count = self._parts.setdefault(count % MOST_COUNTS, Addresses())
            given = ((of_count, parts), (self._totals, totals), (self._noises, noises))
            tables = [table.table(tensors) for table, tensors in given]
            spread = count / (count - 1)
            _add[(self._cut.num_chunks,)](
                self._cut.chunks,
                *tables,
                self._cut.num_chunks,
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


def can_be_cut(device: torch.device) -> bool:
    """Whether tables of a new set can be sent: a CUDA graph would send them again from memory that is gone."""
    return not is_capturing(device)
