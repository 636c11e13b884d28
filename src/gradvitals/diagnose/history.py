"""What rules remember together: the recent past of every global value, and what is usual for norms."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.averages import Averages, Parts
from gradvitals.diagnose.baseline import Baseline, FewBaselines

Floats = NDArray[np.float64]

LENGTH = 1024
"""Values of each series that are kept."""


def median(values: Floats) -> float:
    """The median of finite numbers, of which there is one at least; `np.median` takes ten times as long.

    >>> median(np.array([3.0, 1.0, 2.0])), median(np.array([4.0, 1.0, 2.0, 3.0]))
    (2.0, 2.5)
    """
    half, is_odd = divmod(len(values), 2)
    if is_odd:
        return float(np.partition(values, half)[half])
    low, high = np.partition(values, (half - 1, half))[half - 1 : half + 1].tolist()
    return float((low + high) / 2)


def median_of(values: Floats) -> float:
    """The median of those that are numbers; nan where none is."""
    known = values[np.isfinite(values)]
    return median(known) if len(known) else math.nan


@dataclass
class Series:
    """The last values of one global number, oldest first, with their steps. Values that are not finite are not kept."""

    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def push(self, step: int, value: float) -> None:
        """Add the value of a step."""
        if not math.isfinite(value):
            return
        self.steps.append(float(step))
        self.values.append(value)
        if len(self.values) > 2 * LENGTH:
            del self.steps[:-LENGTH], self.values[:-LENGTH]

    def last(self, count: int) -> Floats:
        """The newest values, at most so many."""
        return np.array(self.values[-count:])

    def since(self, step: float) -> tuple[Floats, Floats]:
        """Steps and values from a step on."""
        first = bisect_left(self.steps, step)
        return np.array(self.steps[first:]), np.array(self.values[first:])

    def at(self, step: int) -> float:
        """The value of a step; nan where there is none."""
        place = bisect_left(self.steps, step)
        return self.values[place] if place < len(self.steps) and self.steps[place] == step else math.nan

    def __len__(self) -> int:
        return len(self.values)


@dataclass
class History:
    """The past of a run, up to but not including the step that is being judged."""

    series: dict[str, Series] = field(default_factory=dict)
    """Recent global values by metric; those of a GSNR source as ``source:metric``."""
    norm: FewBaselines = field(default_factory=FewBaselines)
    """What is usual for the global gradient norm."""
    norms: Baseline = field(default_factory=Baseline)
    """What is usual for the gradient norm of every tensor."""
    updates: Baseline = field(default_factory=Baseline)
    """What is usual for the change of every tensor in one step, `update/rms`; the whole model comes first."""
    averages: Averages = field(default_factory=Averages)
    """The GSNR of the whole model, from the best source that the run has."""
    adam_true_from: int = 0
    """The first step at which no huge gradient is in Adam's averages any more."""
    parts: Parts = field(default_factory=Parts)
    """Whether micro-batches, or workers, are samples of one thing."""
    numbers: list[int] = field(default_factory=list)
    """Steps of the last readings, oldest first: those between two of them may have been passed over."""
    steps_seen: int = 0
    """How many readings there were."""

    def __getitem__(self, metric: str) -> Series:
        """The series of a metric; an empty one where there is none."""
        return self.series.get(metric, Series())

    def push_number(self, step: int) -> None:
        """Remember that a step was read."""
        self.numbers.append(step)
        self.steps_seen += 1
        if len(self.numbers) > 2 * LENGTH:
            del self.numbers[:-LENGTH]

    def push_values(self, step: int, values: Mapping[str, float], prefix: str = "") -> None:
        """Remember global values."""
        for metric, value in values.items():
            name = prefix + metric
            if name not in self.series:
                self.series[name] = Series()
            self.series[name].push(step, value)
