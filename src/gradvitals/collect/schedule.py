"""Decides what is due at a step: a function of its number, thinned to stay within a budget."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from gradvitals.config import Config

YOUNG_STEPS = 500
"""A run is read more often during its first steps: most faults are there from the start."""

FIRST_STEPS, FIRST_EVERY = 100, 10
YOUNG_EVERY = 25
AUDIT_YOUNG_EVERY = 50

FIRST_CHANGE_EVERY = 5
"""Weights are sampled at full readings and at the step before each, to compare directions; first, this often."""

WINDOW_EVERY = 20
"""One out of this many windows of steps is read, unless the config names the tensors to follow."""

NORM_EVERY = (1, 2, 5, 10, 20, 50)
"""Possible intervals between norms that cost a pass over the gradients."""

DEFAULT_SHARE = 0.005
"""The default of `Config.overhead_budget`: the share of a run's time for readings, besides plain steps."""

FREE_SECONDS = 0.05
"""Time for readings before the default budget applies: a short run of a small model is read completely."""

WARM_UP_STEPS = 10
REVIEW_STEPS = 50
"""Steps between reviews of the budget."""

MAX_EVERY = 10_000

PAUSE_FACTOR = 3.0
"""A step that took this many times the shortest one was interrupted, as by an evaluation or a checkpoint."""


def is_due(step: int, every: int, factor: int = 1, young_every: int | None = None) -> bool:
    """Returns whether a step is a multiple of `every`, of a smaller interval in a young run, or an early power of two.

    Args:
        step: The step.
        every: Steps between readings.
        factor: For what is part of only every `factor`-th reading.
        young_every: The largest interval while the run is young; None for 10, then 25.

    >>> [step for step in range(45) if is_due(step, 50)]
    [0, 1, 2, 4, 8, 10, 20, 30, 40]
    >>> [step for step in range(80, 160) if is_due(step, 50)]
    [80, 90, 100, 125, 150]
    >>> [step for step in range(440, 700) if is_due(step, 50)]
    [450, 475, 500, 550, 600, 650]
    """
    if step < YOUNG_STEPS:
        every = min(every, young_every or (FIRST_EVERY if step < FIRST_STEPS else YOUNG_EVERY))
    return step % (every * factor) == 0 or (step < every * factor and step & (step - 1) == 0)


class Due(NamedTuple):
    """The readings that are due at a step."""

    full: bool
    """A per-tensor reading."""
    detail: bool
    """The costly metrics with it."""
    audit: bool
    """A comparison of ranks."""
    norm: bool = True
    """The norm, even if it costs a pass over the gradients."""
    change: bool = True
    """A sample of the weights, before and after the step."""
    window: bool = True
    """The sliding windows."""


class CostTimer:
    """Adds up the time spent inside its `with` blocks, on the training thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._entered = 0.0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._entered = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._entered

    def take(self) -> float:
        """Returns the seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class ReadSchedule:
    """Decides what is due at a step, the same on all ranks.

    Args:
        config: The settings.
        audits: Whether there are ranks to compare.
        adapts: Whether readings may be thinned to stay within the budget: only in a single process.
    """

    def __init__(self, config: Config, *, audits: bool, adapts: bool) -> None:
        self.every = config.tensor_every
        """Steps between full readings."""
        self.norm_every = 1
        """Steps between norms that cost a pass over the gradients."""
        self.every_step = False
        """Whether every step must be read, because a Guard acts on it."""
        self._factor = config.detail_factor
        self._window = config.window_steps if config.window_tensors is None else None
        self._audit_every = config.audit_every if audits else None
        self._least_every = config.tensor_every
        self.share = config.overhead_budget or DEFAULT_SHARE
        self._adapts = adapts and self.share < 1
        self._costs = {True: [0.0, 0.0], False: [0.0, 0.0]}  # full or plain: seconds, steps
        self._wall = [0.0, 0.0]
        self._seen, self._next_review = 0, REVIEW_STEPS
        self._typical = self._plain_cost = 0.0
        self._free = FREE_SECONDS if config.overhead_budget is None else 0.0
        self.spent = 0.0
        """Share of the time that readings took, which led to the last change of the schedule."""

    def due(self, step: int) -> Due:
        """Returns what is due at this step."""
        return self.plan(step, 1)[0]

    def plan(self, first: int, count: int) -> list[Due]:
        """Returns what is due at each of these steps."""
        full = [self._is_full(step) for step in range(first, first + count + 1)]
        return [self._due(first + n, full[n], full[n + 1]) for n in range(count)]

    def _due(self, step: int, full: bool, next_full: bool) -> Due:
        window = self._window is None or step % (WINDOW_EVERY * self._window) < self._window
        audit = self._audit_every is not None and is_due(step, self._audit_every, young_every=AUDIT_YOUNG_EVERY)
        if full or audit:
            detail = full and is_due(step, self.every, self._factor, young_every=self._young_every(step))
            return Due(True, detail, audit, window=window)
        if self.every_step:
            return Due(False, False, False, window=window)
        change = next_full or (step < FIRST_STEPS and (step + 1) % FIRST_CHANGE_EVERY <= 1)
        return Due(False, False, False, step % self.norm_every == 0, change, window)

    def _is_full(self, step: int) -> bool:
        # However rare readings are, batches are inspected at each doubling of the steps.
        doubled = self._adapts and step >= FIRST_STEPS and step & (step - 1) == 0
        return doubled or is_due(step, self.every, young_every=self._young_every(step))

    def _young_every(self, step: int) -> int | None:
        times = self.every // self._least_every
        return None if times <= 1 else times * (FIRST_EVERY if step < FIRST_STEPS else YOUNG_EVERY)

    def account(self, *, full: bool, wall_seconds: float, cost_seconds: float, paid_norm: bool) -> bool:
        """Account for the cost of one step; returns whether this changed the schedule.

        A plain step that reads a norm costs c, a full reading C more, a step takes t. With norms every k steps and full
        readings every n, the share is (c / k + C / n) / t. Each of the two may take half of the budget.
        """
        if not self._adapts:
            return False
        self._free -= cost_seconds
        self._note_wall(wall_seconds)
        if (full or paid_norm) and self._seen > WARM_UP_STEPS:
            self._costs[full][0] += cost_seconds
            self._costs[full][1] += 1
        return self._review_if_due()

    def account_plain(self, walls: Sequence[float]) -> bool:
        """Account for plain steps that read no norm, given the seconds that each took; returns as `account` does."""
        if not self._adapts:
            return False
        for wall_seconds in walls:
            self._note_wall(wall_seconds)
        return self._review_if_due()

    def _note_wall(self, wall_seconds: float) -> None:
        self._seen += 1
        if self._seen > WARM_UP_STEPS:
            self._typical = min(self._typical, wall_seconds) if self._typical else wall_seconds
            self._wall[0] += min(wall_seconds, PAUSE_FACTOR * self._typical)  # do not count an evaluation
            self._wall[1] += 1

    def _review_if_due(self) -> bool:
        if self._seen < self._next_review:
            return False
        self._next_review = self._seen + REVIEW_STEPS
        return self._costs[True][1] >= 2 and self._free <= 0 and self._review()

    def _review(self) -> bool:
        step_seconds = self._wall[0] / self._wall[1]
        if self._costs[False][1]:  # otherwise only full readings had norms: keep the last value
            self._plain_cost = self._costs[False][0] / self._costs[False][1]
        plain = self._plain_cost
        full = self._costs[True][0] / self._costs[True][1]
        allowed = self.share * step_seconds / 2
        needed = plain / allowed if allowed else 1.0
        norm_every = next((k for k in NORM_EVERY if k >= needed), NORM_EVERY[-1])
        times = max(1, -(-max(0.0, full - plain) // (allowed * self._least_every)) if allowed else 1)
        every = int(min(times * self._least_every, MAX_EVERY))
        norm_every = 1 if self.every_step else norm_every
        now = (self.every, self.norm_every)
        # Thin at once, but read more often again only if there is ample room.
        changed = every > now[0] or norm_every > now[1] or 2 * every < now[0] or 2 * norm_every < now[1]
        if changed:
            self.every, self.norm_every = every, norm_every
            self.spent = sum(seconds for seconds, _ in self._costs.values()) / self._wall[0] if self._wall[0] else 0.0
            self._costs = {True: [0.0, 0.0], False: [0.0, 0.0]}
            self._wall = [0.0, 0.0]
        return changed and (self.every, self.norm_every) != now
