"""Rules that hold the norm the training loop clips to against the norms it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gradvitals.diagnose.rule import Rule, Sign, register
from gradvitals.diagnose.step import Step


def clips_already(step: Step) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Of a loop that clips: the limit beside recent norms, and which cure that leaves. Nothing of one that does not."""
    limit, norms = step.value("clip/max_norm"), step.history["grad/norm"].last(200)
    if not 0 < limit < np.inf or not len(norms):
        return {}, ()
    share = float(np.mean(norms > limit))
    seen = {
        "clips_at": limit,
        "clipped": f"{100 * share:.0f} %",
        "max_norm": _two_digits(float(np.quantile(norms, 0.9))),
    }
    return seen, ("limit_bites",) if share > 0.1 else ("limit_high",)


@dataclass
class _Clipping(Rule):
    """What both have in common."""

    needs = ("grad/norm", "clip/max_norm")
    closes_after = 100

    every: int = 20
    """Steps from one look to the next."""
    quantile: float = 0.9
    """Share of the recent norms that the proposed limit leaves alone."""

    def look(self, step: Step) -> Sign | None:
        """Compares the limit with the last norms, now and then."""
        limit = step.value("clip/max_norm")
        if step.number % self.every or not 0 < limit < np.inf:
            return None
        return self.compare(step, limit)

    def compare(self, step: Step, limit: float) -> Sign | None:
        """What the last norms say of the limit."""
        raise NotImplementedError


@register
@dataclass
class ClipSaturated(_Clipping):
    """Nearly every step is clipped."""

    id = "clip_saturated"
    judges_after = 200

    window: int = 300
    """Steps looked back on, and two thirds of them there must be."""
    share: float = 0.95
    """Share of them that was clipped."""
    far: float = 1000.0
    """Times the limit that norms can only be by mistake; that 20 of them are is told at once."""

    def compare(self, step: Step, limit: float) -> Sign | None:
        """Counts the norms over the limit."""
        norms = step.history["grad/norm"].last(self.window)
        clipped = float(np.mean(norms > limit)) if len(norms) else 0.0
        far = len(norms) >= 20 and bool(norms[-20:].min() > self.far * limit)
        if not far and (clipped <= self.share or len(norms) < 2 * self.window // 3):
            return None
        usual, proposed = np.quantile(norms, (0.5, self.quantile))
        seen = {"percent": 100 * clipped, "max_norm": limit, "norm": float(usual), "steps": len(norms)}
        return Sign(
            severity="warning" if far else "info",
            seen=seen | {"proposed": _two_digits(float(proposed))},
            expected={"percent": f"under {100 * self.share:g}"},
            since=max(step.ago(len(norms)), 0),
            causes=("scale",) if far else ("low",),
            cures=("scale",) if far else ("low",),
        )


@register
@dataclass
class ClipIdle(_Clipping):
    """Clipping is on and never does anything, nor would it soon."""

    id = "clip_idle"
    min_steps = 500

    factor: float = 10.0
    """The limit is at least this much over the largest norm."""
    spikes: float = 3.0
    """The proposed limit, over the largest recent norm but for the few highest: it should stop spikes alone."""

    def compare(self, step: Step, limit: float) -> Sign | None:
        """Compares the limit with the largest norm."""
        norms = step.history["grad/norm"].last(2 * self.min_steps)
        if len(norms) < self.min_steps or limit <= self.factor * float(norms.max()):
            return None
        proposed = self.spikes * float(np.quantile(norms, self.quantile))
        seen = {"max_norm": limit, "norm": float(norms.max()), "proposed": _two_digits(proposed), "steps": len(norms)}
        return Sign(
            severity="info", seen=seen, expected={"max_norm": seen["proposed"]}, since=max(step.ago(len(norms)), 0)
        )


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")
