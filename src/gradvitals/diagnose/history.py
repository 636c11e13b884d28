"""What the rules remember together: recent global values, baselines of norms, averages of the GSNR."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.baseline import MEDIAN_ABS_TO_STD, Baseline, Floats, empty, resized
from gradvitals.types import SOURCES, PlainReadings, Reading, Source

LENGTH = 1024
"""Values kept of each series."""

FIRST = 10
"""Losses kept from the start of a run: their mean is where it started."""


# -- statistics of a series ------------------------------------------------------------------------------------------


def median(values: Floats) -> float:
    """Returns the median of one or more finite numbers, ten times as fast as `np.median`.

    >>> median(np.array([3.0, 1.0, 2.0])), median(np.array([4.0, 1.0, 2.0, 3.0]))
    (2.0, 2.5)
    """
    half, is_odd = divmod(len(values), 2)
    if is_odd:
        return float(np.partition(values, half)[half])
    low, high = np.partition(values, (half - 1, half))[half - 1 : half + 1].tolist()
    return float((low + high) / 2)


def finite_median(values: Floats) -> float:
    """Returns the median of the finite values; NaN if there are none."""
    known = values[np.isfinite(values)]
    return median(known) if len(known) else math.nan


def step_spread(values: Floats) -> float:
    """Returns the standard deviation of a series around a level that may move, from its changes; robust to outliers.

    >>> round(step_spread(np.array([1.0, 2.0, 3.0, 4.0])), 3), step_spread(np.ones(4))
    (1.048, 0.0)
    """
    changes = np.abs(np.diff(values))
    return MEDIAN_ABS_TO_STD * float(np.median(changes)) / math.sqrt(2) if len(changes) else math.nan


def fall(values: Floats) -> tuple[float, float]:
    """Returns how far a series fell along its least-squares line from start to end, and the standard error of that.

    >>> fell, error = fall(np.array([3.0, 2.0, 1.0]))
    >>> round(fell, 3), round(error, 3)
    (2.0, 0.0)
    """
    count = len(values)
    if count < 3:
        return math.nan, math.nan
    time = np.arange(count) - (count - 1) / 2
    scale = float((time**2).sum())
    slope = float((time * values).sum()) / scale
    rest = values - values.mean() - slope * time
    error = math.sqrt(float((rest**2).sum()) / (count - 2) / scale)
    return -slope * (count - 1), error * (count - 1)


@dataclass
class Series:
    """The last finite values of one global number with their steps, oldest first."""

    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def push(self, step: int, value: float) -> None:
        """Append the value of a step, if it is finite."""
        if not math.isfinite(value):
            return
        self.steps.append(float(step))
        self.values.append(value)
        if len(self.values) > 2 * LENGTH:
            del self.steps[:-LENGTH], self.values[:-LENGTH]

    def extend(self, steps: Floats, values: Floats) -> None:
        """Append the finite values of some steps."""
        finite = np.isfinite(values)
        self.steps += steps[finite].tolist()
        self.values += values[finite].tolist()
        if len(self.values) > 2 * LENGTH:
            del self.steps[:-LENGTH], self.values[:-LENGTH]

    def last(self, count: int) -> Floats:
        """Returns the newest values, at most `count`."""
        return np.array(self.values[-count:])

    def median(self, count: int) -> float:
        """Returns the median of the newest values, at most `count`; NaN if there are none."""
        return median(self.last(count)) if self.values else math.nan

    def since(self, step: float) -> tuple[Floats, Floats]:
        """Returns the steps and values from a step on."""
        first = bisect_left(self.steps, step)
        return np.array(self.steps[first:]), np.array(self.values[first:])

    def at(self, step: int) -> float:
        """Returns the value of a step; NaN if there is none."""
        place = bisect_left(self.steps, step)
        return self.values[place] if place < len(self.steps) and self.steps[place] == step else math.nan

    def __len__(self) -> int:
        return len(self.values)


# -- averages of the GSNR --------------------------------------------------------------------------------------------

KEPT = 100
"""GSNR averages kept."""

OUTLIER_RATIO = 5.0
"""The monitor excludes a step from GSNR averages if its norm is this many times the moving average."""

SAME_SIZE = 1.25
"""Batch sizes that differ by less than this factor count as equal."""

NEW_SIZE_AFTER = 3
"""Readings in a row with another batch size that make it the new one. The last batch of an epoch is a single one."""

MIXED_AFTER = 25
"""Readings in a row with an interval below 0 that are no coincidence: the last average shares none with the first."""

MIXED_AFTER_ALTERNATING = 4
"""The same for a model that is known to alternate with another, as in a GAN."""


@dataclass(frozen=True)
class Average:
    """The GSNR of the whole model at one step, averaged over the last readings of one source."""

    step: int
    begins: int
    """Step of its oldest reading."""
    count: int
    """Readings in it."""
    value: float
    low: float
    high: float
    batch_size: float
    """Samples that it stands for; NaN if unknown."""
    step_size: float
    """Samples of one optimizer step; NaN if unknown."""

    @property
    def middle(self) -> float:
        """The middle of the steps it covers."""
        return (self.begins + self.step) / 2

    @property
    def established(self) -> bool:
        """Whether there is a signal by four standard errors: a run is tested many times."""
        return 2 * self.low > self.value > 0

    @property
    def most(self) -> float:
        """The upper end, with a negative value read as 0."""
        return self.high - min(self.value, 0.0)

    @property
    def per_step(self) -> float:
        """The factor from this GSNR to that of the batch of one optimizer step; 1 if unknown."""
        return self.step_size / self.batch_size if self.step_size > self.batch_size else 1.0


@dataclass
class MixedPasses:
    """Whether the backward passes of a step are samples of one distribution.

    The debiased GSNR of such samples is negative only by chance. If it stays negative, their gradients oppose each
    other, as those of real and generated samples in a GAN do, and the GSNR says nothing about signal and noise.
    """

    below: int = 0
    """Readings in a row whose interval was below 0."""
    since: int = -1
    """Step of the first of them, or of those that decided."""
    mixed: bool = False
    """Whether the passes were established to differ, with no evidence against it since."""

    def add(self, reading: Reading, alternating: bool) -> None:
        """Take the next reading into account; a model that alternates with another needs fewer of them."""
        low, high = (reading.values.get(name, math.nan) for name in ("gsnr_low", "gsnr_high"))
        if low > 0:
            self.mixed = False
        self.below = self.below + 1 if high < 0 else 0
        if self.below == 1 and not self.mixed:
            self.since = reading.step
        self.mixed |= self.below >= (MIXED_AFTER_ALTERNATING if alternating else MIXED_AFTER)


@dataclass
class Averages:
    """The GSNR averages of one source at one batch size.

    Values of another source or batch size are different quantities: a better source, or a batch size that stays, starts
    a new record.
    """

    window: int = 20
    """Readings per average, at most; the same as the monitor's."""
    source: Source | Literal[""] = ""
    steps: list[int] = field(default_factory=list)
    kept: list[list[float]] = field(default_factory=list)
    """The numbers of each `Average` so far."""
    sizes: list[float] = field(default_factory=list)
    """Samples per reading and per step at present."""
    odd: list[int] = field(default_factory=list)
    """Steps of the last readings with another size."""
    begins: int = 0
    """Step of the first reading that counts."""

    @property
    def same_weights(self) -> bool:
        """Whether all samples of a reading were taken at the same weights."""
        return self.source in ("microbatch", "ranks")

    def take(self, reading: Reading, general: Reading, valid_from: int = 0) -> Average | None:
        """Record the GSNR of a step. Returns None if it has another source or size than the record.

        Args:
            reading: The reading of the source.
            general: The reading of the same step without a source.
            valid_from: Step before which readings of this source are wrong.
        """
        if reading.source in (None, "window", "examples"):  # the last two do not stand for the whole model
            return None
        if self.source and SOURCES.index(reading.source) > SOURCES.index(self.source):
            return None
        if reading.source != self.source:
            self.source, self.steps, self.kept, self.sizes, self.odd = reading.source, [], [], [], []
            self.begins = reading.step
        self.begins = max(self.begins, valid_from)
        value, low, high = (reading.values.get(name, math.nan) for name in ("gsnr", "gsnr_low", "gsnr_high"))
        size, whole = (math.nan if found is None else found for found in (reading.batch_size, general.batch_size))
        if not OUTLIER_RATIO <= general.values.get("grad/spike_ratio", math.nan) < math.inf:
            self.steps.append(reading.step)
            del self.steps[:-KEPT]
        if self.sizes and not all(map(same_size, self.sizes, (size, whole))):
            self.odd.append(reading.step)
            if len(self.odd) < NEW_SIZE_AFTER:
                return None
            # The average still holds readings of the old size until they have left it.
            self.kept, self.begins = [], max(self.odd[0], valid_from)
        self.sizes, self.odd = [size, whole], []
        recent = [number for number in self.steps[-self.window :] if number >= reading.step / 2]
        if not recent or recent[0] < self.begins:
            return None
        numbers = (reading.step, recent[0], len(recent), value, low, high, size, whole)
        self.kept.append(list(numbers))
        del self.kept[:-KEPT]
        return Average(*numbers)

    def before(self, step: float) -> Average | None:
        """Returns the newest average whose readings are all from before a step."""
        found = next((kept for kept in reversed(self.kept) if kept[0] < step), None)
        return None if found is None else Average(*found)  # type: ignore[arg-type]

    def below_since(self, level: float) -> int:
        """Returns the step of the first of the newest averages whose intervals are all below a level."""
        below = takewhile(lambda kept: kept[5] < level, reversed(self.kept))
        return int(min((kept[0] for kept in below), default=self.steps[-1]))


@dataclass
class Streak:
    """Readings in a row at which a condition held."""

    count: int = 0
    since: int = -1
    """Step of the first of them; -1 if there are none."""

    def add(self, holds: bool, step: int, begins: int = -1) -> None:
        """Take the next reading into account; a streak ends if the averages started a new record."""
        if not holds or self.since < begins:
            self.count, self.since = 0, -1
        if holds:
            self.count, self.since = self.count + 1, self.since if self.count else step


@dataclass
class Streaks:
    """A `Streak` of each tensor, or rank."""

    count: Floats = field(default_factory=empty)
    since: Floats = field(default_factory=empty)
    """Step of the first of them, also after they ended."""

    def add(self, holds: NDArray[np.bool_], step: int, ends: NDArray[np.bool_] | None = None) -> None:
        """Take the next reading into account. A streak that neither holds nor `ends` at it stays as it was."""
        count, since = resized(self.count, len(holds)), resized(self.since, len(holds))
        self.since = np.where(holds & (count == 0), step, since)
        self.count = np.where(holds, count + 1, np.where(~holds if ends is None else ends, 0.0, count))


def same_size(a: float, b: float) -> bool:
    """Whether two batch sizes are equal but for a remainder, or both unknown."""
    return (math.isnan(a) and math.isnan(b)) or max(a, b) < SAME_SIZE * min(a, b)


# -- one huge gradient in Adam's moments -----------------------------------------------------------------------------

HUGE = 5.0
"""A norm of this many times its moving average distorts Adam's moments."""
FIRST_SHARE = 0.1
"""The gradient no longer counts once this much of an ordinary gradient is left of it in the first moment."""
SECOND_SHARE = 0.5
"""The same for its square in the second moment."""
BETAS = (0.9, 0.999)
"""Assumed if the optimizer does not report its own."""


def steps_kept(ratio: float, betas: Sequence[float]) -> float:
    """Returns the steps after which a gradient of `ratio` times the usual norm no longer counts in either moment.

    The first moment holds (1 - b1) b1^t of it, the second (1 - b2) b2^t of its square.

    >>> round(steps_kept(100.0, (0.9, 0.999))), round(steps_kept(1.0, (0.9, 0.999)))
    (2994, 0)
    """
    first = math.log((1 - betas[0]) * ratio / FIRST_SHARE) / -math.log(betas[0])
    second = math.log((1 - betas[1]) * ratio**2 / SECOND_SHARE) / -math.log(betas[1])
    return max(0.0, first, second)


def forgotten_at(step: int, values: Mapping[str, float], betas: Sequence[float] | None) -> int:
    """Returns the first step at which this step's gradient no longer counts; 0 if it is ordinary or was skipped.

    >>> forgotten_at(6000, {"grad/spike_ratio": 100.0}, (0.9, 0.999))
    8995
    """
    ratio, norm, limit = (values.get(name, math.nan) for name in ("grad/spike_ratio", "grad/norm", "clip/max_norm"))
    if limit < norm:
        ratio *= limit / norm
    skipped = values.get("step/skipped") == 1 or values.get("step/left_out") == 1
    known = betas if betas is not None and all(0 < beta < 1 for beta in betas) else BETAS
    return step + math.floor(steps_kept(ratio, known)) + 1 if HUGE <= ratio < math.inf and not skipped else 0


# -- all of it -------------------------------------------------------------------------------------------------------


@dataclass
class History:
    """The past of a run, without the step that is being checked."""

    series: dict[str, Series] = field(default_factory=dict)
    """Recent global values by metric; those of a GSNR source as ``source:metric``."""
    first_losses: list[float] = field(default_factory=list)
    """The first finite losses, at most `FIRST`."""
    norm: Baseline = field(default_factory=Baseline)
    """Of the global gradient norm."""
    norms: Baseline = field(default_factory=Baseline)
    """Of the gradient norm of every tensor."""
    updates: Baseline = field(default_factory=Baseline)
    """Of `update/rms`: the whole model, then every tensor."""
    averages: Averages = field(default_factory=Averages)
    """The GSNR of the whole model, from the best source of the run."""
    adam_valid_from: int = 0
    """The first step at which Adam's moments hold no huge gradient."""
    passes: MixedPasses = field(default_factory=MixedPasses)
    """Whether micro-batches, or ranks, are samples of one distribution."""
    numbers: list[int] = field(default_factory=list)
    """Step numbers of the last readings, oldest first; steps between two of them may not have been read."""
    steps_seen: int = 0
    """Steps read so far."""
    loss_move: float = math.nan
    """Moving average of how far the loss moves from one step to the next."""
    last_loss: float = math.nan

    def __getitem__(self, metric: str) -> Series:
        """Returns the series of a metric; an empty one if there is none."""
        return self.series.get(metric) or Series()

    def loss_is_calm(self, loss: float, most: float) -> bool:
        """Returns whether the loss moved less than `most` times as far as usual."""
        return abs(loss - self.last_loss) < most * self.loss_move

    def push_loss(self, loss: float) -> None:
        """Remember how far the loss moved."""
        move = abs(loss - self.last_loss)
        if math.isfinite(move):
            self.loss_move = move if math.isnan(self.loss_move) else 0.98 * self.loss_move + 0.02 * move
        self.last_loss = loss if math.isfinite(loss) else self.last_loss

    def push_number(self, step: int) -> None:
        """Remember that a step was read."""
        self.numbers.append(step)
        self.steps_seen += 1
        if len(self.numbers) > 2 * LENGTH:
            del self.numbers[:-LENGTH]

    def push_plain(self, plain: PlainReadings) -> None:
        """Remember plain steps, except how far their losses moved."""
        for name, values in plain.values.items():
            present = plain.present[name]
            if present.any():
                self.series.setdefault(name, Series()).extend(plain.steps[present].astype(np.float64), values[present])
        if "grad/norm" in plain.values:
            for norm in plain.values["grad/norm"][plain.present["grad/norm"]].tolist():
                self.norm.learn_one(norm)
        self.numbers += plain.steps.tolist()
        self.steps_seen += len(plain)
        if len(self.numbers) > 2 * LENGTH:
            del self.numbers[:-LENGTH]

    def push_values(self, step: int, values: Mapping[str, float], prefix: str = "") -> None:
        """Append global values to their series."""
        for metric, value in values.items():
            name = prefix + metric
            series = self.series.get(name)
            if series is None:
                series = self.series[name] = Series()
            series.push(step, value)
