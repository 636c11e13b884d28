"""The norm to clip gradients to: high enough to leave healthy steps alone, low enough to stop what is not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradvitals.advise.advice import Advice, Confidence, Figure, cannot_tell, rounded_up
from gradvitals.advise.record import Floats, Record, Series
from gradvitals.format import number

TOPIC = "max_grad_norm"
NAMES = ("max_norm", "low", "high", "would_clip", "schedule", "drift", "clips_at", "clips")
"""`would_clip` and `clips` are shares of healthy steps: of the norm advised, and of the one in use."""

QUANTILE = 0.95
"""Share of healthy steps that the limit leaves alone."""
FEWEST = 100
"""Healthy steps below which the tail of their norms is not known."""
BEGINNING = 0.1
"""Share of the run left out at its start, where norms have not found their level."""
PARTS = 4
"""Equal parts of the rest that are compared with one another."""
DRIFTS = 1.5
"""Limits of two parts that are this factor apart are not one limit."""
IDLE = 3.0
"""A limit this much over the one advised only stops what would have been stopped later anyway."""
BATCHES = 20
"""Stretches of steps whose differences tell how sure a quantile is."""
BY_RECENT_STEPS = ("clip_saturated", "clip_idle")
"""Findings that name a limit by the steps before them."""
CLIPPED_TWICE = "clipped_twice"
STUDENT_T = 2.093
"""97.5 % point of Student's t with `BATCHES` - 1 degrees of freedom."""


@dataclass(frozen=True)
class Limit:
    """A quantile of norms with its 95 % interval, and the steps it is of."""

    value: float
    low: float
    high: float
    first_step: int
    last_step: int


def advise_clip(record: Record) -> Advice:
    """What to clip to, judged by the norms of the run's healthy steps."""
    everything = record.healthy
    if not len(record.norms):
        after = "norms were read only after clipping: call monitor.observe(loss) before clip_grad_norm_"
        why = after if record.norms_after_clipping else "no gradient norm was read"
        return cannot_tell(TOPIC, why, NAMES)
    late = everything.since(record.first_step + BEGINNING * (record.last_step + 1 - record.first_step))
    if len(late) < FEWEST:
        why = f"{len(late):,} healthy steps after the first tenth of the run are too few; it takes {FEWEST:,}"
        return cannot_tell(TOPIC, why, NAMES, [*_sorted_out(record)])
    parts = [_limit(part) for part in _parts(late)]
    whole, drift = _limit(late), parts[-1].value / parts[0].value
    apart = max(part.value for part in parts) / min(part.value for part in parts)
    loosest = max(parts, key=lambda part: part.value)
    chosen = loosest if apart >= DRIFTS else whole
    # Rounded up, so that it is never below what it was made from.
    limit = rounded_up(chosen.value)
    clips_at, clips = _in_use(record, late)
    values = {
        "max_norm": limit,
        "low": chosen.low,
        "high": chosen.high,
        "would_clip": float(np.mean(late.values > limit)),
        "schedule": [_step_of_schedule(part) for part in parts] if apart >= DRIFTS else None,
        "drift": drift,
        "clips_at": clips_at,
        "clips": clips,
    }
    confidence, because = _confidence(chosen, len(late), apart)
    return Advice(
        topic=TOPIC,
        answer=_answer(limit, parts, apart, clips_at, clips),
        confidence=confidence,
        because=because,
        values=values,
        figures=tuple(_figures(record, late, limit, chosen, parts, clips_at, clips)),
        notes=tuple(_notes(record, limit, apart, clips_at, clips)),
    )


def quantile_interval(values: Floats, quantile: float) -> tuple[float, float, float]:
    """A quantile of a series and its 95 % interval, by Woodruff's method.

    The error of the share below the quantile is turned into one of the quantile itself. That error comes from the
    differences between stretches of the series, as norms of neighbouring steps are alike: it is at least the one that
    independent values would have.
    """
    value = float(np.quantile(values, quantile))
    below = values <= value
    shares = [part.mean() for part in np.array_split(below, BATCHES)]
    independent = math.sqrt(quantile * (1 - quantile) / len(values))
    error = STUDENT_T * max(independent, float(np.std(shares, ddof=1)) / math.sqrt(BATCHES))
    low, high = np.quantile(values, (max(quantile - error, 0.0), min(quantile + error, 1.0)))
    return value, float(low), float(high)


def _limit(part: Series) -> Limit:
    value, low, high = quantile_interval(part.values, QUANTILE)
    return Limit(value, low, high, int(part.steps[0]), int(part.steps[-1]))


def _parts(late: Series) -> list[Series]:
    places = np.array_split(np.arange(len(late)), PARTS)
    return [Series(late.steps[chosen], late.values[chosen]) for chosen in places]


def _step_of_schedule(part: Limit) -> dict[str, float]:
    steps = {"first_step": part.first_step, "last_step": part.last_step}
    return {**steps, "max_norm": rounded_up(part.value), "low": part.low, "high": part.high}


def _in_use(record: Record, late: Series) -> tuple[float | None, float | None]:
    """The norm that the loop clips to at its end, and the share of healthy steps that are over it."""
    limits = record.series("clip/max_norm")
    limits = limits.chosen(limits.values > 0)
    if not len(limits):
        return None, None
    return float(limits.values[-1]), float(np.mean(late.values > limits.values[-1]))


def _answer(limit: float, parts: Sequence[Limit], apart: float, clips_at: float | None, clips: float | None) -> str:
    if apart >= DRIFTS:
        way = "fall" if parts[-1].value < parts[0].value else "rise"
        first, last = rounded_up(parts[0].value), rounded_up(parts[-1].value)
        if max(first, last) < DRIFTS * min(first, last):
            return f"Clip to {number(limit)} if it is to be one number: healthy norms come and go in size."
        return (
            f"Let the limit {way} with the norms, from {number(first)} to {number(last)}; if it is to be one number, "
            f"{number(limit)}."
        )
    if clips_at is None or clips is None:
        return f"Clip to a norm of {number(limit)}; this run does not clip."
    if clips > 0.5:
        over = f"{_percent(clips)} of healthy steps are clipped"
        return f"Raise max_norm from {number(clips_at)} to {number(limit)}: {over}."
    if clips_at > IDLE * limit:
        return f"Lower max_norm from {number(clips_at)} to {number(limit)}: where it is, it stops only the worst."
    return f"Keep max_norm at {number(clips_at)}; the norms of this run would give {number(limit)}."


def _sorted_out(record: Record) -> list[Figure]:
    troubled, outliers = int(record.troubled.sum()), int((record.outliers & ~record.troubled).sum())
    values = {"steps": len(record.norms), "in_findings": troubled, "outliers": outliers}
    parts = (
        f"{troubled:,} inside findings" if troubled else "",
        f"{outliers:,} far above those around" if outliers else "",
    )
    text = f"{len(record.norms):,} norms were read; left out: {' and '.join(filter(None, parts)) or 'none'}"
    return [Figure(text=text, values=values, first_step=record.first_step, last_step=record.last_step)]


def _figures(
    record: Record,
    late: Series,
    limit: float,
    chosen: Limit,
    parts: Sequence[Limit],
    clips_at: float | None,
    clips: float | None,
) -> list[Figure]:
    median = float(np.median(late.values))
    span = {"first_step": int(late.steps[0]), "last_step": int(late.steps[-1])}
    out = record.norms.chosen(record.troubled | record.outliers).since(span["first_step"])
    stopped = int((out.values > limit).sum())
    share = float(np.mean(late.values > limit))
    of_which = (
        ""
        if chosen.first_step == span["first_step"] and chosen.last_step == span["last_step"]
        else (f" of steps {chosen.first_step:,} to {chosen.last_step:,}, where norms are largest")
    )
    told = (
        f"95 % of healthy norms{of_which} are under {number(chosen.value)} ({number(chosen.low)} to "
        f"{number(chosen.high)}); their median is {number(median)}"
    )
    numbers = {"quantile": QUANTILE, "value": chosen.value, "low": chosen.low, "high": chosen.high, "median": median}
    hit = f"{number(limit)} would have clipped {_percent(share)} of {len(late):,} healthy steps"
    hit += f", and {stopped:,} of those left out ({len(out):,})" if len(out) else ""
    figures = [
        Figure(text=told, values=numbers, **span),
        Figure(text=hit, values={"share": share, "steps": len(late), "left_out": len(out), "stopped": stopped}, **span),
        *_sorted_out(record),
    ]
    ends = (parts[0].value, parts[-1].value)
    moved = "falls" if ends[0] > ends[1] else "rises"
    text = f"over four parts of the run that figure {moved} from {number(ends[0])} to {number(ends[1])}"
    figures.append(Figure(text=text, values={"of_parts": [part.value for part in parts]}, **span))
    if clips_at is not None and clips is not None:
        text = f"the run clips at {number(clips_at)}, which {_percent(clips)} of healthy steps are over"
        figures.append(Figure(text=text, values={"max_norm": clips_at, "share": clips}, **span))
    return figures


def _confidence(chosen: Limit, count: int, apart: float) -> tuple[Confidence, str]:
    width = (chosen.high - chosen.low) / chosen.value
    if apart >= DRIFTS:
        return ("fair" if count >= 4 * FEWEST else "low"), f"norms change by a factor of {apart:.2g} over the run"
    if count < 3 * FEWEST or width > 0.4:
        return "low", f"{count:,} healthy steps put it between {number(chosen.low)} and {number(chosen.high)}"
    if count < 10 * FEWEST or width > 0.15 or apart > 1.2:
        return "fair", f"{count:,} healthy steps; over parts of the run it differs by a factor of {apart:.2f}"
    return "good", f"{count:,} healthy steps, and parts of the run agree within a factor of {apart:.2f}"


def _notes(record: Record, limit: float, apart: float, clips_at: float | None, clips: float | None) -> list[str]:
    notes = []
    if apart >= DRIFTS:
        notes.append(
            "A limit that follows the norms does this by itself: ZClip (mean + 2.5 standard deviations) or, for each "
            "tensor, AdaGC (1.05 × its moving average)."
        )
    if clips_at is not None and clips is not None and clips > 0.5 and limit > clips_at:
        adam = record.facts.betas is not None
        notes.append(
            "Adam hardly sees how long all gradients are, so that the step stays about what it was."
            if adam
            else f"Steps get up to {number(limit / clips_at)} times as long with it: lower the learning rate as far."
        )
    notes.extend(_other_limits(record, limit))
    return notes


def _other_limits(record: Record, limit: float) -> Iterator[str]:
    """Limits that the doctor names, each with why it is not the one to take."""
    for name, finding in {finding.id: finding for finding in record.findings}.items():
        seen = finding.evidence.get("seen")
        told = {key: value for key, value in seen.items() if _is_limit(value)} if isinstance(seen, Mapping) else {}
        if name in BY_RECENT_STEPS and told.get("max_norm", limit) != limit:
            steps = f"{number(told['steps'])} steps" if "steps" in told else "recent steps"
            named = f"`gradvitals doctor` names {number(told['max_norm'])} ({name})"
            yield f"{named}, which goes by {steps} alone: take the one above."
        elif name == CLIPPED_TWICE and {"loop", "optimizer"} <= told.keys():
            lower = number(min(told["loop"], told["optimizer"]))
            yield (
                f"Clip in one place ({CLIPPED_TWICE}): {lower} is only the lower of the two limits in use; take the "
                "one above, which goes by the norms."
            )


def _is_limit(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.99 else f"{100 * share:.0f} %"
