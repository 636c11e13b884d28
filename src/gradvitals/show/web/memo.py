"""What was worked out about a run, kept until the run changes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable


class Memo:
    """The last values worked out, the oldest forgotten first. Safe to use from several threads.

    Args:
        most: Values kept.
        most_bytes: Bytes kept of all values together.
    """

    def __init__(self, most: int = 4 * 2_000, most_bytes: int = 32 << 20) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[Hashable, bytes]] = OrderedDict()
        self._bytes = 0

    def has(self, key: Hashable, stamp: Hashable) -> bool:
        """Whether `get` would have a value at once."""
        with self._lock:
            kept = self._kept.get(key)
            return kept is not None and kept[0] == stamp

    def get(self, key: Hashable, stamp: Hashable, make: Callable[[], bytes]) -> bytes:
        """The value kept under `key` where it was made at the same `stamp`, else a new one."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and kept[0] == stamp:
                self._kept.move_to_end(key)
                return kept[1]
        value = make()
        with self._lock:
            self._forget(key)
            self._kept[key] = (stamp, value)
            self._bytes += len(value)
            while len(self._kept) > self._most or (self._bytes > self._most_bytes and len(self._kept) > 1):
                self._forget(next(iter(self._kept)))
        return value

    def _forget(self, key: Hashable) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._bytes -= len(kept[1])
