"""Passing over steps: where they are short, not all of them are read.

Those that stand out are read after all: a loss that the loop tells from the host's memory, and the norm that it clips
by, cost nothing to have, and are looked at in every step before the optimizer makes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from gradvitals.measure.observed import Observation
from gradvitals.measure.station import Station

if TYPE_CHECKING:
    from gradvitals.measure.tap import Tap

HORIZON = 100
"""Values that the mean and the spread go back over, about."""

LEAST_SEEN = 20
"""Values before anything can stand out."""

LOOKS = 2
"""Steps before one that is read after which weights are looked at: its direction is compared with that of the last."""

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
    """Takes the Tap through the steps that are passed over. There is one optimizer then.

    In such a step the interpreter finds its caches empty after each pass, and every line of Python takes ten times as
    long as it should: so a step is counted, its loss and norm are looked at, and that is all.
    """

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self.asleep = False
        """Whether the step in progress is passed over."""
        self.loss = Expectation(least_ratio=1.05)
        self.norm = Expectation(least_ratio=2.0)
        self._reads_all = False
        self._asleep_since = self._next_read = 0
        self._told: list[Observation] = []
        """What the loop has told in the step in progress."""

    def read_all(self) -> None:
        """Pass over none from here on: somebody acts on what is read."""
        self._reads_all = True
        self.wake()

    def fall_asleep(self) -> None:
        """A step has been read, and the next one begins: pass it over, with those that follow, if none is due."""
        tap = self._tap
        # A step that a scaler skips must be seen.
        if tap.calendar.step_every == 1 or self._reads_all or tap.count_nonfinite or tap.assumed_scaler is not None:
            return
        self._asleep_since, self._next_read = tap.step, tap.calendar.next_read(tap.step)
        if self._next_read == tap.step:
            return
        self.asleep = True
        for station in tap.stations:
            station.sentinel.rest()
            if self._next_read - tap.step > LOOKS:
                station.changes.forget()

    def ends_with_this(self) -> bool:
        """The optimizer has made a step that is passed over. Returns whether there is more to do than to count it."""
        self._tap.step += 1
        self._told.clear()
        return self._next_read - self._tap.step < LOOKS

    def go_on(self, station: Station) -> None:
        """The next step that is read is near: see where the weights are, and prepare for it when it comes."""
        station.changes.look()
        if self._tap.step >= self._next_read:
            self._tap.arm(station, self._tap.step)
            self.wake()

    def hear(self, loss: Tensor | float | None, batch_size: float | None) -> None:
        """The loop tells a loss: where it stands out, this step and those that follow are read."""
        try:
            value = loss if loss is None else loss.item() if isinstance(loss, Tensor) else float(loss)
        except Exception:  # that it is no number is for others to say
            value = math.nan
        if not self.look(self.loss, value):
            self._told.append(Observation(value, batch_size, 0))

    def look(self, usual: Expectation, value: float | None) -> bool:
        """A number is at hand. Returns whether it stands out, and the step is read."""
        if value is None or not usual.stands_out(value):
            return False
        self._tap.calendar.wake(self._tap.step)
        self.wake()
        return True

    def wake(self) -> None:
        """Read the step in progress, from where it is."""
        if self.asleep:
            self.asleep = False
            self._tap.go_past(self._asleep_since)
            self._tap.draft.observed.told, self._told = self._told, []
            for station in self._tap.stations:
                station.sentinel.resume()
