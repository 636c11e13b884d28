"""What is usual for a number: its level and its spread in the run so far, without the outliers it should reveal."""

from __future__ import annotations

import math
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
        self._judged: tuple[Floats, Floats] | None = None  # what is judged is pushed next: not worked out twice

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
        self.align(len(values))
        with np.errstate(divide="ignore", invalid="ignore"):
            distance = np.where((values > 0) & np.isfinite(values), np.log(values), np.nan) - self.level
        distance = np.where(self.count >= 2, distance, np.nan)
        z = distance / self._std()
        self._judged = (values, z)
        return np.exp(distance), z

    def push(self, values: Floats) -> None:
        """Remember new values, except those far outside."""
        z = self._judged[1] if self._judged is not None and self._judged[0] is values else self.judge(values)[1]
        self._judged = None
        usable = (values > 0) & np.isfinite(values)
        young = self.count < 5
        outlier = usable & ~young & (np.abs(z) > self.outlier_z)
        self.outside = np.where(outlier, self.outside + 1, np.where(usable, 0.0, self.outside))
        settled = outlier & (self.outside > self.patience)
        take = usable & (~outlier | settled)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.where(usable, np.log(values), 0.0)
        self.count = np.where(settled, np.minimum(self.count, 1.0), self.count) + take
        deviation = np.abs(logs - self.level)
        first, rate = self.count <= 1, 1 / np.clip(self.count, 1, self.window)
        self.spread = np.where(take & ~first, self.spread + rate * (deviation - self.spread), self.spread)
        rate = 1 / np.clip(self.count, 1, self.level_window)
        self.level = np.where(take, self.level + rate * (logs - self.level), self.level)

    def _std(self) -> Floats:
        # Of few values the spread is poorly known, and more likely too small than too large.
        doubt = 1 + 3 / np.maximum(self.count, 1)
        return np.maximum(self.spread, SMALLEST_SPREAD) * MEAN_ABS_TO_STD * doubt
