"""Copies the numbers of several steps to the host at once, without waiting."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradvitals.collect.queues import QUEUE_STEPS, DeviceQueue, PlainBlock, WritePlain
from gradvitals.worker.record import Part, StepRecord

SEND_SECONDS = 0.25
"""Steps within this time are sent together."""

HOST = torch.device("cpu")

EXACT = (torch.float32, torch.float64)
"""Norms of half-precision gradients are rounded to half precision, which is not exact enough."""

Known = list[tuple[Sequence[int], Tensor | Sequence[Tensor]]]
"""The rows and numbers of one name in a buffer."""

Later = Callable[[], Iterable[tuple[str, Sequence[int], NDArray[Any]]]]
"""Computes names, rows and numbers when called."""


class ReadingBuffer:
    """Collects small tensors by name during a step.

    Launches nothing: all numbers are joined at once later. So do not change a tensor after adding it.
    """

    __slots__ = ("_later", "_parts")

    def __init__(self) -> None:
        self._parts: dict[torch.device, list[tuple[str, Sequence[int], Tensor | Sequence[Tensor]]]] = {}
        self._later: list[Later] = []

    def add(self, name: str, values: Tensor, rows: Sequence[int] = (0,)) -> None:
        """Add a tensor with one number per row. A name may be added more than once."""
        part: Tensor | list[Tensor] = values
        if values.dim() == 0:
            part = [values]
        elif values.dim() > 1 or values.requires_grad:
            part = values.detach().reshape(-1)
        self._parts.setdefault(values.device, []).append((name, rows, part))

    def add_each(self, name: str, numbers: Sequence[Tensor], rows: Sequence[int]) -> None:
        """Add 0-d tensors of one device and dtype, one per row."""
        if numbers:
            self._parts.setdefault(numbers[0].device, []).append((name, rows, numbers))

    def add_later(self, work: Later) -> None:
        """Add numbers that are computed on the host when the step is written."""
        self._later.append(work)

    def extend(self, other: ReadingBuffer) -> None:
        """Add everything of another buffer, which must not be used afterwards."""
        if not self._parts:
            self._parts = other._parts
        else:
            for device, parts in other._parts.items():
                self._parts.setdefault(device, []).extend(parts)
        self._later += other._later

    def parts(self, device: torch.device) -> list[tuple[str, Sequence[int], Tensor | Sequence[Tensor]]]:
        """Returns what is on one device."""
        return self._parts.get(device, [])

    def named(self, name: str) -> Known:
        """Returns the rows and numbers of a name, as they were added."""
        return [(rows, values) for parts in self._parts.values() for known, rows, values in parts if known == name]

    @property
    def devices(self) -> Iterable[torch.device]:
        """The devices of its numbers."""
        return self._parts.keys()

    @property
    def is_on_host(self) -> bool:
        """Whether all numbers are in host memory."""
        return not self._parts.keys() - {HOST}

    def host_parts(self) -> list[Part]:
        """Returns what is in host memory."""
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
    """The numbers of some steps that are being copied to the host.

    Args:
        steps: Each with the number of plain steps before it.
        queue: Holds the plain steps among them.
    """

    def __init__(self, steps: Sequence[tuple[StepRecord, ReadingBuffer, int]], queue: DeviceQueue | None) -> None:
        self.steps = steps
        self.plain: tuple[PlainBlock, Tensor] | None = None
        """The plain steps among them, and their numbers."""
        self._events: list[torch.cuda.Event] = []
        self._arrays: list[tuple[Tensor, list[tuple[int, str, Sequence[int], int]]]] = []
        devices = dict.fromkeys(device for _, buffer, _ in steps for device in buffer.devices if device != HOST)
        for device in devices:
            flat, places = self._joined(device)
            self._arrays.append((self._to_host(flat), places))
        if queue is not None and queue.count:
            block, numbers = queue.take()
            self.plain = (block, self._to_host(numbers))

    @torch.no_grad()
    def _to_host(self, numbers: Tensor) -> Tensor:
        """Start to copy a tensor."""
        if not numbers.is_cuda:
            return numbers.to("cpu", copy=True)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(numbers.device))
        self._events.append(event)
        return host

    def _joined(self, device: torch.device) -> tuple[Tensor, list[tuple[int, str, Sequence[int], int]]]:
        """Returns one flat tensor of everything on a device, and where each part of each step starts.

        Stacks all single numbers of a dtype at once: every reading has hundreds of them.
        """
        singles: dict[torch.dtype, list[Tensor]] = {}
        waiting: dict[torch.dtype, list[tuple[int, str, Sequence[int]]]] = {}
        joined: list[Tensor] = []
        places: list[tuple[int, str, Sequence[int], int]] = []
        start = 0
        for index, (_, buffer, _) in enumerate(self.steps):
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
        """Returns whether the copy is complete. Never waits."""
        return all(event.query() for event in self._events)

    def parts(self) -> list[list[Part]]:
        """Returns the numbers of every step, once the copy is complete."""
        found: list[list[Part]] = [buffer.host_parts() for _, buffer, _ in self.steps]
        for host, places in self._arrays:
            array = host.numpy()
            for index, name, rows, start in places:
                found[index].append((name, rows, array[start : start + len(rows)]))
        return found


class Transfer:
    """Copies the numbers of finished steps to the host and delivers the steps in order.

    Args:
        deliver: Called on the training thread with a step and its numbers.
        prepare: Called with the first of some plain steps, before they are written.
        write_plain: Called with plain steps in a row.
    """

    def __init__(
        self,
        deliver: Callable[[StepRecord, list[Part]], None],
        prepare: Callable[[int], None],
        write_plain: WritePlain,
    ) -> None:
        self._deliver = deliver
        self._prepare = prepare
        self._write_plain = write_plain
        self.each_step = False
        """Whether to send every step on its own, because a Guard acts on it."""
        self._queue: DeviceQueue | None = None
        self._waiting: list[tuple[StepRecord, ReadingBuffer, int]] = []
        self._copies: deque[_Copy] = deque()
        self._sent_at = 0.0

    def use(self, queue: DeviceQueue) -> None:
        """Take plain steps from this queue from now on."""
        self.send()
        self._queue = queue

    def add(self, record: StepRecord, buffer: ReadingBuffer) -> None:
        """Add a finished step. Delivers it at once if its numbers are in host memory and nothing waits."""
        before = self._queue.count if self._queue is not None else 0
        if not self._waiting and not self._copies and not before and buffer.is_on_host:
            self._deliver(record, buffer.host_parts())
            return
        self._waiting.append((record, buffer, before))
        if record.full or self.each_step or len(self._waiting) >= QUEUE_STEPS:
            self.send()
        self.note_time(record.time)

    def note_time(self, time: float) -> None:
        """Send what has waited long enough or fills the queue, and deliver what has arrived."""
        if time - self._sent_at >= SEND_SECONDS or (self._queue is not None and self._queue.is_full):
            self.send(time)
        if self._copies:
            self.poll()

    def send(self, time: float | None = None) -> None:
        """Start to copy waiting steps."""
        if time is not None:
            self._sent_at = time
        if self._waiting or (self._queue is not None and self._queue.count):
            waiting, self._waiting = self._waiting, []
            self._copies.append(_Copy(waiting, self._queue))

    def poll(self) -> None:
        """Deliver the steps that have arrived. Never waits."""
        while self._copies and self._copies[0].is_done():
            copy = self._copies.popleft()
            done, count, hand_on = 0, 0, None
            if copy.plain is not None:
                block, numbers = copy.plain
                steps, norms = block.landed(numbers.numpy())
                count, hand_on = len(steps), partial(self._hand_on_plain, block, steps, norms)
            for (record, _, before), parts in zip(copy.steps, copy.parts(), strict=True):
                if hand_on is not None and before > done:
                    hand_on(done, before)
                    done = before
                self._deliver(record, parts)
            if hand_on is not None and done < count:
                hand_on(done, count)

    def _hand_on_plain(
        self, block: PlainBlock, steps: NDArray[np.void], norms: NDArray[np.float32], start: int, end: int
    ) -> None:
        self._prepare(int(steps["step"][start]))
        self._write_plain(block.encode(steps[start:end], norms[start:end]), end - start)

    def finish(self, seconds: float) -> None:
        """Send everything and wait up to `seconds` until it is delivered."""
        self.send()
        deadline, pause = time.monotonic() + seconds, 0.0002
        while self._copies and time.monotonic() < deadline:
            self.poll()
            if self._copies:
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
