"""Alert: which findings are worth a message, and how many messages are bearable."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gradvitals.errors import GradvitalsError, expect
from gradvitals.format import clean
from gradvitals.types import SEVERITIES, Action, Finding, Severity

LONGEST = 1800
"""Characters of a message's text; Discord takes 2,000."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """What an alert sends."""

    finding: Finding
    run: str
    """Name of the run's folder."""
    resolved: bool = False
    """Whether the finding was sent before and is resolved now."""
    held_back: int = 0
    """Messages that were not sent since the last one, because there were too many."""

    @property
    def title(self) -> str:
        """One line: the run, how bad, and what."""
        state = "resolved" if self.resolved else self.finding.severity
        return clean(f"{self.run}: [{state}] {self.finding.title}")[:300]

    @property
    def text(self) -> str:
        """A few lines: the title, where, since when, and what to do."""
        finding = self.finding
        lines = [self.title]
        if self.resolved:
            lines.append(f"steps {finding.first_step} to {finding.last_step} ({finding.id})")
        else:
            names = ", ".join(finding.tensors[:3]) + (" and more" if len(finding.tensors) > 3 else "")
            where = f" in {names}" if names else ""
            rank = f" on rank {finding.rank}" if finding.rank is not None else ""
            lines.append(f"since step {finding.first_step}{where}{rank} ({finding.id})")
            lines += [f"fix: {fix}" for fix in finding.fixes[:1]]
        if self.held_back:
            lines.append(f"{self.held_back} more were not sent, because there were too many")
        return "\n".join(clean(line) for line in lines)[:LONGEST]

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON values, but errors and tracebacks: they may quote anything, and are in the run."""
        finding = self.finding.to_json()
        private = ("error", "traceback")
        finding["evidence"] = {key: value for key, value in finding["evidence"].items() if key not in private}
        about = {
            "run": self.run,
            "severity": self.finding.severity,
            "resolved": self.resolved,
            "held_back": self.held_back,
        }
        return {"text": self.text, "title": self.title, **about, "finding": finding}


HOUR = 3600.0


class AlertError(GradvitalsError):
    """A message could not be delivered. Its text never holds an address or what came with it."""


class Alert:
    """Sends findings that are serious enough, when they open or get worse, and when they resolve.

    A finding that follows from one of these is not sent: one fault makes one alert.

    Subclass it and override `send` to deliver them another way. It is called on a thread of its own: training does not
    wait. An error is reported once, as a finding; later findings are still tried.

    Args:
        severity: Findings below it are not sent: "info", "warning" or "critical".
        every: Seconds from one message about a kind of finding to the next; worse ones do not wait.
        per_hour: Messages in an hour, all together. How many were held back is in the next one.
        send_resolved: Whether to send that a finding resolved, if its start was sent.
    """

    readings: ClassVar[bool] = False
    lasting: ClassVar[bool] = True
    in_worker: bool = False
    """Whether it can run in the worker process; see `gradvitals.sinks.Sink`."""

    def __init__(
        self, *, severity: Severity = "warning", every: float = 600.0, per_hour: int = 20, send_resolved: bool = True
    ) -> None:
        expect(severity in SEVERITIES, "severity", severity, f"one of {', '.join(SEVERITIES)}")
        expect(every >= 0, "every", every, "a number of seconds, 0 or more")
        expect(per_hour >= 1, "per_hour", per_hour, "1 or more")
        self.severity = severity
        self.every = every
        self.per_hour = per_hour
        self.send_resolved = send_resolved
        self._run = ""
        self._told: dict[tuple[Any, ...], bool] = {}
        self._resolved: set[tuple[Any, ...]] = set()
        self._ids: set[str] = set()
        """Ids of findings that were serious enough."""
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
        """Values are not sent."""

    def action(self, action: Action) -> None:
        """Actions are not sent: the findings that led to them are."""

    def close(self) -> None:
        """Nothing is left to do."""

    def finding(self, finding: Finding) -> None:
        """Send a message about a finding that has opened, got worse or closed, if it is due one."""
        level = SEVERITIES.index(finding.severity)
        if level < SEVERITIES.index(self.severity):
            return
        if finding.follows in self._ids:
            return  # a consequence of what was sent is no news
        self._ids.add(finding.id)
        key = (finding.id, finding.rank, finding.first_step, finding.found_step)
        if finding.last_step is not None:
            if key in self._resolved or (key not in self._told and finding.follows is not None):
                return  # it was resolved before: its root was found since
            self._resolved.add(key)
        resolved = finding.last_step is not None and key in self._told
        if resolved and not (self.send_resolved and self._told[key]):
            return
        now = time.monotonic()
        due = self._is_due(finding.id, level, resolved, now)
        self._told[key] = False
        if not due:
            self._held_back += 1
            return
        held_back, self._held_back = self._held_back, 0
        self._recent.append(now)
        if not resolved:
            self._latest[finding.id] = now, level
        self.send(Message(finding=finding, run=self._run, resolved=resolved, held_back=held_back))
        self._told[key] = True  # if nothing arrived, nobody needs to know that it resolved

    def _is_due(self, name: str, level: int, resolved: bool, now: float) -> bool:
        while self._recent and now - self._recent[0] >= HOUR:
            self._recent.popleft()
        if len(self._recent) >= self.per_hour:
            return False
        told, worst = self._latest.get(name, (-HOUR - self.every, -1))
        return resolved or now - told >= self.every or level > worst
