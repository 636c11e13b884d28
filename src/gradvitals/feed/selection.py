"""Selection: which numbers of a reading a sink is shown, and under which keys. Tens of them, never thousands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from zlib import crc32

import numpy as np

from gradvitals.types import SOURCES, Layout, Reading

WORST_TENSORS: Mapping[str, bool] = {"grad/norm": True, "grad/spike_ratio": True, "update/ratio": True, "gsnr": False}
"""The metrics that single tensors are shown of, and whether the largest are the worst."""

WORST = 3
"""Tensors of each of these metrics that a reading can bring to a sink."""

MOST_TENSORS = 20
"""Tensors that a run can bring to a sink for each of these metrics. One that was among the worst stays."""

MAY_BREAK = frozenset({"loss", "grad/norm", "grad/max", "weight/norm", "update/norm"})
"""Metrics that are shown even where they are not finite: that they broke is the news."""

LONGEST_NAME = 120
"""Characters of a tensor's name in a key."""


class Selection:
    """Chooses and names the numbers of one run.

    A metric that has several sources keeps its id for the best of those it had when first read, for the whole run;
    other sources go before it in the key, ``adam/gsnr``. So no key ever holds values of two sources. And no key is the
    start of another one, which some destinations would take for a folder.

    Args:
        tensors: Whether single tensors are shown.
        gauges: Whether what is not finite is shown too: a gauge that is not set goes on showing its old value.
    """

    def __init__(self, *, tensors: bool = True, gauges: bool = False) -> None:
        self._wants_tensors = tensors
        self._wants_all = gauges
        self._names: tuple[str, ...] = ()
        self._bearer: dict[str, str | None] = {}
        self._shown: dict[str, dict[int, None]] = {metric: {} for metric in WORST_TENSORS}

    def describe(self, layout: Layout) -> None:
        """What the rows of per-tensor arrays stand for, from here on. Rows are only ever added."""
        self._names = layout.names("tensors")

    def steps(self, readings: Sequence[Reading]) -> Iterator[tuple[int, dict[str, float]]]:
        """What is shown of each step, in the order they came."""
        for step, of_step in groupby(readings, key=lambda reading: reading.step):
            metrics = self._of_step(sorted(of_step, key=_trust))
            if metrics:
                yield step, metrics

    def _of_step(self, readings: Sequence[Reading]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for reading in readings:
            for metric, value in reading.values.items():
                key = self._key(metric, reading.source)
                may_break = self._wants_all or (reading.source is None and metric in MAY_BREAK)
                if math.isfinite(value) or may_break:
                    metrics[key] = float(value)
            for metric in WORST_TENSORS if self._wants_tensors else ():
                if metric in reading.tensors and self._key(metric, reading.source) == metric:
                    metrics |= self._tensors(metric, np.asarray(reading.tensors[metric], dtype=np.float64))
        return metrics

    def _key(self, metric: str, source: str | None) -> str:
        return metric if self._bearer.setdefault(metric, source) == source else f"{source}/{metric}"

    def _tensors(self, metric: str, values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> dict[str, float]:
        shown = self._shown[metric]
        known = np.flatnonzero(~np.isnan(values))
        worst = known[np.argsort(-values[known] if WORST_TENSORS[metric] else values[known], kind="stable")][:WORST]
        for index in worst.tolist():
            if len(shown) < MOST_TENSORS and index < len(self._names):
                shown.setdefault(index)
        return {
            f"tensors/{metric}/{_short(self._names[index])}": float(values[index])
            for index in shown
            if index < len(values) and math.isfinite(values[index])
        }


def _trust(reading: Reading) -> int:
    """The reading without a source first, then the most trustworthy source."""
    return -1 if reading.source is None else SOURCES.index(reading.source)


def _short(name: str) -> str:
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}~{crc32(name.encode('utf-8', 'backslashreplace')):08x}"
