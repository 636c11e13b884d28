"""Outlet: one sink or alert with a thread and a bounded queue of its own, so that nobody ever waits for it."""

from __future__ import annotations

import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from gradvitals.feed.selection import Selection
from gradvitals.types import SEVERITIES, Action, Finding, Layout, Reading

Record = Reading | Finding | Action | Layout

MOST_WAITING = 2000
"""Readings that may wait for a slow destination before further ones are dropped."""


class Destination(Protocol):
    """What sinks and alerts have in common; see `gradvitals.sinks.Sink`."""

    def begin(self, run: Path) -> None: ...  # noqa: D102
    def log(self, metrics: Mapping[str, float], step: int) -> None: ...  # noqa: D102
    def finding(self, finding: Finding) -> None: ...  # noqa: D102
    def action(self, action: Action) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class Outlet:
    """Hands records on to one destination.

    Args:
        target: The destination.
        on_failure: Told the first error; the target is left out then, unless it says that it can go on (``lasting``).
    """

    def __init__(self, target: Destination, on_failure: Callable[[Outlet, BaseException], None]) -> None:
        self.target = target
        self.name = str(getattr(target, "name", type(target).__name__))
        """What it is called in findings."""
        self.dropped = 0
        """Readings that came while too many were waiting."""
        self._on_failure = on_failure
        self._lasting = bool(getattr(target, "lasting", False))
        self._wants_readings = bool(getattr(target, "readings", True))
        gauges = bool(getattr(target, "gauges", False))
        self._selection = Selection(tensors=bool(getattr(target, "tensors", True)), gauges=gauges)
        self._told: dict[tuple[Any, ...], tuple[int, bool]] = {}
        self._queue: deque[Sequence[Record]] = deque()
        self._waiting = 0
        self._changed = threading.Condition()
        self._closing = self._over = self._failed = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    def put(self, records: Sequence[Record]) -> None:
        """Hand over records of whole steps. Never blocks and never raises; what finds no room is counted."""
        if self._over or os.getpid() != self._pid:  # a forked child has no thread
            return
        if not self._wants_readings:
            records = [record for record in records if isinstance(record, (Finding, Action))]
        with self._changed:
            readings = sum(isinstance(record, Reading) for record in records)
            if readings and self._waiting + readings > MOST_WAITING:
                self.dropped += readings
                readings = 0
                records = [record for record in records if not isinstance(record, Reading)]
            if records and not self._closing and len(self._queue) < 2 * MOST_WAITING:
                self._queue.append(records)
                self._waiting += readings
                self._changed.notify_all()

    def start(self, run: Path) -> None:
        """Begin to hand on. Called on the training thread: what is bound to its context is seen by the target too."""
        try:
            every = getattr(self.target, "every", 1)
            if self._wants_readings and not (isinstance(every, int) and every >= 1):
                raise ValueError(f"every of {self.name} is {every!r}; expected a whole number of steps, 1 or more")
            self.target.begin(run)
        except Exception as error:
            self.fail(error)
            return
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="gradvitals-feed", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Have it close once everything put so far is handed on; does not wait."""
        if os.getpid() != self._pid:  # which may have copied a held lock
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join(self, seconds: float) -> bool:
        """Wait for the end; whether it has come."""
        if self._thread is None or self._thread is threading.current_thread() or os.getpid() != self._pid:
            return True
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def fail(self, error: BaseException) -> None:
        """Tell the first error, and only that."""
        told, self._failed = self._failed, True
        self._over = self._over or not self._lasting
        if not told:
            self._on_failure(self, error)

    def _run(self) -> None:
        while not self._over:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    break
                records = self._queue.popleft()
                self._waiting -= sum(isinstance(record, Reading) for record in records)
            try:
                self._hand_on(records)
            except BaseException as error:  # also SystemExit: a thread that died in silence would never be closed
                self.fail(error)
                self._over = True
        if self._over:  # it has failed: nobody wants to hear of a second error
            self._queue.clear()
            with suppress(BaseException):
                self.target.close()
        else:
            self._try(self.target.close)
        self._over = True

    def _hand_on(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, Layout):
                self._selection.describe(record)
            elif isinstance(record, Finding) and self._is_news(record):
                self._try(self.target.finding, record)
            elif isinstance(record, Action):
                self._try(self.target.action, record)
        for step, metrics in self._selection.steps([record for record in records if isinstance(record, Reading)]):
            if step % getattr(self.target, "every", 1) == 0:
                self._try(self.target.log, metrics, step)

    def _try(self, call: Callable[..., object], *args: object) -> None:
        if self._over:
            return
        try:
            call(*args)
        except Exception as error:
            self.fail(error)

    def _is_news(self, finding: Finding) -> bool:
        """Whether it has opened, got worse or closed. That it goes on is no news, nor is what is about the target."""
        if finding.id == "sink_error" and finding.evidence.get("about") == self.name:
            return False
        key = (finding.id, finding.rank, finding.first_step, str(finding.evidence.get("about")))
        now = (SEVERITIES.index(finding.severity), finding.last_step is not None)
        news = self._told.get(key) != now
        self._told[key] = now
        return news
