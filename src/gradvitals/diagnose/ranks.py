"""Rules that compare the workers of a distributed run: their own gradients, their data, their copies of the weights.

All are shown the numbers of an audit only, which comes every hundred steps or so; a check is one audit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.baseline import Baseline
from gradvitals.diagnose.outlying import Outlying
from gradvitals.diagnose.rule import Rule, Sign, register
from gradvitals.diagnose.step import NAMED, Floats, Step

FEW = 4
"""Workers below which their spread at one check is mostly chance, and says little where it has grown."""


def _between_workers(step: Step, metric: str) -> float:
    """A number that compares workers: from the reading of that source, or the general one."""
    reading = step.reading("ranks")
    return step.value(metric) if reading is None else reading.values.get(metric, step.value(metric))


def _of_ranks(step: Step, metric: str) -> Floats | None:
    """One number a rank; None where it was not read at this step."""
    for reading in (step.reading("ranks"), step.general):
        if reading is not None and metric in reading.ranks:
            return np.asarray(reading.ranks[metric], dtype=np.float64)
    return None


def _world(step: Step, of_ranks: Floats | None = None) -> int:
    return len(of_ranks) if of_ranks is not None else step.facts.world_size


def _listed(ranks: Sequence[int] | NDArray[np.intp], most: int = 5) -> str:
    """``rank 3``, ``ranks 1 and 3``, or ``ranks 1, 2, 3, 4, 5 and 7 more``."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    head, last = (names[:-1], names[-1]) if len(names) <= most else (names[:most], f"{len(names) - most} more")
    return f"ranks {', '.join(head)} and {last}"


def _all_of(world: int) -> str:
    return "both workers" if world == 2 else f"all {world} workers"


def _carried(remembered: Floats, size: int) -> Floats:
    """What is remembered of every rank, begun anew where their number has changed."""
    return remembered if len(remembered) == size else np.zeros(size)


@register
@dataclass
class HighDispersion(Rule):
    """The workers' own gradient norms lie far apart, or one worker's is far from the others'."""

    id = "high_dispersion"
    needs = ("ranks/norm_dispersion",)
    closes_after = 500

    most: float = 1.0
    """Standard deviation over mean of the local norms. With equal shards of the same data it is well below."""
    ratio: float = 3.0
    """Over what is usual for this run, from `least` on."""
    least: float = 0.3
    """Dispersion below which it is not told even where it has grown."""
    in_a_row: int = 4
    """Checks at which it must be so. One of them can be a single odd shard."""
    off: float = 1.3
    """One worker's norm over, or under, that of the others by this factor is too much, if it lasts."""
    margin: float = 0.5
    """Robust standard deviations beyond what the farthest of so many workers is expected at; what is over adds up."""
    checks: float = 4.0
    """Checks, each far out, at which a worker is named; half a check more for each factor of ten over 8 workers."""

    usual: Baseline = field(default_factory=Baseline, init=False)
    seen_for: int = field(default=0, init=False)
    since: int = field(default=-1, init=False)
    outlying: Outlying = field(default_factory=Outlying, init=False)
    farthest: int = field(default=-1, init=False)
    """The worker that was farthest from the others at all of these checks; -1 where it was not always the same."""

    def look(self, step: Step) -> Sign | None:
        """Fires when one worker stays far from the others, or all of them from each other."""
        value = _between_workers(step, "ranks/norm_dispersion")
        if math.isnan(value):
            return None
        one = self._one_worker(step, value)
        all_ = self._all_workers(step, value)
        return one or all_

    def _all_workers(self, step: Step, value: float) -> Sign | None:
        now = np.array([value])
        before = float(self.usual.usual()[0]) if len(self.usual.count) and self.usual.count[0] >= 10 else math.nan
        world = _world(step, _of_ranks(step, "ranks/norm"))
        grown = value > self.ratio * before and value > self.least and not 1 < world < FEW
        if not (value > self.most or grown):
            self.usual.push(now)
            self.seen_for = 0
            return None
        ratios = _of_ranks(step, "ranks/norm_ratio")
        self._note_farthest(ratios)
        self.since = step.number if not self.seen_for else self.since
        self.seen_for += 1
        if self.seen_for < self.in_a_row:
            return None
        if ratios is not None and self.farthest >= 0 and world > 2:
            return self._named(value, np.array([self.farthest]), ratios, self.since)
        seen: dict[str, Any] = {"dispersion": value, "usual": before, "world_size": world, "since": self.since}
        apart = f"the gradient norms of the {world} workers lie far apart: their spread is {value:.3g} of their mean"
        seen["what"] = apart
        expected = {"dispersion": before if math.isfinite(before) else self.most}
        return Sign(
            severity="warning", seen=seen, expected=expected, since=self.since, causes=("changed",) if grown else ()
        )

    def _note_farthest(self, ratios: Floats | None) -> None:
        if ratios is None or not (np.isfinite(ratios) & (ratios > 0)).any():
            self.farthest = -1
            return
        with np.errstate(divide="ignore"):
            now = int(np.nanargmax(np.abs(np.log(ratios))))
        self.farthest = now if not self.seen_for or now == self.farthest else -1

    def _one_worker(self, step: Step, value: float) -> Sign | None:
        ratios, z = _of_ranks(step, "ranks/norm_ratio"), _of_ranks(step, "ranks/norm_z")
        if ratios is None or z is None:
            return None
        ranks, factors = self.outlying.take(
            step.number, ratios, z, off=self.off, margin=self.margin, checks=self.checks
        )
        if not len(ranks):
            return None
        first = int(ranks[np.argmax(np.abs(np.log(factors[ranks])))])
        return self._named(value, ranks, factors, self.outlying.since(first))

    def _named(self, value: float, ranks: NDArray[np.intp], factors: Floats, since: int) -> Sign:
        first = int(ranks[np.argmax(np.abs(np.log(factors[ranks])))])
        factor = float(factors[first])
        seen: dict[str, Any] = {"dispersion": value, "world_size": len(factors), "since": since, "ratio": factor}
        seen["ranks"] = [int(rank) for rank in ranks[:NAMED]]
        distinct = np.unique(factors[np.isfinite(factors)].round(9))
        of_two = len(distinct) == 2 and bool(abs(distinct.prod() - 1) < 1e-6)  # each is held against the other
        if of_two:
            high, low = (_listed(np.flatnonzero(part)) for part in (factors > 1, factors < 1))
            seen["what"] = f"the gradient norms of {high} are {distinct[1]:.3g} times those of {low}"
        else:
            seen |= {"rank": first}
            seen["what"] = f"the gradient norms of {_listed(ranks)} are {factor:.3g} times those of the other workers"
        return Sign(
            severity="warning",
            seen=seen,
            expected={"ratio": f"within a factor of {self.off:g}"},
            rank=None if of_two else first,
            since=since,
            causes=("two",) if of_two else ("one",),
            cures=("compare",) if of_two else ("rank",),
        )


@register
@dataclass
class LowDispersion(Rule):
    """Workers have the same data: the same samples, the same gradients, or norms that only the same data gives."""

    id = "low_dispersion"
    needs = ("ranks/norm_dispersion",)
    closes_after = 500

    least: float = 1e-4
    """Standard deviation over mean of the local norms: what is left of it is rounding. A tenth of it for three workers
    and a hundredth for two, whose norms can agree by chance."""
    in_a_row: int = 2
    """Checks at which it must be so."""

    seen_for: int = field(default=0, init=False)
    since: int = field(default=-1, init=False)
    twins: Floats = field(default_factory=lambda: np.zeros(0), init=False)
    """Whose data every rank had at the last check; -1 for nobody's."""
    twins_for: Floats = field(default_factory=lambda: np.zeros(0), init=False)
    """For how many checks."""
    twins_since: Floats = field(default_factory=lambda: np.zeros(0), init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires where workers that should differ by their samples do not."""
        same = self._all_the_same(step)
        return self._doubles(step) or same

    def _all_the_same(self, step: Step) -> Sign | None:
        value = _between_workers(step, "ranks/norm_dispersion")
        if math.isnan(value):
            return None
        ratios = _of_ranks(step, "ranks/norm_ratio")
        world = _world(step, ratios)
        limit = self.least * 10.0 ** -max(0, 4 - world) if world > 1 else self.least
        if value > limit or not _between_workers(step, "grad/norm") > 0:
            self.seen_for = 0
            return None
        self.since = step.number if not self.seen_for else self.since
        self.seen_for += 1
        if self.seen_for < self.in_a_row:
            return None
        seen: dict[str, Any] = {"dispersion": value, "world_size": world, "who": _all_of(world)}
        seen["how"] = f"the spread of their gradient norms is {value:.2g} of their mean"
        return Sign(severity="warning", seen=seen, expected={"dispersion": f"over {limit:g}"}, since=self.since)

    def _doubles(self, step: Step) -> Sign | None:
        twins = _of_ranks(step, "ranks/twin")
        if twins is None:
            return None
        twins = np.nan_to_num(twins, nan=-1.0)
        again = (twins >= 0) & (twins == self.twins) if len(twins) == len(self.twins) else np.zeros(len(twins), bool)
        self.twins_for = np.where(again, _carried(self.twins_for, len(twins)) + 1, 1.0) * (twins >= 0)
        self.twins_since = np.where(again, _carried(self.twins_since, len(twins)), float(step.number))
        self.twins = twins
        ranks = np.flatnonzero(self.twins_for >= self.in_a_row)
        if not len(ranks):
            return None
        # Of two, the one that comes after is the double.
        later = ranks[twins[ranks] < ranks]
        first = int(later[0] if len(later) else ranks[0])
        everyone = len(ranks) == len(twins)
        seen: dict[str, Any] = {"duplicates": _between_workers(step, "ranks/duplicates"), "world_size": len(twins)}
        seen["ranks"] = [int(rank) for rank in ranks[:NAMED]]
        seen |= {} if everyone else {"rank": first, "twin": int(twins[first])}
        seen["who"] = _all_of(len(twins)) if everyone else _listed(ranks)
        seen["how"] = "their samples or gradients are the same"
        return Sign(
            severity="warning",
            seen=seen,
            expected={"duplicates": 0},
            rank=None if everyone else first,
            since=int(self.twins_since[first]),
            causes=() if everyone else ("pair",),
            cures=() if everyone else ("pair",),
        )


@register
@dataclass
class ReplicaMismatch(Rule):
    """Copies of the weights, or of optimizer state, that must be equal bit for bit are not."""

    id = "replica_mismatch"
    needs = ("ranks/checksum_mismatch",)
    closes_after = 500

    last_equal: int = field(default=-1, init=False)
    """The last check at which all copies were equal."""

    def look(self, step: Step) -> Sign | None:
        """Fires at the first check that finds a difference."""
        count = _between_workers(step, "ranks/checksum_mismatch")
        if not count > 0:
            self.last_equal = step.number if count == 0 else self.last_equal
            return None
        reading = step.reading("ranks") or step.general
        of_tensors = reading.tensors.get("ranks/checksum_mismatch", step.general.tensors.get("ranks/checksum_mismatch"))
        differ = np.flatnonzero(np.asarray(of_tensors) > 0) if of_tensors is not None else np.zeros(0, dtype=np.intp)
        replica = _of_ranks(step, "ranks/replica")
        odd = np.flatnonzero(replica == 1) if replica is not None else np.zeros(0, dtype=np.intp)
        with_others = replica is not None and bool((replica == 0).any())
        seen: dict[str, Any] = {"tensors": int(count), "world_size": _world(step, replica), "who": "workers"}
        if len(odd):
            seen |= {"ranks": [int(rank) for rank in odd[:NAMED]]}
            seen["who"] = f"{_listed(odd)} and the others" if with_others else _listed(odd)
        if len(odd) and with_others:
            seen["rank"] = int(odd[0])
        if self.last_equal >= 0:
            seen["last_equal"] = self.last_equal
        return Sign(
            severity="critical",
            seen=seen,
            expected={"tensors": 0},
            tensors=step.names(differ[:NAMED]),
            rank=int(odd[0]) if len(odd) and with_others else None,
        )


@register
@dataclass
class RngMismatch(Rule):
    """A rank has left the others in what they must do alike: draw random numbers, or read the samples they share."""

    id = "rng_mismatch"
    needs = ("ranks/out_of_step",)
    closes_after = 500

    in_a_row: int = 3
    """Checks at which it must be so. A rank may be one draw ahead at the moment of one."""

    out_for: Floats = field(default_factory=lambda: np.zeros(0), init=False)
    """For how many checks every rank has been out of step."""
    out_since: Floats = field(default_factory=lambda: np.zeros(0), init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires when the same rank stays out of step."""
        code = _of_ranks(step, "ranks/out_of_step")
        if code is None:
            return None
        out = code > 0
        before = _carried(self.out_for, len(code))
        self.out_since = np.where(before > 0, _carried(self.out_since, len(code)), float(step.number))
        self.out_for = np.where(out, before + 1, 0.0)
        ranks = np.flatnonzero(self.out_for >= self.in_a_row)
        if not len(ranks):
            return None
        first = int(ranks[0])
        samples = bool((code[ranks] >= 2).any())
        since = int(self.out_since[first])
        seen: dict[str, Any] = {"out_of_step": len(ranks), "world_size": len(code), "rank": first, "since": since}
        seen |= {"who": _listed(ranks), "what": "samples" if samples else "random numbers"}
        return Sign(
            severity="warning",
            seen=seen,
            expected={"out_of_step": 0},
            rank=first if len(ranks) < len(code) else None,
            since=since,
            causes=("samples",) if samples else ("draws",),
            cures=("samples",) if samples else ("draws",),
        )
