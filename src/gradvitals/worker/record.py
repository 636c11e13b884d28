"""The record of a step that the training process sends to the worker, and its layout in the journal.

A step is a JSON object and sections: named vectors of numbers, each with the rows of the model its numbers belong to.
Plain steps, which most are, have a fixed layout. `Context` is what changes rarely: the parameters, and everything that
depends on them alone.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.errors import RunError
from gradvitals.types import Layout, Reading, Stage, TensorInfo

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

STEP, CONTEXT, SUMS, COMMAND, PLAIN = 1, 2, 3, 4, 5
"""Kinds of records in the journal."""

PLAIN_STEP = np.dtype(
    [
        ("step", "<i8"),
        ("time", "<f8"),
        ("wall_seconds", "<f8"),
        ("loss", "<f8"),
        ("lr", "<f8"),
        ("max_norm", "<f8"),
        ("batch_size", "<f8"),
        ("flags", "<u4"),
        ("passes", "<u4"),
    ]
)
"""A plain step in the journal. An unknown number is NaN."""

PACKED_STEP = struct.Struct("<q6dII")
"""The same for a single step: several times as fast as filling in a numpy record."""

HAS_NORMS, HAS_LOSS, CLIPPED, CARRIED, ALTERNATING = (1 << bit for bit in range(5))
"""Flags of a plain step."""

STAGES: tuple[Stage, ...] = ("raw", "unscaled", "clipped")


class Places:
    """The rows of the numbers in a section: nearly always the same from step to step."""

    def __init__(self, rows: NDArray[np.intp]) -> None:
        self.rows = rows
        self.are_distinct = len(np.unique(rows)) == len(rows)
        self._present: Flags = np.zeros(0, dtype=bool)

    def present(self, num_rows: int) -> Flags:
        """Returns which rows are among them. Read only."""
        if len(self._present) != num_rows:
            self._present = np.zeros(num_rows, dtype=bool)
            self._present[self.rows] = True
            self._present.setflags(write=False)
        return self._present


class Section:
    """The numbers of one name, each with its row."""

    def __init__(self, values: Floats, places: Places) -> None:
        self.values = values
        self.places = places

    @property
    def rows(self) -> NDArray[np.intp]:
        """The row of each number."""
        return self.places.rows

    def present(self, num_rows: int) -> Flags:
        """Returns which rows have a number. Read only."""
        return self.places.present(num_rows)

    def sums(self, num_rows: int) -> Floats:
        """Returns one number per row, 0 if there is none. Parts of one row are added up."""
        sums = np.zeros(num_rows)
        if self.places.are_distinct:
            sums[self.rows] = self.values
        else:
            np.add.at(sums, self.rows, self.values)
        return sums

    def by_row(self, num_rows: int) -> Floats:
        """Returns one number per row, NaN if there is none."""
        return np.where(self.present(num_rows), self.sums(num_rows), np.nan)


@dataclass(slots=True)
class OptimizerStep:
    """One optimizer's part of a step."""

    stage: Stage = "raw"
    scaled: bool = False
    """Whether gradients were read while multiplied by the loss scale in the section ``scale{index}``."""
    ignore_scale: bool = False
    """Whether the loss scale turned out to belong to another model."""
    clipped: bool = False
    """Whether the loop clipped gradients after they were read, so that the optimizer received clipped ones."""
    micro_batches: int = 0
    """Number of micro-batches; 0 if they were not counted."""
    divided: float = 1.0
    """The number that a pipeline divided the sum of the micro-batches by."""


@dataclass(slots=True)
class StepFacts:
    """Facts about a step besides its sums."""

    step: int
    time: float = 0.0
    wall_seconds: float = 0.0
    """From the end of the previous step to the end of this one."""
    full: bool = False
    detail: bool = False
    audit: bool = False
    lr: float | None = None
    max_norm: float | None = None
    batch_size: float | None = None
    skipped: bool = False
    carried: bool = False
    """Whether gradients were added to those of the previous step."""
    alternating: bool = False
    """Whether the model alternates with another one, as in a GAN."""
    given_up: int = 0
    """Batches whose gradients the loop discarded before this step."""


FACTS = tuple(each.name for each in fields(StepFacts))


@dataclass(slots=True)
class StepRecord(StepFacts):
    """One step, as the training process recorded it."""

    optimizers: list[OptimizerStep] = field(default_factory=list)
    losses: list[tuple[float | None, float | None]] = field(default_factory=list)
    """Loss and samples of each `observe`. The loss is None if it was on a device; section ``loss{index}`` has it."""
    passes: int = 0
    """Backward passes of the step."""
    lost: float | None = None
    """The loss of the last discarded batch, if observed; section ``lost`` has one that was on a device."""
    lost_norm: float | None = None
    """The norm of its gradient, if read."""
    windows: dict[int, int | None] = field(default_factory=dict)
    """Rows that went into a sliding window, each with the steps per block if the window is complete."""
    sections: dict[str, Section] = field(default_factory=dict)


@dataclass
class Context:
    """The parameters that the numbers of the following steps belong to, until the next Context."""

    layout: Layout = field(default_factory=Layout)
    slots: list[tuple[int, int]] = field(default_factory=list)
    """Row and head that each number of a head view belongs to."""
    optimizer_rows: list[list[int]] = field(default_factory=list)
    """The rows that each optimizer steps."""
    betas: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Adam's betas of each row whose moments are read."""
    shares: dict[str, dict[int, float]] = field(default_factory=dict)
    """For each sum that is read from a sample: the share of each row that it covers."""
    weights: list[float] | None = None
    """The weight of each row in a sum over ranks; None for a single process."""
    autocast: str | None = None
    """The dtype that the forward pass computes in, if lower."""

    def to_bytes(self) -> bytes:
        """Returns it as JSON."""
        layout = self.layout
        return json.dumps(
            {
                "tensors": [info.to_json() for info in layout.tensors],
                "layers": layout.layers,
                "heads": layout.heads,
                "slots": self.slots,
                "optimizer_rows": self.optimizer_rows,
                "betas": list(self.betas.items()),
                "shares": {name: list(shares.items()) for name, shares in self.shares.items()},
                "weights": self.weights,
                "autocast": self.autocast,
            }
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Context:
        """The inverse of `to_bytes`."""
        given = json.loads(data)
        layout = Layout(
            tensors=tuple(TensorInfo.from_json(info) for info in given["tensors"]),
            layers=tuple(given["layers"]),
            heads=tuple(given["heads"]),
        )
        return cls(
            layout=layout,
            slots=[(row, head) for row, head in given["slots"]],
            optimizer_rows=given["optimizer_rows"],
            betas={row: (first, second) for row, (first, second) in given["betas"]},
            shares={name: dict(shares) for name, shares in given["shares"].items()},
            weights=given["weights"],
            autocast=given["autocast"],
        )


Part = tuple[str, Sequence[int] | NDArray[np.int32], NDArray[Any]]
"""A name, rows and numbers (float32 or float64)."""


class Encoder:
    """Turns steps into bytes. Remembers row sets, which are the same lists from step to step."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Any, bytes]] = {}

    def encode(self, record: StepRecord, parts: Iterable[Part]) -> bytes:
        """Returns the bytes of a step and its numbers."""
        row_sets: dict[bytes, int] = {}
        sections: list[tuple[str, int, bool, int]] = []
        numbers: list[bytes] = []
        for name, rows, values in parts:
            place = row_sets.setdefault(self._packed(rows), len(row_sets))
            sections.append((name, place, values.dtype.itemsize == 8, values.size))
            numbers.append(values.tobytes())
        fields = dict(zip(_FIELDS, _fields_of(record), strict=True))
        fields["optimizers"] = list(map(_optimizer_fields_of, record.optimizers))
        fields["windows"] = list(record.windows.items())
        return _frame([fields, list(map(len, row_sets)), sections], (*row_sets, *numbers))

    def _packed(self, rows: Any) -> bytes:
        known = self._rows.get(id(rows))
        if known is not None and known[0] is rows:
            return known[1]
        packed = pack_rows(rows)
        if not isinstance(rows, range):  # a range is made anew for every reading
            if len(self._rows) >= 256:
                self._rows.clear()
            self._rows[id(rows)] = (rows, packed)
        return packed


_FIELDS = tuple(each.name for each in fields(StepRecord) if each.name != "sections")
_fields_of = attrgetter(*_FIELDS)
_optimizer_fields_of = attrgetter(*(each.name for each in fields(OptimizerStep)))  # `astuple` copies deeply


class Decoder:
    """Turns bytes into steps."""

    def __init__(self) -> None:
        self._places: dict[bytes, Places] = {}

    def decode(self, data: bytes) -> StepRecord:
        """Returns the step that `Encoder.encode` was given.

        Raises:
            RunError: If lengths do not fit.
        """
        try:
            return self._decode(data)
        except (struct.error, ValueError, KeyError, TypeError, IndexError) as error:
            raise RunError(f"a step in the journal is damaged ({error})") from error

    def _decode(self, data: bytes) -> StepRecord:
        (fields, lengths, sections), at = _unframe(data)
        row_sets = []
        for length in lengths:
            row_sets.append(data[at : at + length])
            at += length
        parts: dict[str, list[tuple[bytes, NDArray[Any]]]] = {}
        for name, place, is_wide, count in sections:
            values = np.frombuffer(data, "<f8" if is_wide else "<f4", count, at)
            at += values.nbytes
            parts.setdefault(name, []).append((row_sets[place], values))
        fields["optimizers"] = [OptimizerStep(*one) for one in fields["optimizers"]]
        fields["windows"] = dict(fields["windows"])
        return StepRecord(**fields, sections={name: self._section(found) for name, found in parts.items()})

    def _section(self, parts: list[tuple[bytes, NDArray[Any]]]) -> Section:
        rows = parts[0][0] if len(parts) == 1 else b"".join(some for some, _ in parts)
        places = self._places.get(rows)
        if places is None:
            if len(self._places) >= 1024:
                self._places.clear()
            places = self._places[rows] = Places(np.frombuffer(rows, "<i4").astype(np.intp))
        if len(parts) == 1:
            values = parts[0][1].astype(np.float64)
        else:
            values = np.concatenate([numbers for _, numbers in parts], dtype=np.float64)
        if len(values) != len(places.rows):
            raise ValueError("numbers and rows are not as many")
        return Section(values, places)


# -- plain steps --------------------------------------------------------------------------------------------------


@dataclass
class PlainSteps:
    """Consecutive plain steps with the same rows."""

    places: Places
    steps: NDArray[np.void]
    """An array of `PLAIN_STEP`."""
    norms: NDArray[np.float32]
    """One per step and row; meaningless for a step without `HAS_NORMS`."""


def pack_rows(rows: Sequence[int]) -> bytes:
    """Returns rows as `encode_plain` takes them."""
    return np.asarray(rows, dtype="<i4").tobytes()


def encode_plain(rows: bytes, steps: NDArray[np.void], norms: NDArray[np.float32]) -> bytes:
    """Returns the bytes of some plain steps: packed rows, steps, and one norm per step and row, or no norms at all."""
    return b"".join((plain_head(rows, len(steps), norms.size), steps.tobytes(), norms.tobytes()))


def plain_head(rows: bytes, steps: int, norms: int) -> bytes:
    """Returns the head of the bytes of plain steps: their number, the packed rows, and the number of norms."""
    return _PLAIN.pack(steps, len(rows), 4 * norms) + rows


_PLAIN = struct.Struct("<III")  # steps; bytes of rows, of norms


def decode_plain(data: bytes, known: dict[bytes, Places]) -> PlainSteps:
    """The inverse of `encode_plain`.

    Args:
        data: The bytes.
        known: Rows that were decoded before; new ones are added.

    Raises:
        RunError: If lengths do not fit.
    """
    try:
        count, row_bytes, norm_bytes = _PLAIN.unpack_from(data)
        at = _PLAIN.size
        packed, at = data[at : at + row_bytes], at + row_bytes
        steps = np.frombuffer(data, PLAIN_STEP, count, at)
        norms = np.frombuffer(data, "<f4", norm_bytes // 4, at + steps.nbytes)
        places = known.get(packed)
        if places is None:
            places = known[packed] = Places(np.frombuffer(packed, "<i4").astype(np.intp))
        width = len(places.rows)
        norms = norms.reshape(count, width) if norm_bytes else np.full((count, width), np.nan, dtype="<f4")
    except (struct.error, ValueError) as error:
        raise RunError(f"plain steps in the journal are damaged ({error})") from error
    return PlainSteps(places, steps, norms)


def join_plain(parts: Sequence[PlainSteps]) -> PlainSteps:
    """Returns plain steps of the same rows as one."""
    if len(parts) == 1:
        return parts[0]
    steps = np.frombuffer(b"".join([part.steps.tobytes() for part in parts]), PLAIN_STEP)
    return PlainSteps(parts[0].places, steps, np.concatenate([part.norms for part in parts]))


# -- anything else that crosses -----------------------------------------------------------------------------------


def _frame(meta: Any, chunks: Iterable[bytes]) -> bytes:
    """Returns JSON, then the chunks. NaN and Inf are written as Python writes them."""
    head = json.dumps(meta, default=float).encode()
    return b"".join((_LENGTH.pack(len(head)), head, *chunks))


def _unframe(data: bytes) -> tuple[Any, int]:
    """Returns the JSON, and the offset of the first chunk."""
    (length,) = _LENGTH.unpack_from(data)
    at = _LENGTH.size + length
    return json.loads(data[_LENGTH.size : at]), at


_LENGTH = struct.Struct("<I")


def pack(meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Returns JSON and float64 arrays in one piece."""
    sizes = {name: numbers.size for name, numbers in arrays.items()}
    return _frame([meta, sizes], (np.asarray(numbers, dtype="<f8").tobytes() for numbers in arrays.values()))


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, Floats]]:
    """The inverse of `pack`.

    Raises:
        RunError: If lengths do not fit.
    """
    try:
        (meta, sizes), at = _unframe(data)
        arrays = {}
        for name, size in sizes.items():
            arrays[name] = np.frombuffer(data, "<f8", size, at).copy()
            at += 8 * size
    except (struct.error, ValueError, TypeError) as error:
        raise RunError(f"a message in the journal is damaged ({error})") from error
    return meta, arrays


def readings_to_bytes(readings: Sequence[Reading], *, plain: bool) -> bytes:
    """Returns the bytes of the readings of one step; `plain` if single tensors are neither stored nor published."""
    kinds = ("tensors", "layers", "heads", "ranks")
    fields = ("step", "time", "stage", "source", "batch_size", "values")
    arrays = {
        f"{place}|{kind}|{name}": numbers
        for place, reading in enumerate(readings)
        for kind in kinds
        for name, numbers in getattr(reading, kind).items()
    }
    given = [{name: getattr(reading, name) for name in fields} for reading in readings]
    return pack({"readings": given, "plain": plain}, arrays)


def readings_from_bytes(data: bytes) -> tuple[list[Reading], bool]:
    """The inverse of `readings_to_bytes`."""
    meta, arrays = unpack(data)
    given: list[dict[str, Any]] = [
        {**fields, "tensors": {}, "layers": {}, "heads": {}, "ranks": {}} for fields in meta["readings"]
    ]
    for key, numbers in arrays.items():
        place, kind, name = key.split("|", 2)
        given[int(place)][kind][name] = numbers
    return [Reading(**fields) for fields in given], meta["plain"]
