"""How far every step moved the weights, at next to no cost: a few coordinates of each tensor, read once a step.

What is read after one step is what it is before the next, so one small copy a step is all it takes. Spikes of the
update come before spikes of the loss, weights that do not move at all are a common mistake, and directions that turn
round from step to step are the mark of a learning rate at its limit: these must be seen at every step, where
`updates` is exact but rare.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradvitals import kernels
from gradvitals.measure import stats
from gradvitals.measure.packet import Packet
from gradvitals.measure.ranks.shards import local, placements

COORDINATES = 64
"""Coordinates of each tensor, evenly spread."""


class _Group:
    """Tensors of one device and dtype."""

    def __init__(self, rows: list[int], tensors: list[Tensor]) -> None:
        self.rows = rows
        self.views = [stats.flat(t)[:: stats.odd_stride(t.numel(), COORDINATES)] for t in tensors]
        self.lengths = [view.numel() for view in self.views]
        self._lengths = torch.tensor(self.lengths).to(tensors[0].device, non_blocking=True)
        self.before = self.gather()
        self.last: Tensor | None = None

    def gather(self) -> Tensor:
        values = torch.cat(self.views)
        return values.to(stats.accumulator(values.dtype))

    def add(self, packet: Packet) -> None:
        now = self.gather()
        change = now - self.before
        sums = torch.segment_reduce(change.square(), "sum", lengths=self._lengths, axis=0, unsafe=True)
        packet.add("change_sq", sums, self.rows)
        if self.last is not None:
            packet.add("change_dot", torch.dot(change, self.last), self.rows[:1])
        self.before, self.last = now, change


class _HostGroup:
    """Tensors in the host's memory, which numpy reads many times faster than torch joins strided views there."""

    def __init__(self, rows: list[int], tensors: list[Tensor]) -> None:
        self.rows = rows
        self.views = [stats.flat(t).numpy()[:: stats.odd_stride(t.numel(), COORDINATES)] for t in tensors]
        self.lengths = [len(view) for view in self.views]
        self._starts = np.cumsum([0, *self.lengths[:-1]])
        self._before = np.concatenate(self.views)
        self._earlier: NDArray[Any] | None = None

    def look(self, *, again: bool) -> None:
        """See where the weights are now; what was seen last is kept where that was a step ago."""
        self._before, self._earlier = np.concatenate(self.views), self._before if again else None

    def add(self, packet: Packet) -> None:
        now = np.concatenate(self.views)
        packet.add_later(partial(_compared, self.rows, self._starts, now, self._before, self._earlier))
        self._before, self._earlier = now, self._before


def _compared(
    rows: list[int], starts: NDArray[Any], now: NDArray[Any], before: NDArray[Any], earlier: NDArray[Any] | None
) -> list[tuple[str, list[int], NDArray[Any]]]:
    """What the coordinates of all rows have done in a step, and how that agrees with the step before."""
    with np.errstate(all="ignore"):  # weights that are no longer finite, or soon will not be
        change = now - before
        compared = [("change_sq", rows, np.add.reduceat(change * change, starts))]
        if earlier is not None:
            last = before - earlier
            compared.append(("change_dot", rows[:1], (change @ last).reshape(1)))
            compared.append(("last_change_sq", rows[:1], (last @ last).reshape(1)))
    return compared


class _KernelGroup:
    """Tensors on a GPU, read in one launch: to join many strided views takes torch a large part of a millisecond."""

    def __init__(self, rows: list[int], tensors: list[Tensor], reader: Any) -> None:
        self.rows = rows
        strides = [stats.odd_stride(t.numel(), COORDINATES) for t in tensors]
        self.lengths = [-(-t.numel() // stride) for t, stride in zip(tensors, strides, strict=True)]
        self._reader = reader.ChangeReader([stats.flat(t) for t in tensors], strides, COORDINATES)
        self._has_last = False

    def add(self, packet: Packet) -> None:
        squares, products = self._reader.look().unbind(0)
        packet.add("change_sq", squares, self.rows)
        if self._has_last:
            packet.add("change_dot", products, self.rows)
        self._has_last = True


Group = _Group | _HostGroup | _KernelGroup


def _group(rows: list[int], tensors: list[Tensor]) -> Group:
    if all(map(kernels.usable, tensors)) and (reader := kernels.ready("changes")) is not None:
        try:
            return _KernelGroup(rows, tensors, reader)
        except Exception as error:
            kernels.give_up("changes", error, "changes of weights are read by torch")
    on_host = tensors[0].device.type == "cpu" and tensors[0].dtype in (torch.float32, torch.float64)
    return _HostGroup(rows, tensors) if on_host else _Group(rows, tensors)


class Changes:
    """Follows sampled coordinates of one optimizer's parameters from step to step."""

    def __init__(self) -> None:
        self.lengths: dict[int, tuple[int, int]] = {}
        """Coordinates read of each row, and all that this rank has of it."""
        self._rows: list[int] = []
        self._parameters: Sequence[nn.Parameter] = ()
        self._weights: Sequence[float] = ()
        self._are_spread = False
        self._addresses: list[int] = []
        self._groups: list[Group] | None = None
        self._is_known = False
        """Whether it is known where the last step has left the weights."""

    def follow(
        self, rows: Sequence[int], parameters: Sequence[nn.Parameter], weights: Sequence[float] | None = None
    ) -> None:
        """Follow these parameters from the next step on; those of one weight among ranks are summed together."""
        self._rows, self._parameters, self._groups = list(rows), list(parameters), None
        self._weights = weights if weights is not None else [1.0] * len(self._rows)
        self._are_spread = any(map(placements, self._parameters))

    def begin(self) -> None:
        """Before a step: take a first look, unless the one after the last step still holds."""
        if self._groups is not None and not self._is_known:
            self.look()
        if self._groups is None or self._moved():
            self._look_first()

    def forget(self) -> None:
        """A step has moved the weights, and nobody has looked."""
        self._is_known = False

    @torch.no_grad()
    def _look_first(self) -> None:
        self._addresses = self._where()
        self._groups, self._is_known = [], True
        for weight in dict.fromkeys(self._weights):
            alike = [p for p, other in enumerate(self._weights) if other == weight]
            rows, tensors = [self._rows[p] for p in alike], [local(self._parameters[p]).detach() for p in alike]
            self._groups += [_group(*group) for group in stats.by_device_and_dtype(rows, tensors)]
        sizes = {row: local(parameter).numel() for row, parameter in zip(self._rows, self._parameters, strict=True)}
        self.lengths = {
            row: (n, sizes[row]) for group in self._groups for row, n in zip(group.rows, group.lengths, strict=True)
        }

    def look(self) -> None:
        """After a step that is not read: see where it has left the weights, for the next one."""
        on_host = [group for group in self._groups or () if isinstance(group, _HostGroup)]
        if len(on_host) != len(self._groups or ()):
            self._groups = None  # the next one that is read takes a first look again
            return
        for group in on_host:
            group.look(again=self._is_known)
        self._is_known = True

    def add(self, packet: Packet) -> None:
        """After a step: put the sum of squared changes of every tensor, and their agreement with the last, in."""
        if self._groups is None or self._moved():
            return
        for group in self._groups:
            group.add(packet)

    def _where(self) -> list[int]:
        tensors = map(local, self._parameters) if self._are_spread else self._parameters
        return [tensor.data_ptr() for tensor in tensors]

    def _moved(self) -> bool:
        return self._where() != self._addresses  # the loop has put other storage under a parameter
