"""Measures how far a step moved the weights, from coordinates sampled before and after it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradvitals import kernels
from gradvitals.collect import reductions
from gradvitals.collect.transfer import ReadingBuffer
from gradvitals.distributed.shards import local, placements

COORDINATES = 64
"""Coordinates sampled per tensor, evenly spread, if the sum over all tensors counts."""


class _Views:
    """One-dimensional views of the sampled coordinates."""

    def __init__(self, rows: list[int], tensors: list[Tensor], most: int) -> None:
        self.rows = rows
        self._strides = [reductions.sample_stride(t, most) for t in tensors]
        self._look_at(tensors)
        self.lengths = [len(view) for view in self._views]

    def _look_at(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._views: list[Any] = list(map(self._view, tensors, self._strides))
        # A slice of a larger tensor may have no one-dimensional view, but a copy.
        self._copied = [p for p, t in enumerate(tensors) if reductions.flat(t).data_ptr() != t.data_ptr()]

    @staticmethod
    def _view(tensor: Tensor, stride: int) -> Any:
        return reductions.flat(tensor)[::stride]

    def views(self) -> list[Any]:
        for place in self._copied:
            self._views[place] = self._view(self._tensors[place], self._strides[place])
        return self._views

    def goes_on(self, tensors: list[Tensor]) -> bool:
        """Read these tensors from now on; returns whether they have the layouts of the former ones."""
        if list(map(reductions.layout_of, tensors)) != list(map(reductions.layout_of, self._tensors)):
            return False
        self._look_at(tensors)
        return True


class _Group(_Views):
    """Tensors of one device and dtype, read by torch."""

    def __init__(self, rows: list[int], tensors: list[Tensor], most: int) -> None:
        super().__init__(rows, tensors, most)
        self._lengths = torch.tensor(self.lengths).to(tensors[0].device, non_blocking=True)
        self.before = self.gather()
        self.last: Tensor | None = None

    def gather(self) -> Tensor:
        values = torch.cat(self.views())
        return values.to(reductions.accumulator(values.dtype))

    def look(self) -> None:
        self.before, self.last = self.gather(), None

    def add(self, buffer: ReadingBuffer, name: str) -> None:
        now = self.gather()
        change = now - self.before
        sums = torch.segment_reduce(change.square(), "sum", lengths=self._lengths, axis=0, unsafe=True)
        buffer.add(name, sums, self.rows)
        if self.last is not None:
            buffer.add(f"{name}_dot", torch.dot(change, self.last), self.rows[:1])
        self.before, self.last = now, change


class _HostGroup(_Views):
    """Tensors in host memory: numpy gathers strided views many times faster than torch."""

    def __init__(self, rows: list[int], tensors: list[Tensor], most: int) -> None:
        super().__init__(rows, tensors, most)
        self._starts = np.cumsum([0, *self.lengths[:-1]])
        self._before = np.concatenate(self.views())
        self._earlier: NDArray[Any] | None = None

    @staticmethod
    def _view(tensor: Tensor, stride: int) -> Any:
        return reductions.flat(tensor).numpy()[::stride]

    def look(self) -> None:
        self._before, self._earlier = np.concatenate(self.views()), None

    def add(self, buffer: ReadingBuffer, name: str) -> None:
        now = np.concatenate(self.views())
        buffer.add_later(partial(_compared, name, self.rows, self._starts, now, self._before, self._earlier))
        self._before, self._earlier = now, self._before


def _compared(
    name: str,
    rows: list[int],
    starts: NDArray[Any],
    now: NDArray[Any],
    before: NDArray[Any],
    earlier: NDArray[Any] | None,
) -> list[tuple[str, list[int], NDArray[Any]]]:
    """Returns the squared change of each row's coordinates, and its inner product with the previous change."""
    with np.errstate(all="ignore"):  # weights may be non-finite
        change = now - before
        compared = [(name, rows, np.add.reduceat(change * change, starts, dtype=np.float64))]
        if earlier is not None:
            last = before - earlier
            compared.append((f"{name}_dot", rows[:1], (change @ last).reshape(1)))
    return compared


class _KernelGroup:
    """Tensors on a GPU, read in one launch: torch takes a large part of a millisecond to join many strided views."""

    def __init__(self, rows: list[int], tensors: list[Tensor], most: int, reader: Any) -> None:
        self.rows = rows
        strides = [reductions.sample_stride(t, most) for t in tensors]
        self.lengths = [-(-t.numel() // stride) for t, stride in zip(tensors, strides, strict=True)]
        self._reader = reader.ChangeReader([reductions.flat(t) for t in tensors], strides, most)
        self._has_last = False

    def look(self) -> None:
        self._reader.look()
        self._has_last = False

    def add(self, buffer: ReadingBuffer, name: str) -> None:
        squares, products = self._reader.look().unbind(0)
        buffer.add(name, squares, self.rows)
        if self._has_last:
            buffer.add(f"{name}_dot", products, self.rows)
        self._has_last = True

    def goes_on(self, tensors: list[Tensor]) -> bool:
        """Kernels keep the addresses of the tensors: torch reads those that move."""
        return False


Group = _Group | _HostGroup | _KernelGroup


def _group(rows: list[int], tensors: list[Tensor], most: int, *, moves: bool) -> Group:
    if not moves and all(map(kernels.usable, tensors)) and (reader := kernels.ready("reductions")) is not None:
        try:
            return _KernelGroup(rows, tensors, most, reader)
        except Exception as error:
            kernels.give_up("reductions", error, "changes of weights are read by torch")
    on_host = tensors[0].device.type == "cpu" and tensors[0].dtype in (torch.float32, torch.float64)
    return _HostGroup(rows, tensors, most) if on_host else _Group(rows, tensors, most)


class Changes:
    """Follows sampled coordinates of one optimizer's parameters from step to step.

    Args:
        name: Of the sums of squared changes.
        most: Most coordinates per tensor.
    """

    def __init__(self, name: str = "change", most: int = COORDINATES) -> None:
        self._name, self._most = name, most
        self.shares: dict[int, float] = {}
        """The share of each row, of what this rank has of it, that is read."""
        self._rows: list[int] = []
        self._parameters: Sequence[nn.Parameter] = ()
        self._weights: Sequence[float] = ()
        self._are_spread = False
        self._addresses: list[int] = []
        self._groups: list[Group] | None = None
        self._is_known = False
        """Whether the sample after the last step exists."""
        self._in_step = False
        """Whether the last sample is of before a step whose end was not seen: it may have raised an error."""
        self._moves = False
        """Whether steps replace the storage of parameters."""

    def follow(
        self, rows: Sequence[int], parameters: Sequence[nn.Parameter], weights: Sequence[float] | None = None
    ) -> None:
        """Follow these parameters from the next step on, in groups that have one weight in a sum over ranks."""
        self._rows, self._parameters, self._groups = list(rows), list(parameters), None
        self._weights = weights if weights is not None else [1.0] * len(self._rows)
        self._moves = False
        self._are_spread = any(map(placements, self._parameters))

    def before_step(self) -> None:
        """Sample the weights, unless the sample after the last step still holds."""
        if self._groups is None or self._moved():
            self._look_first()
        elif not self._is_known or self._in_step:
            for group in self._groups:
                group.look()
        self._is_known = self._in_step = True

    def forget(self) -> None:
        """A step was made without a sample after it."""
        self._is_known = False
        if self._moves:  # hold no storage that steps replace
            self._groups = None

    @torch.no_grad()
    def _look_first(self) -> None:
        self._addresses, self._groups = self._where(), []
        for weight in dict.fromkeys(self._weights):
            alike = [p for p, other in enumerate(self._weights) if other == weight]
            rows, tensors = [self._rows[p] for p in alike], [local(self._parameters[p]).detach() for p in alike]
            for some in reductions.by_device_and_dtype(rows, tensors):
                self._groups.append(_group(*some, self._most, moves=self._moves))
        sizes = {row: local(parameter).numel() for row, parameter in zip(self._rows, self._parameters, strict=True)}
        self.shares = {
            row: n / sizes[row] for group in self._groups for row, n in zip(group.rows, group.lengths, strict=True)
        }

    def add(self, buffer: ReadingBuffer) -> None:
        """After a step, add the sum of squared changes of every tensor, and their inner product with the last ones."""
        self._in_step = False
        if self._groups is None or not self._is_known:
            return
        if self._moved() and not self._go_on(self._groups):
            self._groups = None
            return
        for group in self._groups:
            group.add(buffer, self._name)

    def _go_on(self, groups: list[Group]) -> bool:
        """The step replaced the storage of parameters; returns whether their samples can still be compared."""
        self._moves, self._addresses = True, self._where()
        tensors = {row: local(p).detach() for row, p in zip(self._rows, self._parameters, strict=True)}
        return all(group.goes_on([tensors[row] for row in group.rows]) for group in groups)

    def _where(self) -> list[int]:
        tensors = map(local, self._parameters) if self._are_spread else self._parameters
        return [tensor.data_ptr() for tensor in tensors]

    def _moved(self) -> bool:
        return self._where() != self._addresses  # the loop has replaced the storage of a parameter
