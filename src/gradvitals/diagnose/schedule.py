"""Rules about the learning rate's schedule: a warmup that is missing, a rate too high, a decay that is due."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.averages import Average, Streak, alike
from gradvitals.diagnose.clipping import clips_already
from gradvitals.diagnose.explain import number
from gradvitals.diagnose.history import median_of
from gradvitals.diagnose.loss import fall, losses_since
from gradvitals.diagnose.rule import Rule, Sign, register
from gradvitals.diagnose.step import Step
from gradvitals.types import FloatArray

Floats = NDArray[np.float64]


@register
@dataclass
class WarmupNeeded(Rule):
    """The learning rate was at its full height from the first step, and the first steps were a shock."""

    id = "warmup_needed"
    expects_fall = True
    judges_after = 30
    needs = ("lr", "loss", "grad/norm")
    closes_after = 200

    within: int = 200
    """Steps from the start that it looks at."""
    full: float = 0.5
    """Share of the highest learning rate so far that the first one had at least."""
    rise: float = 1.5
    """Loss over the first one, as the median of three, within the first `after` steps."""
    clear: float = 3.5
    """Standard deviations of single losses that it has to rise by: a first loss may be low by chance."""
    shock: float = 20.0
    """Largest of the first three gradient norms over the median from the tenth step on."""
    after: int = 20
    """Steps before the first norms are compared with those that follow."""
    learned: float = 0.5
    """Share of the first loss below which the run has learnt, whatever its first gradients were."""
    wild: float = 10.0
    """Loss over the first one from which a warmup alone is not what helps."""

    def look(self, step: Step) -> Sign | None:
        """Fires when the loss rose in the first steps, or when the first gradients were far over all that follow."""
        rates, losses = step.history["lr"].values, step.history["loss"].values
        if step.number > self.within or len(losses) < 3 or not rates or rates[0] < self.full * max(rates):
            return None
        if step.number < self.after:
            all_of_them = np.array([*losses, step.value("loss")])
            now = float(np.median(all_of_them[-3:]))
            rose = now > self.rise * losses[0] > 0 and now - losses[0] > self.clear * _noise(all_of_them)
            seen = {"loss": now, "harm": f"the loss went from {losses[0]:.3g} to {now:.3g}"}
            return self._sign(step, "rose", seen, losses[0]) if rose else None
        norms = step.history["grad/norm"].values
        if step.number % 10 or len(norms) < self.after:
            return None
        first, usual = max(norms[:3]), float(np.median(norms[10:]))
        if not first > self.shock * usual:
            return None
        recent = losses_since(step, step.number / 2)
        fell, error = fall(recent)
        if fell > 2 * error:
            return None  # the run has got over it
        loss = float(recent.mean())
        if loss < self.learned * losses[0]:
            return None  # it stays where it is because there is little left to learn
        harm = f"the first gradients were {first / usual:.0f} times the usual, and the loss stays at {loss:.3g}"
        seen = {"loss": loss, "norm": first, "usual_norm": usual, "harm": harm}
        return self._sign(step, "shock", seen, losses[0])

    def _sign(self, step: Step, cause: str, seen: dict[str, Any], first_loss: float) -> Sign:
        lr = step.value("lr")
        told = {
            **seen,
            "first_loss": first_loss,
            "lr": lr,
            "lr_first": step.history["lr"].values[0],
            "lr_proposed": lr / 100,
            "warmup": 200,
        }
        told["lr_tenth"] = lr / 10
        # Where the loss multiplied, the rate is too high for this model, and would be so at the end of a warmup too.
        wild = max(step.history["loss"].values[: self.after]) > self.wild * abs(first_loss)
        clips, limit = clips_already(step)
        clip = limit or (("clip",) if cause == "shock" else ())
        causes, cures = (("too_high",), ("lower",)) if wild else ((cause,), ("warmup", *clip))
        return Sign(
            severity="warning", seen=told | clips, expected={"lr_first": "near 0"}, since=0, causes=causes, cures=cures
        )


@register
@dataclass
class LrTooHigh(Rule):
    """The first steps threw the weights so far that the run has not come back, loudly or without a sound."""

    id = "lr_too_high"
    expects_fall = True
    judges_after = 60
    needs = ("lr", "loss", "grad/norm", "update/ratio")

    within: int = 20
    """Steps from the start that it looks at for a loss that multiplies."""
    rise: float = 10.0
    """Loss over the first one, at two steps in a row."""
    norm_rise: float = 5.0
    """Largest gradient norm over the first one."""
    moved: float = 0.05
    """Largest change of the weights in one step, as a share of their size."""
    back: float = 0.9
    """The run has come back when the median of its last losses is under this share of the first."""

    settled: int = 50
    """Steps from the start within which weights that were thrown away have grown."""
    growth: float = 2.5
    """Size of the weights over what it was before the first step, the median over matrices. Runs that learn well stay
    below 2 or bring the loss down."""
    thrown: float = 1.1
    """Highest loss of the first steps over the first loss: a run that was not thrown may be at its lowest."""
    high: float = 0.5
    """Share of the first loss above which such a run has not learnt."""
    silent: float = 0.8
    """Median GSNR of tensors, from Adam's averages, as a share of the lowest it can be: from here on, no signal."""
    heard: float = 0.7
    """The same, under which there is a signal again."""
    no_gain: float = 0.9
    """Share of the first loss above which a run has learnt nothing, where the optimizer keeps no such averages."""

    first: dict[str, float] = field(default_factory=dict, init=False)
    """Loss, norm and learning rate of step 0; empty where the run was not seen from its start."""
    peak: dict[str, float] = field(default_factory=dict, init=False)
    is_lost: bool = field(default=False, init=False)
    start: Floats = field(default_factory=lambda: np.zeros(0), init=False)
    """Norm of every tensor before the first step; 0 for those whose growth says nothing."""
    grown: float = field(default=0.0, init=False)
    """The largest growth so far."""
    signal: float = field(default=math.nan, init=False)
    """Of the last reading, as a share of the lowest it can be."""
    gsnr: float = field(default=math.nan, init=False)
    """The same as it was read."""
    stuck_at: float = field(default=math.nan, init=False)
    """The loss when it was found to have learnt nothing; nan where it was not."""
    found: int = field(default=0, init=False)
    """And the step."""

    def look(self, step: Step) -> Sign | None:
        """Fires when the loss multiplies within the first steps, or when the weights grew and nothing is learnt."""
        now = {"loss": step.value("loss"), "norm": step.value("grad/norm"), "ratio": step.value("update/ratio")}
        if step.number == 0:
            self.first = {**now, "lr": step.value("lr")}
        if not self.first or not self.first["loss"] > 0:
            return None
        if step.number <= self.within:
            known = {name: value for name, value in now.items() if math.isfinite(value)}
            self.peak = {name: max(known.get(name, 0.0), self.peak.get(name, 0.0)) for name in now}
            self.is_lost |= self._multiplied(step)
        losses = step.history["loss"].last(self.within)
        if self.is_lost and step.number > self.within and np.median(losses) < self.back * self.first["loss"]:
            self.is_lost = False
        if step.is_full:
            self._follow(step)
        if self.is_lost:
            return self._multiplied_sign(step)
        return None if math.isnan(self.stuck_at) else self._stuck_sign(step, float(np.median(losses)))

    def _multiplied(self, step: Step) -> bool:
        before, first = step.history["loss"].last(1), self.first
        if not len(before) or not first["lr"] >= 0.5 * step.value("lr"):
            return False
        rose = min(step.value("loss"), float(before[0])) > self.rise * first["loss"]
        return rose and self.peak["norm"] > self.norm_rise * first["norm"] and self.peak["ratio"] > self.moved

    def _multiplied_sign(self, step: Step) -> Sign:
        lr, first, peak = self.first["lr"], self.first, self.peak
        steps = min(step.number, self.within)
        seen = {
            "loss": peak["loss"],
            "first_loss": first["loss"],
            "norm": peak["norm"],
            "lr": lr,
            "ratio": peak["ratio"],
        }
        seen |= {"first_norm": first["norm"], "steps": steps, "lr_proposed": lr * min(0.003 / peak["ratio"], 0.1)}
        harm = (
            f"within {steps} steps the loss went from {number(first['loss'])} to {number(peak['loss'])} and the "
            f"gradient norm from {number(first['norm'])} to {number(peak['norm'])}"
        )
        return Sign(
            severity="critical",
            seen=seen | {"harm": harm},
            expected={"loss": f"under {first['loss']:.3g}", "ratio": "about 0.001"},
            since=0,
            causes=("too_far",),
            cures=("lower",),
            # At the end of the first steps the story is told anew, with the highest figures there were.
            active=step.number != self.within,
        )

    # -- without a sound ----------------------------------------------------------------------------------------

    def _follow(self, step: Step) -> None:
        """See how far the weights have grown, and whether anything is learnt since."""
        weights, ratios = step.tensors("weight/norm"), step.tensors("update/ratio")
        if step.number == 0 and weights is not None and ratios is not None:
            self.start = _before(step, np.asarray(weights), np.asarray(ratios))
        elif step.number <= self.settled and weights is not None and len(self.start):
            chosen = np.flatnonzero(self.start)
            grown = median_of(np.asarray(weights)[chosen] / self.start[chosen])
            self.grown = max(self.grown, grown) if math.isfinite(grown) else self.grown
        carried = step.value("grad/carried") == 1  # sums that were never zeroed make steps long at any rate
        if step.number < self.judges_after or self.grown < self.growth or carried:
            return
        # Also where a huge gradient is in it: to have thrown the weights with one is the very pattern.
        adam, betas = step.reading("adam"), step.facts.betas
        if betas and adam is not None and "gsnr" in adam.tensors:
            # What is left of the estimate where the average is far smaller than noise alone would have it.
            lowest = (1 - betas[0]) / (1 + betas[0])
            self.gsnr = median_of(np.asarray(adam.tensors["gsnr"]))
            self.signal = -self.gsnr / lowest if lowest > 0 else math.nan
        self._judge(step, float(np.median(step.history["loss"].last(self.within))))

    def _judge(self, step: Step, loss: float) -> None:
        first = self.first["loss"]
        if math.isnan(self.stuck_at):
            if self.peak["loss"] < self.thrown * first:
                return
            high = self.no_gain if math.isnan(self.signal) else self.high
            if loss > high * first and not self.signal < self.silent:
                self.stuck_at, self.found = loss, step.number
            return
        learns = loss < self.no_gain * self.stuck_at and not self.signal > self.heard
        if loss < self.high * first or learns:
            self.stuck_at = math.nan

    def _stuck_sign(self, step: Step, loss: float) -> Sign:
        rates = [rate for rate in (*step.history["lr"].values, step.value("lr")) if math.isfinite(rate)]
        lr, ratio, first = max(rates, default=math.nan), self.first["ratio"], self.first["loss"]
        proposed = lr * min(0.003 / max(self.peak["ratio"], 1e-3), 0.1)
        if step.facts.betas and 0 < ratio < 1:
            # The first step of Adam is as long as its learning rate, whatever the gradient: a seventieth is usual.
            proposed = min(self.first["lr"] * 0.015 * math.sqrt(1 - ratio**2) / ratio, lr / 3)
        harm = (
            f"the first {self.settled} steps made the weights {number(self.grown)} times as large as they began, and "
            f"after {self.found} the loss is still {number(self.stuck_at)}, where it began with {number(first)}"
        )
        seen: dict[str, Any] = {"loss": loss, "growth": self.grown, "lr": lr, "lr_proposed": proposed, "harm": harm}
        seen |= {"first_loss": first, "ratio": self.peak["ratio"]}
        seen |= {} if math.isnan(self.gsnr) else {"gsnr": self.gsnr}
        return Sign(
            severity="warning",
            seen=seen,
            expected={"growth": f"under {self.growth:g}"},
            since=0,
            causes=("too_far",) if math.isnan(self.signal) else ("no_signal",),
            cures=("lower",),
        )


def _before(step: Step, weights: Floats, ratios: Floats) -> Floats:
    """The norm of every matrix before the first step, of those that had a size then; 0 for all others.

    A bias or a gain has no size of its own, and weights that begin at zero grow without end. One matrix alone has no
    depth to pass a signal through: it may grow.
    """
    shapes = [info.shape if info.numel >= 16 else () for info in step.layout.tensors[: len(weights)]]
    least = np.array([0.05 * math.sqrt(shape[0]) if len(shape) >= 2 else math.inf for shape in shapes])
    least[list(step.frozen)] = math.inf
    # What a step adds is most often at a right angle to what there was.
    before = weights * np.sqrt(1 - np.minimum(ratios, 1.0) ** 2)
    known = np.where(np.isfinite(before) & (before > least), before, 0.0)
    return known if np.count_nonzero(known) > 1 else np.zeros(0)


def _noise(losses: FloatArray) -> float:
    """Standard deviation of losses around a curve: second differences of pure noise have six times its square.

    The fewer there are, the likelier they lie together by chance: it is taken for larger then, about as Student's t
    would have it, and inf for fewer than six of them, with which no rise is clear.
    """
    few = 1 + 40 / len(losses) ** 2
    return few * float(np.sqrt(np.mean(np.diff(losses, 2) ** 2) / 6)) if len(losses) > 5 else math.inf


@register
@dataclass
class DecayDue(Rule):
    """The signal has faded and the loss has levelled out, while the learning rate is still what it was."""

    id = "decay_due"
    expects_fall = True
    judges_after = 300
    every_step = False
    needs = ("lr", "loss", "gsnr")
    closes_after = 500

    after: int = 200
    """Steps before it says anything."""
    factor: float = 4.0
    """How far the GSNR has fallen, by the intervals."""
    constant: float = 0.05
    """Share by which the learning rate may differ over the second half of the run so far."""
    in_a_row: int = 3
    """Readings at which it must be so."""

    best: dict[str, float] = field(default_factory=dict, init=False)
    """The highest lower end so far, and where."""
    streak: Streak = field(default_factory=Streak, init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires at readings where all three come together."""
        average = step.average
        if average is None or average.count < 5 or math.isnan(average.low):
            return None
        self._note_best(average)
        rates = step.history["lr"].since(step.number / 2)[1]
        losses = losses_since(step, step.number / 2)
        if step.number < self.after or len(rates) < 50 or len(losses) < 50:
            return None
        steady = float(rates.max()) <= (1 + self.constant) * float(rates.min())
        fell, error = fall(losses)
        level = fell < max(2 * error, 0.01 * abs(float(losses.mean())))
        had_signal = self.best["low"] > 0  # an estimate below zero is none, and cannot fade
        faded = had_signal and self.best["step"] < average.begins and average.most * self.factor < self.best["low"]
        self.streak.see(steady and level and faded, step.number, step.history.averages.begins)
        if self.streak.count < self.in_a_row:
            return None
        lr = step.value("lr")
        seen = dict[str, Any](gsnr=average.value, high=average.most, best=self.best["low"], lr=lr)
        seen |= {"at": int(self.best["step"]), "loss": float(losses.mean()), "lr_proposed": lr / 3}
        seen |= {"steps": len(losses), "batch_size": average.batch_size}
        return Sign(severity="info", seen=seen, expected={"gsnr": self.best["low"]}, since=self.streak.since)

    def _note_best(self, average: Average) -> None:
        if self.best and not alike(self.best["batch_size"], average.batch_size):
            self.best = {}
        if not self.best or average.low > self.best["low"]:
            self.best = {"low": average.low, "step": float(average.step), "batch_size": average.batch_size}
