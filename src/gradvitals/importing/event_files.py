"""Rows of TensorBoard event files: one for each scalar. The frames are read here, their content by tensorboard."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from gradvitals.importing.source import ImportSourceError, Notes, Row, Source, decoded

MAX_EVENT = 16 << 20
"""Bytes of one event; images and graphs may be larger, and are passed over."""
FLOAT, DOUBLE = 1, 2
"""TensorFlow's numbers for its types."""


def event_source(path: Path, files: list[Path]) -> Source:
    """The event files of one run, in the order of their names, which begin with the time they were begun at."""
    _event_class()
    return Source("tensorboard", path, partial(_rows, sorted(files)))


def _rows(files: list[Path], notes: Notes) -> Iterator[Row]:
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
    """The events as bytes: each has its length and a checksum of it before, a checksum of itself after it."""
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
