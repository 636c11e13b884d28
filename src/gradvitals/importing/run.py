"""From rows to a run folder: cells become readings, the readings are judged, and what they mean is kept with them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradvitals.diagnose import Diagnosis
from gradvitals.importing.columns import STEP, TIME, choose, listed
from gradvitals.importing.finding_sources import find_source
from gradvitals.importing.source import MAX_COLUMNS, MAX_ROWS, ImportSourceError, Notes, Row, Source, number, whole
from gradvitals.store import RunWriter, free_run_path
from gradvitals.types import Finding, Reading


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What came of an import."""

    run: Path
    """The folder it is in now."""
    source: Path
    kind: str
    columns: Mapping[str, str]
    """The column that each metric, the step and the time were read from."""
    steps: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    """What is to be said about the source: damaged rows, steps that came twice."""

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {
            "run": str(self.run),
            "source": str(self.source),
            "kind": self.kind,
            "columns": dict(self.columns),
            "steps": self.steps,
            "findings": [finding.to_json() for finding in self.findings],
            "notes": list(self.notes),
        }


def import_run(
    source: str | Path, run: str | Path | None = None, *, columns: Mapping[str, str] | None = None
) -> Imported:
    """Make a run folder out of a history of loss, gradient norm or learning rate.

    Args:
        source: Event files of TensorBoard, a run of W&B, a CSV, JSONL or JSON file; or the folder of one.
        run: Folder to make; None takes ``runs/`` and the source's name.
        columns: Metrics by the name of their column, where that cannot be guessed: ``{"train_nll": "loss"}``.

    Raises:
        ImportSourceError: If the source cannot be read, or its columns cannot be told apart.
        RunError: If there is a run in that folder already.
    """
    path = Path(source)
    found = find_source(path)
    notes = Notes()
    named = _columns_of(found)
    chosen = choose(named, columns or {}, has_steps=found.kind == "tensorboard")
    if "loss" not in chosen:
        left = listed([column for column in named if column not in chosen.values()])
        notes.others.append(
            f"no column is known to be the loss, so it is not judged; left out: {left}. "
            "If it is one of these, say which: --map COLUMN=loss"
        )
    readings = _readings(found, chosen, notes)
    if not readings:
        raise ImportSourceError(f"{found.path} has no row with a number for {', '.join(_metrics(chosen).values())}")
    where = Path(run) if run is not None else free_run_path(Path("runs") / _name(path))
    words = tuple(notes.words())
    origin = {"from": str(found.path), "kind": found.kind, "columns": chosen, "notes": list(words)}
    diagnosis = Diagnosis()
    with RunWriter(where, meta={"imported": origin, "facts": diagnosis.info.to_json()}) as writer:
        for reading in readings:
            writer.write(reading)
            diagnosis.read([reading])
        diagnosis.finish()
        for finding in diagnosis.findings:
            writer.write(finding)
        writer.commit()
    return Imported(
        run=where,
        source=found.path,
        kind=found.kind,
        columns=chosen,
        steps=len(readings),
        findings=tuple(diagnosis.findings),
        notes=words,
    )


def _columns_of(source: Source) -> list[str]:
    columns: dict[str, None] = {}
    for row in _limited(source, Notes()):
        columns.update(dict.fromkeys(row.cells))
        if len(columns) > MAX_COLUMNS:
            raise ImportSourceError(f"{source.path} has over {MAX_COLUMNS:,} columns; expected fewer")
    if not columns:
        raise ImportSourceError(f"{source.path} has no row that can be read as {source.kind}")
    return list(columns)


def _readings(source: Source, chosen: Mapping[str, str], notes: Notes) -> list[Reading]:
    """One reading a step, in order of steps. Where a step comes again, what came last counts."""
    metrics = _metrics(chosen)
    values: dict[int, dict[str, float]] = {}
    times: dict[int, float] = {}
    again = unplaced = 0
    written = source.path.stat().st_mtime
    for index, row in enumerate(_limited(source, notes)):
        cells = {metric: number(row.cells.get(column)) for metric, column in metrics.items()}
        known = {metric: value for metric, value in cells.items() if value is not None}
        if not known:
            continue
        step = _step(row, chosen.get(STEP), index)
        if step is None:
            unplaced += 1
            continue
        of_step = values.setdefault(step, {})
        again += bool(of_step.keys() & known.keys())
        of_step |= known
        time = row.time if row.time is not None else number(row.cells.get(chosen.get(TIME, "")))
        times.setdefault(step, time if time is not None and math.isfinite(time) else written)
    if STEP not in chosen and source.kind != "tensorboard":
        notes.others.append("there is no column for the step; rows were counted")
    if again:
        notes.others.append(f"{again:,} rows were about a step that had come before; the last one counts")
    if unplaced:
        notes.others.append(f"{unplaced:,} rows have no step and are left out")
    return [Reading(step=step, time=times[step], values=values[step]) for step in sorted(values)]


def _step(row: Row, column: str | None, index: int) -> int | None:
    if column is not None:
        return whole(row.cells.get(column))
    return row.step if row.step is not None else index


def _metrics(chosen: Mapping[str, str]) -> dict[str, str]:
    return {metric: column for metric, column in chosen.items() if metric not in (STEP, TIME)}


def _limited(source: Source, notes: Notes) -> Iterator[Row]:
    for count, row in enumerate(source.rows(notes)):
        if count >= MAX_ROWS:
            raise ImportSourceError(f"{source.path} has over {MAX_ROWS:,} rows; expected fewer")
        yield row


def _name(path: Path) -> str:
    resolved = path.resolve()
    return f"{resolved.stem if resolved.is_file() else resolved.name}-imported"
