"""Putting frames back together into the readings they came from, in step order."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, cast

from gradvitals.store.frames import KINDS
from gradvitals.store.groups import Array, Group, Place, Span, read_chunk, read_places
from gradvitals.types import Reading, Source, Stage


def replay(
    db: sqlite3.Connection,
    transaction: Callable[[], AbstractContextManager[None]],
    spans: Iterable[tuple[Group, Span]],
) -> Iterator[Reading]:
    """Yield the readings whose frames lie in the given span of each group.

    Chunks never change, so they are read when they are due, and one of each group is held at a time.
    """
    with transaction():
        places = [place for group, span in spans for place in read_places(db, group, span)]
    places.sort(key=_order)
    held: dict[int, tuple[int, Array]] = {}

    def numbers(place: Place) -> Array:
        if not isinstance(place.numbers, tuple):
            return place.numbers
        chunk, num_frames, position = place.numbers
        if place.group.id not in held or held[place.group.id][0] != chunk:
            with transaction():
                held[place.group.id] = chunk, read_chunk(db, place.group, chunk, num_frames)
        return cast(Array, held[place.group.id][1][position])

    for _, together in groupby(places, key=_order):
        yield _reading([(place, numbers(place)) for place in together])


def _order(place: Place) -> tuple[int, int]:
    return place.step, place.reading


def _reading(parts: list[tuple[Place, Array]]) -> Reading:
    first = parts[0][0]
    content: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for place, frame in parts:
        for metric, row in zip(place.group.columns, frame, strict=True):
            content[place.group.kind][metric] = float(row[0]) if place.group.kind == "values" else row.copy()
    return Reading(
        step=first.step,
        time=first.time,
        stage=cast(Stage, first.group.stage),
        source=cast(Source | None, first.group.source),
        batch_size=None if math.isnan(first.batch_size) else first.batch_size,
        **content,
    )
