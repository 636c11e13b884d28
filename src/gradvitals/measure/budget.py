"""Staying within a budget: how many steps can be read, and how often single tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

from gradvitals.config import Config
from gradvitals.measure.clock import Lap

DEFAULT_SHARE = 0.03
"""What monitoring may take of the step's time where nobody has said otherwise."""

FREE_SECONDS = 10.0
"""Work that is done before the default takes hold: a short run is read whole, and no long one notices."""

UNSEEN = 2.5
"""What our work takes from training on a CPU, over the time that it takes itself.

Hooks are called and steps are counted where no clock runs, caches have to be filled again, threads wait for each other.
`gradvitals bench overhead` showed about twice what was meant to be spent where this was left out; the rest is caution.
"""

WARM_UP_STEPS = 5
MAX_EVERY = 10_000
STEP_EVERY = (1, 2, 5, 10, 20, 50)
"""Steps from one that is read to the next: rules that look every ten or fifty steps find theirs among them."""

LEAST_ROOM = 0.1
"""Share of the budget that full readings may take, whatever the others do, where every step has to be read."""

TENSORS_ROOM = 0.5
"""The same where steps may be passed over."""


class Cadence(NamedTuple):
    """How often what is read."""

    every: int
    """Steps from one full reading to the next."""
    step_every: int = 1
    """Steps from one that is read at all to the next."""


class Budget:
    """Measures what monitoring costs and proposes a cadence.

    A step that is read costs ``fixed`` seconds, a full reading ``extra`` on top. With a full reading every n steps and
    any reading every k steps of t seconds, the share is ``(fixed / k + extra / n) / t``. Full readings get what the
    others leave, at least a part of the budget, and n is the smallest multiple of what the user asked for that fits;
    then k is the smallest of `STEP_EVERY`. Steps that are read because they stand out come on top.

    Args:
        share: The budget.
        every: The cadence of full readings that was asked for.
        thins_steps: Whether steps may be passed over; else k is 1, and the budget may not be kept.
        thins_tensors: Whether n may be larger than what was asked for.
        free_seconds: What may be spent before anything is thinned.
    """

    def __init__(
        self,
        share: float,
        every: int,
        *,
        thins_steps: bool = False,
        thins_tensors: bool = True,
        free_seconds: float = 0.0,
    ) -> None:
        self.share = share
        self.least_every = every
        self.thins_steps = thins_steps
        self.thins_tensors = thins_tensors
        self.free_seconds = free_seconds
        self.fixed = 0.0
        """Share of a step's time that what is read at any step took when the cadence was last proposed."""
        self._fixed_seconds = 0.0
        self._seen = 0
        self._restart()

    def _restart(self) -> None:
        self._wall, self._steps = 0.0, 0
        self._cost = {True: 0.0, False: 0.0}
        self._count = {True: 0, False: 0}

    def add(self, *, full: bool, wall_seconds: float, cost_seconds: float, steps: int = 1) -> None:
        """Account for one step that was read, and those passed over before it."""
        self._seen += 1
        self.free_seconds -= cost_seconds
        if self._seen > WARM_UP_STEPS:  # the first steps pay for allocation and compilation
            self._wall += wall_seconds
            self._steps += steps
            self._cost[full] += cost_seconds
            self._count[full] += 1

    def charge(self, lap: Lap, own_seconds: float, *, full: bool) -> None:
        """Account for one step that was read: what it took, and what its readings took on the writer's thread."""
        hidden = bool(lap.events)  # beside a GPU the host's threads are not what training waits for
        cost = lap.cost_seconds() if hidden else UNSEEN * (lap.cost_seconds() + own_seconds)
        self.add(full=full, wall_seconds=lap.wall_seconds, cost_seconds=cost, steps=lap.steps)

    @property
    def spent(self) -> float:
        """Share of the time that monitoring took since the last change of cadence."""
        return sum(self._cost.values()) / self._wall if self._wall else 0.0

    def propose(self, now: Cadence) -> Cadence:
        """The cadence to use from here on, given the one in use."""
        readings = sum(self._count.values())
        if self.free_seconds > 0 or self._count[True] < 3 or readings < 10:
            return now
        step_seconds = self._wall / self._steps
        if self._count[False]:  # else all that is read is read in full, and what is known of the others still holds
            self._fixed_seconds = self._cost[False] / self._count[False]
        fixed = self._fixed_seconds
        extra = self._cost[True] / self._count[True] - fixed
        allowed = self.share * step_seconds
        self.fixed = fixed / step_seconds
        wanted = self._wanted(fixed, extra, allowed)
        if any(old < new or new < old / 2 for old, new in zip(now, wanted, strict=True)):
            self._restart()
            return wanted
        return now

    def _wanted(self, fixed: float, extra: float, allowed: float) -> Cadence:
        least = (TENSORS_ROOM if self.thins_steps else LEAST_ROOM) * allowed
        every = self.least_every
        if self.thins_tensors:
            times = math.ceil(extra / max(allowed - fixed, least) / every)
            every = min(max(times, 1) * every, MAX_EVERY)
        step_every = 1
        if self.thins_steps:
            left = max(allowed - extra / every, LEAST_ROOM * allowed)
            step_every = next((steps for steps in STEP_EVERY if steps >= fixed / left), STEP_EVERY[-1])
        return Cadence(every, step_every)


def budget_for(config: Config, *, alone: bool, on_host: bool) -> Budget | None:
    """The budget of a run; None where there is no limit.

    Args:
        config: What was asked for.
        alone: Whether a single process trains the model with one optimizer; ranks must all read the same steps.
        on_host: Whether the model is in the host's memory. Beside a GPU, steps that are not read in full cost next to
            nothing, and none is passed over.
    """
    share = config.overhead_budget
    thins_steps = alone and on_host
    if share is not None and share >= 1:
        return None
    if share is not None:
        # Who allows more than the default is not to get less from the start.
        free = FREE_SECONDS if thins_steps and share >= DEFAULT_SHARE else 0.0
        return Budget(share, config.tensor_every, thins_steps=thins_steps, free_seconds=free)
    if not thins_steps:
        return None
    return Budget(
        DEFAULT_SHARE,
        config.tensor_every,
        thins_steps=True,
        thins_tensors=config.tensor_every == Config().tensor_every,  # else it was asked for
        free_seconds=FREE_SECONDS,
    )
