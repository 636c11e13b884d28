"""The baseline of a number: its level and spread in the run so far, without the outliers that it should reveal."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MEAN_ABS_TO_STD = math.sqrt(math.pi / 2)
"""Standard deviation over mean absolute deviation, for a normal distribution."""

MEDIAN_ABS_TO_STD = 1.4826
"""Standard deviation over median absolute deviation, for a normal distribution."""

SMALLEST_SPREAD = 0.02
"""Smallest spread, in units of log: a series that has hardly moved so far may still move."""

REMEMBERED = 0.998
"""Share of a baseline's reach that is left after each value: half of it after 350."""


def empty() -> Floats:
    """Returns one number per tensor, or rank, before there are any."""
    return np.zeros(0)


def resized(kept: Floats, size: int) -> Floats:
    """Returns an array with room for tensors that were added."""
    return kept if len(kept) >= size else np.append(kept, np.zeros(size - len(kept)))


@dataclass
class Baseline:
    """Moving averages of the level and the spread of positive series, in log space.

    An outlier is compared but not learned, nor is a value that is not finite or not positive. A series that stays
    outside for more than `patience` values in a row has a new level and learns it from then on. What recurs is normal:
    the farthest that a series went and came back from counts as `outlier_z` standard deviations, and is forgotten
    slowly.

    `compare` and `learn` take one value per series. `compare_one` and `learn_one` do the same for a single series in
    plain floats, to the last bit: starting a numpy operation takes longer than the arithmetic of one number.

    Example:
        >>> baseline = Baseline(window=50)
        >>> for norm in (1.0, 1.1, 0.9, 1.0):
        ...     baseline.learn(np.array([norm]))
        >>> ratio, z = baseline.compare(np.array([2.0]))
        >>> float(ratio[0].round(2)), bool(z[0] > 3)
        (2.01, True)
    """

    window: int = 50
    """Values that the moving average of the spread covers."""
    level_window: int = 20
    """Values that the average of the level covers. Fewer, because a level that lags behind a falling series makes the
    spread look large."""
    outlier_z: float = 5.0
    patience: int = 8
    count: Floats = field(default_factory=empty)
    """Values learned, per series."""
    level: Floats = field(default_factory=empty)
    spread: Floats = field(default_factory=empty)
    """Mean absolute deviation of the logarithm from its level."""
    outside: Floats = field(default_factory=empty)
    """Outliers in a row."""
    peak: Floats = field(default_factory=empty)
    """The farthest of them, as a distance of the logarithm."""
    reach: Floats = field(default_factory=empty)
    """How far outliers went before the series came back, or took a new level."""

    def __post_init__(self) -> None:
        # A rule compares values before the engine learns the same ones: keep what was computed.
        self._compared: tuple[Floats, NDArray[np.bool_], Floats, Floats] | None = None

    def resize(self, size: int) -> None:
        """Make room for this many series; new ones come last."""
        if size > len(self.count):
            for name in ("count", "level", "spread", "outside", "peak", "reach"):
                setattr(self, name, resized(getattr(self, name), size))

    def usual(self) -> Floats:
        """Returns the level of every series; NaN before its first value."""
        return np.where(self.count > 0, np.exp(self.level), np.nan)

    def compare(self, values: Floats) -> tuple[Floats, Floats]:
        """Returns new values over their level, and their distance in standard deviations of the logarithm.

        Both are NaN if a value is not finite or not positive, or after fewer than two values.
        """
        _, _, distance, z = self._distances(values)
        return np.exp(np.where(z == z, distance, np.nan)), z

    def learn(self, values: Floats) -> None:
        """Update levels and spreads with new values, except outliers."""
        _, take, distance, z = self._distances(values)
        self._compared = None
        outlier = (np.abs(z) > self.outlier_z) & (self.count >= 5)
        self.reach = np.where(take, REMEMBERED * self.reach, self.reach)
        if outlier.any() or self.outside.any():
            self.outside = np.where(outlier, self.outside + 1, np.where(take, 0.0, self.outside))
            self.peak = np.where(outlier, np.maximum(self.peak, np.abs(distance)), self.peak)
            settled = outlier & (self.outside > self.patience)
            take = take & (~outlier | settled)
            self.reach = np.where(take, np.maximum(self.reach, self.peak), self.reach)
            self.peak = np.where(take, 0.0, self.peak)
            self.count = np.where(settled, np.minimum(self.count, 1.0), self.count)
        self.count = self.count + take
        distance = np.where(take, distance, 0.0)
        count = np.maximum(self.count, 1)
        rate = np.where(take & (self.count > 1), 1 / np.minimum(count, self.window), 0.0)
        self.spread = self.spread + rate * (np.abs(distance) - self.spread)
        self.level = self.level + distance / np.minimum(count, self.level_window)

    def compare_one(self, value: float, index: int = 0) -> tuple[float, float]:
        """Returns ratio and z-score of the next value of one series."""
        if index >= len(self.count):
            self.resize(index + 1)
        if not 0 < value < math.inf or self.count.item(index) < 2:
            return math.nan, math.nan
        distance = float(np.log(value)) - self.level.item(index)
        return float(np.exp(distance)), distance / self._std_one(index)

    def learn_one(self, value: float, index: int = 0) -> None:
        """Update one series with its next value, unless it is an outlier."""
        if index >= len(self.count):
            self.resize(index + 1)
        if not 0 < value < math.inf:
            return
        # numpy's logarithm: the last digit of `math.log` may differ.
        distance, count = float(np.log(value)) - self.level.item(index), self.count.item(index)
        outlier = count >= 5 and abs(distance / self._std_one(index)) > self.outlier_z
        self.reach[index] *= REMEMBERED
        if outlier:
            self.outside[index] += 1
            self.peak[index] = max(self.peak.item(index), abs(distance))
            if self.outside.item(index) <= self.patience:
                return
            count = min(count, 1.0)
        else:
            self.outside[index] = 0.0
        if self.peak.item(index):
            self.reach[index], self.peak[index] = max(self.reach.item(index), self.peak.item(index)), 0.0
        count += 1
        self.count[index] = count
        if count > 1:
            self.spread[index] += 1 / min(count, self.window) * (abs(distance) - self.spread.item(index))
        self.level[index] += distance / min(count, self.level_window)

    def _distances(self, values: Floats) -> tuple[Floats, NDArray[np.bool_], Floats, Floats]:
        """The values, which of them are usable, the distance of their logarithms from the level, z-scores."""
        if self._compared is not None and self._compared[0] is values:
            return self._compared
        self.resize(len(values))
        usable = (values > 0) & (values < math.inf)
        distance = np.log(np.where(usable, values, 1.0)) - self.level
        # The spread of few values is poorly known, and more likely too small than too large.
        doubt = 1 + 3 / np.maximum(self.count, 1)
        std = np.maximum(self.spread, SMALLEST_SPREAD) * MEAN_ABS_TO_STD * doubt
        std = np.maximum(std, self.reach / self.outlier_z)
        z = np.where(usable & (self.count >= 2), distance / std, np.nan)
        self._compared = (values, usable, distance, z)
        return self._compared

    def _std_one(self, index: int) -> float:
        doubt = 1 + 3 / max(self.count.item(index), 1)
        std = max(self.spread.item(index), SMALLEST_SPREAD) * MEAN_ABS_TO_STD * doubt
        return max(std, self.reach.item(index) / self.outlier_z)
