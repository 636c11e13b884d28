"""Parts of a batch taken into sums and squared deviations: many tensors in one launch, or by torch's foreach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradvitals import kernels
from gradvitals.kernels.cut import ALIGNMENT

MOST_SETS = 64
"""Sets of tensors that tables are kept for."""


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
            well = self.readable and part.stride() == strides and total.stride() == strides
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
        # A table a part of a step: gradients of the same part lie where they lay a step ago, most likely.
        key = (total.device, some.count, some.added, sizes)
        try:
            if key not in self._sets:
                if not module.can_be_cut(total.device):
                    return False
                if len(self._sets) >= MOST_SETS:
                    self._sets.clear()
                self._sets[key] = module.Adding(sizes, total.device)
            self._sets[key].add(
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
