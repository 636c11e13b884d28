"""Rules about the batch: too small or too large for the noise, micro-batches that are all the same, too few of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradvitals.diagnose.averages import Streak
from gradvitals.diagnose.loss import fall, losses_since
from gradvitals.diagnose.rule import Rule, Sign, register
from gradvitals.diagnose.signal import lr_rises
from gradvitals.diagnose.step import Step
from gradvitals.types import Severity


@register
@dataclass
class BatchTooLarge(Rule):
    """The batch is far over the noise scale: most of its samples say what the others said."""

    id = "batch_too_large"
    expects_fall = True
    judges_after = 60
    every_step = False
    needs = ("noise_scale",)
    closes_after = 100

    factor: float = 2.0
    """Batch over the upper end of the noise scale from which it is worth knowing."""
    far: float = 5.0
    """The same for a warning: five of six samples are spent on nothing."""
    in_a_row: int = 5
    """Readings at which it must be so."""
    lasting: int = 20
    """Steps over which it must be so: every run begins with a small noise scale."""
    settled: int = 10
    """Steps since the learning rate last rose: a warmup keeps the noise scale small."""
    readings: int = 5
    """Readings in the average at least."""

    since: int = field(default=-1, init=False)
    """Since when it is so; -1 where it is not."""
    seen_for: int = field(default=0, init=False)
    far_since: int = field(default=-1, init=False)
    """Since which reading it is so far; -1 where it is not."""
    far_for: int = field(default=0, init=False)
    """Readings at which it was so far."""
    begun: int = field(default=-1, init=False)
    """The first reading at which it was so; -1 where it is not."""

    def look(self, step: Step) -> Sign | None:
        """Fires once it has lasted. The batch over the noise scale is the GSNR at that batch."""
        average = step.average
        if average is None or average.count < self.readings or math.isnan(average.step_size):
            return None
        ratio = average.low * average.per_step if average.established else 0.0
        self.since = _begun(self.since, ratio > self.factor, average.begins)
        self.seen_for = self.seen_for + 1 if ratio > self.factor else 0
        self.far_for = self.far_for + 1 if ratio > self.far else 0
        self.begun = _begun(self.begun, ratio > self.factor, step.number)
        self.far_since = _begun(self.far_since, ratio > self.far, step.number)
        lasted = self.seen_for >= self.in_a_row and step.number - self.begun >= self.lasting
        if not lasted or lr_rises(step, self.settled):
            return None
        far = self.far_for >= self.in_a_row and step.number - self.far_since >= self.lasting
        noise_scale = average.batch_size / average.value
        seen = dict[str, Any](batch_size=average.step_size, noise_scale=noise_scale, ratio=ratio)
        seen |= {"noise_scale_high": average.batch_size / average.low, "proposed": math.ceil(2 * noise_scale)}
        seen |= {"wasted": f"{100 * ratio / (1 + ratio):.0f} %", "source": step.history.averages.source}
        return Sign(
            severity="warning" if far else "info",
            seen=seen,
            expected={"batch_size": average.batch_size / average.low},
            since=self.since,
            causes=("early",) if step.number < 500 else (),
        )


@register
@dataclass
class BatchTooSmall(Rule):
    """The batch is far below the noise scale: a step goes where its few samples happen to point."""

    id = "batch_too_small"
    expects_fall = True
    judges_after = 60
    needs = ("noise_scale",)
    closes_after = 200

    factor: float = 10.0
    """Lower end of the noise scale over the batch from which it is worth knowing."""
    far: float = 100.0
    """The same for a warning, given where the loss does not fall either."""
    readings: int = 10
    """Readings in the average at least."""
    tiny: int = 4
    """A batch of so few samples is told without a noise scale, where its loss swings."""
    least: int = 2
    """The same for a warning."""
    swing: float = 0.05
    """Standard deviation of the loss from step to step over its mean, for that."""

    since: int = field(default=-1, init=False)
    """Since when it is so; -1 where it is not."""

    def look(self, step: Step) -> Sign | None:
        """Fires when two averages that share no reading agree, or at every tenth step for a tiny batch."""
        size = step.general.batch_size
        if size is None:
            return None
        average = step.average
        if average is None or step.history.averages.source == "adam":  # whose GSNR is too low while gradients shrink
            return self._tiny(step, size) if step.number % 10 == 0 else None
        if average.count < self.readings or math.isnan(average.high):
            return None
        most = average.high * average.per_step
        self.since = _begun(self.since, most * self.factor < 1, step.number)
        if self.since < 0 or average.begins <= self.since:
            return self._tiny(step, size) if average.low * average.per_step <= 1 / self.factor else None
        ratio = 1 / most if most > 0 else math.inf
        losses = losses_since(step, step.number / 2)
        fell, error = fall(losses)
        harmful = ratio > self.far and fell < 2 * error and np.mean(losses) > 0.5 * step.history["loss"].values[0]
        seen = dict[str, Any](batch_size=size, ratio=ratio, noise_scale_low=ratio * size)
        seen |= {"readings": average.count, "proposed": 4 * size, "lr": step.value("lr")}
        return Sign(
            severity="warning" if harmful else "info",
            seen=seen | {"grounds": f"the noise scale is {min(ratio, 1e6):.3g} times as large or more"},
            expected={"batch_size": ratio * size},
            since=self.since,
        )

    def _tiny(self, step: Step, size: float) -> Sign | None:
        if size > self.tiny:
            return None
        losses = np.append(step.history["loss"].last(50), step.value("loss"))
        if len(losses) < 50:
            return None
        swing = float(np.sqrt(np.mean(np.diff(losses) ** 2) / 2) / abs(np.mean(losses)))
        if not swing > self.swing:
            return None
        grounds = f"losses, as observed, scatter by {100 * swing:.0f} % of their mean"
        seen = {"batch_size": size, "swing": swing, "proposed": 8 * size, "grounds": grounds, "lr": step.value("lr")}
        severity: Severity = "warning" if size <= self.least else "info"
        return Sign(severity=severity, seen=seen, expected={"swing": self.swing}, causes=("tiny",))


@register
@dataclass
class EstimatorUnreliable(Rule):
    """The GSNR is asked of too few micro-batches or readings: its interval spans more than a decade."""

    id = "estimator_unreliable"
    judges_after = 200
    every_step = False
    needs = ("gsnr",)
    closes_after = 500

    decade: float = 10.0
    """Upper over lower end of the interval."""
    readings: int = 15
    """Readings in the average at least: before, it is only young."""
    few: int = 6
    """Micro-batches below which the ratio of single coordinates has no finite variance."""

    streak: Streak = field(default_factory=Streak, init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires when three averages that share no reading are all so wide."""
        average = step.average
        if average is None or math.isnan(average.high):
            return None
        wide = average.low <= 0 or average.high > self.decade * average.low
        young = average.count < self.readings  # a young one that is narrow ends it all the same
        if not (wide and young):
            self.streak.see(wide, step.number, step.history.averages.begins)
        if young or not wide or 2 * average.begins - step.number <= self.streak.since:
            return None
        count = round(average.per_step)
        half = (average.high - average.low) / 2
        # The width falls with the root of readings × (micro-batches - 1); half the value is what makes it of use.
        needed = (2 * half / average.value) ** 2 if average.value > 0 else math.inf
        more = 1 + needed * max(count - 1, 1)
        seen = dict[str, Any](low=average.low, high=average.high, gsnr=average.value, count=count)
        seen |= {"readings": average.count, "source": step.history.averages.source, "batch_size": average.batch_size}
        seen |= {"needed": f"about {math.ceil(more):,}" if more < 1000 else "over 1,000"}
        return Sign(
            severity="info",
            seen=seen,
            expected={"high": self.decade * max(average.low, 0.0)},
            since=self.streak.since,
            causes=("few",) if count < self.few else ("weak",),
            cures=("split",) if count > 1 else ("accumulate",),
        )


@register
@dataclass
class MixedPasses(Rule):
    """The backward passes of a step are not samples of one thing: their gradients point against each other."""

    id = "mixed_passes"
    judges_after = 250
    every_step = False
    needs = ("microbatch:gsnr",)
    closes_after = 500

    def look(self, step: Step) -> Sign | None:
        """Fires while a GSNR between them, which cannot be below 0 but by chance, has stayed there."""
        reading = step.reading("microbatch") or step.reading("ranks")
        if reading is None or step.parts is not None or not step.history.parts.mixed:
            return None
        return Sign(
            severity="info",
            seen={"gsnr": reading.values.get("gsnr", math.nan), "loss": step.value("loss")},
            expected={"gsnr": "0 or above, but for chance"},
            since=step.history.parts.since,
            causes=("game",) if step.in_turn else (),
        )


@register
@dataclass
class FewParts(Rule):
    """A variance-reduced optimizer compares too few gradients with each other."""

    id = "few_parts"
    every_step = False
    needs = ("vrgd/mean", "microbatch:gsnr")
    closes_after = 200

    enough: int = 6
    """Gradients in a step from which the ratio of signal to noise is of use."""
    in_a_row: int = 3
    """Readings at which there are fewer: the rest of an epoch is a single step."""

    seen_for: int = field(default=0, init=False)
    since: int = field(default=-1, init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires where steps that are scaled have so few; it takes the batch size to count them."""
        reading, factor = step.reading("microbatch") or step.reading("ranks"), step.value("vrgd/mean")
        size = None if reading is None else reading.batch_size
        if not size or step.general.batch_size is None or math.isnan(factor):
            return None
        count = round(step.general.batch_size / size)
        self.since = _begun(self.since, count < self.enough, step.number)
        self.seen_for = self.seen_for + 1 if count < self.enough else 0
        if self.seen_for < self.in_a_row:
            return None
        seen = {"count": count, "factor": factor, "batch_size": step.general.batch_size, "enough": self.enough}
        return Sign(severity="info", seen=seen, expected={"count": f"{self.enough} or more"}, since=self.since)


@register
@dataclass
class IdenticalMicrobatches(Rule):
    """Every micro-batch of a step gives the same gradient."""

    id = "identical_microbatches"
    every_step = False
    needs = ("microbatch:gsnr",)
    closes_after = 100

    absurd: float = 1e5
    """GSNR that no data has."""
    in_a_row: int = 3
    """Readings at which it must be so."""

    seen_for: int = field(default=0, init=False)
    since: int = field(default=-1, init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires where micro-batches have no noise between them at all."""
        reading = step.reading("microbatch")
        if reading is None:
            return None
        gsnr = reading.values.get("gsnr", math.nan)
        self.since = _begun(self.since, gsnr > self.absurd, step.number)
        self.seen_for = self.seen_for + 1 if gsnr > self.absurd else 0
        if self.seen_for < self.in_a_row:
            return None
        whole, size = step.general.batch_size, reading.batch_size
        count = round(whole / size) if whole and size else "several"
        seen = {"gsnr": gsnr, "count": count, "batch_size": size, "step_size": whole, "loss": step.value("loss")}
        return Sign(severity="warning", seen=seen, expected={"gsnr": "a finite number"}, since=self.since)


def _begun(since: int, is_so: bool, step: int) -> int:
    """Since when something is so, given since when it was."""
    return -1 if not is_so else step if since < 0 else since
