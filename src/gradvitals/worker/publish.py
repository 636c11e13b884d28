"""Publishes a live run to sinks and alerts: selects their numbers, and runs each in a thread of its own."""

from __future__ import annotations

import contextvars
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from gradvitals import notices
from gradvitals.metrics import INSPECTED
from gradvitals.types import SEVERITIES, SOURCES, Action, Finding, Layout, Reading

WORST_TENSORS: Mapping[str, bool] = {"grad/norm": True, "grad/spike_ratio": True, "update/ratio": True, "gsnr": False}
"""The metrics of single tensors that are published, and whether the largest are the worst."""

WORST = 3
"""Tensors that one reading can add for each of these metrics: the worst ones."""

MOST_TENSORS = 20
"""Tensors that a run can publish for each of these metrics. A tensor that was added stays."""

MAY_BREAK = frozenset({"loss", "grad/norm", "grad/max", "weight/norm", "update/norm"})
"""Metrics that are published even if they are not finite."""

LONGEST_NAME = 120
"""The most characters of a tensor's name in a key."""


class Selection:
    """Chooses and names the numbers of one run.

    The best source that a metric has when it is first read keeps its id for the whole run; other sources are put before
    it, as in ``adam/gsnr``. So no key mixes two sources. No key is a prefix of another one, which some destinations
    would take for a folder.

    Args:
        tensors: Whether to publish single tensors.
        gauges: Whether to publish non-finite values too: a gauge that is not set keeps showing its old value.
    """

    def __init__(self, *, tensors: bool = True, gauges: bool = False) -> None:
        self._wants_tensors = tensors
        self._wants_all = gauges
        self._names: tuple[str, ...] = ()
        self._bearer: dict[str, str | None] = {}
        self._shown: dict[str, dict[int, None]] = {metric: {} for metric in WORST_TENSORS}

    def describe(self, layout: Layout) -> None:
        """Use the names of this layout from here on. Rows are only ever added."""
        self._names = layout.names("tensors")

    def steps(self, readings: Sequence[Reading]) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield each step with its published numbers, in order."""
        for step, of_step in groupby(readings, key=lambda reading: reading.step):
            metrics = self._of_step(sorted(of_step, key=_trust))
            if metrics:
                yield step, metrics

    def _of_step(self, readings: Sequence[Reading]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for reading in readings:
            for metric, value in reading.values.items():
                if metric in INSPECTED:  # not a curve
                    continue
                key = self._key(metric, reading.source)
                may_break = self._wants_all or (reading.source is None and metric in MAY_BREAK)
                if math.isfinite(value) or may_break:
                    metrics[key] = float(value)
            for metric in WORST_TENSORS if self._wants_tensors else ():
                if metric in reading.tensors and self._key(metric, reading.source) == metric:
                    metrics |= self._tensors(metric, np.asarray(reading.tensors[metric], dtype=np.float64))
        return metrics

    def _key(self, metric: str, source: str | None) -> str:
        return metric if self._bearer.setdefault(metric, source) == source else f"{source}/{metric}"

    def _tensors(self, metric: str, values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> dict[str, float]:
        shown = self._shown[metric]
        known = np.flatnonzero(~np.isnan(values))
        worst = known[np.argsort(-values[known] if WORST_TENSORS[metric] else values[known], kind="stable")][:WORST]
        for index in worst.tolist():
            if len(shown) < MOST_TENSORS and index < len(self._names):
                shown.setdefault(index)
        return {
            f"tensors/{metric}/{_short(self._names[index])}": float(values[index])
            for index in shown
            if index < len(values) and math.isfinite(values[index])
        }


def _trust(reading: Reading) -> int:
    """Sorts the reading without a source first, then the most trustworthy source."""
    return -1 if reading.source is None else SOURCES.index(reading.source)


def _short(name: str) -> str:
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}~{crc32(name.encode('utf-8', 'backslashreplace')):08x}"


Record = Reading | Finding | Action | Layout

MOST_WAITING = 2000
"""Readings that may wait for a slow destination; further ones are dropped."""


class Destination(Protocol):
    """The interface that sinks and alerts share; see `gradvitals.sinks.Sink`."""

    def begin(self, run: Path) -> None: ...  # noqa: D102
    def log(self, metrics: Mapping[str, float], step: int) -> None: ...  # noqa: D102
    def finding(self, finding: Finding) -> None: ...  # noqa: D102
    def action(self, action: Action) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


def runs_in_worker(destination: Destination) -> bool:
    """Returns whether a destination may move to the worker process.

    A subclass does not inherit that: the worker may be unable to import it, and it may use objects of the script.
    """
    return bool(getattr(destination, "in_worker", False)) and "in_worker" in vars(type(destination))


def wants_readings(destination: Destination) -> bool:
    """Returns whether a destination gets readings, or findings and actions only."""
    return bool(getattr(destination, "readings", True))


class Outlet:
    """Passes records to one destination, in a thread of its own.

    Args:
        target: The destination.
        on_failure: Called with the first error. The target then gets nothing more, unless it is ``lasting``.
    """

    def __init__(self, target: Destination, on_failure: Callable[[Outlet, BaseException], None]) -> None:
        self.target = target
        self.name = str(getattr(target, "name", type(target).__name__))
        """Its name in findings."""
        self.dropped = 0
        """Number of readings that were dropped because too many were waiting."""
        self._on_failure = on_failure
        self._lasting = bool(getattr(target, "lasting", False))
        self._wants_readings = wants_readings(target)
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
        """Queue records of whole steps. Never blocks and never raises; counts what it drops."""
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
        """Start the thread, with the context variables of the training thread."""
        try:
            every = getattr(self.target, "every", 1)
            if self._wants_readings and not (isinstance(every, int) and every >= 1):
                raise ValueError(f"every of {self.name} is {every!r}; expected a whole number of steps, 1 or more")
            self.target.begin(run)
        except Exception as error:
            self.fail(error)
            return
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="gradvitals-publish", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Close the target once the queue is empty, without waiting for it."""
        if os.getpid() != self._pid:  # a forked child may have copied a held lock
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join(self, seconds: float) -> bool:
        """Wait for the thread to end; returns whether it did."""
        if self._thread is None or self._thread is threading.current_thread() or os.getpid() != self._pid:
            return True
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def fail(self, error: BaseException) -> None:
        """Report the first error only."""
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
            except BaseException as error:  # also SystemExit: a thread that dies silently would never be closed
                self.fail(error)
                self._over = True
        if self._over:  # it has failed: do not report a second error
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
        """Returns whether a finding has opened, got worse or closed, and is not about the target itself."""
        if finding.id == "sink_error" and finding.evidence.get("about") == self.name:
            return False
        key = (finding.id, finding.rank, finding.first_step, str(finding.evidence.get("about")))
        now = (SEVERITIES.index(finding.severity), finding.last_step is not None)
        news = self._told.get(key) != now
        self._told[key] = now
        return news


CLOSE_SECONDS = 15.0
"""Time that closing a run waits for all sinks and alerts together."""


class Publisher:
    """Passes records to all sinks and alerts of one run. Never blocks.

    Args:
        destinations: The sinks and alerts.
        report: Called with a finding if a destination fails or falls behind.
        run: Folder of the run.
    """

    def __init__(self, destinations: Iterable[Destination], report: Callable[[Finding], None], run: Path) -> None:
        self._report = report
        self._run = run
        self._outlets: list[Outlet] = []
        self._step = 0
        self._layout: Layout | None = None
        self._closed = False
        self._pid = os.getpid()
        for destination in destinations:
            self.add(destination)

    def add(self, destination: Destination) -> None:
        """Add a destination."""
        if self._closed:
            return
        outlet = Outlet(destination, self._on_failure)
        twins = sum(other.name.startswith(outlet.name) for other in self._outlets)
        outlet.name += f" {twins + 1}" if twins else ""
        self._outlets = [*self._outlets, outlet]  # a new list: another thread may be iterating over the old one
        outlet.start(self._run)
        if self._layout is not None:
            outlet.put([self._layout])

    def put(self, records: Sequence[Record]) -> None:
        """Queue records of whole steps for every destination."""
        self._layout = next((record for record in records if isinstance(record, Layout)), self._layout)
        if not self._outlets:
            return
        self._step = max((record.step for record in records if isinstance(record, Reading)), default=self._step)
        for outlet in self._outlets:
            outlet.put(records)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Publish what is queued and close every destination, as far as the time allows."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        deadline = time.monotonic() + seconds
        for outlet in self._outlets:
            outlet.end()
        for outlet in self._outlets:
            if not outlet.join(deadline - time.monotonic()):
                outlet.fail(TimeoutError(f"it had not finished {seconds:g} s after the end of the run"))
            if outlet.dropped:
                self._report(notices.sink_behind(outlet.name, outlet.dropped, self._step))

    def __bool__(self) -> bool:
        """Whether there is any destination."""
        return bool(self._outlets)

    def _on_failure(self, outlet: Outlet, error: BaseException) -> None:
        self._report(notices.sink_error(outlet.name, error, self._step))
