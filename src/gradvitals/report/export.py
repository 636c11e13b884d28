"""A run as one table: a row per step and tensor, layer, head or rank, a column per metric."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which part of a run to export; empty means all."""

    kinds: Collection[str] = ()
    metrics: Collection[str] = ()


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


def write_csv(run: Run, stream: IO[str], selection: Selection) -> int:
    """Writes the table as CSV and returns the number of rows. A cell is empty if it was not measured."""
    fields = _fields(run, selection)
    header = _header(fields)
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    count = 0
    for block in _blocks(run, fields):
        empty = [""] * len(block["step"])
        texts = [_as_text(block[name]) if name in block else empty for name in header]
        writer.writerows(zip(*texts, strict=True))
        count += len(empty)
    return count


def write_parquet(run: Run, path: Path, selection: Selection) -> int:
    """Writes the table as Parquet and returns the number of rows. A cell is null if it was not measured.

    Raises:
        ExportError: If pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ExportError("Parquet needs pyarrow; install it with: pip install 'gradvitals[parquet]'") from None
    fields = _fields(run, selection)
    types = {"step": pa.int64(), "time": pa.float64()} | dict.fromkeys(("kind", "name", "stage"), pa.string())
    schema = pa.schema([(name, types.get(name, pa.float32())) for name in _header(fields)])
    count = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for block in _blocks(run, fields):
            size = len(block["step"])
            arrays = [
                pa.array(block[column.name], column.type, from_pandas=True)
                if column.name in block
                else pa.nulls(size, column.type)
                for column in schema
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            count += size
    return count


def _fields(run: Run, selection: Selection) -> list[Field]:
    available = run.metrics()
    unknown = sorted(set(selection.metrics) - set(available))
    if unknown:
        raise ExportError(f"the run has no {', '.join(unknown)}; it has {', '.join(available) or 'no readings'}")
    return [
        Field(kind, metric, source)
        for kind, stored in KINDS.items()
        if not selection.kinds or kind in selection.kinds
        for metric in run.metrics(stored)
        if not selection.metrics or metric in selection.metrics
        for source in run.sources(metric, stored) or (None,)
    ]


def _header(fields: list[Field]) -> list[str]:
    metrics = dict.fromkeys(field.column for field in sorted(fields, key=lambda field: field.column))
    sources = dict.fromkeys(f"batch_size:{field.source}" for field in fields if field.source is not None)
    return [*KEYS, *metrics, *sources]


def _blocks(run: Run, fields: list[Field]) -> Iterator[Columns]:
    """Yields the table in parts that fit in memory: kind after kind, each in order of steps."""
    for kind in KINDS:
        own = [field for field in fields if field.kind == kind]
        if not own:
            continue
        names = np.array(run.names(KINDS[kind]) if kind != "run" else [""], dtype=object)
        whens = [run.times(field.metric, **field.where) for field in own]
        for window in windows(np.unique(np.concatenate([steps for steps, _ in whens])), len(names) * len(own)):
            block = _block(run, own, names, window)
            if len(block["step"]):
                yield block


def _block(run: Run, fields: list[Field], names: NDArray[Any], window: NDArray[np.int64]) -> Columns:
    shape = (len(window), len(names))
    cells: Columns = {}
    info: Columns = {"time": np.full(len(window), np.nan), "stage": np.full(len(window), None, dtype=object)}
    since, until = int(window[0]) - 1, int(window[-1])
    for field in fields:
        steps, rows = run.matrix(field.metric, since=since, until=until, **field.where)
        cells[field.column] = np.full(shape, np.nan, dtype=np.float32)
        cells[field.column][np.searchsorted(window, steps)] = rows
        info["time"] = _filled(info["time"], window, *run.times(field.metric, since=since, **field.where))
        info["stage"] = _filled(info["stage"], window, *run.stage(field.metric, since=since, **field.where))
        if field.source is not None:
            name = f"batch_size:{field.source}"
            start = info.get(name, np.full(len(window), np.nan))
            info[name] = _filled(start, window, *run.batch_sizes(field.metric, since=since, **field.where))
    measured = ~np.all([np.isnan(values) for values in cells.values()], axis=0).ravel()
    block: Columns = {
        "step": np.repeat(window, len(names)),
        "kind": np.full(measured.size, fields[0].kind, dtype=object),
        "name": np.tile(names, len(window)),
        **{name: np.repeat(values, len(names)) for name, values in info.items()},
        **{name: values.ravel() for name, values in cells.items()},
    }
    return {name: values[measured] for name, values in block.items()}


def _filled(known: NDArray[Any], window: NDArray[np.int64], steps: NDArray[np.int64], found: NDArray[Any]) -> Any:
    """Returns what is known of each step of the window, completed by what was found."""
    inside = np.isin(steps, window)
    places = np.searchsorted(window, steps[inside])
    unknown = np.array([value is None or value != value for value in known[places]], dtype=bool)
    result = known.copy()
    result[places[unknown]] = found[inside][unknown]
    return result


def _as_text(values: NDArray[Any]) -> list[str]:
    if values.dtype.kind != "f":
        return [str(value) for value in values.tolist()]
    # numpy writes the shortest text that reads back as the same float32, which is what a run stores.
    return ["" if text == "nan" else text for text in values.astype(str).tolist()]
