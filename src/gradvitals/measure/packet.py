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

    def __init__(self, values: Floats, rows: Sequence[int]) -> None:
        self.values = values
        self._rows = np.asarray(rows, dtype=np.intp)

    def joined(self, values: Floats, rows: Sequence[int]) -> Arrived:
        """With further values that came under the same name."""
        return Arrived(np.append(self.values, values), np.append(self._rows, np.asarray(rows, dtype=np.intp)).tolist())

    def present(self, num_rows: int) -> NDArray[np.bool_]:
        """Which rows something was read of."""
        result = np.zeros(num_rows, dtype=bool)
        result[self._rows] = True
        return result

    def by_row(self, num_rows: int) -> Floats:
        """One value a row; nan where nothing was read. Parts of one row are summed."""
        sums = np.bincount(self._rows, weights=self.values, minlength=num_rows)
        return np.where(self.present(num_rows), sums, np.nan)


class Packet:
    """Collects small tensors under names during a step; `ship` sends them to the host asynchronously.

    Nothing is launched before `ship`: single numbers wait until they can be joined, all at once.
    """

    def __init__(self) -> None:
        self._numbers: dict[torch.device, list[tuple[str, int, Tensor]]] = {}
        self._vectors: dict[torch.device, list[tuple[str, Sequence[int], Tensor]]] = {}

    def add(self, name: str, values: Tensor, rows: Sequence[int] = (0,)) -> None:
        """Take a tensor of one number per row along. A name may come more than once."""
        if values.dim() == 0:
            self.add_each(name, [values], rows)
        else:
            self._vectors.setdefault(values.device, []).append((name, rows, values.detach().reshape(-1)))

    def add_each(self, name: str, numbers: Sequence[Tensor], rows: Sequence[int]) -> None:
        """Take 0-d tensors of one device along, one for each row."""
        if numbers:
            waiting = self._numbers.setdefault(numbers[0].device, [])
            waiting += [(name, row, number) for row, number in zip(rows, numbers, strict=True)]

    def extend(self, other: Packet) -> None:
        """Take everything of another packet along."""
        for device, numbers in other._numbers.items():
            self._numbers.setdefault(device, []).extend(numbers)
        for device, vectors in other._vectors.items():
            self._vectors.setdefault(device, []).extend(vectors)

    @torch.no_grad()
    def ship(self) -> Shipment:
        """Start the copies and return what will hold them once they have arrived."""
        shipment = Shipment()
        for device in {**self._numbers, **self._vectors}:
            flat, names = self._join(device)
            if device.type == "cuda":
                host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
                host.copy_(flat, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                shipment.events.append(event)
                flat = host
            elif device.type != "cpu":
                flat = flat.cpu()
            shipment.copies.append((names, flat))
        self._numbers, self._vectors = {}, {}
        return shipment

    def _join(self, device: torch.device) -> tuple[Tensor, list[tuple[str, Sequence[int]]]]:
        names: list[tuple[str, Sequence[int]]] = []
        parts: list[Tensor] = []
        by_dtype: dict[torch.dtype, list[tuple[str, int, Tensor]]] = {}
        for entry in self._numbers.get(device, ()):
            by_dtype.setdefault(entry[2].dtype, []).append(entry)
        for numbers in by_dtype.values():
            for name, group in itertools.groupby(numbers, key=lambda entry: entry[0]):
                names.append((name, [row for _, row, _ in group]))
            parts.append(torch.stack([number for _, _, number in numbers]))
        for name, rows, values in self._vectors.get(device, ()):
            names.append((name, rows))
            parts.append(values)
        parts = [part if part.dtype in (torch.float32, torch.float64) else part.double() for part in parts]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]), names


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
            values, start = flat.numpy().astype(np.float64), 0
            for name, rows in parts:
                part = values[start : start + len(rows)]
                arrived[name] = arrived[name].joined(part, rows) if name in arrived else Arrived(part, rows)
                start += len(rows)
        return arrived
