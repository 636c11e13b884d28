"""The learning rate, from how far one step in the middle of the run moved the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from gradvitals.advise.advice import Advice, CannotTell, Figure, advises_on
from gradvitals.advise.record import TROUBLE, Record
from gradvitals.format import number, percent
from gradvitals.types import Finding, Fix

NAMES = ("lr", "proposed", "ratio", "low", "high", "factor")

LEAST, TARGET, MOST = 2e-3, 5e-3, 3e-2
"""Update over weight norm in the middle of a run: below the first the rate is low, above the last it is high."""
FURTHEST = 10.0
"""The rate changes by this factor at most: what is right further off, only a run at the new rate shows."""
MIN_READINGS = 5
SURE_READINGS = 10
MIDDLE = (0.25, 0.75)
"""Part of the run that is judged: after the warmup, before the end of a decay."""
UNSTABLE = frozenset({*TROUBLE, "lr_too_high", "dead_units", "clip_saturated"})
"""Findings of a warning or worse with which no higher rate is advised."""


@advises_on("learning_rate", NAMES)
def advise_learning_rate(record: Record) -> Advice:
    """Returns whether the peak learning rate suits the size of the weights."""
    frozen = sum(info.frozen for info in record.run.tensors)
    if frozen:
        why = f"{frozen} of {len(record.run.tensors)} tensors are frozen, and fine-tuning needs small updates"
        raise CannotTell(why)
    if not len(record.lr) or record.lr.values.max() <= 0:
        raise CannotTell("the learning rate was never above zero")
    ratios = record.series("update/ratio")
    begin, end = (record.first_step + share * (record.last_step - record.first_step) for share in MIDDLE)
    middle = ratios.chosen((ratios.steps >= begin) & (ratios.steps <= end) & (ratios.values > 0))
    peak = float(record.lr.values.max())
    lowered = _lowered_by_doctor(record, peak)  # it comes first: weights that have grown hide how far a step moves them
    if len(middle) < MIN_READINGS and lowered is None:
        raise CannotTell(
            f"the middle of the run has {len(middle)} readings of updates but needs {MIN_READINGS}: train longer, or "
            "use a smaller tensor_every"
        )
    if len(middle) < MIN_READINGS:
        ratio = low = high = math.nan
        figures, because = [], "it is what `gradvitals doctor` proposes"
    else:
        low, ratio, high = (float(value) for value in np.quantile(middle.values, (0.25, 0.5, 0.75)))
        text = f"one step changes the weights by {percent(ratio)} of their norm (half of the readings: {percent(low)} "
        text += f"to {percent(high)})"
        values = {"ratio": ratio, "low": low, "high": high, "readings": len(middle)}
        span = {"first_step": int(middle.steps[0]), "last_step": int(middle.steps[-1])}
        figures = [Figure(text=text, values=values, **span)]
        because = f"{len(middle)} readings in the middle of the run; the healthy update size differs between models"
    factor = 1.0
    if lowered is not None:
        factor = lowered[1] / peak
    elif ratio < LEAST or ratio > MOST:
        factor = min(max(TARGET / ratio, 1 / FURTHEST), FURTHEST)
    unstable = next((one for one in record.findings if one.id in UNSTABLE and one.severity != "info"), None)
    if factor > 1 and unstable is not None:
        raise CannotTell(f"updates are small, but the run was not stable: {unstable.title}", figures)
    proposed = lowered[1] if lowered is not None else float(f"{peak * factor:.2g}") if factor != 1 else None
    # Clear where three quarters of the readings lie outside.
    clear = len(middle) >= SURE_READINGS and not (low <= LEAST <= high or low <= MOST <= high)
    return Advice(
        answer=_answer(peak, proposed, ratio) if lowered is None else _as_doctor(peak, *lowered),
        confidence="fair" if clear else "low",
        because=because,
        values={"lr": peak, "proposed": proposed, "ratio": ratio, "low": low, "high": high, "factor": factor},
        figures=figures,
        notes=list(_notes(record, factor)),
    )


def _answer(peak: float, proposed: float | None, ratio: float) -> str:
    size = f"one step changes the weights by {percent(ratio)} of their norm"
    if proposed is None:
        return f"Keep the learning rate of {number(peak)}: {size}."
    verb = "Raise" if proposed > peak else "Lower"
    return f"{verb} the learning rate from {number(peak)} to {number(proposed)}: {size} ({percent(TARGET)} is typical)."


def _lowered_by_doctor(record: Record, peak: float) -> tuple[Finding, float] | None:
    """Returns the first finding that is open and asks for a lower rate, and that rate."""
    for finding in record.findings:
        if finding.severity == "info" or finding.last_step is not None:
            continue
        for fix in finding.fixes:
            rate = fix.change.get("lr") if isinstance(fix, Fix) else None
            if isinstance(rate, (int, float)) and 0 < rate < peak:
                return finding, float(rate)
    return None


def _as_doctor(peak: float, finding: Finding, proposed: float) -> str:
    return f"Lower the learning rate from {number(peak)} to about {number(proposed)}: {finding.title}."


def _notes(record: Record, factor: float) -> Iterator[str]:
    if math.isclose(max(factor, 1 / factor), FURTHEST):
        yield f"This changes the rate by at most a factor of {FURTHEST:g}; ask again after the next run."
    if factor > 1:
        yield "This applies to training from scratch; pretrained weights need smaller updates."
    if factor > 1 and record.facts.betas is None:
        yield "If the loss starts to swing, go back halfway: the stable rate of SGD depends on the curvature."
