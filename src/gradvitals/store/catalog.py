"""The catalog of a run file: which groups, sources, names and rows it has, and which steps of them count."""

from __future__ import annotations

import difflib
import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.errors import RunError
from gradvitals.format import listed
from gradvitals.store import schema
from gradvitals.store.blocks import (
    ALWAYS,
    KINDS,
    NEVER,
    Array,
    Found,
    Group,
    Kind,
    Span,
    load_groups,
    load_layout,
    read_extent,
)
from gradvitals.types import SOURCES, Layout

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
    return f"; it has: {listed(each[:80] for each in known)}" if known else "; it has none"
