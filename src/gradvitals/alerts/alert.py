"""Alert: which findings are worth a message, and how many messages are bearable."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from gradvitals.alerts.message import Message
from gradvitals.errors import GradvitalsError, expect
from gradvitals.types import SEVERITIES, Action, Finding, Severity

HOUR = 3600.0


class AlertError(GradvitalsError):
    """A message could not be delivered. Its text never holds an address or what came with it."""


class Alert:
    """Tells findings that are bad enough, when they open or get worse, and when they are over.

    Subclass it and override `send` to tell them another way. It is called on a thread of its own: training does not
    wait. An error is told once, as a finding; later findings are still tried.

    Args:
        severity: Findings below it are not told: "info", "warning" or "critical".
        every: Seconds from one message about a kind of finding to the next; worse ones do not wait.
        per_hour: Messages in an hour, all together. How many were held back is in the next one.
        tell_over: Whether to tell that a finding is over, where its beginning was told.
    """

    readings: ClassVar[bool] = False
    lasting: ClassVar[bool] = True
    in_worker: bool = False
    """Whether it can run in the worker process; see `gradvitals.sinks.Sink`."""

    def __init__(
        self, *, severity: Severity = "warning", every: float = 600.0, per_hour: int = 20, tell_over: bool = True
    ) -> None:
        expect(severity in SEVERITIES, "severity", severity, f"one of {', '.join(SEVERITIES)}")
        expect(every >= 0, "every", every, "a number of seconds, 0 or more")
        expect(per_hour >= 1, "per_hour", per_hour, "1 or more")
        self.severity = severity
        self.every = every
        self.per_hour = per_hour
        self.tell_over = tell_over
        self._run = ""
        self._told: dict[tuple[Any, ...], bool] = {}
        self._over: set[tuple[Any, ...]] = set()
        self._latest: dict[str, tuple[float, int]] = {}
        self._recent: deque[float] = deque()
        self._held_back = 0

    def send(self, message: Message) -> None:
        """Deliver one message. May take its time and may raise."""
        raise NotImplementedError

    def begin(self, run: Path) -> None:
        """The run begins: its name is in every message."""
        self._run = run.name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Values are not told."""

    def action(self, action: Action) -> None:
        """Actions are not told: the findings that led to them are."""

    def close(self) -> None:
        """Nothing is left to do."""

    def finding(self, finding: Finding) -> None:
        """Send a message about a finding that has opened, got worse or closed, if it is due one."""
        level = SEVERITIES.index(finding.severity)
        if level < SEVERITIES.index(self.severity):
            return
        key = (finding.id, finding.rank, finding.first_step, finding.found_step)
        if finding.last_step is not None:
            if key in self._over or (key not in self._told and finding.follows is not None):
                return  # it was over before: what it follows from has been found since
            self._over.add(key)
        over = finding.last_step is not None and key in self._told
        if over and not (self.tell_over and self._told[key]):
            return
        now = time.monotonic()
        due = self._is_due(finding.id, level, over, now)
        self._told[key] = False
        if not due:
            self._held_back += 1
            return
        held_back, self._held_back = self._held_back, 0
        self._recent.append(now)
        if not over:
            self._latest[finding.id] = now, level
        self.send(Message(finding=finding, run=self._run, over=over, held_back=held_back))
        self._told[key] = True  # where nothing arrived, nobody wants to hear that it is over

    def _is_due(self, name: str, level: int, over: bool, now: float) -> bool:
        while self._recent and now - self._recent[0] >= HOUR:
            self._recent.popleft()
        if len(self._recent) >= self.per_hour:
            return False
        told, worst = self._latest.get(name, (-HOUR - self.every, -1))
        return over or now - told >= self.every or level > worst
