"""A run, read once for advice: its numbers over steps, and which of its steps were healthy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose import RULES, RunInfo
from gradvitals.diagnose.baseline import MEDIAN_ABS_TO_STD
from gradvitals.diagnose.history import Average, Averages, same_size
from gradvitals.errors import RunError
from gradvitals.report.state import ENDS, steps_spanned
from gradvitals.report.verdict import judge_run
from gradvitals.store.reader import Run
from gradvitals.types import SOURCES, Finding, Reading, Source

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]
Mask = NDArray[np.bool_]

TROUBLE = tuple(name for name, rule in RULES.items() if rule.taints_steps)
"""Findings that taint the gradients of their steps: advice ignores these steps if the finding is a warning or worse."""

BUGS = (
    *("stale_gradients", "unchanged_weights", "frozen_weights", "batches_given_up"),
    *(name for name, rule in RULES.items() if rule.is_setup),
)
"""Findings about the loop, the data, the model or the loss that decide how a run goes, whatever its settings."""

MENDED = ("clip", "skip", "roll_back")
"""Kinds of actions that answer a gradient which should not have been."""

BLOCK = 50
"""Steps that a norm is compared with: those around it."""
OUTLIER_Z = 5.0
"""Robust standard deviations of the logarithm above those around it, from which a norm is an outlier."""
SMALLEST_SPREAD = 0.03
"""Spread of the logarithm that neighbours have at least."""

LATE_READINGS = 2_000
"""Readings of the GSNR at the end of a run that show what its noise is now."""

AT_ONE_POINT: tuple[Source, ...] = ("microbatch", "ranks")
"""Sources whose samples were all taken with the same weights."""


@dataclass(frozen=True)
class Series:
    """One number over steps, oldest first. Only finite ones."""

    steps: Steps
    values: Floats

    def __len__(self) -> int:
        return len(self.values)

    def chosen(self, mask: Mask) -> Series:
        """A part of it."""
        return Series(self.steps[mask], self.values[mask])

    def since(self, step: float) -> Series:
        """The part from a step on."""
        return self.chosen(self.steps >= step)

    def at(self, steps: Steps) -> Floats:
        """Returns its values at some steps; NaN if it has none."""
        if not len(self):
            return np.full(len(steps), np.nan)
        places = np.searchsorted(self.steps, steps).clip(max=len(self) - 1)
        return np.where(self.steps[places] == steps, self.values[places], np.nan)


class Record:
    """A run, read for advice.

    Raises:
        RunError: If it has no readings.
    """

    def __init__(self, run: Run) -> None:
        last = run.last_step
        if last is None:
            raise RunError(f"{run.path} has no readings yet; so there is nothing to advise on")
        self.run = run
        self.last_step = last
        meta = run.meta
        facts = meta.get("facts")
        self.facts = RunInfo.from_json(facts) if isinstance(facts, dict) else RunInfo()
        config = meta.get("config")
        kept = config.get("gsnr_window") if isinstance(config, dict) else None
        self.window = kept if isinstance(kept, int) and kept >= 2 else 20
        self.findings = run.findings
        self.norms = self._norms()
        self.lr, self.loss = self.series("lr"), self.series("loss")
        steps = self.norms.steps if len(self.norms) else self.loss.steps
        self.num_steps = steps_spanned(run, steps) or last + 1
        self.first_step = int(steps[0]) if len(steps) else last

    def series(self, metric: str, source: str | None = None) -> Series:
        """Returns a global number over steps; empty if the run has none."""
        if metric not in self.run.metrics("values"):
            return Series(np.zeros(0, dtype=np.int64), np.zeros(0))
        steps, values = self.run.series(metric, source=source)
        return Series(steps, values).chosen(np.isfinite(values))

    def _norms(self) -> Series:
        norms = self.series("grad/norm")
        self.norms_after_clipping = 0
        if not len(norms):
            return norms
        steps, stages = self.run.stage("grad/norm")
        raw = ~np.isin(norms.steps, steps[stages == "clipped"])
        self.norms_after_clipping = int((~raw).sum())
        return norms.chosen(raw & (norms.values > 0))

    @cached_property
    def troubled(self) -> Mask:
        """Which of the norms are of steps inside a finding, or of steps at which something was done about them."""
        steps = self.norms.steps
        inside = np.isin(steps, [action.step for action in self.run.actions if action.kind in MENDED])
        for finding in self.findings:
            if finding.id in TROUBLE and finding.severity != "info":
                until = self.last_step if finding.last_step is None else finding.last_step
                inside |= (steps >= finding.first_step) & (steps <= until)
        return inside

    @cached_property
    def outliers(self) -> Mask:
        """Which of the norms lie far over those around them."""
        return far_above(self.norms.values)

    @property
    def healthy(self) -> Series:
        """The norms of the run without either."""
        return self.norms.chosen(~(self.troubled | self.outliers))

    @cached_property
    def root(self) -> Finding | None:
        """The first finding of `gradvitals doctor`; None if the run is healthy, or if only its end was found."""
        ranked = judge_run(self.run, self.findings).ranked
        return next((item.finding for item in ranked if item.weight != "info" and item.finding.id not in ENDS), None)

    @property
    def bug(self) -> Finding | None:
        """The first bug that was open at the end, so that the numbers of the run show it and no setting."""
        open_ones = (one for one in self.findings if one.last_step is None and one.severity != "info")
        known = [one for one in open_ones if one.id in BUGS]
        return self.root if self.root in known else next(iter(known), None)

    @cached_property
    def gsnr_source(self) -> Source | None:
        """The most trustworthy source of GSNR for the whole model; None if there is none."""
        names = self.run.sources("gsnr", "values")
        return next((source for source in SOURCES if source in names), None)

    @cached_property
    def averages(self) -> tuple[Average, ...]:
        """The GSNR of the model, of the source at one point and of the batch size that the run ended with.

        None of another source or batch size is among them: those are other quantities.
        """
        return self._averages(None)

    @cached_property
    def late_averages(self) -> tuple[Average, ...]:
        """Those of the last readings only, if the run is very long: reading all of them takes seconds."""
        return self._averages(LATE_READINGS)

    def _averages(self, last: int | None) -> tuple[Average, ...]:
        run, source = self.run, self.gsnr_source
        if source not in AT_ONE_POINT:
            return ()
        steps, sizes = run.batch_sizes("gsnr", source=source)
        steps, sizes = steps[-(last or 0) :], sizes[-(last or 0) :]
        known, unknown = run.metrics("values"), np.full(len(steps), np.nan)

        def at(metric: str, source: Source | None = None) -> Floats:
            # A run that is being written grows from one question to the next: answers are matched by their steps.
            return Series(*run.series(metric, source=source)).at(steps) if metric in known else unknown

        parts = {name: at(name, source) for name in ("gsnr", "gsnr_low", "gsnr_high")}
        ratios = at("grad/spike_ratio")
        wholes = Series(*run.batch_sizes("grad/norm")).at(steps) if "grad/norm" in known else unknown
        taken, found = Averages(window=self.window), []
        for i, step in enumerate(steps.tolist()):
            values = {name: float(part[i]) for name, part in parts.items()}
            reading = Reading(step=step, time=0.0, source=source, batch_size=float(sizes[i]), values=values)
            ratio = {"grad/spike_ratio": float(ratios[i])}
            whole = Reading(step=step, time=0.0, batch_size=float(wholes[i]), values=ratio)
            found.append(taken.take(reading, whole))
        averages = [average for average in found if average is not None]
        same = 0
        for i, (a, b) in enumerate(pairwise(averages), 1):
            if not (same_size(a.batch_size, b.batch_size) and same_size(a.step_size, b.step_size)):
                same = i
        return tuple(averages[same:])


def far_above(values: Floats) -> Mask:
    """Which values lie far over those around them, by the median and the spread of their logarithms."""
    count = len(values)
    if not count:
        return np.zeros(0, dtype=bool)
    logs = np.log(values)
    edges = np.linspace(0, count, max(1, count // BLOCK) + 1).astype(int)
    found = np.zeros(count, dtype=bool)
    for begin, end in pairwise(edges):
        part = logs[begin:end]
        away = part - np.median(part)
        spread = max(MEDIAN_ABS_TO_STD * float(np.median(np.abs(away))), SMALLEST_SPREAD)
        found[begin:end] = away > OUTLIER_Z * spread
    return found


def apart(averages: Iterable[Average]) -> tuple[Average, ...]:
    """Returns averages that share no reading, with the newest, in order: only these are independent."""
    kept: list[Average] = []
    for average in reversed(list(averages)):
        if not kept or average.step < kept[-1].begins:
            kept.append(average)
    return tuple(reversed(kept))
