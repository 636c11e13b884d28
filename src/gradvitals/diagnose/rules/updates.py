"""Rules about tensors without a gradient, weights that do not move, and weights that move too little or too much."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.baseline import Floats, empty, resized
from gradvitals.diagnose.history import Streaks
from gradvitals.diagnose.message import Message, Observation, where
from gradvitals.diagnose.rule import NEVER, Rule, register
from gradvitals.diagnose.step import MAX_NAMED, NEGLIGIBLE, Step
from gradvitals.format import percent
from gradvitals.types import Severity

HALF = ("float16", "bfloat16")
NAMELESS = re.compile(r"group\d+\.\d+$")
"""The name of a parameter that is in an optimizer and in no module of the model."""


@register
@dataclass
class DeadTensor(Rule):
    """A tensor has no gradient, or exactly zero, for many steps, while others have one."""

    id = "dead_tensor"
    family = "updates"
    needs = ("tensors:grad/norm",)
    reads = "tensors"
    holds = True
    follows = ("layer_wiring", "bad_inputs", "stale_gradients", "strong_decay", "lr_too_high", "dead_units")
    follows_if_later = True
    masks = ("vanishing",)
    message = Message(
        name="No gradient",
        pattern="A tensor's gradient is missing or exactly zero for many steps, while other tensors have one.",
        title="{where} had no gradient for {steps} steps",
        causes={
            "unused": "{first} has had no gradient since step {at}: the forward pass does not use it, or detaches it",
            "replaced": (
                "The optimizer holds parameters that are not in the model: a layer was replaced after the optimizer "
                "was created, which does not have the new one, so that it is never trained"
            ),
            "died": "All units after {first} are off: a ReLU whose inputs are all negative passes no gradient back",
            "zero": "The gradient of {first} is exactly zero: its output is multiplied by zero or masked later",
            "first_step": (
                "The loss uses only the first time step of a recurrent layer, whose hidden state starts at zero: "
                "{first} multiplies nothing else, and later time steps are never seen"
            ),
            "rounded": "The gradient of {first} is too small for float16 and becomes zero: see precision_underflow",
            "cut_off": "{first} had gradients until step {at}: it was frozen or detached, or is no longer used",
            "cancels": (
                "The gradients of {first} cancel, while its layer's weight learns: the loss does not depend on it, as "
                "with a bias before a difference or a normalization"
            ),
        },
        fixes={
            "unused": (
                "Find where the forward pass skips {first}: .detach(), no_grad(), or a branch that is never taken"
            ),
            "replaced": "Create the optimizer after the last change to the model: the new layer is not in it",
            "died": "Start again with a lower learning rate or smaller weights, or use LeakyReLU or GELU",
            "zero": "Check what multiplies the output of {first}: a mask, a gate, or weights that start at zero",
            "first_step": "Use the last time step: out[:, -1] with batch_first=True, out[-1] without",
            "rounded": "Use bfloat16, or a loss scale, so that {first} receives a gradient",
            "cut_off": "Check what happened at step {at}: requires_grad_(False), a callback, or a branch that ended",
            "cancels": "No action needed: it does no harm; you can also create the layer with bias=False",
            "intended": "If it is meant to be frozen, set requires_grad to False and remove it from the optimizer",
        },
        only_if_chosen=("rounded", "cancels", "first_step", "replaced"),
        snippets={"replaced": "optimizer = type(optimizer)(model.parameters(), lr=...)"},
        passed="every tensor has a gradient",
    )

    PATIENCE_ALIVE = 5  # steps in a row, for a tensor that had a gradient at nearly every step before
    CERTAIN = 100  # steps for a warning if it gets none at all: until then, another part of the model may have its turn

    patience: int = 20
    """Steps in a row without a gradient."""

    zero: Streaks = field(default_factory=Streaks, init=False)
    alive: Floats = field(default_factory=empty, init=False)
    """Steps at which it had a gradient."""
    absent: Floats = field(default_factory=empty, init=False)
    """Whether it had none at all when last looked at, rather than zero."""

    def check(self, step: Step) -> Observation | None:
        norms = step.tensors("grad/norm")
        if norms is None or not step.value("grad/norm") > 0:
            return None
        counts = step.tensors("grad/nonfinite")
        missing = np.isnan(norms if counts is None else counts)
        zero = missing | (norms == 0)
        zero[step.frozen] = False
        self.absent = missing.astype(float)
        self.zero.add(zero, step.number)
        self.alive = resized(self.alive, len(zero)) + ~zero
        if not zero.any():
            return None
        steady = (self.alive >= 20) & (self.alive + self.zero.count > 0.95 * (step.history.steps_seen + 1))
        dead = np.flatnonzero(self.zero.count >= np.where(steady, self.PATIENCE_ALIVE, self.patience))
        if not len(dead):
            return None
        return self._observe(step, dead, bool(missing[dead].all()))

    def conclude(self, step: Step) -> Observation | None:
        never = np.flatnonzero((self.zero.count >= self.patience) & (self.alive == 0))
        return self._observe(step, never, bool(self.absent[never].all()), certain=True) if len(never) else None

    def _observe(self, step: Step, dead: NDArray[np.intp], missing: bool, certain: bool = False) -> Observation:
        dead = dead[np.argsort(-self.zero.count[dead], kind="stable")]
        since = int(self.zero.since[dead[0]])
        steps = step.number - since + 1
        causes = self._causes(step, dead, missing)
        certain_or_zero = certain or not missing or steps >= self.CERTAIN
        return Observation(
            # Of a layer that was replaced, `unchanged_weights` names the new one, which is what is not trained.
            severity="warning" if causes not in (("cancels",), ("replaced",)) and certain_or_zero else "info",
            seen={"steps": steps, "tensors": len(dead), "at": since},
            tensors=step.names(dead[:MAX_NAMED]),
            since=since,
            causes=causes,
            fixes=causes,
        )

    def _causes(self, step: Step, dead: NDArray[np.intp], missing: bool) -> tuple[str, ...]:
        infos = step.layout.tensors
        if not missing and (step.info.autocast == "float16" or infos[int(dead[0])].dtype == "float16"):
            return ("rounded",)
        if self.alive[dead[0]]:
            return ("cut_off",) if missing else ("died",)
        if missing:
            outside = all(NAMELESS.match(infos[int(index)].name) for index in dead)
            inside = any(not NAMELESS.match(info.name) for info in infos)
            return ("replaced",) if outside and inside else ("unused",)
        if all("weight_hh" in infos[int(index)].name for index in dead):
            return ("first_step",)
        learning = {info.layer for info in infos if len(info.shape) > 1 and not self.zero.count[info.index]}
        if all(len(infos[int(index)].shape) == 1 and infos[int(index)].layer in learning for index in dead):
            return ("cancels",)
        # A mask or a gate silences one layer; units that are off silence all layers in front of them.
        return ("died", "zero") if len({infos[int(index)].layer for index in dead}) > 1 else ("zero",)


@register
@dataclass
class DeadUnits(Rule):
    """Most units of a layer are off for every sample: they pass nothing on, and nothing back."""

    id = "dead_units"
    family = "updates"
    is_symptom = True
    needs = ("tensors:activation/dead_fraction",)
    reads = "tensors"
    judges_after = 30
    closes_after = 100
    holds = True
    follows = ("stale_gradients", "lr_too_high")
    masks = ("dead_tensor", "vanishing")
    message = Message(
        name="Dead units",
        pattern="Over several readings, a ReLU turns off 75% or more of a layer's units for every sample of the batch.",
        title="{dead:%} of the units after {first} are dead: their ReLU is off for every sample",
        causes={
            "start": "They were off from the first step: initial biases are too negative, or initial weights too large",
            "lr": (
                "They died during training ({alive:%} were alive at first): a learning rate of {lr} is too high and "
                "pushed the weights to where no input activates them"
            ),
        },
        fixes={
            "start": "Start with biases of 0 and nn.init.kaiming_normal_ weights in {first}, or use LeakyReLU or GELU",
            "lr": "Start again and lower the learning rate from {lr} to about {lr_proposed}: dead units do not recover",
        },
        changes={"start": {"initialization": "kaiming"}},
        snippets={"start": "nn.init.kaiming_normal_(layer.weight)\nnn.init.zeros_(layer.bias)"},
        passed="most units of every layer are alive",
    )

    PATIENCE = 3  # readings in a row
    LASTING = 20  # steps that they take at least: the first batches of a GAN are all alike
    FEWEST = 8  # samples in a batch, and units in a layer unless all of them are dead
    EARLY = 2  # steps from the start at which units that are dead were so from the start

    share: float = 0.75
    """Share of a layer's units."""

    first: Floats = field(default_factory=empty, init=False)
    """Share at the first reading, plus one; 0 before it."""
    dead: Streaks = field(default_factory=Streaks, init=False)
    """Readings in a row."""

    def check(self, step: Step) -> Observation | None:
        shares = step.tensors("activation/dead_fraction")
        if shares is None or step.fact("head/samples") < self.FEWEST:
            return None
        self.first = resized(self.first, len(shares))
        known = np.isfinite(shares)
        if step.number <= self.EARLY:
            self.first = np.where(known & (self.first == 0), 1 + np.where(known, shares, 0.0), self.first)
        units = np.array([info.shape[0] if info.shape else 1 for info in step.layout.tensors])
        dead = known & (shares >= np.where(units >= self.FEWEST, self.share, 1.0))
        self.dead.add(dead, step.number, ends=known)
        lasts = (self.dead.count >= self.PATIENCE) & (step.number - self.dead.since >= self.LASTING)
        chosen = np.flatnonzero(dead & lasts)
        if not len(chosen):
            return None
        chosen = chosen[np.argsort(-np.asarray(shares)[chosen], kind="stable")]
        worst = int(chosen[0])
        at_first = self.first[worst] - 1
        seen = {"dead": float(shares[worst]), "alive": float(1 - max(at_first, 0.0))}
        seen["lr"] = max([*step.history["lr"].values[:5], step.value("lr")])  # that of its first steps
        cause = "start" if at_first >= self.share else "lr"
        return Observation(
            severity="critical" if shares[worst] == 1 else "warning",
            seen=seen | {"lr_proposed": step.lower_lr, "layers": len(chosen)},
            expected={"dead": f"under {self.share:g}"},
            tensors=step.names(chosen[:MAX_NAMED]),
            since=0 if cause == "start" else None,
            key=cause,
        )


@register
@dataclass
class SaturatedUnits(Rule):
    """Most outputs of a sigmoid or tanh are at its flat ends from the start, where hardly any gradient passes."""

    id = "saturated_units"
    family = "updates"
    is_symptom = True
    needs = ("tensors:activation/saturated_fraction",)
    reads = "tensors"
    judges_after = 30
    closes_after = 100
    holds = True
    message = Message(
        name="Saturated units",
        pattern=(
            "At the first step, half of a layer's outputs or more are at the flat ends of their sigmoid or tanh, and "
            "they stay there."
        ),
        title="{saturated:%} of the outputs of {first} are saturated: its sigmoid or tanh is flat there",
        causes={
            "weights": (
                "The initial weights are too large: outputs were at the ends of their range from the first step, where "
                "hardly any gradient passes back"
            ),
            "inputs": (
                "The inputs are not scaled (their mean is up to {offset}, their spread up to {spread}): they saturate "
                "the first layer from the first step, and hardly any gradient passes back"
            ),
        },
        fixes={
            "weights": "Keep torch's default initialization, or use nn.init.xavier_normal_ for {first}",
            "inputs": "Standardize the inputs by their mean and standard deviation on the training data",
        },
        changes={"weights": {"initialization": "default"}, "inputs": {"inputs": "standardize"}},
        snippets={
            "weights": "nn.init.xavier_normal_(layer.weight)",
            "inputs": "x = (x - x_train.mean(0)) / x_train.std(0).clamp_min(1e-6)",
        },
        is_certain=True,
        passed="no layer is saturated",
    )

    EARLY, LASTING = 2, 30  # steps from the start, and steps that it must last
    LARGE = 3.0  # mean or spread of an input column that can saturate a layer
    HEALTHY = 0.1  # loss over that of a trivial prediction, under which nothing is left to complain about

    share: float = 0.5
    """Share of a layer's outputs."""

    first: list[int] = field(default_factory=list, init=False)
    """Tensors whose layer was saturated from the start."""
    inputs: dict[str, float] = field(default_factory=dict, init=False)

    def check(self, step: Step) -> Observation | None:
        shares = step.tensors("activation/saturated_fraction")
        if shares is None:
            return None
        high = np.flatnonzero(np.nan_to_num(np.asarray(shares)) >= self.share)
        if step.number <= self.EARLY and not self.inputs:
            self.first = [int(index) for index in high if step.layout.tensors[int(index)].shape[0] > 1]
            self.inputs = {name: step.fact(f"input/{name}") for name in ("offset", "spread_high")}
        chosen = [index for index in self.first if index in high]
        if not chosen or step.number < self.LASTING or step.loss_left < self.HEALTHY:
            return None
        offset, spread = self.inputs["offset"], self.inputs["spread_high"]
        cause = "inputs" if chosen[0] == 0 and max(offset, spread) > self.LARGE else "weights"
        return Observation(
            severity="warning",
            seen={"saturated": float(shares[chosen[0]]), "layers": len(chosen), "offset": offset, "spread": spread},
            expected={"saturated": f"under {self.share:g}"},
            tensors=step.names(chosen[:MAX_NAMED]),
            since=0,
            key=cause,
        )


@register
@dataclass
class UnchangedWeights(Rule):
    """Weights have a gradient and do not move."""

    id = "unchanged_weights"
    family = "updates"
    needs = ("grad/norm", "update/rms")
    reads = "tensors"
    holds = True
    follows = ("schedule_over", "dead_units", "lr_too_high")  # units that are off get no gradient to move on
    message = Message(
        name="Weights do not move",
        pattern="Weights have a gradient but stay exactly the same over many steps.",
        title="{where} did not change {lasting}, although the gradient norm is {gradient}",
        causes={
            "left_out": (
                "The optimizer does not have {first}: the layer was created or replaced after the optimizer, or never "
                "passed to it; or its group has a learning rate of 0"
            ),
            "zeroed": (
                "zero_grad() runs between backward and step, so the optimizer steps without a gradient; or the "
                "optimizer holds the parameters of a different model"
            ),
            "zero_lr": "The learning rate is 0",
            "stopped": "{first} changed until step {at}: now the lr of its group is 0, or its gradient is too small",
            "resolution": "Updates of {first} are lost: they are smaller than half the gap between two {dtype} numbers",
        },
        fixes={
            "left_out": "Make the optimizer after the last change to the model, with all parameters; it lacks {where}",
            "zeroed": "Call optimizer.zero_grad() after optimizer.step(), or before the first backward",
            "zero_lr": "Check the schedule: its learning rate has been 0 since step {at}",
            "stopped": "Check what happened at step {at}: a group's lr set to 0, or a gradient that fell to {gradient}",
            "resolution": "Keep {first} in float32, or a float32 copy of it in the optimizer that can hold small steps",
        },
        changes={"zeroed": {"zero_grad": "after_step"}},
        snippets={"zeroed": "loss.backward()\noptimizer.step()\noptimizer.zero_grad()"},
        only_if_chosen=("zeroed", "zero_lr", "resolution"),
        passed="every trained tensor changed",
    )

    PATIENCE_MOVED = 5  # steps in a row, for weights that moved at nearly every step before
    CONVERGED = 1e-3  # gradient norm over its highest level at which an optimizer may stop by itself
    LOST = 0.25  # weights in half precision that stand still at this share of steps lose updates to rounding

    patience: int = 20
    """Steps in a row. Steps that a GradScaler skipped do not count."""

    still: Streaks = field(default_factory=Streaks, init=False)
    moved: Floats = field(default_factory=empty, init=False)
    """Steps at which it moved."""
    share: Floats = field(default_factory=empty, init=False)
    """Moving average of whether it stood still."""
    seen_steps: int = field(default=0, init=False)
    highest: float = field(default=0.0, init=False)
    """The highest level of the global norm: a run that has fitted everything has nothing left to move its weights."""

    def check(self, step: Step) -> Observation | None:
        rms, norms = step.tensors("update/rms"), step.tensors("grad/norm")
        if rms is None or norms is None or not step.was_taken:
            return None
        self.moved, self.share = resized(self.moved, len(rms)), resized(self.share, len(rms))
        self.seen_steps += 1
        baseline = step.history.norm
        if len(baseline.count) and baseline.count.item(0) >= 5:
            self.highest = max(self.highest, float(np.exp(baseline.level[0])))
        still = (rms == 0) & (norms > NEGLIGIBLE * self.highest) & ~step.negligible
        self.still.add(still, step.number, ends=rms > 0)
        self.moved += rms > 0
        self.share += (still - self.share) / min(self.seen_steps, self.patience)
        if not still.any() and not (self.share > self.LOST).any():
            return None
        if not np.any(rms > 0) and self.moved.any() and step.value("grad/norm") < self.CONVERGED * self.highest:
            return None  # L-BFGS, for one, makes no more steps once it has converged
        steady = (self.moved >= 20) & (self.moved + self.still.count > 0.95 * self.seen_steps)
        stuck = still & (self.still.count >= np.where(steady, self.PATIENCE_MOVED, self.patience))
        if self.seen_steps >= 10 and (self.share > self.LOST).any():
            half = np.array([info.dtype in HALF for info in step.layout.tensors], dtype=bool)
            stuck |= half & (self.share > self.LOST)
        chosen = np.flatnonzero(stuck)
        return self._observe(step, chosen, norms, rms) if len(chosen) else None

    def _observe(self, step: Step, chosen: NDArray[np.intp], norms: Any, rms: Any) -> Observation:
        chosen = chosen[np.argsort(-self.still.count[chosen], kind="stable")]
        worst = int(chosen[0])
        since, lr = int(self.still.since[worst]) if self.still.count[worst] else step.number, step.value("lr")
        lasted = step.number - since + 1
        everything = not np.any(rms > 0)
        dtype = step.layout.tensors[worst].dtype
        cause = "resolution" if dtype in HALF else "stopped" if self.moved[worst] else "left_out"
        if everything and not self.moved.any() and cause == "left_out" and lr > 0:
            cause = "zeroed"
        cause = "zero_lr" if everything and lr == 0 else cause
        seen = {"steps": lasted, "tensors": len(chosen), "at": since, "lr": lr, "dtype": dtype}
        seen |= {"gradient": float(norms[worst]), "percent": 100 * float(self.share[worst])}
        often = f"at {percent(float(self.share[worst]))} of the steps"
        return Observation(
            text={"lasting": often if cause == "resolution" and lasted < self.patience else f"for {lasted:,} steps"},
            # A schedule that has ended, or not yet started, is no fault.
            severity="info" if cause == "zero_lr" else "warning",
            seen=seen,
            tensors=() if everything else step.names(chosen[:MAX_NAMED]),
            since=since,
            key=cause,
        )


@register
@dataclass
class UpdateRatio(Rule):
    """A step changes weights by an unhealthy share of their norm, or by next to nothing, again and again."""

    id = "update_ratio"
    family = "updates"
    is_symptom = True
    needs = ("update/ratio",)
    judges_after = 30
    closes_after = 110
    follows = ("schedule_over", "stale_gradients", "unchanged_weights", "lr_too_high", "clip_saturated", "dead_units")
    masks = ("update_spike", "lr_too_high", "warmup_needed")
    message = Message(
        name="Update too large or too small",
        pattern="Steps repeatedly change weights by more than 10% of their norm, or by almost nothing.",
        title="{what}",
        causes={
            "high_lr": "The learning rate of {lr} is too high for weights of this size",
            "small_weights": "The weights of {first} are very small: they started so, or decay has shrunk them",
            "momentum": "The optimizer's momentum holds bad steps and moves the weights, at an unchanged learning rate",
            "low_lr": "The learning rate of {lr} is too low: it would take {needed} steps to change the weights",
            "cut_lr": "The learning rate fell from {lr_before} to {lr} at step {at}",
            "small_gradient": "Hardly any gradient reaches {first}, or its group has a far smaller learning rate",
        },
        fixes={
            "high_lr": (
                "Lower the learning rate from {lr} to about {lr_proposed}: ~0.1% of the weight norm per step is typical"
            ),
            "small_weights": "Start with larger weights in {first}, or lower the learning rate from {lr}",
            "momentum": "Restore a checkpoint from before step {at} and reset the optimizer state",
            "low_lr": (
                "Raise the learning rate from {lr} to about {lr_proposed}, and further if updates stay this small: "
                "~0.1% of the weight norm per step is typical"
            ),
            "cut_lr": "Set the learning rate back from {lr} to {lr_before}, unless the cut is intended",
            "small_gradient": "Find out why the gradient of {first} is so small, or give it its own learning rate",
        },
        only_if_chosen=("small_weights", "momentum", "small_gradient"),
        passed="updates have a healthy size for the weights",
        reference="SageMaker Debugger's WeightUpdateRatio",
    )

    LOW_MODEL = 1e-6  # smallest healthy update of the whole model, as a share of its norm
    SLOW_MODEL = 5e-5  # the same if the loss has not fallen either
    FALLEN = 0.03  # share of the first loss that it must have fallen by for that
    COLLAPSE = 0.02  # a learning rate under this share of what it was ten steps before is a cut, not a schedule
    DECAYED = 0.3  # a learning rate under this share of its highest was lowered on purpose
    GONE = 1e-3  # a gradient under this share of its largest makes steps small, whatever the learning rate
    PATIENCE = 10  # steps that it must last, over two readings or more
    PATIENCE_SLOW = 30  # the same for steps that are too small, none of them in a warmup
    PATIENCE_MOST = 3  # the same if most matrices move too far at once
    YOUNG = 10  # steps at which weights that started at zero may still grow from nothing

    low: float = 1e-8
    """Smallest healthy update of a tensor, as a share of its norm."""
    high: float = 1e-1
    """Largest healthy update."""

    above: Floats = field(default_factory=empty, init=False)
    """The step of the reading since which the update is too large, plus one; 0 if it is not."""
    below: Floats = field(default_factory=empty, init=False)
    most_since: int = field(default=-1, init=False)
    slow_since: int = field(default=-1, init=False)
    highest_lr: float = field(default=0.0, init=False)
    rose_at: int = field(default=0, init=False)
    resumed: bool = field(default=False, init=False)
    """Whether the run was resumed without a history, so that its start is unknown."""
    cut_at: int = field(default=-1, init=False)
    cut: dict[str, float] = field(default_factory=dict, init=False)
    largest: float = field(default=0.0, init=False)
    """Largest gradient norm so far."""

    def check(self, step: Step) -> Observation | None:
        values = step.values
        lr, norm = values.get("lr", math.nan), values.get("grad/norm", math.nan)
        if step.number > 0 == step.history.steps_seen:
            self.resumed = True
        if lr > 1.001 * self.highest_lr:
            self.highest_lr, self.rose_at = lr, step.number
        if self.largest < norm < math.inf:
            self.largest = norm
        if lr == 0 or not step.was_taken:
            return None
        seen = self._cut(step, lr)
        ratios, weights = step.tensors("update/ratio"), step.tensors("weight/norm")
        if seen is not None or ratios is None or weights is None or step.number < 1:
            return seen
        self.above, self.below = resized(self.above, len(ratios)), resized(self.below, len(ratios))
        now = step.number + 1.0
        too_much, too_little = (ratios > self.high) & (weights > 0), (ratios < self.low) & (ratios > 0)
        if len(step.negligible) == len(ratios):
            too_little &= ~step.negligible
        most = False
        if too_much.any():  # a bias, a gain or a few weights have no size of their own to compare with
            matrix = step.layout.matrices & (step.layout.sizes >= 16)
            too_much &= matrix
            # One matrix alone, as in linear regression, has no depth to pass a signal through: it may start small.
            most = bool(too_much.sum() > max(1, 0.5 * matrix.sum()))
        self.most_since = -1 if not most else step.number if self.most_since < 0 else self.most_since
        recent = step.history["loss"].last(3)
        first = math.nan if self.resumed or not step.first_losses else step.first_losses[0]
        falls = len(recent) == 3 and step.number < self.YOUNG and np.median(recent) < first - 0.2 * abs(first)
        if most and not falls and step.number - self.most_since >= self.PATIENCE_MOST:
            chosen = np.flatnonzero(too_much)
            return self._too_large(step, chosen[np.argsort(-ratios[chosen])], ratios, self.most_since)
        if step.number < self.YOUNG:
            return None
        self.above = np.where(too_much, np.where(self.above > 0, self.above, now), 0.0)
        self.below = np.where(too_little, np.where(self.below > 0, self.below, now), 0.0)
        large = np.flatnonzero((self.above > 0) & (now - self.above >= self.PATIENCE))
        small = np.flatnonzero((self.below > 0) & (now - self.below >= self.PATIENCE_SLOW))
        if len(large):
            large = large[np.argsort(-ratios[large])]
            return self._too_large(step, large, ratios, int(self.above[large].min()) - 1)
        slow = self._slow(step, step.value("update/ratio"))
        return slow or (self._too_small(step, small, ratios) if len(small) else None)

    def _too_large(self, step: Step, chosen: NDArray[np.intp], ratios: Any, since: int) -> Observation:
        weights = np.asarray(step.tensors("weight/norm"))
        ratio, lr = float(ratios[chosen[0]]), step.value("lr")
        seen = {"ratio": ratio, "lr": lr, "lr_proposed": lr * 0.003 / ratio, "at": since, "tensors": len(chosen)}
        moved, rose = step.largest_update()[0], step.lr_increase()
        # Layers start near 1 / sqrt(inputs), so that each row of weights has a norm near 1.
        rows = float(step.layout.tensors[int(chosen[0])].shape[0])
        cause = "small_weights" if weights[chosen[0]] < 0.05 * math.sqrt(rows) else "high_lr"
        if rose > 1.5:
            cause, seen["lr_proposed"] = "high_lr", lr / rose
        elif moved > 5:
            cause = "momentum"
        return self._observe(step, chosen, seen, since, cause, "warning", "under", self.high)

    def _too_small(self, step: Step, chosen: NDArray[np.intp], ratios: Any) -> Observation:
        chosen = chosen[np.argsort(ratios[chosen])]
        seen = {"ratio": float(ratios[chosen[0]]), "lr": step.value("lr"), "tensors": len(chosen)}
        since = int(self.below[chosen].min()) - 1
        return self._observe(step, chosen, seen, since, "small_gradient", "info", "over", self.low)

    def _slow(self, step: Step, whole: float) -> Observation | None:
        start = math.nan if self.resumed else step.first_loss
        hardly = start - step.history["loss"].median(20) < self.FALLEN * abs(start)
        lr, gone = step.value("lr"), step.value("grad/norm") < self.GONE * self.largest
        intended, limit = lr < self.DECAYED * self.highest_lr, self.SLOW_MODEL if hardly else self.LOW_MODEL
        if intended or gone or not 0 < whole < limit:
            self.slow_since = -1
            return None
        if self.slow_since < 0:
            self.slow_since = step.number
        if step.number - max(self.slow_since, self.rose_at) < self.PATIENCE_SLOW:
            return None
        seen = {"ratio": whole, "lr": lr, "lr_proposed": step.higher_lr(ratio=1e-3), "needed": int(1 / whole)}
        nothing = np.zeros(0, dtype=np.intp)
        return self._observe(step, nothing, seen, self.slow_since, "low_lr", "warning", "over", limit)

    def _observe(
        self,
        step: Step,
        chosen: NDArray[np.intp],
        seen: dict[str, Any],
        since: int,
        cause: str,
        severity: Severity,
        side: str,
        limit: float,
    ) -> Observation:
        names = step.names(chosen[:MAX_NAMED])
        share, healthy = percent(seen["ratio"]), f"{side} {percent(limit)}"
        return Observation(
            severity=severity,
            seen=seen,
            expected={"ratio": f"{side} {limit:g}"},
            text={"what": f"Updates are {share} of the weight norm in {where(names)} (healthy: {healthy})"},
            tensors=names,
            since=since,
            key=cause,
        )

    def _cut(self, step: Step, lr: float) -> Observation | None:
        """From one step to the next the learning rate is a small part of what it was, as if it had lost its zeros."""
        if self.cut_at < 0:
            rates = step.history["lr"].values
            if not (len(rates) >= 10 and 0 < lr < self.COLLAPSE * rates[-1]):
                return None
            rates, moves = rates[-10:], step.history["update/rms"].values[-20:]
            fell = len(moves) == 20 and lr < self.COLLAPSE * min(rates)
            # A schedule ends step by step; if some steps are not read, it was on its way down before.
            if fell and (step.ago(10) == step.number - 10 or max(rates) < 2 * min(rates)):
                self.cut_at, self.cut = step.number, {"lr": rates[-1], "rms": float(np.median(moves))}
            return None
        if not 0 < lr < self.COLLAPSE * self.cut["lr"]:
            self.cut_at = -1
            return None
        rms = step.value("update/rms")
        if not step.ago(1) < self.cut_at + 3 <= step.number or not 0 < rms < 5 * self.COLLAPSE * self.cut["rms"]:
            return None  # reported once, three steps after the cut, or at the next step that is read
        seen = {"ratio": rms / self.cut["rms"], "lr": lr, "lr_before": self.cut["lr"], "at": self.cut_at}
        what = f"Updates fell to {percent(seen['ratio'])} of what they were before step {self.cut_at:,}"
        return Observation(
            severity="warning",
            seen=seen,
            expected={"ratio": f"over {percent(self.COLLAPSE)}"},
            text={"what": what},
            since=self.cut_at,
            key="cut_lr",
        )


@register
@dataclass
class StrongDecay(Rule):
    """Weight decay takes the weights away faster than gradients make them."""

    id = "strong_decay"
    family = "updates"
    needs = ("weight/norm", "lr")
    closes_after = NEVER
    is_setup = True
    message = Message(
        name="Weight decay too strong",
        pattern=(
            "Weight decay removes over 1% of the weights per step, or outweighs the first gradients if it is added to "
            "them, and less than half of the weight norm is left."
        ),
        title="A weight decay of {weight_decay} is too strong: only {left:%} of the weight norm is left",
        causes={"decay": "A weight decay of {weight_decay} shrinks the weights faster than the gradient grows them"},
        fixes={"lower": "Start again and lower the weight decay from {weight_decay} to about {decay_proposed}"},
        passed="weight decay removes only a small part of the weights per step",
    )

    TAKEN, LEFT = 0.01, 0.5
    ORDINARY = 1e-4  # share of the weights per step that is common
    USUAL = 0.2  # decay up to which AdamW's learning rate is the cause instead

    first: float = field(default=math.nan, init=False)
    pull: float = field(default=math.nan, init=False)
    """What decay adds to the first gradient, over that gradient; NaN if it is not added to gradients."""

    def check(self, step: Step) -> Observation | None:
        weight, decay, lr = step.value("weight/norm"), step.info.weight_decay or 0.0, step.value("lr")
        if math.isnan(self.first):
            self.first = weight
            if not step.info.optimizer.endswith("AdamW"):
                self.pull = decay * weight / max(step.value("grad/norm"), 1e-30)
        if step.info.optimizer.endswith("AdamW") and decay <= self.USUAL:
            return None
        taken, left = lr * decay, weight / self.first if self.first > 0 else math.nan
        if not ((taken > self.TAKEN or self.pull > 1) and left < self.LEFT):
            return None
        # Decay that is added to gradients may be a hundredth of them.
        proposed = decay / 100 / self.pull if self.pull > 1 else self.ORDINARY / lr
        proposed = float(f"{proposed:.1g}")
        return Observation(
            severity="warning",
            seen={"taken": taken, "left": left, "pull": self.pull, "weight_decay": decay, "decay_proposed": proposed},
            expected={"taken": f"under {self.TAKEN:g}"},
            since=0,
        )


@register
@dataclass
class UpdateSpike(Rule):
    """One step moves the weights far more than normal on an ordinary gradient; the loss follows."""

    id = "update_spike"
    family = "updates"
    is_symptom = True
    needs = ("update/rms",)
    follows = ("stale_gradients", "lr_too_high")
    taints_steps = True
    message = Message(
        name="Update spike",
        pattern="One step moves the weights far more than normal, although the gradient is ordinary.",
        title="Step {at} moved {where} {ratio}× as far as normal, with an ordinary gradient",
        causes={
            "momentum": "The optimizer's momentum holds a bad step, or its second moment was too small",
            "lingers": "The gradient of step {exploded} was far too large and is still in the optimizer's momentum",
            "lr": "The learning rate rose from {lr_before} to {lr}",
            "unread": "{unread} not read and may have had an unusual gradient",
            "outside": "Something else changed the weights: a checkpoint was loaded, or an average swapped in",
        },
        fixes={
            "momentum": "Restore a checkpoint from before step {safe} and reset the optimizer's moments",
            "lingers": "Skip the batch of step {exploded}, or clip to a norm that would have cut its gradient",
            "lr": "Set the learning rate back from {lr} to {lr_before}, or raise it over a few hundred steps",
            "beta2": "Lower beta2 (0.95 instead of 0.999), so that Adam adapts sooner",
        },
        passed="no step moved the weights far more than normal",
        reference="arXiv 2304.09871: in Adam, large updates come before spikes of the loss",
    )

    Z = 5.0  # standard deviations; updates are smooth, because optimizers average, so that few are enough
    TENSOR_RATIO, TENSOR_Z = 6.0, 7.0  # for one tensor, which has fewer coordinates and is one of many
    GRADIENT_Z = 4.0  # the gradient counts as ordinary up to here; above, the spike is one of the gradient
    NEW = 2.0  # and over the longest that were normal at any time of the run
    FIRST_STEPS = 20  # updates before one can be an outlier
    LINGERS = 5  # steps for which momentum shows a gradient that was far too large

    ratio: float = 4.0
    """Update of the whole model over its baseline."""

    highest_lr: float = field(default=0.0, init=False)
    exploded: int = field(default=-LINGERS - 1, init=False)
    highest: Floats = field(default_factory=empty, init=False)
    """Highest baseline so far, as in `History.updates`: a step as long as those before is none too long."""

    def check(self, step: Step) -> Observation | None:
        lr, highest = step.value("lr"), self.highest_lr
        if step.norm_deviation[1] > 2 * self.GRADIENT_Z:
            self.exploded = step.number
        self.highest_lr = max(highest, lr) if lr == lr else highest
        deviations, gradients = step.update_deviations, step.tensor_norm_deviations
        if deviations is None:
            return None
        usual = step.history.updates.usual()
        self.highest = np.fmax(resized(self.highest, len(usual)), usual)
        if step.history.steps_seen < self.FIRST_STEPS:
            return None
        (ratio, z), known = deviations, step.history.updates.count >= self.FIRST_STEPS
        new = known & (ratio * usual > self.NEW * self.highest)
        hot = np.flatnonzero(new[1:] & (ratio[1:] > self.TENSOR_RATIO) & (z[1:] > self.TENSOR_Z))
        # What moves the whole is one of its tensors, unless that one has only now begun to move.
        whole = bool(new[0] and ratio[0] > self.ratio and z[0] > self.Z and (ratio[1:][new[1:]] > self.ratio).any())
        if not (whole or len(hot)):
            return None
        rates = step.history["lr"].last(20)
        before = float(rates.min()) if len(rates) else math.nan
        jumped = lr > 1.5 * before
        # A schedule that returns to where it was (warm restarts) moves weights more, and is meant to.
        if jumped and lr <= 1.5 * highest:
            return None
        if len(step.negligible):
            hot = hot[~step.negligible[hot]]
        if gradients is not None:  # if a tensor's own gradient is as large, `explosion` reports it
            hot = hot[~(gradients[1][hot] > self.GRADIENT_Z)]
        if step.norm_deviation[1] > self.GRADIENT_Z or not (whole or len(hot)):
            return None
        hot = hot[np.argsort(-ratio[1:][hot])]
        place = 0 if whole else int(hot[0]) + 1
        seen = {"ratio": float(ratio[place]), "z": float(z[place]), "at": step.number, "lr": lr, "lr_before": before}
        seen |= {"gradient_z": step.norm_deviation[1], "exploded": self.exploded}
        limit = self.ratio if whole else self.TENSOR_RATIO
        cause = "lr" if jumped else "lingers" if step.number - self.exploded <= self.LINGERS else "momentum"
        return Observation(
            severity="warning",
            seen=seen,
            expected={"ratio": f"under {limit:g}", "gradient_z": f"under {self.GRADIENT_Z:g}"},
            # If it is everywhere, naming all tensors helps nobody.
            tensors=() if whole and len(hot) > 0.5 * len(known) else step.names(hot[:MAX_NAMED]),
            causes=("unread", cause) if step.unread and cause == "momentum" else (cause,),
            fixes=(cause,),
        )
