"""The heatmap: one number for each layer, tensor or head and each stretch of steps."""

from __future__ import annotations

import struct
import threading
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gradvitals.errors import RunError
from gradvitals.show.by_layer import Table, table_of
from gradvitals.show.heatmap import is_averaged
from gradvitals.show.web.limits import MAX_NUMBERS
from gradvitals.store.reader import Run

Picture = Literal["norm", "gsnr", "update"]
Rows = Literal["layers", "tensors", "heads"]

PICTURES: dict[Picture, str] = {"norm": "grad/norm", "gsnr": "gsnr", "update": "update/ratio"}
"""Metric of each picture. Which of the numbers of a stretch is shown is as in the report: see `is_averaged`."""

MAX_COLUMNS = 800
NUMBERS_AT_A_TIME = 1 << 20
HEADER = struct.Struct("<IIdd")
"""Rows, columns, the first step after the last column, and the last step that was read."""

_one_at_a_time = threading.Semaphore(1)


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
    table = table_of(run, PICTURES[picture], rows)
    num_rows = len(run.names(rows))
    if table is None or not num_rows:
        return HEADER.pack(num_rows, 0, 0.0, float("nan"))
    if num_rows * 16 > MAX_NUMBERS:
        raise RunError(f"{num_rows:,} {rows} are too many for one picture; open a layer instead")
    with _one_at_a_time:
        steps = table.steps(run)
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
    column_of = np.searchsorted(np.arange(columns) * steps.size // columns, np.arange(steps.size), "right") - 1
    for own, found in table.read(run, steps, at_a_time=NUMBERS_AT_A_TIME):
        at = np.searchsorted(steps, own)
        known = (at < steps.size) & (steps[np.minimum(at, steps.size - 1)] == own)
        with np.errstate(over="ignore"):
            made = found[known].astype(np.float32)  # [steps, rows]
        into = column_of[at[known]]
        if not into.size:
            continue
        cuts = np.flatnonzero(np.diff(into, prepend=-1))
        where = np.ix_(table.rows, into[cuts])
        if averaged:
            known = np.isfinite(made)
            made = np.where(known, made, 0.0)
            counts[where] += np.add.reduceat(known, cuts, axis=0, dtype=np.int32).T
        cells[where] = reduce(cells[where], reduce.reduceat(made, cuts, axis=0).T)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (cells / counts).astype(np.float32) if averaged else cells
