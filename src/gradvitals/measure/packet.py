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

    Nothing is launched before that: numbers wait until they can be joined, all at once. So what is added must not
    change any more.
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

    def devices(self) -> set[torch.device]:
        """Where its numbers are."""
        return {*self._numbers, *self._vectors}

    def lay_out(self, device: torch.device, parts: list[Tensor]) -> list[tuple[str, Sequence[int]]]:
        """Append the numbers of one device to the parts to be joined; return what they are, in the same order."""
        names: list[tuple[str, Sequence[int]]] = []
        by_dtype: dict[torch.dtype, list[tuple[str, int, Tensor]]] = {}
        for entry in self._numbers.get(device, ()):
            by_dtype.setdefault(entry[2].dtype, []).append(entry)
        for dtype, numbers in by_dtype.items():
            for name, group in itertools.groupby(numbers, key=lambda entry: entry[0]):
                names.append((name, [row for _, row, _ in group]))
            kept = dtype in (torch.float32, torch.float64)
            parts += [number if kept else number.double() for _, _, number in numbers]
        for name, rows, values in self._vectors.get(device, ()):
            names.append((name, rows))
            parts.append(values if values.is_floating_point() else values.double())
        return names


@torch.no_grad()
def ship(packets: Sequence[Packet]) -> list[Shipment]:
    """Start one copy per device for all packets, and return what will hold each once it has arrived."""
    shipments = [Shipment() for _ in packets]
    for device in set().union(*(packet.devices() for packet in packets)):
        parts: list[Tensor] = []
        contents = [packet.lay_out(device, parts) for packet in packets]
        flat = _join(parts)
        events = []
        if device.type == "cuda":
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            host.copy_(flat, non_blocking=True)
            events = [torch.cuda.Event()]
            events[0].record(torch.cuda.current_stream(device))
            flat = host
        elif device.type != "cpu":
            flat = flat.cpu()
        start = 0
        for shipment, content in zip(shipments, contents, strict=True):
            if content:
                shipment.events += events
                shipment.copies.append((content, flat, start))
                start += sum(len(rows) for _, rows in content)
    return shipments


def _join(parts: Sequence[Tensor]) -> Tensor:
    """One flat tensor of all numbers and vectors: runs of single numbers of one dtype are stacked first."""
    runs: list[Tensor] = []
    for (num_dims, _), run in itertools.groupby(parts, key=lambda part: (part.dim(), part.dtype)):
        alike = list(run)
        runs += alike if num_dims else [torch.stack(alike)]
    return torch.cat(runs) if len(runs) > 1 else runs[0]


class Shipment:
    """Numbers on their way to the host."""

    def __init__(self) -> None:
        self.copies: list[tuple[list[tuple[str, Sequence[int]]], Tensor, int]] = []
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
        for content, flat, start in self.copies:
            values = flat.numpy()
            for name, rows in content:
                part = values[start : start + len(rows)].astype(np.float64)
                arrived[name] = arrived[name].joined(part, rows) if name in arrived else Arrived(part, rows)
                start += len(rows)
        return arrived
