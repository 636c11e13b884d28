"""Histories that other programs keep: TensorBoard event files, W&B files, CSV, JSON and JSON lines."""

from __future__ import annotations

import csv
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from gradvitals.errors import GradvitalsError

MAX_BYTES = 2 << 30
"""The most bytes in all files of a source."""
MAX_ROWS = 5_000_000
MAX_COLUMNS = 20_000


class ImportSourceError(GradvitalsError):
    """A source cannot be read, or is ambiguous."""


class Row(NamedTuple):
    """One row: its cells by column, and its step and time if the format has a place for them."""

    cells: Mapping[str, Any]
    step: int | None = None
    time: float | None = None


@dataclass
class Notes:
    """What went wrong while reading."""

    unreadable: int = 0
    """Rows that could not be read."""
    cut_off: bool = False
    """Whether the last row is incomplete: its writer was killed or is still writing."""
    others: list[str] = field(default_factory=list)

    def words(self) -> list[str]:
        """Returns the notes as sentences."""
        words = list(self.others)
        if self.unreadable:
            rows = "1 row" if self.unreadable == 1 else f"{self.unreadable:,} rows"
            words.append(f"{rows} could not be read and {'is' if self.unreadable == 1 else 'are'} left out")
        if self.cut_off:
            words.append("the file ends in the middle of a row; everything before it was read")
        return words


@dataclass(frozen=True)
class Source:
    """A file or folder, and a function that iterates over its rows, as often as needed."""

    kind: str
    path: Path
    rows: Callable[[Notes], Iterator[Row]]


def number(cell: Any) -> float | None:
    """Returns a cell as a number, or None. NaN and infinity are numbers here: they may be what matters.

    >>> number("1e-3"), number("nan") is None, number(""), number([1.0])
    (0.001, False, None, None)
    """
    if isinstance(cell, bool) or not isinstance(cell, (int, float, str)):
        return None
    try:
        return float(cell)
    except (ValueError, OverflowError):
        return None


def whole(cell: Any) -> int | None:
    """Returns a cell as a step: an integer from 0 that a run can hold, or None."""
    value = number(cell)
    if value is None or not math.isfinite(value) or value != int(value) or not 0 <= value < 1 << 53:
        return None
    return int(value)


def decoded(contents: Iterable[bytes], message_class: Any, notes: Notes) -> Iterator[Any]:
    """Yields protobuf messages, and counts those that cannot be decoded."""
    from google.protobuf.message import DecodeError

    for content in contents:
        try:
            yield message_class.FromString(content)
        except DecodeError:
            notes.unreadable += 1


MAX_JSON_BYTES = 256 << 20
"""The most bytes of a JSON file, which is read as a whole."""
MAX_LINE = 1 << 20
"""The most characters in a row."""
MAX_DEPTH = 3
"""Levels of nested objects to read in a JSON row."""


def csv_source(path: Path) -> Source:
    """A table with a header, separated by comma, semicolon or tab."""
    return Source("csv", path, partial(_csv_rows, path))


def jsonl_source(path: Path) -> Source:
    """One JSON object per line."""
    return Source("jsonl", path, partial(_jsonl_rows, path))


def json_source(path: Path) -> Source:
    """A list of objects, a ``trainer_state.json`` of transformers, or an object of columns."""
    if path.stat().st_size > MAX_JSON_BYTES:
        limit = MAX_JSON_BYTES >> 20
        raise ImportSourceError(f"{path} is over {limit} MB of JSON; expected less, or one object per line in a .jsonl")
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
    longer, until = columns, 0
    for index in range(max(map(len, columns.values()))):
        if index >= until:  # do not visit thousands of columns that have ended for every row
            longer = {name: cells for name, cells in longer.items() if len(cells) > index}
            until = min(map(len, longer.values()))
        yield Row({name: cells[index] for name, cells in longer.items()})


def _lines(file: Any, notes: Notes) -> Iterator[str]:
    """Yields complete lines; skips lines that are far too long and an incomplete last one."""
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
    """Whether a last line without a line break is complete. Half a number looks like one; only JSON shows it."""
    return line.rstrip().endswith("}")


def flat(row: Mapping[str, Any], prefix: str = "", depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Returns a nested object as a flat one whose names are paths.

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


MAX_EVENT = 16 << 20
"""The most bytes of one event; larger ones, such as images and graphs, are skipped."""
FLOAT, DOUBLE = 1, 2
"""TensorFlow's numbers for its dtypes."""


def event_source(path: Path, files: list[Path]) -> Source:
    """The event files of one run, in the order of their names, which start with a time."""
    _event_class()
    return Source("tensorboard", path, partial(_event_rows, sorted(files)))


def _event_rows(files: list[Path], notes: Notes) -> Iterator[Row]:
    event_class = _event_class()
    for path in files:
        with path.open("rb") as file:
            for event in decoded(_frames(file, notes), event_class, notes):
                if event.step < 0:
                    continue
                for value in event.summary.value:
                    scalar = _scalar(value)
                    if scalar is not None:
                        yield Row({value.tag: scalar}, event.step, event.wall_time)


def _frames(file: IO[bytes], notes: Notes) -> Iterator[bytes]:
    """Yields events as bytes. Each follows its length and the checksum of that, and precedes its own checksum."""
    size = file.seek(0, 2)
    place = file.seek(0)
    while place < size:
        head = file.read(12)
        if len(head) < 12:
            notes.cut_off = True
            return
        length, checksum = struct.unpack("<QI", head)
        if _masked_crc(head[:8]) != checksum:
            notes.others.append(f"{Path(file.name).name} is damaged after {place:,} bytes; what is before was read")
            return
        if place + 16 + length > size:
            notes.cut_off = True
            return
        if length <= MAX_EVENT:
            yield file.read(length)
        place = file.seek(place + 16 + length)


def _scalar(value: Any) -> float | None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor" or any(dim.size != 1 for dim in value.tensor.tensor_shape.dim):
        return None
    tensor = value.tensor
    for number, numbers, form in ((FLOAT, tensor.float_val, "<f"), (DOUBLE, tensor.double_val, "<d")):
        if tensor.dtype == number and len(numbers) == 1:
            return float(numbers[0])
        if tensor.dtype == number and len(tensor.tensor_content) == struct.calcsize(form):
            return float(struct.unpack(form, tensor.tensor_content)[0])
    return None


def _masked_crc(data: bytes) -> int:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    return int(masked_crc32c(data))


def _event_class() -> Any:
    try:
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:
        raise ImportSourceError(
            "event files are read with tensorboard, which is not installed: pip install 'gradvitals[tensorboard]'"
        ) from None
    return Event


MAGIC = b":W&B"
BLOCK = 32768
HEADER = 7
"""Bytes before the first record, and before each piece of a record."""
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
MAX_RECORD = 16 << 20
"""The most bytes of one record; larger ones are skipped."""


def wandb_source(path: Path) -> Source:
    """A W&B run."""
    _record_class()
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ImportSourceError(f"{path} is not a .wandb file; expected the one in a folder offline-run-*")
    return Source("wandb", path, partial(_wandb_rows, path))


def _wandb_rows(path: Path, notes: Notes) -> Iterator[Row]:
    with path.open("rb") as file:
        for record in decoded(_records(file, notes), _record_class(), notes):
            if record.WhichOneof("record_type") == "history":
                yield Row(dict(_cells(record.history.item)))


def _cells(items: Any) -> Iterator[tuple[str, Any]]:
    for item in items:
        try:
            yield "/".join(item.nested_key) or item.key, json.loads(item.value_json)
        except (ValueError, RecursionError):
            continue


def _records(file: IO[bytes], notes: Notes) -> Iterator[bytes]:
    """Yields records as bytes. A block holds complete pieces of records; a record may span several blocks."""
    parts: list[bytes] | None = None
    start = HEADER
    while block := file.read(BLOCK):
        place, start = start, 0
        while place + HEADER <= len(block):
            _, length, kind = struct.unpack_from("<IHB", block, place)
            if kind == 0:  # padding: the block had no room for another piece
                break
            piece = block[place + HEADER : place + HEADER + length]
            place += HEADER + length
            if kind > LAST or (place > len(block) and len(block) == BLOCK):
                notes.unreadable += 1
                parts = None
                break
            if len(piece) < length:
                notes.cut_off = True
                return
            if kind in (FULL, FIRST):
                parts = []
            if parts is not None:
                parts.append(piece)
                if sum(map(len, parts)) > MAX_RECORD:
                    parts = None
                elif kind in (FULL, LAST):
                    yield b"".join(parts)
                    parts = None
        if place < len(block) < BLOCK and len(block) - place < HEADER:  # only the start of a piece
            notes.cut_off = True
    notes.cut_off = notes.cut_off or parts is not None


def _record_class() -> Any:
    try:
        from wandb.proto import wandb_internal_pb2
    except ImportError:
        raise ImportSourceError(
            "a .wandb file is read with wandb, which is not installed: pip install 'gradvitals[wandb]'"
        ) from None
    return wandb_internal_pb2.Record  # type: ignore[attr-defined, unused-ignore]


EXPECTED = (
    "TensorBoard event files or their folder, a W&B run folder or .wandb file, a .csv, .tsv, .jsonl or .json, "
    "or a folder with a trainer_state.json"
)
MAX_ENTRIES = 20_000
"""The most files to look at in a source."""


def find_source(path: Path) -> Source:
    """Returns the source at a path.

    Raises:
        ImportSourceError: If there is none, more than one, or one that is too large.
    """
    if not path.exists():
        raise ImportSourceError(f"there is nothing at {path}; expected {EXPECTED}")
    files = _files(path) if path.is_dir() else [path]
    events = [file for file in files if "tfevents" in file.name]
    if events:
        return event_source(path, _checked(_one_run(path, events)))
    wandb = [file for file in files if file.suffix == ".wandb"]
    if wandb:
        return wandb_source(_checked([_only(path, wandb)])[0])
    states = [file for file in files if file.name == "trainer_state.json"]
    if states:  # the newest checkpoint has the whole history
        return json_source(max(states, key=lambda file: (file.parent == path, file.stat().st_mtime)))
    tables = [file for file in files if file.suffix.lower() in (".csv", ".tsv", ".jsonl", ".ndjson", ".json")]
    return _table(_checked([_only(path, tables if path.is_dir() else files)])[0])


def _table(file: Path) -> Source:
    with file.open("rb") as opened:
        head = opened.read(4096)
    if head.startswith(MAGIC):
        return wandb_source(file)
    suffix = file.suffix.lower()
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if suffix == ".json" and not _looks_like_lines(head):
        return json_source(file)
    if suffix in (".jsonl", ".ndjson", ".json") or first == b"{":
        return jsonl_source(file)
    if b"\0" in head or (suffix not in (".csv", ".tsv", ".txt") and b"," not in head and b"\t" not in head):
        raise ImportSourceError(f"{file} is of no known kind; expected {EXPECTED}")
    return csv_source(file)


def _looks_like_lines(head: bytes) -> bool:
    """Whether a .json has an object on its first line and another on its second."""
    lines = head.split(b"\n")
    return len(lines) > 2 and lines[0].rstrip().endswith(b"}") and lines[1].lstrip().startswith(b"{")


def _files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders.sort()
        found += [Path(parent) / name for name in sorted(names)]
        if len(found) > MAX_ENTRIES:
            raise ImportSourceError(f"{folder} holds over {MAX_ENTRIES:,} files; name the folder of one run")
    return found


def _one_run(path: Path, events: list[Path]) -> list[Path]:
    """Returns the event files of one folder; several folders are several runs."""
    folders = sorted({file.parent for file in events})
    if path in folders:
        return [file for file in events if file.parent == path]
    if len(folders) > 1:
        names = ", ".join(str(folder) for folder in folders[:10])
        raise ImportSourceError(f"{path} holds {len(folders)} runs; name one of them: {names}")
    return events


def _only(path: Path, files: list[Path]) -> Path:
    if not files:
        raise ImportSourceError(f"{path} holds nothing that can be imported; expected {EXPECTED}")
    if len(files) > 1:
        names = ", ".join(str(file) for file in files[:10])
        raise ImportSourceError(f"{path} holds {len(files)} files that could be meant; name one of them: {names}")
    return files[0]


def _checked(files: list[Path]) -> list[Path]:
    size = sum(file.stat().st_size for file in files)
    if size > MAX_BYTES:
        raise ImportSourceError(f"{files[0]} has {size / 2**30:.1f} GB; expected {MAX_BYTES >> 30} GB or less")
    return files
