"""Where to decay the learning rate: where the GSNR has dropped, by the manual's rule, and the loss has levelled out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gradvitals.advise.advice import Advice, Confidence, Figure, cannot_tell
from gradvitals.advise.record import Floats, Record, Series
from gradvitals.diagnose.history import Average, fall
from gradvitals.format import number

TOPIC = "decay"
NAMES = ("step", "lr", "to_lr", "level_since", "gsnr_dropped", "decays_from")
"""`step` is where to begin; None to go on as it is."""

FEWEST = 100
"""Losses in the stretch that has to be level."""
STRETCH = 1 / 3
"""Share of the run that it has to be, at its end."""
LEVEL = 0.01
"""Share of itself that the loss may fall over it."""
SURE = 0.02
"""Share of itself that the error of its fall may be, at two standard errors."""
FACTOR = 4.0
"""How far the GSNR has to have dropped, by intervals that share no reading."""
AVERAGED = 5
"""Readings in a GSNR at least."""
YOUNG = 0.1
"""Share of the run, at its start, whose GSNR no later one is compared with: it is high in every run."""
CONSTANT = 0.05
"""Share by which the learning rate may lie under its highest at the end and not have decayed."""
CUT = 3.0
"""What the learning rate is divided by, as the finding `decay_due` has it."""


@dataclass(frozen=True)
class Course:
    """How the loss went over the last stretch at a learning rate that did not decay."""

    known: bool
    level: bool
    since: int
    until: int
    fell: float
    error: float
    mean: float


def advise_decay(record: Record) -> Advice:
    """Whether there was a step from which on the learning rate should have been lower."""
    if not len(record.lr) or record.lr.values.max() <= 0:
        return cannot_tell(TOPIC, "no learning rate was read", NAMES)
    decays = _decays_from(record.lr)
    until = record.last_step + 1 if decays is None else decays
    course = loss_course(record.loss.chosen(record.loss.steps < until))
    begin = record.first_step + YOUNG * (record.last_step - record.first_step)
    drop = gsnr_drop([average for average in record.averages if begin <= average.begins and average.step < until])
    figures = _figures(record, course, drop, decays)
    if course is None:
        short = f"{len(record.loss):,} steps with a loss are too few; it takes {round(FEWEST / STRETCH):,}"
        before = f"the learning rate decays from step {until:,} on, and before there are too few losses to judge by"
        why = "no loss was observed" if not len(record.loss) else short if decays is None else before
        return cannot_tell(TOPIC, why, NAMES, figures)
    if not course.known:
        return cannot_tell(TOPIC, "the loss is too noisy to see whether it still falls", NAMES, figures)
    if course.level and course.since <= begin:
        return cannot_tell(
            TOPIC, "the loss never fell, which is no matter of decay: see `gradvitals doctor`", NAMES, figures
        )
    lr = float(record.lr.values[record.lr.steps < until][-1])
    dropped = None if drop is None else drop[1].begins
    step = max(course.since, dropped if dropped is not None else 0) if course.level else None
    answer, confidence, because = _advice(course, drop, decays, lr, step)
    values = {
        "step": step,
        "lr": lr,
        "to_lr": lr / CUT if step is not None else None,
        "level_since": course.since if course.level else None,
        "gsnr_dropped": dropped,
        "decays_from": decays,
    }
    return Advice(
        topic=TOPIC, answer=answer, confidence=confidence, because=because, values=values, figures=tuple(figures)
    )


def loss_course(loss: Series) -> Course | None:
    """Whether the loss is level at its end, and since when; None where there are too few losses."""
    count = len(loss)
    if count * STRETCH < FEWEST:
        return None

    def judged(begin: int) -> tuple[float, float, float, bool]:
        part = _without_outliers(loss.values[begin:])
        fell, error = fall(part)
        mean = abs(float(part.mean()))
        return fell, error, mean, fell < max(2 * error, LEVEL * mean)

    begin = math.floor(count * (1 - STRETCH))
    fell, error, mean, level = judged(begin)
    since = begin
    while level and since > 0 and judged(earlier := max(0, since - count // 20))[3]:
        since = earlier
    return Course(
        known=2 * error < SURE * mean or fell > 3 * error,
        level=level,
        since=int(loss.steps[since if level else begin]),
        until=int(loss.steps[-1]),
        fell=fell,
        error=error,
        mean=mean,
    )


def gsnr_drop(averages: list[Average]) -> tuple[Average, Average] | None:
    """The best GSNR, and the first one after it that lies below a quarter of it, by their intervals."""
    best: Average | None = None
    for average in averages:
        if average.count < AVERAGED or math.isnan(average.low):
            continue
        if best is not None and best.step < average.begins and average.high * FACTOR < best.low:
            return best, average
        if best is None or average.low > best.low:
            best = average
    return None


def _decays_from(lr: Series) -> int | None:
    """The step from which on the learning rate is lower than its height; None where it stays up."""
    peak = float(lr.values.max())
    if lr.values[-1] > (1 - CONSTANT) * peak:
        return None
    return int(lr.steps[np.flatnonzero(lr.values >= 0.99 * peak)[-1]]) + 1


def _without_outliers(losses: Floats) -> Floats:
    middle = float(np.median(losses))
    reach = 6 * float(np.median(np.abs(losses - middle)))
    return np.asarray(np.clip(losses, middle - reach, middle + reach))


def _advice(
    course: Course, drop: tuple[Average, Average] | None, decays: int | None, lr: float, step: int | None
) -> tuple[str, Confidence, str]:
    if step is None:
        moved = f"still fell by {number(course.fell)}" if course.fell > 0 else f"rose by {number(-course.fell)}"
        still = f"the loss {moved} over steps {course.since:,} to {course.until:,}"
        faded = "" if drop is None else ", although the GSNR has dropped"
        if decays is not None:
            return f"Keep the decay where it is, from step {decays:,} on: until then {still}.", "fair", _one(drop)
        return f"No decay is due yet: {still}{faded}.", "fair" if drop is None else "low", _one(drop)
    where = f"the loss has been level since about step {course.since:,}"
    if decays is not None:
        return f"Decay earlier, from about step {step:,} on rather than {decays:,}: {where}.", "fair", _one(drop)
    cut = f"Decay from about step {step:,} on, first from {number(lr)} to about {number(lr / CUT)}"
    if drop is not None:
        return f"{cut}: {where}, and the GSNR has dropped to under a quarter.", "good", "both signs agree"
    return f"{cut}: {where}. The GSNR does not say so as well.", "low", "a level loss may also have other causes"


def _one(drop: tuple[Average, Average] | None) -> str:
    return "the loss says so; no drop of the GSNR was seen" if drop is None else "the loss and the GSNR do not agree"


def _figures(
    record: Record, course: Course | None, drop: tuple[Average, Average] | None, decays: int | None
) -> list[Figure]:
    figures = []
    rates = record.lr.values
    highest, at_end = number(float(rates.max())), number(float(rates[-1]))
    text = f"the learning rate was {highest} at its highest and {at_end} at the end"
    text += f"; it decays from step {decays:,} on" if decays is not None else ""
    values = {"highest": float(rates.max()), "last": float(rates[-1]), "decays_from": decays}
    figures.append(Figure(text=text, values=values, first_step=record.first_step, last_step=record.last_step))
    if course is not None:
        moved = "fell" if course.fell > 0 else "rose"
        text = (
            f"the loss {moved} by {number(abs(course.fell))} ± {number(2 * course.error)} around {number(course.mean)}"
        )
        values = {"fell": course.fell, "error": 2 * course.error, "loss": course.mean}
        figures.append(Figure(text=text, values=values, first_step=course.since, last_step=course.until))
    if drop is not None:
        best, low = drop
        text = (
            f"the GSNR ({record.gsnr_source}) was {number(best.value)} by step {best.step:,} and {number(low.value)} "
            f"({number(low.low)} to {number(low.high)}) by step {low.step:,}"
        )
        values = {"best": best.value, "gsnr": low.value, "low": low.low, "high": low.high}
        figures.append(Figure(text=text, values=values, first_step=best.begins, last_step=low.step))
    elif record.averages and record.averages[-1].count >= AVERAGED:
        last = record.averages[-1]
        text = (
            f"the GSNR ({record.gsnr_source}) did not drop by a factor of {FACTOR:g}; it ends at {number(last.value)}"
        )
        figures.append(Figure(text=text, values={"gsnr": last.value}, last_step=last.step))
    else:
        figures.append(Figure(text="no GSNR of enough readings at one set of weights to judge by"))
    return figures
