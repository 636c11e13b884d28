"""Sets of tensors read by kernels, two launches each, where there are kernels; whoever asks does the rest himself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradvitals import kernels
from gradvitals.kernels.cut import sliceable
from gradvitals.measure.packet import Packet
from gradvitals.measure.views import HeadView

MOST_SETS = 256
"""Sets remembered at a time: a model's gradients may come in other portions once in a while."""

MOST_LAYOUTS = 2**16
"""Ways to lie in memory that are remembered."""

NORM, LARGEST, NONZERO, NONFINITE, INNER = range(5)
"""What can be asked of every tensor."""


class Passes:
    """Remembers how each set of tensors was cut into chunks, and where it lay."""

    def __init__(self) -> None:
        self._readers: dict[tuple[Any, ...], Any] = {}
        self._known: dict[tuple[Any, ...], bool] = {}  # whether kernels can read what lies like this

    def read(
        self,
        packet: Packet,
        names: Mapping[int, str],
        rows: Sequence[int],
        tensors: Sequence[Tensor],
        *,
        others: Sequence[Tensor | None] | None = None,
        heads: Mapping[int, HeadView] | None = None,
        name_of_heads: str = "",
        heads_instead: bool = False,
    ) -> list[int]:
        """Put what is asked for into the packet.

        Args:
            packet: Takes the numbers.
            names: Under which name each of them goes there.
            rows: Of the tensors.
            tensors: To read.
            others: What `INNER` products are taken with; None for those that are to be read without.
            heads: Views of rows that are to be read head by head too.
            name_of_heads: The name that the heads' norms go by.
            heads_instead: Whether the norm of a tensor with heads is left out.

        Returns:
            Positions of the tensors that kernels cannot read; all of them where there are no kernels.
        """
        every = list(range(len(rows)))
        if not tensors or not kernels.on_device(tensors[0]) or kernels.ready("reader") is None:
            return every
        others = others or [None] * len(rows)
        alike: dict[tuple[Any, ...], list[int]] = {}
        left = []
        for position, (row, tensor, other) in enumerate(zip(rows, tensors, others, strict=True)):
            view = heads.get(row) if heads else None
            # For every tensor, in every reading: as little as can be.
            layout = (row, view is None, *_layout_of(tensor), *(() if other is None else _layout_of(other)))
            well = self._known.get(layout)
            if well is None:
                well = self._note(layout, _readable(tensor, other, view))
            if not well:
                left.append(position)
                continue
            kind = (tensor.get_device(), tensor.dtype, None if other is None else other.dtype)
            alike.setdefault(kind, []).append(position)
        for places in alike.values():
            if heads:
                places.sort(key=lambda p: rows[p] in heads)
            some = [rows[p] for p in places]
            beside = [other for p in places if (other := others[p]) is not None]
            views = {i: heads[row] for i, row in enumerate(some) if row in heads} if heads else {}
            try:
                numbers = self._numbers(names, some, [tensors[p] for p in places], beside, views)
            except Exception as error:
                kernels.give_up("reader", error, "gradients are read by torch")
                left += places
                continue
            self._add(packet, names, some, numbers, views, name_of_heads, heads_instead, bool(beside))
        return sorted(left)

    def _note(self, layout: tuple[Any, ...], well: bool) -> bool:
        if len(self._known) >= MOST_LAYOUTS:
            self._known.clear()
        self._known[layout] = well
        return well

    def _numbers(
        self,
        names: Mapping[int, str],
        rows: Sequence[int],
        tensors: Sequence[Tensor],
        beside: Sequence[Tensor],
        views: Mapping[int, HeadView],
    ) -> Tensor:
        key = (bool(views), tensors[0].device, tensors[0].dtype, tuple(rows))
        if key not in self._readers:
            if len(self._readers) >= MOST_SETS:
                self._readers.clear()
            reader: Any = kernels.ready("reader")
            self._readers[key] = reader.Reader()
        slices = {place: len(view.heads) for place, view in views.items()}
        counts = any(name in names for name in (LARGEST, NONZERO, NONFINITE))
        numbers: Tensor = self._readers[key].read(tensors, counts=counts, others=beside or None, slices=slices)
        return numbers

    @staticmethod
    def _add(
        packet: Packet,
        names: Mapping[int, str],
        rows: Sequence[int],
        numbers: Tensor,
        views: Mapping[int, HeadView],
        name_of_heads: str,
        heads_instead: bool,
        has_others: bool,
    ) -> None:
        for which, name in names.items():
            if which == INNER and not has_others:
                continue
            values = numbers[which, : len(rows)]
            number = len(rows) - len(views) if which == NORM and heads_instead else len(rows)
            if number:
                packet.add(name, values[:number], rows[:number])
        begin = len(rows)
        for view in views.values():
            packet.add(name_of_heads, numbers[NORM, begin : begin + len(view.heads)], view.slots)
            begin += len(view.heads)


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """What decides whether kernels can read a tensor."""
    if tensor.layout is not torch.strided:
        return (tensor.layout,)
    return type(tensor), tensor.dtype, tensor.get_device(), tensor.shape, tensor.stride()


def _readable(tensor: Tensor, other: Tensor | None, view: HeadView | None) -> bool:
    if not kernels.usable(tensor):
        return False
    if other is not None and not (kernels.usable(other) and other.stride() == tensor.stride()):
        return False
    return view is None or (view.lie_apart(tensor) and sliceable(tensor.numel(), len(view.heads)))
