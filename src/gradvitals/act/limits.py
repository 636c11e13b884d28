"""What is usual for the norm and the loss of a run, and from where on they no longer are.

`gradvitals.diagnose.baseline.Baseline` does the same for all tensors at once; here it is one number at every step,
before the optimizer may go on, so it is done without arrays.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from gradvitals.act.ladder import Trouble
from gradvitals.diagnose.baseline import MEAN_ABS_TO_STD, SMALLEST_SPREAD

LARGEST_NORM = float(np.finfo(np.float32).max)
"""A norm beyond it is not finite."""

FIRST_LOSSES = 5
"""Losses whose mean is the unit of the run's losses."""


@dataclass
class Level:
    """Where a number usually is, and how far from there. Outliers do not count, unless they stay.

    Example:
        >>> usual = Level()
        >>> for value in (1.0, 1.1, 0.9, 1.0):
        ...     usual.learn(value)
        >>> round(usual.level, 2), usual.z(1.5) > 3
        (1.0, True)
    """

    window: int = 50
    """Values that the moving average of the spread reaches back over."""
    level_window: int = 20
    """The same of the level."""
    outlier_z: float = 5.0
    patience: int = 40
    """Outliers in a row after which they are the new level: longer than the ladder takes to answer them."""
    count: float = 0.0
    level: float = 0.0
    spread: float = 0.0
    """Mean absolute deviation from the level."""
    outside: int = 0
    """Outliers in a row."""

    def std(self) -> float:
        """The standard deviation, with a doubt for short histories."""
        doubt = 1 + 3 / max(self.count, 1.0)
        return max(self.spread, SMALLEST_SPREAD) * MEAN_ABS_TO_STD * doubt

    def z(self, value: float) -> float:
        """Standard deviations from the level; nan before there is one."""
        return (value - self.level) / self.std() if self.count >= 2 else math.nan

    def learn(self, value: float) -> None:
        """Remember a value, unless it is an outlier or not finite."""
        if not math.isfinite(value):
            return
        if self.count >= 5 and abs(self.z(value)) > self.outlier_z:
            self.outside += 1
            if self.outside <= self.patience:
                return
            self.count = min(self.count, 1.0)
        else:
            self.outside = 0
        self.count += 1
        away = value - self.level
        if self.count > 1:
            self.spread += (abs(away) - self.spread) / min(self.count, self.window)
        self.level += away / min(self.count, self.level_window)


@dataclass
class Usual:
    """The norms and losses of one optimizer's steps."""

    window: int = 200
    """Healthy norms that are kept as they are."""
    norm: Level = field(default_factory=Level)
    """Of the logarithm of the norm."""
    loss: Level = field(default_factory=Level)
    """Of the loss in units of the first losses."""
    log_loss: Level = field(default_factory=Level)
    """Of the logarithm of the loss, where it is positive."""
    first_losses: list[float] = field(default_factory=list)
    norms: deque[float] = field(default_factory=deque)

    def learn(self, norm: float, loss: float) -> None:
        """Remember a step that was made."""
        if 0 < norm < math.inf:
            before = self.norm.count
            self.norm.learn(math.log(norm))
            if self.norm.count != before:
                self.norms.append(norm)
                if len(self.norms) > self.window:
                    self.norms.popleft()
        if math.isfinite(loss):
            if len(self.first_losses) < FIRST_LOSSES:
                self.first_losses.append(loss)
            self.loss.learn(loss / self.unit)
            if loss > 0:
                self.log_loss.learn(math.log(loss))

    @property
    def unit(self) -> float:
        """What losses are measured in: the size of the first ones."""
        sizes = [abs(loss) for loss in self.first_losses]
        return sum(sizes) / len(sizes) if any(sizes) else 1.0

    @property
    def usual_norm(self) -> float:
        """The level of the norm; nan before there is one."""
        return math.exp(self.norm.level) if self.norm.count else math.nan

    def norm_limit(self, ratio: float, z: float, first_steps: int) -> float:
        """The norm that is both `ratio` times the usual one and `z` deviations over it; inf while nothing is usual."""
        if self.norm.count < first_steps:
            return math.inf
        return math.exp(min(700.0, self.norm.level + max(math.log(ratio), z * self.norm.std())))

    def loss_limit(self, z: float, rise: float, first_steps: int) -> float:
        """The loss that is `z` deviations over the usual one, also of its logarithm, and `rise` first losses."""
        if self.loss.count < first_steps:
            return math.inf
        limit = self.unit * (self.loss.level + max(rise, z * self.loss.std()))
        if self.log_loss.count >= first_steps:
            limit = max(limit, math.exp(min(700.0, self.log_loss.level + z * self.log_loss.std())))
        return limit

    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation of the norms that are kept."""
        mean = sum(self.norms) / len(self.norms)
        return mean, math.sqrt(sum((norm - mean) ** 2 for norm in self.norms) / len(self.norms))

    def quantile(self, share: float) -> float:
        """The norm that this share of those that are kept does not exceed."""
        ordered = sorted(self.norms)
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {**asdict(self), "norms": list(self.norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        for name in ("norm", "loss", "log_loss"):
            setattr(self, name, Level(**state[name]))
        self.first_losses, self.norms = list(state["first_losses"]), deque(state["norms"])


def judged(norm: float, loss: float, limits: tuple[float, float]) -> tuple[Trouble, str]:
    """What is wrong with a step, if anything, and in words."""
    norm_limit, loss_limit = limits
    if not norm <= LARGEST_NORM:
        return "nonfinite", f"the gradient norm is {norm}"
    if norm > norm_limit:
        return "norm", f"the gradient norm is {norm:.3g}, over the limit of {norm_limit:.3g}"
    if loss > loss_limit:
        return "loss", f"the loss is {loss:.4g}, over the limit of {loss_limit:.4g}"
    return "", ""
