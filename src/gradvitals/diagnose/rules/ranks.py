"""Rules that compare the ranks of a distributed run: their gradients, their data, their copies of the weights.

They see only the numbers of an audit, which comes every hundred steps or so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.baseline import MEDIAN_ABS_TO_STD, Baseline, Floats, empty
from gradvitals.diagnose.history import Streak, Streaks
from gradvitals.diagnose.message import Message, Observation
from gradvitals.diagnose.rule import Rule, register
from gradvitals.diagnose.step import MAX_NAMED, Step
from gradvitals.format import number

FEW = 4
"""Ranks below which their spread at one audit is mostly chance."""


def _ranks_value(step: Step, metric: str) -> float:
    """Returns a number that compares ranks: from the reading of that source, or the general one."""
    reading = step.reading("ranks")
    return step.value(metric) if reading is None else reading.values.get(metric, step.value(metric))


def _of_ranks(step: Step, metric: str) -> Floats | None:
    """Returns one number per rank; None if it was not read at this step."""
    for reading in (step.reading("ranks"), step.general):
        if reading is not None and metric in reading.ranks:
            return np.asarray(reading.ranks[metric], dtype=np.float64)
    return None


def _world(step: Step, of_ranks: Floats | None = None) -> int:
    return len(of_ranks) if of_ranks is not None else step.info.world_size


def _listed(ranks: Sequence[int] | NDArray[np.intp], most: int = 5) -> str:
    """Returns ``rank 3``, ``ranks 1 and 3``, or ``ranks 1, 2, 3, 4, 5 and 7 others``."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    head, last = (names[:-1], names[-1]) if len(names) <= most else (names[:most], f"{len(names) - most} others")
    return f"ranks {', '.join(head)} and {last}"


def _all_of(world: int) -> str:
    return "Both ranks" if world == 2 else f"All {world} ranks"


def _carried(remembered: Floats, size: int) -> Floats:
    """Returns what is remembered of every rank, or zeros if their number has changed."""
    return remembered if len(remembered) == size else np.zeros(size)


@dataclass
class Outliers:
    """How strongly each rank deviates from the others, from the norms of the last audits.

    A rank can be far out at several audits, which shows soon, or deviate on average over many, by less than one audit
    can tell from chance. The noise is the larger of two estimates: the spread between ranks, and the change of a rank
    from audit to audit. Few ranks say little about the first, and a rank that always deviates does not widen the
    second.
    """

    KEPT = 16  # audits remembered
    ENOUGH_CHANGES = 5  # changes from audit to audit after which their size is known
    ENOUGH_AUDITS = 12  # audits that an average needs
    FAR = 10.0  # standard deviations from which one audit counts for more
    LEAST_SPREAD = 0.03  # smallest spread of averages, in units of log: they may agree by chance
    STILL = 0.6  # a rank that deviated still does above this share of a limit, so that it does not come and go
    SLOW_MARGIN = 3.5  # standard deviations beyond the farthest expected of so many ranks, for an average

    logs: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    """One row per audit: every rank's norm over the median of the others', as a logarithm."""
    steps: list[int] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    """Median change of these over ranks, from audit to audit."""
    above: Floats = field(default_factory=empty)
    """Evidence that a rank's norm is too large."""
    below: Floats = field(default_factory=empty)
    """Evidence that it is too small."""
    began: Floats = field(default_factory=empty)
    """The step since which there has been evidence; -1 for none."""
    named: Floats = field(default_factory=empty)
    """1 for ranks that deviated at the last audit."""

    def add(
        self, step: int, ratios: Floats, z: Floats, *, factor: float, margin: float, audits: float
    ) -> tuple[NDArray[np.intp], Floats]:
        """Take one audit into account.

        Args:
            step: Its step.
            ratios: Every rank's norm over the median of the others'.
            z: The same in robust standard deviations.
            factor: Factor below which no rank deviates.
            margin: Standard deviations beyond the farthest expected of so many ranks, from which evidence adds up.
            audits: Audits, each far out, after which a rank is named.

        Returns:
            The ranks that deviate, and by what factor every rank does, on average over the last audits.
        """
        world = len(ratios)
        if self.logs.ndim != 2 or self.logs.shape[1] != world:
            self._reset(world)
        now = np.log(np.maximum(ratios, 1e-3))
        if len(self.logs):
            change = np.abs(now - self.logs[-1])
            self.changes += [] if np.isnan(change).all() else [float(np.nanmedian(change))]
        self.logs = np.append(self.logs, now[None], axis=0)[-self.KEPT :]
        self.steps, self.changes = [*self.steps, step][-self.KEPT :], self.changes[-self.KEPT :]
        noise = MEDIAN_ABS_TO_STD / math.sqrt(2) * float(np.median(self.changes)) if self.changes else 0.0
        noise *= 1 + 3 / (max(1, len(self.changes)) * max(1, world - 1))  # few numbers may underestimate it
        expected = math.sqrt(2 * math.log(max(world, 8)))
        more = max(0.0, math.log10(world / 8))  # the farthest of many are farther than those of normal noise
        far = self._far_out(step, now, z, noise, math.log(factor), expected + margin, 2 * audits + more)
        average, steadily = self._on_average(noise, math.log(factor), expected + self.SLOW_MARGIN + more)
        if len(self.changes) < self.ENOUGH_CHANGES:
            return np.zeros(0, dtype=np.intp), np.exp(now)
        self.named = (far | steadily).astype(np.float64)
        return np.flatnonzero(self.named), np.exp(np.where(steadily, average, now))

    def since(self, rank: int) -> int:
        """Returns the step since which there was evidence about a rank, as far as it is remembered."""
        return int(self.began[rank]) if self.began[rank] >= 0 else self.steps[0]

    def _reset(self, world: int) -> None:
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
            gained = np.clip(sign * score - allowed, -2.0, 2.0) + (sign * score > self.FAR)
            gained = np.where(np.isnan(now), 0.0, gained)
            # No more than needed: a rank that has recovered must not be named at its next odd shard.
            evidence = np.clip(getattr(self, name) + gained, 0.0, limit)
            setattr(self, name, evidence)
            found |= (gained > 0) & (evidence >= limit)
        began = np.where(self.began < 0, float(step), self.began)
        self.began = np.where((self.above == 0) & (self.below == 0), -1.0, began)
        return found

    def _on_average(self, noise: float, least: float, allowed: float) -> tuple[Floats, NDArray[np.bool_]]:
        """The mean of every rank's audits without the quarter at either end, and which ranks deviate by it."""
        count = len(self.logs)
        if count < self.ENOUGH_AUDITS:
            return self.logs[-1], np.zeros(self.logs.shape[1], dtype=bool)
        ordered = np.sort(self.logs, axis=0)  # unknown values come last, and make the mean unknown
        average = ordered[count // 4 : count - count // 4].mean(axis=0)
        if np.isnan(average).all():
            return self.logs[-1], np.zeros(self.logs.shape[1], dtype=bool)
        spread = MEDIAN_ABS_TO_STD * float(np.nanmedian(np.abs(average - np.nanmedian(average))))
        scale = max(spread if len(average) > 3 else 0.0, 1.1 * noise / math.sqrt(count), self.LEAST_SPREAD)
        part = np.where(self.named > 0, self.STILL, 1.0)
        return average, (np.abs(average) >= part * least) & (np.abs(average) > part * allowed * scale)


@register
@dataclass
class HighDispersion(Rule):
    """The gradient norms of the ranks lie far apart, or one rank's is far from the others'."""

    id = "high_dispersion"
    family = "ranks"
    needs = ("ranks/norm_dispersion",)
    closes_after = 500
    message = Message(
        name="Ranks far apart",
        pattern=(
            "One rank's gradient norm stays far from the others', or the standard deviation of all norms exceeds their "
            "mean, or far exceeds its baseline."
        ),
        title="{what}, since step {since}",
        causes={
            "one": (
                "Rank {rank} differs from the others in its data, loss scale or batch size, or its hardware is faulty"
            ),
            "two": (
                "The two ranks differ in their data, loss scale or batch size, or the hardware of one is faulty (with "
                "two ranks, {ratio} and its inverse do not show which one)"
            ),
            "changed": (
                "One rank has changed: a silent hardware failure, or data unlike that of the others (baseline: {usual})"
            ),
            "shards": "The shards differ in length or source, or one rank has samples of a single class",
            "seeds": "Seeds do not match between ranks, or their samplers are at different positions",
            "sizes": "Ranks have batches of different sizes, or some are padded",
        },
        fixes={
            "rank": "Look at the data and loss of rank {rank} at step {since}; if they are normal, test its hardware",
            "compare": (
                "Compare the local gradient norms of step {since}, rank by rank, and look at the data of the largest"
            ),
            "sampler": "Check that every rank calls sampler.set_epoch with the same epoch",
            "hardware": "If it is always the same rank, run a hardware test on its node",
        },
        passed="the ranks' gradients are of similar size",
    )

    MOST = 1.0  # standard deviation over mean of the local norms; equal shards of the same data are well below
    RATIO = 3.0  # over its baseline, from `LEAST` on
    LEAST = 0.3  # dispersion below which it is not reported even if it has grown
    IN_A_ROW = 4  # audits: one of them can be a single odd shard
    OFF = 1.3  # factor by which one rank's norm may differ from the others'
    MARGIN = 0.5  # robust standard deviations beyond the farthest expected of so many ranks; the excess adds up
    AUDITS = 4.0  # audits, each far out, after which a rank is named

    baseline: Baseline = field(default_factory=Baseline, init=False)
    streak: Streak = field(default_factory=Streak, init=False)
    outliers: Outliers = field(default_factory=Outliers, init=False)
    farthest: int = field(default=-1, init=False)
    """The rank that was farthest from the others at all of these audits; -1 if it was not always the same."""

    def check(self, step: Step) -> Observation | None:
        value = _ranks_value(step, "ranks/norm_dispersion")
        if math.isnan(value):
            return None
        one = self._one_rank(step, value)
        all_ = self._all_ranks(step, value)
        return one or all_

    def _all_ranks(self, step: Step, value: float) -> Observation | None:
        known = len(self.baseline.count) and self.baseline.count.item(0) >= 10
        before = float(self.baseline.usual()[0]) if known else math.nan
        world = _world(step, _of_ranks(step, "ranks/norm"))
        grown = value > self.RATIO * before and value > self.LEAST and not 1 < world < FEW
        if not (value > self.MOST or grown):
            self.baseline.learn_one(value)
            self.streak = Streak()
            return None
        ratios = _of_ranks(step, "ranks/norm_ratio")
        self._note_farthest(ratios)
        self.streak.add(True, step.number)
        if self.streak.count < self.IN_A_ROW:
            return None
        if ratios is not None and self.farthest >= 0 and world > 2:
            return self._name(value, np.array([self.farthest]), ratios, self.streak.since)
        return Observation(
            severity="warning",
            seen={"dispersion": value, "usual": before, "world_size": world, "since": self.streak.since},
            expected={"dispersion": before if math.isfinite(before) else self.MOST},
            text={
                "what": f"The gradient norms of {world} ranks are far apart: a spread of {number(value)} of their mean"
            },
            since=self.streak.since,
            causes=("changed",) if grown else (),
        )

    def _note_farthest(self, ratios: Floats | None) -> None:
        if ratios is None or not (np.isfinite(ratios) & (ratios > 0)).any():
            self.farthest = -1
            return
        with np.errstate(divide="ignore"):
            now = int(np.nanargmax(np.abs(np.log(ratios))))
        self.farthest = now if not self.streak.count or now == self.farthest else -1

    def _one_rank(self, step: Step, value: float) -> Observation | None:
        ratios, z = _of_ranks(step, "ranks/norm_ratio"), _of_ranks(step, "ranks/norm_z")
        if ratios is None or z is None:
            return None
        ranks, factors = self.outliers.add(
            step.number, ratios, z, factor=self.OFF, margin=self.MARGIN, audits=self.AUDITS
        )
        if not len(ranks):
            return None
        first = int(ranks[np.argmax(np.abs(np.log(factors[ranks])))])
        return self._name(value, ranks, factors, self.outliers.since(first))

    def _name(self, value: float, ranks: NDArray[np.intp], factors: Floats, since: int) -> Observation:
        first = int(ranks[np.argmax(np.abs(np.log(factors[ranks])))])
        factor = float(factors[first])
        seen: dict[str, Any] = {"dispersion": value, "world_size": len(factors), "since": since, "ratio": factor}
        seen["ranks"] = [int(rank) for rank in ranks[:MAX_NAMED]]
        distinct = np.unique(factors[np.isfinite(factors)].round(9))
        of_two = len(distinct) == 2 and bool(abs(distinct.prod() - 1) < 1e-6)  # each is compared with the other
        if of_two:
            high, low = (_listed(np.flatnonzero(part)) for part in (factors > 1, factors < 1))
            what = f"The gradient norms of {high} are {number(float(distinct[1]))}× those of {low}"
        else:
            seen["rank"] = first
            what = f"The gradient norms of {_listed(ranks)} are {number(factor)}× those of the other ranks"
        return Observation(
            severity="warning",
            seen=seen,
            expected={"ratio": f"within a factor of {self.OFF:g}"},
            text={"what": what},
            rank=None if of_two else first,
            since=since,
            causes=("two",) if of_two else ("one",),
            fixes=("compare",) if of_two else ("rank",),
        )


@register
@dataclass
class LowDispersion(Rule):
    """Ranks have the same data: the same samples, the same gradients, or norms that only the same data gives."""

    id = "low_dispersion"
    family = "ranks"
    needs = ("ranks/norm_dispersion",)
    closes_after = 500
    message = Message(
        name="Ranks with the same data",
        pattern="Ranks have the same samples or gradients, or equal gradient norms, which only the same data gives.",
        title="{who} have the same data: {how}",
        causes={
            "pair": "Rank {rank} reads the shard of rank {twin}: its loader has the wrong rank or number of ranks",
            "sampler": "Every rank reads the same samples: no DistributedSampler, or one that does not know its rank",
            "seed": "Every rank shuffles with the same seed and reads from the start",
            "after": "Norms were compared after gradients were averaged, so they are equal by design",
        },
        fixes={
            "pair": (
                "Compare the arguments of the loaders of ranks {twin} and {rank}: rank, number of ranks, seed and files"
            ),
            "sampler": (
                "Give each of the {world_size} ranks its own shard: DistributedSampler, or a loader seeded by rank"
            ),
            "check": "Print a batch's sample indices on two ranks: until they differ, GSNR means nothing",
        },
        passed="each rank has its own data",
    )

    # Standard deviation over mean of the local norms: what is left is rounding. A tenth of it for three ranks and a
    # hundredth for two, whose norms can agree by chance.
    LEAST = 1e-4
    IN_A_ROW = 2  # audits

    streak: Streak = field(default_factory=Streak, init=False)
    twins: Floats = field(default_factory=empty, init=False)
    """The rank whose data each rank had at the last audit; -1 for none."""
    twins_for: Floats = field(default_factory=empty, init=False)
    """For how many audits."""
    twins_since: Floats = field(default_factory=empty, init=False)

    def check(self, step: Step) -> Observation | None:
        same = self._all_the_same(step)
        return self._doubles(step) or same

    def _all_the_same(self, step: Step) -> Observation | None:
        value = _ranks_value(step, "ranks/norm_dispersion")
        if math.isnan(value):
            return None
        world = _world(step, _of_ranks(step, "ranks/norm_ratio"))
        limit = self.LEAST * 10.0 ** -max(0, 4 - world) if world > 1 else self.LEAST
        if value > limit or not _ranks_value(step, "grad/norm") > 0:
            self.streak = Streak()
            return None
        self.streak.add(True, step.number)
        if self.streak.count < self.IN_A_ROW:
            return None
        return Observation(
            severity="warning",
            seen={"dispersion": value, "world_size": world},
            expected={"dispersion": f"over {limit:g}"},
            text={"who": _all_of(world), "how": f"their gradient norms differ by {number(value, 2)} of their mean"},
            since=self.streak.since,
        )

    def _doubles(self, step: Step) -> Observation | None:
        twins = _of_ranks(step, "ranks/twin")
        if twins is None:
            return None
        twins = np.nan_to_num(twins, nan=-1.0)
        again = (twins >= 0) & (twins == self.twins) if len(twins) == len(self.twins) else np.zeros(len(twins), bool)
        self.twins_for = np.where(again, _carried(self.twins_for, len(twins)) + 1, 1.0) * (twins >= 0)
        self.twins_since = np.where(again, _carried(self.twins_since, len(twins)), float(step.number))
        self.twins = twins
        ranks = np.flatnonzero(self.twins_for >= self.IN_A_ROW)
        if not len(ranks):
            return None
        # Of two, the later one is the duplicate.
        later = ranks[twins[ranks] < ranks]
        first = int(later[0] if len(later) else ranks[0])
        everyone = len(ranks) == len(twins)
        seen: dict[str, Any] = {"duplicates": _ranks_value(step, "ranks/duplicates"), "world_size": len(twins)}
        seen["ranks"] = [int(rank) for rank in ranks[:MAX_NAMED]]
        seen |= {} if everyone else {"rank": first, "twin": int(twins[first])}
        listed = _all_of(len(twins)) if everyone else _listed(ranks).capitalize()
        return Observation(
            severity="warning",
            seen=seen,
            expected={"duplicates": 0},
            text={"who": listed, "how": "their samples or gradients are identical"},
            rank=None if everyone else first,
            since=int(self.twins_since[first]),
            causes=() if everyone else ("pair",),
            fixes=() if everyone else ("pair",),
        )


@register
@dataclass
class ReplicaMismatch(Rule):
    """Copies of the weights, or of optimizer state, that must be equal bit for bit differ."""

    id = "replica_mismatch"
    family = "ranks"
    needs = ("ranks/checksum_mismatch",)
    closes_after = 500
    taints_steps = True
    message = Message(
        name="Replicas differ",
        pattern="Weights or optimizer state that must be equal bit for bit on every rank differ between ranks.",
        title="Copies of the weights or of optimizer state differ between {who}: {where}",
        causes={
            "corruption": "Silent data corruption: memory, a broken link, or a faulty unit on one rank",
            "not_reduced": "Gradients were not averaged: no_sync on one rank, or parameters outside the wrapper",
            "random": "Ranks started with different weights, or code that differs between ranks changes a layer",
        },
        fixes={
            "go_back": ("Stop, and restore the last checkpoint from before step {step} at which all copies were equal"),
            "last_equal": "All copies were last found equal at step {last_equal}; an earlier checkpoint is good",
            "rank": "Test the hardware of rank {rank}, which differs from the majority",
            "broadcast": "Broadcast the weights from one rank that is known to be good",
            "hardware": "If there is no majority, test the hardware of all ranks that differ",
        },
        passed="all ranks hold the same weights",
        reference="arXiv 2502.12340",
    )

    last_equal: int = field(default=-1, init=False)
    """The last audit at which all copies were equal."""

    def check(self, step: Step) -> Observation | None:
        count = _ranks_value(step, "ranks/checksum_mismatch")
        if not count > 0:
            self.last_equal = step.number if count == 0 else self.last_equal
            return None
        reading = step.reading("ranks") or step.general
        of_tensors = reading.tensors.get("ranks/checksum_mismatch", step.general.tensors.get("ranks/checksum_mismatch"))
        differ = np.flatnonzero(np.asarray(of_tensors) > 0) if of_tensors is not None else np.zeros(0, dtype=np.intp)
        replica = _of_ranks(step, "ranks/replica")
        odd = np.flatnonzero(replica == 1) if replica is not None else np.zeros(0, dtype=np.intp)
        with_others = replica is not None and bool((replica == 0).any())
        seen: dict[str, Any] = {"tensors": int(count), "world_size": _world(step, replica)}
        who = "ranks"
        if len(odd):
            seen["ranks"] = [int(rank) for rank in odd[:MAX_NAMED]]
            who = f"{_listed(odd)} and the others" if with_others else _listed(odd)
        if len(odd) and with_others:
            seen["rank"] = int(odd[0])
        if self.last_equal >= 0:
            seen["last_equal"] = self.last_equal
        return Observation(
            severity="critical",
            seen=seen,
            expected={"tensors": 0},
            text={"who": who},
            tensors=step.names(differ[:MAX_NAMED]),
            rank=int(odd[0]) if len(odd) and with_others else None,
        )


@register
@dataclass
class RngMismatch(Rule):
    """A rank differs from the others in what must be the same: its random numbers, or the samples they share."""

    id = "rng_mismatch"
    family = "ranks"
    needs = ("ranks/out_of_step",)
    closes_after = 500
    message = Message(
        name="Rank out of sync",
        pattern=(
            "In several audits, a rank's random numbers differ from the others', although all started the same; or "
            "ranks that split the work on the same samples received different samples."
        ),
        title="The {what} of {who} have differed from those of the other ranks since step {since}",
        causes={
            "draws": "Only {who} drew extra random numbers, for example for an evaluation, a log or a retry",
            "samples": "The loader of {who} has a different position or shuffling seed than the rest of its group",
            "resumed": "One rank was resumed from a different checkpoint, or without its random state",
        },
        fixes={
            "draws": (
                "Save and restore the random state around code that only {who} runs, or use a separate torch.Generator "
                "there; harmless if nothing relies on equal random numbers"
            ),
            "samples": (
                "Give ranks that split one batch the same loader seed: the index of their group, not of the rank"
            ),
            "seeds": "If every rank is meant to draw its own numbers, seed each by its rank from the start",
        },
        passed="ranks that started with the same random numbers still draw the same ones",
    )

    IN_A_ROW = 3  # audits: a rank may be one draw ahead at the moment of one

    out: Streaks = field(default_factory=Streaks, init=False)
    """Audits in a row at which each rank was out of step."""

    def check(self, step: Step) -> Observation | None:
        code = _of_ranks(step, "ranks/out_of_step")
        if code is None:
            return None
        if len(self.out.count) != len(code):  # their number has changed
            self.out = Streaks()
        self.out.add(code > 0, step.number)
        ranks = np.flatnonzero(self.out.count >= self.IN_A_ROW)
        if not len(ranks):
            return None
        first = int(ranks[0])
        samples = bool((code[ranks] >= 2).any())
        since = int(self.out.since[first])
        cause = "samples" if samples else "draws"
        return Observation(
            severity="warning",
            seen={"out_of_step": len(ranks), "world_size": len(code), "rank": first, "since": since},
            expected={"out_of_step": 0},
            text={"who": _listed(ranks), "what": "samples" if samples else "random numbers"},
            rank=first if len(ranks) < len(code) else None,
            since=since,
            key=cause,
        )
