"""From device to host without waiting: the numbers of several steps leave in one copy per device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from gradvitals.worker.record import Part, StepRecord

SEND_SECONDS = 0.25
"""Plain steps are sent together, as many as fit into this time."""

SEND_STEPS = 32
"""And at most so many."""

HOST = torch.device("cpu")

EXACT = (torch.float32, torch.float64)
"""Norms of half-precision gradients come rounded to half precision: not good enough to keep."""

Known = list[tuple[Sequence[int], Tensor | Sequence[Tensor]]]
"""Rows and numbers that a buffer has under one name."""

Later = Callable[[], Iterable[tuple[str, Sequence[int], NDArray[Any]]]]
"""Names, rows and numbers, computed when they are asked for."""


class ReadingBuffer:
    """Collects small tensors under names during a step.

    Nothing is launched: numbers wait until they can be joined, all at once. So what is added must not change any more.
    """

    __slots__ = ("_later", "_parts")

    def __init__(self) -> None:
        self._parts: dict[torch.device, list[tuple[str, Sequence[int], Tensor | Sequence[Tensor]]]] = {}
        self._later: list[Later] = []

    def add(self, name: str, values: Tensor, rows: Sequence[int] = (0,)) -> None:
        """Add a tensor of one number per row. A name may come more than once."""
        parts = self._parts.setdefault(values.device, [])
        parts.append((name, rows, [values] if values.dim() == 0 else values.detach().reshape(-1)))

    def add_each(self, name: str, numbers: Sequence[Tensor], rows: Sequence[int]) -> None:
        """Add 0-d tensors of one device and dtype, one per row."""
        if numbers:
            self._parts.setdefault(numbers[0].device, []).append((name, rows, numbers))

    def add_later(self, work: Later) -> None:
        """Add numbers that are computed from host memory when the step is written."""
        self._later.append(work)

    def extend(self, other: ReadingBuffer) -> None:
        """Add everything of another buffer, which is used no more."""
        if not self._parts:
            self._parts = other._parts
        else:
            for device, parts in other._parts.items():
                self._parts.setdefault(device, []).extend(parts)
        self._later += other._later

    def parts(self, device: torch.device) -> list[tuple[str, Sequence[int], Tensor | Sequence[Tensor]]]:
        """What is on one device."""
        return self._parts.get(device, [])

    def named(self, name: str) -> Known:
        """Rows and numbers that were added under a name, as they were added."""
        return [(rows, values) for parts in self._parts.values() for known, rows, values in parts if known == name]

    @property
    def devices(self) -> Iterable[torch.device]:
        """Where its numbers are."""
        return self._parts.keys()

    @property
    def is_on_host(self) -> bool:
        """Whether nothing needs to be copied."""
        return not self._parts.keys() - {HOST}

    def host_parts(self) -> list[Part]:
        """What is in host memory already."""
        found: list[Part] = []
        for name, rows, values in self._parts.get(HOST, ()):
            whole = values if isinstance(values, Tensor) else torch.stack(list(values))
            if whole.dtype not in EXACT or whole.requires_grad:
                whole = _floating(whole.detach())
            found.append((name, rows, whole.numpy()))
        for work in self._later:
            found.extend(work())
        return found


def _floating(values: Tensor) -> Tensor:
    if values.dtype in EXACT:
        return values
    return values.double() if values.device.type in ("cpu", "cuda") else values.float()  # not all devices have doubles


class _Copy:
    """The numbers of some steps on their way to the host."""

    def __init__(self, steps: Sequence[tuple[StepRecord, ReadingBuffer]]) -> None:
        self.steps = steps
        self._events: list[torch.cuda.Event] = []
        self._arrays: list[tuple[Tensor, list[tuple[int, str, Sequence[int], int]]]] = []
        devices = dict.fromkeys(device for _, buffer in steps for device in buffer.devices if device != HOST)
        for device in devices:
            self._start(device)

    @torch.no_grad()
    def _start(self, device: torch.device) -> None:
        flat, places = self._joined(device)
        if device.type == "cuda":
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            host.copy_(flat, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)
        else:
            host = flat.cpu()
        self._arrays.append((host, places))

    def _joined(self, device: torch.device) -> tuple[Tensor, list[tuple[int, str, Sequence[int], int]]]:
        """One flat tensor of everything on a device, and where in it each part of each step starts.

        All single numbers of one dtype are stacked together: hundreds of them come with every reading.
        """
        singles: dict[torch.dtype, list[Tensor]] = {}
        waiting: dict[torch.dtype, list[tuple[int, str, Sequence[int]]]] = {}
        joined: list[Tensor] = []
        places: list[tuple[int, str, Sequence[int], int]] = []
        start = 0
        for index, (_, buffer) in enumerate(self.steps):
            for name, rows, values in buffer.parts(device):
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

    def is_done(self) -> bool:
        """Whether everything has arrived. Never waits."""
        return all(event.query() for event in self._events)

    def parts(self) -> list[list[Part]]:
        """The numbers of every step. Only once they have arrived."""
        found: list[list[Part]] = [buffer.host_parts() for _, buffer in self.steps]
        for host, places in self._arrays:
            array = host.numpy()
            for index, name, rows, start in places:
                found[index].append((name, rows, array[start : start + len(rows)]))
        return found


class Transfer:
    """Brings the numbers of finished steps to the host and hands the steps on, in order.

    Args:
        deliver: Called on the training thread with a step and its numbers.
    """

    def __init__(self, deliver: Callable[[StepRecord, list[Part]], None]) -> None:
        self._deliver = deliver
        self.each_step = False
        """Whether every step is sent by itself: someone acts on what is read."""
        self._waiting: list[tuple[StepRecord, ReadingBuffer]] = []
        self._copies: deque[_Copy] = deque()
        self._sent_at = 0.0

    def add(self, record: StepRecord, buffer: ReadingBuffer) -> None:
        """Take a finished step. One that is in host memory already is handed on at once."""
        if not self._waiting and not self._copies and buffer.is_on_host:
            self._deliver(record, buffer.host_parts())
            return
        self._waiting.append((record, buffer))
        late = record.time - self._sent_at >= SEND_SECONDS or len(self._waiting) >= SEND_STEPS
        if record.full or late or self.each_step:
            self.send()
        self.poll()

    def send(self) -> None:
        """Start to copy what is waiting."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._sent_at = waiting[-1][0].time
            self._copies.append(_Copy(waiting))

    def poll(self) -> None:
        """Hand on the steps that have arrived. Never waits."""
        while self._copies and self._copies[0].is_done():
            copy = self._copies.popleft()
            for (record, _), parts in zip(copy.steps, copy.parts(), strict=True):
                self._deliver(record, parts)

    def finish(self, seconds: float) -> None:
        """Send everything and wait for it, for at most so many seconds."""
        self.send()
        deadline, pause = time.monotonic() + seconds, 0.0002
        while self._copies and time.monotonic() < deadline:
            self.poll()
            if self._copies:
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
