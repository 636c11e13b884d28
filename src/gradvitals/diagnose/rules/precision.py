"""The rule about gradients too small for their type."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.baseline import Floats, empty
from gradvitals.diagnose.message import Message, Observation
from gradvitals.diagnose.rule import Rule, register
from gradvitals.diagnose.step import Step
from gradvitals.types import Layout

SMALLEST = 2.0**-24
"""The smallest float16 number above zero, 6e-8."""


@register
@dataclass
class PrecisionUnderflow(Rule):
    """Gradients so small that float16 rounds many of them to zero."""

    id = "precision_underflow"
    family = "precision"
    needs = ("tensors:grad/norm",)
    reads = "tensors"
    judges_after = 20
    min_steps = 3
    closes_after = 100
    message = Message(
        name="Gradients too small for float16",
        pattern=(
            "The root mean square of float16 gradients is near the smallest float16 number, 6e-8, or small with many "
            "exact zeros: the rest of the gradient is lost."
        ),
        title="Gradients of {where} are too small for float16: {rms} or zero, and float16 ends at {expected_smallest}",
        causes={
            "unscaled": "float16 has no numbers between 0 and 6e-8, and no loss scale keeps gradients above that",
            "scaled": "The loss scale became too small after steps that overflowed",
            "vanishing": "Gradients shrink from layer to layer: see vanishing",
        },
        fixes={
            "unscaled": "Use bfloat16, or scale the loss by {scale} with torch.amp.GradScaler and float32 weights",
            "scaled": (
                "Find out why steps overflow, because each one halves the scale; or use bfloat16, which needs no scale"
            ),
            "float32": "Keep {first} in float32",
        },
        passed="gradients are well above the smallest number their type can hold",
        reference="Mixed precision training, arXiv 1710.03740",
    )

    NEAR = 16.0  # a tensor is near the end of its range if its root mean square is under this times 6e-8
    ZEROS = 0.5  # share of exact zeros above which a tensor within 16 times `NEAR` counts too
    SHARE = 0.1  # share of the half-precision tensors for a warning; below, it is a note
    PATIENCE = 5  # steps in a row

    low_for: Floats = field(default_factory=empty, init=False)
    zero_share: Floats = field(default_factory=empty, init=False)
    """As last read."""

    def __post_init__(self) -> None:
        self._layout: Layout | None = None
        self._half: NDArray[np.bool_] = np.zeros(0, dtype=bool)

    def check(self, step: Step) -> Observation | None:
        norms = step.tensors("grad/norm")
        if step.layout is not self._layout:
            self._layout, autocast = step.layout, step.info.autocast == "float16"
            self._half = np.array([autocast or info.dtype == "float16" for info in step.layout.tensors], dtype=bool)
        half = self._half
        if norms is None or not half.any():
            return None
        scaled = step.general.stage == "unscaled" or "step/skipped" in step.values
        count = len(half)
        self.low_for = np.append(self.low_for, np.zeros(max(0, count - len(self.low_for))))
        self.zero_share = np.append(self.zero_share, np.full(max(0, count - len(self.zero_share)), np.nan))
        zeros = step.tensors("grad/zero_fraction")
        if zeros is not None:
            self.zero_share = np.asarray(zeros, dtype=np.float64)
        # Of the elements that are not zero, if known: rows of an embedding are zero for a good reason.
        alive = np.where(self.zero_share < 1, 1 - self.zero_share, 1.0)
        rms = np.asarray(norms, dtype=np.float64) / np.sqrt(step.layout.sizes * alive)
        floor = SMALLEST * self.NEAR
        many_zeros = self.zero_share > self.ZEROS
        # Readings are unscaled, so with a loss scale only what was lost in spite of it shows.
        low = (rms < SMALLEST) & many_zeros if scaled else (rms < floor) | ((rms < 16 * floor) & many_zeros)
        low &= half & (norms > 0)
        # If even the largest is small, tensors that are all zero were rounded to it.
        if not scaled and np.fmax.reduce(np.where(half, rms, 0.0)) < 16 * floor:
            low |= half & (norms == 0)
        self.low_for = np.where(low, self.low_for + 1, 0.0)
        chosen = np.flatnonzero(self.low_for >= self.PATIENCE)
        if not len(chosen):
            return None
        chosen = chosen[np.argsort(rms[chosen])]
        share = len(chosen) / float(half.sum())
        worst = int(chosen[0])
        alive_rms = rms[half & (norms > 0)]
        least = float(alive_rms.min()) if len(alive_rms) else 0.0
        seen = {"rms": least, "zeros": float(self.zero_share[worst]), "tensors": len(chosen), "percent": 100 * share}
        seen["scale"] = 2 ** max(1, min(16, math.ceil(math.log2(1e-3 / max(least, SMALLEST)))))
        cause = "scaled" if scaled else "unscaled"
        return Observation(
            severity="warning" if share >= self.SHARE else "info",
            seen=seen,
            expected={"rms": SMALLEST * self.NEAR, "smallest": SMALLEST},
            tensors=step.names(chosen[:20]),
            since=step.ago(int(self.low_for[worst]) - 1),
            key=cause,
        )
