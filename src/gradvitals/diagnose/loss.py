"""Rules that look at the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.baseline import FewBaselines
from gradvitals.diagnose.history import median
from gradvitals.diagnose.pushes import pushed_by, rate_rose, single_spike
from gradvitals.diagnose.rule import Rule, Sign, register
from gradvitals.diagnose.step import Step
from gradvitals.types import Severity

Floats = NDArray[np.float64]

START = 10
"""Losses whose mean is where a run began."""


def losses_since(step: Step, begin: float) -> Floats:
    """The losses from a step up to now; one far from the others counts as at the edge of them."""
    if begin not in step.losses:
        now = step.value("loss")
        losses = np.append(step.history["loss"].since(begin)[1], now if math.isfinite(now) else [])
        if len(losses):
            middle = median(losses)
            reach = 6 * median(np.abs(losses - middle))
            losses = np.minimum(np.maximum(losses, middle - reach), middle + reach)
        step.losses[begin] = losses
    return step.losses[begin]


def fall(values: Floats) -> tuple[float, float]:
    """How far a series fell from its begin to its end along the straight line that fits it best, and the error of that.

    >>> fell, error = fall(np.array([3.0, 2.0, 1.0]))
    >>> round(fell, 3), round(error, 3)
    (2.0, 0.0)
    """
    count = len(values)
    if count < 3:
        return math.nan, math.nan
    time = np.arange(count) - (count - 1) / 2
    scale = float((time**2).sum())
    slope = float((time * values).sum()) / scale
    rest = values - values.mean() - slope * time
    error = math.sqrt(float((rest**2).sum()) / (count - 2) / scale)
    return -slope * (count - 1), error * (count - 1)


@register
@dataclass
class LossNonfinite(Rule):
    """The loss is NaN or infinite."""

    id = "loss_nonfinite"
    needs = ("loss",)

    grown: float = 10.0
    """Times its usual size that the gradient was just before, for the run to have diverged."""

    last_loss: float = field(default=math.nan, init=False)
    largest: float = field(default=0.0, init=False)
    """Of the last norms over what was usual."""
    broken: int = field(default=-1, init=False)
    """The step that left weights which are not finite; -1 for none."""

    def look(self, step: Step) -> Sign | None:
        """Fires at every loss that is not finite."""
        loss = step.general.values.get("loss")
        if loss is not None and not math.isfinite(loss):
            return self._sign(step, loss)
        if loss is not None:
            self.last_loss = loss
        if step.norm_judged[0] == step.norm_judged[0]:
            self.largest = max(step.norm_judged[0], 0.8 * self.largest)
        # A step that is taken with a gradient that is not finite leaves weights that are not.
        taken = step.value("grad/nonfinite") > 0 and step.was_made
        if self.broken < 0 and (taken or not math.isfinite(step.general.values.get("weight/norm", 0.0))):
            self.broken = step.number
        return None

    def _sign(self, step: Step, loss: float) -> Sign:
        cause = "forward"
        if self.broken >= 0:
            cause = "weights"
        elif self.largest > self.grown:
            cause = "diverged"
        lr = step.value("lr")
        seen = {"loss": loss, "last_loss": self.last_loss, "broken": self.broken if self.broken >= 0 else step.number}
        seen |= {"ratio": self.largest, "lr": lr, "lr_proposed": lr / 3, "at": step.number}
        cures = (cause,) if cause != "forward" else ("check_batch" if step.was_made else "left_out",)
        causes = ("earlier", cause) if step.unread and cures == ("check_batch",) else (cause,)
        cures = ("earlier",) if "earlier" in causes else cures
        return Sign(severity="critical", seen=seen, expected={"loss": "a finite number"}, causes=causes, cures=cures)


@register
@dataclass
class LossSpike(Rule):
    """One loss far above those before it."""

    id = "loss_spike"
    expects_fall = True
    needs = ("loss",)

    z: float = 7.0
    """Standard deviations over the usual loss, both of the loss and of its logarithm: losses have long tails."""
    rise: float = 0.1
    """A spike is at least this share of the loss that the run began with."""
    first_steps: int = 20
    """Losses before one can be unusual."""

    first_losses: list[float] = field(default_factory=list, init=False)
    usual: FewBaselines = field(default_factory=FewBaselines, init=False)
    """Of the exponential of the loss in units of the first, as a Baseline takes logarithms; and of the loss."""

    def look(self, step: Step) -> Sign | None:
        """Fires at every loss that is unusual for this run."""
        loss = step.value("loss")
        if not math.isfinite(loss):
            return None
        if len(self.first_losses) < START:
            self.first_losses.append(loss)
        unit = float(np.mean(np.abs(self.first_losses))) or 1.0
        both = [math.exp(max(-300.0, min(300.0, loss / unit))), loss]
        (ratio, _), (z, log_z) = self.usual.judge(both)
        usual = unit * float(self.usual.level[0])
        known = self.usual.count[0] >= self.first_steps
        outlier = known and z > self.z and not log_z <= self.z and math.log(ratio) > self.rise
        self.usual.push(both)
        if not outlier:
            return None
        moved, pushed = pushed_by(step, 5)
        cause = "update" if moved > 3 else "batch"
        norms = step.history["grad/norm"].last(200)
        seen = {"loss": loss, "z": min(z, log_z) if log_z == log_z else z, "at": step.number, "moved": moved}
        seen |= {"pushed": pushed, "lr": step.value("lr"), "lr_proposed": step.value("lr") / 2}
        seen["max_norm"] = float(f"{np.quantile(norms, 0.9):.2g}") if len(norms) else math.nan
        expected = {"loss": usual, "z": f"under {self.z:g}"}
        cure = "left_out" if cause == "batch" and step.value("step/left_out") == 1 else cause
        return Sign(severity="warning", seen=seen, expected=expected, causes=(cause,), cures=(cure,))


@register
@dataclass
class LossRising(Rule):
    """The loss stays well above the best level it had reached."""

    id = "loss_rising"
    judges_after = 40
    needs = ("loss",)

    window: int = 20
    """Losses whose mean is compared."""
    share: float = 0.3
    """How much of what was gained since the start must be lost again."""
    relative: float = 0.1
    """The rise as a share of the best loss, at least."""
    errors: float = 8.0
    """Standard errors of such a mean that the rise must exceed."""
    patience: int = 3
    """Steps in a row."""
    early: float = 1.7
    """The last five losses over the first three, while there are too few for a window."""

    start: float = field(default=math.nan, init=False)
    best: float = field(default=math.inf, init=False)
    best_error: float = field(default=0.0, init=False)
    best_step: int = field(default=0, init=False)
    high: int = field(default=0, init=False)
    """Steps in a row at which it was seen."""
    cause: str = field(default="", init=False)
    told: dict[str, Any] = field(default_factory=dict, init=False)
    """What was known when it began."""
    in_turn: int = field(default=0, init=False)
    """Steps that the model has been one side of a game for."""

    def look(self, step: Step) -> Sign | None:
        """Fires while the mean of the last losses is far above the lowest such mean."""
        losses = [*step.history["loss"].values[1 - self.window :], step.value("loss")]
        if not math.isfinite(losses[-1]):
            return None
        if len(losses) < self.window:
            first, now = sum(losses[:3]) / 3, sum(losses[-5:]) / 5
            risen = len(losses) >= 8 and 0 < self.early * first < min(now, sorted(losses[-5:])[1])
            return self._sign(step, risen, now, first, 1)
        now = sum(losses) / self.window
        if math.isnan(self.start):
            self.start = sum(losses[:START]) / START
        if now < self.best:
            self.best, self.best_step = now, step.number
            self.best_error = float(np.std(losses, ddof=1)) / math.sqrt(self.window)
        gained = max(self.start - self.best, 0.0)
        least = max(self.share * gained, self.relative * abs(self.best), self.errors * self.best_error)
        # The median too, so that a single broken batch is not taken for a rise.
        risen = now - self.best > least and sorted(losses[-5:])[2] - self.best > least
        return self._sign(step, risen, now, self.best, self.best_step)

    def _sign(self, step: Step, risen: bool, now: float, best: float, best_step: int) -> Sign | None:
        self.high = self.high + 1 if risen else 0
        self.in_turn = self.in_turn + 1 if step.in_turn else 0
        # What was found before a game was known to be one has to close first: no finding becomes less severe.
        if self.high < self.patience or 0 < self.in_turn <= 2 * self.closes_after:
            return None
        if self.high == self.patience or not self.told:
            self._explain(step, best_step)
        lost = now > self.start and self.high >= self.window
        seen = {"loss": now, "best_step": best_step, **self.told}
        severity: Severity = "critical" if lost else "warning"
        return Sign(
            severity="info" if step.in_turn else severity,  # neither loss of a game has to fall
            seen=seen,
            expected={"loss": best},
            since=int(self.told["at"]),
            causes=(self.cause,),
            cures=(self.cause,),
        )

    def _explain(self, step: Step, best_step: int) -> None:
        lr, rose = step.value("lr"), rate_rose(step)
        moved, pushed = pushed_by(step)
        began = step.ago(self.high - 1)
        spike, spiked = single_spike(step, began)
        decay = step.facts.weight_decay or 0.0
        sudden = self.window < step.number <= best_step + 2 * self.window
        self.cause = "data" if sudden else "high_lr"
        if step.value("grad/carried") == 1:
            self.cause = "stale"
        elif rose > 1.5:
            self.cause = "lr"
        elif spike > 10:
            self.cause = "batch"
        elif moved > 5:
            self.cause = "update"
        elif decay * lr > 0.01:
            self.cause = "decay"
        self.told = {"at": began, "lr": lr, "lr_proposed": lr / 3}
        self.told |= {
            "lr_before": lr / rose if rose else math.nan,
            "moved": moved,
            "pushed": pushed,
            "spike": spike,
            "spiked": spiked,
            "weight_decay": decay,
        }


@register
@dataclass
class LossPlateau(Rule):
    """The loss does not move: never since the start, or no longer."""

    id = "loss_plateau"
    expects_fall = True
    judges_after = 100
    needs = ("loss",)
    closes_after = 150

    every: int = 20
    """Steps from one look to the next."""
    first_steps: int = 80
    """Steps that a run has to begin to learn."""
    sure: int = 160
    """Steps after which it is a warning that the loss has not fallen; healthy runs may take a hundred or more."""
    flat: float = 0.02
    """Share of the first loss that the loss surely fell by less than, over the last 60 % of the steps so far."""
    learned: float = 0.2
    """A run whose loss has fallen by this share has begun to learn."""
    late_window: int = 1000
    """Losses that a late plateau is judged on."""
    late: float = 0.01
    """A late plateau: the loss surely fell by less than this share of all it fell since the start."""

    start: float = field(default=math.nan, init=False)
    highest_lr: float = field(default=0.0, init=False)
    rose_at: int = field(default=0, init=False)
    """The last step with a learning rate higher than any before: a warmup is not judged."""
    has_learned: bool = field(default=False, init=False)
    first_weight: float = field(default=math.nan, init=False)
    last_weight: float = field(default=math.nan, init=False)

    def look(self, step: Step) -> Sign | None:
        """Fits a line through the losses, now and then."""
        lr, weight = step.value("lr"), step.value("weight/norm")
        if step.number > 0 == step.history.steps_seen:
            self.has_learned = True  # resumed without what was remembered: how it began is not known
        if lr > 1.001 * self.highest_lr:
            self.highest_lr, self.rose_at = lr, step.number
        if math.isfinite(weight):
            self.last_weight = weight
            if math.isnan(self.first_weight):
                self.first_weight = weight
        losses = step.history["loss"]
        if math.isnan(self.start) and len(losses) >= START:
            self.start = float(np.mean(losses.values[:START]))
        if step.number % self.every or len(losses) < self.first_steps:
            return None
        return self._no_longer(step) if self.has_learned else self._never(step)

    def _never(self, step: Step) -> Sign | None:
        begin = max(0.4 * step.number, self.rose_at)
        values = step.history["loss"].since(begin)[1]
        size = abs(self.start)
        recent = float(np.median(step.history["loss"].last(20)))
        if self.start - recent > self.learned * size:
            self.has_learned = True
        if self.has_learned or len(values) < 0.5 * self.first_steps:
            return None
        fell, error = fall(values)
        since_start = self.start - recent
        # Surely little, and no more than chance; or next to nothing since the start, chance or not.
        flat = abs(fell) + 2 * error < self.flat * size and (fell < 2.5 * error or since_start < self.flat * size)
        last = values[-30:]
        doubt = float(last.std()) * math.sqrt(1 / START + 1 / len(last))
        back = step.number >= 100 and abs(self.start - float(last.mean())) + 2 * doubt < self.flat * size
        if not (flat or back):
            return None
        ratio = step.history["update/ratio"].last(5)
        kind = "has hardly fallen since the start"
        if since_start > self.flat * size:
            kind = "stands still, little below where it began"
        seen = self._seen(step, recent, since_start) | {"kind": kind, "first_loss": self.start}
        seen["steps"] = step.number
        seen["ratio"] = float(np.median(ratio)) if len(ratio) else math.nan
        cause = "no_signal"
        if seen["ratio"] < 1e-4:
            cause = "small_lr"
        elif seen["taken"] > 0.01 or seen["left"] < 0.5:
            cause = "decay"
        return Sign(
            severity="warning" if step.number >= self.sure else "info",
            seen=seen,
            expected={"loss": self.start - self.learned * size, "fell": f"over {self.learned * size:.3g}"},
            since=int(begin),
            causes=(cause,),
            cures=(cause,),
        )

    def _no_longer(self, step: Step) -> Sign | None:
        losses = step.history["loss"].last(self.late_window)
        if len(losses) < self.late_window:
            return None
        fell, error = fall(losses)
        recent = float(np.median(losses[-100:]))
        gained = self.start - recent
        if gained <= 0 or abs(fell) + 2 * error > self.late * gained:
            return None
        since = step.ago(len(losses))
        seen = self._seen(step, recent, fell) | {"kind": f"no longer falls since step {since}"}
        return Sign(
            severity="info",
            seen=seen | {"steps": step.number},
            expected={"fell": self.late * gained},
            since=since,
            causes=("done",),
            cures=("done",),
        )

    def _seen(self, step: Step, loss: float, fell: float) -> dict[str, Any]:
        lr, decay = step.value("lr"), step.facts.weight_decay or 0.0
        seen = {"loss": loss, "fell": fell, "lr": lr, "lr_proposed": 30 * lr, "lr_lower": lr / 10}
        seen |= {
            "weight_decay": decay,
            "taken": lr * decay,
            "left": self.last_weight / self.first_weight if self.first_weight else math.nan,
        }
        return seen
