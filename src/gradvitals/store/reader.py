"""open_run and Run: everything a run holds, as numpy arrays, while it is being written or long after."""

from __future__ import annotations

import difflib
import json
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradvitals.errors import GradvitalsError, RunError
from gradvitals.store import opening, schema
from gradvitals.store.blocks import (
    ALWAYS,
    KINDS,
    NEVER,
    Array,
    Found,
    Group,
    Kind,
    Place,
    Span,
    load_groups,
    load_layout,
    read_chunk,
    read_extent,
    read_info,
    read_places,
    read_row,
    read_rows,
)
from gradvitals.store.opening import is_gone
from gradvitals.store.writer import LIVE_SECONDS
from gradvitals.types import SOURCES, Action, Finding, Layout, Reading, Source, Stage, TensorInfo

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


MISSED_READINGS = 5
ENDED_SHARE = 0.05
"""A source has ended where others went on without it for so many of its readings and such a share of all steps."""

Read = Callable[[Group, Span], Found | None]


class UnknownNameError(RunError, KeyError):
    """The run has no metric, tensor, layer, head or source of that name."""

    def __str__(self) -> str:
        return str(self.args[0])


class Catalog:
    """Where everything is in one run file, up to date as the file grows."""

    def __init__(self, db: sqlite3.Connection, file: Path) -> None:
        self.db = db
        self.file = file
        self._lock = threading.RLock()
        self._is_closed = False
        self._groups: list[Group] = []
        self._names: dict[tuple[int, Kind], tuple[str, ...]] = {}
        self._rows: dict[tuple[int, Kind], dict[str, int]] = {}

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """One consistent view of the file, held as briefly as can be: an old view keeps the log from shrinking."""
        with self._lock, schema.translated(self.file):
            if self._is_closed:
                raise RunError(f"{self.file} was closed; open it again with open_run to read from it")
            outermost = not self.db.in_transaction
            if outermost:
                self.db.execute("BEGIN")
            try:
                yield
            finally:
                if outermost:
                    with suppress(sqlite3.Error):  # a damaged file has ended it already
                        self.db.execute("ROLLBACK")

    def close(self) -> None:
        """Let go of the file, once nobody is in a transaction: SQLite must not lose a connection that is read from."""
        with self._lock:
            self._is_closed = True
            self.db.close()

    # Each of the following is called inside a transaction.

    def groups(self, kind: Kind | None = None) -> list[Group]:
        """All groups of one kind, or all."""
        if kind is not None and kind not in KINDS:
            raise UnknownNameError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}")
        self._groups += load_groups(self.db, after=self._groups[-1].id if self._groups else 0)
        return [group for group in self._groups if kind in (None, group.kind)]

    def cutoffs(self) -> dict[int, int]:
        """For each segment the first step that a later one did again."""
        cutoffs: dict[int, int] = {}
        first_done_again = NEVER
        for segment, first_step in self.db.execute("SELECT id, first_step FROM segment ORDER BY id DESC").fetchall():
            cutoffs[int(segment)] = first_done_again
            first_done_again = min(first_done_again, int(first_step))
        return cutoffs

    def spans(self, groups: Iterable[Group], since: int | None, until: int | None) -> Iterator[tuple[Group, Span]]:
        """The steps of each group that are to be seen, out of those asked for."""
        cutoffs = self.cutoffs()
        low = ALWAYS if since is None else since
        high = NEVER if until is None else until
        for group in groups:
            cutoff = cutoffs[group.segment]
            yield group, Span(low, high if cutoff == NEVER else min(high, cutoff - 1))

    def layout_id(self) -> int:
        """The layout written last, 0 for none."""
        row = self.db.execute("SELECT layout FROM segment WHERE layout > 0 ORDER BY id DESC LIMIT 1").fetchone()
        return int(row[0]) if row else 0

    def layout(self) -> Layout:
        """The layout written last."""
        query = "SELECT layers, heads, details FROM layout WHERE id = ?"
        row = self.db.execute(query, (self.layout_id(),)).fetchone()
        return load_layout(*row) if row else Layout()

    def _layout_names(self, layout_id: int, kind: Kind) -> tuple[str, ...]:
        if kind == "ranks":  # they have numbers, not names
            return ()
        if (layout_id, kind) not in self._names:
            row = self.db.execute(f"SELECT {kind} FROM layout WHERE id = ?", (layout_id,)).fetchone()
            names = json.loads(row[0]) if row else []
            self._names[layout_id, kind] = tuple(map(str, names))
        return self._names[layout_id, kind]

    def names(self, kind: Kind) -> tuple[str, ...]:
        """Names of the rows of one kind by the last layout; rows beyond it are called ``#`` and their number."""
        if kind == "values":
            return ("",)
        current = self.layout_id()
        most = max((group.num_rows for group in self.groups(kind) if group.layout == current), default=0)
        named = self._layout_names(current, kind)
        return named + tuple(f"#{row}" for row in range(len(named), most))

    def row(self, group: Group, name: str) -> int | None:
        """The row of a group that a tensor, layer or head has; None if it is not in there."""
        if group.kind == "values":
            return 0
        where = (group.layout, group.kind)
        if where not in self._rows:
            names = self._layout_names(group.layout, group.kind)
            self._rows[where] = {each: row for row, each in reversed(list(enumerate(names)))}
        row = self._rows[where].get(name)
        if row is None and name[:1] == "#" and name[1:].isdecimal():
            row = int(name[1:])
        return row if row is not None and row < group.num_rows else None

    def select(self, metric: str, kind: Kind, source: str | None) -> list[Group]:
        """The groups that hold a metric, of the source asked for or else of the most trustworthy one."""
        if not isinstance(metric, str):
            raise UnknownNameError(f"got {metric!r} as metric; expected the name of one, for example 'loss'")
        holding = [group for group in self.groups(kind) if metric in group.columns]
        if not holding:
            raise self._unknown_metric(metric, kind)
        found = self.sources(holding)
        chosen = found[0] if source is None else source
        if chosen not in found:
            have = ", ".join(str(each) for each in found)
            raise UnknownNameError(f"{self.file} has no {metric!r} from source {source!r}; it has: {have}")
        return [group for group in holding if group.source == chosen]

    def sources(self, groups: Sequence[Group]) -> list[Any]:
        """Sources of some groups: those still being read first, the most trustworthy first, then those that ended."""
        order = (None, *SOURCES)
        names = {group.source for group in groups}
        found = sorted(names, key=lambda name: (order.index(name) if name in order else len(order), str(name)))
        if len(found) < 2:
            return found
        seen: dict[Any, tuple[int, int, int]] = {}
        for group, span in self.spans(groups, None, None):
            extent = read_extent(self.db, group)
            if extent is not None and extent[0] <= span.until:
                begin, last, count = seen.get(group.source, (NEVER, ALWAYS, 0))
                last = max(last, min(extent[1], span.until))
                seen[group.source] = min(begin, extent[0]), last, count + extent[2]
        first = min((extent[0] for extent in seen.values()), default=0)
        latest = max((extent[1] for extent in seen.values()), default=0)

        def ended(source: Any) -> bool:
            if source is None or source not in seen:
                return source is not None  # what needs no source cannot be asked for by name, so it stays first
            begin, last, count = seen[source]
            apart = (last - begin) / max(1, count - 1)
            return latest - last > max(MISSED_READINGS * apart, ENDED_SHARE * (latest - first))

        return sorted(found, key=ended)

    def check_name(self, kind: Kind, name: str) -> None:
        """Raise if no group and no layout ever had a row of that name."""
        groups = self.groups(kind)
        if kind == "values" or any(self.row(group, name) is not None for group in groups):
            return
        if kind == "ranks":
            most = max((group.num_rows for group in groups), default=0)
            have = f"it has ranks 0 to {most - 1}" if most else "it was not recorded with several ranks"
            raise UnknownNameError(f"{self.file} has no rank {name.removeprefix('#')}; {have}")
        layouts = {group.layout for group in groups} | {self.layout_id()}
        names = [each for layout in sorted(layouts) for each in self._layout_names(layout, kind)]
        if name not in names:
            hint = _close_to(name, names)
            raise UnknownNameError(f"{self.file} has no {kind[:-1]} {name!r}{hint}")

    def _unknown_metric(self, metric: str, kind: Kind) -> UnknownNameError:
        elsewhere = sorted({group.kind for group in self.groups() if metric in group.columns})
        if elsewhere:
            return UnknownNameError(f"{self.file} has {metric!r} only for {', '.join(elsewhere)}, not for {kind}")
        known = sorted({each for group in self.groups(kind) for each in group.columns})
        return UnknownNameError(f"{self.file} has no metric {metric!r} for {kind}{_close_to(metric, known)}")

    def collect(
        self, groups: Iterable[Group], since: int | None, until: int | None, read: Read
    ) -> tuple[NDArray[np.int64], Array | None]:
        """Read from several groups and put it in step order; of two readings of a step the later one counts."""
        found = [part for group, span in self.spans(groups, since, until) if (part := read(group, span)) is not None]
        if not found:
            return np.zeros(0, np.int64), None
        steps, readings, data = (np.concatenate(parts) for parts in zip(*found, strict=True))
        if not np.all(np.diff(steps) > 0):
            order = np.lexsort((readings, steps))
            last = np.append(np.diff(steps[order]) > 0, True)[: order.size]
            steps, data = steps[order][last], data[order][last]
        return steps, data


def _close_to(name: str, known: list[str]) -> str:
    # Comparing is quadratic in the length, and a name may be any length.
    close = difflib.get_close_matches(name[:200], [each for each in known if len(each) <= 200], n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(repr(each) for each in close)}?"
    more = f" and {len(known) - 8} more" if len(known) > 8 else ""
    return f"; it has: {', '.join(each[:80] for each in known[:8])}{more}" if known else "; it has none"


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
        values: One number a step. NaN counts only where a bucket has nothing else.
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
