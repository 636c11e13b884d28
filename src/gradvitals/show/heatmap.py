"""Layers by steps: one number of every layer over the whole run, as the rows and columns of a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gradvitals.show.curves import Floats, Span, Steps
from gradvitals.show.scan import scan
from gradvitals.store.frames import Kind
from gradvitals.store.reader import Run

COLUMNS = 480
MOST_ROWS = 160
"""Rows of a picture; of more layers, neighbours share one."""


LAYERS = {"grad/norm": "Gradient norm", "gsnr": "GSNR", "update/ratio": "Update over weight"}
"""What the page shows of every layer."""


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
        found = read_heatmap(run, metric, "layers", span)
        if found is not None:
            yield _with_fewer_rows(found)


def read_heatmap(run: Run, metric: str, kind: Kind, span: Span, source: str | None = None) -> Heatmap | None:
    """One metric of all rows of a kind; None where the run has it not. The norm of a layer is that of its tensors."""
    names = run.names(kind)
    columns = min(COLUMNS, span.last - span.first + 1)
    frames = scan(run, metric, kind, source)
    if kind == "layers" and metric not in run.metrics("layers"):
        frames = {"grad/norm": _norms, "update/ratio": _updates}.get(metric, _nothing)(run)
    averaged = metric.startswith(("gsnr", "radial_gsnr"))
    values = _gathered(frames, span, columns, len(names), np.add if averaged else np.fmax) if names else None
    if values is None:
        return None
    broken = np.zeros(values.shape, bool)
    if metric == "grad/norm" and kind == "layers":
        broken = _broken(run, span, columns, len(names))
    note = f"the {'mean' if averaged else 'largest'} of each stretch of steps"
    return Heatmap(metric=metric, note=note, names=names, values=values, broken=broken)


Frames = Iterator[tuple[Steps, Floats]]


def _nothing(run: Run) -> Frames:
    return iter(())


def _norms(run: Run) -> Frames:
    into = _ByLayer(run)
    for steps, rows in scan(run, "grad/norm"):
        yield steps, np.sqrt(into.sums(rows**2))


def _updates(run: Run) -> Frames:
    if "weight/norm" not in run.metrics("tensors"):
        return
    into = _ByLayer(run)
    for steps, updates in scan(run, "update/norm"):
        also, weights = run.matrix("weight/norm", since=int(steps[0]) - 1, until=int(steps[-1]))
        _, here, there = np.intersect1d(steps, also, assume_unique=True, return_indices=True)
        if here.size:
            with np.errstate(divide="ignore", invalid="ignore"):
                yield steps[here], np.sqrt(into.sums(updates[here] ** 2) / into.sums(weights[there] ** 2))


Number = TypeVar("Number", np.float64, np.bool_)


class _ByLayer:
    """From numbers of tensors to sums of their layers."""

    def __init__(self, run: Run) -> None:
        place = {name: at for at, name in enumerate(run.names("layers"))}
        member = np.array([place.get(info.layer, -1) for info in run.tensors], dtype=np.int64)
        self.order = np.argsort(member, kind="stable")[int((member < 0).sum()) :]
        self.layers, self.starts = np.unique(member[self.order], return_index=True)
        self.count = len(place)

    def sums(self, rows: Floats) -> Floats:
        """The sum over each layer's tensors of what is known; nan where nothing is."""
        out = np.full((len(rows), self.count), np.nan)
        if self.order.size:
            ordered = rows[:, self.order]
            known = np.add.reduceat(~np.isnan(ordered), self.starts, axis=1, dtype=np.int64)
            total = np.add.reduceat(np.nan_to_num(ordered, nan=0.0, posinf=np.inf), self.starts, axis=1)
            out[:, self.layers] = np.where(known > 0, total, np.nan)
        return out


def _gathered(frames: Frames, span: Span, columns: int, rows: int, reduce: np.ufunc) -> Floats | None:
    """Each column's largest, or mean, value of each row; a reading stands until the next one."""
    adds = reduce is np.add
    values = np.full((columns, rows), 0.0 if adds else np.nan)
    counts = np.zeros((columns, rows))
    seen = np.zeros(columns, bool)
    for steps, found in frames:
        finite = np.where(np.isfinite(found), found, np.nan)
        column = span.columns(steps, columns)
        starts = np.flatnonzero(np.diff(column, prepend=-1))
        at = column[starts]
        part = reduce.reduceat(np.nan_to_num(finite) if adds else finite, starts, axis=0)
        values[at] = reduce(values[at], part)
        counts[at] += np.add.reduceat(~np.isnan(finite), starts, axis=0, dtype=np.int64)
        seen[at] = True
    if not counts.any():
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        whole = values / counts if adds else values
    return _stretched(whole, seen).T


def _broken(run: Run, span: Span, columns: int, rows: int) -> NDArray[np.bool_]:
    broken = np.zeros((columns, rows), bool)
    seen = np.zeros(columns, bool)
    into = _ByLayer(run)
    for steps, found in scan(run, "grad/nonfinite"):
        column = span.columns(steps, columns)
        seen[column] = True
        which, layer = np.nonzero(into.sums(found) > 0)
        broken[column[which], layer] = True
    return _stretched(broken, seen).T if seen.any() else broken.T


def _stretched(values: NDArray[Number], seen: NDArray[np.bool_]) -> NDArray[Number]:
    """Columns without a reading as the one before; after the last reading, for no longer than readings are apart."""
    there = np.flatnonzero(seen)
    apart = int(np.median(np.diff(there))) if there.size > 1 else len(seen)
    last = np.maximum.accumulate(np.where(seen, np.arange(len(seen)), there[0]))
    out = values[last]
    out[there[-1] + apart :] = np.nan if values.dtype.kind == "f" else False
    return out


def _with_fewer_rows(whole: Heatmap) -> Heatmap:
    rows = len(whole.names)
    if rows <= MOST_ROWS:
        return whole
    starts = np.arange(MOST_ROWS) * rows // MOST_ROWS
    return replace(
        whole,
        note=f"{whole.note}, and of about {rows / MOST_ROWS:.1f} layers in a row",
        names=tuple(whole.names[at] for at in starts),
        values=np.fmax.reduceat(whole.values, starts, axis=0),
        broken=np.logical_or.reduceat(whole.broken, starts, axis=0),
    )
