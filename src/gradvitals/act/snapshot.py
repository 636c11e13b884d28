"""Snapshot: one snapshot in host memory, from the start of the copy until nobody needs it any more."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradvitals.act.snap_copy import HostCopy, Slots, any_on_gpu, dense_all
from gradvitals.act.snap_disk import spec_of
from gradvitals.act.snap_fit import sizes_of
from gradvitals.act.snap_ring import Entry, Health
from gradvitals.act.subject import Part


class Snapshot:
    """One snapshot in host memory, which goes back when neither the ring nor the disk needs it any more."""

    def __init__(
        self, entry: Entry, part: Part, memory: HostCopy, extra: dict[str, Any], slots: Slots, *, on_disk: bool
    ) -> None:
        self._entry, self._slots, self.on_disk = entry, slots, on_disk
        self._memory: HostCopy | None = memory
        self._plain = part.plain | {"extra": extra}
        self._specs = {name: spec for name, tensor in part.tensors.items() if (spec := spec_of(tensor)) is not None}
        self.sizes = {name: (shape, dtype) for name, (shape, _, dtype) in memory.layout.items()}
        self.sizes |= sizes_of({name: part.tensors[name] for name in self._specs})  # those are known whole
        self._settings: HostCopy | None = None
        self._lock = threading.Lock()
        self._holders = {"ring", "disk"} if on_disk else {"ring"}
        self._spoiled = self._being_written = False

    @property
    def serial(self) -> int:
        """See `Entry`."""
        return self._entry.serial

    @property
    def step(self) -> int:
        """See `Entry`."""
        return self._entry.step

    @property
    def health(self) -> Health:
        """See `Entry`."""
        return self._entry.health

    def complete(self, part: Part) -> None:
        """Add what is read last, and make the devices finish the copy before they go on."""
        self._plain |= part.plain
        self.sizes |= sizes_of(part.tensors)
        tensors = dense_all(part.tensors)
        self._settings = HostCopy(tensors, pinned=any_on_gpu(tensors))
        self._settings.start(tensors)
        self.hold_back()

    def hold_back(self) -> None:
        """See `HostCopy`."""
        for copy in (self._memory, self._settings):
            if copy is not None:
                copy.hold_back()

    def content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Plain values and tensors, when they have arrived."""
        assert self._settings is not None, "the snapshot is not complete"
        assert self._memory is not None, "the snapshot was forgotten"
        self._memory.wait()
        self._settings.wait()
        return self._plain, self._memory.tensors | self._settings.tensors

    def forget(self, *, spoiled: bool) -> None:
        """The ring needs it no longer; and if it is not being written yet, it will not be."""
        self._spoiled = spoiled
        with self._lock:
            self._holders.discard("ring")
            if not self._being_written:
                self._holders.discard("disk")
        self._give_back()

    def _give_back(self) -> None:
        with self._lock:
            memory = None if self._holders else self._memory
            self._memory = self._memory if self._holders else None
        if memory is not None:
            self._slots.release(memory)

    # For the vault, see `Content`.

    def begin(self) -> bool:
        """Whether it is still in the ring; if so, it stays until it is written."""
        with self._lock:
            self._being_written = bool(self._holders)
            return self._being_written

    def spoiled(self) -> bool:
        """Whether it turned out to be bad."""
        return self._spoiled

    def load(self) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
        """See `Content`."""
        plain, tensors = self.content()
        return {**plain, "extra": arrived(plain["extra"])}, tensors, self._specs

    def written(self) -> None:
        """The disk needs it no longer."""
        with self._lock:
            self._holders.discard("disk")
        self._give_back()


def arrived(value: Any) -> Any:
    """Plain values with every function among them replaced by what it returns: it may wait for a device or a thread."""
    if callable(value):
        return value()
    if isinstance(value, Mapping):
        return {key: arrived(item) for key, item in value.items()}
    return [arrived(item) for item in value] if isinstance(value, list) else value
