"""Staying within a budget: how often per-tensor readings can be afforded."""

from __future__ import annotations

import math

from gradvitals.measure.clock import Lap

WARM_UP_STEPS = 5
MAX_EVERY = 10_000

LEAST_ROOM = 0.1
"""Share of the budget that full readings may take, whatever the others do."""


class Budget:
    """Measures what monitoring costs and proposes a cadence.

    A step costs ``fixed`` seconds, a full reading ``extra`` on top. With a full reading every n steps of t seconds
    the share is ``(fixed + extra / n) / t``; the smallest n that keeps it under the budget is proposed, never below
    the cadence the user asked for. Where ``fixed`` alone is over the budget, no n would do: then full readings are kept
    to a small part of it.
    """

    def __init__(self, share: float, every: int) -> None:
        self.share = share
        self.least_every = every
        self.fixed = 0.0
        """Share of the step's time that what is read at every step took when the cadence was last proposed."""
        self._seen = 0
        self._restart()

    def _restart(self) -> None:
        self._wall = 0.0
        self._cost = {True: 0.0, False: 0.0}
        self._count = {True: 0, False: 0}

    def add(self, *, full: bool, wall_seconds: float, cost_seconds: float) -> None:
        """Account for one step."""
        self._seen += 1
        if self._seen > WARM_UP_STEPS:  # the first steps pay for allocation and compilation
            self._wall += wall_seconds
            self._cost[full] += cost_seconds
            self._count[full] += 1

    def charge(self, lap: Lap, own_seconds: float, *, full: bool) -> None:
        """Account for one step: what it took, and what its readings took on the writer's thread."""
        hidden = bool(lap.events)  # beside a GPU the host's threads are not what training waits for
        cost = lap.cost_seconds() + (0.0 if hidden else own_seconds)
        self.add(full=full, wall_seconds=lap.wall_seconds, cost_seconds=cost)

    @property
    def spent(self) -> float:
        """Share of the time that monitoring took since the last change of cadence."""
        return sum(self._cost.values()) / self._wall if self._wall else 0.0

    def propose(self, every: int) -> int:
        """The cadence to use from here on, given the one in use."""
        steps = sum(self._count.values())
        if self._count[True] < 3 or steps < 10:
            return every
        step_seconds = self._wall / steps
        fixed = self._cost[False] / self._count[False] if self._count[False] else 0.0
        extra = self._cost[True] / self._count[True] - fixed
        allowed = self.share * step_seconds
        self.fixed = fixed / step_seconds
        wanted = math.ceil(extra / max(allowed - fixed, LEAST_ROOM * allowed))
        wanted = min(max(wanted, self.least_every), MAX_EVERY)
        if every < wanted or wanted < every / 2:
            self._restart()
            return wanted
        return every
