"""Which GSNR counts for acting: that of one source at one batch size, as averages over readings. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gradvitals.diagnose.history import Average, Averages
from gradvitals.errors import ConfigError
from gradvitals.types import Reading, Source

AT_ONE_POINT: tuple[Source, ...] = ("microbatch", "ranks")
"""Sources whose samples are all taken with the same weights: those that are acted on unless told otherwise."""

WITH_TOTAL: tuple[Source, ...] = (*AT_ONE_POINT, "adam")
"""Sources that have a number for the whole model."""


@dataclass
class CountedGSNR:
    """The averages that are acted on, and what else the run had to offer.

    Args:
        sources: Those that count, the best first. Values of two sources, or of two batch sizes, are never compared:
            where the better one appears or the size changes, averages begin anew.
        window: Readings that the monitor averages over.
    """

    sources: tuple[Source, ...] = AT_ONE_POINT
    window: int = 20
    averages: Averages = field(init=False)
    offered: set[str] = field(default_factory=set, init=False)
    """All sources that were seen to have a GSNR of the whole model."""

    def __post_init__(self) -> None:
        self.averages = Averages(window=self.window)

    def take(self, readings: Sequence[Reading]) -> Average | None:
        """What the readings of one step say; None where that is nothing new.

        An interval below zero is left out. No GSNR is negative: Adam's moments read so while gradients shrink.
        """
        by_source = {reading.source: reading for reading in readings}
        first = readings[0]
        general = by_source.get(None, Reading(step=first.step, time=first.time))
        known = [r for r in readings if r.source and math.isfinite(r.values.get("gsnr", math.nan))]
        self.offered.update(str(reading.source) for reading in known)
        best = next((r for source in self.sources for r in known if r.source == source), None)
        average = None if best is None else self.averages.take(best, general)
        if average is None or math.isnan(average.low) or not average.high >= 0:
            return None
        return average

    @property
    def source(self) -> str:
        """The source that is followed; empty before there is one."""
        return self.averages.source

    def missing(self) -> str:
        """Why there is nothing to act on."""
        needed = " or ".join(self.sources)
        have = f"the run has only {', '.join(sorted(self.offered))}" if self.offered else "the run has none so far"
        do = "accumulate gradients over two or more micro-batches a step"
        if "adam" in self.offered:
            do += ', or pass source="adam" and read what that source cannot tell'
        return f"no GSNR from {needed} to act on ({have}); {do}"

    def state_dict(self) -> dict[str, Any]:
        """All averages, as plain values."""
        return {"averages": asdict(self.averages), "offered": sorted(self.offered)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved averages."""
        self.averages = Averages(**{**state["averages"], "window": self.window})
        self.offered = set(state["offered"])


def accepted(source: Source | None) -> tuple[Source, ...]:
    """The sources that count, from what was asked for."""
    if source is None:
        return AT_ONE_POINT
    if source not in WITH_TOTAL:
        raise ConfigError(f"source is {source!r}; expected one of {', '.join(WITH_TOTAL)}, or None for the best")
    return (source,)
