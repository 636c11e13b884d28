"""Rules that compare the norm that the training loop clips to with the norms it has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradvitals.diagnose.message import Message, Observation
from gradvitals.diagnose.rule import Rule, register
from gradvitals.diagnose.step import Step

CLIPPED_ALREADY = {
    "limit_bites": (
        "Clipping to {clips_at} already applies to {clipped:%} of recent steps: lower the learning rate of {lr} rather "
        "than the limit"
    ),
    "limit_high": (
        "Clip to {max_norm} instead of {clips_at}: 90% of this run's steps are below it, and the current limit applies "
        "to {clipped:%} of recent steps"
    ),
}
"""Fixes that replace the advice to clip if the loop clips already."""

WHEN_DONE = ". After the run, `gradvitals advise` suggests a limit based on all healthy steps"
"""A limit from recent steps is provisional: norms change during a run."""


def proposed_limit(step: Step) -> float:
    """Returns a norm to clip to that leaves 90% of the run's recent steps alone; NaN before the first one."""
    norms = step.history["grad/norm"].last(200)
    return _two_digits(float(np.quantile(norms, 0.9))) if len(norms) else math.nan


def clipping_fix(step: Step) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the limit of a loop that clips beside recent norms, and the fix that suits it; nothing if none does."""
    limit, norms = step.value("clip/max_norm"), step.history["grad/norm"].last(200)
    if not 0 < limit < np.inf or not len(norms):
        return {}, ()
    share = float(np.mean(norms > limit))
    seen = {"clips_at": limit, "clipped": share, "max_norm": proposed_limit(step)}
    return seen, ("limit_bites",) if share > 0.1 else ("limit_high",)


@dataclass
class _Clipping(Rule):
    """What both rules share."""

    family = "clipping"
    needs = ("grad/norm", "clip/max_norm")
    closes_after = 100
    every = 10

    QUANTILE = 0.9  # share of the recent norms that the proposed limit leaves alone


@register
@dataclass
class ClipSaturated(_Clipping):
    """Nearly every step is clipped."""

    id = "clip_saturated"
    is_symptom = True
    judges_after = 200
    closes_after = 200
    follows = ("stale_gradients", "lr_too_high")
    message = Message(
        name="Clipping on every step",
        pattern=(
            "More than 95% of the last few hundred norms exceed the clipping limit (a note), or 20 in a row are over "
            "1,000 times the limit, or all over 10 times the limit while most of the loss is left, or are clipped "
            "while they carry the scale of a GradScaler (a warning)."
        ),
        title="{clipped:%} of the last {steps} steps were clipped: max_norm is {limit}, the median norm {norm}",
        causes={
            "low": "The limit of {limit} is below the typical norm of {norm}: it gives every step the same length",
            "scale": "The gradient is larger than intended: a loss summed instead of averaged, or multiplied",
            "scaled": (
                "Gradients are clipped before scaler.unscale_(optimizer): they still carry the loss scale of {scale}, "
                "so that steps are far too short"
            ),
        },
        fixes={
            "low": "Clip to {max_norm} instead of {limit}: 90% of these {steps} steps are below it" + WHEN_DONE,
            "scale": "Average the loss over samples and micro-batches: a norm of {norm} is far too large",
            "scaled": "Call scaler.unscale_(optimizer) between backward and clipping",
        },
        snippets={
            "scaled": (
                "scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), {limit})\n"
                "scaler.step(optimizer)"
            )
        },
        passed="clipping leaves most steps alone",
    )

    WINDOW = 300  # steps looked back on; two thirds of them must exist
    SHORT, FEWEST = 10.0, 40  # a limit this many times below each of so many norms makes every step too short
    FAR = 1000.0  # 20 norms of this many times the limit are a mistake, reported at once
    LATE, LEFT = 160, 0.5  # steps after which that is a mistake if this share of the trivial loss is left
    HIGH = 100.0  # which is the gradient's if its norm is over this, else the limit's

    share: float = 0.95
    """Share of steps that must be clipped."""

    def check(self, step: Step) -> Observation | None:
        limit = step.value("clip/max_norm")
        if not 0 < limit < np.inf:
            return None
        scale = step.values.get("clip/scale", 1.0)
        norms = scale * step.history["grad/norm"].last(self.WINDOW)
        clipped = float(np.mean(norms > limit)) if len(norms) else 0.0
        far = len(norms) >= 20 and bool(norms[-20:].min() > (1 if scale > 1 else self.FAR) * limit)
        short = len(norms) >= self.FEWEST and bool(norms.min() > self.SHORT * limit)
        if not (far or short) and (clipped <= self.share or len(norms) < 2 * self.WINDOW // 3):
            return None
        if not far and step.info.betas:
            return None  # Adam makes steps as long whatever the size of the gradient
        usual, proposed = np.quantile(norms, (0.5, self.QUANTILE))
        seen = {"percent": 100 * clipped, "limit": limit, "norm": float(usual), "steps": len(norms)}
        far |= short and step.number >= self.LATE and step.loss_left > self.LEFT
        cause = "scaled" if scale > 1 else "scale" if far and usual > self.HIGH else "low"
        return Observation(
            severity="warning" if far else "info",
            seen=seen | {"max_norm": _two_digits(float(proposed))} | ({"scale": scale} if scale > 1 else {}),
            text={"clipped": clipped},
            since=max(step.ago(len(norms)), 0),
            key=cause,
        )


@register
@dataclass
class ClipIdle(_Clipping):
    """Clipping is on but never triggers."""

    id = "clip_idle"
    min_steps = 500
    message = Message(
        name="Clipping never triggers",
        pattern="Over 500 steps the clipping limit was at least 10 times the largest norm.",
        title="Gradients are clipped to {limit}, but no norm of the last {steps} steps exceeded {norm}",
        causes={"high": "The limit of {limit} is so high that a spike of 10 times a normal norm would pass unclipped"},
        fixes={"lower": "Clip to {max_norm}: it leaves ordinary steps of this run alone and stops spikes" + WHEN_DONE},
        passed="the clipping limit is within reach of this run's norms",
    )

    SPIKES = 3.0  # the proposed limit over the 90% quantile of recent norms: it should stop only spikes

    factor: float = 10.0
    """The limit over the largest norm, at least."""

    def check(self, step: Step) -> Observation | None:
        limit, norms = step.value("clip/max_norm"), step.history["grad/norm"].last(2 * self.min_steps)
        if not 0 < limit < np.inf or len(norms) < self.min_steps or limit <= self.factor * float(norms.max()):
            return None
        proposed = _two_digits(self.SPIKES * float(np.quantile(norms, self.QUANTILE)))
        seen = {"limit": limit, "norm": float(norms.max()), "max_norm": proposed, "steps": len(norms)}
        return Observation(severity="info", seen=seen, expected={"limit": proposed}, since=max(step.ago(len(norms)), 0))


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")
