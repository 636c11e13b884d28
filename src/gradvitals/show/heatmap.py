"""Layers by steps: one number of every layer over the whole run, as the rows and columns of a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gradvitals.show.curves import Floats, Span, Steps
from gradvitals.show.scan import scan
from gradvitals.store.frames import Kind
from gradvitals.store.reader import Run

COLUMNS = 480
PAGE_ROWS = 160
"""Rows of a picture on a page; of more layers, neighbours share one."""
MOST_ROWS = 4_000
"""Rows of any picture."""


LAYERS = {"grad/norm": "Gradient norm", "gsnr": "GSNR", "update/ratio": "Update over weight"}
"""What the page shows of every layer."""


def is_averaged(metric: str) -> bool:
    """Whether a cell has the mean of its readings, and not the largest.

    A GSNR is an estimate, and the lowest of many lies the lower the more there are: it would change with the zoom.
    """
    return metric.startswith(("gsnr", "radial_gsnr"))


@dataclass(frozen=True, kw_only=True)
class Heatmap:
    """One metric: a row for every layer in depth order, a column for a stretch of steps; nan where nothing is known."""

    metric: str
    note: str
    names: tuple[str, ...]
    values: Floats
    broken: NDArray[np.bool_]
    """Where a gradient held NaN or Inf."""

    @property
    def title(self) -> str:
        """What the metric is called."""
        return LAYERS.get(self.metric, self.metric)


def read_heatmaps(run: Run, span: Span) -> Iterator[Heatmap]:
    """Norm, GSNR and update of every layer, as far as the run has them, of many layers in fewer rows."""
    for metric in LAYERS:
        found = read_heatmap(run, metric, "layers", span, most_rows=PAGE_ROWS)
        if found is not None:
            yield found


def read_heatmap(
    run: Run, metric: str, kind: Kind, span: Span, source: str | None = None, *, most_rows: int = MOST_ROWS
) -> Heatmap | None:
    """One metric of all rows of a kind; None where the run has it not. The norm of a layer is that of its tensors."""
    names = run.names(kind)
    if not names:
        return None
    rows = min(len(names), most_rows)
    grid = _Grid(span, min(COLUMNS, span.last - span.first + 1), np.arange(rows) * len(names) // rows)
    frames = _scanned(run, metric, kind, source)
    if kind == "layers" and metric not in run.metrics("layers"):
        frames = {"grad/norm": _norms, "update/ratio": _updates}.get(metric, _nothing)(run)
    averaged = is_averaged(metric)
    values = _gathered(frames, grid, averaged=averaged)
    if values is None:
        return None
    broken = np.zeros(values.shape, bool)
    if metric == "grad/norm" and kind == "layers":
        broken = _broken(run, grid)
    note = f"the {'mean' if averaged else 'largest'} of each stretch of steps"
    if rows < len(names):
        note = f"{note}, and of about {len(names) / rows:.1f} {kind} in a row"
    shown = tuple(names[at] for at in grid.starts)
    return Heatmap(metric=metric, note=note, names=shown, values=values, broken=broken)


@dataclass(frozen=True)
class _Grid:
    """The cells of a picture: which steps share a column, and which rows of the run share one of the picture."""

    span: Span
    columns: int
    starts: Steps
    """The first row of the run in each row of the picture."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.columns, len(self.starts)

    def column(self, steps: Steps) -> Steps:
        return self.span.columns(steps, self.columns)

    def row(self, rows: Steps) -> Steps:
        return np.searchsorted(self.starts, rows, "right") - 1


Frames = Iterator[tuple[Steps, Steps, Floats]]
"""Steps, the rows of the run that there are numbers for, in order, and the numbers: ``[steps, rows]``."""


def _nothing(run: Run) -> Frames:
    return iter(())


def _scanned(run: Run, metric: str, kind: Kind, source: str | None) -> Frames:
    for steps, rows in scan(run, metric, kind, source):
        yield steps, np.arange(rows.shape[1]), rows


def _norms(run: Run) -> Frames:
    into = _ByLayer(run)
    for steps, rows in scan(run, "grad/norm"):
        yield steps, into.layers, np.sqrt(into.sums(rows**2))


def _updates(run: Run) -> Frames:
    if "weight/norm" not in run.metrics("tensors"):
        return
    into = _ByLayer(run)
    for steps, updates in scan(run, "update/norm"):
        also, weights = run.matrix("weight/norm", since=int(steps[0]) - 1, until=int(steps[-1]))
        _, here, there = np.intersect1d(steps, also, assume_unique=True, return_indices=True)
        if here.size:
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.sqrt(into.sums(updates[here] ** 2) / into.sums(weights[there] ** 2))
            yield steps[here], into.layers, ratio


Number = TypeVar("Number", np.float64, np.bool_)


class _ByLayer:
    """From numbers of tensors to sums of their layers, for those layers that have tensors."""

    def __init__(self, run: Run) -> None:
        place = {name: at for at, name in enumerate(run.names("layers"))}
        member = np.array([place.get(info.layer, -1) for info in run.tensors], dtype=np.int64)
        self.order = np.argsort(member, kind="stable")[int((member < 0).sum()) :]
        self.layers, self.starts = np.unique(member[self.order], return_index=True)

    def sums(self, rows: Floats) -> Floats:
        """The sum over each layer's tensors of what is known; nan where nothing is."""
        if not self.order.size:
            return np.zeros((len(rows), 0))
        ordered = rows[:, self.order]
        known = np.add.reduceat(~np.isnan(ordered), self.starts, axis=1, dtype=np.int64)
        total = np.add.reduceat(np.nan_to_num(ordered, nan=0.0, posinf=np.inf), self.starts, axis=1)
        return np.where(known > 0, total, np.nan)


def _gathered(frames: Frames, grid: _Grid, *, averaged: bool) -> Floats | None:
    """Each cell's largest, or mean, value; a reading stands until the next one."""
    reduce = np.add if averaged else np.fmax
    values = np.full(grid.shape, 0.0 if averaged else np.nan)
    counts = np.zeros(grid.shape)
    seen = np.zeros(grid.columns, bool)
    for steps, which, found in frames:
        column, row = grid.column(steps), grid.row(which)
        down, across = (np.flatnonzero(np.diff(place, prepend=-1)) for place in (column, row))
        seen[column] = True
        if not which.size:
            continue
        into = np.ix_(column[down], row[across])
        finite = np.where(np.isfinite(found), found, np.nan)
        part = reduce.reduceat(np.nan_to_num(finite) if averaged else finite, down, axis=0)
        known = np.add.reduceat(~np.isnan(finite), down, axis=0, dtype=np.int64)
        values[into] = reduce(values[into], reduce.reduceat(part, across, axis=1))
        counts[into] += np.add.reduceat(known, across, axis=1)
    if not counts.any():
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        whole = values / counts if averaged else values
    return _stretched(whole, seen).T


def _broken(run: Run, grid: _Grid) -> NDArray[np.bool_]:
    broken = np.zeros(grid.shape, bool)
    seen = np.zeros(grid.columns, bool)
    into = _ByLayer(run)
    rows = grid.row(into.layers)
    for steps, found in scan(run, "grad/nonfinite"):
        column = grid.column(steps)
        seen[column] = True
        which, layer = np.nonzero(into.sums(found) > 0)
        broken[column[which], rows[layer]] = True
    return _stretched(broken, seen).T if seen.any() else broken.T


def _stretched(values: NDArray[Number], seen: NDArray[np.bool_]) -> NDArray[Number]:
    """Columns without a reading as the one before; after the last reading, for no longer than readings are apart."""
    there = np.flatnonzero(seen)
    apart = int(np.median(np.diff(there))) if there.size > 1 else len(seen)
    last = np.maximum.accumulate(np.where(seen, np.arange(len(seen)), there[0]))
    out = values[last]
    out[there[-1] + apart :] = np.nan if values.dtype.kind == "f" else False
    return out
