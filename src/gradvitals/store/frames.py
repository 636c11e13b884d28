"""Frames: how one Reading is laid out as bytes, and how many frames share a block."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradvitals.store.schema import MAX_BLOB_BYTES, MAX_ROWS
from gradvitals.types import Finding, Layout, Reading, TensorInfo, json_ready

Kind = Literal["values", "tensors", "layers", "heads", "ranks"]
KINDS: tuple[Kind, ...] = ("values", "tensors", "layers", "heads", "ranks")

FLOAT = np.dtype("<f4")
PAGE_SIZE = 4096
MAX_CHUNK_BYTES = 32 << 20


class GroupKey(NamedTuple):
    """What frames must share to stand in the same blocks."""

    kind: Kind
    source: str | None
    stage: str
    columns: tuple[str, ...]
    num_rows: int


class Frame(NamedTuple):
    """The numbers of one kind from one Reading: float32, column after column."""

    key: GroupKey
    data: bytes


def frames_of(reading: Reading) -> list[Frame]:
    """Lay out a reading; arrays of unequal length go to frames of their own.

    Raises:
        ValueError: If it cannot be stored: not numbers, a step beyond 64 bits, or far too many rows.
    """
    if not -(1 << 62) < int(reading.step) < 1 << 62:
        raise ValueError(f"step is {reading.step}; expected less than 2**62")
    source = None if reading.source is None else str(reading.source)
    stage = str(reading.stage)
    frames: list[Frame] = []
    if reading.values:
        metrics = tuple(sorted(reading.values))
        numbers = [reading.values[metric] for metric in metrics]
        with np.errstate(over="ignore"):  # beyond float32 is infinite, which is what it means
            row = np.array(numbers, dtype=FLOAT)
        if row.ndim != 1:
            raise ValueError(f"values are {numbers!r}; expected one number for each metric")
        frames.append(Frame(GroupKey("values", source, stage, metrics, 1), row.tobytes()))
    for kind in KINDS[1:]:
        by_length: dict[int, dict[str, NDArray[np.float32]]] = {}
        content: Mapping[str, Any] = getattr(reading, kind)
        for metric in sorted(content):
            with np.errstate(over="ignore"):  # beyond float32 is infinite, which is what it means
                column = np.asarray(content[metric], dtype=FLOAT).reshape(-1)
            by_length.setdefault(column.size, {})[metric] = column
        for num_rows, columns in by_length.items():
            if num_rows > MAX_ROWS or num_rows * len(columns) * FLOAT.itemsize > MAX_BLOB_BYTES:
                raise ValueError(f"{kind} has {num_rows} rows and {len(columns)} metrics, more than a run can hold")
            key = GroupKey(kind, source, stage, tuple(columns), num_rows)
            frames.append(Frame(key, np.concatenate(list(columns.values())).tobytes()))
    return frames or [Frame(GroupKey("values", source, stage, (), 1), b"")]


def transposed(blobs: list[bytes], key: GroupKey) -> list[bytes]:
    """Turn frames of one group into one block for each row, ``float32 [columns, frames]``."""
    shape = (len(blobs), len(key.columns), key.num_rows)
    stacked = np.frombuffer(b"".join(blobs), dtype=FLOAT).reshape(shape)
    return [row.tobytes() for row in np.ascontiguousarray(stacked.transpose(2, 1, 0))]


@lru_cache(maxsize=256)
def block_frames(num_columns: int, num_rows: int) -> int:
    """How many frames to gather into blocks: about 256, chosen so that blocks fill SQLite's pages.

    A cell that is a little over half a page leaves the other half empty: 256 frames of 2 columns would take
    8 bytes a value. The sizes follow "B-tree Pages" and "Overflow" in SQLite's file format document.
    """
    most = MAX_CHUNK_BYTES // max(1, num_columns * num_rows * FLOAT.itemsize)
    if most < 192:
        return max(16, most)

    def bytes_per_frame(frames: int) -> float:
        payload = num_columns * frames * FLOAT.itemsize + 5
        local, overflow_pages = payload, 0
        if payload > PAGE_SIZE - 35:
            least = (PAGE_SIZE - 12) * 32 // 255 - 23
            local = least + (payload - least) % (PAGE_SIZE - 4)
            local = local if local <= PAGE_SIZE - 35 else least
            overflow_pages = -(-(payload - local) // (PAGE_SIZE - 4))
        cells_per_page = (PAGE_SIZE - 8) // (local + 16)
        return PAGE_SIZE * (overflow_pages + 1 / max(1, cells_per_page)) / frames

    return min(range(192, min(most, 320) + 1), key=bytes_per_frame)


def dump_json(value: Any) -> str:
    """Strict JSON; whatever it has no word for is kept as its text."""
    return json.dumps(json_ready(value), allow_nan=False, ensure_ascii=True, default=str)


def dump_layout(layout: Layout) -> tuple[str, str, str, str]:
    """A layout as JSON: the names of tensors, layers and heads, and what else is known of each tensor."""
    names = [layout.names(kind) for kind in ("tensors", "layers", "heads")]
    details = [info.to_json() for info in layout.tensors]
    tensors, layers, heads = map(dump_json, names)
    return tensors, layers, heads, dump_json(details)


def load_layout(layers: str, heads: str, details: str) -> Layout:
    """The inverse of `dump_layout`."""
    tensors = tuple(TensorInfo.from_json(item) for item in json.loads(details))
    return Layout(tensors=tensors, layers=tuple(map(str, json.loads(layers))), heads=tuple(map(str, json.loads(heads))))


def finding_key(finding: Finding) -> str:
    """What makes two findings the same one, at different times: id, rank, first step, and what it is about."""
    identity = dump_json([finding.id, finding.rank, finding.first_step, finding.evidence.get("about")])
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
