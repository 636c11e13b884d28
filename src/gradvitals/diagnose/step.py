"""Step: everything a rule may look at when it judges one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.adam_memory import HUGE, forgotten_at
from gradvitals.diagnose.averages import Average, Averages
from gradvitals.diagnose.facts import Facts
from gradvitals.diagnose.history import History
from gradvitals.types import SOURCES, FloatArray, Layout, Reading, Source

Floats = NDArray[np.float64]

NEGLIGIBLE = 1e-6
"""A tensor's gradient under this share of the largest tensor's is rounding, not a gradient."""

NAMED = 50
"""Tensors a finding names at most."""


@dataclass
class Step:
    """One step's readings, beside the run they are part of."""

    readings: Sequence[Reading]
    """All of this step: the general one (no source) and one for each GSNR source that was read."""
    layout: Layout
    facts: Facts
    history: History
    """The past: this step is not in it yet."""
    frozen: Sequence[int] = ()
    """Tensors that are not to be trained, by their index."""
    general: Reading = field(init=False)
    """Loss, norms, weights and updates."""
    number: int = field(init=False)
    """The optimizer step, counted from 0."""
    losses: dict[float, Floats] = field(init=False, default_factory=dict)
    """What `losses_since` has found, by where it begins: several rules ask for the same."""

    def __post_init__(self) -> None:
        self._by_source = {reading.source: reading for reading in self.readings}
        first = self.readings[0]
        self.general = self._by_source.get(None) or Reading(step=first.step, time=first.time)
        self.number = self.general.step

    @property
    def was_made(self) -> bool:
        """Whether the optimizer made its step: neither a GradScaler nor a Guard left it out."""
        return self.value("step/skipped") != 1 and self.value("step/left_out") != 1

    @property
    def is_full(self) -> bool:
        """Whether more was read than what every step has."""
        return len(self.readings) > 1 or "weight/norm" in self.general.values

    @property
    def unread(self) -> int:
        """Steps just before this one that were passed over."""
        steps = self.history.numbers
        return max(self.number - steps[-1] - 1, 0) if steps else 0

    def ago(self, readings: int, every: int = 1) -> int:
        """The step of the reading so many before this one, of those whose step is a multiple of `every`.

        Beyond what is remembered, they are taken to have followed on each other without a gap.
        """
        steps = self.history.numbers
        steps = steps if every == 1 else [step for step in steps if step % every == 0]
        found = min(readings, len(steps))
        return (steps[-found] if found else self.number) - every * (readings - found)

    def value(self, metric: str) -> float:
        """A global value of this step; nan where it was not read."""
        return self.general.values.get(metric, math.nan)

    def tensors(self, metric: str) -> FloatArray | None:
        """One number a tensor, in the order of `layout.tensors`; None where it was not read at this step."""
        return self.general.tensors.get(metric)

    def reading(self, source: Source) -> Reading | None:
        """The reading of one GSNR source, where this step has one."""
        return self._by_source.get(source)

    @property
    def in_turn(self) -> bool:
        """Whether the model is one side of a game, whose loss need not fall."""
        return self.value("step/in_turn") == 1

    @cached_property
    def parts(self) -> Reading | None:
        """The reading of samples that were taken with the same weights, micro-batches or workers.

        None where there is none, or where they are not samples of one thing, so that it tells nothing: their gradients
        point against each other, or the model is one side of a game, whose passes are of real and of generated samples.
        """
        reading = self.reading("microbatch") or self.reading("ranks")
        if reading is None:
            return None
        parts = self.history.parts
        parts.see(reading, self.in_turn)
        if (parts.mixed or self.in_turn) and self.history.averages.at_one_point:
            self.history.averages = Averages()  # of the next best source
        return None if parts.mixed or parts.below > 1 or self.in_turn else reading

    @cached_property
    def gsnr(self) -> Reading | None:
        """The reading of the most trustworthy GSNR source of this step that has a global value."""
        for source in SOURCES:
            reading = self.parts if source in ("microbatch", "ranks") else self.reading(source)
            if reading is not None and math.isfinite(reading.values.get("gsnr", math.nan)):
                return reading
        return None

    @property
    def adam_true_from(self) -> int:
        """The first step at which no huge gradient is in Adam's averages. In the history as soon as it is asked for."""
        history = self.history
        if self.value("grad/spike_ratio") >= HUGE:
            forgotten = forgotten_at(self.number, self.general.values, self.facts.betas)
            history.adam_true_from = max(history.adam_true_from, forgotten)
        return history.adam_true_from

    @property
    def adam(self) -> Reading | None:
        """The reading of Adam's moments, where this step has one and no huge gradient is in them.

        That is so for what is of this step alone; its GSNR is of the readings before it, too: see `average`.
        """
        return self.reading("adam") if self.number >= self.adam_true_from else None

    @cached_property
    def average(self) -> Average | None:
        """The GSNR of the whole model, where this step has news of it. In the history as soon as it is asked for.

        That of Adam's moments is none as long as a huge gradient is in them.
        """
        true_from = self.adam_true_from
        if self.gsnr is None:
            return None
        return self.history.averages.take(self.gsnr, self.general, true_from if self.gsnr.source == "adam" else 0)

    @cached_property
    def norm_judged(self) -> tuple[float, float]:
        """The global norm against what is usual: ratio and z-score."""
        ratio, z = self.history.norm.judge([self.value("grad/norm")])
        return ratio[0], z[0]

    @cached_property
    def norms_judged(self) -> tuple[Floats, Floats] | None:
        """Every tensor's norm against what is usual for it."""
        norms = self.tensors("grad/norm")
        return None if norms is None else self.history.norms.judge(np.asarray(norms))

    @cached_property
    def negligible(self) -> NDArray[np.bool_]:
        """Tensors whose gradient is only what rounding leaves of a zero, as of a bias in front of a batch norm."""
        norms = self.tensors("grad/norm")
        if norms is None:
            return np.zeros(0, dtype=bool)
        known = np.where(np.isfinite(norms), norms, 0.0)
        return np.asarray((known > 0) & (known < NEGLIGIBLE * known.max(initial=0.0)))

    @cached_property
    def updates_judged(self) -> tuple[Floats, Floats] | None:
        """The change of the whole model, then of every tensor, against what is usual."""
        changes = self.changes
        return None if changes is None else self.history.updates.judge(changes)

    @cached_property
    def changes(self) -> Floats | None:
        """`update/rms` of every tensor, the whole model first; None where it was not read."""
        rms = self.tensors("update/rms")
        return None if rms is None else np.append(self.value("update/rms"), rms)

    def names(self, chosen: Sequence[int] | NDArray[np.intp]) -> tuple[str, ...]:
        """Names of tensors by their index."""
        return tuple(self.layout.tensors[int(index)].name for index in chosen)

    def remember(self) -> None:
        """Put this step into the history, once every rule has looked at it."""
        history, _ = self.history, self.average
        for reading in self.readings:
            prefix = "" if reading.source is None else f"{reading.source}:"
            history.push_values(reading.step, reading.values, prefix)
        history.norm.push([self.value("grad/norm")])
        norms = self.tensors("grad/norm")
        if norms is not None:
            history.norms.push(np.asarray(norms))
        if self.changes is not None:
            history.updates.push(self.changes)
        history.push_number(self.number)
