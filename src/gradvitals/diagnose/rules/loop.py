"""Rules about mistakes in the training loop itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradvitals.diagnose.message import Message, Observation
from gradvitals.diagnose.rule import Rule, register
from gradvitals.diagnose.step import MAX_NAMED, Step
from gradvitals.format import number
from gradvitals.types import Severity


@register
@dataclass
class StaleGradients(Rule):
    """Gradients are not zeroed between steps, so every step uses the sum of all so far."""

    id = "stale_gradients"
    family = "training loop"
    needs = ("tensors:grad/norm",)
    closes_after = 20
    follows = ("unchanged_weights",)  # zero_grad() of an optimizer skips what it does not hold
    masks = ("explosion", "oscillation")
    taints_steps = True
    message = Message(
        name="Gradients not zeroed",
        pattern="Every backward pass adds to the gradients that the previous step left behind.",
        title="Gradients are not zeroed{how}",
        causes={
            "forgotten": "optimizer.zero_grad() is missing, or not called at every step",
            "rarely": (
                "optimizer.zero_grad() is called only every {every} steps, while optimizer.step() is called every time"
            ),
            "elsewhere": "zero_grad() is called on a different model or optimizer than the one that steps",
        },
        fixes={
            "zero": "Call optimizer.zero_grad() once per step, before the first backward",
            "intended": (
                "To accumulate gradients over several batches, call optimizer.step() only after the last of them"
            ),
        },
        changes={"zero": {"zero_grad": "after_step"}},
        snippets={"zero": "optimizer.zero_grad()  # before loss.backward()"},
        only_if_chosen=("rarely",),
        passed="gradients are zeroed between steps",
    )

    PATIENCE = 5  # steps in a row
    RISEN = 1.1  # median of the last ten losses over that of the first ten, from which it is critical

    seen_for: int = field(default=0, init=False)
    since: int = field(default=-1, init=False)
    """The first step of all, which stays."""
    zeroed: list[int] = field(default_factory=list, init=False)
    """Steps at which gradients were zeroed after they had not been."""

    def check(self, step: Step) -> Observation | None:
        if step.values.get("grad/carried") != 1:
            if self.seen_for >= self.PATIENCE:
                self.zeroed = [*self.zeroed, step.number][-10:]
            self.seen_for = 0
            return None
        self.seen_for += 1
        if self.seen_for < self.PATIENCE:
            return None
        self.since = step.ago(self.seen_for - 1) if self.since < 0 else self.since
        losses = step.history["loss"]
        first = float(np.median(step.first_losses or [math.nan]))
        harms = len(losses) >= 20 and losses.median(10) - first > (self.RISEN - 1) * abs(first)
        seen = {"steps": self.seen_for, "norm": step.value("grad/norm")}
        how, rarely = f": since step {self.since:,}, every step uses the sum of all earlier gradients", False
        if len(self.zeroed) > 2:
            seen["every"] = every = int(np.median(np.diff(self.zeroed)))
            how, rarely = f" at every step, only every {every}: other steps use the sum of those before", True
        return Observation(
            severity="critical" if harms else "warning",
            seen=seen,
            text={"how": how},
            since=self.since,
            causes=("rarely",) if rarely else (),
            active=self.seen_for != self.PATIENCE or len(self.zeroed) != 3,  # from then on, the texts are others
        )


@register
@dataclass
class BatchesGivenUp(Rule):
    """The loop skips batches: it zeroes their gradients, or never computes them, and takes no step."""

    id = "batches_given_up"
    family = "training loop"
    closes_after = 100
    message = Message(
        name="Skipped batches",
        pattern=(
            "The loop sometimes skips a batch without taking a step: a warning if its loss or gradient was NaN or Inf."
        ),
        title="The loop skipped batches{whose} without taking a step, the first before step {step}",
        causes={
            "broken": "Their loss was {loss}, and the loop continued without a step",
            "gradient": "Their gradient norm was {norm}, and the loop continued without a step",
            "chosen": "The loop zeroed the gradients of a batch, or moved on to the next one, without a step",
        },
        fixes={
            "find": "Find the batch: gradvitals counts optimizer steps, so a batch counter is ahead of it",
            "broken": "Check it for empty samples, NaN and Inf, and the loss of {loss} for a division or log of 0",
            "gradient": (
                "Check it for zeros and very large values: a finite loss can have an infinite gradient, for example "
                "after a square root or norm of 0, a division by almost 0, or an overflow in float16"
            ),
            "chosen": "No action needed if this is intended ({batches} when this was found)",
        },
        passed="the loop skipped no batches",
    )

    PATIENCE = 20  # steps before it is reported: alternating optimizers, which skip too, are known by then
    SHARE = 1 / 3  # skipped batches over steps above which it is a method (such as SAM), if all of it is finite

    begun: int = field(default=-1, init=False)
    """The first step that was seen."""
    total: int = field(default=0, init=False)
    broken: int = field(default=0, init=False)
    """Those of them whose loss or gradient was NaN or Inf. Others are seen only at steps that are read."""
    loss: float = field(default=0.0, init=False)
    """Loss of the last of these; 0 if it was not observed."""
    norm: float = field(default=0.0, init=False)
    """Norm of its gradient; 0 if it was not read."""
    first: int = field(default=-1, init=False)
    reported: bool = field(default=True, init=False)

    def check(self, step: Step) -> Observation | None:
        if self.begun < 0:
            self.begun = step.number
        given_up = step.values.get("batches/given_up", 0.0)
        if given_up > 0:
            self.first = step.number if self.reported else self.first
            self.total, self.reported = self.total + int(given_up), False
            loss, norm = (step.values.get(f"batches/given_up_{name}", 0.0) for name in ("loss", "norm"))
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self.loss, self.norm, self.broken = loss, norm, self.broken + int(given_up)
        if self.reported or step.history.steps_seen < self.PATIENCE or step.alternating:
            return None
        self.reported = True
        steps, read = step.number - self.begun + 1, step.history.steps_seen + 1
        many = self.broken + (self.total - self.broken) * steps / read > self.SHARE * steps
        if many and not self.broken:
            return None
        severity: Severity = "critical" if many else "warning"
        seen: dict[str, Any] = {"batches": self.total}
        if not self.broken:
            severity, kind, whose = "info", "chosen", ""
        elif math.isfinite(self.loss):
            kind, whose = "gradient", f" with a gradient norm of {number(self.norm)}"
            seen["norm"] = self.norm
        else:
            kind, whose = "broken", f" with a loss of {number(self.loss)}"
            seen["loss"] = self.loss
        return Observation(
            severity=severity,
            seen=seen,
            expected={"batches": 0},
            text={"whose": whose},
            since=self.first,
            causes=(kind,),
            fixes=("find", kind),
        )


@register
@dataclass
class TrainedInTurn(Rule):
    """The model alternates with another one, as in a GAN: rules that expect the loss to fall do not check it."""

    id = "trained_in_turn"
    family = "training loop"
    judges_after = 0
    closes_after = 500
    masks = ("mixed_passes", "deep_layer_collapse")
    message = Message(
        name="Alternating optimizers (GAN-like)",
        pattern="Two optimizers alternate, and the loss of one model goes through the other, as in a GAN (a note).",
        title="Optimizers alternate, as in a GAN: a rising or flat loss is not reported",
        causes={"game": "The models compete, so neither loss has to fall"},
        fixes={
            "score": "Judge progress by the generated samples, or a score such as FID: these losses do not show it",
            "balance": "If one model's loss drops to 0 and stays there, slow it down: the other one learns nothing",
        },
        passed="the model does not alternate with another one",
    )

    def check(self, step: Step) -> Observation | None:
        return Observation(severity="info", seen={"loss": step.value("loss")}, since=0) if step.alternating else None


@register
@dataclass
class FrozenWeights(Rule):
    """The optimizer holds tensors that are not trained."""

    id = "frozen_weights"
    family = "training loop"
    judges_after = 0
    masks = ("dead_tensor", "unchanged_weights")
    message = Message(
        name="Frozen weights",
        pattern=(
            "Tensors that the optimizer holds do not require a gradient, and do not change: a note, or a warning if "
            "they still hold torch's random initialization."
        ),
        title="{frozen} of {tensors} tensors are frozen and do not change: {where}",
        causes={
            "random": "requires_grad is False for {first}, which still holds its random initialization",
            "frozen": "requires_grad is False for {first}: frozen on purpose, as for fine-tuning, or by mistake",
        },
        fixes={
            "thaw": "Call requires_grad_(True) on {first} before training, or load pretrained weights",
            "intended": (
                "No action needed if {first} is meant to be frozen; otherwise call requires_grad_(True) before training"
            ),
        },
        changes={"thaw": {"requires_grad": True}},
        snippets={"thaw": "model.requires_grad_(True)"},
        only_if_chosen=("random", "thaw"),
        passed="no tensor is frozen",
    )

    def check(self, step: Step) -> Observation | None:
        if not step.frozen:
            return None
        seen = {"frozen": len(step.frozen), "tensors": len(step.layout.tensors)}
        names = step.names(step.frozen[:MAX_NAMED])
        random = step.fact("mode/frozen_random") > 0
        return Observation(
            severity="warning" if random else "info",
            seen=seen,
            expected={"frozen": 0},
            tensors=names,
            causes=("random",) if random else ("frozen",),
            fixes=("thaw",) if random else ("intended",),
        )
