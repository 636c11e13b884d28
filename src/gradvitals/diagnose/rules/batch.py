"""Rules about the batch: too small or too large for the noise, identical or mixed micro-batches, too few of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradvitals.diagnose.history import Streak, fall
from gradvitals.diagnose.message import Message, Observation
from gradvitals.diagnose.rule import Rule, register
from gradvitals.diagnose.rules.signal import lr_rises
from gradvitals.diagnose.step import Step
from gradvitals.format import number

NOISE_SCALE = "arXiv 1812.06162 (noise scale), arXiv 2505.23971 (it may be far below the critical batch size)"


def _since(since: int, holds: bool, step: int) -> int:
    """Returns since which step a condition holds, given the previous answer; -1 if it does not."""
    return -1 if not holds else step if since < 0 else since


@register
@dataclass
class BatchTooLarge(Rule):
    """The batch is far over the noise scale: most of its samples repeat what the others say."""

    id = "batch_too_large"
    family = "batch"
    needs = ("noise_scale",)
    needs_known = "noise_scale"
    reads = "full"
    expects_fall = True
    judges_after = 60
    closes_after = 100
    follows = ("stale_gradients",)
    message = Message(
        name="Batch too large",
        pattern=(
            "The batch is more than twice the upper end of the noise scale over many readings (a note; a warning from "
            "five times on), and not only while the learning rate rises."
        ),
        title=(
            "A batch of {batch_size} is at least {ratio}× the noise scale of about {noise_scale}: up to {wasted:%} of "
            "the samples add no progress"
        ),
        causes={
            "early": "Gradients agree early in a run, when a small batch is enough; the noise scale grows later",
            "large": "The samples of a batch agree so closely that fewer would give the same direction",
        },
        fixes={
            "smaller": "Use about {proposed} samples per step at this stage, and a larger batch later",
            "faster": "Or keep the batch and raise the learning rate, if training stays stable",
        },
        passed="the batch is not far above the noise scale",
        reference=NOISE_SCALE,
    )

    IN_A_ROW = 5  # readings
    LASTING = 20  # steps that it must last: every run starts with a small noise scale
    SETTLED = 10  # steps since the learning rate last rose: a warmup keeps the noise scale small
    READINGS = 5  # readings in the average, at least

    factor: float = 2.0
    """Batch over the upper end of the noise scale for a note."""
    far: float = 5.0
    """The same for a warning: five of six samples are wasted."""

    since: int = field(default=-1, init=False)
    """First step of the average since which it is too large; -1 if it is not."""
    large: Streak = field(default_factory=Streak, init=False)
    """Readings at which it was too large."""
    far_off: Streak = field(default_factory=Streak, init=False)
    """Readings at which it was far too large."""

    def check(self, step: Step) -> Observation | None:
        # The batch over the noise scale is the GSNR at that batch.
        average = step.average
        if average is None or average.count < self.READINGS or math.isnan(average.step_size):
            return None
        ratio = average.low * average.per_step if average.established else 0.0
        self.since = _since(self.since, ratio > self.factor, average.begins)
        self.large.add(ratio > self.factor, step.number)
        self.far_off.add(ratio > self.far, step.number)
        lasted, far = (
            streak.count >= self.IN_A_ROW and step.number - streak.since >= self.LASTING
            for streak in (self.large, self.far_off)
        )
        if not lasted or lr_rises(step, self.SETTLED):
            return None
        noise_scale = average.batch_size / average.value
        seen = dict[str, Any](batch_size=average.step_size, noise_scale=noise_scale, ratio=ratio)
        seen |= {"noise_scale_high": average.batch_size / average.low, "proposed": math.ceil(2 * noise_scale)}
        seen["source"] = step.history.averages.source
        return Observation(
            severity="warning" if far else "info",
            seen=seen,
            expected={"batch_size": average.batch_size / average.low},
            text={"wasted": round(ratio / (1 + ratio), 2)},
            since=self.since,
            causes=("early",) if step.number < 500 else (),
        )


@register
@dataclass
class BatchTooSmall(Rule):
    """The batch is far below the noise scale: its few samples decide where a step goes."""

    id = "batch_too_small"
    family = "batch"
    is_symptom = True
    needs = ("noise_scale",)
    needs_known = "noise_scale"
    expects_fall = True
    judges_after = 60
    closes_after = 200
    follows = ("stale_gradients",)
    message = Message(
        name="Batch too small",
        pattern="The lower end of the noise scale is ten times the batch or more, or few samples make the loss swing.",
        title="A batch of {batch_size} is small for this run: {grounds}",
        causes={
            "noise": "The few samples of a batch disagree, so the direction of a step depends on which samples it gets",
            "tiny": (
                "{batch_size} samples are too few to average out their differences. This is the swing of the recorded "
                "loss; if the loop smooths it, single batches swing more"
            ),
            "late": "The noise scale grows during a run: a batch that was large enough at first may not be later",
        },
        fixes={
            "accumulate": "Accumulate {proposed} samples per step, or lower the learning rate of {lr}",
            "nothing": (
                "No action needed while the loss falls: small batches make good use of samples, but take more steps"
            ),
        },
        passed="the batch is not far below the noise scale",
        reference=NOISE_SCALE,
    )

    FAR = 100.0  # lower end of the noise scale over the batch for a warning, if the loss does not fall either
    READINGS = 10  # readings in the average, at least
    TINY = 4  # a batch of so few samples is reported without a noise scale if its loss swings
    LEAST = 2  # the same for a warning
    LEARNED = 0.7  # loss over that of the trivial prediction, under which a run learns in spite of a tiny batch
    SWING = 0.05  # standard deviation of the loss from step to step over its mean, for that

    factor: float = 10.0
    """Lower end of the noise scale over the batch for a note."""

    since: int = field(default=-1, init=False)
    """The reading since which it is too small; -1 if it is not."""

    def check(self, step: Step) -> Observation | None:
        size = step.general.batch_size
        if size is None:
            return None
        average = step.average
        if average is None or step.history.averages.source == "adam":  # whose GSNR is too low while gradients shrink
            return self._tiny(step, size) if step.number % 10 == 0 else None
        if average.count < self.READINGS or math.isnan(average.high):
            return None
        most = average.high * average.per_step
        self.since = _since(self.since, most * self.factor < 1, step.number)
        if self.since < 0 or average.begins <= self.since:
            return self._tiny(step, size) if average.low * average.per_step <= 1 / self.factor else None
        ratio = 1 / most if most > 0 else math.inf
        losses = step.losses_since(step.number / 2)
        fell, error = fall(losses)
        harmful = ratio > self.FAR and fell < 2 * error and np.mean(losses) > 0.5 * step.history["loss"].values[0]
        seen = dict[str, Any](batch_size=size, ratio=ratio, noise_scale_low=ratio * size)
        seen |= {"readings": average.count, "proposed": 4 * size, "lr": step.value("lr")}
        return Observation(
            severity="warning" if harmful else "info",
            seen=seen,
            expected={"batch_size": ratio * size},
            text={"grounds": f"the noise scale is at least {number(min(ratio, 1e6))} times as large"},
            since=self.since,
        )

    def _tiny(self, step: Step, size: float) -> Observation | None:
        if size > self.TINY:
            return None
        losses = np.append(step.history["loss"].last(50), step.value("loss"))
        if len(losses) < 50:
            return None
        swing = float(np.sqrt(np.mean(np.diff(losses) ** 2) / 2) / abs(np.mean(losses)))
        if not swing > self.SWING or step.loss_left < self.LEARNED:
            return None
        return Observation(
            severity="warning" if size <= self.LEAST else "info",
            seen={"batch_size": size, "swing": swing, "proposed": 8 * size, "lr": step.value("lr")},
            expected={"swing": self.SWING},
            text={"grounds": f"recorded losses scatter by {100 * swing:.0f}% of their mean"},
            causes=("tiny",),
        )


@register
@dataclass
class EstimatorUnreliable(Rule):
    """Too few micro-batches or readings for a GSNR: its interval spans more than a factor of ten."""

    id = "estimator_unreliable"
    family = "batch"
    needs = ("gsnr",)
    needs_known = "gsnr"
    reads = "full"
    judges_after = 200
    closes_after = 500
    message = Message(
        name="GSNR uncertain",
        pattern="The interval of the GSNR spans more than a factor of ten, or includes 0, even after many readings.",
        title="The GSNR is uncertain: between {low} and {high} at a batch of {batch_size}, after {readings} readings",
        causes={
            "few": "It compares only {count} micro-batches; under 6, the ratio of a coordinate has no finite variance",
            "weak": "The signal is weak compared with the noise, so it takes many samples to measure",
        },
        fixes={
            "split": "Split the same batch into more micro-batches: {needed} instead of {count} are enough",
            "accumulate": "Accumulate gradients over several micro-batches, so that they can be compared",
            "longer": "Read more often (Config(tensor_every=...)) or average more readings (Config(gsnr_window=...))",
            "nothing": "No action needed unless a decision depends on the GSNR",
        },
        passed="the GSNR of the model is known within a factor of ten",
        reference="arXiv 2309.13681 for the number of micro-batches",
    )

    DECADE = 10.0  # upper over lower end of the interval
    READINGS = 15  # readings in the average, at least: before, it is only young
    FEW = 6  # micro-batches below which the ratio of single coordinates has no finite variance

    streak: Streak = field(default_factory=Streak, init=False)

    def check(self, step: Step) -> Observation | None:
        average = step.average
        if average is None or math.isnan(average.high):
            return None
        wide = average.low <= 0 or average.high > self.DECADE * average.low
        young = average.count < self.READINGS  # a young one that is narrow ends the streak all the same
        if not (wide and young):
            self.streak.add(wide, step.number, step.history.averages.begins)
        if young or not wide or 2 * average.begins - step.number <= self.streak.since:
            return None
        count = round(average.per_step)
        half = (average.high - average.low) / 2
        # The width falls with the root of readings × (micro-batches - 1); half the value makes it useful.
        needed = (2 * half / average.value) ** 2 if average.value > 0 else math.inf
        more = 1 + needed * max(count - 1, 1)
        seen = dict[str, Any](low=average.low, high=average.high, gsnr=average.value, count=count)
        seen |= {"readings": average.count, "source": step.history.averages.source, "batch_size": average.batch_size}
        return Observation(
            severity="info",
            seen=seen,
            expected={"high": self.DECADE * max(average.low, 0.0)},
            text={"needed": f"about {math.ceil(more):,}" if more < 1000 else "over 1,000"},
            since=self.streak.since,
            causes=("few",) if count < self.FEW else ("weak",),
            fixes=("split",) if count > 1 else ("accumulate",),
        )


@register
@dataclass
class MixedPasses(Rule):
    """The backward passes of a step are not samples of one distribution: their gradients oppose each other."""

    id = "mixed_passes"
    family = "batch"
    needs = ("microbatch:gsnr",)
    reads = "full"
    judges_after = 250
    closes_after = 500
    masks = ("batch_too_small", "batch_too_large", "estimator_unreliable", "deep_layer_collapse")
    message = Message(
        name="Backward passes of different kinds",
        pattern=(
            "The GSNR between the backward passes of a step stays below 0 for four readings in a row in a GAN, or 25 "
            "elsewhere (a note). Samples of one distribution do that only by chance."
        ),
        title="The backward passes of a step oppose each other: their GSNR and noise scale are meaningless",
        causes={
            "game": "One pass uses real samples and another generated ones, as in a GAN",
            "losses": "Each pass has its own loss, and the losses compete",
            "whole": (
                "The passes together cover the same samples at every step, and the run has reached the minimum for them"
            ),
        },
        fixes={
            "nothing": "No action needed: ignore the GSNR and noise scale of this model",
            "adam": "With an Adam-like optimizer, the GSNR from its moments is valid: Config(sources=('adam',))",
        },
        passed="the passes of a step do not oppose each other",
    )

    def check(self, step: Step) -> Observation | None:
        reading = step.reading("microbatch") or step.reading("ranks")
        if reading is None or step.samples is not None or not step.history.passes.mixed:
            return None
        return Observation(
            severity="info",
            seen={"gsnr": reading.values.get("gsnr", math.nan), "loss": step.value("loss")},
            expected={"gsnr": "0 or above, except by chance"},
            since=step.history.passes.since,
            causes=("game",) if step.alternating else (),
        )


@register
@dataclass
class FewParts(Rule):
    """A variance-reduced optimizer compares too few gradients with each other."""

    id = "few_parts"
    family = "batch"
    needs = ("vrgd/mean", "microbatch:gsnr")
    reads = "full"
    closes_after = 200
    message = Message(
        name="Too few micro-batches for VRGD",
        pattern="A variance-reduced optimizer scales gradients by the agreement of fewer than six micro-batches.",
        title="VRGD scales gradients by the agreement of only {count} micro-batches, too few to tell signal from noise",
        causes={
            "few": "A step has {count} backward passes, so the ratio scatters widely and a few elements dominate",
        },
        fixes={
            "split": "Split the same batch of {batch_size} into {enough} or more backward passes per step",
            "base": "Or use the plain optimizer, such as AdamW for VRAdamW: it needs no micro-batches",
        },
        passed="the variance-reduced optimizer compares enough micro-batches",
        reference="arXiv 2309.13681, which uses 8 or more",
    )

    ENOUGH = 6  # gradients per step from which the ratio of signal to noise is useful
    IN_A_ROW = 3  # readings: the rest of an epoch is a single step

    streak: Streak = field(default_factory=Streak, init=False)

    def check(self, step: Step) -> Observation | None:
        reading, factor = step.reading("microbatch") or step.reading("ranks"), step.value("vrgd/mean")
        size = None if reading is None else reading.batch_size
        if not size or step.general.batch_size is None or math.isnan(factor):
            return None
        count = round(step.general.batch_size / size)
        self.streak.add(count < self.ENOUGH, step.number)
        if self.streak.count < self.IN_A_ROW:
            return None
        seen = {"count": count, "factor": factor, "batch_size": step.general.batch_size, "enough": self.ENOUGH}
        expected = {"count": f"{self.ENOUGH} or more"}
        return Observation(severity="info", seen=seen, expected=expected, since=self.streak.since)


@register
@dataclass
class IdenticalMicrobatches(Rule):
    """Every micro-batch of a step gives the same gradient."""

    id = "identical_microbatches"
    family = "batch"
    needs = ("microbatch:gsnr",)
    reads = "full"
    closes_after = 100
    message = Message(
        name="Identical micro-batches",
        pattern="The micro-batches of a step have no noise between them: each holds the same samples.",
        title="All {count} micro-batches of a step give the same gradient",
        causes={
            "same_data": "Every micro-batch has the same samples: the loop calls the loader once per step",
            "seed": "Each micro-batch is drawn with the same seed or from the same position",
            "one_batch": "The data is a single batch, as in an overfitting test",
        },
        fixes={
            "next": "Fetch a batch for each micro-batch: {step_size} samples per step are worth only {batch_size}",
            "shuffle": "Check that the loader shuffles, and that its workers have different seeds",
        },
        passed="micro-batches differ",
    )

    ABSURD = 1e5  # GSNR that no data has
    IN_A_ROW = 3  # readings

    streak: Streak = field(default_factory=Streak, init=False)

    def check(self, step: Step) -> Observation | None:
        reading = step.reading("microbatch")
        if reading is None:
            return None
        gsnr = reading.values.get("gsnr", math.nan)
        self.streak.add(gsnr > self.ABSURD, step.number)
        if self.streak.count < self.IN_A_ROW:
            return None
        whole, size = step.general.batch_size, reading.batch_size
        count = round(whole / size) if whole and size else "several"
        seen = {"gsnr": gsnr, "count": count, "batch_size": size, "step_size": whole, "loss": step.value("loss")}
        return Observation(severity="warning", seen=seen, expected={"gsnr": "a finite number"}, since=self.streak.since)
