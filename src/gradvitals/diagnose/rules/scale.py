r"""The rule about weights whose size the loss does not choose: noise and weight decay do.

If the gradient of a weight is mostly noise, AdamW moves it at random by steps of the learning rate, and weight decay
pulls it back. With :math:`p_t` the mean square of a tensor's elements, learning rates :math:`\eta_t` and weight decay
:math:`\lambda`,

.. math:: p_{t+1} = a_t^2 p_t + \kappa_t \eta_t^2 , \qquad a_t = 1 - \eta_t \lambda, \qquad
          \kappa_t = \frac{1 - \beta_1}{1 + \beta_1} \cdot \frac{1 + a_t \beta_1}{1 - a_t \beta_1}

because Adam divides the noise by its own size. Momentum spreads each step over later ones, which changes little while
decay is slower than it: :math:`\kappa \approx 1`, and the balance is at :math:`p = \eta / 2 \lambda`. So the norm that
noise alone would make ("Adam Brownian motion") follows from the learning rates, the weight decay and the norm at the
start.

References:
    Velikanov et al., "Learnable multipliers: freeing the scale of language model matrix layers", arXiv 2601.04890.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.baseline import Floats, empty
from gradvitals.diagnose.history import Streaks
from gradvitals.diagnose.message import Message, Observation
from gradvitals.diagnose.rule import Rule, register
from gradvitals.diagnose.step import MAX_NAMED, RunInfo, Step
from gradvitals.types import Layout, TensorInfo

Mask = NDArray[np.bool_]


@dataclass
class NoiseWalk:
    """How AdamW's noise and weight decay change a mean square: ``kept * start + made``, the same for all tensors.

    >>> walk = NoiseWalk()
    >>> for step in range(20_000):
    ...     walk.advance(step, 1e-2, 0.1)
    >>> round(walk.made, 3), walk.kept < 1e-6
    (0.05, True)
    """

    kept: float = 1.0
    """Share of the start's mean square that is left."""
    made: float = 0.0
    """Mean square that noise has added since."""
    last: int = -1
    """The step it is at."""

    def advance(self, step: int, lr: float, decay: float, beta1: float = 0.9) -> None:
        """Advance to a step at its learning rate: steps that were not read had nearly the same."""
        kept = 1 - lr * decay
        momentum = (1 - beta1) / (1 + beta1) * (1 + kept * beta1) / (1 - kept * beta1)
        shrink, made = kept**2, momentum * lr * lr
        steps = step - self.last if self.last >= 0 else 1
        left = shrink**steps
        self.kept *= left
        self.made = left * self.made + made * ((1 - left) / (1 - shrink) if shrink != 1 else steps)
        self.last = step

    def expected(self, start: Floats) -> Floats:
        """Returns mean squares by noise alone, from those at the start."""
        return self.kept * start + self.made

    def remembered(self, start: Floats) -> Floats:
        """Returns the share of them that stems from the start."""
        return self.kept * start / self.expected(start)


def decay_of(info: RunInfo) -> float:
    """Returns AdamW's weight decay, for which the formula holds; NaN for other optimizers and for none."""
    known = info.optimizer.endswith("AdamW") and info.weight_decay is not None
    return info.weight_decay if known and info.weight_decay else math.nan


def beta1_of(info: RunInfo) -> float:
    """Returns Adam's beta1; 0.9 if it is unknown."""
    return 0.9 if info.betas is None else info.betas[0]


def is_plain_matrix(info: TensorInfo) -> bool:
    """Whether it could be given a multiplier: a trained matrix without one or any other parametrization."""
    return len(info.shape) > 1 and not info.frozen and "parametrizations." not in info.name


@register
@dataclass
class TrappedScale(Rule):
    """The norm of weight matrices is set by noise and weight decay, not by the loss."""

    id = "trapped_scale"
    family = "scale"
    needs = ("weight/norm", "lr")
    judges_after = 1000
    closes_after = 500
    message = Message(
        name="Trapped scale",
        pattern=(
            "Weight matrices under AdamW have the norm that noise and weight decay alone would give them, reading "
            "after reading, in a run long enough to have forgotten its initial norm."
        ),
        title=(
            "Noise and weight decay alone explain the size of {tensors} of {matrices} weight matrices: the root mean "
            "square of {first} is {rms}, and noise alone would give {noise_rms}"
        ),
        causes={
            "noise": (
                "Most of their gradient may be noise: steps move them at random, and the weight decay of "
                "{weight_decay} pulls them back. At a learning rate of {lr} the two balance at this size, whether or "
                "not it suits the loss. A norm alone does not prove it"
            ),
            "invariant": (
                "Or their size does not matter, as for weights right before a normalization: then nothing is lost"
            ),
        },
        fixes={
            "multipliers": (
                "Try learnable multipliers in the next run, on these {tensors} tensors or on all matrices: "
                "gv.multipliers.attach(model, where=gv.multipliers.suggest(run))"
            ),
            "decay": (
                "Or set their size by hand: it scales with the root of learning rate over weight decay, so a quarter "
                "of the weight decay makes them twice as large"
            ),
            "nothing": "No action needed while the loss falls: the possible gain is small",
        },
        passed="noise does not hold any weight matrix at its size, as far as this optimizer and run length can show",
        reference="arXiv 2601.04890 (learnable multipliers)",
    )

    NEAR = 0.1  # relative difference up to which a norm counts as that of noise
    FORGOTTEN = 0.2  # largest share of the mean square that may still stem from the start
    DECAYED = 0.5  # share of it that weight decay must have removed, for a tensor that started at nearly nothing
    IN_A_ROW = 4  # readings
    SPAN = 0.4  # share of the run so far that these must span: a norm that only passes by is not held

    walk: NoiseWalk = field(default_factory=NoiseWalk, init=False)
    start: Floats = field(default_factory=empty, init=False)
    """Mean square of each tensor when it was first read."""
    near: Streaks = field(default_factory=Streaks, init=False)
    """Readings in a row at which its norm was that of noise."""

    def __post_init__(self) -> None:
        self._layout: Layout | None = None
        self._matrix: Mask = np.zeros(0, dtype=bool)

    def check(self, step: Step) -> Observation | None:
        decay, lr = decay_of(step.info), step.value("lr")
        if math.isnan(decay) or not math.isfinite(lr):
            return None
        norms, found = step.tensors("weight/norm"), None
        if norms is not None:
            if step.layout is not self._layout:
                self._layout = step.layout
                self._matrix = np.array([is_plain_matrix(info) for info in step.layout.tensors], dtype=bool)
            squares, matrix = np.square(np.asarray(norms)) / step.layout.sizes, self._matrix
            held = self.weigh(step.number, squares, matrix)
            found = self._observe(step, held, squares, matrix) if held.any() else None
        if step.was_taken:
            self.walk.advance(step.number, lr, decay, beta1_of(step.info))
        return found

    def weigh(self, step: int, squares: Floats, matrix: Mask) -> Mask:
        """Returns which tensors noise holds, by a reading of their mean squares; only those of `matrix` are judged."""
        if len(self.start) != len(squares):  # the first reading, or one with new tensors: all start over
            self.start, self.walk, self.near = squares, NoiseWalk(last=step - 1), Streaks()
        near = matrix & self.judged & (np.abs(self.ratio(squares) - 1) < self.NEAR)
        self.near.add(near, step)
        lasted = step - self.near.since >= self.SPAN * step
        held: Mask = near & lasted & (self.near.count >= self.IN_A_ROW)
        return held

    @property
    def judged(self) -> Mask:
        """Which tensors have forgotten their initial size."""
        forgotten: Mask = self.walk.remembered(self.start) < self.FORGOTTEN
        return forgotten & (self.walk.kept < 1 - self.DECAYED)

    def ratio(self, squares: Floats) -> Floats:
        """Returns norms over those that noise alone would have made by now."""
        return np.asarray(np.sqrt(squares / self.walk.expected(self.start)))

    def _observe(self, step: Step, held: Mask, squares: Floats, matrix: Mask) -> Observation:
        ratio, chosen = self.ratio(squares), np.flatnonzero(held)
        chosen = chosen[np.argsort(np.abs(ratio[chosen] - 1), kind="stable")]
        first = int(chosen[0])
        seen = dict[str, Any](tensors=len(chosen), matrices=int(matrix.sum()), ratio=float(ratio[first]))
        seen |= {"rms": math.sqrt(squares[first]), "noise_rms": math.sqrt(self.walk.expected(self.start)[first])}
        return Observation(
            severity="info",
            seen=seen | {"lr": step.value("lr"), "weight_decay": decay_of(step.info)},
            expected={"ratio": f"under {1 - self.NEAR:g} or over {1 + self.NEAR:g}"},
            tensors=step.names(chosen[:MAX_NAMED]),
            since=int(self.near.since[first]),
        )
