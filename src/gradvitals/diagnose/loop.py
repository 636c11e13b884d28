"""Rules: mistakes in the training loop itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradvitals.diagnose.rule import Rule, Sign, register
from gradvitals.diagnose.step import Step


@register
@dataclass
class StaleGradients(Rule):
    """Gradients are not zeroed between steps, so every step uses the sum of all so far."""

    id = "stale_gradients"
    needs = ("tensors:grad/norm",)
    closes_after = 20

    patience: int = 5
    """Steps in a row at which it must be so."""

    seen_for: int = field(default=0, init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires while backward adds to what the step before had left."""
        self.seen_for = self.seen_for + 1 if step.value("grad/carried") == 1 else 0
        if self.seen_for < self.patience:
            return None
        seen = {"steps": self.seen_for, "norm": step.value("grad/norm")}
        return Sign(severity="warning", seen=seen, expected={"steps": 0}, since=step.number - self.seen_for + 1)
