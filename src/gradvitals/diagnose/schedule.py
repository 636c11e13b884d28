"""Rules about the learning rate's schedule: a warmup that is missing, a decay that is due."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradvitals.diagnose.averages import Average, alike
from gradvitals.diagnose.loss import fall, losses_since
from gradvitals.diagnose.rule import Rule, Sign, register
from gradvitals.diagnose.step import Step
from gradvitals.types import FloatArray


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
        causes, cures = (("too_high",), ("lower",)) if wild else ((cause,), ("warmup",))
        return Sign(severity="warning", seen=told, expected={"lr_first": "near 0"}, since=0, causes=causes, cures=cures)


@register
@dataclass
class LrTooHigh(Rule):
    """The first steps, at the full learning rate, threw the weights so far that the run has not come back."""

    id = "lr_too_high"
    expects_fall = True
    needs = ("lr", "loss", "grad/norm", "update/ratio")

    within: int = 20
    """Steps from the start that it looks at."""
    rise: float = 10.0
    """Loss over the first one, at two steps in a row."""
    norm_rise: float = 5.0
    """Largest gradient norm over the first one."""
    moved: float = 0.05
    """Largest change of the weights in one step, as a share of their size."""
    back: float = 0.9
    """The run has come back when the median of its last losses is under this share of the first."""

    first: dict[str, float] = field(default_factory=dict, init=False)
    """Loss, norm and learning rate of step 0; empty where the run was not seen from its start."""
    peak: dict[str, float] = field(default_factory=dict, init=False)
    is_lost: bool = field(default=False, init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires when the loss multiplies within the first steps, until it is back where it began."""
        now = {"loss": step.value("loss"), "norm": step.value("grad/norm"), "ratio": step.value("update/ratio")}
        if step.number == 0:
            self.first = {**now, "lr": step.value("lr")}
        if not self.first or (step.number > self.within and not self.is_lost):
            return None
        if step.number <= self.within:
            known = {name: value for name, value in now.items() if math.isfinite(value)}
            self.peak = {name: max(known.get(name, 0.0), self.peak.get(name, 0.0)) for name in now}
            self.is_lost |= self._multiplied(step)
        losses = step.history["loss"].last(self.within)
        if not self.is_lost or (step.number > self.within and np.median(losses) < self.back * self.first["loss"]):
            self.is_lost = False
            return None
        return self._sign(step)

    def _multiplied(self, step: Step) -> bool:
        before, first = step.history["loss"].last(1), self.first
        if not len(before) or not first["loss"] > 0 or not first["lr"] >= 0.5 * step.value("lr"):
            return False
        rose = min(step.value("loss"), float(before[0])) > self.rise * first["loss"]
        return rose and self.peak["norm"] > self.norm_rise * first["norm"] and self.peak["ratio"] > self.moved

    def _sign(self, step: Step) -> Sign:
        lr = self.first["lr"]
        seen = {"loss": self.peak["loss"], "first_loss": self.first["loss"], "norm": self.peak["norm"], "lr": lr}
        seen |= {"first_norm": self.first["norm"], "ratio": self.peak["ratio"], "steps": min(step.number, self.within)}
        return Sign(
            severity="critical",
            seen=seen | {"lr_proposed": lr * min(0.003 / self.peak["ratio"], 0.1)},
            expected={"loss": f"under {self.first['loss']:.3g}", "ratio": "about 0.001"},
            since=0,
            # At the end of the first steps the story is told anew, with the highest figures there were.
            active=step.number != self.within,
        )


def _noise(losses: FloatArray) -> float:
    """Standard deviation of losses around a curve: second differences of pure noise have six times its square.

    inf for fewer than six of them: no rise is clear then.
    """
    return float(np.sqrt(np.mean(np.diff(losses, 2) ** 2) / 6)) if len(losses) > 5 else math.inf


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
    seen_for: int = field(default=0, init=False)

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
        faded = self.best["step"] < average.begins and average.high * self.factor < self.best["low"]
        self.seen_for = self.seen_for + 1 if steady and level and faded else 0
        if self.seen_for < self.in_a_row:
            return None
        lr = step.value("lr")
        seen = dict[str, Any](gsnr=average.value, high=average.high, best=self.best["low"], lr=lr)
        seen |= {"at": int(self.best["step"]), "loss": float(losses.mean()), "lr_proposed": lr / 3}
        seen |= {"steps": len(losses), "batch_size": average.batch_size}
        return Sign(severity="info", seen=seen, expected={"gsnr": self.best["low"]}, since=average.begins)

    def _note_best(self, average: Average) -> None:
        if self.best and not alike(self.best["batch_size"], average.batch_size):
            self.best = {}
        if not self.best or average.low > self.best["low"]:
            self.best = {"low": average.low, "step": float(average.step), "batch_size": average.batch_size}
