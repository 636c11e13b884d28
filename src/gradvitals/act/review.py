"""Findings for the Guard: judged on another thread, taken at fixed steps, so that they do not depend on its speed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from gradvitals import notices
from gradvitals.act.rungs import Rung
from gradvitals.act.together import Together
from gradvitals.monitor import Monitor
from gradvitals.types import Finding

EVERY = 10
"""Steps from one look at the findings to the next. What is looked at is what steps before the last look showed."""

PATIENCE = 5.0
"""Seconds to wait for a judge that is so far behind."""


class Review:
    """Asks the Monitor's judge, every few steps, for findings that call for a rung."""

    def __init__(self, monitor: Monitor, rungs: Sequence[Rung], together: Together) -> None:
        self._monitor, self._together = monitor, together
        self._wanted = {name for rung in rungs if rung.mode != "off" for name in rung.on}
        if self._wanted and together.several:  # what is looked at must have been judged by then
            monitor.recorder.send_each_step()
        self._known: dict[str, Finding] = {}
        self._blind = False
        self.rolled_back = -2
        """The last step at which the run was rolled back."""

    def due(self, now: int) -> dict[str, Finding]:
        """Findings that opened or got worse, by their id; nothing between two looks. The same on all ranks."""
        if now % EVERY or not self._wanted:
            return {}
        found = self._taken(now - EVERY - 1)
        self._monitor.hurry()  # for the look after this one; on all ranks, as their numbers come together
        if self._together.several:
            found = self._agreed(found)
        self._known |= found
        return found

    def _taken(self, until: int) -> dict[str, Finding]:
        """What this rank's judge has found; with several ranks, the first alone has one."""
        judge = self._monitor.judge
        if judge is None or self._blind:
            return {}
        deadline = time.monotonic() + PATIENCE
        while judge.judged < until >= self._monitor.recorder.first and not judge.failed:
            if time.monotonic() > deadline:  # its thread is gone, or the disk is: act without it
                self._blind = True
                self._monitor.report(notices.guard_blind(PATIENCE, self._monitor.step))
                return {}
            time.sleep(0.0005)
        taken = [entry for entry in list(judge.opened) if entry[0] <= until]
        for entry in taken:
            judge.opened.remove(entry)
        # What began before a rollback did not happen; and the rollback itself looks like a huge update.
        return {
            finding.id: finding
            for _, finding in taken
            if finding.id in self._wanted and finding.first_step > self.rolled_back + 1
        }

    def _agreed(self, found: dict[str, Finding]) -> dict[str, Finding]:
        """What any rank has found counts for all. What it is about is told only when there is something."""
        together = self._together
        count = together.summed(torch.full((1,), float(len(found)), dtype=torch.float64, device=together.device))
        if not float(count):
            return {}
        agreed: dict[str, Finding] = {}
        for told in together.gathered([finding.to_json() for finding in found.values()]):
            for finding in map(Finding.from_json, told):
                agreed.setdefault(finding.id, finding)
        return {name: agreed[name] for name in sorted(agreed)}

    def began(self, findings: Iterable[str]) -> int | None:
        """The first step of what these findings are about; None for none."""
        return min((self._known[finding].first_step for finding in findings if finding in self._known), default=None)

    def tensors(self, findings: Iterable[str]) -> set[str]:
        """The tensors that these findings are about."""
        return {name for finding in findings if finding in self._known for name in self._known[finding].tensors}
