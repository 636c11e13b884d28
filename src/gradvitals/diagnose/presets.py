"""Detectors of other projects, with their figures and their quirks, as rules that are off unless asked for.

They are here to be compared with, and for whoever wants the rule they know: ``Config(rules={"preset_olmo": {}})``.
Each judges one step at a time by its loss, its gradient norm or the norm of its update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from gradvitals.diagnose.message import Observation
from gradvitals.diagnose.rule import RULES, Rule, register
from gradvitals.diagnose.step import Step
from gradvitals.diagnose.words.presets import WORDS


class Detector(Rule):
    """A detector by the numbers of one step. As a rule it warns at every step that it flags."""

    family = "presets"
    default = False
    closes_after = 20
    source: ClassVar[str]
    """Where the detector is from."""

    def update(self, loss: float, grad_norm: float, update_norm: float) -> bool:
        """Judge one step, then remember it. Returns whether the step is flagged."""
        raise NotImplementedError

    def check(self, step: Step) -> Observation | None:
        """Warns where the detector flags the step; a step without the numbers it needs is not shown to it."""
        values = step.general.values
        if not values.keys() >= set(self.needs):
            return None
        # The root mean square of the change is read at every step; the norm of all weights follows from it.
        size = math.sqrt(sum(info.numel for info in step.layout.tensors))
        numbers = {"loss": step.value("loss"), "grad_norm": step.value("grad/norm")}
        numbers["update_norm"] = size * step.value("update/rms")
        if not self.update(**numbers):
            return None
        return Observation(severity="warning", seen={**numbers, "detector": self.source}, expected={})


@register
@dataclass
class Olmo(Detector):
    """OLMo-core's SkipStepOptimizer: the loss or the norm is over mean + 6 standard deviations of the last 128.

    One-sided. The value judged is not among those it is judged by, but is remembered afterwards, outlier or not; so is
    NaN, which makes the mean NaN and flags every step until it has left the window, as the original skips them.
    """

    id = "preset_olmo"
    needs = ("loss", "grad/norm")
    source = "OLMo-core SkipStepOptimizer"

    rolling_interval_length: int = 128
    """Steps that a value is judged by; half of them must have been seen."""
    sigma_factor: float = 6.0
    """Standard deviations over the mean."""
    losses: list[float] = field(default_factory=list, init=False)
    grad_norms: list[float] = field(default_factory=list, init=False)

    def update(self, loss: float, grad_norm: float, update_norm: float) -> bool:
        """Flag a step that the original would skip."""
        for kept, value in ((self.losses, loss), (self.grad_norms, grad_norm)):
            kept.append(value)
            del kept[: -self.rolling_interval_length - 1]
        if len(self.losses) < max(2, self.rolling_interval_length // 2):
            return False
        return not (self._fine(self.losses) and self._fine(self.grad_norms))

    def _fine(self, kept: list[float]) -> bool:
        past = np.array(kept[:-1])
        # Of one value alone the original's unbiased deviation is NaN: not fine.
        deviation = past.std(ddof=1) if len(past) > 1 else math.nan
        return bool(kept[-1] - past.mean() <= self.sigma_factor * deviation)


@register
@dataclass
class ZClip(Detector):
    """ZClip (arXiv 2504.02507): the norm has a z-score over 2.5 under moving averages; these are the steps it clips.

    The averages start from the first 25 norms. Afterwards they take in the norm as clipped, mean + 2.5² std / z, and
    the variance is taken around the mean that already has it, which leaves it at 0.955 of the true one. Clipping to
    max_grad_norm, which the original also does, is no flag. NaN enters the averages: nothing is flagged ever after.
    """

    id = "preset_zclip"
    source = "ZClip"

    alpha: float = 0.97
    """Factor of the moving averages."""
    z_thresh: float = 2.5
    """Z-score over which a norm is clipped."""
    warmup_steps: int = 25
    """Norms that the averages start from."""
    eps: float = 1e-6
    """Added to the standard deviation."""
    buffer: list[float] = field(default_factory=list, init=False)
    mean: float | None = field(default=None, init=False)
    var: float = field(default=0.0, init=False)

    def update(self, loss: float, grad_norm: float, update_norm: float) -> bool:
        """Flag a step whose norm the original would clip for its z-score."""
        if self.mean is None:
            self.buffer.append(grad_norm)
            if len(self.buffer) >= self.warmup_steps:
                first = np.array(self.buffer)
                self.mean, self.var = float(first.mean()), float(first.var())
                self.buffer = []
            return False
        clipped = self.clip_value(grad_norm)
        kept = grad_norm if clipped is None else clipped
        self.mean = self.alpha * self.mean + (1 - self.alpha) * kept
        self.var = self.alpha * self.var + (1 - self.alpha) * (kept - self.mean) ** 2
        return clipped is not None

    def clip_value(self, grad_norm: float) -> float | None:
        """What a norm would be clipped to; None where it would be left alone, as during warmup."""
        if self.mean is None:
            return None
        std = math.sqrt(self.var)
        z = (grad_norm - self.mean) / (std + self.eps)
        if not z > self.z_thresh:
            return None
        return self.mean + self.z_thresh * std / (z / self.z_thresh)


@register
@dataclass
class LLMFoundry(Detector):
    """llm-foundry's KillLossSpike: five losses in a row twice the mean of the last 100, or half of them too high.

    Too high is over the largest loss of the first window, 10 at most, and is looked for after two windows. Outliers
    enter the window. The original takes 5 % of all steps as the window where that is more than 100; how many steps
    there will be is not known here. NaN is no outlier, ends a row of them, and hides all others until it has left the
    window.
    """

    id = "preset_llmfoundry"
    needs = ("loss",)
    source = "llm-foundry KillLossSpike"

    patience: int = 4
    """Outliers in a row that are let pass."""
    outlier_multiplier: float = 2.0
    """Loss over the mean of the window that makes an outlier."""
    window_size: int = 100
    """Losses in the window."""
    loss_cap: float = 10.0
    """Highest limit for losses that are too high."""
    window: list[float] = field(default_factory=list, init=False)
    cap: float | None = field(default=None, init=False)
    outliers: int = field(default=0, init=False)
    steps: int = field(default=0, init=False)

    def update(self, loss: float, grad_norm: float, update_norm: float) -> bool:
        """Flag a step at which the original would raise LossSpikeError or HighLossError."""
        flagged = False
        if len(self.window) == self.window_size:
            if self.cap is None:
                self.cap = min(max(self.window), self.loss_cap)
            self.outliers = self.outliers + 1 if loss >= self.outlier_multiplier * np.mean(self.window) else 0
            high = sum(kept > self.cap for kept in self.window) >= self.window_size / 2
            flagged = self.outliers > self.patience or (self.steps >= 2 * self.window_size and high)
        self.window.append(loss)
        del self.window[: -self.window_size]
        self.steps += 1
        return flagged


@register
@dataclass
class Lightning(Detector):
    """Lightning's SpikeDetection: a loss no better than the last, and three times the mean of the last 10 or more.

    That is, |loss - mean| is 2 means or more. A loss that is not finite is always a spike, as `finite_only=True` has it
    in the code (its docstring says the reverse). Judging begins with the second loss. A spike does not enter the mean;
    the original then stops the run, where this goes on with what it had.
    """

    id = "preset_lightning"
    needs = ("loss",)
    source = "Lightning SpikeDetection"

    window: int = 10
    """Losses in the mean."""
    warmup: int = 1
    """Losses that are not judged."""
    atol: float | None = None
    """Distance from the mean that makes a spike; None for any."""
    rtol: float | None = 2.0
    """The same in means; None for any."""
    losses: list[float] = field(default_factory=list, init=False)
    last: float = field(default=0.0, init=False)
    steps: int = field(default=0, init=False)

    def update(self, loss: float, grad_norm: float, update_norm: float) -> bool:
        """Flag a step at which the original would raise TrainingSpikeException."""
        spike = self.steps >= self.warmup and self._is_spike(loss)
        self.steps += 1
        if not spike:
            self.losses.append(loss)
            del self.losses[: -self.window]
            self.last = loss
        return spike

    def _is_spike(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if loss - self.last <= 0:
            return False
        known = [kept for kept in self.losses if not math.isnan(kept)]  # torchmetrics leaves NaN out of a mean
        mean = sum(known) / len(known) if known else math.nan
        distance = abs(loss - mean)
        return (self.atol is None or distance >= self.atol) and (self.rtol is None or distance >= abs(self.rtol * mean))


@register
@dataclass
class Megatron(Detector):
    """Megatron-LM's checks of a step: ten times the largest of the first 100 values, or not finite.

    The largest value is never renewed: this is made to catch broken hardware, and a loss that falls from 11 would have
    to rise over 110. Values that are not finite are not among the 100. The original looks at each bucket of gradients;
    this at the norm of all. Its checks for large values are off until asked for; the one for NaN is on.
    """

    id = "preset_megatron"
    needs = ("loss", "grad/norm")
    source = "Megatron-LM rerun state machine"

    factor: float = 10.0
    """Value over the largest of the first ones."""
    num_samples: int = 100
    """How many first ones."""
    counts: list[int] = field(default_factory=lambda: [0, 0], init=False)
    largest: list[float] = field(default_factory=lambda: [0.0, 0.0], init=False)

    def update(self, loss: float, grad_norm: float, update_norm: float) -> bool:
        """Flag a step that the original would run again."""
        return any([self._unexpected(which, abs(value)) for which, value in enumerate((loss, grad_norm))])

    def _unexpected(self, which: int, value: float) -> bool:
        if not math.isfinite(value):
            return True
        if self.counts[which] < self.num_samples:
            self.counts[which] += 1
            self.largest[which] = max(self.largest[which], value)
            return False
        return value >= self.factor * self.largest[which]


@register
@dataclass
class Levanter(Detector):
    """Levanter's ClipUpdateNorm: the update's norm is over mean + 3 standard deviations of the last 128.

    The value judged is not among those it is judged by. The deviation is that of the window itself, without the
    correction for its length, and counts as 1e-6 at least, whatever the scale. What enters the window is the norm
    before it is clipped. NaN is no flag, and hides all others until it has left the window.
    """

    id = "preset_levanter"
    needs = ("update/rms",)
    source = "Levanter ClipUpdateNorm"

    rolling_interval_length: int = 128
    """Steps that a value is judged by; half of them must have been seen."""
    sigma_factor: float = 3.0
    """Standard deviations over the mean."""
    norms: list[float] = field(default_factory=list, init=False)

    def update(self, loss: float, grad_norm: float, update_norm: float) -> bool:
        """Flag a step whose update the original would clip."""
        flagged = False
        if len(self.norms) >= max(2, self.rolling_interval_length // 2):
            past = np.array(self.norms)
            flagged = bool(update_norm > past.mean() + self.sigma_factor * np.fmax(past.std(), 1e-6))
        self.norms.append(update_norm)
        del self.norms[: -self.rolling_interval_length]
        return flagged


@dataclass
class Window:
    """llm.c's OutlierDetector: the z-score of a value in a window that it is part of itself."""

    values: list[float] = field(default_factory=list)
    index: int = 0
    total: float = 0.0
    total_sq: float = 0.0
    skipped: int = 0

    def z_score(self, value: float, size: int, threshold: float) -> float:
        """Put a value into the window and judge it; nan before the window is full."""
        if len(self.values) < size:
            self.values.append(value)
            self._add(value, 1)
            return math.nan
        oldest = self.values[self.index]
        self._add(oldest, -1)
        self._add(value, 1)
        mean = self.total / size
        variance = self.total_sq / size - mean * mean
        # In C the root of a number below zero is NaN.
        deviation = math.sqrt(variance) if variance >= 0 else math.nan
        z = 0.0 if deviation == 0 else (value - mean) / deviation
        self.skipped = self.skipped + 1 if z > threshold else 0
        if 0 < self.skipped < 3:
            self._add(value, -1)
            self._add(oldest, 1)
        else:
            self.values[self.index] = value
            self.index = (self.index + 1) % size
        return z

    def _add(self, value: float, times: int) -> None:
        self.total += times * value
        self.total_sq += times * value * value


@register
@dataclass
class LLMC(Detector):
    """llm.c's outlier detector: the loss or the norm has a z-score over 3 among the last 64, itself included.

    Being in its own window a value cannot score over √63, about 7.9. The first two outliers in a row are taken out
    again; the third stays. Sums run on, so that a single NaN silences it for good. Its author's branch puts the value
    that an outlier had pushed out back beside its place; here it goes back where it was, as the comment there says.
    """

    id = "preset_llmc"
    needs = ("loss", "grad/norm")
    source = "llm.c outlier detector"

    window_size: int = 64
    """Values in the window."""
    z_thresh: float = 3.0
    """Z-score over which a step is skipped."""
    loss_window: Window = field(default_factory=Window, init=False)
    norm_window: Window = field(default_factory=Window, init=False)

    def update(self, loss: float, grad_norm: float, update_norm: float) -> bool:
        """Flag a step that the original would skip."""
        scores = [
            window.z_score(value, self.window_size, self.z_thresh)
            for window, value in ((self.loss_window, loss), (self.norm_window, grad_norm))
        ]
        return any(math.isfinite(z) and z > self.z_thresh for z in scores)


PRESETS: dict[str, Callable[[], Detector]] = {
    kind.id.removeprefix("preset_"): kind for kind in (Olmo, ZClip, LLMFoundry, Lightning, Megatron, Levanter, LLMC)
}
"""A new detector by the name of the project it is from."""

for _name, _message in WORDS.items():
    RULES[_name].message = _message
