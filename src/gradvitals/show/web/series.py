"""Series for the page: cut into buckets that keep every peak, as bytes that a browser reads without parsing."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from gradvitals.errors import RunNotFoundError
from gradvitals.store.downsample import min_max_buckets
from gradvitals.store.frames import Kind
from gradvitals.store.reader import Run, Where

MAX_BUCKETS = 4_000
MAX_METRICS = 4
"""Metrics of one answer: a value and the two ends of its interval."""

HEADER = struct.Struct("<IIdd")
"""Points, metrics, how many readings they stand for, and the last step of these. Then float64 the last reading of each
metric, which the mean of the last bucket is not."""

Floats = NDArray[np.float64]


def row_of(kind: Kind, name: str, row: int) -> Where:
    """Which series is meant, as `Run.series` takes it."""
    if kind == "values":
        return {}
    if kind == "ranks":
        return {"rank": row}
    return cast(Where, {kind[:-1]: name})


def name_of_row(run: Run, kind: Kind, row: int) -> str:
    """What a row is called.

    Raises:
        RunNotFoundError: If there is no such row.
    """
    if kind == "values":
        return ""
    names = run.names(kind)
    if not 0 <= row < len(names):
        raise RunNotFoundError(f"row is {row}; expected a number from 0 to {len(names) - 1}, as this run has {kind}")
    return names[row]


def series_bytes(
    run: Run,
    metrics: Sequence[str],
    *,
    kind: Kind = "values",
    row: int = 0,
    source: str | None = None,
    since: int | None = None,
    until: int | None = None,
    buckets: int = MAX_BUCKETS,
) -> bytes:
    """One or more metrics of one row over steps, in at most `buckets` points.

    The first metric says which steps there are. Layout, little-endian: `HEADER`, float64 steps, float64 times in
    seconds since the epoch, then for each metric float32 lowest, highest and mean of each bucket, and how many of its
    readings are NaN or infinite.
    """
    where = row_of(kind, name_of_row(run, kind, row), row)
    where["source"] = source or next(iter(run.sources(metrics[0], kind)), None)
    where["since"] = since
    steps, times, columns = run.several(metrics, until=until, **where)
    last = float(steps[-1]) if steps.size else float("nan")
    parts = [_bucket(steps, column, buckets) for column in columns]
    starts = np.arange(buckets) * steps.size // buckets if steps.size > buckets else np.arange(steps.size)
    body = [HEADER.pack(starts.size, len(columns), float(steps.size), last)]
    body += [(columns[:, -1] if steps.size else np.full(len(columns), np.nan)).astype("<f8").tobytes()]
    body += [steps[starts].astype("<f8").tobytes(), times[starts].astype("<f8").tobytes()]
    with np.errstate(over="ignore"):
        body += [array.astype("<f4").tobytes() for part in parts for array in part]
    return b"".join(body)


def _bucket(steps: NDArray[np.int64], values: Floats, buckets: int) -> tuple[Floats, Floats, Floats, Floats]:
    _, low, high = min_max_buckets(steps, values, buckets)
    known = np.isfinite(values)
    if steps.size <= buckets:
        return low, high, low, (~known).astype(np.float64)
    starts = np.arange(buckets) * steps.size // buckets
    counts = np.add.reduceat(known.astype(np.float64), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(known, values, 0.0), starts) / counts
    return low, high, mean, np.diff(starts, append=steps.size) - counts
