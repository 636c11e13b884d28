"""Findings for the Guard: judged on another thread, taken at fixed steps, so that they do not depend on its speed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from gradvitals.act.rungs import Rung
from gradvitals.monitor import Monitor
from gradvitals.types import Finding

EVERY = 10
"""Steps from one look at the findings to the next. What is looked at is what steps before the last look showed."""

PATIENCE = 5.0
"""Seconds to wait for a judge that is so far behind."""


class Review:
    """Asks the Monitor's judge, every few steps, for findings that call for a rung."""

    def __init__(self, monitor: Monitor, rungs: Sequence[Rung]) -> None:
        self._monitor = monitor
        self._wanted = {name for rung in rungs if rung.mode != "off" for name in rung.on}
        self._known: dict[str, Finding] = {}
        self.first = monitor.step
        """The first step that is judged in this process."""

    def due(self, now: int) -> dict[str, Finding]:
        """Findings that opened or got worse, by their id; nothing between two looks."""
        judge = self._monitor.judge
        if now % EVERY or judge is None or not self._wanted:
            return {}
        seen_before = now - EVERY - 1
        deadline = time.monotonic() + PATIENCE
        while judge.judged < seen_before >= self.first and not judge.failed:
            if time.monotonic() > deadline:  # its thread is gone, or the disk is: act without it
                self._wanted = set()
                return {}
            time.sleep(0.0005)
        self._monitor.tap.flush()
        taken = [entry for entry in list(judge.opened) if entry[0] <= seen_before]
        for entry in taken:
            judge.opened.remove(entry)
        found = {finding.id: finding for _, finding in taken if finding.id in self._wanted}
        self._known |= found
        return found

    def tensors(self, findings: Iterable[str]) -> set[str]:
        """The tensors that these findings are about."""
        return {name for finding in findings if finding in self._known for name in self._known[finding].tensors}
