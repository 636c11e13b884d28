"""Layers by steps: one number of every layer over the whole run, as the rows and columns of a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gradvitals.show.by_layer import table_of
from gradvitals.show.curves import Floats, Span, Steps
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
    table = table_of(run, metric, kind)
    if table is None:
        return None
    averaged = is_averaged(metric)
    found = _gathered(table.read(run, table.steps(run, source), source), table.rows, grid, averaged=averaged)
    if found is None:
        return None
    values, broken = found
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


Frames = Iterable[tuple[Steps, Floats]]
"""Steps, and the numbers: ``[steps, rows]``."""

Number = TypeVar("Number", np.float64, np.bool_)


def _gathered(frames: Frames, rows: Steps, grid: _Grid, *, averaged: bool) -> tuple[Floats, NDArray[np.bool_]] | None:
    """Each cell's largest, or mean, value, and whether one of them is infinite; a reading stands until the next one."""
    reduce = np.add if averaged else np.fmax
    values = np.full(grid.shape, 0.0 if averaged else np.nan)
    counts = np.zeros(grid.shape)
    broken = np.zeros(grid.shape, bool)
    seen = np.zeros(grid.columns, bool)
    row = grid.row(rows)
    across = np.flatnonzero(np.diff(row, prepend=-1))
    for steps, found in frames:
        column = grid.column(steps)
        down = np.flatnonzero(np.diff(column, prepend=-1))
        seen[column] = True
        if not rows.size:
            continue
        into = np.ix_(column[down], row[across])
        finite = np.where(np.isfinite(found), found, np.nan)
        part = reduce.reduceat(np.nan_to_num(finite) if averaged else finite, down, axis=0)
        known = np.add.reduceat(~np.isnan(finite), down, axis=0, dtype=np.int64)
        bad = np.logical_or.reduceat(np.isinf(found), down, axis=0)
        values[into] = reduce(values[into], reduce.reduceat(part, across, axis=1))
        counts[into] += np.add.reduceat(known, across, axis=1)
        broken[into] |= np.logical_or.reduceat(bad, across, axis=1)
    if not counts.any():
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        whole = values / counts if averaged else values
    return _stretched(whole, seen).T, _stretched(broken, seen).T


def _stretched(values: NDArray[Number], seen: NDArray[np.bool_]) -> NDArray[Number]:
    """Columns without a reading as the one before; after the last reading, for no longer than readings are apart."""
    there = np.flatnonzero(seen)
    apart = int(np.median(np.diff(there))) if there.size > 1 else len(seen)
    last = np.maximum.accumulate(np.where(seen, np.arange(len(seen)), there[0]))
    out = values[last]
    out[there[-1] + apart :] = np.nan if values.dtype.kind == "f" else False
    return out
