"""What is usual for a number: its level and its spread in the run so far, without the outliers it should reveal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MEAN_ABS_TO_STD = math.sqrt(math.pi / 2)
"""Standard deviation over mean absolute deviation, of a normal distribution."""

SMALLEST_SPREAD = 0.02
"""A series that has hardly moved so far may still move: its spread counts as at least this, in units of log."""


@dataclass
class Baseline:
    """Level and spread of many positive series at once, in log space, as moving averages.

    A value far outside is judged but not remembered, as is one that is not finite or not positive. Where a series stays
    outside for `patience` values in a row it has a new level, and learns it from then on.

    Example:
        >>> usual = Baseline(window=50)
        >>> for norm in (1.0, 1.1, 0.9, 1.0):
        ...     usual.push(np.array([norm]))
        >>> ratio, z = usual.judge(np.array([2.0]))
        >>> float(ratio[0].round(2)), bool(z[0] > 3)
        (2.01, True)
    """

    window: int = 50
    """Values that the moving average of the spread reaches back over."""
    level_window: int = 20
    """The same of the level. Shorter, as a level that lags behind a falling series makes the spread look large."""
    outlier_z: float = 5.0
    patience: int = 8
    count: Floats = field(default_factory=lambda: np.zeros(0))
    """Values remembered, of each series."""
    level: Floats = field(default_factory=lambda: np.zeros(0))
    spread: Floats = field(default_factory=lambda: np.zeros(0))
    """Mean absolute deviation of the logarithm from its level."""
    outside: Floats = field(default_factory=lambda: np.zeros(0))
    """Values outside in a row."""

    def __post_init__(self) -> None:
        self._judged: tuple[Floats, NDArray[np.bool_], Floats, Floats] | None = None
        """Values, which are usable, how far their logarithms are away, z-scores: what is judged is pushed next."""

    def align(self, size: int) -> None:
        """Have at least this many series; new ones come after the others."""
        more = size - len(self.count)
        if more > 0:
            for name in ("count", "level", "spread", "outside"):
                setattr(self, name, np.append(getattr(self, name), np.zeros(more)))

    def usual(self) -> Floats:
        """The level of every series: nan before anything was remembered."""
        return np.where(self.count > 0, np.exp(self.level), np.nan)

    def judge(self, values: Floats) -> tuple[Floats, Floats]:
        """How far new values are from what is usual: as a ratio, and in standard deviations of the logarithm.

        Both are nan where a value is not finite or not positive, or where fewer than two were remembered.
        """
        _, _, away, z = self._judge(values)
        return np.exp(np.where(z == z, away, np.nan)), z

    def _judge(self, values: Floats) -> tuple[Floats, NDArray[np.bool_], Floats, Floats]:
        if self._judged is not None and self._judged[0] is values:
            return self._judged
        self.align(len(values))
        usable = (values > 0) & (values < math.inf)
        away = np.log(np.where(usable, values, 1.0)) - self.level
        z = np.where(usable & (self.count >= 2), away / self._std(), np.nan)
        self._judged = (values, usable, away, z)
        return self._judged

    def push(self, values: Floats) -> None:
        """Remember new values, except those far outside."""
        _, take, away, z = self._judge(values)
        self._judged = None
        outlier = (np.abs(z) > self.outlier_z) & (self.count >= 5)
        if outlier.any() or self.outside.any():
            self.outside = np.where(outlier, self.outside + 1, np.where(take, 0.0, self.outside))
            settled = outlier & (self.outside > self.patience)
            take = take & (~outlier | settled)
            self.count = np.where(settled, np.minimum(self.count, 1.0), self.count)
        self.count = self.count + take
        away = np.where(take, away, 0.0)
        count = np.maximum(self.count, 1)
        rate = np.where(take & (self.count > 1), 1 / np.minimum(count, self.window), 0.0)
        self.spread = self.spread + rate * (np.abs(away) - self.spread)
        self.level = self.level + away / np.minimum(count, self.level_window)

    def _std(self) -> Floats:
        # Of few values the spread is poorly known, and more likely too small than too large.
        doubt = 1 + 3 / np.maximum(self.count, 1)
        return np.maximum(self.spread, SMALLEST_SPREAD) * MEAN_ABS_TO_STD * doubt


@dataclass
class FewBaselines:
    """A `Baseline` of one or two series, in plain numbers: numpy takes longer to begin than these take to reckon.

    Example:
        >>> usual = FewBaselines()
        >>> for norm in (1.0, 1.1, 0.9, 1.0):
        ...     usual.push([norm])
        >>> round(usual.judge([2.0])[0][0], 2)
        2.01
    """

    window: int = 50
    level_window: int = 20
    outlier_z: float = 5.0
    patience: int = 8
    count: list[float] = field(default_factory=list)
    level: list[float] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)

    def judge(self, values: Sequence[float]) -> tuple[list[float], list[float]]:
        """As `Baseline.judge`."""
        away = self._away(values)
        known = [number == number and self.count[i] >= 2 for i, number in enumerate(away)]
        ratios = [float(np.exp(number)) if known[i] else math.nan for i, number in enumerate(away)]
        return ratios, [number / self._std(i) if known[i] else math.nan for i, number in enumerate(away)]

    def push(self, values: Sequence[float]) -> None:
        """As `Baseline.push`."""
        for i, away in enumerate(self._away(values)):
            if away != away:
                continue
            if self.count[i] >= 5 and abs(away / self._std(i)) > self.outlier_z:
                self.outside[i] += 1
                if self.outside[i] <= self.patience:
                    continue
                self.count[i] = min(self.count[i], 1.0)
            else:
                self.outside[i] = 0.0
            self.count[i] += 1
            if self.count[i] > 1:
                self.spread[i] += 1 / min(self.count[i], self.window) * (abs(away) - self.spread[i])
            self.level[i] += away / min(self.count[i], self.level_window)

    def _away(self, values: Sequence[float]) -> list[float]:
        """How far the logarithm of each value is from its level; nan where it has none."""
        for numbers in (self.count, self.level, self.spread, self.outside):
            numbers.extend([0.0] * (len(values) - len(numbers)))
        # numpy's logarithm, as its last digit may differ from that of `math`.
        logs = [float(np.log(value)) if 0 < value < math.inf else math.nan for value in values]
        return [log - level for log, level in zip(logs, self.level, strict=True)]

    def _std(self, i: int) -> float:
        doubt = 1 + 3 / max(self.count[i], 1)
        return max(self.spread[i], SMALLEST_SPREAD) * MEAN_ABS_TO_STD * doubt
