"""From device to host without waiting: numbers gathered in a step leave in one copy per device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]


class Arrived:
    """What reached the host under one name: values, and the row of the model each belongs to."""

    def __init__(self) -> None:
        self._values: list[Floats] = []
        self._rows: list[NDArray[np.intp]] = []

    def append(self, values: Floats, rows: Sequence[int]) -> None:
        """Add the part of one device."""
        self._values.append(values)
        self._rows.append(np.asarray(rows, dtype=np.intp))

    @property
    def values(self) -> Floats:
        """All values, in order of arrival."""
        return np.concatenate(self._values)

    def present(self, num_rows: int) -> NDArray[np.bool_]:
        """Which rows something was read of."""
        result = np.zeros(num_rows, dtype=bool)
        for rows in self._rows:
            result[rows] = True
        return result

    def by_row(self, num_rows: int) -> Floats:
        """One value a row; nan where nothing was read. Parts of one row are summed."""
        result = np.zeros(num_rows)
        for values, rows in zip(self._values, self._rows, strict=True):
            np.add.at(result, rows, values)
        return np.where(self.present(num_rows), result, np.nan)


class Packet:
    """Collects small tensors under names during a step; `ship` sends them to the host asynchronously.

    Nothing is launched before `ship`: single numbers wait until they can be joined, all at once.
    """

    def __init__(self) -> None:
        self._parts: dict[torch.device, list[tuple[str, Sequence[int], Tensor]]] = {}
        self._numbers: dict[tuple[torch.device, torch.dtype], list[tuple[str, int, Tensor]]] = {}

    def add(self, name: str, values: Tensor, rows: Sequence[int] = (0,)) -> None:
        """Take a tensor of one number per row along. A name may come more than once."""
        if values.dim() == 0:
            self.add_each(name, [values], rows)
        else:
            parts = self._parts.setdefault(values.device, [])
            parts.append((name, rows, values.detach().reshape(-1)))

    def add_each(self, name: str, numbers: Sequence[Tensor], rows: Sequence[int]) -> None:
        """Take 0-d tensors of one device and dtype along, one for each row."""
        if numbers:
            waiting = self._numbers.setdefault((numbers[0].device, numbers[0].dtype), [])
            waiting += ((name, row, number) for row, number in zip(rows, numbers, strict=True))

    def extend(self, other: Packet) -> None:
        """Take everything of another packet along."""
        for device, parts in other._parts.items():
            self._parts.setdefault(device, []).extend(parts)
        for kind, numbers in other._numbers.items():
            self._numbers.setdefault(kind, []).extend(numbers)

    def ship(self) -> Shipment:
        """Start the copies and return what will hold them once they have arrived."""
        self._join_numbers()
        shipment = Shipment()
        for device, parts in self._parts.items():
            flat = torch.cat([values if values.is_floating_point() else values.double() for _, _, values in parts])
            if device.type == "cuda":
                host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
                host.copy_(flat, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                shipment.events.append(event)
                flat = host
            elif device.type != "cpu":
                flat = flat.cpu()
            shipment.copies.append(([(name, rows) for name, rows, _ in parts], flat))
        self._parts = {}
        return shipment

    def _join_numbers(self) -> None:
        for (device, _), numbers in self._numbers.items():
            joined = torch.stack([number.detach() for _, _, number in numbers])
            start = 0
            for name, group in itertools.groupby(numbers, key=lambda entry: entry[0]):
                rows = [row for _, row, _ in group]
                self._parts.setdefault(device, []).append((name, rows, joined[start : start + len(rows)]))
                start += len(rows)
        self._numbers = {}


class Shipment:
    """Numbers on their way to the host."""

    def __init__(self) -> None:
        self.copies: list[tuple[list[tuple[str, Sequence[int]]], Tensor]] = []
        self.events: list[torch.cuda.Event] = []

    def ready(self) -> bool:
        """Whether everything has arrived. Never waits."""
        return all(event.query() for event in self.events)

    def wait(self) -> dict[str, Arrived]:
        """Wait, off the training thread, and return what arrived by name."""
        pause = 0.0002
        while not self.ready():
            time.sleep(pause)
            pause = min(pause * 2, 0.01)
        arrived: dict[str, Arrived] = {}
        for parts, flat in self.copies:
            values, start = flat.double().numpy(), 0
            for name, rows in parts:
                arrived.setdefault(name, Arrived()).append(values[start : start + len(rows)], rows)
                start += len(rows)
        return arrived
