"""Rows of the ``.wandb`` file that W&B keeps of a run. The frames are read here, their content by wandb."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from gradvitals.importing.source import ImportSourceError, Notes, Row, Source, decoded

MAGIC = b":W&B"
BLOCK = 32768
HEADER = 7
"""Bytes before the first record, and before every piece of one."""
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
MAX_RECORD = 16 << 20
"""Bytes of one record; larger ones are passed over."""


def wandb_source(path: Path) -> Source:
    """One run of W&B."""
    _record_class()
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ImportSourceError(f"{path} is not a .wandb file; expected the one in a folder offline-run-*")
    return Source("wandb", path, partial(_rows, path))


def _rows(path: Path, notes: Notes) -> Iterator[Row]:
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
    """The records as bytes. A block holds whole pieces of records; a record may be in pieces over several blocks."""
    parts: list[bytes] | None = None
    start = HEADER
    while block := file.read(BLOCK):
        place, start = start, 0
        while place + HEADER <= len(block):
            _, length, kind = struct.unpack_from("<IHB", block, place)
            if kind == 0:  # the rest of a block that had no room for another piece
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
        if place < len(block) < BLOCK and len(block) - place < HEADER:  # the beginning of a piece, and no more
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
