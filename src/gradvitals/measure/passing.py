"""Passing over steps: where they are short, not all of them are read.

What a step that is passed over costs is a few calls. Those that stand out are read after all: a loss that the loop
tells from the host's memory, and the norm that it clips by, cost nothing to have, and are looked at in every step
before the optimizer makes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from gradvitals.measure.cadence import Due
from gradvitals.measure.station import Station

if TYPE_CHECKING:
    from gradvitals.measure.tap import Tap

HORIZON = 100
"""Values that the mean and the spread go back over, about."""

LEAST_SEEN = 20
"""Values before anything can stand out."""

DEVIATIONS = 6.0
"""Standard deviations over the mean from which a value stands out: noise with heavy tails stays below, as a rule."""


@dataclass
class Expectation:
    """Mean and spread of the last values of one number.

    >>> usual = Expectation(least_ratio=2.0)
    >>> [usual.stands_out(value) for value in [1.0, 1.1] * 10 + [1.9, 2.5, float("nan")]][-4:]
    [False, False, True, True]
    """

    least_ratio: float
    """What stands out is at least so many times the mean: where there is hardly any spread, it says nothing."""
    seen: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def stands_out(self, value: float) -> bool:
        """Whether a value is not finite, or far over what is usual; what is finite counts from here on."""
        if not math.isfinite(value):
            return True
        above = value - self.mean
        least = max(DEVIATIONS * math.sqrt(self.variance), (self.least_ratio - 1) * abs(self.mean))
        far = self.seen >= LEAST_SEEN and above > least
        self.seen += 1
        weight = 1 / min(self.seen, HORIZON)
        self.mean += weight * above
        self.variance = (1 - weight) * (self.variance + weight * above * above)
        return far


class Passing:
    """Says which steps of a run are passed over, and takes the Tap through them. There is one optimizer then."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self.loss = Expectation(least_ratio=1.05)
        self.norm = Expectation(least_ratio=2.0)
        self._reads_all = False
        self._next_read = 0
        """The next step that is read, as things stand."""

    def read_all(self) -> None:
        """From the next step on pass over none: somebody acts on what is read."""
        self._reads_all, self._next_read = True, self._tap.step

    def passes(self, due: Due) -> bool:
        """Whether the step that begins is passed over."""
        tap = self._tap
        # A step that a scaler skips must be seen.
        if due.read or self._reads_all or tap.count_nonfinite or tap.assumed_scaler is not None:
            return False
        self._next_read = tap.calendar.next_read(tap.step)
        return True

    def look_out(self, usual: Expectation, value: Tensor | float | None) -> None:
        """A number is at hand: where it stands out, this step and those that follow are read."""
        if value is not None and usual.stands_out(float(value)):
            self._tap.draft.passed_over = False
            self._tap.calendar.wake(self._tap.step)

    def pass_on(self, station: Station) -> None:
        """The optimizer has made a step that is passed over: the next one is another, or must find what it needs."""
        tap = self._tap
        to_go = self._next_read - tap.step
        if to_go <= 2:  # directions are compared with those of the step before
            station.changes.look()
        else:
            station.changes.forget()
        if to_go <= 1:
            tap.leave(station)
            return
        station.sentinel.reset()
        tap.go_past()
        tap.draft.step = tap.step
        tap.draft.observed.told.clear()
