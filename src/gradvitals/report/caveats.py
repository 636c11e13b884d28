"""When a number or a silent rule must not be taken at face value: GSNR below zero, Adam's memory, wide intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from gradvitals.advise import Advice
from gradvitals.advise.batch import advise_batch
from gradvitals.advise.record import Record, Series
from gradvitals.diagnose import RULES
from gradvitals.diagnose.history import BETAS, HUGE, steps_kept
from gradvitals.diagnose.rules.batch import BatchTooLarge, BatchTooSmall, EstimatorUnreliable
from gradvitals.report.format import number
from gradvitals.report.verdict import RankedFinding
from gradvitals.store.reader import Run
from gradvitals.types import SOURCES

NEGATIVE = "a true GSNR is never below 0: read a negative estimate as 0, no measurable signal"
# Adam's second moment reaches back further than its first, and both treat the gradients of steps as independent.
NEGATIVE_ADAM = (
    f"{NEGATIVE}. With Adam's moments, the estimate is negative if gradients have shrunk, or if they cancel from step "
    "to step, which the interval does not account for"
)
NEGATIVE_SAMPLES = (
    f"{NEGATIVE}. An estimate is negative by chance, or if the backward passes of a step sample different distributions"
)

SCALE_UNKNOWN = "too early: the noise scale is still too uncertain to judge the batch"
GSNR_UNKNOWN = "too early: the GSNR is not yet known within a factor of ten"
ADAM_UNKNOWN = "the latest GSNR from Adam's moments is not known within a factor of ten"
ADAM_ZERO = "the latest GSNR from Adam's moments cannot be distinguished from 0"
ADAM_FALSE = "the GSNR from Adam's moments is wrong for now, because of one huge gradient"

GSNR_RULES = tuple(name for name, rule in RULES.items() if rule.needs_known == "gsnr")
NOISE_RULES = tuple(name for name, rule in RULES.items() if rule.needs_known)
"""Rules that are silent both if all is well and if the noise is not known."""

LATEST_READINGS = 100
"""Readings at the end of a run in which to look for the last one with numbers."""


def negative_gsnr(values: Iterable[float], source: str | None) -> str:
    """Returns what to say beside values of GSNR; empty if none is below 0.

    >>> negative_gsnr([0.1, float("nan")], "adam")
    ''
    """
    if not any(value < 0 for value in values):
        return ""
    return NEGATIVE_ADAM if source == "adam" else NEGATIVE_SAMPLES


def negative_gsnr_in(findings: Iterable[RankedFinding]) -> str:
    """Returns what to say beside findings that name a GSNR below 0; empty if none does."""
    for item in findings:
        seen = item.finding.evidence.get("seen")
        if item.is_routine or not isinstance(seen, dict) or "source" not in seen:
            continue
        values = [seen[name] for name in ("gsnr", "high") if isinstance(seen.get(name), (int, float))]
        if caveat := negative_gsnr(values, str(seen["source"])):
            return caveat
    return ""


def adam_memory(run: Run) -> str:
    """Returns why the GSNR from Adam's moments is wrong at the end of a run; empty if it is not."""
    if "adam" not in run.sources("gsnr", "values") or "grad/spike_ratio" not in run.metrics("values"):
        return ""
    record = Record(run)
    readings = run.series("gsnr", source="adam")[0]
    ratios = record.series("grad/spike_ratio")
    norms, limits, skipped, left_out = (
        record.series(metric).at(ratios.steps)
        for metric in ("grad/norm", "clip/max_norm", "step/skipped", "step/left_out")
    )
    with np.errstate(invalid="ignore", divide="ignore"):  # of the gradients that Adam took in, after clipping
        clipped = np.where(limits < norms, ratios.values * limits / norms, ratios.values)
        is_huge = (clipped >= HUGE) & np.isfinite(clipped) & (skipped != 1) & (left_out != 1)
    huge = Series(ratios.steps, clipped).chosen(is_huge & (ratios.steps <= (readings[-1] if readings.size else -1)))
    if not len(huge):
        return ""
    known = record.facts.betas
    betas = known if known is not None and all(0 < beta < 1 for beta in known) else BETAS
    ends = huge.steps + np.array([steps_kept(ratio, betas) for ratio in huge.values.tolist()])
    at = int(np.argmax(ends))
    untouched = int(np.count_nonzero(readings > ends[at]))
    if untouched >= record.window:
        return ""
    every = float(np.median(np.diff(readings[-record.window :]))) if readings.size > 1 else 1.0
    until = math.ceil(max(ends[at], readings[-1]) + (record.window - untouched) * every)
    return (
        f"the gradient of step {int(huge.steps[at]):,} was {number(float(huge.values[at]))} times the usual norm and "
        f"is still in Adam's moments, so the GSNR from them is wrong until about step {until:,}"
    )


def silent_rules(run: Run) -> dict[str, str]:
    """Returns, by the id of a rule, why its silence does not mean that the check passed.

    `gradvitals advise` never contradicts it.
    """
    record = Record(run)
    by_adam = record.gsnr_source == "adam" and adam_memory(run) != ""
    about_gsnr = dict.fromkeys(GSNR_RULES, ADAM_FALSE) if by_adam else _unsure_gsnr(record)
    return {**_unsure_batch(advise_batch(record)), **about_gsnr}


def _unsure_batch(advice: Advice) -> dict[str, str]:
    if not advice.can_tell:
        return dict.fromkeys(("batch_too_small", "batch_too_large"), SCALE_UNKNOWN)
    size, low, high = (advice.values[name] for name in ("batch_size", "low", "high"))
    proposed = advice.values["proposed"] or size
    larger = "not far too small, but `gradvitals advise` finds that a larger batch pays off" if proposed > size else ""
    less = "not far too large, but `gradvitals advise` finds that a smaller batch is enough" if proposed < size else ""
    return {
        "batch_too_small": larger if high < BatchTooSmall.factor * size else SCALE_UNKNOWN,
        "batch_too_large": less if size < BatchTooLarge.far * low else SCALE_UNKNOWN,
    }


def _unsure_gsnr(record: Record) -> dict[str, str]:
    decade = EstimatorUnreliable.DECADE
    if record.gsnr_source == "adam":  # more steps need not make Adam's interval narrower
        lows, highs = record.series("gsnr_low", "adam"), record.series("gsnr_high", "adam")
        if not len(lows) or not len(highs):
            return {}
        low, high = float(lows.values[-1]), float(highs.values[-1])
        if low <= 0:
            return {"estimator_unreliable": ADAM_ZERO}
        return {} if high <= decade * low else {"estimator_unreliable": ADAM_UNKNOWN}
    if not record.late_averages:
        return {}
    last = record.late_averages[-1]
    known = last.count >= EstimatorUnreliable.READINGS and last.low > 0 and last.high <= decade * last.low
    return {} if known else {"estimator_unreliable": GSNR_UNKNOWN}


def layers_without_signal(run: Run) -> str:
    """Returns how many layers have a GSNR not distinguishable from 0, to append to the check of the model."""
    source = next((source for source in run.sources("gsnr", "values") if source in SOURCES), None)
    if source is None or source not in run.sources("gsnr_low", "layers"):
        return ""
    steps, _ = run.times("gsnr_low", kind="layers", source=source)
    if not steps.size:
        return ""
    _, rows = run.matrix("gsnr_low", "layers", source=source, since=int(steps[-LATEST_READINGS:][0]) - 1)
    known = rows[np.isfinite(rows).any(axis=1)]
    if not len(known):
        return ""
    lows = known[-1][np.isfinite(known[-1])]
    count = int((lows <= 0).sum())
    return f"; for {count:,} of {len(lows):,} layers it cannot be distinguished from 0" if count else ""
