"""Live GSNRs as what they are: averages over readings, which tell something new only where they share none."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from gradvitals.types import SOURCES, Reading, Source

KEPT = 100
"""Averages that are remembered."""

OUTLIER_RATIO = 5.0
"""A step whose norm is this far over its moving average is left out of the averages by the monitor."""

SAME_SIZE = 1.25
"""Batches whose sizes differ by less than this factor count as of one size."""

ODD_SIZES = 3
"""Readings in a row at another batch size after which it is the new one. The last batch of an epoch is a single one."""

SURE = 25
"""Readings in a row below 0 that are no chance: the last average shares none with the first."""

SURE_IN_TURN = 4
"""The same where the model is known to be one side of a game."""


@dataclass(frozen=True)
class Average:
    """The GSNR of the whole model at one step, over the last readings of one source."""

    step: int
    begins: int
    """Step of the oldest reading in it."""
    count: int
    """Readings in it."""
    value: float
    low: float
    high: float
    batch_size: float
    """Samples that it stands for; nan where not told."""
    step_size: float
    """Samples of one optimizer step; nan where not told."""

    @property
    def middle(self) -> float:
        """Where in the run it stands."""
        return (self.begins + self.step) / 2

    @property
    def established(self) -> bool:
        """Whether the signal is beyond doubt: four standard errors, as many averages are looked at in a run."""
        return 2 * self.low > self.value > 0

    @property
    def most(self) -> float:
        """The upper end, with a value below 0 read as 0: what brought it there, the interval knows nothing of."""
        return self.high - min(self.value, 0.0)

    @property
    def per_step(self) -> float:
        """What a GSNR has to be multiplied by to stand for the batch of one optimizer step; 1 where not known."""
        return self.step_size / self.batch_size if self.step_size > self.batch_size else 1.0


@dataclass
class Parts:
    """Whether the passes that a step is made of are samples of one thing.

    A debiased GSNR of such samples is below 0 by chance alone. Where it stays there, their gradients point against
    each other, as those of real and generated samples in a GAN do, and it says nothing about signal and noise.
    """

    below: int = 0
    """Readings in a row whose interval was below 0."""
    since: int = -1
    """Step of the first of them, or of those that decided."""
    mixed: bool = False
    """Whether they are not samples of one thing, beyond doubt, and nothing has spoken for it since."""

    def see(self, reading: Reading, in_turn: bool) -> None:
        """Take in the next reading; a run that is one side of a game needs fewer of them to be sure."""
        low, high = (reading.values.get(name, math.nan) for name in ("gsnr_low", "gsnr_high"))
        if low > 0:
            self.mixed = False
        self.below = self.below + 1 if high < 0 else 0
        if self.below == 1 and not self.mixed:
            self.since = reading.step
        self.mixed |= self.below >= (SURE_IN_TURN if in_turn else SURE)


@dataclass
class Averages:
    """The averages of one source at one batch size.

    Values of another source or batch size are other quantities: those of a better source, or of a batch size that
    stays, begin anew.
    """

    window: int = 20
    """Readings in an average at most, as the monitor takes them."""
    source: Source | Literal[""] = ""
    steps: list[int] = field(default_factory=list)
    kept: list[list[float]] = field(default_factory=list)
    """The numbers of each `Average` so far."""
    sizes: list[float] = field(default_factory=list)
    """Samples of a reading and of a step, as they are now."""
    odd: list[int] = field(default_factory=list)
    """Steps of the last readings that were of another size."""
    begins: int = 0
    """Step of the first reading at this size, or that counts again."""

    @property
    def at_one_point(self) -> bool:
        """Whether the samples of a reading were all taken with the same weights."""
        return self.source in ("microbatch", "ranks")

    def take(self, reading: Reading, general: Reading, true_from: int = 0) -> Average | None:
        """Remember what the best source of a step says. None where it is not of the source or size that is followed.

        Args:
            reading: The reading of the source.
            general: The reading of the same step that has no source.
            true_from: Step before which readings of this source are false.
        """
        if reading.source not in ("microbatch", "ranks", "adam"):  # a window does not stand for the whole model
            return None
        if self.source and SOURCES.index(reading.source) > SOURCES.index(self.source):
            return None
        if reading.source != self.source:
            self.source, self.steps, self.kept, self.sizes, self.odd = reading.source, [], [], [], []
            self.begins = reading.step
        self.begins = max(self.begins, true_from)
        value, low, high = (reading.values.get(name, math.nan) for name in ("gsnr", "gsnr_low", "gsnr_high"))
        size, whole = (math.nan if found is None else found for found in (reading.batch_size, general.batch_size))
        if not OUTLIER_RATIO <= general.values.get("grad/spike_ratio", math.nan) < math.inf:
            self.steps.append(reading.step)
            del self.steps[:-KEPT]
        if self.sizes and not all(map(alike, self.sizes, (size, whole))):
            self.odd.append(reading.step)
            if len(self.odd) < ODD_SIZES:
                return None
            # Until they have left the average, readings at the old size are still in it.
            self.kept, self.begins = [], max(self.odd[0], true_from)
        self.sizes, self.odd = [size, whole], []
        recent = [number for number in self.steps[-self.window :] if number >= reading.step / 2]
        if not recent or recent[0] < self.begins:
            return None
        numbers = (reading.step, recent[0], len(recent), value, low, high, size, whole)
        self.kept.append(list(numbers))
        del self.kept[:-KEPT]
        return Average(*numbers)

    def before(self, step: float) -> Average | None:
        """The newest average of readings that are all from before a step."""
        found = next((kept for kept in reversed(self.kept) if kept[0] < step), None)
        return None if found is None else Average(*found)  # type: ignore[arg-type]

    def below_since(self, level: float) -> int:
        """Step of the first of the newest averages whose intervals are all below a level."""
        below = takewhile(lambda kept: kept[5] < level, reversed(self.kept))
        return int(min((kept[0] for kept in below), default=self.steps[-1]))


@dataclass
class Streak:
    """Readings in a row at which something was so."""

    count: int = 0
    since: int = -1
    """Step of the first of them; -1 where there is none."""

    def see(self, is_so: bool, step: int, begins: int) -> None:
        """Take in the next reading; none goes on from what was so before averages began anew."""
        if not is_so or self.since < begins:
            self.count, self.since = 0, -1
        if is_so:
            self.count, self.since = self.count + 1, self.since if self.count else step


def alike(a: float, b: float) -> bool:
    """Whether two batch sizes are the same but for a remainder, or neither is known."""
    return (math.isnan(a) and math.isnan(b)) or max(a, b) < SAME_SIZE * min(a, b)
