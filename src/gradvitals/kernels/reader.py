"""Reads sets of tensors by kernels, and remembers how each set was cut and where it lay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradvitals.kernels.cut import Addresses, Cut
from gradvitals.kernels.sums import LARGEST, SPAN, chunk_sums, finish


class Reader:
    """One set of tensors that is read again and again; another set, once it comes, takes its place."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._slices: Mapping[int, int] = {}
        self._cut: Cut | None = None
        self._mine, self._others = Addresses(), Addresses()

    def cut(self, tensors: Sequence[Tensor], slices: Mapping[int, int] | None = None) -> Cut:
        """How these tensors are cut."""
        sizes = [tensor.numel() for tensor in tensors]
        slices = slices or {}
        if self._cut is None or sizes != self._sizes or slices != self._slices:
            self._sizes, self._slices = sizes, dict(slices)
            self._cut = Cut(sizes, tensors[0].device, SPAN, slices)
        return self._cut

    def read(
        self,
        tensors: Sequence[Tensor],
        *,
        counts: bool = False,
        others: Sequence[Tensor] | None = None,
        slices: Mapping[int, int] | None = None,
        norms: bool = True,
    ) -> Tensor:
        """What there is to say of each tensor, in two launches: rows in the order of `sums.GRADIENT_SUMS`.

        Args:
            tensors: Of one device and type, as `kernels.usable` wants them.
            counts: Whether to take more than their norms.
            others: A tensor beside each, of one type and laid out alike, to take inner products with.
            slices: Tensors, by position, that are also to be read in so many equal parts. These come after the others.
            norms: Whether the first row is norms; else their squares.
        """
        cut = self.cut(tensors, slices)
        device = tensors[0].device
        with torch.cuda.device(device if device.type == "cuda" else -1):
            mine = self._mine.table(tensors)
            theirs = None if others is None else self._others.table(others)
            sums = chunk_sums(
                cut,
                mine,
                tensors[0].dtype,
                counts=counts,
                others=theirs,
                other_dtype=None if others is None else others[0].dtype,
                aligned=self._mine.aligned and (others is None or self._others.aligned),
            )
            return finish(cut, sums, maxima=1 << LARGEST, roots=1 if norms else 0)
