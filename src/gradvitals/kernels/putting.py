"""Addresses brought to the device as arguments of a kernel: the one way that a CUDA graph can capture."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 8


@triton.jit(do_not_specialize=["at", "a", "b", "c", "d", "e", "f", "g", "h"])
def _put(table, at, a, b, c, d, e, f, g, h):  # type: ignore[no-untyped-def]
    tl.store(table + at, a)
    tl.store(table + at + 1, b)
    tl.store(table + at + 2, c)
    tl.store(table + at + 3, d)
    tl.store(table + at + 4, e)
    tl.store(table + at + 5, f)
    tl.store(table + at + 6, g)
    tl.store(table + at + 7, h)


def put(numbers: Sequence[int], device: torch.device) -> Tensor:
    """A table of whole numbers on the device."""
    padded = [*numbers, *[0] * (-len(numbers) % AT_ONCE)]
    table = torch.empty(len(padded), dtype=torch.int64, device=device)
    for at in range(0, len(padded), AT_ONCE):
        _put[(1,)](table, at, *padded[at : at + AT_ONCE])
    return table
