"""Which workers of a distributed run stay off from the others: evidence that adds up from check to check."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

HALF_NORMAL = 1.4826
"""Standard deviation over the median size, of a normal distribution around 0."""

KEPT = 16
"""Checks that are remembered."""

ENOUGH_CHANGES = 5
"""Changes from check to check after which their usual size is known well enough to judge by."""

ENOUGH_CHECKS = 12
"""Checks that an average must be of."""

FAR = 10.0
"""Standard deviations from which on one check counts for more."""

LEAST_SPREAD = 0.03
"""Averages that happen to agree may still differ: their spread counts as at least this, in units of log."""

STILL = 0.6
"""Part of a limit at which a worker that was over it is still off: it should not come and go around the limit."""

SLOW_MARGIN = 3.5
"""Standard deviations that an average must be off by, beyond what the farthest of so many workers is expected at."""


@dataclass
class Outlying:
    """The workers' norms against each other at the last checks, and how strongly each seems to be off.

    Two ways of being off are looked for. One is to be far out at several checks, which shows soon. The other is to be
    off on average over many, by less than one check can tell from chance. In both the noise is taken as what is larger:
    the spread of the workers, or what a worker changes by from check to check. Few workers say little about the first,
    and a worker that is off for good does not widen the second.
    """

    logs: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    """One row a check: every worker's norm over the median of the others', as a logarithm."""
    steps: list[int] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    """How much these have changed from check to check, for the worker in the middle."""
    above: Floats = field(default_factory=lambda: np.zeros(0))
    """Evidence that a worker's norm is too large."""
    below: Floats = field(default_factory=lambda: np.zeros(0))
    """Evidence that it is too small."""
    began: Floats = field(default_factory=lambda: np.zeros(0))
    """The step from which on there has been any; -1 for none."""
    named: Floats = field(default_factory=lambda: np.zeros(0))
    """1 for those that were off at the last check."""

    def take(
        self, step: int, ratios: Floats, z: Floats, *, off: float, margin: float, checks: float
    ) -> tuple[NDArray[np.intp], Floats]:
        """Take in one check.

        Args:
            step: When it was.
            ratios: Every rank's norm over the median of the other workers'.
            z: The same in robust standard deviations.
            off: Factor below which nobody is off.
            margin: Standard deviations, beyond what the farthest of so many workers is expected at, that add up.
            checks: Checks, each far out, at which a rank is named.

        Returns:
            The ranks that are off for good, and by what factor every rank is, on average over the last checks.
        """
        world = len(ratios)
        if self.logs.ndim != 2 or self.logs.shape[1] != world:
            self._begin(world)
        now = np.log(np.maximum(ratios, 1e-3))
        if len(self.logs):
            change = np.abs(now - self.logs[-1])
            self.changes += [] if np.isnan(change).all() else [float(np.nanmedian(change))]
        self.logs = np.append(self.logs, now[None], axis=0)[-KEPT:]
        self.steps, self.changes = [*self.steps, step][-KEPT:], self.changes[-KEPT:]
        noise = HALF_NORMAL / math.sqrt(2) * float(np.median(self.changes)) if self.changes else 0.0
        noise *= 1 + 3 / (max(1, len(self.changes)) * max(1, world - 1))  # of few numbers, it may well be more
        expected = math.sqrt(2 * math.log(max(world, 8)))
        more = max(0.0, math.log10(world / 8))  # the farthest of many are farther than those of normal noise
        far = self._far_out(step, now, z, noise, math.log(off), expected + margin, 2 * checks + more)
        average, steadily = self._on_average(noise, math.log(off), expected + SLOW_MARGIN + more)
        if len(self.changes) < ENOUGH_CHANGES:
            return np.zeros(0, dtype=np.intp), np.exp(now)
        self.named = (far | steadily).astype(np.float64)
        return np.flatnonzero(self.named), np.exp(np.where(steadily, average, now))

    def since(self, rank: int) -> int:
        """The step from which on there was evidence of a rank, as far as it is remembered."""
        return int(self.began[rank]) if self.began[rank] >= 0 else self.steps[0]

    def _begin(self, world: int) -> None:
        self.logs, self.steps, self.changes = np.zeros((0, world)), [], []
        self.above, self.below, self.named = np.zeros(world), np.zeros(world), np.zeros(world)
        self.began = np.full(world, -1.0)

    def _far_out(
        self, step: int, now: Floats, z: Floats, noise: float, least: float, allowed: float, limit: float
    ) -> NDArray[np.bool_]:
        size = np.minimum(np.abs(z), np.abs(now) / max(noise, 1e-12))
        score = np.where(np.abs(now) >= least, np.sign(now) * size, 0.0)
        found = np.zeros(len(now), dtype=bool)
        for name, sign in (("above", 1.0), ("below", -1.0)):
            gained = np.clip(sign * score - allowed, -2.0, 2.0) + (sign * score > FAR)
            gained = np.where(np.isnan(now), 0.0, gained)
            # No more than is needed: a worker that is well again must not be named at its next odd shard.
            evidence = np.clip(getattr(self, name) + gained, 0.0, limit)
            setattr(self, name, evidence)
            found |= (gained > 0) & (evidence >= limit)
        began = np.where(self.began < 0, float(step), self.began)
        self.began = np.where((self.above == 0) & (self.below == 0), -1.0, began)
        return found

    def _on_average(self, noise: float, least: float, allowed: float) -> tuple[Floats, NDArray[np.bool_]]:
        """The mean of every worker's checks without the quarter at either end, and who is off by it."""
        count = len(self.logs)
        if count < ENOUGH_CHECKS:
            return self.logs[-1], np.zeros(self.logs.shape[1], dtype=bool)
        ordered = np.sort(self.logs, axis=0)  # what is not known comes last, and makes the mean unknown
        average = ordered[count // 4 : count - count // 4].mean(axis=0)
        if np.isnan(average).all():
            return self.logs[-1], np.zeros(self.logs.shape[1], dtype=bool)
        spread = HALF_NORMAL * float(np.nanmedian(np.abs(average - np.nanmedian(average))))
        scale = max(spread if len(average) > 3 else 0.0, 1.1 * noise / math.sqrt(count), LEAST_SPREAD)
        part = np.where(self.named > 0, STILL, 1.0)
        return average, (np.abs(average) >= part * least) & (np.abs(average) > part * allowed * scale)
