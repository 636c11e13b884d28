"""A run's global metrics over its steps, thinned to what a page can show, with every peak kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradvitals.store.reader import Run

COLUMNS = 600
"""Points of a curve; where there are more readings, each stands for several."""

METRICS = ("loss", "grad/norm", "gsnr", "noise_scale", "lr")
"""What a run is known by, in the order it is shown."""

TITLES = {
    "loss": "Loss",
    "grad/norm": "Gradient norm",
    "gsnr": "GSNR",
    "noise_scale": "Noise scale",
    "lr": "Learning rate",
}

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """The steps that a picture shows, from the first to the last."""

    first: int
    last: int

    def columns(self, steps: Steps, most: int) -> Steps:
        """For each step the column it falls into, of at most so many; the nearest for one outside."""
        width = float(self.last - self.first + 1)
        many = int(min(most, width))
        share = (steps.astype(np.float64) - self.first) * many / width  # float64 overflows for no two steps
        return np.clip(share.astype(np.int64), 0, many - 1)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric: in each column the middle value, and either its range or its 95 % interval."""

    metric: str
    source: str | None
    batch_size: float | None
    """Samples that its values stand for, where they stand for a batch."""
    steps: Floats
    middle: Floats
    low: Floats
    high: Floats
    is_interval: bool
    """Whether low and high are the ends of the 95 % interval, and not of the values themselves."""
    steps_a_point: float
    broken: tuple[tuple[float, float], ...]
    """Stretches of steps at which it was NaN or infinite."""
    first: float
    latest: float

    @property
    def title(self) -> str:
        """What the metric is called."""
        return TITLES.get(self.metric, self.metric)


def span_of(run: Run) -> Span | None:
    """From the first step read to the last; None for a run without readings."""
    values = run.metrics("values")
    counted = next((metric for metric in ("grad/norm", "loss") if metric in values), next(iter(values), None))
    if counted is None:
        return None
    steps, _ = run.times(counted)
    return Span(int(steps[0]), max(int(steps[-1]), run.last_step or 0)) if steps.size else None


def read_curves(run: Run, span: Span, columns: int = COLUMNS) -> Iterator[Curve]:
    """Those of `METRICS` that the run has."""
    available = run.metrics("values")
    for metric in METRICS:
        if metric in available:
            curve = _read(run, metric, span, columns, with_interval=f"{metric}_low" in available)
            if curve is not None:
                yield curve


def _read(run: Run, metric: str, span: Span, columns: int, *, with_interval: bool) -> Curve | None:
    source = next(iter(run.sources(metric, "values")), None)
    steps, values = run.series(metric, source=source)
    known = values[~np.isnan(values)]
    sampled = metric in ("gsnr", "noise_scale")  # where these are not a number, they could not be told
    if not steps.size or (sampled and not known.size):
        return None
    finite = np.where(np.isfinite(values), values, np.nan)
    starts = _starts(span.columns(steps, columns))
    counts = np.diff(np.append(starts, steps.size))
    low, high = np.fmin.reduceat(finite, starts), np.fmax.reduceat(finite, starts)
    if with_interval:
        low, high = (_middle(run.series(f"{metric}_{end}", source=source)[1], starts, steps) for end in ("low", "high"))
    _, sizes = run.batch_sizes(metric, source=source) if sampled else (steps, np.empty(0))
    told = sizes[~np.isnan(sizes)]
    return Curve(
        metric=metric,
        source=source,
        batch_size=float(told[-1]) if told.size else None,
        steps=np.add.reduceat(steps.astype(np.float64), starts) / counts,
        middle=_middle(finite, starts, steps),
        low=low,
        high=high,
        is_interval=with_interval,
        steps_a_point=float(counts.max()),
        broken=() if sampled else _stretches(steps, ~np.isfinite(values), span, columns),
        first=float(known[0]) if known.size else float("nan"),
        latest=float(values[-1]),
    )


def _starts(columns: Steps) -> Steps:
    return np.flatnonzero(np.diff(columns, prepend=-1))


def _middle(values: Floats, starts: Steps, steps: Steps) -> Floats:
    """The median of each column, of what there is."""
    if values.size != steps.size:
        return np.full(starts.size, np.nan)
    if starts.size == steps.size:
        return values
    parts = (part[~np.isnan(part)] for part in np.split(values, starts[1:]))
    return np.array([np.median(part) if part.size else np.nan for part in parts])


def _stretches(steps: Steps, wrong: NDArray[np.bool_], span: Span, columns: int) -> tuple[tuple[float, float], ...]:
    """Steps at which something was wrong, neighbouring columns together."""
    found: list[tuple[float, float]] = []
    before = -2
    for column, step in zip(span.columns(steps[wrong], columns).tolist(), steps[wrong].tolist(), strict=True):
        if found and column <= before + 1:
            found[-1] = (found[-1][0], float(step))
        else:
            found.append((float(step), float(step)))
        before = column
    return tuple(found)
