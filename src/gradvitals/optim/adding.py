"""Parts of a batch taken into sums and squared deviations: many tensors in one launch, or by torch's foreach."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradvitals import kernels
from gradvitals.kernels.cut import ALIGNMENT
from gradvitals.optim.entry import Entry

MOST_SETS = 256
"""Sets of tensors that tables are kept for."""


class Held:
    """Parts of one device, of one stream, that are held back: see `GradientParts`."""

    def __init__(self, device: torch.device) -> None:
        self.parts: list[tuple[Tensor, Entry, Tensor, Tensor | None, int, int]] = []
        """Each with its parameter, the sum it goes into, and the count and version of that."""
        self.nbytes = 0
        self.stream = stream_of(device)


class Ending:
    """Called by autograd when a backward ends; one that fails drops it uncalled, before it raises."""

    def __init__(self, parts: weakref.ref[Any], task: int) -> None:
        self._parts, self._task, self._called = parts, task, False

    def __call__(self) -> None:
        """The backward has ended."""
        self._called = True
        if (parts := self._parts()) is not None:
            parts.end(self._task)

    def __del__(self) -> None:
        if not self._called and (parts := self._parts()) is not None:
            parts.fail(self._task)


def stream_of(device: torch.device) -> int:
    """The stream of now, as a number; 0 where there are none."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def on_current_stream(held: Held, device: torch.device) -> None:
    """Have the stream of now wait for what is held, and memory wait for that stream, where it came on another."""
    if held.stream == stream_of(device):
        return
    now = torch.cuda.current_stream(device)
    now.wait_stream(torch.cuda.ExternalStream(held.stream, device))
    for _, _, part, total, *_ in held.parts:
        for tensor in (part, total):
            if tensor is not None:
                tensor.record_stream(now)


@dataclass
class Arrived:
    """Parts of some parameters' gradients, of one device."""

    count: int
    """Parts there are of each with this one: 2 at least."""
    added: bool
    """Whether the sums hold these parts already."""
    fresh: bool
    """Whether there are no deviations yet, whatever is in their place."""
    readable: bool
    """Whether kernels can read deviations, and so whatever is laid out like them."""
    tensors: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Of each the part, the sum of all parts, and the sum of their squared deviations."""

    @property
    def columns(self) -> list[list[Tensor]]:
        """All parts, all sums, all deviations."""
        return [list(column) for column in zip(*self.tensors, strict=True)]

    def split(self) -> list[Arrived]:
        """By what kernels must know of tensors; `readable` then says whether they can read all."""
        found: dict[tuple[Any, ...], Arrived] = {}
        # For every tensor, in every backward: as little as can be.
        for one in self.tensors:
            part, total, noise = one
            strides = noise.stride()
            well = self.readable and total.stride() == strides
            if well and part.stride() != strides:  # as autograd may hand it over, and adds it by itself
                one = (torch.empty_like(noise, dtype=part.dtype).copy_(part), total, noise)
            key = (well, not noise.data_ptr() % ALIGNMENT, part.dtype, total.dtype, noise.dtype)
            same = found.get(key)
            if same is None:
                same = found[key] = Arrived(self.count, self.added, self.fresh, well)
            same.tensors.append(one)
        return list(found.values())


class Adder:
    """Adds parts, and remembers the tables of the sets that come again."""

    def __init__(self) -> None:
        self._sets: dict[tuple[Any, ...], Any] = {}

    @torch.no_grad()
    def add(self, arrived: Arrived) -> None:
        """Take parts of one device into sums and deviations, in place."""
        for some in arrived.split():
            if not (some.readable and self._add_by_kernels(some)):
                add_by_torch(some)

    def _add_by_kernels(self, some: Arrived) -> bool:
        module, (parts, totals, noises) = kernels.ready("adding"), some.columns
        total = totals[0]
        if module is None or not {parts[0].dtype, total.dtype} <= set(kernels.DTYPES):
            return False
        if any([type(tensor) is not Tensor for tensor in (*parts, *totals)]):
            return False
        sizes = tuple([one.numel() for one in totals])
        key = (total.device, noises[0].data_ptr(), sizes)
        try:
            adding = self._sets.pop(key, None)
            if adding is None:
                if not module.can_be_cut(total.device):
                    return False
                adding = module.Adding(sizes, total.device)
            self._sets[key] = adding  # the last of all
            self._drop_oldest()
            adding.add(
                parts,
                totals,
                noises,
                count=some.count,
                rounding=rounding_of(total.dtype, some.count) / some.count**2,
                added=some.added,
                fresh=some.fresh,
            )
        except Exception as error:
            kernels.give_up("adding", error, "parts of batches are added by torch")
            return False
        return True

    def _drop_oldest(self) -> None:
        if len(self._sets) > MOST_SETS:
            # A CUDA graph reads the tables it was captured with whenever it is replayed.
            oldest = next((key for key, adding in self._sets.items() if not adding.captured), None)
            if oldest is not None:
                del self._sets[oldest]


def add_by_torch(some: Arrived) -> None:
    """Take parts of one kind into sums and deviations."""
    (parts, totals, noises), count = some.columns, some.count
    if not some.added:
        torch._foreach_add_(totals, parts)
    if some.fresh:
        torch._foreach_zero_(noises)
    dtype = noises[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    deviations = torch._foreach_add(_cast(parts, wide), _cast(totals, wide), alpha=-1 / count)
    narrow, sums = _cast(deviations, dtype), _cast(totals, dtype)
    torch._foreach_addcmul_(noises, narrow, narrow, value=count / (count - 1))
    rounding = rounding_of(totals[0].dtype, count) / count**2
    torch._foreach_addcmul_(noises, sums, sums, value=-rounding * count / (count - 1))


def rounding_of(dtype: torch.dtype, num_parts: int) -> float:
    """Squared deviation, over squared mean, that rounding leaves between equal parts that are added up.

    Each sum may be rounded the same way, so that errors grow with the number of parts. To allow for that in 16 bits
    would take real noise for rounding; there it is what errors in all directions amount to.
    """
    eps = float(torch.finfo(dtype).eps)
    return eps**2 * (num_parts / 4 if eps > 1e-6 else num_parts**2 / 8)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [tensor.to(dtype) for tensor in tensors]
