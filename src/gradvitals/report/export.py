"""A run as one table: a row per step and tensor, layer, head or rank, a column per metric."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradvitals.errors import GradvitalsError
from gradvitals.report.series import windows
from gradvitals.store.blocks import Kind
from gradvitals.store.reader import Run

KINDS: dict[str, Kind] = {"run": "values", "layer": "layers", "tensor": "tensors", "head": "heads", "rank": "ranks"}
"""The kinds of rows, and what the store calls them."""

KEYS = ("step", "kind", "name", "time", "stage")

Columns = dict[str, NDArray[Any]]


class ExportError(GradvitalsError):
    """The requested table cannot be made."""


class Field(NamedTuple):
    """One column of one kind of row."""

    kind: str
    metric: str
    source: str | None

    @property
    def column(self) -> str:
        """Its name in the table: values of different sources are not comparable, so each has its own column."""
        return self.metric if self.source is None else f"{self.metric}:{self.source}"

    @property
    def where(self) -> dict[str, Any]:
        """The arguments with which a `Run` returns this field."""
        return {"kind": KINDS[self.kind], "source": self.source}


def write_csv(run: Run, stream: IO[str], kinds: Collection[str] = (), metrics: Collection[str] = ()) -> int:
    """Writes the table, or some kinds and metrics of it, as CSV. A cell is empty if it was not measured.

    Returns:
        The number of rows.
    """
    header, blocks = _table(run, kinds, metrics)
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    count = 0
    for block in blocks:
        empty = [""] * len(block["step"])
        texts = [_as_text(block[name]) if name in block else empty for name in header]
        writer.writerows(zip(*texts, strict=True))
        count += len(empty)
    return count


def write_parquet(run: Run, path: Path, kinds: Collection[str] = (), metrics: Collection[str] = ()) -> int:
    """Writes the table, or some kinds and metrics of it, as Parquet. A cell is null if it was not measured.

    Returns:
        The number of rows.

    Raises:
        ExportError: If pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ExportError("Parquet needs pyarrow; install it with: pip install 'gradvitals[parquet]'") from None
    header, blocks = _table(run, kinds, metrics)
    types = {"step": pa.int64(), "time": pa.float64()} | dict.fromkeys(("kind", "name", "stage"), pa.string())
    schema = pa.schema([(name, types.get(name, pa.float32())) for name in header])
    count = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for block in blocks:
            missing = [None] * len(block["step"])
            arrays = [pa.array(block.get(each.name, missing), each.type, from_pandas=True) for each in schema]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            count += len(missing)
    return count


def _table(run: Run, kinds: Collection[str], metrics: Collection[str]) -> tuple[list[str], Iterator[Columns]]:
    """Returns the header, and the table in parts that fit in memory: kind after kind, each in order of steps."""
    available = run.metrics()
    unknown = sorted(set(metrics) - set(available))
    if unknown:
        raise ExportError(f"the run has no {', '.join(unknown)}; it has {', '.join(available) or 'no readings'}")
    fields = [
        Field(kind, metric, source)
        for kind, stored in KINDS.items()
        if not kinds or kind in kinds
        for metric in run.metrics(stored)
        if not metrics or metric in metrics
        for source in run.sources(metric, stored) or (None,)
    ]

    def blocks() -> Iterator[Columns]:
        for kind, stored in KINDS.items():
            own = [field for field in fields if field.kind == kind]
            names = np.array(run.names(stored), dtype=object)
            steps = [run.times(field.metric, **field.where)[0] for field in own]
            for window in windows(np.unique(np.concatenate(steps)), len(names) * len(own)) if own else ():
                block = _block(run, own, names, window)
                if len(block["step"]):
                    yield block

    sizes = dict.fromkeys(f"batch_size:{field.source}" for field in fields if field.source is not None)
    return [*KEYS, *sorted({field.column for field in fields}), *sizes], blocks()


def _block(run: Run, fields: list[Field], names: NDArray[Any], window: NDArray[np.int64]) -> Columns:
    shape = (len(window), len(names))
    cells: Columns = {}
    info: Columns = {"time": np.full(len(window), np.nan), "stage": np.full(len(window), None, dtype=object)}
    since, until = int(window[0]) - 1, int(window[-1])
    for field in reversed(fields):  # of what they share, the first that is known counts
        steps, rows = run.matrix(field.metric, since=since, until=until, **field.where)
        cells[field.column] = np.full(shape, np.nan, dtype=np.float32)
        cells[field.column][np.searchsorted(window, steps)] = rows
        _fill(info["time"], window, *run.times(field.metric, since=since, **field.where))
        _fill(info["stage"], window, *run.stage(field.metric, since=since, **field.where))
        if field.source is not None:
            sizes = info.setdefault(f"batch_size:{field.source}", np.full(len(window), np.nan))
            _fill(sizes, window, *run.batch_sizes(field.metric, since=since, **field.where))
    measured = ~np.all([np.isnan(values) for values in cells.values()], axis=0).ravel()
    block: Columns = {
        "step": np.repeat(window, len(names)),
        "kind": np.full(measured.size, fields[0].kind, dtype=object),
        "name": np.tile(names, len(window)),
        **{name: np.repeat(values, len(names)) for name, values in info.items()},
        **{name: values.ravel() for name, values in cells.items()},
    }
    return {name: values[measured] for name, values in block.items()}


def _fill(known: NDArray[Any], window: NDArray[np.int64], steps: NDArray[np.int64], found: NDArray[Any]) -> None:
    """Writes what was found of the steps of the window over what was known, except NaN."""
    inside = np.isin(steps, window) & (found == found)
    known[np.searchsorted(window, steps[inside])] = found[inside]


def _as_text(values: NDArray[Any]) -> list[str]:
    if values.dtype.kind != "f":
        return [str(value) for value in values.tolist()]
    # numpy writes the shortest text that reads back as the same float32, which is what a run stores.
    return ["" if text == "nan" else text for text in values.astype(str).tolist()]
