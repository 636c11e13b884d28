"""Warmup and decay as a function of a sequence of GSNR averages and losses: no torch, no clock, no thread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.history import Average, Series, fall, same_size
from gradvitals.errors import expect

DECLINE = 2.0
"""Power of the step number that a GSNR may fall with by itself, as in the rule `sudden_gsnr_drop`."""

ENOUGH_LOSSES = 50
"""Losses needed to tell whether they still fall."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PaceSettings:
    """How a `Pace` warms up and decays. See `GSNRScheduler` for what they mean."""

    warmup_steps: int = 0
    warmup_start: float = 0.01
    warmup_in_schedule: bool = False
    max_extension: int | None = None
    near_zero: float | None = 0.5
    decay: float = 1 / 3
    drop: float = 4.0
    sudden_drop: float = 3.0
    plateau: bool = True
    readings: int = 5
    in_a_row: int = 3
    cooldown: int = 500
    min_factor: float = 0.01

    def __post_init__(self) -> None:
        expect(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "a number of steps, 0 or more")
        expect(0 < self.warmup_start <= 1, "warmup_start", self.warmup_start, "a share over 0, up to 1")
        limit = self.max_extension
        expect(limit is None or limit >= 0, "max_extension", limit, "a number of steps, 0 or more, or None")
        near = self.near_zero
        expect(near is None or near > 0, "near_zero", near, "a GSNR over 0, or None")
        expect(0 < self.decay <= 1, "decay", self.decay, "a factor over 0, up to 1 (which turns decay off)")
        for name in ("drop", "sudden_drop"):
            expect(getattr(self, name) > 1, name, getattr(self, name), "a factor over 1 that the GSNR falls by")
        expect(self.readings >= 2, "readings", self.readings, "2 or more: one has no interval")
        expect(self.in_a_row >= 1, "in_a_row", self.in_a_row, "1 or more")
        expect(self.cooldown >= 0, "cooldown", self.cooldown, "a number of steps, 0 or more")
        expect(0 < self.min_factor <= 1, "min_factor", self.min_factor, "a factor over 0, up to 1")

    @property
    def longest_extension(self) -> int:
        """Steps that the warmup may be held for."""
        return 4 * self.warmup_steps if self.max_extension is None else self.max_extension


class Decision(NamedTuple):
    """Something that a `Pace` has decided."""

    kind: str
    pattern: str
    """The finding that it answers to, by its id."""
    reason: str
    before: dict[str, Any]
    after: dict[str, Any]


@dataclass
class Pace:
    """The factor on the learning rate. `tick` once a step; `take` whatever was read, in the order of steps.

    Steps in averages and in `tick` are the monitor's. How many were made is counted here, so that a rate that went
    back to an earlier state with the rest of training counts on from there.
    """

    settings: PaceSettings = field(default_factory=PaceSettings)
    made: int = 0
    """Steps of training made."""
    ramp: int = 0
    """Steps of the warmup that are behind."""
    held: int = 0
    """Steps that the warmup was held for."""
    holding: bool = False
    decayed: float = 1.0
    """Factor of all decays so far."""
    decayed_at: int = -1
    """`made` at the last decay; -1 before the first."""
    floor: int = 0
    """The monitor's step from which on averages are compared: after warmup, after the last decay."""
    best: dict[str, Any] = field(default_factory=dict)
    """The average with the highest lower end since then."""
    recent: list[dict[str, Any]] = field(default_factory=list)
    """Averages since then, for the newest one that shares no reading with the present."""
    faded_for: int = 0
    dropped_for: int = 0
    losses: Series = field(default_factory=Series)

    # -- the factor ---------------------------------------------------------------------------------------------

    @property
    def warm(self) -> bool:
        """Whether the warmup is over."""
        return self.ramp >= self.settings.warmup_steps

    @property
    def factor(self) -> float:
        """What the schedule's learning rate is multiplied by in the step to come."""
        warmup = self._ramp_at(self.ramp)
        if self.settings.warmup_in_schedule:
            warmup /= self._ramp_at(self.ramp + self.held)
        return warmup * self.decayed

    def _ramp_at(self, step: int) -> float:
        total, start = self.settings.warmup_steps, self.settings.warmup_start
        return 1.0 if step >= total else start + (1 - start) * step / total

    def tick(self, now: int) -> list[Decision]:
        """A step was made; `now` is the monitor's number of the one to come."""
        self.made += 1
        if self.warm:
            return []
        if self.holding and self.held < self.settings.longest_extension:
            self.held += 1
            if self.held < self.settings.longest_extension:
                return []
            return [self._resume(f"the warmup was held for {self.held} steps, which is the limit")]
        self.ramp += 1
        if self.ramp == self.settings.warmup_steps:
            self._begin_anew(now)
        return []

    # -- what was read ------------------------------------------------------------------------------------------

    def see_loss(self, step: int, loss: float) -> None:
        """The loss of a step, seen before the average of that step."""
        self.losses.push(step, loss)

    def take(self, average: Average, source: str, now: int) -> list[Decision]:
        """Decide on a new average; `now` is the monitor's number of the step to come."""
        if average.count < self.settings.readings:
            return []
        if not self.warm:
            return self._pace_warmup(average, source)
        return self._pace_decay(average, source, now)

    def _pace_warmup(self, average: Average, source: str) -> list[Decision]:
        near = self.settings.near_zero
        silent = average.low <= 0 <= average.high and (near is None or average.high * average.per_step < near)
        if silent == self.holding or self.held >= self.settings.longest_extension:
            return []
        told = _told(average, source)
        if not silent:
            return [self._resume(f"{told} is above 0: the warmup goes on", average)]
        self.holding = True
        most, length = self.settings.longest_extension - self.held, self.settings.warmup_steps + self.held
        held = f"the warmup is held at {self.factor:.3g} of the rate, for {most} steps at most"
        before = {"factor": self.factor, "warmup_steps": length}
        after = {"factor": self.factor, "warmup_steps": length + most} | _figures(average)
        reason = f"{told} cannot be told from 0: {held}"
        return [Decision("warmup_extended", "near_zero_initial_gsnr", reason, before, after)]

    def _resume(self, reason: str, average: Average | None = None) -> Decision:
        self.holding = False
        length = self.settings.warmup_steps + self.held
        figures = {} if average is None else _figures(average)
        before = {"factor": self.factor, "warmup_steps": self.settings.warmup_steps}
        after = {"factor": self.factor, "warmup_steps": length, "held": self.held} | figures
        return Decision("warmup_resumed", "near_zero_initial_gsnr", reason, before, after)

    def _pace_decay(self, now: Average, source: str, step: int) -> list[Decision]:
        if now.begins < self.floor:
            return []
        last = self.recent[-1] if self.recent else None
        if last is not None and not (last["source"] == source and same_size(last["batch_size"], now.batch_size)):
            self._begin_anew(self.floor)  # another quantity, which nothing remembered can be held against
        before = next((kept for kept in reversed(self.recent) if kept["step"] < now.begins), None)
        faded = bool(self.best) and self.best["step"] < now.begins and now.high * self.settings.drop < self.best["low"]
        level = not self.settings.plateau or self._loss_is_level(now.step)
        self.faded_for = self.faded_for + 1 if faded and level else 0
        self.dropped_for = self.dropped_for + 1 if before is not None and self._is_sudden(before, now) else 0
        cool = self.decayed_at < 0 or self.made - self.decayed_at >= self.settings.cooldown
        able = self.settings.decay < 1 and self.decayed > self.settings.min_factor
        if cool and able and before is not None and self.dropped_for >= self.settings.in_a_row:
            return [self._decay(now, source, step, before, "sudden_gsnr_drop")]
        if cool and able and self.faded_for >= self.settings.in_a_row:
            return [self._decay(now, source, step, self.best, "decay_due")]
        self._remember(now, source)
        return []

    def _is_sudden(self, before: Mapping[str, Any], now: Average) -> bool:
        """Whether it fell further than a decline with the length of the run explains."""
        usual = (before["middle"] / now.middle) ** DECLINE if now.middle > 0 else 1.0
        return bool(before["established"] and now.high * self.settings.sudden_drop < before["low"] * usual)

    def _loss_is_level(self, step: int) -> bool:
        """Whether the loss of the second half of the run, or since the last decay, no longer falls."""
        losses = _without_outliers(self.losses.since(max(step / 2, self.floor))[1])
        if len(losses) < ENOUGH_LOSSES:
            return False
        fell, error = fall(losses)
        return fell < max(2 * error, 0.01 * abs(float(losses.mean())))

    def _decay(self, now: Average, source: str, step: int, reference: Mapping[str, Any], pattern: str) -> Decision:
        before, self.decayed = self.factor, max(self.settings.min_factor, self.decayed * self.settings.decay)
        self.decayed_at = self.made
        fell = (
            f"{_told(now, source)} is down from {reference['value']:.3g} (at least {reference['low']:.3g}) "
            f"at step {reference['step']}"
        )
        why = "and the loss no longer falls" if pattern == "decay_due" and self.settings.plateau else ""
        why = "at once, more than a decline explains" if pattern == "sudden_gsnr_drop" else why
        decision = Decision(
            "decay",
            pattern,
            f"{fell} {why}".strip() + f": the learning rate goes to {self.factor:.3g} of the schedule's",
            {"factor": before, "gsnr": reference["value"], "gsnr_low": reference["low"], "at": reference["step"]},
            {"factor": self.factor} | _figures(now),
        )
        self._begin_anew(step)
        return decision

    def _begin_anew(self, floor: int) -> None:
        self.floor, self.best, self.recent, self.faded_for, self.dropped_for = floor, {}, [], 0, 0

    def _remember(self, now: Average, source: str) -> None:
        kept = {"step": now.step, "middle": now.middle, "value": now.value, "low": now.low, "source": source}
        kept |= {"established": now.established, "batch_size": now.batch_size}
        if now.established and (not self.best or now.low > self.best["low"]):
            self.best = kept
        self.recent = [*self.recent[-99:], kept]

    # -- resuming -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything but the settings, as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "settings"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        for name, value in state.items():
            setattr(self, name, Series(**value) if name == "losses" else _copied(value))


def _told(average: Average, source: str) -> str:
    size = f", batch {average.batch_size:g}" if math.isfinite(average.batch_size) else ""
    return f"GSNR {average.value:.3g} [{average.low:.3g}, {average.high:.3g}] ({source}{size}) at step {average.step}"


def _figures(average: Average) -> dict[str, Any]:
    told = {"gsnr": average.value, "gsnr_low": average.low, "gsnr_high": average.high, "at": average.step}
    return told if math.isnan(average.batch_size) else told | {"batch_size": average.batch_size}


def _without_outliers(losses: Floats) -> Floats:
    if not len(losses):
        return losses
    middle = float(np.median(losses))
    reach = 6 * float(np.median(np.abs(losses - middle)))
    return np.asarray(np.clip(losses, middle - reach, middle + reach))


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else dict(value) if isinstance(value, dict) else value
