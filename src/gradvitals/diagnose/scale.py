r"""A rule about weights whose size is no choice of the loss: noise and weight decay hold it.

Where the gradient of a weight is mostly noise, AdamW moves it at random by steps of the learning rate, and weight decay
pulls it back. With :math:`p_t` the mean square of a tensor's elements, learning rates :math:`\eta_t` and weight decay
:math:`\lambda`,

.. math:: p_{t+1} = a_t^2 p_t + \kappa_t \eta_t^2 , \qquad a_t = 1 - \eta_t \lambda, \qquad
          \kappa_t = \frac{1 - \beta_1}{1 + \beta_1} \cdot \frac{1 + a_t \beta_1}{1 - a_t \beta_1}

as Adam divides the noise by its own size. Momentum spreads each step over later ones, which changes little as long as
decay is slower than it: :math:`\kappa \approx 1`, and the balance is at :math:`p = \eta / 2 \lambda`. So the norm that
noise alone would make ("Adam Brownian motion") follows from the record: from the learning rates, the weight decay and
the norm at the start.

References:
    Velikanov et al., "Learnable multipliers: freeing the scale of language model matrix layers", arXiv 2601.04890.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.facts import Facts
from gradvitals.diagnose.rule import Rule, Sign, register
from gradvitals.diagnose.step import NAMED, Step
from gradvitals.types import Layout, TensorInfo

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass
class NoiseWalk:
    """How AdamW's noise and weight decay move a mean square: ``kept * start + made``, alike for all tensors.

    >>> walk = NoiseWalk()
    >>> for step in range(20_000):
    ...     walk.advance(step, 1e-2, 0.1)
    >>> round(walk.made, 3), walk.kept < 1e-6
    (0.05, True)
    """

    kept: float = 1.0
    """Share of the start's mean square that is left."""
    made: float = 0.0
    """Mean square that noise has made since."""
    last: int = -1
    """Step it stands at."""

    def advance(self, step: int, lr: float, decay: float, beta1: float = 0.9) -> None:
        """Make the steps up to this one at its learning rate: a step that was not read had one much like it."""
        kept = 1 - lr * decay
        momentum = (1 - beta1) / (1 + beta1) * (1 + kept * beta1) / (1 - kept * beta1)
        shrink, made = kept**2, momentum * lr * lr
        steps = step - self.last if self.last >= 0 else 1
        left = shrink**steps
        self.kept *= left
        self.made = left * self.made + made * ((1 - left) / (1 - shrink) if shrink != 1 else steps)
        self.last = step

    def expected(self, start: Floats) -> Floats:
        """Mean squares by noise alone, from those at the start."""
        return self.kept * start + self.made

    def remembered(self, start: Floats) -> Floats:
        """Share of them that stems from the start."""
        return self.kept * start / self.expected(start)


def decay_of(facts: Facts) -> float:
    """The weight decay under which the formula holds: AdamW's, decoupled; nan for other optimizers and for none."""
    known = facts.optimizer.endswith("AdamW") and facts.weight_decay is not None
    return facts.weight_decay if known and facts.weight_decay else math.nan


def beta1_of(facts: Facts) -> float:
    """Adam's decay of the first moment; the usual one where it is not known."""
    return 0.9 if facts.betas is None else facts.betas[0]


def is_plain_matrix(info: TensorInfo) -> bool:
    """Whether a multiplier could be given to it: a trained matrix that has none, nor any other parametrization."""
    return len(info.shape) > 1 and not info.frozen and "parametrizations." not in info.name


@register
@dataclass
class TrappedScale(Rule):
    """The norm of weight matrices is what noise and weight decay make of it, not what the loss would have."""

    id = "trapped_scale"
    needs = ("weight/norm", "lr")
    judges_after = 1000
    closes_after = 500

    near: float = 0.1
    """Share by which a norm may differ from that of noise and still be it."""
    forgotten: float = 0.2
    """Share of the mean square that may still stem from the start; until it is less, nothing is said."""
    decayed: float = 0.5
    """Share of it that weight decay must have taken away since the start, for a tensor that began at nearly nothing."""
    in_a_row: int = 4
    """Readings at which it must be so."""
    span: float = 0.4
    """Share of the run so far that these have to span: a norm that only passes by is not held."""

    walk: NoiseWalk = field(default_factory=NoiseWalk, init=False)
    start: Floats = field(default_factory=lambda: np.zeros(0), init=False)
    """Mean square of each tensor when it was first read."""
    near_for: Floats = field(default_factory=lambda: np.zeros(0), init=False)
    """Readings in a row at which its norm was that of noise."""
    near_since: Floats = field(default_factory=lambda: np.zeros(0), init=False)
    """The step of the first of them."""

    def __post_init__(self) -> None:
        self._layout: Layout | None = None
        self._matrix: Mask = np.zeros(0, dtype=bool)

    def look(self, step: Step) -> Sign | None:
        """Fires at readings of the weights, once the start is forgotten."""
        decay, lr, norms = decay_of(step.facts), step.value("lr"), step.tensors("weight/norm")
        if math.isnan(decay) or not math.isfinite(lr):
            return None
        sign = None
        if norms is not None:
            if step.layout is not self._layout:
                self._layout = step.layout
                self._matrix = np.array([is_plain_matrix(info) for info in step.layout.tensors], dtype=bool)
            squares, matrix = np.square(np.asarray(norms)) / step.layout.sizes, self._matrix
            held = self.weigh(step.number, squares, matrix)
            sign = self._sign(step, held, squares, matrix) if held.any() else None
        if step.was_made:
            self.walk.advance(step.number, lr, decay, beta1_of(step.facts))
        return sign

    def weigh(self, step: int, squares: Floats, matrix: Mask) -> Mask:
        """Which tensors noise holds, by a reading of their mean squares; only those of `matrix` are judged."""
        if len(self.start) != len(squares):  # the first reading, or one with new tensors: all begin anew
            self.start, self.walk = squares, NoiseWalk(last=step - 1)
            self.near_for, self.near_since = np.zeros(len(squares)), np.zeros(len(squares))
        near = matrix & self.judged & (np.abs(self.ratio(squares) - 1) < self.near)
        self.near_since = np.where(near & (self.near_for == 0), float(step), self.near_since)
        self.near_for = np.where(near, self.near_for + 1, 0.0)
        lasted = step - self.near_since >= self.span * step
        held: Mask = near & lasted & (self.near_for >= self.in_a_row)
        return held

    @property
    def judged(self) -> Mask:
        """Which tensors have forgotten how large they were at the start."""
        forgotten: Mask = self.walk.remembered(self.start) < self.forgotten
        return forgotten & (self.walk.kept < 1 - self.decayed)

    def ratio(self, squares: Floats) -> Floats:
        """Norms over those that noise alone would have made by now."""
        return np.asarray(np.sqrt(squares / self.walk.expected(self.start)))

    def _sign(self, step: Step, held: Mask, squares: Floats, matrix: Mask) -> Sign:
        ratio, chosen = self.ratio(squares), np.flatnonzero(held)
        chosen = chosen[np.argsort(np.abs(ratio[chosen] - 1), kind="stable")]
        first = int(chosen[0])
        seen = dict[str, Any](tensors=len(chosen), matrices=int(matrix.sum()), ratio=float(ratio[first]))
        seen |= {"rms": math.sqrt(squares[first]), "noise_rms": math.sqrt(self.walk.expected(self.start)[first])}
        return Sign(
            severity="info",
            seen=seen | {"lr": step.value("lr"), "weight_decay": decay_of(step.facts)},
            expected={"ratio": f"under {1 - self.near:g} or over {1 + self.near:g}"},
            tensors=step.names(chosen[:NAMED]),
            since=int(self.near_since[first]),
        )
