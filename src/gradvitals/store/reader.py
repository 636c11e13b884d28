"""open_run and Run: everything a run holds, as numpy arrays, while it is being written or long after."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from gradvitals.errors import GradvitalsError, RunError
from gradvitals.store import groups as stored
from gradvitals.store import opening
from gradvitals.store.catalog import Catalog, Read
from gradvitals.store.census import take_census
from gradvitals.store.drawn import Drawn
from gradvitals.store.frames import Kind
from gradvitals.store.groups import Array, Found, Group, Span
from gradvitals.store.process import is_gone
from gradvitals.store.replay import replay
from gradvitals.store.schema import check_nesting
from gradvitals.store.segments import Segment, instant, parsed, read_segments
from gradvitals.store.writer import LIVE_SECONDS
from gradvitals.types import Action, Finding, Layout, Reading, TensorInfo

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


class Run(Drawn):
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
            check_nesting(value for _, value in rows)
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
                "heartbeat": instant(heartbeat),
                "finished_at": None if finished is None else instant(finished),
                "started_at": instant(segments[0][4]),
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
        last: int | None = None
        with self._transaction():
            for group, span in self._catalog.spans(self._catalog.groups(), None, None):
                step = stored.last_step(self._db, group)
                if step is not None and step > span.until:
                    steps = stored.read_info(self._db, group, span, name="time").steps
                    step = int(steps.max()) if steps.size else None
                if step is not None and (last is None or step > last):
                    last = step
        return last

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
            return None if row is None else stored.read_row(self._db, group, column, row, span)

        with self._transaction():
            self._catalog.check_name(kind, name)
            steps, values = self._catalog.collect(self._catalog.select(metric, kind, source), since, None, read)
        return steps, np.zeros(0) if values is None else values.astype(np.float64)

    def several(
        self, metrics: Sequence[str], *, until: int | None = None, **where: Unpack[Where]
    ) -> tuple[Steps, Floats, Floats]:
        """Several metrics at the steps of the first, read in one pass: steps, times and ``[metrics, steps]``.

        A metric that was not read together with the first is nan. Arguments as for `series`; up to and with `until`.
        """
        kind, name = _named_row(where.get("tensor"), where.get("layer"), where.get("head"), where.get("rank"))
        with self._transaction():
            self._catalog.check_name(kind, name)
            groups = self._catalog.select(metrics[0], kind, where.get("source"))
            return self._catalog.together(groups, metrics, name, where.get("since"), until)

    def matrix(
        self,
        metric: str,
        kind: Kind = "tensors",
        *,
        source: str | None = None,
        since: int | None = None,
        until: int | None = None,
    ) -> tuple[Steps, Floats]:
        """One metric for all rows: steps, and ``[steps, rows]`` with nan where a row has no number.

        The rows are those of `names`. Steps after `since`, up to and with `until`.
        """
        with self._transaction():
            names = self._catalog.names(kind)
            current = self._catalog.layout_id()

            def read(group: Group, span: Span) -> Found:
                found = stored.read_rows(self._db, group, group.columns.index(metric), span)
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
        return self._frame_info(metric, partial(stored.read_info, self._db, name="time"), where)

    def batch_sizes(self, metric: str, **where: Unpack[Where]) -> tuple[Steps, Floats]:
        """Samples each step of a series stands for, nan where the loop did not tell. Arguments as for `times`."""
        return self._frame_info(metric, partial(stored.read_info, self._db, name="batch_size"), where)

    def stage(self, metric: str, **where: Unpack[Where]) -> tuple[Steps, NDArray[np.str_]]:
        """Stage of the gradients at each step of a series. Arguments as for `times`."""

        def read(group: Group, span: Span) -> Found:
            found = stored.read_info(self._db, group, span, name="time")
            return found._replace(data=np.full(found.steps.shape, group.stage))

        return self._frame_info(metric, read, where)

    def readings(self, since: int | None = None) -> Iterator[Reading]:
        """All readings in step order, those after step `since` if given."""
        with self._transaction():
            spans = list(self._catalog.spans(self._catalog.groups(), since, None))
        return replay(self._db, self._transaction, spans)

    def findings(self, *, hidden: bool = False) -> list[Finding]:
        """What was found, oldest first; `hidden` adds what was found in steps that a later segment did again."""
        with self._transaction():
            cutoffs = self._catalog.cutoffs()
            rows = self._db.execute("SELECT segment, first_step, content FROM finding ORDER BY id").fetchall()
            return parsed(Finding, (text for segment, first, text in rows if hidden or first < cutoffs[segment]))

    def actions(self, *, hidden: bool = False) -> list[Action]:
        """What was done to the run, oldest first; `hidden` adds what was done in steps that were done again later."""
        with self._transaction():
            cutoffs = self._catalog.cutoffs()
            rows = self._db.execute("SELECT segment, step, content FROM action ORDER BY id").fetchall()
            begins = dict(self._db.execute("SELECT id, first_step FROM segment").fetchall())
            shown = [row for row in rows if hidden or row[1] < cutoffs[row[0]]]
            found = parsed(Action, (text for _, _, text in shown))
        # A process that goes on tells again what its checkpoint had not been told of yet, and another one had.
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
            return read_segments(self._db, self._catalog.cutoffs())

    def moment(self) -> AbstractContextManager[None]:
        """All calls within it see the run as of one moment. Keep it short: meanwhile the writer's log cannot shrink."""
        return self._transaction()

    def census(self) -> dict[str, int]:
        """How many records there are and how long their texts are, counted without loading them."""
        with self._transaction():
            return take_census(self._db)

    def close(self) -> None:
        """Let go of the file, once other threads have read what they are reading; they can read no more then."""
        self._catalog.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        try:
            last = self.last_step
            state = "live" if self.is_live else "finished" if self.meta["finished_at"] else "stopped"
            return f"<Run {self.path}: {len(self.tensors)} tensors, last step {last}, {state}>"
        except GradvitalsError:
            return f"<Run {self.path}>"

    def _frame_info(self, metric: str, read: Read, where: Where) -> tuple[Steps, Array]:
        kind, name = _named_row(where.get("tensor"), where.get("layer"), where.get("head"), where.get("rank"))
        if kind == "values":
            kind = where.get("kind", "values")

        def read_if_there(group: Group, span: Span) -> Found | None:
            return read(group, span) if not name or self._catalog.row(group, name) is not None else None

        with self._transaction():
            if name:
                self._catalog.check_name(kind, name)
            groups = self._catalog.select(metric, kind, where.get("source"))
            steps, data = self._catalog.collect(groups, where.get("since"), None, read_if_there)
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
