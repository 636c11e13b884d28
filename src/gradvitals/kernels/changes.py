"""How far a few coordinates of many tensors have moved since the last look, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradvitals.kernels.cut import Addresses, upload
from gradvitals.kernels.sums import KINDS, pointer


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
    """One set of tensors that is looked at again and again.

    Args:
        tensors: Flat tensors of one device and type.
        strides: From one coordinate that is looked at to the next, of each.
        coordinates: How many are looked at, at most, of each: a power of two.
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
        self._stream = self._now_on()
        self.look()

    def look(self) -> Tensor:
        """For each tensor the sum of squared changes, then its product with the changes of the look before."""
        number, stream = len(self._tensors), self._now_on()
        if stream is not None and stream != self._stream:  # what is written there must not be given away before
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
                num_warps=1,
            )
        return sums

    def _now_on(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
