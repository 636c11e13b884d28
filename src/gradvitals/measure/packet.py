"""From device to host without waiting: numbers gathered in a step leave in one copy per device.

What is in the host's memory already is left as it is. Whatever the training thread does once a step, between long
operations, finds the processor's caches filled with other things and takes many times as long as it would in a row: so
as much as possible is left to the thread that reads the numbers, many steps at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]


class Places:
    """The rows of the model that the numbers under one name belong to: as a rule the same from step to step."""

    def __init__(self, rows: list[int]) -> None:
        self.listed = rows
        self.rows = np.asarray(rows, dtype=np.intp)
        self.are_distinct = len(set(rows)) == len(rows)
        self._present: NDArray[np.bool_] = np.zeros(0, dtype=bool)

    def present(self, num_rows: int) -> NDArray[np.bool_]:
        """Which rows are among them."""
        if len(self._present) != num_rows:
            self._present = np.zeros(num_rows, dtype=bool)
            self._present[self.rows] = True
            self._present.setflags(write=False)
        return self._present


class Arrived:
    """What reached the host under one name: values, and the row of the model each belongs to."""

    def __init__(self, values: Floats, places: Places) -> None:
        self.values = values
        self.places = places

    @property
    def rows(self) -> NDArray[np.intp]:
        """The row of each value."""
        return self.places.rows

    def present(self, num_rows: int) -> NDArray[np.bool_]:
        """Which rows something was read of. Not to be changed."""
        return self.places.present(num_rows)

    def sums(self, num_rows: int) -> Floats:
        """One value a row; 0 where nothing was read. Parts of one row are summed."""
        sums = np.zeros(num_rows)
        if self.places.are_distinct:
            sums[self.rows] = self.values
        else:
            np.add.at(sums, self.rows, self.values)
        return sums

    def by_row(self, num_rows: int) -> Floats:
        """The same, nan where nothing was read."""
        return np.where(self.present(num_rows), self.sums(num_rows), np.nan)


Part = tuple[str, Sequence[int], Tensor | Sequence[Tensor]]
"""A name, the rows its numbers belong to, and the numbers: one vector, or one 0-d tensor for each."""

Known = list[tuple[Sequence[int], Tensor | Sequence[Tensor]]]
"""Rows and numbers that a packet has under one name."""

Later = Callable[[], Iterable[tuple[str, Sequence[int], NDArray[Any]]]]
"""Names, rows and numbers, once they are asked for."""


class Packet:
    """Collects small tensors under names during a step; `ship` sends them to the host asynchronously.

    Nothing is launched before that: numbers wait until they can be joined, all at once. So what is added must not
    change any more.
    """

    def __init__(self) -> None:
        self._parts: dict[torch.device, list[Part]] = {}
        self.later: list[Later] = []

    def add_later(self, work: Later) -> None:
        """Take numbers along that are to be worked out when they are read, from what is in the host's memory."""
        self.later.append(work)

    def add(self, name: str, values: Tensor, rows: Sequence[int] = (0,)) -> None:
        """Take a tensor of one number per row along. A name may come more than once."""
        parts = self._parts.setdefault(values.device, [])
        parts.append((name, rows, [values] if values.dim() == 0 else values.detach().reshape(-1)))

    def add_each(self, name: str, numbers: Sequence[Tensor], rows: Sequence[int]) -> None:
        """Take 0-d tensors of one device and dtype along, one for each row."""
        if numbers:
            self._parts.setdefault(numbers[0].device, []).append((name, rows, numbers))

    def extend(self, other: Packet) -> None:
        """Take everything of another packet along."""
        for device, parts in other._parts.items():
            self._parts.setdefault(device, []).extend(parts)
        self.later.extend(other.later)

    def parts(self, device: torch.device) -> list[Part]:
        """What there is on one device."""
        return self._parts.get(device, [])

    def named(self, name: str) -> Known:
        """Rows and numbers that were added under a name, as they were added."""
        return [(rows, values) for parts in self._parts.values() for known, rows, values in parts if known == name]

    @property
    def devices(self) -> Iterable[torch.device]:
        """Where its numbers are."""
        return self._parts.keys()


@torch.no_grad()
def ship(packets: Sequence[Packet]) -> list[Shipment]:
    """Start one copy per device for all packets, and return what will hold each once it has arrived."""
    shipments = [Shipment(packet) for packet in packets]
    for device in dict.fromkeys(device for packet in packets for device in packet.devices if device.type != "cpu"):
        flat, places = _join([(index, part) for index, p in enumerate(packets) for part in p.parts(device)])
        events: set[torch.cuda.Event] = set()
        if device.type == "cuda":
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            host.copy_(flat, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events = {event}
            flat = host
        else:
            flat = flat.cpu()
        for index, name, rows, start in places:
            shipments[index].events |= events
            shipments[index].contents.append((name, rows, flat, start))
    return shipments


def _join(parts: Sequence[tuple[int, Part]]) -> tuple[Tensor, list[tuple[int, str, Sequence[int], int]]]:
    """One flat tensor of everything, and where in it each part of each packet begins.

    All single numbers of one dtype are stacked together: hundreds of them come with every reading.
    """
    singles: dict[torch.dtype, list[Tensor]] = {}
    waiting: dict[torch.dtype, list[tuple[int, str, Sequence[int]]]] = {}
    joined: list[Tensor] = []
    places: list[tuple[int, str, Sequence[int], int]] = []
    start = 0
    for index, (name, rows, values) in parts:
        if isinstance(values, Tensor):
            joined.append(_floating(values))
            places.append((index, name, rows, start))
            start += len(rows)
        else:
            singles.setdefault(values[0].dtype, []).extend(values)
            waiting.setdefault(values[0].dtype, []).append((index, name, rows))
    for dtype, numbers in singles.items():
        joined.append(_floating(torch.stack(numbers)))
        for index, name, rows in waiting[dtype]:
            places.append((index, name, rows, start))
            start += len(rows)
    return (torch.cat(joined) if len(joined) > 1 else joined[0]), places


def _floating(values: Tensor) -> Tensor:
    if values.dtype in (torch.float32, torch.float64):
        return values
    return values.double() if values.device.type in ("cpu", "cuda") else values.float()  # not all have doubles


class Shipment:
    """Numbers on their way to the host.

    Args:
        packet: Whose numbers these are; what is on the host already is taken from it when it is asked for.
    """

    def __init__(self, packet: Packet | None = None) -> None:
        self._packet = Packet() if packet is None else packet
        self.contents: list[tuple[str, Sequence[int], Tensor, int]] = []
        self.events: set[torch.cuda.Event] = set()

    def ready(self) -> bool:
        """Whether everything has arrived. Never waits."""
        return all(event.query() for event in self.events)

    def wait(self, known: dict[str, Places] | None = None) -> dict[str, Arrived]:
        """Wait, off the training thread, and return what arrived by name.

        Args:
            known: The places of earlier steps by name, which are used again where they are the same.
        """
        pause = 0.0002
        while not self.ready():
            time.sleep(pause)
            pause = min(pause * 2, 0.01)
        known = {} if known is None else known
        joined: dict[str, tuple[list[NDArray[Any]], list[int]]] = {}
        for name, rows, part in self._parts():
            if name in joined:
                joined[name][0].append(part)
                joined[name][1].extend(rows)
            else:
                joined[name] = ([part], list(rows))
        arrived = {}
        for name, (parts, of_rows) in joined.items():
            if name not in known or known[name].listed != of_rows:
                known[name] = Places(of_rows)
            values = np.concatenate(parts, dtype=np.float64) if len(parts) > 1 else parts[0].astype(np.float64)
            arrived[name] = Arrived(values, known[name])
        return arrived

    def _parts(self) -> Iterator[tuple[str, Sequence[int], NDArray[Any]]]:
        last, array = None, np.zeros(0)
        for name, rows, flat, start in self.contents:
            if flat is not last:
                last, array = flat, flat.numpy()
            yield name, rows, array[start : start + len(rows)]
        for name, rows, values in self._packet.parts(torch.device("cpu")):
            whole = values if isinstance(values, Tensor) else torch.stack(list(values))
            yield name, rows, _floating(whole.detach()).numpy()
        for work in self._packet.later:
            yield from work()
