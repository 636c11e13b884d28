"""The batch size, from the noise scale: where larger batches still buy fewer steps, and where they only repeat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradvitals.advise.advice import Advice, Confidence, Figure, cannot_tell
from gradvitals.advise.record import Record, apart
from gradvitals.diagnose.history import Average
from gradvitals.format import number

TOPIC = "batch_size"
NAMES = ("noise_scale", "low", "high", "batch_size", "proposed", "steps_factor", "samples_factor")
"""`steps_factor` and `samples_factor`: what the batch in use takes over the least that is possible."""

FEWEST = 5
"""Readings in an average at least."""
SURE = 1.96
LARGER = 2.0
"""The noise scale is over this many batches, by its lower end, before a larger batch is advised."""
SMALLER = 0.5
"""The same for a smaller one, by its upper end."""

NO_SOURCE = {
    None: "no GSNR was measured: it takes two or more backward passes a step, or several workers",
    "adam": (
        "the GSNR is known only from Adam's moments, which take the drift of gradients for noise: it takes two or "
        "more backward passes a step"
    ),
}
PROXY = (
    "The noise scale is a proxy of the critical batch size, and more of a lower bound: in language models the "
    "critical batch is often far larger."
)


@dataclass(frozen=True)
class Signal:
    """The GSNR over averages that share no reading, at one batch size."""

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
        """B_simple = B / GSNR, with the ends of its interval; nan and inf where the signal is not beyond zero."""
        known = self.low > 0
        low = self.batch_size / self.high if self.high > 0 else math.nan
        return (
            self.batch_size / self.value if known else math.nan,
            low,
            self.batch_size / self.low if known else math.inf,
        )


def advise_batch(record: Record) -> Advice:
    """Whether the batch fits the noise of the gradients."""
    averages = [average for average in record.late_averages if average.count >= FEWEST and math.isfinite(average.low)]
    if not averages:
        return cannot_tell(TOPIC, _why_none(record), NAMES, [])
    late = [average for average in averages if average.begins >= record.last_step / 2] or averages[-1:]
    signal = joined(apart(late))
    if math.isnan(signal.batch_size):
        return cannot_tell(TOPIC, "the batch size was not told: watch(..., batch_size=...)", NAMES, [_in_parts(signal)])
    value, low, high = signal.noise_scale
    size = signal.step_size if signal.step_size > 0 else signal.batch_size
    if math.isnan(low) or (math.isinf(high) and low < LARGER * size):
        why = "the noise scale is not identifiable: the interval of the GSNR holds zero"
        why += f". By other signs, {found}" if (found := _found(record)) else ""
        return cannot_tell(TOPIC, why, NAMES, _figures(record, signal, averages, size))
    values = {"noise_scale": value, "low": low, "high": high, "batch_size": size}
    proposed = _proposed(value, low, high, size)
    factors = {"steps_factor": 1 + value / size, "samples_factor": 1 + size / value} if math.isfinite(value) else {}
    confidence, because = _confidence(signal, record)
    return Advice(
        topic=TOPIC,
        answer=_answer(value, low, high, size, proposed, _found(record)),
        confidence=confidence,
        because=because,
        values={**dict.fromkeys(NAMES), **values, **factors, "proposed": proposed},
        figures=tuple(_figures(record, signal, averages, size)),
        notes=tuple(_notes(record, size, proposed)),
    )


def joined(averages: Sequence[Average]) -> Signal:
    """The mean of averages that share no reading, each weighted by its number of readings.

    Weights by their errors would favour low values, whose errors are small. Where the averages differ by more than
    their errors explain, the error of the mean is that of their differences.
    """
    values = np.array([average.value for average in averages])
    errors = np.array([(average.high - average.low) / 2 / SURE for average in averages])
    weights = np.array([float(average.count) for average in averages])
    weights /= weights.sum()
    value, error = float(weights @ values), float(np.linalg.norm(weights * errors))
    if len(values) > 1:
        error = max(error, math.sqrt(float(weights @ (values - value) ** 2) / (len(values) - 1)))
    reach = SURE * error
    last = averages[-1]
    return Signal(
        value=value,
        low=value - reach if len(values) > 1 else last.low,
        high=value + reach if len(values) > 1 else last.high,
        batch_size=last.batch_size,
        step_size=last.step_size,
        first_step=averages[0].begins,
        last_step=last.step,
        readings=sum(average.count for average in averages),
    )


def _why_none(record: Record) -> str:
    source = record.gsnr_source
    if source in NO_SOURCE:
        return NO_SOURCE[source]
    found = max((average.count for average in record.late_averages), default=0)
    return (
        f"the latest GSNR at this batch size rests on {found} readings, and it takes {FEWEST}: a longer run, or a "
        "smaller tensor_every"
    )


def _proposed(value: float, low: float, high: float, size: float) -> float | None:
    """A batch to go to, at most a factor of 4 away in one go; None to stay."""
    if low > LARGER * size:
        return float(min(4 * size, _power_of_two(low / size) * size))
    if high < SMALLER * size:
        return float(max(size / 4, size / _power_of_two(size / high)))
    return None


def _power_of_two(ratio: float) -> float:
    """The largest power of two that is not over a ratio."""
    return 2.0 ** math.floor(math.log2(ratio)) if ratio < 1e9 else 1e9


def _answer(value: float, low: float, high: float, size: float, proposed: float | None, found: str) -> str:
    scale = f"about {number(round(value))} samples" if math.isfinite(value) else f"over {number(round(low))} samples"
    if proposed is None and found:
        return f"By the noise scale alone, {scale}, the batch of {number(round(size))} may stay; but {found}."
    if proposed is None:
        return f"Keep the batch of {number(round(size))}: the noise scale is {scale}."
    if proposed > size:
        gain = "" if math.isnan(value) else f", for about {_fewer(value, size, proposed)} fewer steps"
        return (
            f"A larger batch pays off: {number(round(proposed))} instead of {number(round(size))}{gain}. "
            f"The noise scale is {scale}."
        )
    more, less = (1 + value / proposed) / (1 + value / size), (1 + proposed / value) / (1 + size / value)
    return (
        f"A smaller batch would do: {number(round(proposed))} instead of {number(round(size))} takes about "
        f"{more:.2f} times the steps and {less:.2f} times the samples. The noise scale is {scale}."
    )


def _fewer(value: float, size: float, proposed: float) -> str:
    return f"{100 * (1 - (1 + value / proposed) / (1 + value / size)):.0f} %"


def _figures(record: Record, signal: Signal, averages: Sequence[Average], size: float) -> list[Figure]:
    span = {"first_step": signal.first_step, "last_step": signal.last_step}
    value, low, high = signal.noise_scale
    gsnr = (
        f"GSNR {number(signal.value)} ({number(signal.low)} to {number(signal.high)}) at "
        f"{number(signal.batch_size)} samples, from {signal.readings} {record.gsnr_source} readings"
    )
    numbers: dict[str, Any] = {
        "gsnr": signal.value,
        "low": signal.low,
        "high": signal.high,
        "batch_size": signal.batch_size,
    }
    numbers |= {"readings": signal.readings, "source": record.gsnr_source}
    scale = f"so the noise scale is {number(value)} samples ({number(low)} to {number(high)})"
    if math.isnan(value):
        scale = f"so the noise scale is {number(low)} samples or more" if low > 0 else "so there is no noise scale"
    figures = [
        Figure(text=gsnr, values=numbers, **span),
        Figure(text=scale, values={"noise_scale": value, "low": low, "high": high}, **span),
    ]
    if math.isfinite(value):
        steps, samples = 1 + value / size, 1 + size / value
        text = (
            f"by it, a batch of {number(round(size))} takes {steps:.2f} times the fewest steps possible, and "
            f"{samples:.2f} times the fewest samples"
        )
        figures.append(Figure(text=text, values={"steps_factor": steps, "samples_factor": samples}))
    early = next((average for average in averages if average.low > 0), None)
    if early is not None and early.step < signal.first_step and math.isfinite(value):
        before = early.batch_size / early.value
        text = f"earlier it was {number(before)} samples"
        figures.append(Figure(text=text, values={"noise_scale": before}, first_step=early.begins, last_step=early.step))
    return figures


def _in_parts(signal: Signal) -> Figure:
    """Without a batch size the noise scale is still known in micro-batches."""
    times = 1 / signal.value if signal.low > 0 else math.nan
    text = f"GSNR {number(signal.value)} ({number(signal.low)} to {number(signal.high)}) for one micro-batch"
    text += f": the noise scale is {number(times)} of them" if times > 0 else ""
    values = {"gsnr": signal.value, "low": signal.low, "high": signal.high, "micro_batches": times}
    return Figure(text=text, values=values, first_step=signal.first_step, last_step=signal.last_step)


def _confidence(signal: Signal, record: Record) -> tuple[Confidence, str]:
    value, low, high = signal.noise_scale
    if math.isnan(value):
        return "low", "only a lower end of the noise scale is known"
    width = high / low
    if width > 4:
        return "low", f"the interval of the noise scale spans a factor of {width:.2g}"
    return "fair", f"its interval spans a factor of {width:.2g}, but the noise scale is only a proxy"


def _found(record: Record) -> str:
    """What the doctor says about the batch at the end of the run; empty for nothing."""
    found = [finding for finding in record.findings if finding.id in ("batch_too_small", "batch_too_large")]
    return next((finding.title for finding in found if finding.last_step is None), "")


def _notes(record: Record, size: float, proposed: float | None) -> list[str]:
    notes = [PROXY]
    if proposed is not None:
        ratio = proposed / size
        by = (math.sqrt(ratio), "the root of the batch, for Adam")
        if record.facts.betas is None:
            by = (ratio, "the batch, for SGD")
        notes.append(f"Multiply the learning rate by {number(by[0])} with it: it goes with {by[1]}.")
    return notes
