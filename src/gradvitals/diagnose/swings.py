"""Rules about gradients, updates and losses that swing from step to step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.baseline import MEAN_ABS_TO_STD
from gradvitals.diagnose.clipping import clips_already
from gradvitals.diagnose.gradients import usual_limit
from gradvitals.diagnose.pushes import rate_rose
from gradvitals.diagnose.rule import Rule, Sign, register
from gradvitals.diagnose.step import NAMED, Step

Floats = NDArray[np.float64]

MEDIAN_ABS_TO_STD = 1.4826
"""Standard deviation over median absolute deviation, of a normal distribution."""


def step_spread(values: Floats) -> float:
    """Standard deviation of a series around a level that may move, from its changes; a few outliers do not count.

    >>> round(step_spread(np.array([1.0, 2.0, 3.0, 4.0])), 3), step_spread(np.ones(4))
    (1.048, 0.0)
    """
    changes = np.abs(np.diff(values))
    return MEDIAN_ABS_TO_STD * float(np.median(changes)) / math.sqrt(2) if len(changes) else math.nan


@register
@dataclass
class Oscillation(Rule):
    """Updates that turn round from step to step, or norms and losses that swing up and down."""

    id = "oscillation"
    judges_after = 60
    needs = ("grad/norm", "loss")

    window: int = 40
    """Steps looked back on."""
    every: int = 10
    """Steps from one look to the next."""
    turn: float = 0.5
    """The mean cosine between one update and the next, below what momentum alone gives, from which they turn round."""
    swing: float = 0.8
    """Spread of the norm from one step to the next, in units of log, from which it swings."""
    loss_swing: float = 0.12
    """The same of the loss, as a share of itself."""
    high: float = 0.6
    """Swings count while the loss is above this share of what it was at the start: a small one swings by nature."""
    patience: int = 10
    """Steps in a row."""

    lasted: int = field(default=0, init=False)
    first_losses: list[float] = field(default_factory=list, init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires while it goes on."""
        loss = step.value("loss")
        if len(self.first_losses) < 10 and math.isfinite(loss):
            self.first_losses.append(loss)
        if step.number % self.every:
            return None
        losses, norms = step.history["loss"].last(self.window), step.history["grad/norm"].last(self.window)
        if len(losses) < self.window or step.history.steps_seen < self.window + 10:
            return None
        cosines = step.history["update/cosine"].last(self.window)
        cosine = float(cosines.mean()) if len(cosines) == self.window else math.nan
        # Where gradients say nothing about each other, momentum still gives updates this cosine.
        facts = step.facts
        expected = facts.betas[0] if facts.betas else facts.momentum or 0.0
        level = float(np.median(losses))
        is_high = level > self.high * float(np.mean(self.first_losses)) > 0
        swing = step_spread(np.log(norms[norms > 0]))
        loss_swing = step_spread(losses) / level
        turning = cosine < expected - self.turn
        carried = step.value("grad/carried") == 1  # swings are then of sums that were never zeroed, not of the batch
        swinging = is_high and not carried and (swing > self.swing or loss_swing > self.loss_swing)
        self.lasted = self.lasted + self.every if turning or swinging else 0
        if self.lasted < self.patience:
            return None
        seen = self._seen(step) | {"cosine": cosine, "swing": swing, "loss_swing": loss_swing}
        seen["what"] = f"the loss, as observed, scatters by {100 * loss_swing:.2g} % of its mean"
        if turning:
            seen["what"] = _turning(cosine, expected)
        elif swing > self.swing:
            seen["what"] = f"the gradient norm swings by a factor of {math.exp(swing):.2g} from one step to the next"
        cause = self._cause(step, seen, turning)
        return Sign(
            severity="warning" if turning else "info",
            seen=seen,
            expected={
                "cosine": f"over {expected - self.turn:.2g}",
                "swing": f"under {self.swing:g}",
                "loss_swing": f"under {self.loss_swing:g}",
            },
            since=step.ago(self.lasted // self.every - 1, self.every) - self.every + 1,
            causes=(cause,),
            cures=(cause,),
        )

    def _seen(self, step: Step) -> dict[str, Any]:
        noise = step.history["microbatch:noise_scale_low"].last(1)
        noise = noise if len(noise) else step.history["ranks:noise_scale_low"].last(1)
        size, lr = step.general.batch_size or math.nan, step.value("lr")
        scale = float(noise[0]) if len(noise) else math.nan
        proposed = scale if scale > 2 * size else 8 * size
        seen = {"lr": lr, "lr_proposed": lr / 2, "batch": size, "batch_proposed": proposed}
        seen |= {"noise_scale": scale} if scale == scale else {}
        known = f"a noise scale of {scale:.3g} samples or more" if scale == scale else "the spread of its samples"
        return {**seen, "noise": known}

    def _cause(self, step: Step, seen: dict[str, Any], turning: bool) -> str:
        gsnr = step.history["adam:gsnr"].last(1)
        if rate_rose(step, 100) > 1.5:
            return "edge_of_stability"
        if math.isfinite(seen.get("noise_scale", math.nan) * seen["batch"]):
            return "batch_too_small" if seen["noise_scale"] > seen["batch"] else "edge_of_stability"
        if turning or not len(gsnr):
            return "edge_of_stability" if turning else "batch_too_small"
        return "batch_too_small" if gsnr[0] < 0.2 else "edge_of_stability"


def _turning(cosine: float, expected: float) -> str:
    """What is said of updates that turn: round, or by more than momentum leaves room for."""
    if cosine < 0:
        return f"updates turn round: the cosine of one and the next is {cosine:.2g} on average"
    return (
        f"updates turn far from one step to the next: their cosine is {cosine:.2g} on average, where momentum alone "
        f"gives {expected:.2g}"
    )


@register
@dataclass
class UnstableNorm(Rule):
    """The norm of a tensor varies by more than its own size, step after step."""

    id = "unstable_norm"
    needs = ("tensors:grad/norm",)
    judges_after = 60
    closes_after = 200

    cv: float = 1.0
    """Standard deviation of the norm over its mean, from one step to the next: a norm that falls is no sign."""
    window: int = 50
    """Steps the moving average reaches back over."""
    every: int = 10
    """Steps from one look to the next."""
    patience: int = 20
    """Steps in a row."""
    high: float = 0.1
    """Told while the loss is above this share of what it was at the start: where it is small, norms vary by nature."""

    first_losses: list[float] = field(default_factory=list, init=False)
    last: Floats = field(default_factory=lambda: np.zeros(0), init=False)
    """The logarithm of the last norm of each tensor; nan where it had none."""
    change: Floats = field(default_factory=lambda: np.zeros(0), init=False)
    """Moving average of how far it changes."""
    count: Floats = field(default_factory=lambda: np.zeros(0), init=False)
    high_for: Floats = field(default_factory=lambda: np.zeros(0), init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires while a tensor's norm varies so much."""
        norms, loss = step.tensors("grad/norm"), step.value("loss")
        if len(self.first_losses) < 10 and math.isfinite(loss):
            self.first_losses.append(loss)
        if norms is None:
            return None
        more = len(norms) - len(self.last)
        if more > 0:
            self.last = np.append(self.last, np.full(more, np.nan))
            self.change, self.count, self.high_for = (
                np.append(kept, np.zeros(more)) for kept in (self.change, self.count, self.high_for)
            )
        logs = np.log(np.where((norms > 0) & (norms < math.inf), norms, np.nan))
        change = np.abs(logs - self.last)
        self.last = np.where(np.isnan(logs), self.last, logs)
        known = np.isfinite(change)
        self.count += known
        # A spike is one change up and one down: it must not count for many.
        least = np.minimum(change, 3 * self.change + 1)
        rate = 1 / np.minimum(np.maximum(self.count, 1), self.window)
        self.change = np.where(known, self.change + rate * (least - self.change), self.change)
        if step.number % self.every:
            return None
        spread = MEAN_ABS_TO_STD / math.sqrt(2) * self.change
        variation = np.sqrt(np.expm1(np.minimum(spread**2, 50.0)))
        unstable = (variation > self.cv) & (self.count >= self.window) & ~step.negligible
        self.high_for = np.where(unstable, self.high_for + self.every, 0.0)
        chosen = np.flatnonzero(self.high_for >= self.patience)
        if not len(chosen):
            return None
        recent = step.history["loss"].last(20)
        if len(recent) and float(np.median(recent)) < self.high * float(np.mean(self.first_losses)):
            return None
        chosen = chosen[np.argsort(-variation[chosen])]
        seen = {"cv": float(variation[chosen[0]]), "tensors": len(chosen), "of": len(norms), "lr": step.value("lr")}
        clips, cures = clips_already(step)
        return Sign(
            severity="info",
            seen=seen | {"max_norm": usual_limit(step)} | clips,
            cures=cures,
            expected={"cv": f"under {self.cv:g}"},
            tensors=step.names(chosen[:NAMED]),
            since=step.ago(int(self.high_for[chosen[0]]) // self.every - 1, self.every) - self.every + 1,
        )
