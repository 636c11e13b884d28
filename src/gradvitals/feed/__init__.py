"""The feed: what a Monitor sees, handed to sinks and alerts off every thread that matters."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gradvitals import notices
from gradvitals.feed.outlet import Destination, Outlet, Record
from gradvitals.store import THREAD_NAME, BackgroundWriter
from gradvitals.types import Finding, Reading

CLOSE_SECONDS = 15.0
"""How long the end of a run waits for all sinks and alerts together."""
DRAIN_SECONDS = 10.0
"""How long it waits for the last readings before."""


class Feed:
    """All sinks and alerts of one run.

    Args:
        targets: Where it goes.
        report: Told what there is to say about a destination that failed or fell behind.
    """

    def __init__(self, targets: Iterable[Destination], report: Callable[[Finding], None]) -> None:
        self.active = True
        """Whether anything is fed at all. Of several ranks only the first does."""
        self._report = report
        self._outlets: list[Outlet] = []
        self._run: Path | None = None
        self._step = 0
        self._closed = False
        self._pid = os.getpid()
        for target in targets:
            self.add(target)

    def add(self, target: Destination) -> None:
        """Feed one more destination from here on."""
        if not self.active or self._closed:
            return
        outlet = Outlet(target, self._on_failure)
        twins = sum(other.name.startswith(outlet.name) for other in self._outlets)
        outlet.name += f" {twins + 1}" if twins else ""
        self._outlets = [*self._outlets, outlet]  # a new list: another thread may be going through the old one
        if self._run is not None:
            outlet.start(self._run)

    def start(self, run: Path) -> None:
        """The run begins. What was put before is handed on now."""
        self._run = run
        if not self.active:
            self._outlets = []
        for outlet in self._outlets:
            outlet.start(run)

    def put(self, records: Sequence[Record]) -> None:
        """Hand over records of whole steps. Never blocks."""
        if not self.active or not self._outlets:
            return
        self._step = max((record.step for record in records if isinstance(record, Reading)), default=self._step)
        for outlet in self._outlets:
            outlet.put(records)

    def see(self, make: Callable[[], Iterable[Record]]) -> list[Record]:
        """Hand over what a function returns, and return it."""
        records = list(make())
        self.put(records)
        return records

    def end_with(self, writer: BackgroundWriter) -> None:
        """End once the writer has taken everything there is, and wait for it where that is not the writer's thread."""
        if not self:
            return
        writer.put(self.end)
        if threading.current_thread().name != THREAD_NAME:
            writer.drain(DRAIN_SECONDS)
            self.close()

    def end(self) -> tuple[()]:
        """Have every destination close once everything put so far is handed on; does not wait."""
        for outlet in self._outlets:
            outlet.end()
        return ()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Hand on what is left and close every destination, as far as the time allows."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        deadline = time.monotonic() + seconds
        self.end()
        for outlet in self._outlets:
            if not outlet.join(deadline - time.monotonic()):
                outlet.fail(TimeoutError(f"it had not finished {seconds:g} s after the end of the run"))
            if outlet.dropped:
                self._report(notices.sink_behind(outlet.name, outlet.dropped, self._step))

    def __bool__(self) -> bool:
        """Whether there is anything to feed."""
        return self.active and bool(self._outlets)

    def _on_failure(self, outlet: Outlet, error: BaseException) -> None:
        self._report(notices.sink_error(outlet.name, error, self._step))
