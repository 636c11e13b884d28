"""Curves, layer tables and heatmaps of a run, read in parts that fit in memory and reduced to what a page can show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gradvitals.metrics import METRICS
from gradvitals.report.state import metric_of_every_step
from gradvitals.store.blocks import Kind
from gradvitals.store.reader import Run
from gradvitals.types import TensorInfo

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]
Number = TypeVar("Number", np.float64, np.bool_)

NUMBERS_AT_A_TIME = 1 << 22
CURVE_COLUMNS = 600
"""Points of a curve; with more readings, each point stands for several."""
HEATMAP_COLUMNS = 480
PAGE_ROWS = 160
"""Rows of a heatmap on a page; with more layers, neighbors share one."""
MAX_ROWS = 4_000

CURVES = ("loss", "grad/norm", "gsnr", "noise_scale", "lr")
"""The curves of a run, in the order they are shown."""
HEATMAPS = ("grad/norm", "gsnr", "update/ratio")
"""The heatmaps of a run."""


# -- reading in parts ----------------------------------------------------------------------------------------------


def windows(steps: Steps, numbers_per_step: int, at_a_time: int | None = None) -> Iterator[Steps]:
    """Cuts steps into windows of about `at_a_time` numbers each, or `NUMBERS_AT_A_TIME`."""
    size = max(1, (at_a_time or NUMBERS_AT_A_TIME) // max(1, numbers_per_step))
    for start in range(0, len(steps), size):
        yield steps[start : start + size]


def scan(run: Run, metric: str) -> Iterator[tuple[Steps, Floats]]:
    """Yields one metric of all tensors, window by window: steps and ``[steps, tensors]``; nothing if there is none."""
    if metric not in run.metrics("tensors"):
        return
    steps, _ = run.times(metric, kind="tensors")
    for window in windows(steps, len(run.names("tensors"))):
        yield run.matrix(metric, since=int(window[0]) - 1, until=int(window[-1]))


# -- from tensors to layers ----------------------------------------------------------------------------------------


class ByLayer:
    """Reduces arrays whose last axis is the run's tensors to arrays whose last axis is `layers`."""

    def __init__(self, run: Run) -> None:
        names = run.names("layers")
        place = {name: at for at, name in enumerate(names)}
        member = np.array([place.get(info.layer, -1) for info in run.tensors], dtype=np.int64)
        self._num_layers = len(names)
        self._order = np.argsort(member, kind="stable")[int((member < 0).sum()) :]
        self.layers, self._starts = np.unique(member[self._order], return_index=True)
        """The layers that have tensors, as rows of ``run.names("layers")``."""

    def reduced(self, values: Floats, how: np.ufunc) -> Floats:
        """Returns one number per layer from those of its tensors.

        Args:
            values: ``[..., tensors]``
            how: ``np.fmax`` or ``np.fmin``, which ignore NaN.
        """
        return self._reduceat(values.take(self._order, axis=-1), how)

    def norms(self, values: Floats) -> Floats:
        """Returns the norm of each layer: the root of the sum of squares of its tensors' known norms."""
        ordered = values.take(self._order, axis=-1)
        missing = np.isnan(ordered)
        total = self._reduceat(np.square(np.where(missing, 0.0, ordered)), np.add)
        return np.where(self._reduceat(missing, np.logical_and), np.nan, np.sqrt(total))

    def all_layers(self, values: Floats) -> Floats:
        """Returns the values with NaN for layers without tensors."""
        out = np.full((*values.shape[:-1], self._num_layers), np.nan)
        out[..., self.layers] = values
        return out

    def _reduceat(self, ordered: NDArray[Number], how: np.ufunc) -> NDArray[Number]:
        return how.reduceat(ordered, self._starts, axis=-1) if self._order.size else ordered


def layer_kinds(tensors: Sequence[TensorInfo]) -> dict[str, str]:
    """Returns what each layer that is a single module is, with the sizes of its weight: ``Linear(128→64)``.

    A layer of several modules, such as a transformer's block, is not listed: its name says more.
    """
    found: dict[str, str] = {}
    for layer in dict.fromkeys(info.layer for info in tensors):
        own = [info for info in tensors if info.layer == layer]
        if not own[0].module or any(info.name.rpartition(".")[0] != layer for info in own):
            continue
        weight = max(own, key=lambda info: len(info.shape))
        sizes = f"({weight.shape[1]}→{weight.shape[0]})" if len(weight.shape) >= 2 else f"({weight.numel})"
        found[layer] = f"{own[0].module}{sizes.replace('→', '×') if own[0].module == 'Embedding' else sizes}"
    return found


@dataclass(frozen=True)
class Table:
    """The metrics that a heatmap reads, and the function that computes its rows."""

    metrics: tuple[str, ...]
    kind: Kind
    combine: Callable[..., Floats]
    """From ``[steps, rows of the kind]`` of each metric to ``[steps, rows]``."""
    rows: Steps
    """The rows of the heatmap that these are; the others have no numbers."""

    def steps(self, run: Run, source: str | None = None) -> Steps:
        """Returns all steps that have numbers."""
        return run.times(self.metrics[0], kind=self.kind, source=source)[0]

    def read(
        self, run: Run, steps: Steps, source: str | None = None, *, at_a_time: int | None = None
    ) -> Iterator[tuple[Steps, Floats]]:
        """Yields steps and ``[steps, rows]``, window by window."""
        for window in windows(steps, len(run.names(self.kind)) * len(self.metrics), at_a_time):
            since, until = int(window[0]) - 1, int(window[-1])
            own, first = run.matrix(self.metrics[0], self.kind, source=source, since=since, until=until)
            parts = [first]
            for name in self.metrics[1:]:
                others, rows = run.matrix(name, self.kind, source=source, since=since, until=until)
                _, at, of = np.intersect1d(own, others, assume_unique=True, return_indices=True)
                parts.append(np.full(first.shape, np.nan))
                parts[-1][at] = rows[of]
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                yield own, self.combine(*parts)


SHARES = ("activation/dead_fraction", "grad/zero_fraction")
"""Metrics that are shares of units or elements, the larger the worse."""


def table_of(run: Run, metric: str, kind: Kind) -> Table | None:
    """Returns how to compute the heatmap of a metric; None if the run lacks what it needs.

    Norms are infinite if a gradient held NaN or Inf. Metrics that only tensors have are reduced to layers: norms and
    updates by their sum of squares, GSNR as the lowest of the layer's tensors, shares as the largest.
    """
    tensors = run.metrics("tensors")
    every = np.arange(len(run.names(kind)))
    if metric == "grad/norm" and metric in tensors and kind in ("tensors", "layers"):
        metrics = (metric, "grad/nonfinite") if "grad/nonfinite" in tensors else (metric,)
        if kind == "tensors":
            return Table(metrics, "tensors", _marked, every)
        by = ByLayer(run)
        return Table(metrics, "tensors", lambda *values: by.norms(_marked(*values)), by.layers)
    if metric in run.metrics(kind):
        return Table((metric,), kind, lambda values: values, every)
    if kind != "layers":
        return None
    by = ByLayer(run)
    if metric == "update/ratio" and {"update/norm", "weight/norm"} <= set(tensors):
        both = ("update/norm", "weight/norm")
        return Table(both, "tensors", lambda updates, weights: by.norms(updates) / by.norms(weights), by.layers)
    worst = {"gsnr": np.fmin, **dict.fromkeys(("update/ratio", *SHARES), np.fmax)}.get(metric)
    if worst is None or metric not in tensors:
        return None
    return Table((metric,), "tensors", lambda values: by.reduced(values, worst), by.layers)


def _marked(norms: Floats, nonfinite: Floats | None = None) -> Floats:
    """Makes norms infinite if the gradient held NaN or Inf: a norm that is NaN may also just not have been read."""
    return norms if nonfinite is None else np.where(nonfinite > 0, np.inf, norms)


# -- curves --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """The steps that a chart shows, from the first to the last."""

    first: int
    last: int

    def columns(self, steps: Steps, limit: int) -> Steps:
        """Returns the column of each step, of at most `limit`; the nearest for a step outside."""
        width = float(self.last - self.first + 1)
        count = int(min(limit, width))
        share = (steps.astype(np.float64) - self.first) * count / width  # in float64, which no two steps overflow
        return np.clip(share.astype(np.int64), 0, count - 1)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric: in each column the median, and either its range or its 95% interval."""

    metric: str
    source: str | None
    batch_size: float | None
    """The batch size its values stand for, if they stand for one."""
    steps: Floats
    middle: Floats
    low: Floats
    high: Floats
    is_interval: bool
    """Whether low and high are the ends of the 95% interval, and not of the values themselves."""
    steps_per_point: float
    nonfinite: tuple[tuple[float, float], ...]
    """First and last step of each stretch at which it was NaN or infinite."""
    first: float
    latest: float

    @property
    def title(self) -> str:
        """The name of the metric."""
        return METRICS[self.metric].label or self.metric


def span_of(run: Run) -> Span | None:
    """Returns the first and last step that were read; None for a run without readings."""
    counted = metric_of_every_step(run) or next(iter(run.metrics("values")), None)
    if counted is None:
        return None
    steps, _ = run.times(counted)
    return Span(int(steps[0]), max(int(steps[-1]), run.last_step or 0)) if steps.size else None


def read_curves(run: Run, span: Span, columns: int = CURVE_COLUMNS) -> Iterator[Curve]:
    """Yields the curves that the run has."""
    available = run.metrics("values")
    for metric in CURVES:
        if metric in available:
            curve = _read_curve(run, metric, span, columns, with_interval=f"{metric}_low" in available)
            if curve is not None:
                yield curve


def _read_curve(run: Run, metric: str, span: Span, columns: int, *, with_interval: bool) -> Curve | None:
    source = next(iter(run.sources(metric, "values")), None)
    steps, values = run.series(metric, source=source)
    known = values[~np.isnan(values)]
    sampled = metric in ("gsnr", "noise_scale")  # NaN means that these could not be determined
    if not steps.size or (sampled and not known.size):
        return None
    finite = np.where(np.isfinite(values), values, np.nan)
    starts = np.flatnonzero(np.diff(span.columns(steps, columns), prepend=-1))
    counts = np.diff(np.append(starts, steps.size))
    low, high = np.fmin.reduceat(finite, starts), np.fmax.reduceat(finite, starts)
    if with_interval:
        low, high = (
            _medians(run.series(f"{metric}_{end}", source=source)[1], starts, steps) for end in ("low", "high")
        )
    _, sizes = run.batch_sizes(metric, source=source) if sampled else (steps, np.empty(0))
    batch_sizes = sizes[~np.isnan(sizes)]
    return Curve(
        metric=metric,
        source=source,
        batch_size=float(batch_sizes[-1]) if batch_sizes.size else None,
        steps=np.add.reduceat(steps.astype(np.float64), starts) / counts,
        middle=_medians(finite, starts, steps),
        low=low,
        high=high,
        is_interval=with_interval,
        steps_per_point=float(counts.max()),
        nonfinite=() if sampled else _stretches(steps[~np.isfinite(values)], span, columns),
        first=float(known[0]) if known.size else float("nan"),
        latest=float(values[-1]),
    )


def _medians(values: Floats, starts: Steps, steps: Steps) -> Floats:
    """Returns the median of each column, ignoring NaN."""
    if values.size != steps.size:
        return np.full(starts.size, np.nan)
    if starts.size == steps.size:
        return values
    parts = (part[~np.isnan(part)] for part in np.split(values, starts[1:]))
    return np.array([np.median(part) if part.size else np.nan for part in parts])


def _stretches(steps: Steps, span: Span, columns: int) -> tuple[tuple[float, float], ...]:
    """Joins steps in neighboring columns to stretches."""
    found: list[tuple[float, float]] = []
    before = -2
    for column, step in zip(span.columns(steps, columns).tolist(), steps.tolist(), strict=True):
        if found and column <= before + 1:
            found[-1] = (found[-1][0], float(step))
        else:
            found.append((float(step), float(step)))
        before = column
    return tuple(found)


# -- heatmaps ------------------------------------------------------------------------------------------------------


def is_averaged(metric: str) -> bool:
    """Returns whether a cell has the mean of its readings, and not the largest.

    A GSNR is an estimate: the lowest of many is lower the more there are, so it would change with the zoom.
    """
    return metric.startswith(("gsnr", "radial_gsnr"))


@dataclass(frozen=True, kw_only=True)
class Heatmap:
    """One metric: a row per layer in depth order, a column per bin of steps; NaN if nothing is known."""

    metric: str
    note: str
    names: tuple[str, ...]
    values: Floats
    nonfinite: NDArray[np.bool_]
    """Cells in which a gradient held NaN or Inf."""

    @property
    def title(self) -> str:
        """The name of the metric."""
        return METRICS[self.metric].label or self.metric


def read_heatmaps(run: Run, span: Span) -> Iterator[Heatmap]:
    """Yields norm, GSNR and update of every layer if the run has them; many layers share rows."""
    for metric in HEATMAPS:
        found = read_heatmap(run, metric, "layers", span, max_rows=PAGE_ROWS)
        if found is not None:
            yield found


def read_heatmap(
    run: Run, metric: str, kind: Kind, span: Span, source: str | None = None, *, max_rows: int = MAX_ROWS
) -> Heatmap | None:
    """Returns one metric of all rows of a kind; None if the run lacks it."""
    names = run.names(kind)
    table = table_of(run, metric, kind) if names else None
    if table is None:
        return None
    rows = min(len(names), max_rows)
    starts = np.arange(rows) * len(names) // rows
    columns = min(HEATMAP_COLUMNS, span.last - span.first + 1)
    averaged = is_averaged(metric)
    cells = CellReducer((columns, rows), np.searchsorted(starts, table.rows, "right") - 1, averaged=averaged)
    seen = np.zeros(columns, bool)
    for steps, found in table.read(run, table.steps(run, source), source):
        column = span.columns(steps, columns)
        seen[column] = True
        cells.add(column, found)
    if cells.is_empty:
        return None
    note = f"the {'mean' if averaged else 'largest'} of each bin of steps"
    if rows < len(names):
        note = f"{note}, and of about {len(names) / rows:.1f} {kind} per row"
    shown = tuple(names[at] for at in starts)
    return Heatmap(
        metric=metric,
        note=note,
        names=shown,
        values=_fill_gaps(cells.cells, seen).T,
        nonfinite=_fill_gaps(cells.nonfinite, seen).T,
    )


class CellReducer:
    """Reduces frames of ``[steps, rows]`` to cells of ``[columns, rows]``: the largest or the mean of finite values."""

    def __init__(self, shape: tuple[int, int], row: Steps, *, averaged: bool) -> None:
        self._averaged = averaged
        self._reduce = np.add if averaged else np.fmax
        self._values = np.full(shape, 0.0 if averaged else np.nan)
        self._counts = np.zeros(shape, dtype=np.int32)
        self._row = row
        self._across = np.flatnonzero(np.diff(row, prepend=-1))
        self.nonfinite = np.zeros(shape, bool)
        """Cells with an infinite value, which marks a gradient that held NaN or Inf."""

    def add(self, column: Steps, found: Floats) -> None:
        """Adds a frame; `column` is that of each of its steps, in order."""
        if not self._row.size or not column.size:
            return
        down = np.flatnonzero(np.diff(column, prepend=-1))
        into = np.ix_(column[down], self._row[self._across])
        finite = np.where(np.isfinite(found), found, np.nan)
        part = self._reduce.reduceat(np.nan_to_num(finite) if self._averaged else finite, down, axis=0)
        known = np.add.reduceat(~np.isnan(finite), down, axis=0, dtype=np.int32)
        infinite = np.logical_or.reduceat(np.isinf(found), down, axis=0)
        self._values[into] = self._reduce(self._values[into], self._reduce.reduceat(part, self._across, axis=1))
        self._counts[into] += np.add.reduceat(known, self._across, axis=1)
        self.nonfinite[into] |= np.logical_or.reduceat(infinite, self._across, axis=1)

    @property
    def is_empty(self) -> bool:
        """Whether no cell has a finite value."""
        return not self._counts.any()

    @property
    def cells(self) -> Floats:
        """The reduced values; NaN if nothing is known."""
        with np.errstate(invalid="ignore", divide="ignore"):
            cells: Floats = self._values / self._counts if self._averaged else self._values
        return cells


def _fill_gaps(values: NDArray[Number], seen: NDArray[np.bool_]) -> NDArray[Number]:
    """Repeats the last reading in columns without one; after the very last, no longer than readings are apart."""
    there = np.flatnonzero(seen)
    apart = int(np.median(np.diff(there))) if there.size > 1 else len(seen)
    last = np.maximum.accumulate(np.where(seen, np.arange(len(seen)), there[0]))
    out = values[last]
    out[there[-1] + apart :] = np.nan if values.dtype.kind == "f" else False
    return out
