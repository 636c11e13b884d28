"""Rules about the learning rate and its schedule: a missing warmup, a rate too high, a decay that is due."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradvitals.diagnose.baseline import Floats, empty
from gradvitals.diagnose.history import Average, Streak, fall, finite_median, same_size
from gradvitals.diagnose.message import Message, Observation
from gradvitals.diagnose.rule import Rule, register
from gradvitals.diagnose.rules.clipping import CLIPPED_ALREADY, clipping_fix
from gradvitals.diagnose.step import Step
from gradvitals.format import number


@register
@dataclass
class WarmupNeeded(Rule):
    """The learning rate was at its full height from the first step, and the first steps did harm."""

    id = "warmup_needed"
    family = "schedule"
    is_symptom = True
    needs = ("lr", "loss", "grad/norm")
    expects_fall = True
    judges_after = 30
    closes_after = 200
    follows = ("stale_gradients", "lr_too_high")
    masks = ("loss_rising", "loss_spike", "lr_too_high", "explosion", "update_spike")
    taints_steps = True
    message = Message(
        name="Warmup needed",
        pattern=(
            "The learning rate starts at its full value, and the loss rises in the first steps or the first gradients "
            "are 20 times all later ones."
        ),
        title="Training started at the full learning rate of {lr}: {harm}",
        causes={
            "rose": "The first steps were too large for weights that have not learned anything yet",
            "shock": (
                "The first gradients were far larger than all later ones, and at the full learning rate they push the "
                "weights far from their initialization"
            ),
            "too_high": "The learning rate of {lr} is too high for this model, with or without a warmup",
            "moments": "An adaptive optimizer has poor estimates of the gradient's size in its first steps",
        },
        fixes={
            "warmup": "Start again with a warmup over about {warmup} steps, from {lr_start} to {lr}",
            "lower": "Start again with a learning rate of {lr_tenth} or less, and raise it from there",
            "clip": "Clip gradients to a norm of {usual_norm}, so that the first ones do not dominate",
            **CLIPPED_ALREADY,
            "pre_ln": "In a transformer, normalize before each layer (pre-LN), which makes warmup less important",
        },
        passed="the start was smooth",
        reference="arXiv 1706.02677, arXiv 2002.04745",
    )

    WITHIN = 200  # steps from the start that it checks
    FULL = 0.5  # least share of the highest learning rate so far that the first one had
    RISE = 1.5  # loss over the first one, at four steps of five, within the first `AFTER` steps
    CLEAR = 3.5  # standard deviations of single losses that it must rise by: a first loss may be low by chance
    SHOCK = 20.0  # largest of the first three gradient norms over the median from the tenth step on
    AFTER = 20  # steps before the first norms are compared with those that follow
    LEARNED = 0.5  # share of the first loss below which the run has learned, whatever its first gradients were
    WILD = 10.0  # loss over the first one from which a warmup alone does not help

    def check(self, step: Step) -> Observation | None:
        if step.number > self.WITHIN:
            return None
        rates, losses = step.history["lr"].values, step.history["loss"].values
        if len(losses) < 3 or not rates or rates[0] < self.FULL * max(rates):
            return None
        if step.number < self.AFTER:
            all_losses = np.array([*losses, step.value("loss")])
            now = float(np.sort(all_losses[-5:])[1])  # four of five: two hard batches are no rise
            rose = now > self.RISE * losses[0] > 0 and now - losses[0] > self.CLEAR * _noise(all_losses)
            harm = f"the loss rose from {number(losses[0])} to {number(now)}"
            return self._observe(step, "rose", {"loss": now}, harm, losses[0]) if rose else None
        norms = step.history["grad/norm"].values
        if step.number % 10 or len(norms) < self.AFTER:
            return None
        first, usual = max(norms[:3]), float(np.median(norms[10:]))
        if not first > self.SHOCK * usual > 0:
            return None
        recent = step.losses_since(step.number / 2)
        fell, error = fall(recent)
        if fell > 2 * error:
            return None  # the run has recovered
        loss = float(recent.mean())
        if loss < self.LEARNED * losses[0]:
            return None  # it is flat because there is little left to learn
        ratio = f"{first / usual:,.0f}×"
        harm = f"the first gradients were {ratio} the median of the run, and the loss stays at {number(loss)}"
        return self._observe(step, "shock", {"loss": loss, "norm": first, "usual_norm": usual}, harm, losses[0])

    def _observe(self, step: Step, cause: str, seen: dict[str, Any], harm: str, first_loss: float) -> Observation:
        lr = step.value("lr")
        seen = {**seen, "first_loss": first_loss, "lr": lr, "lr_first": step.history["lr"].values[0]}
        seen |= {"lr_start": lr / 100, "lr_tenth": lr / 10, "warmup": 200}
        # If the loss multiplied, the rate is too high for this model, and would be so after a warmup too.
        wild = max(step.history["loss"].values[: self.AFTER]) > self.WILD * abs(first_loss)
        clips, limit = clipping_fix(step)
        clip = limit or (("clip",) if cause == "shock" else ())
        causes, fixes = (("too_high",), ("lower",)) if wild else ((cause,), ("warmup", *clip))
        return Observation(
            severity="warning",
            seen=seen | clips,
            expected={"lr_first": "near 0"},
            text={"harm": harm},
            since=0,
            causes=causes,
            fixes=fixes,
        )


def _noise(losses: Floats) -> float:
    """Returns the standard deviation of losses around a curve: second differences of noise have six times its square.

    Few losses may lie together by chance: the result is larger for them, about as Student's t, and inf for fewer than
    six, with which no rise is clear.
    """
    few = 1 + 40 / len(losses) ** 2
    return few * float(np.sqrt(np.mean(np.diff(losses, 2) ** 2) / 6)) if len(losses) > 5 else math.inf


@register
@dataclass
class LrTooHigh(Rule):
    """The first steps threw the weights so far that the run has not recovered, loudly or silently."""

    id = "lr_too_high"
    measures_lr = True
    family = "schedule"
    is_symptom = True
    needs = ("lr", "loss", "grad/norm", "update/ratio")
    expects_fall = True
    judges_after = 60
    follows = ("stale_gradients",)
    masks = ("loss_rising", "loss_spike", "loss_plateau", "explosion", "update_spike", "warmup_needed")
    message = Message(
        name="Learning rate too high",
        pattern=(
            "Within the first steps at the full learning rate, the loss rises at least tenfold, the gradient rises "
            "with it, and the weights change by a large part of their norm: critical until the loss has fallen to half "
            "its first value. Or the first steps inflate the weights, the loss stays high, and the gradients of most "
            "tensors carry no signal: a warning."
        ),
        title="The learning rate of {lr} is too high: {harm}",
        causes={
            "too_far": "One step changed the weights by {ratio:%} of their norm and destroyed the initialization",
            "no_signal": (
                "The first steps destroyed the initialization, and the gradients of most tensors carry no signal, with "
                "a median GSNR of {gsnr}: they cancel from step to step, or are far smaller than they were"
            ),
        },
        fixes={
            "lower": "Start again and lower the learning rate from {lr} to about {lr_proposed}",
            "warmup": "If that is too slow, raise it gradually, with a warmup and gradient clipping",
        },
        passed="the first steps did not destroy the initialization",
    )

    WITHIN = 20  # steps from the start within which the loss must multiply
    RISE = 10.0  # loss over the first one, at two steps in a row
    NORM_RISE = 5.0  # largest gradient norm over the first one
    MOVED = 0.05  # largest update, as a share of the weight norm
    BACK = 0.5  # the run has recovered if the median of its last losses is under this share of the first
    SETTLED = 50  # steps from the start within which the weights must have grown
    GROWTH = 2.5  # weight norm over its start, median over matrices; runs that learn stay below 2 or lower the loss
    THROWN = 1.1  # highest of the first losses over the first: a run that was not thrown may be at its lowest
    HIGH = 0.5  # share of the first loss above which such a run has not learned
    SILENT = 0.8  # median GSNR of tensors, from Adam's moments, over the lowest it can be: no signal from here on
    SIGNAL = 0.7  # the same, under which there is a signal again
    NO_GAIN = 0.9  # share of the first loss above which a run has learned nothing, if the optimizer has no moments

    first: dict[str, float] = field(default_factory=dict, init=False)
    """Loss, norm and learning rate of step 0; empty if the run was not seen from its start."""
    peak: dict[str, float] = field(default_factory=dict, init=False)
    is_lost: bool = field(default=False, init=False)
    start: Floats = field(default_factory=empty, init=False)
    """Norm of every tensor before the first step; 0 for those whose growth says nothing."""
    grown: float = field(default=0.0, init=False)
    """The largest growth so far."""
    signal: float = field(default=math.nan, init=False)
    """GSNR of the last reading, over the lowest it can be."""
    gsnr: float = field(default=math.nan, init=False)
    """The same as it was read."""
    stuck_at: float = field(default=math.nan, init=False)
    """The loss when the run was found to have learned nothing; NaN if it was not."""
    found: int = field(default=0, init=False)
    """And the step."""

    def check(self, step: Step) -> Observation | None:
        if step.number == 0:
            self.first = self._now(step) | {"lr": step.value("lr")}
        if not self.first or not self.first["loss"] > 0:
            return None
        if step.number <= self.WITHIN:
            now = self._now(step)
            known = {name: value for name, value in now.items() if math.isfinite(value)}
            self.peak = {name: max(known.get(name, 0.0), self.peak.get(name, 0.0)) for name in now}
            self.is_lost |= self._multiplied(step)
        if self.is_lost and step.number > self.WITHIN and self._recent_loss(step) < self.BACK * self.first["loss"]:
            self.is_lost = False
        if step.is_full:
            self._follow(step)
        if self.is_lost:
            return self._observe_multiplied(step)
        return None if math.isnan(self.stuck_at) else self._observe_stuck(step, self._recent_loss(step))

    def _now(self, step: Step) -> dict[str, float]:
        return {"loss": step.value("loss"), "norm": step.value("grad/norm"), "ratio": step.value("update/ratio")}

    def _recent_loss(self, step: Step) -> float:
        return step.history["loss"].median(self.WITHIN)

    def _multiplied(self, step: Step) -> bool:
        before, first = step.history["loss"].last(1), self.first
        if not len(before) or not first["lr"] >= 0.5 * step.value("lr"):
            return False
        rose = min(step.value("loss"), float(before[0])) > self.RISE * first["loss"]
        return rose and self.peak["norm"] > self.NORM_RISE * first["norm"] and self.peak["ratio"] > self.MOVED

    def _observe_multiplied(self, step: Step) -> Observation:
        lr, first, peak = self.first["lr"], self.first, self.peak
        steps = min(step.number, self.WITHIN)
        seen = {"loss": peak["loss"], "first_loss": first["loss"], "norm": peak["norm"], "lr": lr}
        seen |= {"ratio": peak["ratio"], "first_norm": first["norm"], "steps": steps}
        seen["lr_proposed"] = lr * min(0.003 / peak["ratio"], 0.1)
        harm = (
            f"in the first steps the loss rose from {number(first['loss'])} to {number(peak['loss'])} and the "
            f"gradient norm from {number(first['norm'])} to {number(peak['norm'])}"
        )
        return Observation(
            severity="critical",
            seen=seen,
            expected={"loss": f"under {first['loss']:.3g}", "ratio": "about 0.001"},
            text={"harm": harm},
            since=0,
            causes=("too_far",),
            fixes=("lower",),
            # At the end of the first steps the texts are renewed with the highest numbers.
            active=step.number != self.WITHIN,
        )

    # -- silently ----------------------------------------------------------------------------------------------------

    def _follow(self, step: Step) -> None:
        """Measure how far the weights have grown, and whether anything has been learned since."""
        weights, ratios = step.tensors("weight/norm"), step.tensors("update/ratio")
        if step.number == 0 and weights is not None and ratios is not None:
            self.start = _before_first_step(step, np.asarray(weights), np.asarray(ratios))
        elif step.number <= self.SETTLED and weights is not None and len(self.start):
            chosen = np.flatnonzero(self.start)
            grown = finite_median(np.asarray(weights)[chosen] / self.start[chosen])
            self.grown = max(self.grown, grown) if math.isfinite(grown) else self.grown
        carried = step.value("grad/carried") == 1  # sums that were never zeroed make steps long at any rate
        if step.number < self.judges_after or self.grown < self.GROWTH or carried:
            return
        # Even if Adam's moments hold a huge gradient: throwing the weights with one is the very pattern.
        adam, betas = step.reading("adam"), step.info.betas
        if betas and adam is not None and "gsnr" in adam.tensors:
            # What is left of the estimate if the average is far smaller than noise alone would make it.
            lowest = (1 - betas[0]) / (1 + betas[0])
            self.gsnr = finite_median(np.asarray(adam.tensors["gsnr"]))
            self.signal = -self.gsnr / lowest if lowest > 0 else math.nan
        self._judge(step, self._recent_loss(step))

    def _judge(self, step: Step, loss: float) -> None:
        first = self.first["loss"]
        if math.isnan(self.stuck_at):
            if self.peak["loss"] < self.THROWN * first:
                return
            high = self.NO_GAIN if math.isnan(self.signal) else self.HIGH
            if loss > high * first and not self.signal < self.SILENT:
                self.stuck_at, self.found = loss, step.number
            return
        learns = loss < self.NO_GAIN * self.stuck_at and not self.signal > self.SIGNAL
        if loss < self.HIGH * first or learns:
            self.stuck_at = math.nan

    def _observe_stuck(self, step: Step, loss: float) -> Observation:
        rates = [rate for rate in (*step.history["lr"].values, step.value("lr")) if math.isfinite(rate)]
        lr, ratio, first = max(rates, default=math.nan), self.first["ratio"], self.first["loss"]
        proposed = lr * min(0.003 / max(self.peak["ratio"], 1e-3), 0.1)
        if step.info.betas and 0 < ratio < 1:
            # Adam's first step is as long as its learning rate, whatever the gradient: a seventieth is typical.
            proposed = min(self.first["lr"] * 0.015 * math.sqrt(1 - ratio**2) / ratio, lr / 3)
        harm = (
            f"the first {self.SETTLED} steps multiplied the weights by {number(self.grown)}, and after "
            f"{self.found:,} steps the loss is still {number(self.stuck_at)} (it started at {number(first)})"
        )
        seen: dict[str, Any] = {"loss": loss, "growth": self.grown, "lr": lr, "lr_proposed": proposed}
        seen |= {"first_loss": first, "ratio": self.peak["ratio"]}
        seen |= {} if math.isnan(self.gsnr) else {"gsnr": self.gsnr}
        return Observation(
            severity="warning",
            seen=seen,
            expected={"growth": f"under {self.GROWTH:g}"},
            text={"harm": harm},
            since=0,
            causes=("too_far",) if math.isnan(self.signal) else ("no_signal",),
            fixes=("lower",),
        )


def _before_first_step(step: Step, weights: Floats, ratios: Floats) -> Floats:
    """Returns the norm of every matrix before the first step, if it had a size then; 0 for all others.

    A bias or a gain has no size of its own, and weights that start at zero grow without limit. One matrix alone has no
    depth to pass a signal through: it may grow.
    """
    shapes = [info.shape if info.numel >= 16 else () for info in step.layout.tensors[: len(weights)]]
    least = np.array([0.05 * math.sqrt(shape[0]) if len(shape) >= 2 else math.inf for shape in shapes])
    least[list(step.frozen)] = math.inf
    # An update is most often at a right angle to the weights.
    before = weights * np.sqrt(1 - np.minimum(ratios, 1.0) ** 2)
    known = np.where(np.isfinite(before) & (before > least), before, 0.0)
    return known if np.count_nonzero(known) > 1 else np.zeros(0)


@register
@dataclass
class ScheduleOver(Rule):
    """The schedule has taken the learning rate to nothing, and the run continues for as long again."""

    id = "schedule_over"
    family = "schedule"
    needs = ("lr", "loss")
    judges_after = 50
    follows = ("stale_gradients", "lr_too_high")
    masks = ("decay_due", "loss_plateau")
    message = Message(
        name="Schedule over too early",
        pattern=(
            "For more than half of all steps, the learning rate is under 0.5% of its highest: a note, or a warning if "
            "much of the loss is left."
        ),
        title="The learning rate fell from {peak_lr} to under {low} by step {at}, and is {lr_now} at step {steps}",
        causes={
            "decayed": "The schedule ends long before the run: scheduler.step() may count epochs but run per batch"
        },
        fixes={
            "epochs": "Call scheduler.step() once per epoch if the schedule counts epochs, or let it end with the run"
        },
        changes={"epochs": {"scheduler_step": "epoch"}},
        snippets={"epochs": "for epoch in range(epochs):\n    ...  # all batches\n    scheduler.step()"},
        is_certain=True,
        passed="the schedule lasts as long as the run",
    )

    OVER = 5e-3  # share of the highest learning rate; a cosine is under it in the last 5% of its steps
    FEWEST = 50  # steps
    LEFT = 0.5  # share of the loss of a trivial prediction

    highest: float = field(default=0.0, init=False)
    over_since: int = field(default=-1, init=False)
    low_since: int = field(default=-1, init=False)
    """The first step under a tenth of the highest learning rate."""

    def check(self, step: Step) -> Observation | None:
        lr = step.value("lr")
        self.highest = max(self.highest, lr) if lr == lr else self.highest
        self.low_since = -1 if lr > 0.1 * self.highest else step.number if self.low_since < 0 else self.low_since
        self.over_since = -1 if lr > self.OVER * self.highest else self.over_since
        if not lr <= self.OVER * self.highest or not self.highest > 0:
            return None
        self.over_since = step.number if self.over_since < 0 else self.over_since
        if step.number < max(2 * self.over_since, self.over_since + self.FEWEST):
            return None
        seen = {"peak_lr": self.highest, "low": self.OVER * self.highest, "at": self.over_since, "lr_now": lr}
        return Observation(
            severity="warning" if step.loss_left > self.LEFT else "info",
            seen=seen | {"steps": step.number},
            since=self.low_since,
        )


@register
@dataclass
class DecayDue(Rule):
    """The signal has faded and the loss has leveled out, while the learning rate has not changed."""

    id = "decay_due"
    family = "schedule"
    is_symptom = True
    needs = ("lr", "loss", "gsnr")
    needs_known = "gsnr"
    reads = "full"
    expects_fall = True
    judges_after = 300
    closes_after = 500
    follows = ("stale_gradients", "lr_too_high")
    message = Message(
        name="Decay due",
        pattern="The GSNR has fallen far below its best and the loss has leveled out, at a constant learning rate.",
        title=(
            "The signal has faded and the loss is flat at {loss}: the GSNR is at most {high}, down from {best}, and "
            "the learning rate is still {lr}"
        ),
        causes={
            "too_long": "Steps this large only move the weights around in the noise; smaller ones average it out",
            "learned": "The model has learned what this data and this model size allow",
        },
        fixes={
            "decay": "Lower the learning rate from {lr} to about {lr_proposed}, or decay it from here to the end",
            "batch": "Or raise the batch above {batch_size}, which reduces noise just as a decay does",
        },
        passed="the learning rate suits the current signal",
        reference="arXiv 1711.00489",
    )

    AFTER = 200  # steps before it reports anything
    FACTOR = 4.0  # how far the GSNR has fallen, by the intervals
    CONSTANT = 0.05  # relative change of the learning rate over the second half of the run so far
    IN_A_ROW = 3  # readings

    best: dict[str, float] = field(default_factory=dict, init=False)
    """The highest lower end so far, and where."""
    streak: Streak = field(default_factory=Streak, init=False)

    def check(self, step: Step) -> Observation | None:
        average = step.average
        if average is None or average.count < 5 or math.isnan(average.low):
            return None
        self._note_best(average)
        rates = step.history["lr"].since(step.number / 2)[1]
        losses = step.losses_since(step.number / 2)
        if step.number < self.AFTER or len(rates) < 50 or len(losses) < 50:
            return None
        steady = float(rates.max()) <= (1 + self.CONSTANT) * float(rates.min())
        fell, error = fall(losses)
        level = fell < max(2 * error, 0.01 * abs(float(losses.mean())))
        had_signal = self.best["low"] > 0  # an estimate below zero is none, and cannot fade
        faded = had_signal and self.best["step"] < average.begins and average.most * self.FACTOR < self.best["low"]
        self.streak.add(steady and level and faded, step.number, step.history.averages.begins)
        if self.streak.count < self.IN_A_ROW:
            return None
        lr = step.value("lr")
        seen = dict[str, Any](gsnr=average.value, high=average.most, best=self.best["low"], lr=lr)
        seen |= {"at": int(self.best["step"]), "loss": float(losses.mean()), "lr_proposed": lr / 3}
        seen |= {"steps": len(losses), "batch_size": average.batch_size}
        return Observation(severity="info", seen=seen, expected={"gsnr": self.best["low"]}, since=self.streak.since)

    def _note_best(self, average: Average) -> None:
        if self.best and not same_size(self.best["batch_size"], average.batch_size):
            self.best = {}
        if not self.best or average.low > self.best["low"]:
            self.best = {"low": average.low, "step": float(average.step), "batch_size": average.batch_size}
