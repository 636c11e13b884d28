"""The norm to clip gradients to: high enough to leave healthy steps alone, low enough to stop the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gradvitals.advise.advice import Advice, CannotTell, Confidence, Figure, advises_on, rounded_up
from gradvitals.advise.record import Floats, Record, Series
from gradvitals.format import number

NAMES = ("max_norm", "low", "high", "would_clip", "schedule", "drift", "clips_at", "clips")
"""`would_clip` and `clips` are shares of healthy steps: of the norm advised, and of the one in use."""

QUANTILE = 0.95
"""Share of healthy steps that the limit leaves alone."""
MIN_STEPS = 100
"""With fewer healthy steps the tail of their norms is not known."""
BEGINNING = 0.1
"""Share of the run left out at its start, before norms have found their level."""
PARTS = 4
"""Equal parts of the rest that are compared with each other."""
DRIFT = 1.5
"""If the limits of two parts are this factor apart, there is no one limit."""
IDLE = 3.0
"""A limit this much above the one advised stops only the worst."""
BATCHES = 20
"""Stretches of steps whose differences show how certain a quantile is."""
STUDENT_T = 2.093
"""97.5 % point of Student's t with `BATCHES` - 1 degrees of freedom."""


class Limit(NamedTuple):
    """A quantile of norms with its 95 % interval, and the steps it is of."""

    value: float
    low: float
    high: float
    first_step: int
    last_step: int


@advises_on("max_grad_norm", NAMES)
def advise_clip(record: Record) -> Advice:
    """Returns what to clip to, judged by the norms of the run's healthy steps."""
    if not len(record.norms):
        after = "gradvitals read norms only after clipping: call monitor.observe(loss) before clip_grad_norm_"
        raise CannotTell(after if record.norms_after_clipping else "the run has no finite gradient norm")
    late = record.healthy.since(record.first_step + BEGINNING * (record.last_step + 1 - record.first_step))
    if len(late) < MIN_STEPS:
        why = f"it needs {MIN_STEPS:,} healthy steps after the first tenth of the run, which has {len(late):,}"
        raise CannotTell(why, [_left_out(record)])
    quarters = zip(np.array_split(late.steps, PARTS), np.array_split(late.values, PARTS), strict=True)
    parts = [_limit(Series(*part)) for part in quarters]
    ends = parts[0].value, parts[-1].value
    apart = max(part.value for part in parts) / min(part.value for part in parts)
    drifts = apart >= DRIFT
    chosen = max(parts, key=lambda part: part.value) if drifts else _limit(late)
    limit = rounded_up(chosen.value)  # never below what it was made from
    limits = record.series("clip/max_norm")
    limits = limits.chosen(limits.values > 0)
    clips_at = float(limits.values[-1]) if len(limits) else None
    clips = float(np.mean(late.values > clips_at)) if clips_at is not None else None
    schedule = [
        {"first_step": first, "last_step": last, "max_norm": rounded_up(value), "low": low, "high": high}
        for value, low, high, first, last in parts
    ]
    share = float(np.mean(late.values > limit))
    confidence, because = _confidence(chosen, len(late), apart)
    return Advice(
        answer=_answer(limit, ends, drifts, clips_at, clips),
        confidence=confidence,
        because=because,
        values={
            "max_norm": limit,
            "low": chosen.low,
            "high": chosen.high,
            "would_clip": share,
            "schedule": schedule if drifts else None,
            "drift": ends[1] / ends[0],
            "clips_at": clips_at,
            "clips": clips,
        },
        figures=list(_figures(record, late, limit, share, chosen, parts, clips_at, clips)),
        notes=list(_notes(record, limit, drifts, clips_at, clips)),
    )


def quantile_interval(values: Floats, quantile: float) -> tuple[float, float, float]:
    """Returns a quantile of a series and its 95 % interval, by Woodruff's method.

    The error of the share below the quantile is turned into one of the quantile itself. That error comes from the
    differences between stretches of the series, since neighboring norms are alike, and is at least the one of
    independent values.
    """
    value = float(np.quantile(values, quantile))
    shares = [part.mean() for part in np.array_split(values <= value, BATCHES)]
    independent = math.sqrt(quantile * (1 - quantile) / len(values))
    error = STUDENT_T * max(independent, float(np.std(shares, ddof=1)) / math.sqrt(BATCHES))
    low, high = np.quantile(values, (max(quantile - error, 0.0), min(quantile + error, 1.0)))
    return value, float(low), float(high)


def _limit(part: Series) -> Limit:
    return Limit(*quantile_interval(part.values, QUANTILE), int(part.steps[0]), int(part.steps[-1]))


def _answer(limit: float, ends: tuple[float, float], drifts: bool, clips_at: float | None, clips: float | None) -> str:
    if drifts:
        first, last = map(rounded_up, ends)
        if max(first, last) < DRIFT * min(first, last):
            return f"Clip to {number(limit)} if you want a constant limit: healthy norms rise and fall."
        way = "fall" if last < first else "rise"
        numbers = f"from {number(first)} to {number(last)}; for a constant limit, use {number(limit)}"
        return f"Let the clipping limit {way} with the norms, {numbers}."
    if clips_at is None or clips is None:
        return f"Clip to a norm of {number(limit)}; this run does not clip."
    change = f"max_norm from {number(clips_at)} to {number(limit)}"
    if clips > 0.5:
        return f"Raise {change}: it clips {_percent(clips)} of healthy steps."
    if clips_at > IDLE * limit:
        return f"Lower {change}: now it stops only the worst spikes."
    return f"Keep max_norm at {number(clips_at)}; the norms of this run suggest {number(limit)}."


def _left_out(record: Record) -> Figure:
    troubled, outliers = int(record.troubled.sum()), int((record.outliers & ~record.troubled).sum())
    parts = (
        f"{troubled:,} inside findings" if troubled else "",
        f"{outliers:,} far above their neighbors" if outliers else "",
    )
    return Figure(
        text=f"{len(record.norms):,} norms; excluded: {' and '.join(filter(None, parts)) or 'none'}",
        values={"steps": len(record.norms), "in_findings": troubled, "outliers": outliers},
        first_step=record.first_step,
        last_step=record.last_step,
    )


def _figures(
    record: Record,
    late: Series,
    limit: float,
    share: float,
    chosen: Limit,
    parts: Sequence[Limit],
    clips_at: float | None,
    clips: float | None,
) -> Iterator[Figure]:
    span = {"first_step": int(late.steps[0]), "last_step": int(late.steps[-1])}
    median = float(np.median(late.values))
    whole = (chosen.first_step, chosen.last_step) == (span["first_step"], span["last_step"])
    which = "" if whole else f" of steps {chosen.first_step:,} to {chosen.last_step:,}, where norms are largest,"
    ends = f"{number(chosen.low)} to {number(chosen.high)}"
    yield Figure(
        text=f"95 % of healthy norms{which} are below {number(chosen.value)} ({ends}); the median is {number(median)}",
        values={"quantile": QUANTILE, "value": chosen.value, "low": chosen.low, "high": chosen.high, "median": median},
        **span,
    )
    out = record.norms.chosen(record.troubled | record.outliers).since(span["first_step"])
    stopped = int((out.values > limit).sum())
    hit = f"{number(limit)} would have clipped {_percent(share)} of {len(late):,} healthy steps"
    hit += f", and {stopped:,} of those left out ({len(out):,})" if len(out) else ""
    counts = {"share": share, "steps": len(late), "left_out": len(out), "stopped": stopped}
    yield Figure(text=hit, values=counts, **span)
    yield _left_out(record)
    first, last = parts[0].value, parts[-1].value
    moved = f"{'falls' if first > last else 'rises'} from {number(first)} to {number(last)}"
    of_parts = {"of_parts": [part.value for part in parts]}
    yield Figure(text=f"over four parts of the run this norm {moved}", values=of_parts, **span)
    if clips_at is not None and clips is not None:
        text = f"the run clips at {number(clips_at)}, and {_percent(clips)} of healthy steps exceed it"
        yield Figure(text=text, values={"max_norm": clips_at, "share": clips}, **span)


def _confidence(chosen: Limit, count: int, apart: float) -> tuple[Confidence, str]:
    width = (chosen.high - chosen.low) / chosen.value
    if apart >= DRIFT:
        return ("fair" if count >= 4 * MIN_STEPS else "low"), f"norms change by a factor of {apart:.2g} over the run"
    if count < 3 * MIN_STEPS or width > 0.4:
        return "low", f"{count:,} healthy steps put the limit between {number(chosen.low)} and {number(chosen.high)}"
    if count < 10 * MIN_STEPS or width > 0.15 or apart > 1.2:
        return "fair", f"{count:,} healthy steps; the limit differs between parts of the run by a factor of {apart:.2f}"
    return "good", f"{count:,} healthy steps, and parts of the run agree within a factor of {apart:.2f}"


def _notes(record: Record, limit: float, drifts: bool, clips_at: float | None, clips: float | None) -> Iterator[str]:
    if drifts:
        yield (
            "Some limits follow the norms: ZClip (mean + 2.5 standard deviations) or, for each tensor, AdaGC (1.05 × "
            "its moving average)."
        )
    if clips_at is not None and clips is not None and clips > 0.5 and limit > clips_at:
        if record.facts.betas is not None:
            yield "Adam hardly depends on the scale of gradients, so the step size stays about the same."
        else:
            longer = f"Steps get up to {number(limit / clips_at)} times as large with it"
            yield f"{longer}: lower the learning rate by the same factor."
    # Limits that the doctor names, each with why it is not the one to take.
    for name, finding in {finding.id: finding for finding in record.findings}.items():
        seen = finding.evidence.get("seen") or {}
        if name in ("clip_saturated", "clip_idle") and seen.get("max_norm", limit) != limit:
            steps = f"{number(seen['steps'])} steps" if "steps" in seen else "recent steps"
            named = f"`gradvitals doctor` names {number(seen['max_norm'])} ({name})"
            yield f"{named}, which is based on {steps} alone; prefer the one above."
        elif name == "clipped_twice" and {"loop", "optimizer"} <= seen.keys():
            lower = number(min(seen["loop"], seen["optimizer"]))
            yield (
                f"Clip in one place ({name}): {lower} is only the lower of two limits in use; prefer the one above, "
                "which is based on the norms."
            )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.99 else f"{100 * share:.0f} %"
