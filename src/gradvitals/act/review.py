"""Findings for the Guard: judged on another thread, taken at fixed steps, so that they do not depend on its speed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import torch
from torch import distributed as dist

from gradvitals import notices
from gradvitals.act.rungs import Rung
from gradvitals.measure.sentinel import is_distributed
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
        self._blind = False
        self.rolled_back = -2
        """The last step at which the run was rolled back."""

    def due(self, now: int) -> dict[str, Finding]:
        """Findings that opened or got worse, by their id; nothing between two looks. The same on all ranks."""
        if now % EVERY or not self._wanted:
            return {}
        found = self._taken(now - EVERY - 1)
        if is_distributed():
            found = self._agreed(found, now)
        self._known |= found
        return found

    def _taken(self, until: int) -> dict[str, Finding]:
        judge = self._monitor.judge
        if judge is None or self._blind:
            return {}
        deadline = time.monotonic() + PATIENCE
        while judge.judged < until >= self._monitor.tap.first and not judge.failed:
            if time.monotonic() > deadline:  # its thread is gone, or the disk is: act without it
                self._blind = True
                self._monitor.report(notices.guard_blind(PATIENCE, self._monitor.step))
                return {}
            time.sleep(0.0005)
        self._monitor.hurry()  # for the look after this one
        taken = [entry for entry in list(judge.opened) if entry[0] <= until]
        for entry in taken:
            judge.opened.remove(entry)
        # What began before a rollback did not happen; and the rollback itself looks like a huge update.
        return {
            finding.id: finding
            for _, finding in taken
            if finding.id in self._wanted and finding.first_step > self.rolled_back + 1
        }

    def _agreed(self, found: dict[str, Finding], now: int) -> dict[str, Finding]:
        """Every rank has a judge of its own: what one has found counts for all."""
        device = self._monitor.tap.rows.parameters[0].device
        names = sorted(self._wanted)
        first = torch.tensor([float(found[name].first_step) if name in found else math.inf for name in names])
        first = first.to(device)
        dist.all_reduce(first, dist.ReduceOp.MIN)
        agreed = {name: int(step) for name, step in zip(names, first.tolist(), strict=True) if step < math.inf}
        return {
            name: found.get(name)
            or Finding(id=name, severity="warning", title="found on another rank", first_step=step)
            for name, step in agreed.items()
        }

    def began(self, findings: Iterable[str]) -> int | None:
        """The first step of what these findings are about; None for none."""
        return min((self._known[finding].first_step for finding in findings if finding in self._known), default=None)

    def tensors(self, findings: Iterable[str]) -> set[str]:
        """The tensors that these findings are about."""
        return {name for finding in findings if finding in self._known for name in self._known[finding].tensors}
