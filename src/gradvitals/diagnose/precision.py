"""Rules about numbers too small for their type."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.rule import Rule, Sign, register
from gradvitals.diagnose.step import Step
from gradvitals.types import Layout

SMALLEST = 2.0**-24
"""The smallest number of float16 above zero, 6e-8."""


@register
@dataclass
class PrecisionUnderflow(Rule):
    """Gradients so small that float16 rounds much of them to zero."""

    id = "precision_underflow"
    needs = ("tensors:grad/norm",)
    judges_after = 20
    min_steps = 3
    closes_after = 100

    near: float = 16.0
    """A tensor is near the end of its range where the root mean square of its gradient is under this times 6e-8."""
    zeros: float = 0.5
    """Share of exact zeros above which a tensor that is within 16 times `near` counts as well."""
    share: float = 0.1
    """Share of the half-precision tensors that must be so for a warning; below, it is told but does not alarm."""
    patience: int = 5
    """Steps in a row."""

    low_for: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0), init=False)
    zero_share: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0), init=False)
    """As last read."""

    def __post_init__(self) -> None:
        self._layout: Layout | None = None
        self._half: NDArray[np.bool_] = np.zeros(0, dtype=bool)

    def look(self, step: Step) -> Sign | None:
        """Fires while gradients are near the smallest number that float16 has."""
        norms = step.tensors("grad/norm")
        if step.layout is not self._layout:
            self._layout, autocast = step.layout, step.facts.autocast == "float16"
            self._half = np.array([autocast or info.dtype == "float16" for info in step.layout.tensors], dtype=bool)
        half = self._half
        if norms is None or not half.any():
            return None
        scaled = step.general.stage == "unscaled" or "step/skipped" in step.general.values
        count = len(half)
        self.low_for = np.append(self.low_for, np.zeros(max(0, count - len(self.low_for))))
        self.zero_share = np.append(self.zero_share, np.full(max(0, count - len(self.zero_share)), np.nan))
        zeros = step.tensors("grad/zero_fraction")
        if zeros is not None:
            self.zero_share = np.asarray(zeros, dtype=np.float64)
        sizes = step.layout.sizes
        # Of the elements that are not zero, as far as known: rows of an embedding are zero for a good reason.
        alive = np.where(self.zero_share < 1, 1 - self.zero_share, 1.0)
        rms = np.asarray(norms, dtype=np.float64) / np.sqrt(sizes * alive)
        floor = SMALLEST * self.near
        many_zeros = self.zero_share > self.zeros
        # Readings are unscaled, so that under a loss scale only what was lost in spite of it tells.
        low = (rms < SMALLEST) & many_zeros if scaled else (rms < floor) | ((rms < 16 * floor) & many_zeros)
        low &= half & (norms > 0)
        # Where even the largest is small, those that are all zero have been rounded to it.
        if not scaled and np.fmax.reduce(np.where(half, rms, 0.0)) < 16 * floor:
            low |= half & (norms == 0)
        self.low_for = np.where(low, self.low_for + 1, 0.0)
        chosen = np.flatnonzero(self.low_for >= self.patience)
        if not len(chosen) or step.history.steps_seen < self.min_steps:
            return None
        chosen = chosen[np.argsort(rms[chosen])]
        share = len(chosen) / float(half.sum())
        worst = int(chosen[0])
        alive_rms = rms[half & (norms > 0)]
        least = float(alive_rms.min()) if len(alive_rms) else 0.0
        seen = {"rms": least, "zeros": float(self.zero_share[worst]), "tensors": len(chosen), "percent": 100 * share}
        seen["scale"] = 2 ** max(1, min(16, math.ceil(math.log2(1e-3 / max(seen["rms"], SMALLEST)))))
        return Sign(
            severity="warning" if share >= self.share else "info",
            seen=seen,
            expected={"rms": SMALLEST * self.near, "smallest": SMALLEST},
            tensors=step.names(chosen[:20]),
            since=step.ago(int(self.low_for[worst]) - 1),
            causes=("scaled",) if scaled else ("unscaled",),
            cures=("scaled",) if scaled else ("unscaled",),
        )
