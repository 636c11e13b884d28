"""Rules about the data, the model and the loss as the inspected batches show them: what no gradient shows.

They report at once what cannot be right. What is only suspicious is a note, until a symptom confirms it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from gradvitals.diagnose.history import fall
from gradvitals.diagnose.message import Message, Observation
from gradvitals.diagnose.rule import NEVER, Rule, register
from gradvitals.diagnose.step import Step
from gradvitals.format import number
from gradvitals.types import ACTIVATIONS, Severity

STANDARDIZED = "x = (x - x_train.mean(0)) / x_train.std(0).clamp_min(1e-6)"
BCE_LOGITS = "binary_cross_entropy_with_logits"
REGRESSION = ("mse", "l1", "smooth_l1")
LAYER_NAMES = {"softmax": "Softmax", "sigmoid": "Sigmoid", "relu": "ReLU", "tanh": "Tanh"}
LOSS_NAMES = {
    "cross_entropy": "cross_entropy",
    "nll": "nll_loss",
    "bce": "binary_cross_entropy",
    "bce_logits": BCE_LOGITS,
    "mse": "mse_loss",
    "l1": "l1_loss",
    "smooth_l1": "smooth_l1_loss",
    "kl": "kl_div",
}


class SetupRule(Rule):
    """A rule about what was so from the start: it stays wrong until the run ends, and symptoms follow from it."""

    family = "setup"
    judges_after = 0
    closes_after = NEVER
    is_setup = True


@register
@dataclass
class BadInputs(SetupRule):
    """The batches hold NaN or infinite values."""

    id = "bad_inputs"
    needs = ("input/nonfinite",)
    message = Message(
        name="Broken inputs",
        pattern=(
            "An inspected batch contains NaN or infinite inputs or targets; the inputs of all its samples are the "
            "same, and their targets are not; a view has mixed up their dimensions; or one of their columns is the "
            "target."
        ),
        title="{what}",
        causes={
            "column": (
                "{columns} of {of} input columns are NaN or infinite in every sample: most likely a constant column "
                "was divided by its standard deviation, which is zero"
            ),
            "sample": "Some samples have NaN or infinite {part}: missing values, or a broken record",
            "same": (
                "All samples of a batch have the same input, so the output cannot depend on it: most likely numbers "
                "between 0 and 1 were cast to integers and truncated to zero, or the inputs were overwritten"
            ),
            "leak": (
                "A column of the inputs is the target, so the model only has to copy it; where the target is unknown, "
                "it will fail"
            ),
            "misread": (
                "A view or reshape gave the inputs another order of dimensions, such as (n, height, width, channels) "
                "read as (n, channels, height, width), which scrambles them: it does not move any element"
            ),
        },
        fixes={
            "column": "Clamp the standard deviation before dividing by it, or drop constant columns",
            "sample": "Remove or fill samples with NaN or infinite values before training",
            "same": "Print a batch as the first layer receives it, and look for a cast such as .long() or // before it",
            "leak": "Remove the target, and what is computed from it, from the input columns",
            "misread": "Use permute or transpose instead of view or reshape: x.permute(0, 3, 1, 2)",
        },
        snippets={
            "column": "x = (x - x.mean(0)) / x.std(0).clamp_min(1e-6)",
            "sample": "keep = torch.isfinite(x).flatten(1).all(1)\nx, y = x[keep], y[keep]",
        },
        is_certain=True,
        passed="inputs and targets were finite in the batches inspected",
    )

    BATCHES = 3  # inspected batches in a row whose samples are all the same

    FIRST_STEPS = 100  # a bad batch that a GradScaler or the script skips later does no harm

    broken_since: int = field(default=-1, init=False)
    """The first step whose loss or gradient was not finite."""
    same: int = field(default=0, init=False)
    leaks: int = field(default=0, init=False)
    """Batches in a row of which a column of the inputs was the target."""

    def check(self, step: Step) -> Observation | None:
        values = step.values
        loss = values.get("loss", 0.0)
        if self.broken_since < 0 and (values.get("grad/nonfinite", 0.0) > 0 or not math.isfinite(loss)):
            self.broken_since = step.number
        inputs, targets = values.get("input/nonfinite", 0.0), values.get("target/nonfinite", 0.0)
        if not (inputs > 0 or targets > 0):
            if values.get("input/misread") == 1:
                text = {"what": "A view scrambles the inputs"}
                return Observation(severity="warning", seen={}, text=text, since=0, key="misread")
            self.leaks = (
                self.leaks + 1 if values.get("input/leak") == 1 else 0 if "input/mean" in values else self.leaks
            )
            if self.leaks >= self.BATCHES and step.loss_should_fall:
                text = {"what": "The inputs contain the target"}
                return Observation(severity="warning", seen={"batches": self.leaks}, text=text, since=0, key="leak")
            return self._all_the_same(step)
        columns = int(values.get("input/nonfinite_columns", 0.0))
        cause = "column" if inputs and 0 < columns < values["input/columns"] else "sample"
        seen: dict[str, Any] = {"count": int(inputs or targets), "at": step.number, "columns": columns}
        seen["of"] = int(values.get("input/columns", 0.0))
        part = "inputs" if inputs else "targets"
        noun = "value" if seen["count"] == 1 else "values"
        what = f"The {part} of the batch of step {step.number:,} contain {seen['count']:,} NaN or infinite {noun}"
        known = [name for name in ("sample", "column") if f"input/broken_{name}" in values]
        place = ", ".join(f"{name} {int(values[f'input/broken_{name}'])}" for name in known)
        what += f", first in {place}" if place else ""
        return Observation(
            severity="critical" if step.was_taken or step.number < self.FIRST_STEPS else "warning",
            seen=seen,
            text={"what": what, "part": part},
            # If the loss broke before, a batch like this one was there then, between two inspections.
            since=step.number if self.broken_since < 0 else min(self.broken_since, step.number),
            key=cause,
        )

    def _all_the_same(self, step: Step) -> Observation | None:
        values = step.values
        if "input/same" not in values:
            return None
        several = values.get("target/classes", 0.0) > 1 or values.get("target/std", 0.0) > 0
        self.same = self.same + 1 if several and values["input/same"] == 1 and step.loss_should_fall else 0
        if self.same < self.BATCHES:
            return None
        text = {"what": "All samples of a batch have the same input"}
        return Observation(severity="warning", seen={"batches": self.same}, text=text, since=0, key="same")


@register
@dataclass
class LossMismatch(SetupRule):
    """The model's output, the loss and the targets do not fit together."""

    id = "loss_mismatch"
    needs = ("head/loss",)
    message = Message(
        name="Loss mismatch",
        pattern=(
            "The graph of the loss shows an output activation that the loss does not expect, outputs that cannot reach "
            "the targets, shapes that broadcast, or a sign that is wrong."
        ),
        title="{what}",
        causes={
            "one_unit": "A softmax over a single output is always 1: the loss cannot fall, and no gradient flows",
            "double_softmax": "The model applies a softmax, and {loss} another one: predictions cannot get confident",
            "double_sigmoid": "The model applies a sigmoid, and {loss} applies another one",
            "batch_softmax": "The softmax is taken over dimension 0: the samples of a batch compete, not the classes",
            "bounded_logits": "A {activation} keeps logits between {low} and {high}: {loss} cannot get confident",
            "no_log": "{loss} expects log-probabilities, but gets {given}",
            "relu_output": "The model ends in a ReLU: outputs cannot be negative, and one that is 0 never learns",
            "bounded": "A {activation} between {low} and {high} cannot reach targets from {target_min} to {target_max}",
            "classes": "The targets have {classes} classes, and {units} output cannot tell them apart",
            "multi_label": "A softmax makes outputs sum to 1, but samples have {row_sum} independent labels",
            "raw_log": "The loss takes the log of the model's raw output, without a sigmoid or softmax before it",
            "broadcast": (
                "Outputs of shape ({samples}, 1) and targets of shape ({samples},) broadcast to a square: every output "
                "is compared with the targets of all samples, so the model learns their mean"
            ),
            "mse_classes": (
                "The loss is the mean squared error on {classes} one-hot classes, but cross-entropy is made for classes"
            ),
            "range": "{loss} expects targets from 0 to 1, not from {target_min} to {target_max}: it has no lower bound",
            "scrambled": (
                "A view or reshape reads outputs of shape (samples, length, classes) as (samples, classes, length), "
                "which mixes up the scores of different positions"
            ),
            "negated": "The loss is an error with a minus sign ({loss}), so every step makes the error larger",
            "policy": (
                "The loss multiplies log-probabilities of chosen actions by their weights, such as advantages, and has "
                "no minus: unless the weights have it or are costs, every step makes the best actions less likely"
            ),
            "padding": "{padding:%} of the labels are a class that appears only at padding, which dominates the loss",
            "copied": "Each target equals the input at its position, but the next token is one position ahead",
        },
        fixes={
            "one_unit": "Remove the softmax and use binary_cross_entropy_with_logits, which applies a sigmoid",
            "double_softmax": "Remove the softmax before {loss}, which expects logits",
            "double_sigmoid": "Remove the sigmoid before {loss}, which expects logits",
            "batch_softmax": "Take the softmax over the classes, with dim=1",
            "bounded_logits": "Remove the {activation} before {loss}, which expects logits",
            "no_log": "Use {instead} on the output of the last linear layer",
            "relu_output": "Remove the ReLU after the last layer{instead}",
            "bounded": "Remove the {activation} after the last layer, or scale the targets to [{low}, {high}]",
            "classes": "Use {classes} outputs and cross_entropy",
            "multi_label": "Replace the softmax with a sigmoid per label: binary_cross_entropy_with_logits",
            "raw_log": "Remove the log and use binary_cross_entropy_with_logits on the raw output",
            "broadcast": "Give targets the shape of the outputs: y.unsqueeze(1), or outputs.squeeze(1)",
            "mse_classes": "Use cross_entropy on the outputs of the last layer, with class indices as targets",
            "range": "Scale the targets from [{target_min}, {target_max}] to [0, 1]",
            "scrambled": "Swap the dimensions with transpose, or flatten both: logits.flatten(0, 1) and y.flatten()",
            "negated": "Remove the minus sign before the loss",
            "policy": "Put a minus before the log-probabilities, unless their weights have it or are costs",
            "padding": "Exclude padding from the loss with ignore_index={pad_label}",
            "copied": "Shift the targets by one: inputs tokens[:, :-1], targets tokens[:, 1:]",
        },
        changes={
            **{key: {"output": "none"} for key in ("double_softmax", "double_sigmoid", "bounded_logits")},
            **{key: {"output": "none"} for key in ("relu_output", "bounded")},
            **{key: {"loss": "cross_entropy", "output": "none"} for key in ("classes", "mse_classes")},
            **{key: {"loss": BCE_LOGITS, "output": "none"} for key in ("one_unit", "multi_label", "raw_log")},
            "batch_softmax": {"softmax_dim": 1},
            "no_log": {"output": "log_softmax"},
            "broadcast": {"targets": "unsqueeze"},
            "range": {"targets": "scale"},
            "scrambled": {"outputs": "transpose"},
            "negated": {"loss": "minus"},
            "policy": {"loss": "minus"},
            "padding": {"ignore_index": "padding"},
            "copied": {"targets": "shift"},
        },
        snippets={
            "one_unit": "loss = F.binary_cross_entropy_with_logits(logits, y)  # logits: before any softmax",
            "double_softmax": "loss = F.cross_entropy(logits, y)  # logits: before any softmax",
            "double_sigmoid": "loss = F.binary_cross_entropy_with_logits(logits, y)  # logits: before any sigmoid",
            "batch_softmax": "p = torch.softmax(logits, dim=1)",
            "no_log": "{log_code}",
            "classes": "self.out = nn.Linear(self.out.in_features, {classes})\nloss = F.cross_entropy(logits, y)",
            "multi_label": "loss = F.binary_cross_entropy_with_logits(logits, y)",
            "raw_log": "loss = F.binary_cross_entropy_with_logits(logits, y)",
            "broadcast": "loss = F.mse_loss(outputs, y.unsqueeze(1))",
            "mse_classes": "loss = F.cross_entropy(logits, labels)",
            "range": "y = {scaled}",
            "scrambled": "loss = F.cross_entropy(logits.transpose(1, 2), y)",
            "policy": "loss = -(log_prob * advantage).mean()",
            "padding": "loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index={pad_label})",
            "copied": "loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())",
        },
        is_certain=True,
        passed="output, loss and targets match",
    )

    ENOUGH = 3  # inspected batches with targets before their range counts
    MARGIN = 0.02  # how far targets must lie outside what an output can reach
    PADDING = 0.4  # share of labels that may be padding
    COPIED = 0.1  # share of the first loss under which a model has learned to copy

    low: float = field(default=math.inf, init=False)
    high: float = field(default=-math.inf, init=False)
    """The range of the targets inspected so far."""
    seen_batches: int = field(default=0, init=False)
    copied: int = field(default=0, init=False)
    """Batches whose labels were their inputs, if all were."""

    def check(self, step: Step) -> Observation | None:
        values = step.values
        self.low = min(self.low, values.get("target/min", math.inf))
        self.high = max(self.high, values.get("target/max", -math.inf))
        place, loss = step.fact("head/activation"), step.loss_function
        activation = ACTIVATIONS[int(place)] if place >= 0 else ""
        if "head/loss" in values:
            self.seen_batches += 1
            self.copied += values.get("target/copied") == 1
            cause = self._cause(step, activation, loss)
        else:
            cause = "copied" if step.is_full and self._copies(step) else ""
        if cause != "policy" and (not cause or step.is_reinforced or values.get("head/foreign") == 1):
            return None
        low, high = {"sigmoid": (0, 1), "tanh": (-1, 1), "softmax": (0, 1), "relu": (0, math.inf)}.get(
            activation, (-math.inf, math.inf)
        )
        classes = int(max(self.high + 1, values.get("target/columns", 0.0))) if math.isfinite(self.high) else 0
        seen: dict[str, Any] = {"units": int(values.get("head/units", 0)), "classes": classes}
        seen |= {"target_min": self.low, "target_max": self.high, "row_sum": values.get("target/row_sum", math.nan)}
        seen |= {"samples": int(values.get("head/samples", 0)), "low": low, "high": high}
        seen |= {"padding": values.get("target/padding", 0.0), "pad_label": int(values.get("target/dominant", 0.0))}
        name = LAYER_NAMES.get(activation, activation)
        severity: Severity = "critical" if cause in ("one_unit", "no_log", "range", "negated") else "warning"
        text = {
            "what": self._title(cause, name, loss),
            "loss": LOSS_NAMES.get(loss, "the loss"),
            "activation": name,
            "given": "probabilities" if activation else "raw outputs",
            "instead": "" if loss in ("cross_entropy", "bce_logits") else ", or use a Tanh if targets are in [-1, 1]",
            "scaled": f"y / {self.high:g}",
        }
        if cause == "no_log":
            text["instead"] = "cross_entropy" if loss == "nll" else "log_softmax"
            text["log_code"] = "loss = F.cross_entropy(logits, y)"
            if loss == "kl":
                text["log_code"] = 'loss = F.kl_div(F.log_softmax(logits, dim=1), y, reduction="batchmean")'
        if cause == "range" and self.low < 0:
            text["scaled"] = f"(y + {-self.low:g}) / {self.high - self.low:g}"
        return Observation(
            severity="info" if cause in ("mse_classes", "policy") else severity,
            seen=seen,
            text=text,
            since=0,
            key=cause,
        )

    def _copies(self, step: Step) -> bool:
        """Whether the targets are the inputs, and nothing keeps the model from copying them, as a bottleneck does."""
        if not self.copied >= max(self.seen_batches, self.ENOUGH):
            return False
        losses = step.history["loss"]
        return len(losses) >= 20 and losses.median(20) < self.COPIED * step.first_loss

    def _cause(self, step: Step, activation: str, loss: str) -> str:
        values = step.values
        likelihood = loss in ("bce", "bce_logits", "log")
        known = self.seen_batches >= self.ENOUGH and self.low <= self.high
        span = max(self.high - self.low, 1e-6)
        if values.get("head/encouraged") == 1:
            return "policy"
        if values.get("head/broadcast") == 1:
            return "broadcast"
        if values.get("head/negated") == 1 and not step.alternating:
            return "negated"
        if values.get("head/scrambled") == 1:
            return "scrambled"
        if values.get("head/batch_softmax") == 1 and values.get("head/products") != 1:
            return "batch_softmax"
        if values.get("head/softmax_units") == 1:
            return "one_unit"
        if loss == "cross_entropy" and activation == "softmax":
            return "double_softmax"
        if loss == "bce_logits" and activation == "sigmoid":
            return "double_sigmoid"
        if loss in ("cross_entropy", "bce_logits") and activation in ("sigmoid", "tanh"):
            return "bounded_logits" if values.get("head/scaled") == 0 else ""
        if loss in ("nll", "kl") and values.get("head/logs") == 0 and activation in ("", "softmax", "sigmoid"):
            return "no_log"
        if activation == "relu" and (loss in ("cross_entropy", "bce_logits") or (known and self.low < -0.02 * span)):
            return "relu_output"
        if values.get("head/raw_log") == 1:
            return "raw_log"
        if known and likelihood and (self.high > 1 + self.MARGIN or self.low < -self.MARGIN):
            few = values.get("target/integer", 0) > 0.99 and values.get("target/columns") == 1 and self.low >= 0
            return "classes" if few and values.get("head/units") == 1 else "range" if loss != "log" else ""
        if known and loss in REGRESSION and activation in ("sigmoid", "tanh", "softmax"):
            bottom = -1.0 if activation == "tanh" else 0.0
            if self.high > 1 + self.MARGIN * span or self.low < bottom - self.MARGIN * span:
                return "bounded"
        if self.seen_batches >= self.ENOUGH and values.get("target/padding", 0.0) > self.PADDING:
            return "padding"
        whole = values.get("target/integer", 0) > 0.99
        several = values.get("target/columns", 0) >= 3 and values.get("target/one_hot", 1) < 0.7
        if known and likelihood and whole and several and activation in ("softmax", "log_softmax"):
            return "multi_label"
        if known and loss in REGRESSION and values.get("target/one_hot", 0) > 0.99:
            return "mse_classes" if values.get("target/columns", 0) >= 3 else ""
        return ""

    def _title(self, cause: str, activation: str, loss: str) -> str:
        return {
            "one_unit": "The model applies a softmax to a single output",
            "double_softmax": "The model applies a softmax before cross_entropy",
            "double_sigmoid": "The model applies a sigmoid before binary_cross_entropy_with_logits",
            "batch_softmax": "The softmax of the outputs is taken over the samples of the batch",
            "bounded_logits": f"The model applies a {activation} before {LOSS_NAMES.get(loss, 'the loss')}",
            "no_log": f"{LOSS_NAMES.get(loss, 'The loss')} gets outputs that are not log-probabilities",
            "relu_output": "The model ends in a ReLU",
            "bounded": f"The targets are outside the range of the output's {activation}",
            "classes": "One output unit cannot learn several classes",
            "multi_label": "A softmax makes independent labels compete",
            "raw_log": "The loss takes the log of raw outputs",
            "broadcast": "Outputs and targets have different shapes and broadcast",
            "mse_classes": "The loss is a mean squared error, but the targets are classes",
            "range": "The targets are outside the range 0 to 1",
            "scrambled": "A reshape mixes up outputs of different positions",
            "negated": "The loss has the wrong sign",
            "policy": "The loss of the policy may have the wrong sign",
            "padding": "Padding counts as a class in the loss",
            "copied": "The targets are the inputs",
        }[cause]


@register
@dataclass
class UnscaledData(SetupRule):
    """Inputs or targets are far from 0 mean and unit spread."""

    id = "unscaled_data"
    needs = ("input/std",)
    message = Message(
        name="Data not scaled",
        pattern=(
            "The inputs of the first layer, or the targets of a regression, have a mean or spread of 10 or more (a "
            "note, or a warning from 30 on), or the spreads of columns differ by a factor of 1,000."
        ),
        title="The {what} are not standardized: {how}",
        causes={
            "pixels": "The inputs are raw pixels from 0 to 255: gradients are {scale} times too large for this model",
            "units": "The inputs are not standardized: spreads go from {low} to {high}, and the largest drown the rest",
            "inputs": (
                "The inputs are not standardized: a mean of up to {offset} and a spread of up to {high} make the first "
                "steps too large and the gradients uneven"
            ),
            "both": (
                "Inputs and targets are not standardized: inputs reach {largest}, and targets have a mean of "
                "{target_mean} and a spread of {target_std}"
            ),
            "targets": (
                "The targets are not standardized: with a mean of {target_mean} and a spread of {target_std}, outputs "
                "start far away, and the loss and its gradients are huge"
            ),
        },
        fixes={
            "pixels": "Divide the inputs by 255",
            "units": "Standardize each input column by its mean and standard deviation on the training data",
            "inputs": "Standardize the inputs by their mean and standard deviation on the training data",
            "both": "Standardize inputs and targets by their mean and standard deviation on the training data",
            "targets": "Standardize the targets, and multiply predictions by {target_std} and add {target_mean}",
        },
        changes={
            **{key: {"inputs": "standardize"} for key in ("pixels", "units", "inputs")},
            "both": {"inputs": "standardize", "targets": "standardize"},
            "targets": {"targets": "standardize"},
        },
        snippets={
            "pixels": "x = x / 255",
            "units": STANDARDIZED,
            "inputs": STANDARDIZED,
            "both": STANDARDIZED + "\n" + STANDARDIZED.replace("x", "y"),
            "targets": "y = (y - {target_mean}) / {target_std}",
        },
        is_certain=True,
        passed="inputs and targets have an ordinary scale",
    )

    ENOUGH = 3  # inspected batches
    NOTE = 10.0  # mean or spread
    WARNING = 30.0
    WARNING_TARGETS = 300.0
    UNITS = 1000.0  # ratio of the spreads of two columns

    batches: int = field(default=0, init=False)

    def check(self, step: Step) -> Observation | None:
        values = step.values
        if not ("input/std" in values or "target/std" in values) or self.batches > self.ENOUGH:
            return None
        self.batches += 1
        if self.batches != self.ENOUGH or step.is_reinforced:
            return None
        offset, high, low = (values.get(f"input/{name}", 0.0) for name in ("offset", "spread_high", "spread_low"))
        normalized = values.get("input/normalized") == 1
        inputs = 0.0 if normalized else max(offset, high)
        ratio = high / low if 0 < low < math.inf and high > 3 and not normalized else 1.0
        regression = step.loss_function in REGRESSION
        mean, std = values.get("target/mean", 0.0), values.get("target/std", 0.0)
        targets = max(abs(mean), std) if regression else 0.0
        worst = max(inputs, targets)
        if worst < self.NOTE and ratio < self.UNITS:
            return None
        bad_inputs, bad_targets = inputs >= self.NOTE or ratio >= self.UNITS, targets >= self.NOTE
        largest, whole = values.get("input/max", 0.0), values.get("input/integer", 0.0) > 0.99
        if bad_inputs and bad_targets:
            cause, what = "both", "inputs and targets"
        elif bad_targets:
            cause, what = "targets", "targets"
        elif whole and 100 < largest <= 255 and values.get("input/min", -1.0) >= 0:
            cause, what = "pixels", "inputs"
        else:
            cause, what = "units" if ratio >= 10 else "inputs", "inputs"
        how = f"they reach {number(largest)}" if bad_inputs else f"their mean is {number(mean)}"
        seen = {"largest": largest, "offset": offset, "high": high, "low": low, "target_mean": mean, "target_std": std}
        harmful = inputs >= self.WARNING or targets >= self.WARNING_TARGETS or ratio >= self.UNITS
        return Observation(
            severity="warning" if harmful else "info",
            seen=seen | {"scale": max(inputs, 1.0)},
            text={"what": what, "how": how},
            since=0,
            key=cause,
        )


@register
@dataclass
class BadStart(Rule):
    """The first loss is far above that of predicting the mean."""

    id = "bad_start"
    family = "setup"
    is_symptom = True
    needs = ("loss", "target/trivial_loss")
    judges_after = 0
    closes_after = NEVER
    message = Message(
        name="First loss too high",
        pattern=(
            "Before any step, the loss of a classifier is over 4 times that of predicting the class frequencies, or a "
            "mean squared error on centered targets is over 10 times that of predicting their mean."
        ),
        title="The first loss is {loss}, {ratio}× that of predicting the {guess} ({trivial})",
        causes={
            "weights": ("The initialization is too large: outputs start {outputs}, which training must unlearn"),
            "embeddings": (
                "Embeddings start too large: nn.Embedding draws them with a standard deviation of 1, so outputs start "
                "{outputs}, which training must unlearn"
            ),
        },
        fixes={
            "weights": "Keep torch's default initialization, or divide the initial weights by {too_large} or more",
            "embeddings": "Start embeddings with a standard deviation of 0.1 or less",
        },
        changes={"weights": {"initialization": "default"}},
        snippets={
            "weights": "nn.init.xavier_uniform_(layer.weight)\nnn.init.zeros_(layer.bias)",
            "embeddings": "nn.init.normal_(embedding.weight, std=0.05)",
        },
        passed="the first loss is what an untrained model should have",
    )

    FAR = 4.0
    EVEN = 2.0  # the loss over that of equal scores for all classes
    SQUARES = 10.0  # a mean squared error over the variance of the targets
    SAMPLES = 4  # in a batch, at least: the first loss of a few samples says little

    batches: int = field(default=0, init=False)

    def check(self, step: Step) -> Observation | None:
        if "target/trivial_loss" not in step.values or self.batches > 3:
            return None
        self.batches += 1
        losses, trivial = step.history["loss"], step.values["target/trivial_loss"]
        # Binary losses of many targets, such as pixels, are often sums over them.
        binary = step.loss_function in ("bce_logits", "bce") and step.value("target/columns") == 1
        likelihood = binary or step.loss_function == "cross_entropy"
        mean, std = step.value("target/mean"), step.value("target/std")
        centered = step.loss_function == "mse" and std > 0 and abs(mean) < std
        if self.batches != 3 or not len(losses) or losses.steps[0] > 0 or step.fact("head/samples") < self.SAMPLES:
            return None
        if not trivial > (0.0 if centered else 0.1):
            return None
        ratio = losses.values[0] / trivial
        # With rare classes, equal scores are already far above the frequencies, and no sign of large weights.
        even = math.log(2 if binary else max(step.fact("head/softmax_units"), 2))
        far = likelihood and ratio > self.FAR and losses.values[0] > self.EVEN * even
        if not (far or (centered and ratio > self.SQUARES)):
            return None
        seen = {"loss": losses.values[0], "ratio": ratio, "trivial": trivial, "too_large": ratio}
        text = {
            "guess": "class frequencies" if far else "mean",
            "outputs": "confident and wrong" if far else "far from the targets",
        }
        cause = "embeddings" if step.fact("input/lookup") == 1 else "weights"
        return Observation(severity="warning", seen=seen, expected={"loss": trivial}, text=text, since=0, key=cause)


@register
@dataclass
class NoNonlinearity(SetupRule):
    """Several layers follow each other without anything nonlinear between them."""

    id = "no_nonlinearity"
    needs = ("body/layers",)
    message = Message(
        name="No activation between layers",
        pattern="The model has two or more layers with no nonlinear operation between them.",
        title="The model has no activation between its {layers} layers",
        causes={
            "linear": "Without an activation between them, {layers} layers compute no more than a single linear one"
        },
        fixes={"add": "Put a nonlinearity such as nn.ReLU() after every layer but the last"},
        changes={"add": {"activation": "ReLU"}},
        snippets={"add": "x = F.relu(self.layer1(x))\nreturn self.layer2(x)"},
        passed="there are activations between layers",
    )

    def check(self, step: Step) -> Observation | None:
        values = step.values
        layers = values.get("body/layers", 0.0)
        if layers < 2 or values.get("body/nonlinear", 1.0) > 0 or values.get("head/foreign") == 1:
            return None
        if values.get("head/products") == 1 or values.get("head/terms", 1.0) >= layers:
            return None  # layers side by side
        return Observation(severity="warning", seen={"layers": int(layers)}, since=0)


@register
@dataclass
class LayerWiring(SetupRule):
    """A layer is fed what it cannot learn from."""

    id = "layer_wiring"
    needs = ("body/layers",)
    message = Message(
        name="Layers wired wrongly",
        pattern=(
            "A recurrent layer without batch_first=True takes the samples of a batch for time steps; a softmax between "
            "layers is taken over one element or over the batch; the model averages over the batch; or all data must "
            "pass three or fewer units, and much of the loss is left. As a note, unless a symptom confirms it: a "
            "linear layer is fed the result of a softmax, attention has no positions, or starts with hard choices. Or "
            "attention sees the tokens that the model is to predict; or a recurrent layer ends on padding."
        ),
        title="{what}",
        causes={
            "time": (
                "The model reads time steps at dimension 1, but without batch_first=True a recurrent layer has time "
                "at dimension 0: its state passes from sample to sample, and each sees one time step of its own"
            ),
            "single": "A softmax over a dimension of size 1 is always 1: its scores have no effect and get no gradient",
            "batch": (
                "A softmax between layers is taken over dimension 0: it makes the samples of a batch compete, and what "
                "one of them gets depends on the others"
            ),
            "batch_mean": (
                "The model averages over dimension 0, the samples of the batch, so that all of them get one output"
            ),
            "visible": (
                "Attention has no causal mask: each place sees the next token, which is its label, so the model learns "
                "to copy it and cannot generate"
            ),
            "padded": (
                "The model uses the last time step of a recurrent layer, and {padded:%} of the time steps are padding "
                "at the end: what it has read is mostly forgotten by then"
            ),
            "positions": (
                "Attention treats its inputs as a set: nothing was added to them that shows their positions, so the "
                "model cannot learn anything that depends on order"
            ),
            "narrow": (
                "The model has too few hidden units: everything it knows about an input must pass a layer of {narrow}, "
                "and {left:%} of the loss of a trivial prediction is left"
            ),
            "peaked": (
                "Attention starts saturated: on average {peak:%} of its weight is on one place, so that hardly any "
                "gradient reaches its scores. They are not divided by the square root of their size, or too large"
            ),
            "softmax": (
                "A softmax as a hidden activation turns {units} outputs into shares of about {share} each: hardly any "
                "signal passes to the next layer, and hardly any gradient back"
            ),
        },
        fixes={
            "time": "Make the recurrent layer with batch_first=True",
            "single": "Take the softmax over the dimension to choose from, such as the time steps: dim=1, not dim=-1",
            "batch": "Take the softmax over the dimension to choose from, such as the time steps: dim=1, not dim=0",
            "batch_mean": "Average over the dimension to pool, such as the time steps: mean(1), not mean(0)",
            "visible": "Mask later places in attention: is_causal=True, or generate_square_subsequent_mask",
            "padded": "Use the last step that is no padding: nn.utils.rnn.pack_padded_sequence, or an index per sample",
            "positions": "Add position embeddings, learned or sinusoidal, to the inputs of the first attention layer",
            "narrow": "Give the layer more units: 32 or more, unless a small code is what you want",
            "peaked": "Divide the scores by the square root of their size, or use F.scaled_dot_product_attention",
            "softmax": "Replace the softmax between layers with nn.ReLU()",
        },
        changes={"time": {"batch_first": True}, "softmax": {"activation": "ReLU"}},
        snippets={
            "time": "self.rnn = nn.LSTM(inputs, hidden, batch_first=True)",
            "positions": "x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))",
            "peaked": "scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5",
            "softmax": "nn.Linear(inputs, {units}), nn.ReLU(), ...",
        },
        is_certain=True,
        passed="layers are fed what they can learn from",
    )

    FEWEST = 8  # units of a softmax that is no gate
    BATCHES = 3  # inspected batches in a row with a softmax over one element: a sequence may have one step
    PEAKED = 0.9  # mean weight of one place at the start, where attention is nearly even
    LEFT, LONG, FLAT = 0.3, 200, 0.2  # loss left, steps, and fall over their last third, for units that are too few
    CODED = 8  # columns from which equally many inputs and targets are those of an autoencoder, whose code is small
    STUCK = 0.7  # loss left with which hard choices of attention are no note any more
    DEAD = 0.75  # share of a layer's units that are off
    PADDED = 0.5  # share of padding that a recurrent layer reads after the end of a sequence

    WHATS: ClassVar[dict[str, str]] = {
        "time": "A recurrent layer runs over the samples of a batch instead of the time steps",
        "batch": "A softmax between layers is taken over the samples of the batch",
        "single": "A softmax between layers is taken over a single element",
        "batch_mean": "The model gives all samples of a batch the same output",
        "visible": "Attention sees the tokens that the model is to predict",
        "padded": "A recurrent layer reads padding after the end of most sequences",
        "positions": "Attention does not know the positions of its inputs",
        "peaked": "Attention starts with hard choices",
        "softmax": "A softmax is used between layers",
        "narrow": "All data must pass a layer of {narrow}",
    }

    is_peaked: bool = field(default=False, init=False)
    dies: bool = field(default=False, init=False)
    """Whether units of a layer died, which explains more than that there are few."""
    lasted: dict[str, int] = field(default_factory=dict, init=False)
    """Inspected batches in a row with what a single one may show by chance."""

    def check(self, step: Step) -> Observation | None:
        values, dead = step.values, step.tensors("activation/dead_fraction")
        self.dies |= dead is not None and bool((np.asarray(dead) >= self.DEAD).any())
        if "body/layers" not in values:
            return None
        units, first = values.get("body/softmax_units", 0.0), step.number == 0
        shown = {"single": values.get("body/single_softmax", 0.0) > 0, "batch_mean": values.get("body/batch_mean") == 1}
        shown |= {"visible": values.get("target/visible") == 1, "padded": values.get("input/padded", 0.0) > self.PADDED}
        self.lasted = {name: self.lasted.get(name, 0) + 1 if holds else 0 for name, holds in shown.items()}
        if values.get("head/foreign") == 1:
            return None
        tests = {
            "time": values.get("body/time_first") == 1,
            "batch": values.get("body/batch_softmax") == 1,
            **{name: count >= self.BATCHES for name, count in self.lasted.items()},
            "positions": values.get("body/unordered") == 1,
            "softmax": units >= self.FEWEST,
            "peaked": first and values.get("body/peaked", 0.0) > self.PEAKED,
        }
        self.is_peaked |= tests["peaked"]
        cause = next((name for name, holds in tests.items() if holds), "")
        severity: Severity = "info" if cause in ("positions", "softmax", "peaked") else "warning"
        seen: dict[str, Any] = {"padded": values.get("input/padded", 0.0)} if cause == "padded" else {}
        seen |= {"units": int(units), "share": 1 / max(units, 1.0), "peak": values.get("body/peaked", math.nan)}
        return self._observe(cause, severity, seen) if cause else None

    def conclude(self, step: Step) -> Observation | None:
        narrow, left = step.fact("body/narrow"), step.loss_left
        if self.is_peaked and left > self.STUCK and step.number >= self.LONG and step.trivial_loss < math.inf:
            return self._observe("peaked", "warning", {"peak": step.fact("body/peaked")})
        losses = step.history["loss"].last(max(step.number // 3, 50))
        copies = step.fact("target/columns") == step.fact("input/columns") >= self.CODED
        enough = narrow > 0 and left > self.LEFT and step.number >= self.LONG
        if not enough or copies or self.dies or not step.loss_should_fall:
            return None
        fell, _ = fall(losses)
        if step.trivial_loss == math.inf or not fell < self.FLAT * float(np.mean(losses)):
            return None
        units = f"{narrow:.0f} unit{'s' if narrow > 1 else ''}"
        return self._observe("narrow", "warning", {"narrow": units, "left": min(left, 1.0)})

    def _observe(self, cause: str, severity: Severity, seen: dict[str, Any]) -> Observation:
        what = self.WHATS[cause].format_map(seen)
        return Observation(severity=severity, seen=seen, text={"what": what}, since=0, key=cause)


@register
@dataclass
class HiddenLayers(SetupRule):
    """Layers that the loss uses are not parameters of the model, so that no optimizer holds them."""

    id = "hidden_layers"
    needs = ("body/hidden",)
    message = Message(
        name="Layers missing from the model",
        pattern="Backward reaches layers that a module keeps in a plain list or dict, and no optimizer updates them.",
        title="{tensors} tensors that the loss depends on are not parameters of the model, and never change",
        causes={"list": "Layers are kept in a plain Python list or dict, which model.parameters() does not look into"},
        fixes={"list": "Keep layers in nn.ModuleList or nn.ModuleDict, and set requires_grad to False for frozen ones"},
        changes={"list": {"layers": "ModuleList"}},
        snippets={"list": "self.layers = nn.ModuleList(layers)"},
        passed="the model has every layer that the loss uses",
    )

    BATCHES = 3  # inspected batches in a row

    lasted: int = field(default=0, init=False)

    def check(self, step: Step) -> Observation | None:
        hidden = step.values.get("body/hidden")
        if hidden is None:
            return None
        self.lasted = self.lasted + 1 if hidden else 0
        if self.lasted < self.BATCHES:
            return None
        return Observation(severity="warning", seen={"tensors": int(hidden)}, since=0)


@register
@dataclass
class EqualUnits(SetupRule):
    """All units of a layer start with the same weights."""

    id = "equal_units"
    needs = ("body/equal_units",)
    message = Message(
        name="Identical units",
        pattern="At the first step all rows of a weight matrix are the same, and not zero unless all weights are.",
        title="All units start with the same weights in {layers} of the model's weight matrices",
        causes={
            "constant": "The weights start at a constant, such as zero: identical units get equal gradients and stay so"
        },
        fixes={"constant": "Start with random weights: keep torch's default, or use nn.init.kaiming_normal_"},
        changes={"constant": {"initialization": "default"}},
        snippets={"constant": "nn.init.kaiming_normal_(layer.weight)"},
        passed="the units of every layer start with different weights",
    )

    def check(self, step: Step) -> Observation | None:
        layers = step.values.get("body/equal_units", 0.0)
        return Observation(severity="warning", seen={"layers": int(layers)}, since=0) if layers else None


@register
@dataclass
class DataOrder(SetupRule):
    """Every step gets the same batch, or batches come sorted by class."""

    id = "data_order"
    needs = ("input/checksum",)
    judges_after = 60
    message = Message(
        name="Batches not shuffled",
        pattern=(
            "The first steps all use the same few samples of many, each batch contains a single class, or the "
            "targets of each batch are above, or below, those of the one before."
        ),
        title="{what}",
        causes={
            "same": (
                "Every step trains on the same small batch: the loop never fetches the next one, or the random seed is "
                "set anew before each"
            ),
            "sorted": (
                "The data is sorted by class and not shuffled: while the model learns one class, it unlearns the others"
            ),
            "ordered": (
                "The data is sorted by its targets and not shuffled: the means of batches are {apart}× as far apart as "
                "the targets within one, so every batch pulls the model to where it is"
            ),
        },
        fixes={
            "same": "Fetch a new batch at every step, with for x, y in loader, and set seeds once, before the loop",
            "sorted": "Shuffle the data: DataLoader(..., shuffle=True)",
            "ordered": "Shuffle the data: DataLoader(..., shuffle=True)",
        },
        changes={key: {"shuffle": True} for key in ("same", "sorted", "ordered")},
        snippets={
            "same": "for x, y in loader:  # not next(iter(loader))",
            **dict.fromkeys(("sorted", "ordered"), "loader = DataLoader(dataset, batch_size={samples}, shuffle=True)"),
        },
        is_certain=True,
        passed="batches differ and contain several classes",
    )

    SAME = 6  # equal batches in a row
    PURE = 0.9  # share of one class
    BATCHES = 6  # batches of one class
    FEWEST = 8  # samples in a batch
    APART = 2.0  # change of the mean target from batch to batch, over the spread of targets within one

    last: float = field(default=math.nan, init=False)
    last_step: int = field(default=-2, init=False)
    same: int = field(default=0, init=False)
    pure: int = field(default=0, init=False)
    mixed: int = field(default=0, init=False)
    classes: list[int] = field(default_factory=list, init=False)
    """Classes that filled a batch."""
    means: list[float] = field(default_factory=list, init=False)
    """Mean target of each batch, in a regression."""
    spreads: list[float] = field(default_factory=list, init=False)

    def check(self, step: Step) -> Observation | None:
        values = step.values
        samples = step.fact("head/samples")
        if "input/checksum" in values:
            equal = values["input/checksum"] == self.last and step.number == self.last_step + 1
            self.same = self.same + 1 if equal else 0
            self.last, self.last_step = values["input/checksum"], step.number
            if self.same >= self.SAME and values.get("input/part") == 1:
                return self._observe("same", "Every step trains on the same batch", samples)
        if "target/purity" in values and samples >= self.FEWEST and not step.alternating:
            if values["target/purity"] >= self.PURE:
                self.pure += 1
                dominant = int(values.get("target/dominant", -1.0))
                if dominant not in self.classes:
                    self.classes.append(dominant)
            else:
                self.mixed += 1
            if self.pure >= self.BATCHES and len(self.classes) >= 2 and self.mixed <= self.pure / 2:
                return self._observe("sorted", "Each batch contains a single class: the data is sorted", samples)
        if step.loss_function in REGRESSION and "target/batch_mean" in values and samples >= self.FEWEST:
            self.means.append(values["target/batch_mean"])
            self.spreads.append(values["target/batch_std"])
            changes, spread = np.diff(self.means), float(np.median(self.spreads))
            enough = len(changes) >= self.BATCHES and spread > 0
            apart = float(np.median(np.abs(changes))) / spread if enough else 0.0
            # Those of each batch are all above, or all below, those of the one before.
            if apart > self.APART and abs(np.sign(changes).sum()) == len(changes):
                return self._observe("ordered", "Batches are not shuffled: the data is sorted", samples, apart)
        return None

    def _observe(self, cause: str, what: str, samples: float, apart: float = math.nan) -> Observation:
        seen: dict[str, Any] = {"apart": apart} if cause == "ordered" else {}
        seen |= {"samples": int(samples) if math.isfinite(samples) else 32}
        return Observation(severity="warning", seen=seen, text={"what": what}, since=0, key=cause)


@register
@dataclass
class OptimizerSettings(SetupRule):
    """The optimizer has settings that it cannot work well with."""

    id = "optimizer_settings"
    needs = ("lr",)
    message = Message(
        name="Optimizer settings",
        pattern=(
            "Adam's beta1 is above beta2 (a warning), or its eps is above the gradients that it is added to (a note, "
            "unless a symptom confirms it)."
        ),
        title="{what}",
        causes={
            "betas": (
                "The betas of {beta1} and {beta2} look swapped: momentum averages thousands of gradients, and the "
                "scale of steps only the last few, so steps grow and overshoot"
            ),
            "eps": (
                "An eps of {eps} is {times}× the gradient of a typical weight ({rms}): it makes Adam's steps about as "
                "many times smaller, and takes away what adapts them"
            ),
        },
        fixes={
            "betas": "Swap them: betas=({beta2}, {beta1})",
            "eps": "Use the default eps of 1e-8",
        },
        changes={"eps": {"eps": 1e-8}},
        snippets={"betas": "torch.optim.Adam(model.parameters(), lr={lr}, betas=({beta2}, {beta1}))"},
        is_certain=True,
        passed="the optimizer's settings are ordinary",
    )

    EPS = 1e-4  # ordinary values of eps are far below
    TIMES = 3.0  # eps over the root mean square of the gradient

    def check(self, step: Step) -> Observation | None:
        info, norm, size = step.info, step.value("grad/norm"), float(step.layout.sizes.sum())
        seen: dict[str, Any] = {"lr": step.value("lr"), "eps": info.eps or 0.0}
        if info.betas and info.betas[0] > max(info.betas[1], 0.95):
            seen |= {"beta1": info.betas[0], "beta2": info.betas[1]}
            text = {"what": "Adam's betas look swapped"}
            return Observation(severity="warning", seen=seen, text=text, since=0, key="betas")
        if step.number > 20 or not (info.betas and seen["eps"] > self.EPS and size and norm > 0):
            return None
        rms = norm / math.sqrt(size)
        if seen["eps"] < self.TIMES * rms:
            return None
        seen |= {"times": seen["eps"] / rms, "rms": rms}
        text = {"what": f"Adam's eps of {number(seen['eps'])} is far above the gradients"}
        return Observation(severity="info", seen=seen, text=text, since=0, key="eps")


@register
@dataclass
class OneClass(Rule):
    """The model predicts the most frequent class for every sample."""

    id = "one_class"
    family = "setup"
    needs = ("head/purity", "target/purity")
    judges_after = 200
    closes_after = 100
    holds = True
    expects_fall = True
    follows = (
        "data_order",
        "loss_mismatch",
        "bad_inputs",
        "unscaled_data",
        "lr_too_high",
        "loss_plateau",
        "dead_units",
    )
    message = Message(
        name="One class predicted",
        pattern=(
            "For half of the run, a classifier predicts the same class for every sample of the batches inspected, "
            "while 80% or more of the labels are of one class."
        ),
        title="The model predicts the same class for every sample, although {others:%} of the labels are of others",
        causes={
            "imbalanced": (
                "The classes are imbalanced, {share:%} against {others:%}, and the loss does not weight them: always "
                "predicting the majority class already makes few errors"
            )
        },
        fixes={
            "weight": "Weight the rare classes in the loss, with pos_weight or weight, or sample them more often",
            "threshold": "If only probabilities matter, this is no fault: choose a threshold below 0.5 for decisions",
        },
        changes={"weight": {"loss_weight": "balanced"}},
        snippets={"weight": "loss = F.binary_cross_entropy_with_logits(logits, y, pos_weight=negatives / positives)"},
        passed="predictions differ between samples, or the classes are balanced",
    )

    MISSED = 5  # samples of other classes, at least, all of them taken for the majority
    PART = 0.5  # share of the run over which that must last
    MAJORITY = 0.8  # share of the majority class from which imbalance explains it

    since: int = field(default=-1, init=False)
    """The first inspected step since which all predictions were of one class; -1 if the last ones were not."""
    shares: list[float] = field(default_factory=list, init=False)
    """Share of the most frequent label in each batch since then."""
    missed: float = field(default=0.0, init=False)
    """Samples of other classes since then."""

    def check(self, step: Step) -> Observation | None:
        said, share = step.value("head/purity"), step.value("target/purity")
        if math.isnan(said) or math.isnan(share):
            return None
        if said < 1 or share == 0:
            self.since, self.shares, self.missed = -1, [], 0.0
            return None
        self.since, self.shares = step.number if self.since < 0 else self.since, [*self.shares, share][-50:]
        self.missed += (1 - share) * step.fact("head/samples")
        return self.conclude(step)

    def conclude(self, step: Step) -> Observation | None:
        mean = float(np.mean(self.shares or [math.nan]))
        lasts = step.number >= self.judges_after and step.number - self.since >= self.PART * step.number
        if self.since < 0 or not lasts or self.missed < self.MISSED or not self.MAJORITY <= mean < 1:
            return None
        seen = {"share": mean, "others": 1 - mean, "batches": len(self.shares)}
        return Observation(severity="warning", seen=seen, since=self.since)


@register
@dataclass
class LayerModes(SetupRule):
    """Layers that act differently in training are set so that the model cannot learn."""

    id = "layer_modes"
    needs = ("mode/dropout",)
    message = Message(
        name="Dropout, batch norm or mode",
        pattern=(
            "The model trains in evaluation mode although it has batch norm or dropout; dropout removes 80% or more; "
            "batch norm averages over four or fewer values per channel; or dropout or batch norm acts on the outputs."
        ),
        title="{what}",
        causes={
            "eval": "The model trains in evaluation mode: batch norm's statistics never update, and dropout is off",
            "dropout": "Dropout of {dropout} removes nearly all activations at every step",
            "batch_norm": "Batch norm averages over {norm_samples} values: statistics of so few are mostly noise",
            "output_dropout": (
                "Dropout comes after the last layer: it sets outputs to zero at random, and the loss punishes the "
                "model for them"
            ),
            "output_norm": (
                "Batch norm comes after the last layer: it gives the outputs of every batch the same mean and spread, "
                "whatever the targets are"
            ),
        },
        fixes={
            "eval": "Call model.train() before training, and again after each evaluation",
            "dropout": "Lower dropout from {dropout} to {dropout_proposed}",
            "batch_norm": "Use a batch of {batch_proposed} or more, or GroupNorm or LayerNorm instead of batch norm",
            "output_dropout": "Remove the dropout after the last layer; between hidden layers it is fine",
            "output_norm": "Remove the batch norm after the last layer",
        },
        changes={"eval": {"mode": "train"}},
        snippets={
            "eval": "model.train()",
            "dropout": "nn.Dropout({dropout_proposed})",
            "batch_norm": "nn.GroupNorm(1, channels)  # instead of nn.BatchNorm2d(channels)",
        },
        passed="dropout, batch norm and modes are set for training",
    )

    DROPOUT = 0.8
    SAMPLES = 4
    BATCHES = 3  # inspected batches in a row
    APART = 20  # steps between two that are enough

    seen_for: int = field(default=0, init=False)
    since: int = field(default=0, init=False)
    """The first inspected step of those."""

    def check(self, step: Step) -> Observation | None:
        values = step.values
        if "mode/dropout" not in values:
            return None
        dropout, samples = values["mode/dropout"], values.get("mode/norm_samples", math.inf)
        ends = values.get("head/products") != 1 and step.loss_function != ""  # outputs, not embeddings
        tests = {
            "eval": values.get("mode/eval", 0.0) > 0,
            "dropout": dropout >= self.DROPOUT,
            "batch_norm": samples <= self.SAMPLES,
            "output_dropout": ends and values.get("head/dropout") == 1,
            "output_norm": ends and values.get("head/normalized") == 1 and step.loss_function in REGRESSION,
        }
        cause = next((name for name, holds in tests.items() if holds), "")
        self.seen_for = self.seen_for + 1 if cause else 0
        self.since = step.number if self.seen_for == 1 else self.since
        # Left in evaluation mode after a validation: later batches are inspected rarely.
        late = cause == "eval" and self.seen_for > 1 and step.number - self.since >= self.APART
        if self.seen_for < self.BATCHES and not late:
            return None
        titles = {
            "eval": "The model trains in evaluation mode",
            "dropout": f"Dropout is {number(dropout)}",
            "batch_norm": f"Batch norm has {number(samples)} values per channel",
            "output_dropout": "Dropout acts on the outputs of the model",
            "output_norm": "Batch norm acts on the outputs of the model",
        }
        seen = {"dropout": dropout, "dropout_proposed": 0.2, "batch_proposed": 32, "norm_samples": samples}
        return Observation(
            severity="warning",
            seen=seen,
            text={"what": titles[cause]},
            since=self.since,
            key=cause,
        )


@register
@dataclass
class LossUnreached(SetupRule):
    """The loss does not depend on the parameters that the optimizer steps."""

    id = "loss_unreached"
    needs = ("head/reached",)
    message = Message(
        name="Loss does not reach the model",
        pattern="In the first steps, no backward pass reached any parameter that the optimizer updates.",
        title="The loss does not reach any of the parameters that the optimizer updates",
        causes={
            "copy": (
                "The optimizer updates a different model than the one in the loss: a copy, an average, or one that was "
                "replaced after the optimizer was created"
            ),
            "detached": (
                "The loss has no graph: it was computed from detached values, such as argmax, round, .detach(), "
                ".item() or NumPy. Setting requires_grad on the result does not bring the gradient back"
            ),
            "cut": (
                "This model's output was detached before the other model scored it: with .detach(), under no_grad(), "
                "or computed in the other model's step. Its parameters never get a gradient"
            ),
        },
        fixes={
            "make": "Create the optimizer from the parameters of the model that computes the loss",
            "detached": "Compute the loss from the model's raw outputs, with differentiable operations only",
            "cut": "Detach the output only in the step of the other model, and let this one score it with its graph",
        },
        only_if_chosen=("detached", "cut"),
        snippets={"make": "optimizer = type(optimizer)(model.parameters(), lr={lr})"},
        passed="the loss reaches the parameters that the optimizer updates",
    )

    PATIENCE = 5  # inspected steps

    missed: int = field(default=0, init=False)
    reached: bool = field(default=False, init=False)

    def check(self, step: Step) -> Observation | None:
        value = step.values.get("head/reached")
        self.reached |= value == 1
        missed = value in (0, -1)
        self.missed += missed
        if not missed or self.reached or self.missed < self.PATIENCE:
            return None
        seen = {"steps": self.missed, "lr": step.value("lr")}
        # In a GAN the loss goes through the other model, which has an optimizer: what it scores was cut off.
        cause = "detached" if value == -1 else "cut" if step.alternating else "copy"
        fix = "make" if cause == "copy" else cause
        return Observation(severity="critical", seen=seen, since=0, causes=(cause,), fixes=(fix,))
