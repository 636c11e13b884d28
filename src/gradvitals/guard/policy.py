"""What a Guard may do and when: its settings, and what it learns of a run to tell trouble from a hard batch.

Everything here is plain arithmetic on numbers that earlier steps produced: no tensors, no clock, no files.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from gradvitals.errors import ConfigError

Mode = Literal["on", "off", "dry_run"]
MODES: tuple[str, ...] = get_args(Mode)
LARGEST_NORM = float(np.finfo(np.float32).max)  # a norm above this is not finite
LEVEL_STEPS = 8  # steps whose median is the level of the loss
LEVEL_HISTORY = 50  # steps whose levels a new one is compared with


# -- settings ----------------------------------------------------------------------------------------------------

Method = Literal["quantile", "zscore", "tensor"]
CHOICES: dict[str, tuple[str, ...]] = {"mode": MODES, "method": get_args(Method)}
LEAST = {
    "window": 20, "first_steps": 2, "max_streak": 1, "max_recent": 1, "give_up": 1,
    "every": 1, "keep": 1, "settle": 0, "budget": 0,
}  # fmt: skip
"""The least of each setting that is a whole number."""
ABOVE = {"quantile": 0, "z_threshold": 0, "tensor_ratio": 0, "ratio": 1, "lr_jump": 1, "moved": 1, "grown": 1}
"""What each other number must be above."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """Settings that every response has. A response is on, off, or a dry run, which only records what it would do."""

    mode: Mode | None = None
    """None: follow the Guard's own mode."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if name in CHOICES:
                fine = value in CHOICES[name] or (name == "mode" and value is None)
                expected = "one of " + ", ".join(map(repr, CHOICES[name]))
            elif name in LEAST:
                fine = is_number and isinstance(value, int) and value >= LEAST[name]
                expected = f"a whole number, {LEAST[name]} or more"
            else:
                below = 1.0 if name == "quantile" else math.inf
                fine = is_number and ABOVE[name] < value < below
                expected = f"a number above {ABOVE[name]}" + (" and below 1" if name == "quantile" else "")
            if not fine:
                raise ConfigError(f"{name} of {type(self).__name__} is {value!r}; expected {expected}")


@dataclass(frozen=True, kw_only=True)
class Clip(Response):
    """Clip gradients by the run's own recent norms. Off unless asked for: it changes ordinary steps too."""

    method: Method = "quantile"
    """How to set the limit. ``quantile``: a quantile of recent norms. ``zscore``: as in ZClip. ``tensor``: each tensor
    by its own recent norms, as in AdaGC."""
    quantile: float = 0.95
    """quantile: share of the last `window` norms that stay untouched."""
    window: int = 200
    """quantile and zscore: number of norms to keep."""
    z_threshold: float = 2.5
    """zscore: standard deviations above the mean norm."""
    tensor_ratio: float = 1.05
    """tensor: limit as a multiple of the moving average of the tensor's norm."""
    first_steps: int = 25
    """Steps before it clips anything."""


@dataclass(frozen=True, kw_only=True)
class Skip(Response):
    """Skip a step that is not finite, always, or one far beyond everything the run has shown."""

    ratio: float = 20.0
    """A spike is this many times the largest recent gradient norm, or the largest recent change of a buffer."""
    first_steps: int = 50
    """Steps before it skips anything but NaN and Inf."""
    max_streak: int = 3
    """Spikes to skip in a row. If the next one is a spike as well, the batch is not the cause."""
    max_recent: int = 5
    """Spikes to skip within 200 steps. What comes more often is part of the data, and is learned as normal."""
    give_up: int = 20
    """Steps in a row that are not finite before a rollback; after as many again the Guard stops."""


@dataclass(frozen=True, kw_only=True)
class RollBack(Response):
    """Restore the last healthy snapshot if the model has become worse, and continue with the next data."""

    every: int = 100
    """Steps between snapshots; fewer at the start of a run."""
    settle: int = 50
    """Steps without trouble after which a snapshot counts as healthy."""
    keep: int = 2
    """Healthy snapshots to keep."""
    budget: int = 3
    """Rollbacks within 1,000 steps."""
    lr_jump: float = 3.0
    """A learning rate over this many times the largest so far counts as a possible cause of damage."""
    moved: float = 4.0
    """So do parameters that move this many times as far as usual, at the same learning rate."""
    grown: float = 1000.0
    """A tensor whose norm grows by this factor within 10 steps is damaged for certain."""


RESPONSES: dict[str, type[Response]] = {"clip": Clip, "skip": Skip, "rollback": RollBack}
"""By the name of the Guard's argument."""


def response_from(name: str, given: Any, mode: Mode) -> Response:
    """The response that an argument of the Guard means: its settings, its mode alone, or None for the default."""
    kind = RESPONSES[name]
    if given is None:
        return kind(mode="off" if kind is Clip else mode)
    if isinstance(given, str):
        return kind(mode=given)  # type: ignore[arg-type]
    if isinstance(given, kind):
        return given if given.mode is not None else replace(given, mode=mode)
    expected = f"{', '.join(map(repr, MODES))} or a gradvitals.guard.{kind.__name__}"
    raise ConfigError(f"{name} is {given!r}; expected {expected}")


# -- what is normal for a run --------------------------------------------------------------------------------------


@dataclass
class Peak:
    """The largest of recent values. It fades slowly, so that heavy tails stay in memory for about 1,000 values.

    Example:
        >>> peak = Peak()
        >>> for value in (1.0, 30.0, *[1.0] * 500):
        ...     peak.learn(value)
        >>> 10 < peak.value < 30
        True
    """

    value: float = 0.0
    count: int = 0
    FADE: ClassVar[float] = 0.998

    def learn(self, value: float) -> None:
        """Add a value; one that is not finite is ignored."""
        if math.isfinite(value):
            self.value, self.count = max(value, self.FADE * self.value), self.count + 1

    def limit(self, ratio: float, first_steps: int) -> float:
        """`ratio` times the peak; inf before `first_steps`."""
        return ratio * self.value if self.count >= first_steps and self.value > 0 else math.inf


@dataclass
class LossLevel:
    """The level of the loss, its median over a few steps, and whether it says that the model may be worse.

    Levels are compared with the highest before, not with the lowest or the mean: a run whose batches differ in kind, or
    whose loss is noisy, has shown such levels already.
    """

    losses: list[float] = field(default_factory=list)  # the last few
    levels: list[float] = field(default_factory=list)  # the last ones
    highest: float = -math.inf  # the highest level of the run
    count: int = 0
    signed: bool = False
    """Whether a loss was below 0, as those of policy gradients are: then its level says little about the model."""
    episode: tuple[int, float, float] | None = None
    """If the loss is above anything the run has shown: since which step, the level before, and the highest in it."""
    hurt: int | None = None
    """The step at which such an episode began that has just ended, with the loss still above its level before."""

    MATERIAL: ClassVar[float] = 0.02
    """Share of the highest level that a rise must have: near a loss of 0, levels differ by factors for no reason."""
    FIRST: ClassVar[int] = 60  # levels before an episode can begin

    def learn(self, step: int, loss: float) -> None:
        """Add the loss of a step that was made."""
        self.hurt = None
        if not math.isfinite(loss):
            return
        self.signed = self.signed or loss < 0
        self.losses = [*self.losses[1 - LEVEL_STEPS :], loss]
        if len(self.losses) < LEVEL_STEPS:
            return
        level = statistics.median(self.losses)
        self.levels = [*self.levels[1 - LEVEL_HISTORY - LEVEL_STEPS :], level]
        self.count += 1
        high = level > self.highest + 0.05 * abs(self.highest) and self.count > self.FIRST and not self.signed
        if self.episode is None and high:
            self.episode = step - LEVEL_STEPS, max(self.levels[:-LEVEL_STEPS]), level
        if self.episode is None:
            self.highest = max(self.highest, level)
            return
        began, before, top = self.episode
        top = max(top, level)
        self.episode = began, before, top
        if step - began > LEVEL_HISTORY or level < (before + top) / 2:
            self.hurt = began if before < level < (before + top) / 2 else None
            self.episode, self.highest = None, max(self.highest, top)  # it is part of the run from here on

    @property
    def rise(self) -> tuple[float, float] | None:
        """The level and the highest of the last ones before it, if it is well above; else None."""
        before = self.levels[:-LEVEL_STEPS]
        if len(before) < LEVEL_STEPS:
            return None
        highest, level = max(before), self.levels[-1]
        limit = highest + max((highest - min(before)) / 2, self.MATERIAL * abs(self.highest))
        return (level, highest) if level > limit else None


@dataclass
class LRWatch:
    """The largest learning rate so far, and a jump far above it."""

    peak: float = 0.0
    count: int = 0
    jumped: int | None = None  # the step of the jump; None if there was none lately
    MEMORY: ClassVar[int] = 100  # steps after which a jump that did no harm is normal

    def learn(self, step: int, lr: float, ratio: float) -> None:
        """Add the rate of a step."""
        self.count += 1
        if self.jumped is not None and step - self.jumped >= self.MEMORY:
            self.jumped, self.peak = None, max(self.peak, lr)
        if self.count > 20 and lr > ratio * self.peak > 0:
            self.jumped = step if self.jumped is None else self.jumped
        elif self.jumped is None:
            self.peak = max(self.peak, lr)


@dataclass
class StepBaseline:
    """What is normal for one optimizer's steps. It learns only from steps that were made as they came."""

    norm: Peak = field(default_factory=Peak)
    loss: LossLevel = field(default_factory=LossLevel)
    lr: LRWatch = field(default_factory=LRWatch)

    def learn(self, step: int, norm: float, loss: float) -> None:
        """Add a step that was neither skipped nor clipped."""
        self.norm.learn(norm)
        self.loss.learn(step, loss)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], shift: int) -> StepBaseline:
        """Continue from a saved state; `shift` is added to its step numbers."""
        one = cls(Peak(**state["norm"]), LossLevel(**state["loss"]), LRWatch(**state["lr"]))
        if one.lr.jumped is not None:
            one.lr.jumped += shift
        if one.loss.episode is not None:
            began, before, top = one.loss.episode
            one.loss.episode = began + shift, before, top
        return one


@dataclass
class SpikeMemory:
    """Which spikes were skipped lately, and so whether the next one may be."""

    WINDOW: ClassVar[int] = 200
    skipped: list[int] = field(default_factory=list)
    last: int = -2  # the step of the last spike
    streak: int = 0  # spikes in a row

    def see(self, step: int) -> None:
        """A spike at this step."""
        if step != self.last:
            self.streak = self.streak + 1 if step == self.last + 1 else 1
            self.last = step

    def refusal(self, step: int, skip: Skip) -> str:
        """Why a spike at this step is not to be skipped; empty if it is."""
        self.skipped = [then for then in self.skipped if step - then < self.WINDOW]
        if self.streak > skip.max_streak:
            return f"{skip.max_streak} spikes in a row were skipped, so the batch is not the cause"
        if len(self.skipped) >= skip.max_recent:
            return f"{len(self.skipped)} spikes within {self.WINDOW} steps: they are part of the data, and now normal"
        return ""

    @classmethod
    def from_state(cls, state: Mapping[str, Any], shift: int) -> SpikeMemory:
        """Continue from a saved state; `shift` is added to its step numbers."""
        return cls([step + shift for step in state["skipped"]], state["last"] + shift, state["streak"])
