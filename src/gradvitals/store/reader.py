"""open_run and Run: everything a run holds, as numpy arrays, while it is being written or long after."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradvitals.errors import GradvitalsError, RunError
from gradvitals.store import opening
from gradvitals.store.blocks import (
    KINDS,
    Array,
    Found,
    Group,
    Kind,
    Place,
    Span,
    read_chunk,
    read_extent,
    read_info,
    read_places,
    read_row,
    read_rows,
)
from gradvitals.store.catalog import Catalog
from gradvitals.store.opening import is_gone
from gradvitals.store.writer import LIVE_SECONDS
from gradvitals.types import Action, Finding, Layout, Reading, Source, Stage, TensorInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gradvitals.report.verdict import Verdict

Kept = TypeVar("Kept", Finding, Action)


class Segment(NamedTuple):
    """What one process wrote of a run, from its start or from the step at which it resumed."""

    first_step: int
    finished_at: float | None
    """None if it was not closed."""
    hidden: tuple[Finding, ...]
    """What it found in steps that a later segment did again."""


def parsed(record: type[Kept], texts: Iterable[str]) -> list[Kept]:
    """Returns findings or actions as they were stored, without fields that only a later minor version knows."""
    fields = record.__dataclass_fields__ | {"changes": None}  # what a program needs of each fix
    return [record.from_json({k: v for k, v in json.loads(text).items() if k in fields}) for text in texts]


def replay(
    db: sqlite3.Connection,
    transaction: Callable[[], AbstractContextManager[None]],
    spans: Iterable[tuple[Group, Span]],
) -> Iterator[Reading]:
    """Yield the readings whose frames lie in the given span of each group.

    Chunks never change, so they are read when they are due, and one of each group is held at a time.
    """
    with transaction():
        places = [place for group, span in spans for place in read_places(db, group, span)]
    places.sort(key=_order)
    held: dict[int, tuple[int, Array]] = {}

    def numbers(place: Place) -> Array:
        if not isinstance(place.numbers, tuple):
            return place.numbers
        chunk, num_frames, position = place.numbers
        if place.group.id not in held or held[place.group.id][0] != chunk:
            with transaction():
                held[place.group.id] = chunk, read_chunk(db, place.group, chunk, num_frames)
        return cast(Array, held[place.group.id][1][position])

    for _, together in groupby(places, key=_order):
        yield _reading([(place, numbers(place)) for place in together])


def _order(place: Place) -> tuple[int, int]:
    return place.step, place.reading


def _reading(parts: list[tuple[Place, Array]]) -> Reading:
    first = parts[0][0]
    content: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for place, frame in parts:
        for metric, row in zip(place.group.columns, frame, strict=True):
            content[place.group.kind][metric] = float(row[0]) if place.group.kind == "values" else row.copy()
    return Reading(
        step=first.step,
        time=first.time,
        stage=cast(Stage, first.group.stage),
        source=cast(Source | None, first.group.source),
        batch_size=None if math.isnan(first.batch_size) else first.batch_size,
        **content,
    )


Names = str | int | Sequence[str | int] | None
"""A tensor, layer or head by its name, a rank by its number, several of them, or none."""


Steps = NDArray[np.int64]
Floats = NDArray[np.float64]

MAX_MATRIX = 1 << 29
"""Numbers in one matrix (4 GB); more has to be read in parts."""


class Where(TypedDict, total=False):
    """Which series of a metric: as for `Run.series`, or all rows of a `kind` as for `Run.matrix`."""

    tensor: str | None
    layer: str | None
    head: str | None
    rank: int | None
    kind: Kind
    source: str | None
    since: int | None


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run for reading, by its folder or its file. It may be being written at the same time.

    Raises:
        RunNotFoundError: If there is none.
        RunFormatError: If what is there is not a run, is damaged, or needs a newer gradvitals.

    Example:
        >>> with open_run("runs/gpt") as run:  # doctest: +SKIP
        ...     steps, loss = run.series("loss")
    """
    return Run(opening.find_run_file(path))


class Run:
    """A run as it is on disk, each call as of now. Made by `open_run`.

    Safe to use from several threads. Steps that a resumed process did again are shown as it did them.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.path = file.parent
        self._db = opening.connect(file)
        self._catalog = Catalog(self._db, file)
        self._transaction = self._catalog.transaction

    @property
    def meta(self) -> dict[str, Any]:
        """What the run was started with, and how its process is doing."""
        with self._transaction():
            rows = self._db.execute("SELECT key, value FROM meta").fetchall()
            meta = {str(key): json.loads(value) for key, value in rows}
            segments = self._db.execute(
                "SELECT hostname, pid, heartbeat, finished_at, started_at, dropped FROM segment ORDER BY id"
            ).fetchall()
            if not segments:
                raise ValueError("it has no segment")
            hostname, pid, heartbeat, finished, *_ = segments[-1]
            return {
                **meta,
                "hostname": hostname,
                "pid": pid,
                "heartbeat": float(heartbeat),
                "finished_at": None if finished is None else float(finished),
                "started_at": float(segments[0][4]),
                "dropped": sum(int(row[5]) for row in segments),
            }

    @property
    def layout(self) -> Layout:
        """What the rows of `table` and `matrix` stand for: the layout written last."""
        with self._transaction():
            return self._catalog.layout()

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The watched parameters."""
        return self.layout.tensors

    @property
    def layers(self) -> tuple[str, ...]:
        """Layer names in depth order."""
        return self.layout.layers

    @property
    def heads(self) -> tuple[str, ...]:
        """Attention head names."""
        return self.layout.heads

    @property
    def dropped(self) -> int:
        """Records the run could not keep."""
        return int(self.meta["dropped"])

    @property
    def is_live(self) -> bool:
        """Whether a process is writing it: not finished, heard of in the last seconds, and not known to be gone."""
        meta = self.meta
        if meta["finished_at"] is not None or time.time() - meta["heartbeat"] >= LIVE_SECONDS:
            return False
        return not is_gone(meta)

    @property
    def last_step(self) -> int | None:
        """The last step there is a reading of; None before the first."""
        found: list[int] = []
        with self._transaction():
            for group, span in self._catalog.spans(self._catalog.groups(), None, None):
                extent = read_extent(self._db, group)
                if extent is not None and extent[1] <= span.until:
                    found.append(extent[1])
                elif extent is not None:
                    found += read_info(self._db, group, span, name="time").steps.tolist()
        return max(found, default=None)

    def names(self, kind: Kind) -> tuple[str, ...]:
        """What the rows of one kind are called; a row that no layout names is called ``#`` and its number."""
        with self._transaction():
            return self._catalog.names(kind)

    def metrics(self, kind: Kind | None = None) -> tuple[str, ...]:
        """Ids of the metrics in the run, for one kind of row (``values``, ``tensors``, ...) or for all."""
        with self._transaction():
            return tuple(sorted({metric for group in self._catalog.groups(kind) for metric in group.columns}))

    def sources(self, metric: str, kind: Kind | None = None) -> tuple[str, ...]:
        """Sources the metric was measured from, the most trustworthy first; empty if it needs none.

        One that ended long before the others comes after those that are still read: what it says is not of now.
        """
        with self._transaction():
            holding = [group for group in self._catalog.groups(kind) if metric in group.columns]
            return tuple(source for source in self._catalog.sources(holding) if source is not None)

    def series(
        self,
        metric: str,
        *,
        tensor: str | TensorInfo | None = None,
        layer: str | None = None,
        head: str | None = None,
        rank: int | None = None,
        source: str | None = None,
        since: int | None = None,
    ) -> tuple[Steps, Floats]:
        """One metric over steps: of the whole run, or of one tensor, layer, head or rank.

        Args:
            metric: Its id, such as ``grad/norm``.
            tensor: One of `tensors`, or its name.
            layer: Name of a layer.
            head: Name of an attention head.
            rank: Number of a process of a distributed run.
            source: Which source; None takes the first of `sources`.
            since: Only steps after this one: the cursor of a reader that follows a live run.

        Returns:
            Steps in order, and one number for each.
        """
        kind, name = _named_row(tensor, layer, head, rank)

        def read(group: Group, span: Span) -> Found | None:
            row = self._catalog.row(group, name)
            column = group.columns.index(metric)
            return None if row is None else read_row(self._db, group, column, row, span)

        with self._transaction():
            self._catalog.check_name(kind, name)
            steps, values = self._catalog.collect(self._catalog.select(metric, kind, source), since, None, read)
        return steps, np.zeros(0) if values is None else values.astype(np.float64)

    def matrix(
        self,
        metric: str,
        kind: Kind = "tensors",
        *,
        source: str | None = None,
        since: int | None = None,
        until: int | None = None,
    ) -> tuple[Steps, Floats]:
        """One metric for all rows: steps, and ``[steps, rows]`` with NaN if a row has no number.

        The rows are those of `names`. Steps after `since`, up to and with `until`.
        """
        with self._transaction():
            names = self._catalog.names(kind)
            current = self._catalog.layout_id()

            def read(group: Group, span: Span) -> Found:
                found = read_rows(self._db, group, group.columns.index(metric), span)
                return found._replace(data=self._aligned(found.data, group, names, current))

            steps, rows = self._catalog.collect(self._catalog.select(metric, kind, source), since, until, read)
        return steps, np.zeros((0, len(names))) if rows is None else rows

    def table(
        self, metric: str, *, kind: Kind = "tensors", source: str | None = None, step: int | None = None
    ) -> tuple[int, Floats]:
        """One metric for all rows at one step: the latest, or the given one. Returns the step and the numbers."""
        if step is None:
            steps, _ = self.times(metric, kind=kind, source=source)
            if not steps.size:
                raise RunError(f"{self.file} has no reading of {metric!r} for {kind} yet")
            step = int(steps[-1])
        steps, rows = self.matrix(metric, kind, source=source, since=step - 1, until=step)
        if not steps.size:
            raise RunError(f"{self.file} has no reading of {metric!r} at step {step}")
        return step, rows[0]

    def times(self, metric: str, **where: Unpack[Where]) -> tuple[Steps, Floats]:
        """When each step of a series was read, in seconds since the epoch.

        Takes `tensor`, `layer`, `head`, `source` and `since` as `series` does, or `kind` as `matrix` does.
        """
        return self._frame_info(metric, "time", where)

    def batch_sizes(self, metric: str, **where: Unpack[Where]) -> tuple[Steps, Floats]:
        """Samples each step of a series stands for, NaN if the loop did not report them. Arguments as for `times`."""
        return self._frame_info(metric, "batch_size", where)

    def stage(self, metric: str, **where: Unpack[Where]) -> tuple[Steps, NDArray[np.str_]]:
        """Stage of the gradients at each step of a series. Arguments as for `times`."""
        return self._frame_info(metric, "stage", where)

    def readings(self, since: int | None = None) -> Iterator[Reading]:
        """All readings in step order, those after step `since` if given."""
        with self._transaction():
            spans = list(self._catalog.spans(self._catalog.groups(), since, None))
        return replay(self._db, self._transaction, spans)

    @property
    def findings(self) -> list[Finding]:
        """What was found, oldest first. Steps that a later process did again do not count; `segments` has theirs."""
        with self._transaction():
            cutoffs = self._catalog.cutoffs()
            rows = self._db.execute("SELECT segment, first_step, content FROM finding ORDER BY id").fetchall()
            return parsed(Finding, (text for segment, first, text in rows if first < cutoffs[segment]))

    @property
    def actions(self) -> list[Action]:
        """What was done to the run, oldest first, without what was done in steps that were done again later."""
        with self._transaction():
            cutoffs = self._catalog.cutoffs()
            rows = self._db.execute("SELECT segment, step, content FROM action ORDER BY id").fetchall()
            begins = dict(self._db.execute("SELECT id, first_step FROM segment").fetchall())
            shown = [row for row in rows if row[1] < cutoffs[row[0]]]
            found = parsed(Action, (text for _, _, text in shown))
        # A resumed process repeats actions that its checkpoint did not hold yet but the run already does.
        known: set[tuple[int, str]] = set()
        kept = []
        for (segment, _, _), action in zip(shown, found, strict=True):
            if action.step >= begins.get(segment, 0) or (action.step, action.kind) not in known:
                kept.append(action)
                known.add((action.step, action.kind))
        return kept

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The processes that wrote it, one after the other."""
        with self._transaction():
            cutoffs = self._catalog.cutoffs()
            texts = self._db.execute("SELECT segment, first_step, content FROM finding ORDER BY id").fetchall()
            rows = self._db.execute("SELECT id, first_step, finished_at FROM segment ORDER BY id").fetchall()
            hidden: dict[int, list[str]] = {}
            for segment, first, text in texts:
                if first >= cutoffs[segment]:
                    hidden.setdefault(segment, []).append(text)
            return tuple(
                Segment(int(first), end if end is None else float(end), tuple(parsed(Finding, hidden.get(number, ()))))
                for number, first, end in rows
            )

    def moment(self) -> AbstractContextManager[None]:
        """All calls within it see the run as of one moment. Keep it short: meanwhile the writer's log cannot shrink."""
        return self._transaction()

    def num_records(self) -> int:
        """How many findings and actions there are, counted without loading them."""
        with self._transaction():
            query = "SELECT (SELECT count(*) FROM finding) + (SELECT count(*) FROM action)"
            return int(self._db.execute(query).fetchone()[0])

    @property
    def verdict(self) -> Verdict:
        """How the run is: level, headline, cause, fix, findings. Prints itself, and displays itself in a notebook.

        A run that was recorded without diagnosis is replayed first, which takes a while if it is long.

        Raises:
            RunError: If the run has no readings yet.
        """
        from gradvitals.report.report import Report

        return Report(self).verdict

    def plot(
        self,
        metric: str,
        *,
        tensor: Names = None,
        layer: Names = None,
        head: Names = None,
        rank: Names = None,
        kind: Kind | None = None,
        source: str | None = None,
        ax: Axes | None = None,
        band: bool = True,
        marks: bool = True,
        **style: Any,
    ) -> Axes:
        """Draw one metric over steps with matplotlib (``pip install 'gradvitals[plots]'``).

        Args:
            metric: Its id, such as ``gsnr``.
            tensor: A tensor's name, or several for a line each.
            layer: Likewise of layers.
            head: Likewise of attention heads.
            rank: Likewise the number of a process.
            kind: Instead of lines a map of all ``layers``, ``tensors``, ``heads`` or ``ranks``.
            source: Which source; None takes the most trustworthy one present.
            ax: Where to draw; None makes a new figure.
            band: Shade the 95% interval, where the metric has one.
            marks: Dotted lines where something was found that is more than a note.
            **style: For matplotlib, such as ``color`` or ``linewidth``.

        Returns:
            The axes that were drawn on.

        Example:
            >>> run.plot("gsnr", tensor="head.weight")  # doctest: +SKIP
            >>> run.plot("grad/norm", kind="layers")  # doctest: +SKIP
        """
        from gradvitals.report.notebook import plot

        chosen = {"tensor": tensor, "layer": layer, "head": head, "rank": rank}
        return plot(self, metric, chosen, kind=kind, source=source, ax=ax, band=band, marks=marks, style=style)

    def _repr_html_(self) -> str:
        from gradvitals.report.notebook import run_html

        return run_html(self)

    def close(self) -> None:
        """Let go of the file, once other threads have read what they are reading; they can read no more then."""
        self._catalog.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        try:
            last = self.last_step
            state = "live" if self.is_live else "finished" if self.meta["finished_at"] else "stopped"
            return f"<Run {self.path}: {len(self.tensors)} tensors, last step {last}, {state}>"
        except GradvitalsError:
            return f"<Run {self.path}>"

    def _frame_info(
        self, metric: str, what: Literal["time", "batch_size", "stage"], where: Where
    ) -> tuple[Steps, Array]:
        kind, name = _named_row(where.get("tensor"), where.get("layer"), where.get("head"), where.get("rank"))
        kind = where.get("kind", kind) if kind == "values" else kind

        def read(group: Group, span: Span) -> Found | None:
            if name and self._catalog.row(group, name) is None:
                return None
            found = read_info(self._db, group, span, name="time" if what == "stage" else what)
            return found._replace(data=np.full(found.steps.shape, group.stage)) if what == "stage" else found

        with self._transaction():
            if name:
                self._catalog.check_name(kind, name)
            groups = self._catalog.select(metric, kind, where.get("source"))
            steps, data = self._catalog.collect(groups, where.get("since"), None, read)
        return steps, np.zeros(0) if data is None else data

    def _aligned(self, data: Array, group: Group, names: tuple[str, ...], current: int) -> Floats:
        """Put the rows of a group in the order of `names`."""
        if len(data) * len(names) > MAX_MATRIX:
            raise RunError(f"{len(data)} steps of {len(names)} rows are too many at once; use since and until")
        if group.kind == "values" or (group.layout == current and group.num_rows == len(names)):
            return data.astype(np.float64)
        aligned = np.full((len(data), len(names)), np.nan)
        for column, name in enumerate(names):
            row = column if group.layout == current else self._catalog.row(group, name)
            if row is not None and row < group.num_rows:
                aligned[:, column] = data[:, row]
        return aligned


def _named_row(
    tensor: str | TensorInfo | None, layer: str | None, head: str | None, rank: int | None = None
) -> tuple[Kind, str]:
    process = None if rank is None else f"#{rank}"
    tensor = tensor.name if isinstance(tensor, TensorInfo) else tensor
    named: list[tuple[Kind, str | None]] = [("tensors", tensor), ("layers", layer), ("heads", head), ("ranks", process)]
    given = [(kind, name) for kind, name in named if name is not None]
    if len(given) > 1:
        raise RunError("a series is of one tensor, layer, head or rank; more than one was given")
    return given[0] if given else ("values", "")


def next_step(path: Path) -> int:
    """Returns the step after the last one of the run at a path, 0 if there is no run."""
    with suppress(RunError), open_run(path) as run:
        return 0 if run.last_step is None else int(run.last_step) + 1
    return 0


def run_meta(path: Path) -> dict[str, Any]:
    """Returns what is stored about the run at a path; nothing if there is none."""
    with suppress(RunError), open_run(path) as run:
        return run.meta
    return {}


def min_max_buckets(
    steps: ArrayLike, values: ArrayLike, buckets: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Cut a series into at most `buckets` runs of neighbours and keep the lowest and highest value of each.

    Args:
        steps: Steps in order.
        values: One number per step. NaN counts only where a bucket has nothing else.
        buckets: The most points wanted, 1 or more.

    Returns:
        The first step, the lowest and the highest value of each bucket.

    Example:
        >>> steps, low, high = min_max_buckets([0, 1, 2, 3], [5.0, 1.0, float("nan"), 2.0], 2)
        >>> steps.tolist(), low.tolist(), high.tolist()
        ([0, 2], [1.0, 2.0], [5.0, 2.0])
    """
    step_array: NDArray[np.int64] = np.asarray(steps, dtype=np.int64)
    value_array: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    if step_array.shape != value_array.shape or step_array.ndim != 1:
        raise ValueError(f"steps have shape {step_array.shape} and values {value_array.shape}; expected one of each")
    if buckets < 1:
        raise ValueError(f"buckets is {buckets}; expected 1 or more")
    if step_array.size <= buckets:
        return step_array.copy(), value_array.copy(), value_array.copy()
    starts: NDArray[Any] = np.arange(buckets) * step_array.size // buckets
    return step_array[starts], np.fmin.reduceat(value_array, starts), np.fmax.reduceat(value_array, starts)
