"""The batch size, from the noise scale: where larger batches still save steps, and where they only repeat samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gradvitals.advise.advice import Advice, CannotTell, Figure, advises_on
from gradvitals.advise.record import Record, apart
from gradvitals.diagnose.history import Average
from gradvitals.format import number

NAMES = ("noise_scale", "low", "high", "batch_size", "proposed", "steps_factor", "samples_factor")
"""`steps_factor` and `samples_factor`: what the batch in use takes over the least that is possible."""

MIN_READINGS = 5
"""The fewest readings in an average."""
SURE = 1.96
LARGER = 2.0
"""A larger batch is advised if the lower end of the noise scale is above this many batches."""
SMALLER = 0.5
"""A smaller one if the upper end is below this many."""

NO_SOURCE = {
    None: "this run has no GSNR, which needs two or more backward passes per step, or several ranks",
    "adam": (
        "the GSNR from Adam's moments alone counts the drift of gradients as noise; the batch size needs two or more "
        "backward passes per step"
    ),
}
PROXY = (
    "The noise scale is a proxy for the critical batch size, and closer to a lower bound: in language models the "
    "critical batch size is often far larger."
)


class Signal(NamedTuple):
    """The GSNR over averages that share no reading, at one batch size, and the noise scale from it."""

    value: float
    low: float
    high: float
    batch_size: float
    step_size: float
    first_step: int
    last_step: int
    readings: int

    @property
    def noise_scale(self) -> tuple[float, float, float]:
        """B_simple = B / GSNR, with the ends of its interval; NaN and infinity if the signal may be zero."""
        known = self.low > 0
        return (
            self.batch_size / self.value if known else math.nan,
            self.batch_size / self.high if self.high > 0 else math.nan,
            self.batch_size / self.low if known else math.inf,
        )


@advises_on("batch_size", NAMES)
def advise_batch(record: Record) -> Advice:
    """Returns whether the batch fits the noise of the gradients."""
    averages = [one for one in record.late_averages if one.count >= MIN_READINGS and math.isfinite(one.low)]
    if not averages:
        found = max((average.count for average in record.late_averages), default=0)
        few = (
            f"the latest GSNR at this batch size has {found} readings but needs {MIN_READINGS}: train longer, or use a "
            "smaller tensor_every"
        )
        raise CannotTell(NO_SOURCE.get(record.gsnr_source, few))
    late = [average for average in averages if average.begins >= record.last_step / 2] or averages[-1:]
    signal = joined(apart(late))
    value, low, high = signal.noise_scale
    size = signal.step_size if signal.step_size > 0 else signal.batch_size
    if math.isnan(signal.batch_size):
        why = "the batch size is unknown: pass it as watch(..., batch_size=...)"
        raise CannotTell(why, [_in_micro_batches(signal)])
    figures = list(_figures(record, signal, averages, size))
    still_open = (found for found in record.findings if found.last_step is None)
    named = (found.title for found in still_open if found.id in ("batch_too_small", "batch_too_large"))
    finding = next(named, "")
    if math.isnan(low) or (math.isinf(high) and low < LARGER * size):
        why = "the noise scale is not identifiable: the interval of the GSNR includes zero"
        raise CannotTell(why + (f". By other signs, {finding}" if finding else ""), figures)
    proposed = _proposed(low, high, size)
    known = math.isfinite(value)
    width = high / low
    if not known:
        because = "only a lower bound of the noise scale is known"
    elif width > 4:
        because = f"the interval of the noise scale spans a factor of {width:.2g}"
    else:
        because = f"its interval spans a factor of {width:.2g}, but the noise scale is only a proxy"
    return Advice(
        answer=_answer(value, low, size, proposed, finding),
        confidence="fair" if known and width <= 4 else "low",
        because=because,
        values={
            "noise_scale": value,
            "low": low,
            "high": high,
            "batch_size": size,
            "proposed": proposed,
            "steps_factor": 1 + value / size if known else None,
            "samples_factor": 1 + size / value if known else None,
        },
        figures=figures,
        notes=list(_notes(record, size, proposed)),
    )


def joined(averages: Sequence[Average]) -> Signal:
    """Returns the mean of averages that share no reading, each weighted by its number of readings.

    Weights by their errors would favor low values, whose errors are small. If the averages differ by more than their
    errors explain, the error of the mean is that of their differences.
    """
    values = np.array([average.value for average in averages])
    errors = np.array([(average.high - average.low) / 2 / SURE for average in averages])
    weights = np.array([float(average.count) for average in averages])
    weights /= weights.sum()
    value, error, last = float(weights @ values), float(np.linalg.norm(weights * errors)), averages[-1]
    low, high = last.low, last.high
    if len(values) > 1:
        error = max(error, math.sqrt(float(weights @ (values - value) ** 2) / (len(values) - 1)))
        low, high = value - SURE * error, value + SURE * error
    readings = sum(average.count for average in averages)
    return Signal(value, low, high, last.batch_size, last.step_size, averages[0].begins, last.step, readings)


def _proposed(low: float, high: float, size: float) -> float | None:
    """Returns a batch to go to by powers of two, at most a factor of 4 away in one go; None to stay."""
    if low > LARGER * size:
        return min(4.0, _power_of_two(low / size)) * size
    if high < SMALLER * size:
        return size / min(4.0, _power_of_two(size / high))
    return None


def _power_of_two(ratio: float) -> float:
    """Returns the largest power of two up to a ratio."""
    return 2.0 ** math.floor(math.log2(min(ratio, 1e9)))


def _answer(value: float, low: float, size: float, proposed: float | None, finding: str) -> str:
    scale = f"about {number(round(value))} samples" if math.isfinite(value) else f"over {number(round(low))} samples"
    now = number(round(size))
    if proposed is None and finding:
        return f"The noise scale alone ({scale}) supports the batch of {now}, but {finding}."
    if proposed is None:
        return f"Keep the batch of {now}: the noise scale is {scale}."
    change = f"{number(round(proposed))} instead of {now}"
    steps = (1 + value / proposed) / (1 + value / size)
    if proposed > size:
        gain = "" if math.isnan(value) else f", for about {100 * (1 - steps):.0f} % fewer steps"
        return f"Use a larger batch: {change}{gain}. The noise scale is {scale}."
    samples = (1 + proposed / value) / (1 + size / value)
    return (
        f"A smaller batch is enough: {change} takes about {steps:.2f} times the steps and {samples:.2f} times the "
        f"samples. The noise scale is {scale}."
    )


def _figures(record: Record, signal: Signal, averages: Sequence[Average], size: float) -> Iterator[Figure]:
    span = {"first_step": signal.first_step, "last_step": signal.last_step}
    value, low, high = signal.noise_scale
    ends = f"{number(signal.low)} to {number(signal.high)}"
    source = f"{signal.readings} {record.gsnr_source} readings"
    yield Figure(
        text=f"GSNR {number(signal.value)} ({ends}) at {number(signal.batch_size)} samples, from {source}",
        values={
            "gsnr": signal.value,
            "low": signal.low,
            "high": signal.high,
            "batch_size": signal.batch_size,
            "readings": signal.readings,
            "source": record.gsnr_source,
        },
        **span,
    )
    scale = f"so the noise scale is {number(value)} samples ({number(low)} to {number(high)})"
    if math.isnan(value):
        scale = f"so the noise scale is {number(low)} samples or more" if low > 0 else "so there is no noise scale"
    yield Figure(text=scale, values={"noise_scale": value, "low": low, "high": high}, **span)
    if math.isnan(value):
        return
    steps, samples = 1 + value / size, 1 + size / value
    least = f"{steps:.2f} times the fewest steps possible, and {samples:.2f} times the fewest samples"
    factors = {"steps_factor": steps, "samples_factor": samples}
    yield Figure(text=f"a batch of {number(round(size))} takes {least}", values=factors)
    early = next((average for average in averages if average.low > 0), None)
    if early is not None and early.step < signal.first_step:
        before = early.batch_size / early.value
        text = f"earlier it was {number(before)} samples"
        yield Figure(text=text, values={"noise_scale": before}, first_step=early.begins, last_step=early.step)


def _in_micro_batches(signal: Signal) -> Figure:
    """Returns the noise scale in micro-batches, which is known without a batch size."""
    times = 1 / signal.value if signal.low > 0 else math.nan
    text = f"GSNR {number(signal.value)} ({number(signal.low)} to {number(signal.high)}) for one micro-batch"
    text += f": the noise scale is {number(times)} of them" if times > 0 else ""
    values = {"gsnr": signal.value, "low": signal.low, "high": signal.high, "micro_batches": times}
    return Figure(text=text, values=values, first_step=signal.first_step, last_step=signal.last_step)


def _notes(record: Record, size: float, proposed: float | None) -> Iterator[str]:
    yield PROXY
    if proposed is not None:
        adam = record.facts.betas is not None
        factor = math.sqrt(proposed / size) if adam else proposed / size
        follows = "the root of the batch, for Adam" if adam else "the batch, for SGD"
        yield f"Multiply the learning rate by {number(factor)} as well: it scales with {follows}."
