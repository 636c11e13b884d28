"""Finds the step to decay the learning rate at: the GSNR has dropped, and the loss has leveled out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gradvitals.advise.advice import Advice, CannotTell, Confidence, Figure, advises_on
from gradvitals.advise.record import Floats, Record, Series
from gradvitals.diagnose.history import Average, fall
from gradvitals.format import number

NAMES = ("step", "lr", "to_lr", "level_since", "gsnr_dropped", "decays_from")
"""`step` is where to begin; None to go on as it is."""

MIN_LOSSES = 100
"""Losses in the stretch that has to be level."""
STRETCH = 1 / 3
"""Share of the run, at its end, that has to be level."""
LEVEL = 0.01
"""Share of itself that the loss may fall over it."""
SURE = 0.02
"""Share of itself that the error of its fall may be, at two standard errors."""
FACTOR = 4.0
"""Factor by which the GSNR must have dropped, by intervals that share no reading."""
MIN_READINGS = 5
"""The fewest readings in a GSNR."""
YOUNG = 0.1
"""Share of the run, at its start, whose GSNR no later one is compared with: it is high in every run."""
CONSTANT = 0.05
"""A learning rate that ends within this share of its highest has not decayed."""
CUT = 3.0
"""The divisor of the learning rate, as in the finding `decay_due`."""

Drop = tuple[Average, Average] | None


class Course(NamedTuple):
    """The loss over the last stretch with a constant learning rate."""

    known: bool
    level: bool
    since: int
    until: int
    fell: float
    error: float
    mean: float


@advises_on("decay", NAMES)
def advise_decay(record: Record) -> Advice:
    """Returns whether there was a step from which on the learning rate should have been lower."""
    if not len(record.lr) or record.lr.values.max() <= 0:
        raise CannotTell("the run has no learning rate")
    peak = float(record.lr.values.max())
    decays: int | None = None
    if record.lr.values[-1] <= (1 - CONSTANT) * peak:  # the step from which on the rate is below its height
        decays = int(record.lr.steps[np.flatnonzero(record.lr.values >= 0.99 * peak)[-1]]) + 1
    until = record.last_step + 1 if decays is None else decays
    course = loss_course(record.loss.chosen(record.loss.steps < until))
    begin = record.first_step + YOUNG * (record.last_step - record.first_step)
    drop = _gsnr_drop([average for average in record.averages if begin <= average.begins and average.step < until])
    figures = list(_figures(record, course, drop, decays))
    if not len(record.loss):
        raise CannotTell("no loss was observed", figures)
    if course is None and decays is not None:
        why = f"the learning rate decays from step {until:,} on, and there are too few losses before that"
        raise CannotTell(why, figures)
    if course is None:
        least = round(MIN_LOSSES / STRETCH)
        raise CannotTell(f"it needs {least:,} steps with a loss, and the run has {len(record.loss):,}", figures)
    if not course.known:
        raise CannotTell("the loss is too noisy to show whether it still falls", figures)
    if course.level and course.since <= begin:
        raise CannotTell("the loss never fell, which decay cannot fix: see `gradvitals doctor`", figures)
    lr = float(record.lr.values[record.lr.steps < until][-1])
    dropped = None if drop is None else drop[1].begins
    step = max(course.since, dropped or 0) if course.level else None
    answer, confidence, because = _answer(course, drop, decays, lr, step)
    return Advice(
        answer=answer,
        confidence=confidence,
        because=because,
        values={
            "step": step,
            "lr": lr,
            "to_lr": lr / CUT if step is not None else None,
            "level_since": course.since if course.level else None,
            "gsnr_dropped": dropped,
            "decays_from": decays,
        },
        figures=figures,
    )


def loss_course(loss: Series) -> Course | None:
    """Returns whether the loss is level at its end, and since when; None if there are too few losses."""
    count = len(loss)
    if count * STRETCH < MIN_LOSSES:
        return None

    def judged(begin: int) -> tuple[float, float, float, bool]:
        part = without_outliers(loss.values[begin:])
        fell, error = fall(part)
        mean = abs(float(part.mean()))
        return fell, error, mean, fell < max(2 * error, LEVEL * mean)

    begin = since = math.floor(count * (1 - STRETCH))
    fell, error, mean, level = judged(begin)
    while level and since > 0 and judged(earlier := max(0, since - count // 20))[3]:
        since = earlier
    known = 2 * error < SURE * mean or fell > 3 * error
    return Course(known, level, int(loss.steps[since]), int(loss.steps[-1]), fell, error, mean)


def without_outliers(losses: Floats) -> Floats:
    """Returns losses with those far from their median moved to six median deviations from it."""
    middle = float(np.median(losses))
    reach = 6 * float(np.median(np.abs(losses - middle)))
    return np.asarray(np.clip(losses, middle - reach, middle + reach))


def _gsnr_drop(averages: list[Average]) -> Drop:
    """Returns the best GSNR, and the first one after it that lies below a quarter of it, by their intervals."""
    best: Average | None = None
    for average in averages:
        if average.count < MIN_READINGS or math.isnan(average.low):
            continue
        if best is not None and best.step < average.begins and average.high * FACTOR < best.low:
            return best, average
        if best is None or average.low > best.low:
            best = average
    return None


def _answer(course: Course, drop: Drop, decays: int | None, lr: float, step: int | None) -> tuple[str, Confidence, str]:
    because = "the loss shows it; the GSNR did not drop" if drop is None else "the loss and the GSNR disagree"
    if step is None:
        moved = f"still fell by {number(course.fell)}" if course.fell > 0 else f"rose by {number(-course.fell)}"
        still = f"the loss {moved} over steps {course.since:,} to {course.until:,}"
        if decays is not None:
            return f"Keep the start of the decay at step {decays:,}: until then {still}.", "fair", because
        if drop is not None:
            return f"No decay is due yet: {still}, although the GSNR has dropped.", "low", because
        return f"No decay is due yet: {still}.", "fair", because
    level = f"the loss has been flat since about step {course.since:,}"
    if decays is not None:
        return f"Decay earlier, from about step {step:,} instead of {decays:,}: {level}.", "fair", because
    cut = f"Decay from about step {step:,} on, first from {number(lr)} to about {number(lr / CUT)}"
    if drop is not None:
        return f"{cut}: {level}, and the GSNR has dropped to under a quarter.", "good", "loss and GSNR agree"
    return f"{cut}: {level}. The GSNR does not confirm it.", "low", "a flat loss may have other causes"


def _figures(record: Record, course: Course | None, drop: Drop, decays: int | None) -> Iterator[Figure]:
    highest, last = float(record.lr.values.max()), float(record.lr.values[-1])
    text = f"the learning rate was {number(highest)} at its highest and {number(last)} at the end"
    text += f"; it decays from step {decays:,} on" if decays is not None else ""
    rates = {"highest": highest, "last": last, "decays_from": decays}
    yield Figure(text=text, values=rates, first_step=record.first_step, last_step=record.last_step)
    if course is not None:
        moved = f"{'fell' if course.fell > 0 else 'rose'} by {number(abs(course.fell))} ± {number(2 * course.error)}"
        yield Figure(
            text=f"the loss {moved} around {number(course.mean)}",
            values={"fell": course.fell, "error": 2 * course.error, "loss": course.mean},
            first_step=course.since,
            last_step=course.until,
        )
    source = f"the GSNR ({record.gsnr_source})"
    if drop is not None:
        best, low = drop
        ends = f"{number(low.value)} ({number(low.low)} to {number(low.high)})"
        yield Figure(
            text=f"{source} was {number(best.value)} by step {best.step:,} and {ends} by step {low.step:,}",
            values={"best": best.value, "gsnr": low.value, "low": low.low, "high": low.high},
            first_step=best.begins,
            last_step=low.step,
        )
    elif record.averages and record.averages[-1].count >= MIN_READINGS:
        end = record.averages[-1]
        text = f"{source} did not drop by a factor of {FACTOR:g}; it ends at {number(end.value)}"
        yield Figure(text=text, values={"gsnr": end.value}, last_step=end.step)
    else:
        yield Figure(text="too few GSNR readings at one set of weights")
