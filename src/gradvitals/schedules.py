"""Learning rate, batch size and momentum that follow the GSNR of a run.

Nothing here acts unless you put it into the loop, and every change is an `Action` in the run's record. What is decided
depends on the readings alone, not on when they arrive, so a repeated run decides at the same steps.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from gradvitals.advise.decay import without_outliers
from gradvitals.collect.parameters import COMPILED_PREFIX, layer_of
from gradvitals.diagnose.history import Average, Averages, Series, fall, same_size
from gradvitals.errors import ConfigError, GradvitalsError, RunError, expect
from gradvitals.monitor import Monitor
from gradvitals.store import open_run
from gradvitals.types import Action, Reading, Source
from gradvitals.worker.worker import print_line

__all__ = ["BatchSizeScheduler", "GSNRScheduler", "decoupled_momentum", "split_by_layer"]
STATE_VERSION = 2
SAME_WEIGHTS: tuple[Source, ...] = ("microbatch", "ranks")
"""Sources whose samples are all taken with the same weights: the ones to act on by default."""

WITH_TOTAL: tuple[Source, ...] = (*SAME_WEIGHTS, "adam")  # sources that have a value for the whole model
MISSING_AFTER = 100  # steps without a GSNR to act on after which that is printed, once
KEPT = ("loss", "grad/spike_ratio", "gsnr", "gsnr_low", "gsnr_high")  # the values of a reading that schedules use


# -- factors on the learning rate --------------------------------------------------------------------------------


class LRFactors:
    """Multiplies an optimizer's learning rates while it steps, and only then.

    Outside of a step `group["lr"]` is what the user's scheduler, or the loop, has set. So any schedule works as if
    alone, a saved optimizer holds the schedule's own rate, and owners of factors need not know each other.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._factors: dict[object, float] = {}
        self._undo: list[tuple[dict[str, Any], Any, Any]] = []
        optimizer.register_step_pre_hook(self._multiply)
        optimizer.register_step_post_hook(lambda *_: self.restore())

    def set(self, owner: object, factor: float) -> None:
        """Set the factor of this owner, from the next step on."""
        self._factors[owner] = factor

    def drop(self, owner: object) -> None:
        """Remove the factor of this owner."""
        self._factors.pop(owner, None)

    @property
    def product(self) -> float:
        """The factor on the rates of the next step."""
        return math.prod(self._factors.values())

    @torch.no_grad()
    def _multiply(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.restore()
        factor = self.product
        if factor == 1:
            return
        done: set[int] = set()
        for group in optimizer.param_groups:
            lr = group.get("lr")
            if isinstance(lr, Tensor):
                if id(lr) not in done:  # groups built from one default share the tensor
                    done.add(id(lr))
                    self._undo.append((group, lr, lr.detach().clone()))
                    lr.mul_(factor)  # in place: compiled and captured steps read this very tensor
            elif lr is not None:
                group["lr"] = lr * factor
                self._undo.append((group, group["lr"], lr))

    @torch.no_grad()
    def restore(self) -> None:
        """Set the rates back; also after a step that raised, which runs no post-hook."""
        undo, self._undo = self._undo, []
        for group, multiplied, lr in undo:
            if isinstance(multiplied, Tensor):
                multiplied.copy_(lr)
            elif group["lr"] is multiplied:  # else someone has set another one meanwhile
                group["lr"] = lr


_FACTORS: weakref.WeakKeyDictionary[torch.optim.Optimizer, LRFactors] = weakref.WeakKeyDictionary()


def lr_factors(optimizer: torch.optim.Optimizer) -> LRFactors:
    """The factors of an optimizer: one object for all owners."""
    if optimizer not in _FACTORS:
        _FACTORS[optimizer] = LRFactors(optimizer)
    return _FACTORS[optimizer]


def optimizer_of(given: Any, taker: str) -> torch.optim.Optimizer:
    """The optimizer that was given, or that a given scheduler or wrapper belongs to."""
    found = given
    # Accelerate wraps both: its optimizer has an `optimizer`, its scheduler a `scheduler`.
    while (inner := getattr(found, "optimizer", getattr(found, "scheduler", None))) is not None:
        found = inner
    if isinstance(found, torch.optim.Optimizer):
        return found
    raise TypeError(
        f"{taker} got a {type(given).__name__}; expected a torch.optim.Optimizer or one of torch.optim.lr_scheduler"
    )


# -- what the two schedulers share -------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class _Scheduler:
    """Follows the GSNR of a run, and keeps the actions and the state.

    A reading is finished a moment after its step, depending on the machine. So a look takes all readings that are `lag`
    steps old, no more and no less, and waits for one that has not arrived.
    """

    monitor: Monitor
    _: KW_ONLY
    readings: int = 5
    in_a_row: int = 3
    cooldown: int
    look_every: int = 10
    lag: int = 10
    actions: list[Action] = field(default_factory=list, init=False)
    """Actions so far, taken or proposed, oldest first."""

    _state: Any = field(init=False)
    """The state of the subclass, a dataclass that `state_dict` saves."""
    _sources: tuple[Source, ...] = field(default=SAME_WEIGHTS, init=False)
    """Those that count, the best first. Values of two sources or two batch sizes are never compared."""
    _offered: set[str] = field(default_factory=set, init=False)
    """All sources that had a GSNR of the whole model."""

    def __post_init__(self) -> None:
        expect(self.readings >= 2, "readings", self.readings, "2 or more: one has no interval")
        for name, least in (("in_a_row", 1), ("cooldown", 0), ("look_every", 1), ("lag", 0)):
            expect(getattr(self, name) >= least, name, getattr(self, name), f"a whole number, {least} or more")
        self._averages = Averages(window=self.monitor.config.gsnr_window)
        queue = self._queue = deque[Reading](maxlen=4096)  # for a loop that never takes any
        if self.monitor.ranks is not None:  # else ranks send their numbers only now and then
            self.monitor.recorder.read_every_step()

        def add(reading: Reading) -> None:
            values = {name: reading.values[name] for name in KEPT if name in reading.values}
            queue.append(replace(reading, values=values, tensors={}, layers={}, heads={}))

        self.monitor.add_reader(add)

    def _take_readings(self) -> Iterator[list[Reading]]:
        """The readings that are due now, one list per step."""
        last = self.monitor.step - 1 - self.lag
        if last >= 0 and not (self._queue and self._queue[-1].step > last):
            self.monitor.flush()
        steps: dict[int, list[Reading]] = {}
        while self._queue and self._queue[0].step <= last:
            reading = self._queue.popleft()
            steps.setdefault(reading.step, []).append(reading)
        yield from steps.values()

    def _average(self, readings: Sequence[Reading]) -> Average | None:
        """The new average of the GSNR after the readings of one step, if there is one.

        An interval below zero is ignored. No GSNR is negative, but Adam's moments read so while gradients shrink.
        """
        by_source = {reading.source: reading for reading in readings}
        general = by_source.get(None, Reading(step=readings[0].step, time=readings[0].time))
        known = {r.source: r for r in readings if r.source and math.isfinite(r.values.get("gsnr", math.nan))}
        self._offered.update(map(str, known))
        best = next((known[source] for source in self._sources if source in known), None)
        average = None if best is None else self._averages.take(best, general)
        return None if average is None or math.isnan(average.low) or not average.high >= 0 else average

    def _missing(self) -> str:
        """Why there is nothing to act on."""
        have = f"the run has only {', '.join(sorted(self._offered))}" if self._offered else "the run has none so far"
        fix = "accumulate gradients over two or more micro-batches per step"
        if "adam" in self._offered:
            fix += ', or pass source="adam" and read about its limits'
        return f"no GSNR from {' or '.join(self._sources)} to act on ({have}); {fix}"

    def _add(self, kind: str, finding: str, reason: str, before: Any, after: Any, taken: bool = True) -> None:
        step = self.monitor.step
        action = Action(kind=kind, step=step, finding=finding, taken=taken, before=before, after=after, reason=reason)
        self.actions.append(action)
        note = kind if kind != "batch_size" else "done" if taken else "proposed"
        self._print(f"step {step}: {reason} ({note})")
        self.monitor.record(action)

    def _print(self, text: str) -> None:
        """Print a line to stderr, on the first rank, unless the config is quiet."""
        if self.monitor.ranks is None or self.monitor.ranks.rank == 0:
            print_line(text, self.monitor.config.quiet)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: the same readings then lead to the same decisions. Waits for readings."""
        self.monitor.flush()
        return {
            "version": STATE_VERSION,
            "model": asdict(self._state),
            "evidence": {"averages": asdict(self._averages), "offered": sorted(self._offered)},
            "queue": {"waiting": [reading.to_json() for reading in self._queue.copy()]},
            "actions": [action.to_json() for action in self.actions],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; load the Monitor's, the optimizer's and the other scheduler's as well."""
        if state.get("version") != STATE_VERSION:
            raise RunError(f"the state has version {state.get('version')!r}; this gradvitals reads {STATE_VERSION}")
        self.monitor.flush()
        fields = copy.deepcopy(dict(state["model"]))
        if "losses" in fields:
            fields["losses"] = Series(**fields["losses"])
        self._state = type(self._state)(**fields)
        self._averages = Averages(**{**copy.deepcopy(state["evidence"]["averages"]), "window": self._averages.window})
        self._offered = set(state["evidence"]["offered"])
        self._queue.clear()  # what is queued now belongs to steps that no longer count
        self._queue.extend(Reading.from_json(reading) for reading in state["queue"]["waiting"])
        self.actions = [Action.from_json(action) for action in state["actions"]]


# -- the learning rate -------------------------------------------------------------------------------------------


@dataclass
class WarmupDecay:
    """The state of a `GSNRScheduler`.

    Steps made are counted here, so that a state that went back with the rest of training counts on from there; all
    other steps are the Monitor's.
    """

    made: int = 0
    ramp: int = 0  # steps of the warmup that are done
    held: int = 0  # steps that the warmup was held for
    holding: bool = False
    decayed: float = 1.0  # factor of all decays so far
    decayed_at: int = -1  # `made` at the last decay; -1 before the first
    floor: int = 0  # the step from which on averages are compared: after the warmup, after the last decay
    best: dict[str, Any] = field(default_factory=dict)  # the average with the highest lower end since then
    recent: list[dict[str, Any]] = field(default_factory=list)
    """Averages since then, for the newest one that shares no reading with the present."""
    faded_for: int = 0
    dropped_for: int = 0
    losses: Series = field(default_factory=Series)

    def start_comparing(self, floor: int) -> None:
        """Forget all averages; compare those from a step on."""
        self.floor, self.best, self.recent, self.faded_for, self.dropped_for = floor, {}, [], 0, 0


@dataclass(eq=False, repr=False)
class GSNRScheduler(_Scheduler):
    """Multiplies the learning rate that a schedule sets by a factor that follows the GSNR.

    **Warmup**: over `warmup_steps` steps the factor rises linearly to 1. While the interval of the GSNR includes 0, and
    is narrow enough to mean it, the rise is held, for at most `max_extension` steps in all.

    **Decay**: the factor is multiplied by `decay` when the GSNR has dropped: its upper end is `drop` times below the
    highest lower end since the warmup or the last decay, and the loss has stopped falling; or it fell by `sudden_drop`
    at once, further than it may by itself as a run continues. Never twice within `cooldown`.

    The factor is in `group["lr"]` only while the optimizer steps, so any other scheduler, or a loop that sets rates by
    hand, works as before. Keep calling it yourself: this one does not.

    Every `look_every` steps it looks at the readings that are `lag` steps old, and waits for those not there yet.

    Args:
        monitor: Whose readings to follow.
        optimizer: The optimizer, or the torch scheduler that sets its rates.
        warmup_steps: Length of the warmup; 0 for none, and then none is extended.
        warmup_start: Share of the rate in the first step.
        warmup_in_schedule: The schedule itself has a linear warmup of `warmup_steps` from `warmup_start`. It is then
            stretched, and there is no second one.
        max_extension: Steps that the warmup may be held for. None: four times `warmup_steps`.
        near_zero: Hold it only if the upper end of the interval, for the batch of one step, is below this as well.
            None: also if the interval is merely wide. In the first hundred steps it is, in healthy runs too.
        decay: Factor of one decay; 1 for none.
        drop: How far the GSNR must have fallen, by the intervals.
        sudden_drop: The same from one average to the next that shares no reading with it.
        plateau: Whether a drop that is not sudden needs a loss that has stopped falling. By itself a drop says
            little: a GSNR falls in nearly every healthy run.
        readings: Readings that an average needs before it counts.
        in_a_row: Averages that must agree before a decay.
        cooldown: Least number of steps between two decays.
        min_factor: Decays end here.
        source: Follow this source of GSNR only. None: micro-batches or ranks, never Adam's moments or a window.
        look_every: Steps between two looks.
        lag: Steps from a reading to the look that counts it.

    Example:
        >>> import tempfile, torch, gradvitals as gv
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> monitor = gv.watch(model, optimizer, run=tempfile.mkdtemp() + "/run")
        >>> scheduler = gv.schedules.GSNRScheduler(monitor, optimizer, warmup_steps=4, warmup_start=0.2)
        >>> rates = []
        >>> for _ in range(6):
        ...     rates.append(round(scheduler.get_last_lr()[0], 3))
        ...     for _ in range(2):
        ...         (model(torch.randn(8, 4)).square().mean() / 2).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     scheduler.step()
        >>> rates
        [0.02, 0.04, 0.06, 0.08, 0.1, 0.1]
        >>> monitor.close()
    """

    optimizer: torch.optim.Optimizer | LRScheduler
    _: KW_ONLY
    warmup_steps: int = 0
    warmup_start: float = 0.01
    warmup_in_schedule: bool = False
    max_extension: int | None = None
    near_zero: float | None = 0.5
    decay: float = 1 / 3
    drop: float = 4.0
    sudden_drop: float = 3.0
    plateau: bool = True
    cooldown: int = 500
    min_factor: float = 0.01
    source: Source | None = None
    _state: WarmupDecay = field(init=False)
    DECLINE: ClassVar[float] = 2.0
    """Power of the step number that a GSNR may fall with by itself, as in the rule `sudden_gsnr_drop`."""
    ENOUGH_LOSSES: ClassVar[int] = 50
    """Losses needed to see whether they still fall."""

    def __post_init__(self) -> None:
        limit, near, source = self.max_extension, self.near_zero, self.source
        if source is not None and source not in WITH_TOTAL:
            raise ConfigError(f"source is {source!r}; expected one of {', '.join(WITH_TOTAL)}, or None for the best")
        expect(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "a number of steps, 0 or more")
        expect(0 < self.warmup_start <= 1, "warmup_start", self.warmup_start, "a share over 0, up to 1")
        expect(limit is None or limit >= 0, "max_extension", limit, "a number of steps, 0 or more, or None")
        expect(near is None or near > 0, "near_zero", near, "a GSNR over 0, or None")
        expect(0 < self.decay <= 1, "decay", self.decay, "a factor over 0, up to 1 (which turns decay off)")
        for name in ("drop", "sudden_drop"):
            expect(getattr(self, name) > 1, name, getattr(self, name), "a factor over 1 that the GSNR falls by")
        expect(0 < self.min_factor <= 1, "min_factor", self.min_factor, "a factor over 0, up to 1")
        self.optimizer = optimizer_of(self.optimizer, "GSNRScheduler")
        self._longest = 4 * self.warmup_steps if limit is None else limit
        self._state = WarmupDecay()
        self._sources = SAME_WEIGHTS if source is None else (source,)
        super().__post_init__()
        self._reported_missing = False
        self._factors = lr_factors(self.optimizer)
        self._factors.set(self, self.factor)

    @property
    def factor(self) -> float:
        """This scheduler's factor on the rate of the next step."""
        state = self._state
        warmup = self._ramp_at(state.ramp)
        if self.warmup_in_schedule:
            warmup /= self._ramp_at(state.ramp + state.held)
        return warmup * state.decayed

    def _ramp_at(self, step: int) -> float:
        total, start = self.warmup_steps, self.warmup_start
        return 1.0 if step >= total else start + (1 - start) * step / total

    def step(self) -> None:
        """Count a step of the optimizer. Call it once after each, before or after another scheduler."""
        self._advance()
        if self._state.made % self.look_every == 0:
            for readings in self._take_readings():
                for reading in readings:
                    if "loss" in reading.values:
                        self._state.losses.push(reading.step, reading.values["loss"])
                average = self._average(readings)
                if average is not None:
                    self._consider(average, self._averages.source)
            if self._lacks_gsnr() and not self._reported_missing:
                self._reported_missing = True
                self._print(f"GSNRScheduler: {self._missing()}. The learning rate stays as scheduled")
        self._factors.set(self, self.factor)

    def _lacks_gsnr(self) -> bool:
        return not self._averages.source and self._state.made >= MISSING_AFTER

    def _advance(self) -> None:
        """A step was made: the warmup advances, unless it is held."""
        state = self._state
        state.made += 1
        if state.ramp >= self.warmup_steps:
            return
        if state.holding and state.held < self._longest:
            state.held += 1
            if state.held == self._longest:
                self._hold_warmup(False, f"the warmup was held for {state.held} steps, which is the limit")
            return
        state.ramp += 1
        if state.ramp == self.warmup_steps:
            state.start_comparing(self.monitor.step)

    def _consider(self, average: Average, source: str) -> None:
        """Decide on a new average."""
        if average.count < self.readings:
            return
        if self._state.ramp < self.warmup_steps:
            self._consider_warmup(average, source)
        elif average.begins >= self._state.floor:
            self._consider_decay(average, source)

    def _consider_warmup(self, average: Average, source: str) -> None:
        state = self._state
        near = self.near_zero
        no_signal = average.low <= 0 <= average.high and (near is None or average.high * average.per_step < near)
        if no_signal == state.holding or state.held >= self._longest:
            return
        shown, most = _shown(average, source), self._longest - state.held
        if no_signal:
            reason = f"{shown} cannot be distinguished from 0: the warmup is held"
            self._hold_warmup(True, f"{reason} at {self.factor:.3g} of the rate, for at most {most} steps", average)
        else:
            self._hold_warmup(False, f"{shown} is above 0: the warmup continues", average)

    def _hold_warmup(self, holding: bool, reason: str, average: Average | None = None) -> None:
        """Hold the warmup, or let it continue."""
        state, length = self._state, self.warmup_steps + self._state.held
        state.holding = holding
        before, after = (length, self.warmup_steps + self._longest) if holding else (self.warmup_steps, length)
        figures = {} if holding else {"held": state.held}
        figures |= {} if average is None else _figures(average)
        was, now = ({"factor": self.factor, "warmup_steps": steps} for steps in (before, after))
        kind = "warmup_extended" if holding else "warmup_resumed"
        self._add(kind, "near_zero_initial_gsnr", reason, was, now | figures)

    def _consider_decay(self, now: Average, source: str) -> None:
        state = self._state
        last = state.recent[-1] if state.recent else None
        if last is not None and not (last["source"] == source and same_size(last["batch_size"], now.batch_size)):
            state.start_comparing(state.floor)  # another quantity, which cannot be compared with what is remembered
        before = next((kept for kept in reversed(state.recent) if kept["step"] < now.begins), None)
        faded = bool(state.best) and state.best["step"] < now.begins and now.high * self.drop < state.best["low"]
        level = not self.plateau or self._loss_is_level(now.step)
        state.faded_for = state.faded_for + 1 if faded and level else 0
        state.dropped_for = state.dropped_for + 1 if before is not None and self._is_sudden(before, now) else 0
        cool = state.decayed_at < 0 or state.made - state.decayed_at >= self.cooldown
        able = cool and self.decay < 1 and state.decayed > self.min_factor
        if able and before is not None and state.dropped_for >= self.in_a_row:
            self._decay(now, source, before, "sudden_gsnr_drop")
        elif able and state.faded_for >= self.in_a_row:
            self._decay(now, source, state.best, "decay_due")
        else:
            names = ("step", "middle", "value", "low", "established", "batch_size")
            kept = {name: getattr(now, name) for name in names} | {"source": source}
            if now.established and (not state.best or now.low > state.best["low"]):
                state.best = kept
            state.recent = [*state.recent[-99:], kept]

    def _is_sudden(self, before: Mapping[str, Any], now: Average) -> bool:
        """Whether it fell further than a decline with the length of the run explains."""
        expected = (before["middle"] / now.middle) ** self.DECLINE if now.middle > 0 else 1.0
        return bool(before["established"] and now.high * self.sudden_drop < before["low"] * expected)

    def _loss_is_level(self, step: int) -> bool:
        """Whether the loss of the second half of the run, or since the last decay, has stopped falling."""
        losses: NDArray[np.float64] = self._state.losses.since(max(step / 2, self._state.floor))[1]
        if len(losses) < self.ENOUGH_LOSSES:
            return False
        losses = without_outliers(losses)
        fell, error = fall(losses)
        return fell < max(2 * error, 0.01 * abs(float(losses.mean())))

    def _decay(self, now: Average, source: str, reference: Mapping[str, Any], finding: str) -> None:
        state = self._state
        before = self.factor
        state.decayed, state.decayed_at = max(self.min_factor, state.decayed * self.decay), state.made
        why = " and the loss no longer falls" if finding == "decay_due" and self.plateau else ""
        why = " at once, more than a decline explains" if finding == "sudden_gsnr_drop" else why
        reason = (
            f"{_shown(now, source)} is down from {reference['value']:.3g} (at least {reference['low']:.3g}) at step "
            f"{reference['step']}{why}: the learning rate goes to {self.factor:.3g} of the schedule's"
        )
        was = {"factor": before, "gsnr": reference["value"], "gsnr_low": reference["low"], "at": reference["step"]}
        state.start_comparing(self.monitor.step)
        self._add("decay", finding, reason, was, {"factor": self.factor} | _figures(now))

    @property
    def status(self) -> str:
        """A few words on where it stands."""
        state = self._state
        if self._lacks_gsnr():
            return self._missing()
        if state.ramp < self.warmup_steps:
            hold = f", held for {state.held} steps so far" if state.held else ""
            return f"warmup: {state.ramp} of {self.warmup_steps} steps{hold}"
        share = f"{state.decayed:.3g} of " if state.decayed < 1 else ""
        return f"at {share}the schedule's rate"

    def get_last_lr(self) -> list[float]:
        """The rate of every group in the next step, with all factors on it."""
        groups = optimizer_of(self.optimizer, "GSNRScheduler").param_groups
        return [float(group["lr"]) * self._factors.product for group in groups]

    def detach(self) -> None:
        """Remove the factor: from the next step on the rate is the schedule's own."""
        self._factors.drop(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; load the Monitor's, the optimizer's and the other scheduler's as well."""
        super().load_state_dict(state)
        self._factors.set(self, self.factor)

    def __repr__(self) -> str:
        return f"GSNRScheduler(factor={self.factor:.4g}, {self.status!r})"


def _shown(average: Average, source: str) -> str:
    size = f", batch {average.batch_size:g}" if math.isfinite(average.batch_size) else ""
    return f"GSNR {average.value:.3g} [{average.low:.3g}, {average.high:.3g}] ({source}{size}) at step {average.step}"


def _figures(average: Average) -> dict[str, Any]:
    found = {"gsnr": average.value, "gsnr_low": average.low, "gsnr_high": average.high, "at": average.step}
    return found if math.isnan(average.batch_size) else found | {"batch_size": average.batch_size}


# -- the batch size ----------------------------------------------------------------------------------------------

Rule = Literal["sqrt", "linear"]
POWERS: dict[Rule, float] = {"sqrt": 0.5, "linear": 1.0}


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A batch size that the noise scale suggests."""

    batch_size: int
    """The proposed batch, which may be the present one."""
    current: int
    reason: str
    step: int = 0
    """The step of the reading behind it."""
    noise_scale: float = math.nan
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        verb = "keep" if self.batch_size == self.current else "take"
        return f"{verb} a batch of {self.batch_size}: {self.reason}"


@dataclass
class BatchGrowth:
    """The state of a `BatchSizeScheduler`."""

    batch_size: int
    made: int = 0  # steps of training made
    changed_at: int = -1
    over_for: int = 0
    under_for: int = 0


@dataclass(eq=False, repr=False)
class BatchSizeScheduler(_Scheduler):
    """Doubles the batch when the noise scale has outgrown it.

    When the lower end of the noise scale's interval has been over `factor` times the batch for `in_a_row` averages, the
    batch doubles; not within `cooldown` steps of the last change, and not over `max_batch_size`. Readings from before a
    change do not count after it.

    With ``apply=False`` it only proposes (`proposal`, and an `Action` that was not taken). With ``apply=True``
    `accumulation_steps` grows, and a loop that makes that many micro-batches per step has the larger batch. The loop
    has to pass its samples, ``monitor.observe(loss, batch_size=...)``: a size passed to `watch` would be wrong after
    the first change.

    Args:
        monitor: Whose readings to follow. The noise scale comes from micro-batches, so a step needs two or more.
        batch_size: Samples per optimizer step: at the start, and from then on now.
        accumulation_steps: Micro-batches per optimizer step, likewise. Ask once at the start of a step.
        max_batch_size: Largest batch. None: eight times `batch_size`.
        apply: Whether to change `accumulation_steps`, or only to propose.
        optimizer: The optimizer, or its torch scheduler. Decides about `lr_rule`; needed for `scale_lr`.
        scale_lr: Multiply the learning rate by `lr_multiplier` as well, beside any other schedule.
        lr_rule: How the rate follows the batch: "sqrt" or "linear". None: linear for SGD, else sqrt.
        factor: How far over the batch the noise scale must be.
        readings: Readings that an average needs before it counts.
        in_a_row: Averages that must agree.
        cooldown: Least number of steps between two changes.
        shrink: Halve the batch if the upper end of the noise scale is `factor` times below it.
        min_batch_size: Smallest batch for `shrink`. None: `batch_size`.
        look_every: Steps between two looks at the readings.
        lag: Steps from a reading to the look that counts it.
    """

    _: KW_ONLY
    batch_size: int
    accumulation_steps: int
    max_batch_size: int | None = None
    apply: bool = False
    optimizer: torch.optim.Optimizer | LRScheduler | None = None
    scale_lr: bool = False
    lr_rule: Rule | None = None
    factor: float = 2.0
    cooldown: int = 200
    shrink: bool = False
    min_batch_size: int | None = None
    _state: BatchGrowth = field(init=False)

    def __post_init__(self) -> None:
        size, parts, rule = self.batch_size, self.accumulation_steps, self.lr_rule
        most = self._most = 8 * size if self.max_batch_size is None else self.max_batch_size
        least = self._least = size if self.min_batch_size is None else self.min_batch_size
        expect(size >= 1, "batch_size", size, "the samples of one optimizer step, 1 or more")
        divides = parts >= 1 and size % parts == 0
        expect(divides, "accumulation_steps", parts, f"a divisor of the batch size, {size}")
        micro = self._micro_batch = size // parts
        expect(most >= size, "max_batch_size", most, f"{size}, the batch size, or more")
        expect(least <= size, "min_batch_size", least, f"{size}, the batch size, or less")
        multiple = f"a multiple of the micro-batch, {micro}"
        expect(least >= 1 and least % micro == 0, "min_batch_size", least, multiple)
        expect(most % micro == 0, "max_batch_size", most, multiple)
        expect(self.factor > 1, "factor", self.factor, "more than 1")
        expect(rule in (None, *POWERS), "lr_rule", rule, "'sqrt', 'linear' or None")
        scales = self.scale_lr
        expect(not scales or self.optimizer is not None, "scale_lr", scales, "an optimizer as well, to scale its rate")
        own = None if self.optimizer is None else optimizer_of(self.optimizer, "BatchSizeScheduler")
        self.lr_rule = rule or ("linear" if isinstance(own, torch.optim.SGD) else "sqrt")
        self._factors = lr_factors(own) if scales and own is not None else None
        self._first = size
        self._state = BatchGrowth(size)
        super().__post_init__()
        self._proposal: Proposal | None = None
        self._proposed = size

    @property
    def lr_multiplier(self) -> float:
        """Factor on the learning rate that follows the batch size; applied only with `scale_lr`."""
        return float(self._settings(self.batch_size)["lr_multiplier"])

    def _settings(self, size: int) -> dict[str, Any]:
        """The settings of the loop for a batch of this size."""
        multiplier = float((size / self._first) ** POWERS[self.lr_rule or "sqrt"])
        return {"batch_size": size, "accumulation_steps": size // self._micro_batch, "lr_multiplier": multiplier}

    @property
    def proposal(self) -> Proposal:
        """The proposal by the newest reading, and its reason."""
        nothing = Proposal(batch_size=self.batch_size, current=self.batch_size, reason=self._missing())
        return self._proposal or nothing

    def step(self) -> None:
        """Count a step of the optimizer. Call it once after each."""
        self._state.made += 1
        if self._state.made % self.look_every:
            return
        for readings in self._take_readings():
            average = self._average(readings)
            if average is not None:
                self._consider(self._propose(average))

    def _propose(self, average: Average) -> Proposal:
        state = self._state
        size = state.batch_size
        reason = self._unusable(average)
        if reason:
            state.over_for = state.under_for = 0
            return Proposal(batch_size=size, current=size, reason=reason, step=average.step)
        scale, low, high = (average.batch_size / end for end in (average.value, average.high, average.low))
        state.over_for = state.over_for + 1 if low > self.factor * size else 0
        state.under_for = state.under_for + 1 if high * self.factor < size else 0
        target, run, reason = size, 0, f"the noise scale is {scale:.4g} [{low:.4g}, {high:.4g}]"
        if state.over_for:
            target, run = min(2 * size, self._most), state.over_for
            reached = f"{reason}, over {self.factor:g} × {size} by its lower end"
        elif state.under_for and self.shrink:
            target, run = max(size // 2, self._least), state.under_for
            reached = f"{reason}, under {size} / {self.factor:g} by its upper end"
        if target == size:
            reason += f" for a batch of {size}" + (", and the batch is at its limit" if run else "")
        elif run < self.in_a_row:
            target, reason = size, f"{reached}, {run} of {self.in_a_row} times"
        elif state.changed_at >= 0 and state.made - state.changed_at < self.cooldown:
            target, reason = size, f"{reached}, but the last change was less than {self.cooldown} steps ago"
        else:
            reason = reached
        return Proposal(
            batch_size=target, current=size, reason=reason, step=average.step, noise_scale=scale, low=low, high=high
        )

    def _unusable(self, average: Average) -> str:
        """Why the average does not show anything about the batch; empty if it does."""
        if math.isnan(average.step_size) or math.isnan(average.batch_size):
            return "the number of samples is unknown; pass it, observe(loss, batch_size=...)"
        if not same_size(average.step_size, self.batch_size):
            changed = self._state.changed_at >= 0
            waits = "waiting for readings at that size" if changed else "pass the samples of a whole step"
            seen = f"the loop reports {average.step_size:g} samples per step so far, and this schedule is at"
            return f"{seen} {self.batch_size}; {waits}"
        if average.count < self.readings:
            return f"only {average.count} readings so far, {self.readings} are needed"
        if average.low <= 0:
            return "the noise scale is not identifiable: the signal cannot be distinguished from 0"
        return ""

    def _consider(self, proposal: Proposal) -> None:
        self._proposal = proposal
        new, known = proposal.batch_size, self._proposed
        self._proposed = new
        if new in (proposal.current, known):  # a proposal is reported once, and again after it was withdrawn
            return
        ends = {"noise_scale_low": proposal.low, "noise_scale_high": proposal.high}
        before = self._settings(self.batch_size)
        after = self._settings(new) | {"noise_scale": proposal.noise_scale} | ends
        if self.apply:
            self._state = BatchGrowth(new, made=self._state.made, changed_at=self._state.made)
            self._follow()
        finding = "batch_too_small" if new > proposal.current else "batch_too_large"
        self._add("batch_size", finding, str(proposal), before, after, self.apply)

    def _follow(self) -> None:
        """Give the loop and the learning rate the batch of the state."""
        self.batch_size = self._state.batch_size
        self.accumulation_steps = self.batch_size // self._micro_batch
        if self._factors is not None:
            self._factors.set(self, self.lr_multiplier)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: the same readings then lead to the same batches. Waits for readings."""
        return super().state_dict() | {
            "start": [self._first, self._micro_batch],
            "proposal": None if self._proposal is None else asdict(self._proposal),
            "proposed": self._proposed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        saved, mine = state.get("start", []), [self._first, self._micro_batch]
        if state.get("version") == STATE_VERSION and list(saved) != mine:
            raise RunError(
                f"the state started with a batch of {saved[0]} in micro-batches of {saved[1]}, this schedule with "
                f"{mine[0]} in {mine[1]}; build it with the same numbers"
            )
        super().load_state_dict(state)
        self._proposal = None if state["proposal"] is None else Proposal(**state["proposal"])
        self._proposed = state["proposed"]
        self._follow()

    def __repr__(self) -> str:
        return f"BatchSizeScheduler(batch_size={self.batch_size}, accumulation_steps={self.accumulation_steps})"


# -- momentum ----------------------------------------------------------------------------------------------------

_DECOUPLED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # optimizers with decoupled momentum


class DecoupledMomentum:
    """Sets the momentum of every parameter group by the rank of its GSNR.

    After DeepKD (arXiv 2505.15133), which raises momentum by a fixed amount for the parts of a loss whose GSNR is high
    and lowers it for the others. There the parts are known by hand; here groups are ranked by their measured GSNR.

    The group with the highest GSNR gets its momentum plus `delta`, the one with the lowest its momentum minus `delta`,
    the others are spaced evenly between them. Momentum is `momentum` of SGD, or the first of Adam's `betas`.
    `update` ranks again by newer readings, `undo` restores the momentum from before.

    Note that SGD's steps grow with its momentum, by 1/(1 - momentum): from 0.9 to 0.975 they are four times as long.

    Args:
        optimizer: Whose groups. It needs two or more; `split_by_layer` makes them.
        signal: A Monitor, whose newest readings are used, or the GSNR of every group.
        delta: The largest change of momentum.
        direction: 1 raises it for a high GSNR, as DeepKD does. -1 raises it for a low GSNR: more averaging for more
            noise, as the GSNR manual asks.
        bounds: Momentum stays within these, which lie between 0 and 1.
        source: Source of the Monitor's GSNR. None: micro-batches or ranks.

    Example:
        >>> import torch
        >>> a, b, c = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
        >>> optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b]}, {"params": [c]}], lr=0.1, momentum=0.9)
        >>> done = decoupled_momentum(optimizer, [0.1, 3.0, 0.2])
        >>> [round(group["momentum"], 3) for group in optimizer.param_groups]
        [0.825, 0.975, 0.9]
        >>> done.undo()
        >>> [group["momentum"] for group in optimizer.param_groups]
        [0.9, 0.9, 0.9]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        signal: Monitor | Sequence[float],
        *,
        delta: float = 0.075,
        direction: Literal[1, -1] = 1,
        bounds: tuple[float, float] = (0.01, 0.99),
        source: Source | None = None,
    ) -> None:
        own = self.optimizer = optimizer_of(optimizer, "decoupled_momentum")
        if own in _DECOUPLED:
            raise ConfigError(
                "this optimizer has decoupled momentum already; use its update() to rank again, or undo()"
            )
        expect(0 < delta < 1, "delta", delta, "a number between 0 and 1, such as 0.075")
        expect(direction in (1, -1), "direction", direction, "1 (more for high GSNR) or -1 (more for low GSNR)")
        if not 0 < bounds[0] < bounds[1] < 1:
            raise ConfigError(f"bounds are {bounds!r}; expected two numbers between 0 and 1, the lower first")
        if len(own.param_groups) < 2:
            raise ConfigError(
                f"the optimizer has {len(own.param_groups)} parameter group, and momentum belongs to a group; "
                "make one for each layer with split_by_layer(optimizer, model) before you build a scheduler"
            )
        for index, group in enumerate(own.param_groups):
            value = _momentum(group)
            if not isinstance(value, float | int) or not 0 < value < 1:
                raise ConfigError(
                    f"group {index} of {type(own).__name__} has no momentum to shift "
                    f"({_setting(group) or 'no setting'}); "
                    "expected momentum, or the first of betas, as a number between 0 and 1"
                )
        self.actions: list[Action] = []
        """Actions so far, oldest first."""
        self._shift, self._bounds = direction * delta, bounds
        self._sources = SAME_WEIGHTS if source is None else (source,)
        self._monitor = signal if isinstance(signal, Monitor) else None
        self._before = [_setting(group) for group in own.param_groups]
        self.update(None if isinstance(signal, Monitor) else signal)
        _DECOUPLED.add(own)

    @property
    def momentum(self) -> list[float]:
        """The momentum of every group, now."""
        return [_momentum(group) for group in self.optimizer.param_groups]

    def update(self, values: Sequence[float] | None = None) -> None:
        """Rank again: by the GSNR of every group, or by the Monitor's newest readings."""
        groups, was = self.optimizer.param_groups, len(self._before)
        if len(groups) != was:
            raise ConfigError(f"the optimizer has {len(groups)} groups now and had {was}; undo and start anew")
        if values is not None and len(values) != was:
            raise ConfigError(f"got {len(values)} values of GSNR for {was} groups; expected one for each group")
        if values is None:
            signals, step = self._measured()
        else:
            signals, step = np.array([(value, math.nan, math.nan) for value in values]), self._step
        labels = [_label(index, group) for index, group in enumerate(groups)]
        reason, before = _why_not(signals, labels), self.momentum
        if not reason:
            low, high = self._bounds
            for group, setting, place in zip(groups, self._before, _places(signals[:, 0]), strict=True):
                own = _momentum(setting)
                new = min(max(own + self._shift * place, low), high) if place else own
                group.update({"betas": (new, *group["betas"][1:])} if "betas" in group else {"momentum": new})
            where = "high" if self._shift > 0 else "low"
            reason = f"momentum by rank of GSNR, up to {abs(self._shift):g} more if it is {where} and less if not"
        after = {
            "momentum": dict(zip(labels, self.momentum, strict=True)),
            "gsnr": dict(zip(labels, signals[:, 0].tolist(), strict=True)),
        }
        self._add(reason, dict(zip(labels, before, strict=True)), after, step, taken=self.momentum != before)

    def undo(self) -> None:
        """Give every group exactly the momentum it had."""
        before = self.momentum
        for group, setting in zip(self.optimizer.param_groups, self._before, strict=True):
            group.update(setting)
        _DECOUPLED.discard(self.optimizer)
        self._add("momentum as it was before", before, {"momentum": self.momentum}, self._step, taken=True)

    @property
    def _step(self) -> int:
        return self._monitor.step if self._monitor is not None else 0

    def _add(self, reason: str, before: Any, after: dict[str, Any], step: int, *, taken: bool) -> None:
        what: dict[str, Any] = {"kind": "momentum", "finding": "sparse_feature_noise", "taken": taken}
        action = Action(step=step, before={"momentum": before}, after=after, reason=reason, **what)
        self.actions.append(action)
        if self._monitor is not None:
            self._monitor.record(action)

    def _measured(self) -> tuple[NDArray[np.float64], int]:
        """The newest GSNR of every group and its ends: of its layer if it holds a whole one, else its tensors' median.

        Also returns the step it is of.
        """
        if self._monitor is None:
            raise ConfigError("update needs the GSNR of every group: there is no Monitor to ask")
        self._monitor.flush()
        ranks, table = self._monitor.ranks, self._monitor.recorder.table
        stored = [_newest(self._monitor, self._sources) if ranks is None or ranks.rank == 0 else None]
        if ranks is not None:  # only the first rank stores a run; its readings are of the tensors of all ranks
            mine, stored = stored[0], [None] * ranks.world
            dist.all_gather_object(stored, mine, group=ranks.device_group)
        if isinstance(stored[0], GradvitalsError):
            raise stored[0]
        assert stored[0] is not None
        tensors, layers, step = stored[0]
        layout = table.layout if ranks is None else ranks.layout
        rows = range(len(table.parameters)) if ranks is None else ranks.rows.tolist()
        row_of = {id(parameter): row for row, parameter in zip(rows, table.parameters, strict=False)}
        whole: dict[str, set[int]] = {}
        for info in layout.tensors:
            whole.setdefault(info.layer, set()).add(info.index)
        signals = []
        for group in self.optimizer.param_groups:
            own = {row_of[id(parameter)] for parameter in group["params"] if id(parameter) in row_of}
            layer = next((name for name, its_rows in whole.items() if its_rows == own and name in layers), None)
            read = [row for row in sorted(own) if row < tensors.shape[1]]
            found = tensors[:, read] if layer is None else layers[layer][:, None]
            found = found[:, np.isfinite(found).all(0)]  # a value without an interval does not show enough
            signals.append(np.median(found, axis=1) if found.size else np.full(3, math.nan))
        return np.array(signals), step


decoupled_momentum = DecoupledMomentum
Newest = tuple[NDArray[np.float64], dict[str, NDArray[np.float64]], int]


def _newest(monitor: Monitor, sources: Sequence[Source]) -> Newest | GradvitalsError:
    """The newest GSNR and its ends of all tensors and of all layers, and their step; or why there is none."""
    names = ("gsnr", "gsnr_low", "gsnr_high")
    try:
        with open_run(monitor.run_path) as run:
            source = next((found for found in sources if found in run.sources("gsnr", "tensors")), None)
            if source is None:
                return ConfigError(
                    f"the run has no GSNR from {' or '.join(sources)} yet; accumulate gradients over two or "
                    "more micro-batches, or pass the GSNR of every group"
                )
            tensors = np.stack([run.table(name, kind="tensors", source=source)[1] for name in names])
            layers = np.stack([run.table(name, kind="layers", source=source)[1] for name in names])
            by_name = {name: layers[:, index] for index, name in enumerate(run.layers)}
            return tensors, by_name, run.table("gsnr", source=source)[0]
    except GradvitalsError as error:
        return error


def split_by_layer(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Split every group of an optimizer by the layers of a model, in place, with the settings it had.

    Call it before a scheduler is built, which counts the groups, and before `watch`.

    Returns:
        The layer of every group.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> split_by_layer(optimizer, model)
        ['0', '1']
    """
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ConfigError(
            "the optimizer has a scheduler already, which counts its groups; split them before it is built"
        )
    layer = {id(p): layer_of(name.replace(COMPILED_PREFIX, "")) for name, p in model.named_parameters()}
    split: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        positions: dict[str, list[int]] = {}
        for index, parameter in enumerate(group["params"]):
            positions.setdefault(layer.get(id(parameter), "other"), []).append(index)
        lists = [key for key in ("params", "param_names") if key in group]
        for name, indices in positions.items():
            split.append({**group, **{key: [group[key][i] for i in indices] for key in lists}, "layer": name})
    optimizer.param_groups[:] = split
    return [group["layer"] for group in split]


def _setting(group: Mapping[str, Any]) -> dict[str, Any]:
    """The setting of a group that holds its momentum; empty if it has none."""
    name = "betas" if "betas" in group else "momentum"
    return {name: group[name]} if name in group else {}


def _momentum(group: Mapping[str, Any]) -> Any:
    return group["betas"][0] if "betas" in group else group.get("momentum")


def _why_not(signals: NDArray[np.float64], labels: Sequence[str]) -> str:
    """Why groups cannot be ranked by these values and their ends; empty if they can."""
    known = np.flatnonzero(np.isfinite(signals[:, 0]))
    if len(known) < 2:
        return f"a GSNR is known for {len(known)} groups; two are needed to rank them"
    weak, strong = (int(known[pick(signals[known, 0])]) for pick in (np.argmin, np.argmax))
    (least, _, least_high), (most, most_low, _) = signals[weak], signals[strong]
    if most_low > least_high or (math.isnan(most_low) and most > least):
        return ""
    highest = f"{labels[strong]} has a GSNR of {most:.3g}, at least {most_low:.3g}"
    lowest = f"{labels[weak]} {least:.3g}, at most {least_high:.3g}"
    return f"the groups cannot be distinguished: {highest}, and {lowest}"


def _places(values: Sequence[float] | NDArray[np.float64]) -> list[float]:
    """The place of each value among the known ones, from -1 (lowest) to 1 (highest); 0 if it is not known.

    >>> _places([5.0, 1.0, math.nan, 5.0, 2.0])
    [0.6666666666666667, -1.0, 0.0, 0.6666666666666667, -0.33333333333333337]
    """
    known = np.array([value for value in values if math.isfinite(value)])
    rank = [((known < value).sum() + (known <= value).sum() - 1) / 2 for value in values]
    return [float(2 * r / (len(known) - 1) - 1) if math.isfinite(v) else 0.0 for r, v in zip(rank, values, strict=True)]


def _label(index: int, group: Mapping[str, Any]) -> str:
    name = group.get("layer", group.get("name"))
    return f"group {index}" if name is None else f"group {index} ({name})"
