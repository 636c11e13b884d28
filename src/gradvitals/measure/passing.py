"""Passing over steps: where they are short, not all of them are read.

Those that stand out are read after all: a loss that the loop tells from the host's memory, and the norm that it clips
by, cost nothing to have, and are looked at in every step before the optimizer makes it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradvitals.measure.station import Station
from gradvitals.types import Reading

if TYPE_CHECKING:
    from gradvitals.measure.tap import Tap

HORIZON = 100
"""Values that the mean and the spread go back over, about."""

LEAST_SEEN = 20
"""Values before anything can stand out."""

LOOKS = 2
"""Steps before one that is read after which weights are looked at: its direction is compared with that of the last."""

PAUSE_STEPS = 500
"""Steps from one that stood out to the next after which those that follow are read too."""

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
        far = False
        if self.seen >= LEAST_SEEN:
            least = max(DEVIATIONS * math.sqrt(self.variance), (self.least_ratio - 1) * abs(self.mean))
            far = above > least
            above = min(above, 2 * least)  # one that is far out must not make the next one look usual
        self.seen += 1
        weight = 1 / min(self.seen, HORIZON)
        self.mean += weight * above
        self.variance = (1 - weight) * (self.variance + weight * above * above)
        return far


class Passing:
    """Takes the Tap through the steps that are passed over. There is one optimizer then.

    The interpreter finds its caches empty after each pass, and takes long for every line: so a step is counted, its
    loss and norm are looked at, and that is all.
    """

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self.asleep = False
        """Whether the step in progress is passed over."""
        self.loss = Expectation(least_ratio=1.05)
        self.norm = Expectation(least_ratio=2.0)
        self._asleep_since = self._next_read = 0
        self._may_follow_up = 0
        """From which step on those that follow one that stands out may be read too."""
        self._told: list[tuple[float | None, float | None]] = []
        """Losses that the loop has told in the step in progress, and the samples behind each."""
        self._told_last: list[tuple[float | None, float | None]] = []
        """The same of the last step that was passed over."""
        self._passed = -1
        """Which that is."""

    @property
    def allowed(self) -> bool:
        """Whether any step may be passed over."""
        return self._tap.budget is not None and self._tap.budget.thins_steps

    def read_all(self) -> None:
        """Pass over none from here on: somebody acts on what is read, or must see every step."""
        if self._tap.budget is not None:
            self._tap.budget.thins_steps = False
        self._tap.calendar.step_every = 1
        self.wake()

    def fall_asleep(self) -> None:
        """A step has been read, and the next one begins: pass it over, with those that follow, if none is due."""
        tap = self._tap
        if tap.calendar.step_every == 1 or tap.count_nonfinite:
            return
        if tap.assumed_scaler is not None or any(station.scaler is not None for station in tap.stations):
            self.read_all()  # a step that a scaler skips must be seen
            return
        self._asleep_since, self._next_read = tap.step, tap.calendar.next_read(tap.step)
        if self._next_read == tap.step:
            return
        self.asleep = True
        for station in tap.stations:
            station.sentinel.rest()
            if self._next_read - tap.step > LOOKS:
                station.changes.forget()

    def count_step(self, station: Station) -> bool:
        """The optimizer has made a step that is passed over. Returns whether there is more to do than to count it."""
        self._passed = self._tap.step
        self._tap.step += 1
        self._told, self._told_last = self._told_last, self._told
        self._told.clear()
        station.sentinel.note_left()
        return self._next_read - self._tap.step < LOOKS

    def go_on(self, station: Station) -> None:
        """The next step that is read is near: see where the weights are, and prepare for it when it comes."""
        self._tap.attempt("changes", station.changes.look)
        if self._tap.step >= self._next_read:
            self._tap.arm(station, self._tap.step)
            self.wake()

    def hear(self, loss: Tensor | float | None, batch_size: float | None) -> None:
        """The loop tells a loss: where it stands out, this step and those that follow are read."""
        if isinstance(loss, Tensor):
            loss = float((loss.detach().float().mean() if loss.dim() else loss).item())
        value = None if loss is None else float(loss)
        size: Any = batch_size
        if size is not None and not (isinstance(size, Real) and float(size) > 0):
            self.wake()  # for others to say what is wrong with it
        elif not self.look(self.loss, value):
            self._told.append((value, batch_size))

    def look(self, usual: Expectation, value: float | None) -> bool:
        """A number is at hand. Returns whether it stands out, and the step is read."""
        if value is None or not usual.stands_out(value):
            return False
        step = self._tap.step
        if step >= self._may_follow_up:  # where much stands out, not all that follows can be read
            self._tap.calendar.wake(step)
            self._may_follow_up = step + PAUSE_STEPS
        self.wake()
        return True

    def wake(self) -> None:
        """Read the step in progress, from where it is."""
        if not self.asleep:
            return
        self.asleep = False
        tap = self._tap
        adds_up = tap.draft.observed.adds_up
        tap.go_past(self._asleep_since)
        for station in tap.stations:
            station.sentinel.resume()
        passes = max(station.sentinel.backwards for station in tap.stations)
        tap.draft.observed.adds_up = adds_up
        for loss, size in self._told:
            tap.draft.observed.note(loss, size, passes)
        tap.observes = len(self._told)
        self._told.clear()

    def last_step(self) -> list[Reading]:
        """What is known of the last step of a run, where it was passed over: that it was made, and its loss."""
        if self._passed != self._tap.step - 1:
            return []
        told = [loss for loss, _ in self._told_last if loss is not None]
        # Of several micro-batches it would have to be known what each of them weighs.
        return [Reading(step=self._passed, time=time.time(), values={"loss": told[0]} if len(told) == 1 else {})]

    def forget(self) -> None:
        """The run goes on from another step."""
        self._passed = -1
        if self.asleep:
            self.asleep = False
            self._told.clear()
            for station in self._tap.stations:
                station.sentinel.resume()
