"""The heatmap: one number for each layer, tensor or head and each stretch of steps."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gradvitals.errors import RunError
from gradvitals.show.heatmap import is_averaged
from gradvitals.show.web.limits import MAX_NUMBERS
from gradvitals.store.frames import Kind
from gradvitals.store.reader import Run

Picture = Literal["norm", "gsnr", "update"]
Rows = Literal["layers", "tensors", "heads"]
Floats = NDArray[np.float64]

PICTURES: dict[Picture, str] = {"norm": "grad/norm", "gsnr": "gsnr", "update": "update/ratio"}
"""Metric of each picture. Which of the numbers of a stretch is shown is as in the report: see `is_averaged`."""

MAX_COLUMNS = 800
NUMBERS_AT_A_TIME = 1 << 20
HEADER = struct.Struct("<IIdd")
"""Rows, columns, the first step after the last column, and the last step that was read."""

_one_at_a_time = threading.Semaphore(1)


@dataclass(frozen=True)
class Table:
    """What to read for a picture, and how to make rows of it."""

    metrics: tuple[str, ...]
    kind: Kind
    combine: Callable[..., Floats]
    rows: NDArray[np.int64] | None = None
    """The rows of the picture that the columns made are for, where it is not all of them."""


def available(run: Run) -> list[Picture]:
    """The pictures that the run has numbers for."""
    tensors, layers = run.metrics("tensors"), run.metrics("layers")
    return [name for name, metric in PICTURES.items() if metric in tensors or metric in layers]


def heatmap_bytes(
    run: Run,
    picture: Picture,
    rows: Rows,
    *,
    columns: int = MAX_COLUMNS,
    since: int | None = None,
    until: int | None = None,
) -> bytes:
    """The picture, little-endian: `HEADER`, float64 first steps of the columns, then float32 ``[rows, columns]``.

    Raises:
        RunError: If the run has too many rows for a picture.
    """
    table = _table(run, picture, rows)
    num_rows = len(run.names(rows))
    if table is None or not num_rows:
        return HEADER.pack(num_rows, 0, 0.0, float("nan"))
    if num_rows * 16 > MAX_NUMBERS:
        raise RunError(f"{num_rows:,} {rows} are too many for one picture; open a layer instead")
    with _one_at_a_time:
        steps, _ = run.times(table.metrics[0], kind=table.kind)
        steps = steps[(steps > (-np.inf if since is None else since)) & (steps <= (np.inf if until is None else until))]
        columns = max(1, min(columns, MAX_COLUMNS, MAX_NUMBERS // num_rows, steps.size))
        cells = _fill(run, table, steps, num_rows, columns, averaged=is_averaged(PICTURES[picture]))
    if not steps.size:
        return HEADER.pack(num_rows, 0, 0.0, float("nan"))
    starts = steps[np.arange(columns) * steps.size // columns]
    every = max(1, int(steps[-1] - steps[-2])) if steps.size > 1 else 1
    head = HEADER.pack(num_rows, columns, float(steps[-1] + every), float(steps[-1]))
    return head + starts.astype("<f8").tobytes() + cells.astype("<f4").tobytes()


def _fill(
    run: Run, table: Table, steps: NDArray[np.int64], num_rows: int, columns: int, *, averaged: bool
) -> NDArray[np.float32]:
    """The largest, or the mean, of each cell. An infinite number, which marks a gradient as broken, is the largest."""
    reduce = np.add if averaged else np.fmax
    cells = np.full((num_rows, columns), 0.0 if averaged else np.nan, dtype=np.float64 if averaged else np.float32)
    counts = np.zeros((num_rows, columns), dtype=np.int32)
    if not steps.size:
        return cells
    rows = np.arange(num_rows) if table.rows is None else table.rows
    column_of = np.searchsorted(np.arange(columns) * steps.size // columns, np.arange(steps.size), "right") - 1
    for first, last in _windows(steps.size, len(run.names(table.kind)) * len(table.metrics)):
        since, until = int(steps[first]) - 1, int(steps[last - 1])
        parts = [run.matrix(metric, table.kind, since=since, until=until) for metric in table.metrics]
        own = parts[0][0]
        at = np.searchsorted(steps, own)
        known = (at < steps.size) & (steps[np.minimum(at, steps.size - 1)] == own)
        values = [_at_steps(own, *part)[known] for part in parts]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            made = table.combine(*values).astype(np.float32)  # [steps, rows]
        into = column_of[at[known]]
        if not into.size:
            continue
        cuts = np.flatnonzero(np.diff(into, prepend=-1))
        where = np.ix_(rows, into[cuts])
        if averaged:
            known = np.isfinite(made)
            made = np.where(known, made, 0.0)
            counts[where] += np.add.reduceat(known, cuts, axis=0, dtype=np.int32).T
        cells[where] = reduce(cells[where], reduce.reduceat(made, cuts, axis=0).T)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (cells / counts).astype(np.float32) if averaged else cells


def _windows(count: int, numbers: int) -> Iterator[tuple[int, int]]:
    size = max(1, NUMBERS_AT_A_TIME // max(1, numbers))
    for first in range(0, count, size):
        yield first, min(count, first + size)


def _at_steps(wanted: NDArray[np.int64], steps: NDArray[np.int64], rows: Floats) -> Floats:
    """The rows at the steps wanted, nan where there are none."""
    if steps.size == wanted.size and np.array_equal(steps, wanted):
        return rows
    out = np.full((wanted.size, rows.shape[1]), np.nan)
    _, at, of = np.intersect1d(wanted, steps, assume_unique=True, return_indices=True)
    out[at] = rows[of]
    return out


def _table(run: Run, picture: Picture, rows: Rows) -> Table | None:
    """How to make the picture; None where the run lacks what it needs."""
    metric = PICTURES[picture]
    tensors = run.metrics("tensors")
    if picture == "norm" and metric in tensors and rows != "heads":
        metrics = (metric, "grad/nonfinite") if "grad/nonfinite" in tensors else (metric,)
        if rows == "tensors":
            return Table(metrics, "tensors", _marked)
        layers, groups = _members(run)
        return Table(metrics, "tensors", lambda *values: _root_sum_square(_marked(*values), groups), layers)
    if metric in run.metrics(rows):
        return Table((metric,), rows, lambda values: values)
    if rows != "layers":
        return None
    layers, groups = _members(run)
    if picture == "update" and {"update/norm", "weight/norm"} <= set(tensors):
        return Table(
            ("update/norm", "weight/norm"),
            "tensors",
            lambda updates, weights: _root_sum_square(updates, groups) / _root_sum_square(weights, groups),
            layers,
        )
    if metric in tensors:
        worst = np.fmin if picture == "gsnr" else np.fmax
        return Table((metric,), "tensors", lambda values: _reduced(values, groups, worst), layers)
    return None


def _marked(norms: Floats, nonfinite: Floats | None = None) -> Floats:
    """Norms, infinite where the gradient held NaN or Inf: a norm that is NaN may also just not have been read."""
    return norms if nonfinite is None else np.where(nonfinite > 0, np.inf, norms)


def _members(run: Run) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """The layers that have tensors, and the tensors of each."""
    layers = {name: at for at, name in enumerate(run.names("layers"))}
    members: dict[int, list[int]] = {}
    for row, info in enumerate(run.tensors):
        if info.layer in layers:
            members.setdefault(layers[info.layer], []).append(row)
    return np.array(list(members), dtype=np.int64), [np.array(rows, dtype=np.int64) for rows in members.values()]


def _root_sum_square(values: Floats, groups: list[NDArray[np.int64]]) -> Floats:
    """Norm of each group of columns; what has no number counts only where nothing else is there."""
    return np.sqrt(_reduced(np.square(values), groups, None))


def _reduced(values: Floats, groups: list[NDArray[np.int64]], how: np.ufunc | None) -> Floats:
    out = np.full((len(values), len(groups)), np.nan)
    for at, rows in enumerate(groups):
        part = values[:, rows]
        if how is not None:
            out[:, at] = how.reduce(part, axis=1)
        else:
            known = ~np.isnan(part)
            out[:, at] = np.where(known.any(axis=1), np.where(known, part, 0.0).sum(axis=1), np.nan)
    return out
