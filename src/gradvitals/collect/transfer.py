"""Copies the numbers of several steps to the host at once, without waiting."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradvitals.worker.record import (
    HAS_LOSS,
    HAS_NORMS,
    PACKED_STEP,
    PLAIN_STEP,
    Part,
    StepRecord,
    encode_plain,
    pack_rows,
    plain_head,
)

SEND_SECONDS = 0.25
"""Steps within this time are sent together."""

SEND_STEPS = 32
"""The most steps to send together."""

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
        parts = self._parts.setdefault(values.device, [])
        parts.append((name, rows, [values] if values.dim() == 0 else values.detach().reshape(-1)))

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


DeliverPlain = Callable[[int, int, bytes], None]
"""Takes the first of some plain steps in a row, how many they are, and their bytes, as `encode_plain` makes them."""

StepValues = tuple[int, float, float, float, float, float, int, int]
"""Of a plain step: its number, time, wall seconds, learning rate, limit of the clip, batch size, flags and passes."""

LOSS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What a ring keeps losses of without losing digits."""


class HostRing:
    """The ring of a model in host memory: it has room for one step, which is delivered as it ends."""

    def __init__(self, rows: Sequence[int], deliver: DeliverPlain) -> None:
        packed = pack_rows(rows)
        self._heads = plain_head(packed, 1, 0), plain_head(packed, 1, len(rows))
        """What comes before a step without norms, and before one with them."""
        self._deliver = deliver
        self._norms = np.zeros(len(rows), dtype=np.float32)

    def note_loss(self, loss: Tensor | float, before: object) -> object:
        """Keep a loss as a number."""
        if type(loss) is Tensor:
            if not loss.is_cpu or loss.dim() or not loss.is_floating_point() or torch.compiler.is_compiling():
                return None
            loss = loss.item()
        elif type(loss) is not float:
            return None
        return loss if before is None else before + loss  # type: ignore[operator]

    def loss_value(self, loss: object) -> Tensor | float:
        """The number."""
        assert isinstance(loss, float)
        return loss

    def note_norms(self, norms: Tensor) -> bool:
        """Keep norms that are finite; what lies behind others is worth a closer look."""
        self._norms = norms.numpy()
        return math.isfinite(float(self._norms.sum()))

    def norms(self) -> Tensor:
        """The norms that were kept."""
        return torch.from_numpy(self._norms)

    def put(self, loss: object, values: StepValues) -> None:
        """Deliver the step."""
        number, time, wall, lr, max_norm, batch_size, flags, passes = values
        if loss is None:
            loss = math.nan
        else:
            flags |= HAS_LOSS
        data = PACKED_STEP.pack(number, time, wall, loss, lr, max_norm, batch_size, flags, passes)
        without, whole = self._heads
        data = whole + data + self._norms.tobytes() if flags & HAS_NORMS else without + data
        self._deliver(number, 1, data)


class DeviceRing:
    """The ring of a model on a device. Nothing here waits for the device.

    Args:
        rows: The row of the model that each norm belongs to.
        device: Where the gradients are.
    """

    def __init__(self, rows: Sequence[int], device: torch.device) -> None:
        self.rows = pack_rows(rows)
        self.count = 0
        """Steps in it."""
        self.steps = np.zeros(SEND_STEPS, dtype=PLAIN_STEP)
        self._memory = torch.zeros((SEND_STEPS, 1 + len(rows)), dtype=torch.float32, device=device)
        self._losses = self._memory[:, 0].unbind(0)
        self._norms = self._memory[:, 1:].unbind(0)
        self._device = device

    @property
    def is_full(self) -> bool:
        """Whether it has no room for another step."""
        return self.count == SEND_STEPS

    def note_loss(self, loss: Tensor | float, before: object) -> object:
        """Keep a loss in the ring."""
        if type(loss) is not Tensor or loss.dtype not in LOSS_DTYPES or loss.dim() or loss.device != self._device:
            return None
        slot = self._losses[self.count]
        return slot.copy_(loss.detach()) if before is None else slot.add_(loss.detach())

    def loss_value(self, loss: object) -> Tensor | float:
        """A copy: the ring is written again."""
        assert isinstance(loss, Tensor)
        return loss.clone()

    def note_norms(self, norms: Tensor) -> bool:
        """Keep norms in the ring."""
        self._norms[self.count].copy_(norms)
        return True

    def norms(self) -> Tensor:
        """A copy: the ring is written again."""
        return self._norms[self.count].clone()

    def put(self, loss: object, values: StepValues) -> None:
        """End the step."""
        number, time, wall, lr, max_norm, batch_size, flags, passes = values
        flags |= HAS_LOSS if loss is not None else 0
        self.steps[self.count] = (number, time, wall, math.nan, lr, max_norm, batch_size, flags, passes)
        self.count += 1

    def take(self) -> tuple[NDArray[np.void], Tensor]:
        """Empty it. Returns its steps and, still on the device, a row per step: its loss, then its norms."""
        count, self.count = self.count, 0
        return self.steps[:count].copy(), self._memory[:count]


def landed(steps: NDArray[np.void], numbers: NDArray[np.float32]) -> tuple[NDArray[np.void], NDArray[np.float32]]:
    """Return the steps of a ring with their losses, and their norms, once its rows are on the host."""
    has_loss = steps["flags"] & HAS_LOSS > 0
    steps["loss"][has_loss] = numbers[has_loss, 0]
    return steps, numbers[:, 1:]


class _Copy:
    """The numbers of some steps that are being copied to the host.

    Args:
        steps: Each with the number of plain steps before it.
        ring: Holds the plain steps among them.
    """

    def __init__(self, steps: Sequence[tuple[StepRecord, ReadingBuffer, int]], ring: DeviceRing | None) -> None:
        self.steps = steps
        self.ring: tuple[bytes, NDArray[np.void], Tensor] | None = None
        """Packed rows, the plain steps, and their numbers."""
        self._events: list[torch.cuda.Event] = []
        self._arrays: list[tuple[Tensor, list[tuple[int, str, Sequence[int], int]]]] = []
        devices = dict.fromkeys(device for _, buffer, _ in steps for device in buffer.devices if device != HOST)
        for device in devices:
            flat, places = self._joined(device)
            self._arrays.append((self._to_host(flat), places))
        if ring is not None and ring.count:
            plain, numbers = ring.take()
            self.ring = (ring.rows, plain, self._to_host(numbers))

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
        deliver_plain: Called with plain steps in a row.
    """

    def __init__(self, deliver: Callable[[StepRecord, list[Part]], None], deliver_plain: DeliverPlain) -> None:
        self._deliver = deliver
        self._deliver_plain = deliver_plain
        self.each_step = False
        """Whether to send every step on its own, because a Guard acts on it."""
        self._ring: DeviceRing | None = None
        self._waiting: list[tuple[StepRecord, ReadingBuffer, int]] = []
        self._copies: deque[_Copy] = deque()
        self._sent_at = 0.0

    def use(self, ring: DeviceRing) -> None:
        """Take plain steps from this ring from now on."""
        self.send()
        self._ring = ring

    def add(self, record: StepRecord, buffer: ReadingBuffer) -> None:
        """Add a finished step. Delivers it at once if its numbers are in host memory and nothing waits."""
        before = self._ring.count if self._ring is not None else 0
        if not self._waiting and not self._copies and not before and buffer.is_on_host:
            self._deliver(record, buffer.host_parts())
            return
        self._waiting.append((record, buffer, before))
        if record.full or self.each_step or len(self._waiting) >= SEND_STEPS:
            self.send()
        self.note_time(record.time)

    def note_time(self, time: float) -> None:
        """Send what has waited long enough or fills the ring, and deliver what has arrived."""
        if time - self._sent_at >= SEND_SECONDS or (self._ring is not None and self._ring.is_full):
            self.send(time)
        if self._copies:
            self.poll()

    def send(self, time: float | None = None) -> None:
        """Start to copy waiting steps."""
        if time is not None:
            self._sent_at = time
        if self._waiting or (self._ring is not None and self._ring.count):
            waiting, self._waiting = self._waiting, []
            self._copies.append(_Copy(waiting, self._ring))

    def poll(self) -> None:
        """Deliver the steps that have arrived. Never waits."""
        while self._copies and self._copies[0].is_done():
            copy = self._copies.popleft()
            done = 0
            rows, plain, norms = b"", None, None
            if copy.ring is not None:
                rows, plain, numbers = copy.ring
                plain, norms = landed(plain, numbers.numpy())
            for (record, _, before), parts in zip(copy.steps, copy.parts(), strict=True):
                if plain is not None and norms is not None and before > done:
                    self._hand_on_plain(rows, plain[done:before], norms[done:before])
                    done = before
                self._deliver(record, parts)
            if plain is not None and norms is not None and done < len(plain):
                self._hand_on_plain(rows, plain[done:], norms[done:])

    def _hand_on_plain(self, rows: bytes, steps: NDArray[np.void], norms: NDArray[np.float32]) -> None:
        self._deliver_plain(int(steps["step"][0]), len(steps), encode_plain(rows, steps, norms))

    def finish(self, seconds: float) -> None:
        """Send everything and wait up to `seconds` until it is delivered."""
        self.send()
        deadline, pause = time.monotonic() + seconds, 0.0002
        while self._copies and time.monotonic() < deadline:
            self.poll()
            if self._copies:
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
