"""The rungs of a Guard's ladder: what each may do, when, and how often. Checked where they are built."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from gradvitals.diagnose.rule import RULES
from gradvitals.errors import ConfigError

Mode = Literal["on", "off", "dry_run"]
MODES: tuple[str, ...] = get_args(Mode)

PER_STEPS = 1000
"""A budget is how often a rung may act within this many steps."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """What all rungs have. Each is on, off, or a dry run, which records what it would have done."""

    kind: ClassVar[str]
    mode: Mode | None = None
    """None: as the Guard's own mode has it."""
    cooldown: int = 0
    """Steps after it acted during which it does not act again."""
    budget: int | None = None
    """How often it may act within 1,000 steps; None for any number."""
    on: tuple[str, ...] = ()
    """Ids of findings that call for it at once, without the rungs below; see `gradvitals.diagnose`. Not for the two
    lowest rungs, which answer single steps."""

    def __post_init__(self) -> None:
        expect(self.mode in (None, *MODES), self, "mode", "one of " + ", ".join(map(repr, MODES)))
        expect(_whole(self.cooldown) and self.cooldown >= 0, self, "cooldown", "a number of steps, 0 or more")
        fine = self.budget is None or (_whole(self.budget) and self.budget >= 0)
        expect(fine, self, "budget", "how often it may act within 1,000 steps, 0 or more, or None for any number")
        listed = isinstance(self.on, tuple) and all(isinstance(name, str) for name in self.on)
        unknown = [name for name in self.on if name not in RULES] if listed else []
        told = f"; unknown: {', '.join(unknown)}" if unknown else ""
        expect(listed and not unknown, self, "on", f"a tuple of ids of findings, such as ('loss_rising',){told}")


@dataclass(frozen=True, kw_only=True)
class Clip(Rung):
    """Make a gradient smaller that is larger than the run's own past lets expect."""

    kind = "clip"
    method: Literal["outlier", "quantile", "zscore", "tensor"] = "outlier"
    """What it is clipped to. ``outlier``: only far outliers, to the limit that makes them one. ``quantile``: a quantile
    of recent norms. ``zscore``: as ZClip. ``tensor``: each tensor by its own past, as AdaGC. All but the first clip
    ordinary steps too, now and then."""
    ratio: float = 3.0
    """outlier: times the usual norm; and `z` too."""
    z: float = 8.0
    """outlier: standard deviations of its logarithm over the usual norm."""
    quantile: float = 0.95
    """quantile: share of the last `window` healthy norms that are left alone."""
    window: int = 200
    """quantile: how many."""
    z_threshold: float = 2.5
    """zscore: standard deviations over the mean of the norms."""
    tensor_ratio: float = 1.05
    """tensor: times the moving average of the tensor's own norm."""
    first_steps: int = 25
    """Steps before it clips anything."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(not self.on, self, "on", "nothing: this rung answers single steps, by their norm or loss")
        methods = ("outlier", "quantile", "zscore", "tensor")
        expect(self.method in methods, self, "method", "one of " + ", ".join(map(repr, methods)))
        positive(self, "ratio", "z", "z_threshold", "tensor_ratio")
        expect(_number(self.quantile) and 0 < self.quantile < 1, self, "quantile", "a share between 0 and 1")
        expect(_whole(self.window) and self.window >= 20, self, "window", "20 norms or more")
        expect(_whole(self.first_steps) and self.first_steps >= 2, self, "first_steps", "2 steps or more")


@dataclass(frozen=True, kw_only=True)
class Skip(Rung):
    """Leave a step out whose gradient or loss cannot be trusted. One that is not finite is always left out."""

    kind = "skip"
    budget: int | None = 50
    ratio: float = 5.0
    """Times the usual gradient norm; and `z` too."""
    z: float = 12.0
    """Standard deviations of its logarithm over the usual norm."""
    loss_z: float = 6.0
    """Standard deviations over the usual loss, of the loss and of its logarithm."""
    loss_rise: float = 0.2
    """And at least this share of the first loss above the usual one."""
    max_streak: int = 3
    """Steps left out in a row. If the next batch is as bad, it is not the batch: the ladder goes up."""
    first_steps: int = 25
    """Steps before anything but NaN is left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(not self.on, self, "on", "nothing: this rung answers single steps, by their norm or loss")
        positive(self, "ratio", "z", "loss_z", "loss_rise")
        expect(_whole(self.max_streak) and self.max_streak >= 1, self, "max_streak", "1 step or more")
        expect(_whole(self.first_steps) and self.first_steps >= 2, self, "first_steps", "2 steps or more")


@dataclass(frozen=True, kw_only=True)
class ResetMomentum(Rung):
    """Forget the optimizer's moments and step counts, then warm the learning rate up again."""

    kind = "reset_momentum"
    cooldown: int = 100
    budget: int | None = 3
    warmup: int = 150
    """Steps of cosine warm-up afterwards, as SPAM has it."""
    warmup_from: float = 0.01
    """Share of the learning rate that it begins with."""
    whole: bool = True
    """Forget all moments; if not, and a finding in `on` called for it, those of the finding's tensors alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(_whole(self.warmup) and self.warmup >= 0, self, "warmup", "a number of steps, 0 or more")
        fine = _number(self.warmup_from) and 0 <= self.warmup_from <= 1
        expect(fine, self, "warmup_from", "a share of the learning rate, 0 to 1")
        expect(isinstance(self.whole, bool), self, "whole", "True or False")


@dataclass(frozen=True, kw_only=True)
class CutLR(Rung):
    """Lower the learning rate for a while, below what the schedule says."""

    kind = "cut_lr"
    cooldown: int = 100
    budget: int | None = 3
    factor: float = 0.5
    """What the schedule's learning rate is multiplied by."""
    hold: int = 100
    """Steps it stays so low."""
    restore: int = 100
    """Steps over which it then comes back, in a line."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fine = _number(self.factor) and 0 < self.factor < 1
        expect(fine, self, "factor", "a share of the learning rate between 0 and 1")
        for name in ("hold", "restore"):
            expect(_whole(getattr(self, name)) and getattr(self, name) >= 0, self, name, "a number of steps, 0 or more")


@dataclass(frozen=True, kw_only=True)
class RollBack(Rung):
    """Go back to the last healthy snapshot and on from there with the data to come."""

    kind = "roll_back"
    cooldown: int = 20
    budget: int | None = 3
    on: tuple[str, ...] = ("loss_rising", "update_spike")
    ratio: float | None = None
    """Roll back at once where the norm is over this many times its usual size; None never does."""
    every: int = 100
    """Steps from one snapshot to the next."""
    settle: int = 50
    """Steps without trouble after which a snapshot counts as healthy."""
    keep: int = 2
    """Healthy snapshots that are kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fine = self.ratio is None or (_number(self.ratio) and self.ratio > 1)
        expect(fine, self, "ratio", "a number over 1, or None")
        expect(_whole(self.every) and self.every >= 1, self, "every", "1 step or more")
        expect(_whole(self.settle) and self.settle >= 0, self, "settle", "a number of steps, 0 or more")
        expect(_whole(self.keep) and self.keep >= 1, self, "keep", "1 snapshot or more")


RUNGS: dict[str, type[Rung]] = {"clip": Clip, "skip": Skip, "reset": ResetMomentum, "lr": CutLR, "rollback": RollBack}
"""By the name of the Guard's argument, from the bottom of the ladder to its top."""


def rung_of(name: str, given: Any, mode: Mode) -> Rung:
    """The rung that an argument of the Guard means: its settings, or its mode alone, or None for `mode`."""
    kind = RUNGS[name]
    if given is None:
        return kind(mode=mode)
    if isinstance(given, str):
        return kind(mode=given)  # type: ignore[arg-type]
    if isinstance(given, kind):
        return given if given.mode is not None else replace(given, mode=mode)
    expected = f"{', '.join(map(repr, MODES))} or a gradvitals.act.{kind.__name__}"
    raise ConfigError(f"{name} is {given!r}; expected {expected}")


def expect(fine: bool, rung: Rung, name: str, expected: str) -> None:
    """Raise an error that names the setting where it is not fine."""
    if not fine:
        raise ConfigError(f"{name} of {type(rung).__name__} is {getattr(rung, name)!r}; expected {expected}")


def positive(rung: Rung, *names: str) -> None:
    """Check that these settings are positive numbers."""
    for name in names:
        value = getattr(rung, name)
        expect(_number(value) and 0 < value < math.inf, rung, name, "a positive number")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
