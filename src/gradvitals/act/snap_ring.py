"""Ring: which snapshots there are, and what is known of their health. Nothing else: no tensors, no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Health = Literal["pending", "healthy"]

MAX_PENDING = 2
"""Snapshots that may wait for their settling time at once; while there are so many, no further one is due."""


@dataclass
class Entry:
    """One snapshot.

    Attributes:
        serial: Counts snapshots. Steps do not: after a rollback they come again.
        step: Steps of training that were done.
        health: Pending until it has survived its settling time.
    """

    serial: int
    step: int
    health: Health = "pending"


class Ring:
    """At most `keep` healthy snapshots and `MAX_PENDING` pending ones, oldest first.

    A pending snapshot becomes healthy, or goes; only a healthy one makes an older healthy one go.

    Example:
        >>> ring = Ring(every=10, settle=5, keep=1)
        >>> ring.due(9), ring.due(10)
        (False, True)
        >>> first = ring.add(10)
        >>> ring.settle(14), ring.settle(15)
        (([], []), ([Entry(serial=1, step=10, health='healthy')], []))
        >>> ring.add(20).step, [entry.step for entry in ring.spoil()]
        (20, [20])
        >>> ring.newest_healthy() is first
        True
    """

    def __init__(self, *, every: int, settle: int, keep: int) -> None:
        self.entries: list[Entry] = []
        self.every, self.keep = every, keep
        self._settle = settle
        self._next_serial = 1
        self._last_step = 0

    @property
    def pending(self) -> list[Entry]:
        """Those that are not known to be healthy yet."""
        return [entry for entry in self.entries if entry.health == "pending"]

    @property
    def healthy(self) -> list[Entry]:
        """Those that survived their settling time."""
        return [entry for entry in self.entries if entry.health == "healthy"]

    def newest_healthy(self) -> Entry | None:
        """The one to go back to."""
        return next((entry for entry in reversed(self.entries) if entry.health == "healthy"), None)

    def due(self, step: int) -> bool:
        """Whether the next snapshot should be taken after `step` steps."""
        return step - self._last_step >= self.every and self.has_room()

    def has_room(self) -> bool:
        """Whether another one may be taken."""
        return len(self.pending) < MAX_PENDING

    def add(self, step: int) -> Entry:
        """A snapshot was taken."""
        entry = Entry(self._next_serial, step)
        self._next_serial += 1
        self._last_step = step
        self.entries.append(entry)
        return entry

    def settle(self, step: int) -> tuple[list[Entry], list[Entry]]:
        """No trouble up to `step`. Returns those that became healthy by it, and those that had to make room."""
        settled = [entry for entry in self.pending if entry.step <= step - self._settle]
        for entry in settled:
            entry.health = "healthy"
        gone = self.healthy[: -self.keep]
        self.entries = [entry for entry in self.entries if entry not in gone]
        return settled, gone

    def spoil(self) -> list[Entry]:
        """Trouble: all that are pending may hold it already. Returns them; the healthy ones stay."""
        bad = self.pending
        self.entries = self.healthy
        return bad

    def drop(self, entry: Entry) -> None:
        """One that turned out to be lost."""
        self.entries.remove(entry)

    def go_on_from(self, step: int) -> None:
        """Training goes on from `step`; the next snapshot is due `every` steps later."""
        self._last_step = step

    def adopt(self, entries: list[Entry]) -> None:
        """Continue with the snapshots of an earlier process."""
        self.entries = sorted(entries, key=lambda entry: entry.serial)

    def count_from(self, serial: int) -> None:
        """Give the next snapshot this serial or a higher one."""
        self._next_serial = max(self._next_serial, serial)
