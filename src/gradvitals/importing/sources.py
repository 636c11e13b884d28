"""Histories that other programs keep: TensorBoard event files, W&B files, CSV, JSON and JSON lines."""

from __future__ import annotations

import csv
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple

from gradvitals.errors import GradvitalsError

MAX_BYTES = 2 << 30
"""The most bytes in all files of a source."""
EXPECTED = (
    "TensorBoard event files or their folder, a W&B run folder or .wandb file, a .csv, .tsv, .jsonl or .json, "
    "or a folder with a trainer_state.json"
)


class ImportSourceError(GradvitalsError):
    """A source cannot be read, or is ambiguous."""


class Row(NamedTuple):
    """One row: its cells by column, and its step and time if the format has a place for them."""

    cells: Mapping[str, Any]
    step: int | None = None
    time: float | None = None


@dataclass
class Notes:
    """Problems while reading."""

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


# -- which source --------------------------------------------------------------------------------------------------


def find_source(path: Path) -> Source:
    """Returns the source at a path.

    Raises:
        ImportSourceError: If there is none, more than one, or one that is too large.
    """
    if not path.exists():
        raise ImportSourceError(f"there is nothing at {path}; expected {EXPECTED}")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    events = [file for file in files if "tfevents" in file.name]
    if events:
        files = [file for file in events if file.parent == path] or events
        folders = sorted({str(file.parent) for file in files})
        if len(folders) > 1:
            raise ImportSourceError(f"{path} holds {len(folders)} runs; name one of them: {', '.join(folders[:10])}")
        _check_size(files)
        _event_class()
        return Source("tensorboard", path, partial(_event_rows, files))
    if wandb := [file for file in files if file.suffix == ".wandb"]:
        return _wandb_source(_only(path, wandb))
    if states := [file for file in files if file.name == "trainer_state.json"]:
        # The newest checkpoint has the whole history.
        return _json_source(max(states, key=lambda file: (file.parent == path, file.stat().st_mtime)))
    tables = [file for file in files if file.suffix.lower() in (".csv", ".tsv", ".jsonl", ".ndjson", ".json")]
    return _table(_only(path, tables if path.is_dir() else files))


def _table(file: Path) -> Source:
    with file.open("rb") as opened:
        head = opened.read(4096)
    suffix = file.suffix.lower()
    lines = head.removeprefix(b"\xef\xbb\xbf").lstrip().split(b"\n")
    if head.startswith(MAGIC):
        return _wandb_source(file)
    # A .json may have one object per line too.
    has_objects = len(lines) > 2 and lines[0].rstrip().endswith(b"}") and lines[1].lstrip().startswith(b"{")
    if suffix == ".json" and not has_objects:
        return _json_source(file)
    if suffix in (".jsonl", ".ndjson", ".json") or lines[0].startswith(b"{"):
        return Source("jsonl", file, partial(_jsonl_rows, file))
    if b"\0" in head or (suffix not in (".csv", ".tsv", ".txt") and b"," not in head and b"\t" not in head):
        raise ImportSourceError(f"{file} is of no known kind; expected {EXPECTED}")
    return Source("csv", file, partial(_csv_rows, file))


def _only(path: Path, files: list[Path]) -> Path:
    if not files:
        raise ImportSourceError(f"{path} holds nothing that can be imported; expected {EXPECTED}")
    if len(files) > 1:
        names = ", ".join(str(file) for file in files[:10])
        raise ImportSourceError(f"{path} holds {len(files)} possible files; name one of them: {names}")
    _check_size(files)
    return files[0]


def _check_size(files: list[Path]) -> None:
    size = sum(file.stat().st_size for file in files)
    if size > MAX_BYTES:
        raise ImportSourceError(f"{files[0]} has {size / 2**30:.1f} GB; expected {MAX_BYTES >> 30} GB or less")


# -- tables --------------------------------------------------------------------------------------------------------


def _csv_rows(path: Path, notes: Notes) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header = file.readline()
        delimiter = max("\t;,", key=header.count)
        columns = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
        is_export = {"kind", "name", "stage"} <= set(columns)  # of `gradvitals export`
        for cells in csv.reader(_complete_lines(file, notes), delimiter=delimiter):
            row = dict(zip(columns, cells, strict=False))
            if len(cells) > len(columns):
                notes.unreadable += 1
            elif cells and (not is_export or row.get("kind") == "run"):
                yield Row(row)


def _jsonl_rows(path: Path, notes: Notes) -> Iterator[Row]:
    def parsed(line: str) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return None

    with path.open(encoding="utf-8-sig", errors="replace") as file:
        yield from _object_rows((parsed(line) for line in _complete_lines(file, notes) if line.strip()), notes)


def _complete_lines(file: IO[str], notes: Notes) -> Iterator[str]:
    """Yields the lines without an incomplete last one. Half a number looks like one; only JSON shows its end."""
    for line in file:
        if line.endswith(("\n", "\r")) or line.rstrip().endswith("}"):
            yield line
        else:
            notes.cut_off = True


def _json_source(path: Path) -> Source:
    """Returns a list of objects, a ``trainer_state.json`` of transformers, or an object of columns."""
    _check_size([path])
    try:
        content = json.loads(path.read_text("utf-8-sig", "replace"))
    except (ValueError, RecursionError) as error:
        raise ImportSourceError(f"{path} is not JSON ({error}); expected a list of objects, or a .jsonl") from None
    kind = "json"
    if isinstance(content, dict) and isinstance(content.get("log_history"), list):
        kind, content = "trainer_state", content["log_history"]
    elif isinstance(content, dict) and content and all(isinstance(cells, list) for cells in content.values()):
        count = max(map(len, content.values()))
        content = [{name: cells[i] for name, cells in content.items() if i < len(cells)} for i in range(count)]
    if not isinstance(content, list):
        raise ImportSourceError(f"{path} holds no rows; expected a list of objects, or a transformers trainer_state")
    return Source(kind, path, partial(_object_rows, content))


def _object_rows(content: Iterable[Any], notes: Notes) -> Iterator[Row]:
    for row in content:
        if isinstance(row, dict):
            yield Row(flat(row))
        else:
            notes.unreadable += 1


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a nested object as a flat one whose names are paths.

    >>> flat({"step": 1, "train": {"loss": 0.5}})
    {'step': 1, 'train/loss': 0.5}
    """
    cells: dict[str, Any] = {}
    for name, cell in row.items():
        cells |= flat(cell, f"{prefix}{name}/") if isinstance(cell, Mapping) else {f"{prefix}{name}": cell}
    return cells


def _decoded(contents: Iterable[bytes], message_class: Any, notes: Notes) -> Iterator[Any]:
    """Yields protobuf messages, and counts those that cannot be decoded."""
    from google.protobuf.message import DecodeError

    for content in contents:
        try:
            yield message_class.FromString(content)
        except DecodeError:
            notes.unreadable += 1


# -- TensorBoard ---------------------------------------------------------------------------------------------------

FLOAT, DOUBLE = 1, 2
"""TensorFlow's numbers for its dtypes."""


def _event_rows(files: list[Path], notes: Notes) -> Iterator[Row]:
    event_class = _event_class()
    for path in files:  # their names start with a time
        with path.open("rb") as file:
            for event in _decoded(_frames(file, notes), event_class, notes):
                for value in event.summary.value if event.step >= 0 else ():
                    scalar = _scalar(value)
                    if scalar is not None:
                        yield Row({value.tag: scalar}, event.step, event.wall_time)


def _frames(file: IO[bytes], notes: Notes) -> Iterator[bytes]:
    """Yields events as bytes. Each follows its length and the checksum of that, and precedes its own checksum."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    while head := file.read(12):
        place = file.tell() - len(head)
        length, checksum = struct.unpack("<QI", head) if len(head) == 12 else (0, 0)
        if len(head) == 12 and int(masked_crc32c(head[:8])) != checksum:
            notes.others.append(f"{Path(file.name).name} is damaged after {place:,} bytes; what is before was read")
            return
        content = file.read(length + 4)
        if len(head) < 12 or len(content) < length + 4:
            notes.cut_off = True
            return
        yield content[:-4]


def _scalar(value: Any) -> float | None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor" or any(dim.size != 1 for dim in value.tensor.tensor_shape.dim):
        return None
    tensor = value.tensor
    for dtype, numbers, form in ((FLOAT, tensor.float_val, "<f"), (DOUBLE, tensor.double_val, "<d")):
        if tensor.dtype == dtype and len(numbers) == 1:
            return float(numbers[0])
        if tensor.dtype == dtype and len(tensor.tensor_content) == struct.calcsize(form):
            return float(struct.unpack(form, tensor.tensor_content)[0])
    return None


def _event_class() -> Any:
    return _messages("event files are", "tensorboard", "tensorboard.compat.proto.event_pb2").Event


def _messages(what: str, package: str, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        how = f"pip install 'gradvitals[{package}]'"
        raise ImportSourceError(f"{what} read with {package}, which is not installed: {how}") from None


# -- W&B -----------------------------------------------------------------------------------------------------------

MAGIC = b":W&B"
BLOCK = 32768
HEADER = 7
"""Bytes before the first record, and before each piece of a record."""
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def _wandb_source(path: Path) -> Source:
    _record_class()
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ImportSourceError(f"{path} is not a .wandb file; expected the one in a folder offline-run-*")
    return Source("wandb", path, partial(_wandb_rows, path))


def _wandb_rows(path: Path, notes: Notes) -> Iterator[Row]:
    with path.open("rb") as file:
        for record in _decoded(_records(file, notes), _record_class(), notes):
            if record.WhichOneof("record_type") == "history":
                cells = {}
                for item in record.history.item:
                    with suppress(ValueError, RecursionError):
                        cells["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
                yield Row(cells)


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
                if kind in (FULL, LAST):
                    yield b"".join(parts)
                    parts = None
        if place < len(block) < BLOCK and len(block) - place < HEADER:  # only the start of a piece
            notes.cut_off = True
    notes.cut_off = notes.cut_off or parts is not None


def _record_class() -> Any:
    return _messages("a .wandb file is", "wandb", "wandb.proto.wandb_internal_pb2").Record
