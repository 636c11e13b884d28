"""Schedules of gamma: functions from the step number, counted from 0, to the smallest factor."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class linear:
    """A straight line from `start` to `end` over `steps` steps, then `end`.

    >>> [linear(1.0, 0.2, steps=4)(step) for step in (0, 2, 4, 9)]
    [1.0, 0.6, 0.2, 0.2]
    """

    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        """Return gamma at a step."""
        share = min(1.0, step / max(1, self.steps))
        return self.start * (1 - share) + self.end * share


@dataclass(frozen=True)
class cosine:
    """Half a cosine from `start` to `end` over `steps` steps, then `end`.

    >>> [round(cosine(1.0, 0.2, steps=4)(step), 3) for step in (0, 1, 2, 4, 9)]
    [1.0, 0.883, 0.6, 0.2, 0.2]
    """

    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        """Return gamma at a step."""
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * min(1.0, step / max(1, self.steps)))) / 2
