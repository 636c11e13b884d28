"""Rules that compare the workers of a distributed run: their local gradients, and their copies of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from gradvitals.diagnose.baseline import Baseline
from gradvitals.diagnose.rule import Rule, Sign, register
from gradvitals.diagnose.step import NAMED, Step


def _between_workers(step: Step, metric: str) -> float:
    """A number that compares workers: from the reading of that source, or the general one."""
    reading = step.reading("ranks")
    return step.value(metric) if reading is None else reading.values.get(metric, step.value(metric))


@register
@dataclass
class HighDispersion(Rule):
    """The workers' local gradient norms lie far apart."""

    id = "high_dispersion"
    needs = ("ranks/norm_dispersion",)
    closes_after = 500

    most: float = 1.0
    """Standard deviation over mean of the local norms. With equal shards of the same data it is well below."""
    ratio: float = 3.0
    """Over what is usual for this run, from `least` on."""
    least: float = 0.3
    """Dispersion below which it is not told even where it has grown."""
    in_a_row: int = 3
    """Checks at which it must be so. One of them can be a single odd shard."""

    usual: Baseline = field(default_factory=Baseline, init=False)
    seen_for: int = field(default=0, init=False)
    since: int = field(default=-1, init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires when it stays over its limit, or far over what it was."""
        value = _between_workers(step, "ranks/norm_dispersion")
        if math.isnan(value):
            return None
        now = np.array([value])
        before = float(self.usual.usual()[0]) if len(self.usual.count) and self.usual.count[0] >= 10 else math.nan
        grown = value > self.ratio * before and value > self.least
        if not (value > self.most or grown):
            self.usual.push(now)
            self.seen_for = 0
            return None
        self.since = step.number if not self.seen_for else self.since
        self.seen_for += 1
        if self.seen_for < self.in_a_row:
            return None
        seen = {"dispersion": value, "usual": before, "world_size": step.facts.world_size, "since": self.since}
        expected = {"dispersion": before if math.isfinite(before) else self.most}
        return Sign(
            severity="warning", seen=seen, expected=expected, since=self.since, causes=("changed",) if grown else ()
        )


@register
@dataclass
class LowDispersion(Rule):
    """The workers' local gradient norms are all the same: they were given the same data."""

    id = "low_dispersion"
    needs = ("ranks/norm_dispersion",)
    closes_after = 500

    least: float = 1e-4
    """Standard deviation over mean of the local norms: what is left of it is rounding."""
    in_a_row: int = 2
    """Checks at which it must be so."""

    seen_for: int = field(default=0, init=False)
    since: int = field(default=-1, init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires where local norms that should differ by their samples do not."""
        value = _between_workers(step, "ranks/norm_dispersion")
        if math.isnan(value):
            return None
        if value > self.least or not _between_workers(step, "grad/norm") > 0:
            self.seen_for = 0
            return None
        self.since = step.number if not self.seen_for else self.since
        self.seen_for += 1
        if self.seen_for < self.in_a_row:
            return None
        seen = {"dispersion": value, "world_size": step.facts.world_size}
        return Sign(severity="warning", seen=seen, expected={"dispersion": f"over {self.least:g}"}, since=self.since)


@register
@dataclass
class ReplicaMismatch(Rule):
    """Copies of the weights that must be equal bit for bit are not."""

    id = "replica_mismatch"
    needs = ("ranks/checksum_mismatch",)
    closes_after = 500

    def look(self, step: Step) -> Sign | None:
        """Fires at the first check that finds a difference."""
        count = _between_workers(step, "ranks/checksum_mismatch")
        if not count > 0:
            return None
        reading = step.reading("ranks") or step.general
        of_tensors = reading.tensors.get("ranks/checksum_mismatch")
        differ = np.flatnonzero(np.asarray(of_tensors) > 0) if of_tensors is not None else np.zeros(0, dtype=np.intp)
        seen = {"tensors": int(count), "world_size": step.facts.world_size}
        return Sign(severity="critical", seen=seen, expected={"tensors": 0}, tensors=step.names(differ[:NAMED]))
