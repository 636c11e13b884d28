"""Copies of tensors in host memory that is allocated once, without making the training thread wait for a device."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from gradvitals.act.snap_tree import copy_all, dense

ARENA_BYTES = 256 << 20
"""Tensors share pieces of host memory of about this size: pinning many small ones would take long."""

ALIGNMENT = 64

Layout = dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype]]

_streams: dict[torch.device, torch.cuda.Stream] = {}


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """What host memory must fit: names, shapes, strides and dtypes."""
    return {name: (tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in tensors.items()}


class HostCopy:
    """Host memory for a set of tensors, and the copy of them that is in it.

    Args:
        tensors: What it must fit, as `dense` shows them.
        pinned: Whether a GPU will copy into it. Allocating such memory takes a while.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, pinned: bool) -> None:
        self.layout = layout_of(tensors)
        self.tensors = packed(tensors) if pinned else {name: _like(tensor, "cpu") for name, tensor in tensors.items()}
        self._events: dict[torch.device, torch.cuda.Event] = {}
        self._sources: list[Tensor] = []

    def start(self, tensors: Mapping[str, Tensor], fragile: Collection[str] = ()) -> None:
        """Start copying. What is on the CPU is copied at once.

        What is on a GPU is copied by a stream of its own, after all that is queued now; it must not change before
        `hold_back` was called. Those named in `fragile` may: they are cloned on the device first.
        """
        at_once: list[tuple[Tensor, Tensor]] = []
        later: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for name, tensor in tensors.items():
            if tensor.device.type == "cuda":
                source = tensor.clone() if name in fragile else tensor
                later.setdefault(tensor.device, []).append((self.tensors[name], source))
            else:
                at_once.append((self.tensors[name], tensor))
        for device, pairs in later.items():
            stream = _side_stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                copy_all(pairs)
                self._events[device] = torch.cuda.Event()
                self._events[device].record(stream)
            self._sources += [source for _, source in pairs]  # their memory must not serve others meanwhile
        copy_all(at_once)

    def hold_back(self) -> None:
        """Let each device finish the copy before it goes on with what is queued from here; the host does not wait."""
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)
        self._sources.clear()

    def wait(self) -> None:
        """Wait on the host until the copy is complete."""
        for event in self._events.values():
            event.synchronize()


class Slots:
    """Host memory for a fixed number of snapshots, allocated when their size is known, and then used again and again.

    Pinned memory is allocated by a thread of its own. Until that is done, `acquire` has nothing to give.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._lock = threading.Lock()
        self._free: list[HostCopy] = []
        self._in_use = 0
        self._wanted: dict[str, Tensor] = {}  # without memory: only what the thread is to allocate for
        self._allocator: threading.Thread | None = None
        self._error: BaseException | None = None

    def acquire(self, tensors: Mapping[str, Tensor], *, wait: bool) -> HostCopy | None:
        """Memory that fits these tensors; None while there is none, if it may not `wait` for its allocation."""
        layout, pinned = layout_of(tensors), any_on_gpu(tensors)
        with self._lock:
            self._free = [copy for copy in self._free if copy.layout == layout]
            if self._free:
                self._in_use += 1
                return self._free.pop()
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._in_use >= self._number:
                return None
            if pinned and not wait:
                self._allocate_later(tensors)
                return None
            self._in_use += 1
        return HostCopy(tensors, pinned=pinned)

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Start allocating pinned memory ahead of its first use."""
        if any_on_gpu(tensors):
            with self._lock:
                self._allocate_later(tensors)

    def release(self, copy: HostCopy) -> None:
        """Give memory back, for the next snapshot."""
        with self._lock:
            self._in_use -= 1
            self._free.append(copy)

    def _allocate_later(self, tensors: Mapping[str, Tensor]) -> None:
        if layout_of(self._wanted) != layout_of(tensors):
            self._wanted = {name: _like(tensor, "meta") for name, tensor in tensors.items()}
        if self._allocator is None:
            self._allocator = threading.Thread(target=self._allocate, name="gradvitals-memory", daemon=True)
            self._allocator.start()

    def _allocate(self) -> None:
        """Allocate what is wanted, which may change meanwhile: the first steps make an optimizer's state."""
        try:
            while True:
                with self._lock:
                    wanted = self._wanted
                    self._free = [copy for copy in self._free if copy.layout == layout_of(wanted)]
                    if self._in_use + len(self._free) >= self._number:
                        self._allocator = None
                        return
                copy = HostCopy(wanted, pinned=True)
                with self._lock:
                    self._free.append(copy)
        except Exception as error:
            with self._lock:
                self._allocator, self._error = None, error


def any_on_gpu(tensors: Mapping[str, Tensor]) -> bool:
    """Whether any of them is on a GPU."""
    return any(tensor.is_cuda for tensor in tensors.values())


def packed(tensors: Mapping[str, Tensor], *, pin_memory: bool = True) -> dict[str, Tensor]:
    """Host tensors of the same shapes, dtypes and order in memory, cut from a few large pieces."""
    made: dict[str, Tensor] = {}
    waiting: list[tuple[str, Tensor, int]] = []
    size = 0
    for name, tensor in tensors.items():
        start = -(-size // ALIGNMENT) * ALIGNMENT
        if waiting and start + tensor.nbytes > ARENA_BYTES:
            made |= _cut(waiting, size, pin_memory)
            waiting, start = [], 0
        waiting.append((name, tensor, start))
        size = start + tensor.nbytes
    return made | _cut(waiting, size, pin_memory)


def dense_all(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`dense` of each."""
    return {name: dense(tensor) for name, tensor in tensors.items()}


def _cut(parts: list[tuple[str, Tensor, int]], size: int, pin_memory: bool) -> dict[str, Tensor]:
    arena = torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=pin_memory)
    made = {}
    for name, tensor, start in parts:
        piece = arena[start : start + tensor.nbytes].view(tensor.dtype)
        made[name] = piece.as_strided(tensor.shape, _like(tensor, "meta").stride(), start // tensor.element_size())
    return made


def _like(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_like(tensor, device=device, pin_memory=False)


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
