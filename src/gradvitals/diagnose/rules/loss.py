"""Rules about the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradvitals.diagnose.baseline import Baseline, Floats
from gradvitals.diagnose.history import FIRST, fall, step_spread
from gradvitals.diagnose.message import Message, Observation
from gradvitals.diagnose.rule import NEVER, Rule, register
from gradvitals.diagnose.rules.clipping import proposed_limit
from gradvitals.diagnose.step import Step
from gradvitals.format import number
from gradvitals.types import Severity

LR_ROSE = 1.5
"""A learning rate that rose by this factor explains a loss that rose."""


@register
@dataclass
class LossNonfinite(Rule):
    """The loss is NaN or infinite."""

    id = "loss_nonfinite"
    family = "loss"
    is_symptom = True
    needs = ("loss",)
    follows = ("lr_too_high", "nonfinite")
    follows_if_later = True  # the loss is computed before its gradient
    masks = ("loss_rising", "loss_spike", "loss_plateau", "still_falling")
    taints_steps = True
    message = Message(
        name="Loss not finite",
        pattern="The loss is NaN or infinite.",
        title="The loss became {loss} at step {at}{before}",
        causes={
            "weights": "The weights have been NaN or infinite since step {broken}, so every later forward pass fails",
            "earlier": "{unread} not read and may have left NaN or infinite weights",
            "diverged": "Training diverged: the gradient norm had grown to {ratio}× its baseline",
            "exploded": (
                "Outputs explode: the loss was {last_loss} before, and predicting the mean gives {trivial}. Initial "
                "weights are too large, a recurrence multiplies its input, or the learning rate is too high"
            ),
            "thrown": "The gradient exploded to a norm of {norm}: the last step changed the weights by {moved:%}",
            "float16": (
                "The model computes in float16, which overflows above 65,504 and rounds Adam's eps of 1e-8 to zero"
            ),
            "log": "The loss takes the log of a probability that reached 0, and the log of zero is infinite",
            "forward": "The batch holds NaN or Inf, or the forward pass divides by 0, takes the log of 0, or overflows",
            "operation": (
                "The inputs of the batch are finite: the forward pass divides by 0, takes a log of 0, or overflows"
            ),
        },
        fixes={
            "weights": "Restore a checkpoint from before step {broken}",
            "earlier": (
                "Restore a checkpoint from before step {safe} and check the batch of step {at} with torch.isfinite"
            ),
            "diverged": (
                "Restore a checkpoint from before step {safe} and lower the learning rate from {lr} to {lr_proposed}"
            ),
            "exploded": "Start with torch's own initialization, and clip gradients to a norm of {max_norm}",
            "thrown": "Clip gradients to a norm of {max_norm}, or lower the learning rate from {lr} to {lr_proposed}",
            "float16": "Keep weights and optimizer state in float32, and compute under torch.autocast",
            "log": "Clamp the probability before the log, or use the PyTorch loss that takes logits",
            "check_batch": (
                "Check the batch of step {at} with torch.isfinite, then continue from a checkpoint before it"
            ),
            "skipped": "Check the batch of step {at} with torch.isfinite; its step was skipped and training continues",
            "anomaly": "Run the step again under torch.autograd.detect_anomaly() to find the operation",
            "operation": "Restore a checkpoint from before step {at}, and run it under torch.autograd.detect_anomaly()",
        },
        snippets={
            "float16": "with torch.autocast(device_type, dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)",
            "log": "p = p.clamp(1e-6, 1 - 1e-6)  # or F.binary_cross_entropy_with_logits(logits, y)",
        },
        only_if_chosen=("float16", "log", "exploded", "thrown", "operation"),
        passed="the loss was finite at every step",
    )

    DIVERGED = 10.0  # largest recent norm over its baseline for the run to have diverged
    EXPLODED = 1e3  # last loss over that of the trivial prediction
    THROWN = 0.5  # share of the weight norm that the last step changed: it left nothing of what was there

    last_loss: float = field(default=math.nan, init=False)
    largest: float = field(default=0.0, init=False)
    """Largest recent norm over its baseline."""
    broken: int = field(default=-1, init=False)
    """The step that left weights that are not finite; -1 if none did."""
    moved: float = field(default=0.0, init=False)
    """How far the step before moved the weights, as a share of their norm; 0 if it was not read."""

    def check(self, step: Step) -> Observation | None:
        values = step.values
        loss = values.get("loss")
        if loss is not None and not math.isfinite(loss):
            return self._observe(step, loss)
        if loss is not None:
            self.last_loss = loss
        ratio = step.norm_deviation[0]
        if ratio == ratio:
            self.largest = max(ratio, 0.8 * self.largest)
        self.moved = values.get("update/ratio", 0.0)
        # A step with a gradient that is not finite leaves weights that are not.
        if self.broken < 0 and (
            (values.get("grad/nonfinite", 0.0) > 0 and step.was_taken)
            or not math.isfinite(values.get("weight/norm", 0.0))
        ):
            self.broken = step.number
        return None

    def _observe(self, step: Step, loss: float) -> Observation:
        cause = "weights" if self.broken >= 0 else "diverged" if self.largest > self.DIVERGED else "forward"
        half = [info for info in step.layout.tensors if info.dtype == "float16"]
        if step.fact("head/log") == 1:
            cause = "log"
        elif half and len(half) == len(step.layout.tensors):
            cause = "float16"
        elif cause == "forward" and self.last_loss > self.EXPLODED * step.trivial_loss:
            cause = "exploded"
        elif cause == "forward" and self.moved > self.THROWN:
            cause = "thrown"
        elif cause == "forward" and step.values.get("input/nonfinite") == 0:
            cause = "operation"
        lr, norms = step.value("lr"), step.history["grad/norm"].last(1)
        seen = {"trivial": step.trivial_loss, "max_norm": 1.0} if cause in ("exploded", "thrown") else {}
        seen |= {"moved": self.moved, "norm": float(norms[0])} if cause == "thrown" and len(norms) else {}
        seen |= {"loss": loss, "last_loss": self.last_loss, "broken": self.broken if self.broken >= 0 else step.number}
        seen |= {"ratio": self.largest, "lr": lr, "lr_proposed": lr / 3, "at": step.number}
        fixes = (cause,) if cause != "forward" else ("check_batch" if step.was_taken else "skipped",)
        causes = ("earlier", cause) if step.unread and fixes == ("check_batch",) else (cause,)
        fixes = ("earlier",) if "earlier" in causes else fixes
        expected = {"loss": "a finite number"}
        text = {"before": f"; it was {number(self.last_loss)} before" if math.isfinite(self.last_loss) else ""}
        return Observation(severity="critical", seen=seen, text=text, expected=expected, causes=causes, fixes=fixes)


@register
@dataclass
class LossSpike(Rule):
    """One loss is far above those before it."""

    id = "loss_spike"
    family = "loss"
    is_symptom = True
    needs = ("loss",)
    expects_fall = True
    follows = ("stale_gradients", "lr_too_high")
    taints_steps = True
    message = Message(
        name="Loss spike",
        pattern="One loss is far above the previous ones, by the spread of this run's losses and of their logarithms.",
        title="The loss jumped to {loss} at step {at} (normally {expected_loss})",
        causes={
            "lr": "The learning rate rose from {lr_before} to {lr}, which is too high for this model",
            "update": "Step {pushed} moved the weights {moved}× as far as normal: momentum or the learning rate",
            "batch": "The batch of step {at} differs from the others: corrupted, mislabeled, or not normalized",
            "sharp": "The learning rate is near the stability limit of this model, so small changes have large effects",
        },
        fixes={
            "lr": "Restore a checkpoint from before step {at} and set the learning rate back to {lr_before}",
            "batch": "Look at the batch of step {at}; skip it if it is broken",
            "skipped": "Look at the batch of step {at}; its step was skipped and training continues",
            "update": (
                "Restore a checkpoint from before step {pushed}; reset the optimizer state if momentum is to blame"
            ),
            "sharp": "Lower the learning rate from {lr} to {lr_proposed}, or clip gradients to a norm of {max_norm}",
        },
        only_if_chosen=("lr",),
        passed="no loss stood out",
        reference="PaLM (arXiv 2204.02311) restored a checkpoint from 100 steps earlier and skipped 200 to 500 batches",
    )

    RISE = 0.1  # a spike is at least this share of the first losses
    FIRST_STEPS = 20  # losses before one can be an outlier

    z: float = 7.0
    """Standard deviations over the baseline, both of the loss and of its logarithm: losses have long tails."""

    unit: float = field(default=math.nan, init=False)
    """Mean size of the first losses, once they are complete."""
    baseline: Baseline = field(default_factory=Baseline, init=False)
    """Of the exponential of the loss in units of the first ones (a Baseline takes logarithms), and of the loss."""

    def check(self, step: Step) -> Observation | None:
        loss = step.value("loss")
        if not math.isfinite(loss):
            return None
        unit = self.unit
        if unit != unit:
            first = step.first_losses
            unit = float(np.mean(np.abs(first))) or 1.0
            self.unit = unit if len(first) == FIRST else math.nan
        scaled, baseline = math.exp(max(-300.0, min(300.0, loss / unit))), self.baseline
        ratio, z = baseline.compare_one(scaled, 0)
        outlier = False
        if z > self.z and len(baseline.count) and baseline.count.item(0) >= self.FIRST_STEPS:
            log_z = baseline.compare_one(loss, 1)[1]
            usual = unit * baseline.level.item(0)
            outlier = not log_z <= self.z and math.log(ratio) > self.RISE
            # A sample of a class with a large weight is meant to raise the loss by as much.
            outlier &= not loss < usual * step.fact("head/weights")
        baseline.learn_one(scaled, 0)
        baseline.learn_one(loss, 1)
        if not outlier:
            return None
        moved, pushed = step.largest_update(5)
        rose = step.lr_increase()
        cause = "lr" if rose > LR_ROSE else "update" if moved > 3 else "batch"
        seen = {"loss": loss, "z": min(z, log_z) if log_z == log_z else z, "at": step.number, "moved": moved}
        seen |= {"pushed": pushed, "lr": step.value("lr"), "lr_proposed": step.value("lr") / 2}
        seen |= {"lr_before": step.value("lr") / rose} if cause == "lr" else {}
        seen["max_norm"] = proposed_limit(step)
        expected = {"loss": usual, "z": f"under {self.z:g}"}
        fix = "skipped" if cause == "batch" and step.value("step/left_out") == 1 else cause
        return Observation(severity="warning", seen=seen, expected=expected, causes=(cause,), fixes=(fix,))


@register
@dataclass
class LossRising(Rule):
    """The loss stays well above the best level it had reached."""

    id = "loss_rising"
    family = "loss"
    is_symptom = True
    needs = ("loss",)
    expects_fall = True
    judges_after = 40
    follows = ("stale_gradients", "lr_too_high")
    masks = ("loss_spike", "loss_plateau", "decay_due", "high_effort_low_progress")
    taints_steps = True
    message = Message(
        name="Loss rising",
        pattern="The mean of the last 20 losses is far above the lowest such mean: much of what was learned is lost.",
        title="The loss rose to {loss} from {expected_loss} at step {best_step} and stayed up",
        causes={
            "lr": "The learning rate rose from {lr_before} to {lr}, which is too high for this model",
            "batch": "The gradient of step {spiked} was {spike}× its baseline: one batch threw the weights off",
            "update": "Step {pushed} moved the weights {moved}× as far as normal, and the loss rose after it",
            "data": "The data changed around step {at}: different labels, source or order",
            "high_lr": "The learning rate of {lr} is too high at this stage of the run",
            "momentum": (
                "A momentum of {momentum} adds up the last {memory} gradients, so steps overshoot for that long"
            ),
            "stale": "Gradients are not zeroed between steps, so steps keep growing: see stale_gradients",
        },
        fixes={
            "data": "Compare the inputs and targets of batches from before and after step {at}",
            "lr": "Restore a checkpoint from before step {at} and set the learning rate back to {lr_before}",
            "batch": "Restore a checkpoint from before step {spiked}, skip its batch, and clip gradients",
            "update": "Restore a checkpoint from before step {pushed} and reset the optimizer state",
            "high_lr": "Go back to step {best_step} and lower the learning rate from {lr} to {lr_proposed}",
            "momentum": "Start again and lower momentum from {momentum} to {momentum_proposed}",
            "stale": ("Call optimizer.zero_grad() once per step, and restore a checkpoint from about step {best_step}"),
        },
        only_if_chosen=("stale", "momentum"),
        passed="the loss never rose far above its best",
    )

    WINDOW = 20  # losses whose means are compared
    RELATIVE = 0.1  # least rise, as a share of the best loss
    SPANS = (1, 5)  # windows whose mean is compared: a noisy loss takes more to show that it rose
    ERRORS = 1.25  # least rise, in units of the range that the means have by chance
    PATIENCE = 3  # steps in a row
    LONG_MEMORY = 0.99  # momentum
    EARLY = 1.7  # the last five losses over the first three, while there are too few for a window
    RECENT, CLEAR = 200, 4.0  # losses within which the loss must have risen, by as many standard errors of its line
    AS_NOW = 0.8  # share of the learning rate from which on losses are compared
    KEPT = 256  # means that are remembered
    JUMP = 0.5  # share of the rise from one step to the next that a change of the data makes
    SETTLES = 60  # steps that the loss has to come down again after the data changed
    LOST = 0.5  # share of what was gained that new data may cost

    share: float = 0.3
    """Share of what was gained since the start that must be lost again."""

    start: float = field(default=math.nan, init=False)
    means: list[list[float]] = field(default_factory=list, init=False)
    """Of each twenty losses: the last step, the mean, the learning rate."""
    count: int = field(default=0, init=False)
    """Losses since the last of them."""
    high: int = field(default=0, init=False)
    """Steps in a row at which the loss was high."""
    span: int = field(default=1, init=False)
    """Windows whose mean was high, or was compared last."""
    limit: float = field(default=math.nan, init=False)
    """The loss under which it is over."""
    useless: bool = field(default=False, init=False)
    """Whether what was learned proved of no use to new data."""
    cause: str = field(default="", init=False)
    known: dict[str, Any] = field(default_factory=dict, init=False)
    """What was known when it started."""

    def check(self, step: Step) -> Observation | None:
        loss = step.value("loss")
        if not math.isfinite(loss):
            return None
        losses = np.array([*step.history["loss"].values[1 - self.WINDOW :], loss])
        if len(losses) < self.WINDOW:
            first, now = float(losses[:3].mean()), float(losses[-5:].mean())
            risen = len(losses) >= 8 and 0 < self.EARLY * first < min(now, float(np.sort(losses[-5:])[1]))
            return self._observe(step, risen, now, first, 1)
        if math.isnan(self.start):
            self.start = float(losses[:FIRST].mean())
        self.count += 1
        if not self.means or self.count == self.WINDOW:
            self.count = 0
            self.means.append([step.number, float(losses.mean()), step.value("lr"), float(losses.std())])
            if len(self.means) > self.KEPT:
                del self.means[: self.KEPT // 2 : 2]
        spans = (self.span,) if self.high >= self.PATIENCE else self.SPANS
        for self.span in spans:
            found = self._compare(step, losses, self.span)
            if found[0] or len(self.means) < 5:
                break
        return self._observe(step, *found)

    def _compare(self, step: Step, losses: Floats, span: int) -> tuple[bool, float, float, int]:
        """Returns whether the mean of some windows is far above the lowest such mean, both, and the step of that one.

        A loss that comes down with the learning rate goes up with it again, as at a warm restart: the lowest is that at
        the learning rate of now, if it was as high before.
        """
        steps, single, rates, spreads = np.array(self.means).T
        means = np.convolve(single, np.full(span, 1 / span), "valid")
        steps, rates = steps[span - 1 :], rates[span - 1 :]
        lowest = int(means.argmin())
        lr = self.AS_NOW * step.value("lr")
        as_now = np.flatnonzero(rates > lr)
        if rates[lowest] < lr and len(as_now) and as_now[0] < lowest:
            lowest = int(as_now[means[as_now].argmin()])
        best = float(means[lowest])
        if span > 1:
            losses = step.losses_since(step.ago(self.WINDOW * span - 1))
        now = float(losses.mean())
        least = max(self.share * max(self.start - best, 0.0), self.RELATIVE * abs(best))
        if now - best <= least:  # nearly always: medians cost more than all of this
            return False, now, best, int(steps[lowest])
        spread = float(np.median(spreads)) / math.sqrt(self.WINDOW * span)
        if len(single) >= 5:
            spread = max(spread, step_spread(single) / math.sqrt(span))
        # The highest of n means is that far from the lowest by chance, and a quarter more is no chance.
        least = max(least, self.ERRORS * 2 * math.sqrt(2 * math.log(len(means) + 1)) * spread)
        # The median too: one broken batch is not a rise.
        return min(now, float(np.median(losses[-5 * span :]))) - best > least, now, best, int(steps[lowest])

    def _observe(self, step: Step, risen: bool, now: float, best: float, best_step: int) -> Observation | None:
        if self.high >= self.PATIENCE:  # damage is over when half of it is undone
            risen = now > self.limit
        self.high = self.high + 1 if risen else 0
        if self.high < self.PATIENCE:
            return None
        if self.high == self.PATIENCE or not self.known:
            since = len(step.history["loss"].since(best_step)[1])
            fell, error = fall(step.history["loss"].last(min(since, self.RECENT) + self.WINDOW))
            if -fell < self.CLEAR * error:  # the level is not new
                self.high = 0
                return None
            # A loss far above that of an untrained model is no measure of what must be regained.
            worst = max(self.start, 2 * abs(best)) if math.isfinite(self.start) else now
            self.limit, self.useless = (min(now, worst) + best) / 2, False
            self._explain(step, now, best, best_step)
        severity: Severity = "critical" if now > self.start and self.high >= self.WINDOW else "warning"
        if self.cause == "data":
            fell, error = fall(step.history["loss"].last(self.SETTLES // 2))
            lost = now - best > self.LOST * (self.start - best) and fell < max(2 * error, 0.1 * (now - best))
            self.useless |= self.high >= self.SETTLES and lost
            if not self.useless:
                severity = "info"
            if severity == "info" and self.high >= 2 * self.SETTLES:  # the run is compared with itself from here on
                self.means, self.count, self.high = [], 0, 0
                return None
        return Observation(
            severity=severity,
            seen={"loss": now, "best_step": best_step, **self.known},
            expected={"loss": best},
            since=int(self.known["at"]),
            key=self.cause,
        )

    def _explain(self, step: Step, now: float, best: float, best_step: int) -> None:
        lr, began = step.value("lr"), step.ago(self.high - 1)
        jumped = self._jump(step, now - best)
        before = began if jumped is None else jumped
        (moved, pushed), (spike, spiked) = step.largest_update(before=before), step.single_spike(before + 3)
        rose = step.lr_increase()
        momentum = step.info.momentum or 0.0
        self.cause = "high_lr" if jumped is None else "data"
        if step.value("grad/carried") == 1:
            self.cause = "stale"
        elif momentum >= self.LONG_MEMORY:
            self.cause = "momentum"
        elif rose > LR_ROSE:
            self.cause = "lr"
        elif spike > 10:
            self.cause = "batch"
        elif moved > 5:
            self.cause = "update"
        self.known = {"at": before, "lr": lr, "lr_proposed": lr / 3, "lr_before": lr / rose if rose else math.nan}
        self.known |= {"momentum": momentum, "momentum_proposed": 0.9, "memory": round(1 / max(1 - momentum, 1e-6))}
        self.known |= {"moved": moved, "pushed": pushed, "spike": spike, "spiked": spiked}

    def conclude(self, step: Step) -> Observation | None:
        """The run ended far above its best, at a learning rate that was raised after it."""
        steps, losses = step.history["loss"].since(0)
        count, start = len(losses) // self.WINDOW, step.first_loss
        if count < 5:
            return None
        means = np.median(losses[-count * self.WINDOW :].reshape(count, -1), axis=1)
        lowest, now = int(means[:-1].argmin()), float(np.median(losses[-2 * self.WINDOW :]))
        best, best_step = float(means[lowest]), int(steps[(lowest - count) * self.WINDOW])
        after, rates = step.history["lr"].since(best_step)
        if not now - best > self.LOST * (start - best) > 0 or not len(rates) or not rates[-1] > LR_ROSE * rates[0]:
            return None
        at = int(after[np.argmax(rates > LR_ROSE * rates[0])])
        seen = {"loss": now, "best_step": best_step, "at": at, "lr": float(rates[-1]), "lr_before": float(rates[0])}
        severity: Severity = "critical" if now > start else "warning"
        return Observation(severity=severity, seen=seen, expected={"loss": best}, since=at, key="lr")

    def _jump(self, step: Step, rise: float) -> int | None:
        """Returns the step at which the loss made most of its rise at once; None if it rose step by step."""
        losses = step.history["loss"].last(3 * self.WINDOW)
        if len(losses) < 2 * self.WINDOW:
            return None
        half = self.WINDOW // 2
        sides = np.lib.stride_tricks.sliding_window_view(losses, half)
        jumps = np.median(sides[half:], axis=1) - np.median(sides[:-half], axis=1)
        at = int(jumps.argmax())
        if not jumps[at] > self.JUMP * rise:
            return None
        up = losses[at:] > np.median(losses[at : at + half]) + jumps[at] / 2
        at += int(np.convolve(up, np.ones(3), "valid").argmax())  # the first three in a row that are up
        return int(step.history["loss"].steps[at - len(losses)])


@register
@dataclass
class LossResets(Rule):
    """The loss jumps back to where it started, again and again: what was learned is thrown away."""

    id = "loss_resets"
    family = "loss"
    needs = ("loss",)
    expects_fall = True
    closes_after = 100
    judges_after = 100
    masks = ("loss_spike",)
    message = Message(
        name="Learned, lost, learned again",
        pattern="At regular intervals, the loss jumps back to nearly its first value and falls again.",
        title="The loss jumps back to where it started every {every} steps, {times} times so far",
        causes={
            "reset": (
                "The weights are initialized again, or loaded from the start, at the beginning of each epoch: what was "
                "learned before is lost"
            ),
            "data": "Or the data or the task changes every {every} steps, and what was learned is of no use to it",
        },
        fixes={
            "once": "Create and initialize the model once, before the loop over epochs",
            "shuffle": "If the data changes, shuffle it, so that every batch has samples of all kinds",
        },
        passed="the loss did not return to where it started",
    )

    BACK, DOWN = 0.8, 0.6  # share of the first losses that it returns to, and that it had fallen to before
    BEYOND = 1.25  # share of the largest of them that it stays below: weights that start anew have no larger loss
    TIMES = 3
    EVEN = 1.4  # longest interval over the shortest, and over the time since the last return while it is open
    LONG = 20  # steps of an interval, at least: a task that is learned in a few steps is meant to be

    jumps: list[int] = field(default_factory=list, init=False)
    """The last steps at which it was back."""
    times: int = field(default=0, init=False)
    has_tasks: bool = field(default=False, init=False)
    """Whether it was far above its start for some steps: that is another task, not another start."""
    checked: int = field(default=0, init=False)

    def check(self, step: Step) -> Observation | None:
        start = step.first_loss
        steps, losses = step.history["loss"].since(self.checked - 13)  # also those of calm steps
        for i in np.flatnonzero(losses > self.BACK**2 * start).tolist():
            back = losses[i - 3 : i + 1]
            top = self.BEYOND * max(step.first_losses)
            if i < 13 or back.min() < self.BACK**2 * start or back.max() < self.BACK * start:
                continue
            self.has_tasks |= bool(back.max() > top)
            new = not self.jumps or steps[i] - self.jumps[-1] > 10
            if new and float(np.median(losses[i - 13 : i - 3])) < self.DOWN * start:
                self.jumps, self.times = [*self.jumps, int(steps[i - 3])][-20:], self.times + 1
        self.checked = step.number
        gaps = np.diff(self.jumps)
        if self.has_tasks or len(self.jumps) < self.TIMES:
            return None
        if gaps.max() > self.EVEN * gaps.min() or gaps.min() < self.LONG:
            return None
        if step.number - self.jumps[-1] > self.EVEN * gaps.max():  # it has stopped: what is learned now stays
            return None
        seen = {"every": round(float(np.median(gaps))), "times": self.times, "loss": step.value("loss")}
        return Observation(severity="warning", seen=seen, since=self.jumps[0])


@register
@dataclass
class LossPlateau(Rule):
    """The loss does not move: it never fell, or has stopped falling."""

    id = "loss_plateau"
    family = "loss"
    is_symptom = True
    needs = ("loss",)
    expects_fall = True
    every = 10
    judges_after = 100
    closes_after = 150
    follows = (
        "schedule_over", "stale_gradients", "unchanged_weights", "lr_too_high", "clip_saturated", "dead_units",
        "vanishing", "bad_start",
    )  # fmt: skip
    masks = ("high_effort_low_progress", "decay_due")
    message = Message(
        name="Loss plateau",
        pattern=(
            "The loss has hardly fallen since the start of the run, or below that of predicting the mean or the class "
            "frequencies, and is flat (a note at first, then a warning), or has stopped falling later on (a note). "
            "Both are decided by a line fitted to the losses and its standard error."
        ),
        title="The loss {kind}: {loss} after {steps} steps",
        causes={
            "small_lr": "The learning rate of {lr} is too low: each step changes the weights by only {ratio:%}",
            "no_signal": "Inputs and targets may not match: shuffled labels, wrong targets, or identical inputs",
            "large_lr": "The learning rate of {lr} may be too high: each step undoes the one before",
            "initialization": "The initial weights may be too small or too large for a signal to pass",
            "done": "The model has learned what it can at a learning rate of {lr}",
            "temperature": (
                "The scores of a sample are cosines that differ by {score_range} on average: too little for a softmax "
                "to tell them apart"
            ),
        },
        fixes={
            "temperature": "Divide the cosines by a temperature such as 0.1, before cross_entropy",
            "small_lr": "Raise the learning rate from {lr} to about {lr_proposed}",
            "no_signal": "Look at some inputs beside their targets, as the loss gets them: they should belong together",
            "done": "Lower the learning rate from {lr} to {lr_lower}, or stop here",
            "large_lr": "Lower the learning rate from {lr} to about {lr_lower}",
            "initialization": (
                "Compare the outputs of each layer at the start: their standard deviation should be near 1"
            ),
        },
        only_if_chosen=("temperature",),
        passed="the loss did not stand still",
    )

    FIRST_STEPS = 80  # steps that a run has to start learning
    FLAT = 0.02  # share of the first loss that it fell by less than, over the last 60% of the steps so far
    LEARNED = 0.2  # a run whose loss has fallen by this share has started to learn
    TINY, SHORT = 1e-4, 1e-3  # update over weight norm that makes steps too short, and if the loss falls all the same
    LONG, ABOVE = 1e-2, 1.1  # update over weight norm that makes steps long, and loss over the trivial one to show it
    THROWN = 0.15  # update over weight norm of the first steps that leaves nothing of the initialization
    NARROW = 2.5  # range of a sample's cosines, which reach from -1 to 1, if nothing divides them
    HELD = 0.1  # and one that stood still does so until its loss has fallen by this share
    USELESS = 0.95  # share of the trivial loss that the mean loss is surely above: inputs are of no use
    LATE_WINDOW = 1000  # losses that a late plateau is judged by
    LATE = 0.01  # a late plateau: the loss fell by less than this share of all it fell since the start

    sure: int = 160
    """Steps after which a loss that has not fallen is a warning; healthy runs may take a hundred or more."""

    start: float = field(default=math.nan, init=False)
    highest_lr: float = field(default=0.0, init=False)
    rose_at: int = field(default=0, init=False)
    """The last step with a learning rate higher than any before: a warmup is not judged."""
    has_learned: bool = field(default=False, init=False)
    stands: bool = field(default=False, init=False)
    """Whether the loss stood still when it was surely late."""

    def learn(self, step: Step) -> None:
        if step.number > 0 == step.history.steps_seen:
            self.has_learned = True  # resumed without a history: its start is unknown
        lr = step.value("lr")
        if lr > 1.001 * self.highest_lr:
            self.highest_lr, self.rose_at = lr, step.number

    def check(self, step: Step) -> Observation | None:
        if len(step.history["loss"]) < self.FIRST_STEPS:
            return None
        if math.isnan(self.start):
            self.start = float(np.mean(step.history.first_losses))
        return self._stopped(step) if self.has_learned else self._never_fell(step)

    def _never_fell(self, step: Step) -> Observation | None:
        begin = max(0.4 * step.number, self.rose_at)
        values = step.history["loss"].since(begin)[1]
        start = min(self.start, step.trivial_loss) if self.start > 0 else self.start
        size = abs(start)
        recent = step.history["loss"].median(20)
        if start - recent > self.LEARNED * size:
            self.has_learned = True
        if self.has_learned or len(values) < 0.5 * self.FIRST_STEPS:
            return None
        fell, error = fall(values)
        since_start = start - recent
        # Little for certain and no more than chance; or next to nothing since the start, chance or not.
        flat = abs(fell) + 2 * error < self.FLAT * size and (fell < 2.5 * error or since_start < self.FLAT * size)
        surely = float(values.mean() - 2 * values.std() / math.sqrt(len(values)))
        flat |= fell < 2.5 * error and surely > self.USELESS * step.trivial_loss
        flat |= self.stands and since_start < self.HELD * size
        last = values[-30:]
        doubt = float(last.std()) * math.sqrt(1 / FIRST + 1 / len(last))
        back = step.number >= 100 and abs(start - float(last.mean())) + 2 * doubt < self.FLAT * size
        if not (flat or back):
            return None
        self.stands |= step.number >= self.sure
        return self._observe(step, start, fell > 2 * error, int(begin))

    def conclude(self, step: Step) -> Observation | None:
        losses = step.history["loss"].last(max(step.number // 4, self.FIRST_STEPS // 2))
        if self.has_learned or step.number < self.sure or len(losses) < self.FIRST_STEPS // 2:
            return None
        fell, error = fall(losses)
        surely = float(losses.mean() - 2 * losses.std() / math.sqrt(len(losses)))
        short = step.history["update/ratio"].median(5) < self.TINY or self._was_thrown(step)
        if not surely > (1 - self.LEARNED if short else self.USELESS) * step.trivial_loss:
            return None
        return self._observe(step, step.trivial_loss, fell > 2 * error, step.ago(len(losses)))

    def _observe(self, step: Step, start: float, falls: bool, since: int) -> Observation:
        recent, ratio = step.history["loss"].median(20), step.history["update/ratio"].median(5)
        size, since_start = abs(start), start - recent
        fallen = since_start > self.FLAT * size
        seen = self._seen(step, recent, since_start) | {"first_loss": start, "ratio": ratio}
        cause = "no_signal"
        # The loss of steps this short falls too slowly to tell from chance.
        if ratio < (self.SHORT if falls else self.TINY) or self._is_aligned(step):
            cause = "small_lr"
        elif (ratio > self.LONG and recent > self.ABOVE * step.trivial_loss) or self._was_thrown(step):
            cause = "large_lr"  # to predict the mean is easy to learn, unless steps are too long to stay there
        if step.fact("head/cosine_range") < self.NARROW:
            cause, seen["score_range"] = "temperature", step.fact("head/cosine_range")
        kind = "is flat, barely below its start" if fallen else "has hardly fallen since the start"
        if start == step.trivial_loss and not fallen:
            kind = f"is no better than ignoring the inputs would give ({number(start)})"
        elif start == step.trivial_loss:
            kind = f"is hardly better than ignoring the inputs would give ({number(start)})"
        return Observation(
            severity="warning" if step.number >= self.sure else "info",
            seen=seen,
            expected={"loss": start - self.LEARNED * size, "fell": f"over {self.LEARNED * size:.3g}"},
            text={"kind": kind},
            since=since,
            key=cause,
        )

    def _was_thrown(self, step: Step) -> bool:
        """Whether the first steps changed the weights by so much that nothing was left of their initialization."""
        first = step.history["update/ratio"]
        return len(first) > 0 and first.steps[0] < FIRST and max(first.values[:5]) > self.THROWN

    def _is_aligned(self, step: Step) -> bool:
        """Whether updates point in one direction, step after step: longer ones would get there sooner."""
        cosines, info = step.history["update/cosine"].last(40), step.info
        expected = info.betas[0] if info.betas else info.momentum or 0.0
        return len(cosines) >= 10 and float(np.median(cosines)) > 1 - 0.3 * (1 - expected)

    def _stopped(self, step: Step) -> Observation | None:
        losses = step.history["loss"].last(self.LATE_WINDOW)
        if len(losses) < self.LATE_WINDOW:
            return None
        fell, error = fall(losses)
        recent = float(np.median(losses[-100:]))
        gained = self.start - recent
        if gained <= 0 or abs(fell) + 2 * error > self.LATE * gained:
            return None
        since = step.ago(len(losses))
        return Observation(
            severity="info",
            seen=self._seen(step, recent, fell),
            expected={"fell": self.LATE * gained},
            text={"kind": f"has not fallen since step {since:,}"},
            since=since,
            key="done",
        )

    def _seen(self, step: Step, loss: float, fell: float) -> dict[str, Any]:
        lr = step.value("lr")
        seen = {"loss": loss, "fell": fell, "lr": lr, "lr_proposed": step.higher_lr(30.0), "lr_lower": lr / 10}
        return seen | {"steps": step.number}


@register
@dataclass
class LossUnbounded(Rule):
    """The loss falls below zero, ever faster: it has no lower end."""

    id = "loss_unbounded"
    family = "loss"
    is_symptom = True
    needs = ("loss", "grad/norm")
    expects_fall = True
    every = 10
    judges_after = 80
    closes_after = NEVER  # what has no lower end does not get one
    follows = ("stale_gradients",)
    masks = ("explosion", "still_falling", "loss_spike")
    message = Message(
        name="Loss without a lower bound",
        pattern="The loss is negative, 20 times as far from zero as at the start, and falls ever faster.",
        title="The loss falls without bound and ever faster: from {first_loss} to {loss} after {steps} steps",
        causes={"sign": "The loss has no lower bound: its sign is wrong, or one of its terms grows without limit"},
        fixes={
            "sign": (
                "Check the sign of every term of the loss; a term that pushes apart needs a limit, such as a margin"
            )
        },
        passed="the loss has a lower bound",
    )

    FEWEST = 80  # losses
    FAR = 20.0  # how far below zero, in units of the first losses
    FASTER = 1.25  # fall of the last half of the losses over that of the half before
    STEEPER = 3.0  # gradient norm over that of the first steps; on the way to a minimum it falls

    faster: bool = field(default=False, init=False)
    found: bool = field(default=False, init=False)

    def check(self, step: Step) -> Observation | None:
        losses, norms = step.history["loss"], step.history["grad/norm"]
        if len(losses) < self.FEWEST or not len(norms):
            return None
        start, now = step.first_loss, losses.median(20)
        if not now < -self.FAR * max(abs(start), 1e-6):
            return None
        last = losses.last(200)
        begin, middle, end = (float(np.median(part)) for part in np.array_split(last, 3))
        steeper = norms.median(10) > self.STEEPER * float(np.median(norms.values[:10]))
        # What has no lower end does not get one, even if the loss falls at a steady pace from here on. Norms are read
        # at few steps, and show it later than losses.
        self.faster |= middle - end > self.FASTER * (begin - middle)
        self.found |= steeper and self.faster
        if not self.found:
            return None
        seen = {"loss": now, "first_loss": start, "steps": step.number}
        return Observation(severity="critical", seen=seen, since=0)


@register
@dataclass
class Outweighed(Rule):
    """The loss falls, and the error of the outputs does not: its other terms decide what is learned."""

    id = "outweighed"
    family = "loss"
    needs = ("head/error", "target/trivial_error")
    expects_fall = True
    judges_after = 150
    is_setup = True
    message = Message(
        name="Error outweighed",
        pattern=(
            "The loss has other terms besides the error of the outputs. When the run ends it has fallen, and the error "
            "is still no better than that of predicting the mean or the class frequencies."
        ),
        title="The error of the outputs is still {error}, as without any input, although the loss fell to {loss}",
        causes={
            "penalty": "A penalty on the weights outweighs the error: it is cheaper to shrink weights than to learn",
            "term": (
                "Another term of the loss outweighs the error, such as a KL term that is summed while the error is "
                "averaged: the model fulfills that term and ignores its inputs"
            ),
        },
        fixes={
            "penalty": "Lower the factor of the penalty, to a hundredth for a start",
            "term": (
                "Sum or average all terms over the same samples and elements, and lower the factor of the term that "
                "outweighs the error"
            ),
        },
        snippets={"term": "loss = error.sum(1).mean() + beta * kl.sum(1).mean()  # both per sample; beta: 1 or less"},
        is_certain=True,
        passed="the error of the outputs fell with the loss",
    )

    LEFT = 0.85  # error over that of a trivial prediction
    FELL = 0.1  # share of the first loss that the loss has fallen by
    RIVAL = 1.5  # growth of the share that the error has of the loss
    ALONE = 0.3  # how far from 1 that share is at the end
    READINGS = 2  # after the first tenth of the run

    def conclude(self, step: Step) -> Observation | None:
        trivial, classes = step.fact("target/trivial_error"), step.fact("head/softmax_units")
        steps, errors = step.history["head/error"].since(step.number / 10)
        losses = step.history["loss"].last(20)
        if step.number < self.judges_after or len(errors) < self.READINGS or not len(losses):
            return None
        if not trivial > 0 or classes > step.fact("head/samples"):
            return None
        error, start = float(np.mean(errors)), step.first_loss
        loss, at_step = float(np.median(losses)), dict(zip(*step.history["loss"].since(0), strict=True))
        # An error whose share of the loss stays the same has no rival: the loss is a multiple of it. In the end, little
        # is left of the rival.
        shares = [one / at_step.get(at, loss) for at, one in zip(steps, errors, strict=True)]
        share = float(np.median(shares))
        grew = share / (step.history["head/error"].values[0] / step.first_losses[0]) if step.first_losses else math.nan
        if not (error > self.LEFT * trivial and start - loss > self.FELL * abs(start)):
            return None
        if not (grew > self.RIVAL and abs(share - 1) < self.ALONE):
            return None
        seen = {"error": error, "trivial": trivial, "loss": loss, "first_loss": start}
        key = "penalty" if step.fact("head/penalty") == 1 else "term"
        expected = {"error": f"under {self.LEFT * trivial:.3g}"}
        return Observation(severity="warning", seen=seen, expected=expected, since=0, key=key)


@register
@dataclass
class StillFalling(Rule):
    """The run ended while its loss was still falling."""

    id = "still_falling"
    family = "loss"
    advises = True
    needs = ("loss",)
    expects_fall = True
    is_symptom = True
    judges_after = 50
    follows = (
        "schedule_over",
        "stale_gradients",
        "lr_too_high",
        "clip_saturated",
        "loss_plateau",
        "unchanged_weights",
        "dead_tensor",
        "dead_units",
        "bad_start",
    )
    message = Message(
        name="Stopped while learning",
        pattern=(
            "The second half of the run contributed more than 42% of the total drop in loss (28% if its steps were "
            "small), and the learning rate had not decayed. A note, or a warning if the learning rate is too low or "
            "its schedule had not ended."
        ),
        title="The loss was still falling when the run ended: by {fell} over the last {steps} steps, to {loss}",
        causes={
            "low_lr": "The learning rate of {lr} is too low for {total} steps: each changes the weights by {ratio:%}",
            "schedule": (
                "The run stopped too early, in the middle of its schedule: the learning rate is still {lr} and decaying"
            ),
            "short": "The run stopped too early, unless it was a test: after {total} steps the loss was still falling",
        },
        fixes={
            "low_lr": "Raise the learning rate from {lr} to about {lr_proposed}, or train for more steps",
            "schedule": "Train to the end of the schedule, or shorten it to the {total} steps of this run",
            "short": "Train for {steps_proposed} steps or more, or raise the learning rate from {lr}",
        },
        snippets={"short": "num_steps = {steps_proposed}"},
        passed="the loss had leveled off when the run ended, or the learning rate had decayed",
    )

    FEWEST, SURE = 50, 80  # losses; with fewer than the second it is a note
    LEFT = 0.05  # share of the first loss below which there is little left to learn
    CLEAR = 2.5  # standard errors
    SHORT, SHARE_SHORT = 1e-3, 0.28  # update over weight norm that makes steps short, and `share` for them
    LATELY = 0.08  # share of the whole fall from the third quarter to the last
    DECAYED = 0.5  # a learning rate under this share of its highest was lowered on purpose

    share: float = 0.42
    """Share of the whole fall that the last half of the steps must have brought."""

    def conclude(self, step: Step) -> Observation | None:
        if not math.isfinite(step.values.get("loss", 0.0)):
            return None  # the run was lost: its last finite losses are not those it ended with
        losses = step.losses_since(0)
        rates, count = step.history["lr"].values, len(losses) // 2
        if len(losses) < self.FEWEST or step.number + 1 > 4 * len(losses) or not rates:
            return None
        start, (fell, error) = step.first_loss, fall(losses[-count:])
        end, before = float(np.mean(losses[-count // 4 :])), float(np.mean(losses[-count : -count // 2]))
        gained, lately = start - end, before - float(np.mean(losses[-count // 2 :]))
        lr, ratios = step.value("lr"), step.history["update/ratio"].values
        ratio = float(np.median(ratios)) if ratios else math.nan
        share = self.SHARE_SHORT if ratio < self.SHORT else self.share
        falls = fell > max(self.CLEAR * error, share * gained) and lately > self.LATELY * gained > 0
        if not falls or end < self.LEFT * start or not lr > self.DECAYED * max(rates):
            return None
        # A run of few steps is most often meant to have few. Steps that are too short are not, nor is the middle of a
        # schedule, and a warmup is the start of one.
        warming, falling = lr > 1.01 * rates[len(rates) // 2], lr < min(0.95 * max(rates), rates[-2])
        cause = "low_lr" if ratio < self.SHORT and not warming else "schedule" if falling else "short"
        seen = {"fell": fell, "steps": count, "loss": end, "lr": lr, "ratio": ratio, "total": step.number + 1}
        seen |= {"lr_proposed": step.higher_lr(), "steps_proposed": 5 * (step.number + 1)}
        return Observation(
            severity="info" if cause == "short" or len(losses) < self.SURE else "warning",
            seen=seen,
            expected={"fell": f"under {self.share * gained:.3g}"},
            since=max(step.number - count, 0),
            key=cause,
        )


@register
@dataclass
class Memorizing(Rule):
    """The validation loss rises while the training loss falls."""

    id = "memorizing"
    family = "loss"
    needs = ("val/loss",)
    judges_after = 0
    closes_after = 10**9
    renews = True
    expects_fall = True
    message = Message(
        name="Overfitting",
        pattern=(
            "The validation loss has risen by 20% or more from its lowest, while the training loss kept falling: a "
            "note, or a warning once a quarter of what validation had gained is lost again. Or it stands still at over "
            "ten times the training loss, with a fifth of the first loss left: a warning. Or it is far above even the "
            "loss of the untrained model: a warning."
        ),
        title="{what}, while the training loss fell to {loss}",
        causes={
            "memorizes": "The model memorizes the training data: since step {at}, what it learns does not generalize",
            "differs": (
                "The validation data differs from the training data: it is scaled, normalized or encoded another way, "
                "or its loss is a sum and not a mean"
            ),
        },
        fixes={
            "differs": "Preprocess validation data with the same steps, and the training data's mean and deviation",
            "stop": "Stop at about step {steps_proposed} and keep the weights with the lowest validation loss",
            "regularize": "Add dropout, weight decay or data augmentation, use a smaller model, or more data",
        },
        only_if_chosen=("differs",),
        snippets={"stop": "if val_loss < best:\n    best = val_loss\n    torch.save(model.state_dict(), 'best.pt')"},
        passed="the validation loss did not rise while the training loss fell",
    )

    RISE = 1.2  # validation loss over its lowest
    FEWEST = 4  # validations
    GAP = 1.5  # validation loss over training loss
    LOST = 0.25  # share of what validation had gained since the start of the run
    APART = 10.0  # validation loss over training loss from which nearly all that was learned since is memorized
    LEFT = 0.2  # share of the trivial loss, or of the first ones, that validation has left for that
    OTHER = 3.0  # lowest validation loss over the first losses, and over training's, that the same data cannot have
    FELL = 0.5  # share of the first validation loss below which it is the same data: its loss is a sum, not a mean

    best: float = field(default=math.inf, init=False)
    best_step: int = field(default=0, init=False)
    train_then: float = field(default=math.nan, init=False)
    first_val: float = field(default=math.nan, init=False)
    count: int = field(default=0, init=False)

    def check(self, step: Step) -> Observation | None:
        val = step.values.get("val/loss")
        losses = step.history["loss"].last(20)
        if val is None or not math.isfinite(val) or not len(losses):
            return None
        self.count += 1
        self.first_val = val if self.count == 1 else self.first_val
        train = float(np.median(losses))
        if val < self.best:
            self.best, self.best_step, self.train_then = val, step.number, train
        first = step.first_loss
        rose = val > self.RISE * self.best and train < 0.9 * self.train_then and val > self.GAP * train
        stands = train < val / self.APART and self.best > self.LEFT * min(first, step.trivial_loss)
        # What is apart by so much at the best validation too has another reason: another loss, or other data.
        stands &= step.number > 2 * self.best_step and self.train_then > 2 * train
        other = self.best > self.OTHER * max(first, self.train_then) and first > 0 and train < first
        if other and self.best < self.FELL * self.first_val:
            other = stands = False
        if self.count < self.FEWEST or not (rose or stands or other):
            return None
        how = f"rose from {number(self.best)} at step {self.best_step:,} to" if rose else "stands still at"
        seen = {"best": self.best, "at": self.best_step, "val": val, "loss": train}
        harms = stands or other or val - self.best > self.LOST * (first - self.best)
        what, keys = f"The validation loss {how} {number(val)}", ("differs",) if other else ()
        if other:
            what = f"The validation loss was never below {number(self.best)}"
        return Observation(
            severity="warning" if harms else "info",
            seen=seen | {"steps_proposed": self.best_step + 1},
            expected={"val": self.best},
            text={"what": what},
            since=self.best_step,
            causes=keys,
            fixes=keys,
        )
