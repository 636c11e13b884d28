"""Rules: mistakes in the training loop itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradvitals.diagnose.rule import Rule, Sign, register
from gradvitals.diagnose.step import NAMED, Step
from gradvitals.types import Severity


@register
@dataclass
class StaleGradients(Rule):
    """Gradients are not zeroed between steps, so every step uses the sum of all so far."""

    id = "stale_gradients"
    needs = ("tensors:grad/norm",)
    closes_after = 20

    patience: int = 5
    """Steps in a row at which it must be so."""

    risen: float = 1.1
    """Median of the last ten losses over that of the first ten, from which it is critical."""

    seen_for: int = field(default=0, init=False)
    first_losses: list[float] = field(default_factory=list, init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires while backward adds to what the step before had left."""
        loss = step.value("loss")
        if len(self.first_losses) < 10 and math.isfinite(loss):
            self.first_losses.append(loss)
        self.seen_for = self.seen_for + 1 if step.value("grad/carried") == 1 else 0
        if self.seen_for < self.patience:
            return None
        seen = {"steps": self.seen_for, "norm": step.value("grad/norm")}
        losses = step.history["loss"].last(10)
        first = float(np.median(self.first_losses or [math.nan]))
        harms = len(step.history["loss"]) >= 20 and float(np.median(losses)) - first > (self.risen - 1) * abs(first)
        severity: Severity = "critical" if harms else "warning"
        return Sign(severity=severity, seen=seen, expected={"steps": 0}, since=step.ago(self.seen_for - 1))


@register
@dataclass
class BatchesGivenUp(Rule):
    """The loop has thrown batches away: their gradients were zeroed, or never made, and no step was made with them."""

    id = "batches_given_up"
    closes_after = 100

    patience: int = 20
    """Steps before it is told: a game, where one side throws away what the other has left, is known by then."""

    share: float = 1 / 3
    """Batches given up over steps, above which it is a method of training (as SAM is), if all of it is finite."""

    begun: int = field(default=-1, init=False)
    """The first step that was seen."""
    total: int = field(default=0, init=False)
    broken: int = field(default=0, init=False)
    """Those of them whose loss or gradient was NaN or Inf. Others are seen only at steps that are read."""
    loss: float = field(default=0.0, init=False)
    """That of the last of these; 0 where it was not told."""
    norm: float = field(default=0.0, init=False)
    """The norm of its gradient; 0 where it was not read."""
    first: int = field(default=-1, init=False)
    told: bool = field(default=True, init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires at a step before which batches were given up."""
        self.begun = step.number if self.begun < 0 else self.begun
        given_up = step.value("batches/given_up")
        if given_up > 0:
            self.first = step.number if self.told else self.first
            self.total, self.told = self.total + int(given_up), False
            loss, norm = (step.general.values.get(f"batches/given_up_{name}", 0.0) for name in ("loss", "norm"))
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self.loss, self.norm, self.broken = loss, norm, self.broken + int(given_up)
        if self.told or step.history.steps_seen < self.patience or step.in_turn:
            return None
        self.told = True
        steps, read = step.number - self.begun + 1, step.history.steps_seen + 1
        many = self.broken + (self.total - self.broken) * steps / read > self.share * steps
        if many and not self.broken:
            return None
        severity: Severity = "critical" if many else "warning"
        kind, seen = "broken", dict[str, Any](batches=self.total, loss=self.loss, whose=f" with a loss of {self.loss}")
        if not self.broken:
            severity, kind, seen = "info", "chosen", {"batches": self.total, "whose": ""}
        elif math.isfinite(self.loss):
            kind, whose = "gradient", f" with a gradient of norm {self.norm}"
            seen = {"batches": self.total, "norm": self.norm, "whose": whose}
        expected = {"batches": 0}
        return Sign(
            severity=severity, seen=seen, expected=expected, since=self.first, causes=(kind,), cures=("find", kind)
        )


@register
@dataclass
class TrainedInTurn(Rule):
    """The model is one side of a game, as in a GAN: rules that expect the loss to fall do not look at it."""

    id = "trained_in_turn"
    judges_after = 0
    closes_after = 500

    def look(self, step: Step) -> Sign | None:
        """Fires while it is so."""
        return Sign(severity="info", seen={"loss": step.value("loss")}, since=0) if step.in_turn else None


@register
@dataclass
class FrozenWeights(Rule):
    """The optimizer holds tensors that are not to be trained."""

    id = "frozen_weights"
    judges_after = 0

    def look(self, step: Step) -> Sign | None:
        """Fires while there are any."""
        if not step.frozen:
            return None
        seen = {"frozen": len(step.frozen), "tensors": len(step.layout.tensors)}
        return Sign(severity="info", seen=seen, expected={"frozen": 0}, tensors=step.names(step.frozen[:NAMED]))
