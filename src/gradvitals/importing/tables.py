"""Rows of CSV, JSONL and JSON files. Everything in them is text and numbers; nothing is ever run."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gradvitals.importing.source import MAX_COLUMNS, ImportSourceError, Notes, Row, Source

MAX_JSON_BYTES = 256 << 20
"""A JSON file is read as a whole."""
MAX_LINE = 1 << 20
"""Characters of a row."""
MAX_DEPTH = 3
"""Levels of objects inside a row of JSON that are looked into."""


def csv_source(path: Path) -> Source:
    """A table with a header, its columns apart by comma, semicolon or tab."""
    return Source("csv", path, partial(_csv_rows, path))


def jsonl_source(path: Path) -> Source:
    """One object of JSON a line."""
    return Source("jsonl", path, partial(_jsonl_rows, path))


def json_source(path: Path) -> Source:
    """A list of objects, a ``trainer_state.json`` of transformers, or an object of columns."""
    if path.stat().st_size > MAX_JSON_BYTES:
        limit = MAX_JSON_BYTES >> 20
        raise ImportSourceError(f"{path} is over {limit} MB of JSON; expected less, or one object a line in a .jsonl")
    try:
        content = json.loads(path.read_text("utf-8-sig", "replace"))
    except (ValueError, RecursionError) as error:
        raise ImportSourceError(f"{path} is not JSON ({error}); expected a list of objects, or a .jsonl") from None
    kind = "json"
    if isinstance(content, dict) and isinstance(content.get("log_history"), list):
        kind, content = "trainer_state", content["log_history"]
    elif isinstance(content, dict) and content and all(isinstance(cells, list) for cells in content.values()):
        return Source("json", path, partial(_column_rows, path, content))
    if not isinstance(content, list):
        raise ImportSourceError(f"{path} holds no rows; expected a list of objects, or a transformers trainer_state")
    return Source(kind, path, partial(_object_rows, content))


def _csv_rows(path: Path, notes: Notes) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header = file.readline(MAX_LINE)
        delimiter = max("\t;,", key=header.count)
        columns = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
        is_export = {"kind", "name", "stage"} <= set(columns)  # of `gradvitals export`
        rows = csv.reader(_lines(file, notes), delimiter=delimiter)
        while True:
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error:
                notes.unreadable += 1
                continue
            if len(cells) > len(columns):
                notes.unreadable += 1
            elif cells:
                row = dict(zip(columns, cells, strict=False))
                if not is_export or row.get("kind") == "run":
                    yield Row(row)


def _jsonl_rows(path: Path, notes: Notes) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for line in _lines(file, notes):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield Row(flat(row))
            else:
                notes.unreadable += 1


def _object_rows(content: list[Any], notes: Notes) -> Iterator[Row]:
    for row in content:
        if isinstance(row, dict):
            yield Row(flat(row))
        else:
            notes.unreadable += 1


def _column_rows(path: Path, columns: Mapping[str, list[Any]], notes: Notes) -> Iterator[Row]:
    if len(columns) > MAX_COLUMNS:
        raise ImportSourceError(f"{path} has over {MAX_COLUMNS:,} columns; expected fewer")
    going_on, until = columns, 0
    for index in range(max(map(len, columns.values()))):
        if index >= until:  # thousands of columns that have ended must not be gone through for every row
            going_on = {name: cells for name, cells in going_on.items() if len(cells) > index}
            until = min(map(len, going_on.values()))
        yield Row({name: cells[index] for name, cells in going_on.items()})


def _lines(file: Any, notes: Notes) -> Iterator[str]:
    """Whole lines; one that is far too long is left out, and so is a last one that is cut off."""
    while line := file.readline(MAX_LINE):
        if line.endswith(("\n", "\r")):
            yield line
        elif len(line) < MAX_LINE:  # the end of the file
            if _is_whole(line):
                yield line
            else:
                notes.cut_off = True
        else:
            notes.unreadable += 1
            while line and not line.endswith("\n"):
                line = file.readline(MAX_LINE)


def _is_whole(line: str) -> bool:
    """Whether a last line without an end may be taken as it is. Half a number looks like a number: only JSON tells."""
    return line.rstrip().endswith("}")


def flat(row: Mapping[str, Any], prefix: str = "", depth: int = MAX_DEPTH) -> dict[str, Any]:
    """An object with the names of inner ones joined to theirs.

    >>> flat({"step": 1, "train": {"loss": 0.5}})
    {'step': 1, 'train/loss': 0.5}
    """
    cells: dict[str, Any] = {}
    for name, cell in row.items():
        if isinstance(cell, Mapping):
            cells |= flat(cell, f"{prefix}{name}/", depth - 1) if depth else {}
        else:
            cells[f"{prefix}{name}"] = cell
    return cells
