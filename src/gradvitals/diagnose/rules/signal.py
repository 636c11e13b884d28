"""Rules about the gradient signal-to-noise ratio: of the run, of its layers, and of its attention heads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.baseline import Floats, empty
from gradvitals.diagnose.history import Average, Streak, fall, finite_median, median
from gradvitals.diagnose.message import Message, Observation
from gradvitals.diagnose.rule import Rule, register
from gradvitals.diagnose.step import Step
from gradvitals.format import number

INTERVAL = ("gsnr", "gsnr_low", "gsnr_high")


def lr_rises(step: Step, back: int = 5) -> bool:
    """Whether the learning rate is rising, as in a warmup."""
    rates = step.history["lr"].values
    return bool(rates) and step.value("lr") > rates[-min(back, len(rates))]


@register
@dataclass
class NearZeroInitialGsnr(Rule):
    """A young run has no signal in its gradients, and its loss does not fall."""

    id = "near_zero_initial_gsnr"
    family = "signal"
    is_symptom = True
    needs = ("microbatch:gsnr", "loss")
    follows = ("stale_gradients", "lr_too_high")
    reads = "full"
    expects_fall = True
    judges_after = 60
    closes_after = 100
    message = Message(
        name="No signal at the start",
        pattern="The GSNR is close to 0 over the first readings, and the loss does not fall.",
        title="Gradients carry no signal so far: the GSNR per step is between {low} and {high}, and the loss is {loss}",
        causes={
            "labels": "Inputs and targets do not match: shuffled, shifted by one, or wrong for many samples",
            "init": "The weights started too large or too small, so outputs hardly depend on inputs",
            "no_warmup": "The learning rate was {lr_first} from the first step: it may have destroyed the weights",
            "batch": "A batch of {batch_size} is too small for {readings} readings to show a signal",
        },
        fixes={
            "labels": "Print ten samples of a batch with their targets, exactly as the model receives them",
            "warmup": "Start again with a warmup: from {lr_start} to {lr_first} over the first few hundred steps",
            "overfit": "Train on a single batch: if its loss does not go to zero, the model or the loss has the bug",
            "init": "Check the initialization: activations should have a standard deviation near 1 in every layer",
        },
        passed="gradients carried a signal from the start",
        reference="arXiv 2001.07384 for GSNR",
    )

    WITHIN = 500  # steps from the start that it checks
    AFTER = 40  # steps before it reports anything
    READINGS = 6  # readings in the average, at least
    MOST = 0.5  # GSNR of one step that the upper end must be below; the lower end must be 0 or less
    FALLEN = 0.3  # largest share of its first value that the loss has lost
    FALLS = 0.05  # share that it may have lost over the second half of the run so far, by the upper end
    IN_A_ROW = 3  # readings
    MOVES = 1e-3  # median update ratio for a warning: with smaller steps, as in fine-tuning, the loss may just be slow

    lowest: float = field(default=math.inf, init=False)
    """Lowest mean of ten losses."""
    seen_for: int = field(default=0, init=False)

    def check(self, step: Step) -> Observation | None:
        average, losses = step.average, step.history["loss"].values
        if step.number > self.WITHIN or average is None or not step.history.averages.same_weights or len(losses) < 10:
            return None
        self.lowest = min(self.lowest, float(np.mean(losses[-10:])))
        recent = step.losses_since(step.number / 2)
        if step.number < self.AFTER or average.count < self.READINGS or len(recent) < 10:
            return None
        begin, now, high = median(np.array(losses[:5])), float(recent.mean()), average.high * average.per_step
        fell, error = fall(recent)
        silent = average.low <= 0 and high < self.MOST
        stays = fell + 2 * error < self.FALLS * abs(now) and begin - self.lowest < self.FALLEN * abs(begin)
        self.seen_for = self.seen_for + 1 if silent and stays and not lr_rises(step) else 0
        if self.seen_for < self.IN_A_ROW:
            return None
        seen = dict[str, Any](gsnr=average.value * average.per_step, low=average.low * average.per_step, high=high)
        seen |= {"batch_size": average.step_size, "source": step.history.averages.source, "readings": average.count}
        rates, ratios = step.history["lr"].values, step.history["update/ratio"].last(100)
        first = rates[0] if rates else math.nan
        seen |= {"loss": now, "lr": step.value("lr"), "lr_first": first, "lr_start": first / 10}
        cold = bool(rates) and rates[0] >= 0.9 * max(rates)
        return Observation(
            severity="warning" if len(ratios) and np.median(ratios) > self.MOVES else "info",
            seen=seen,
            expected={"gsnr": "above 0", "loss": f"below {begin:.3g}"},
            since=average.begins,
            causes=("no_warmup",) if cold else (),
            fixes=("labels", "warmup") if cold else (),
        )


@register
@dataclass
class DeepLayerCollapse(Rule):
    """The GSNR falls from layer to layer toward one end of the model."""

    id = "deep_layer_collapse"
    family = "signal"
    is_symptom = True
    needs = ("microbatch:gsnr",)
    reads = "full"
    judges_after = 60
    closes_after = 500
    message = Message(
        name="Signal fades with depth",
        pattern="The GSNR falls from layer to layer toward one end of a stack, by more than its intervals explain.",
        title="The signal fades toward the {towards}: the GSNR is {low_end} in {first} and {high_end} in {strong}",
        causes={
            "attenuation": (
                "The gradient drowns in noise on its way back through {layers} layers, as in deep networks without "
                "residual paths (post-LN) or with saturating activations"
            ),
            "output": "Layers near the output get contradicting gradients: noisy targets, or a loss with opposed terms",
        },
        fixes={
            "pre_ln": "Use pre-norm in the stack of {first}: normalize before each layer, not after the residual sum",
            "scale": "Scale the residual branches by 1/√{layers} at the start",
            "warmup": "Use a longer warmup: such stacks are most fragile in their first steps",
        },
        passed="the signal is as strong in deep layers as in others",
        reference="arXiv 2002.04745 for post-LN and pre-LN",
    )

    FACTOR = 5.0  # how far the ends must be apart: the lowest of one over the highest of the other, by intervals
    ORDER = 0.7  # rank correlation of GSNR and depth
    LAYERS = 4  # layers with an interval, at least
    READINGS = 5  # readings in the average, at least

    since: int = field(default=-1, init=False)
    """Step of the first of the readings in a row that show it; -1 if the last one did not."""

    def check(self, step: Step) -> Observation | None:
        average, reading = step.average, step.samples
        if average is None or reading is None or not reading.layers.keys() >= set(INTERVAL):
            return None
        value, low, high = (np.asarray(reading.layers[name], dtype=np.float64) for name in INTERVAL)
        alike = np.array(stack(step.layout.layers), dtype=np.intp)
        alike = alike[alike < len(value)]
        known = alike[np.isfinite(low[alike] + high[alike])]
        enough = len(known) >= self.LAYERS and average.count >= self.READINGS
        ends = self._ends(value[known], low[known], high[known]) if enough else None
        if ends is None:
            self.since = -1
            return None
        if self.since < 0:
            self.since = step.number
        if average.begins <= self.since:
            return None
        to_input, ratio = ends
        worst = known if to_input else known[::-1]
        names = [step.layout.layers[int(index)] for index in worst]
        seen = dict[str, Any](low_end=float(value[worst[0]]), high_end=float(value[worst[-1]]), ratio=ratio)
        seen |= {"layers": len(known), "strong": names[-1], "towards": "input" if to_input else "output"}
        return Observation(
            severity="warning",
            seen=seen,
            expected={"ratio": f"below {self.FACTOR:g}"},
            tensors=tuple(names[: max(1, len(names) // 4)]),
            since=self.since,
            causes=("attenuation",) if to_input else ("output",),
        )

    def _ends(self, value: Floats, low: Floats, high: Floats) -> tuple[bool, float] | None:
        """Whether it falls toward the input, and by how much at least; None if it does not fall either way."""
        count = len(value)
        place = np.arange(count) - (count - 1) / 2
        ranks = np.argsort(np.argsort(value)) - (count - 1) / 2
        order = float((place * ranks).sum() / (place**2).sum())
        part, to_input = max(1, count // 4), order > 0
        weak, strong = (slice(None, part), slice(-part, None)) if to_input else (slice(-part, None), slice(None, part))
        least, most = float(low[strong].min()), float(high[weak].max())
        if abs(order) < self.ORDER or least <= 0 or most * self.FACTOR > least:
            return None
        return to_input, least / most if most > 0 else math.inf


@lru_cache(maxsize=8)
def stack(layers: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the layers that can be compared: the longest numbered series, such as ``blocks.0`` to ``blocks.11``.

    An embedding or an output head has a GSNR of its own kind.
    """
    rows: dict[str, list[int]] = {}
    for index, name in enumerate(layers):
        prefix, _, last = name.rpartition(".")
        if last.isdigit():
            rows.setdefault(prefix, []).append(index)
    longest: list[int] = max(rows.values(), key=len, default=[])
    return tuple(longest)


@register
@dataclass
class SuddenGsnrDrop(Rule):
    """The GSNR of one source at one batch size drops, by more than it does during any run."""

    id = "sudden_gsnr_drop"
    family = "signal"
    is_symptom = True
    needs = ("gsnr",)
    needs_known = "gsnr"
    reads = "full"
    judges_after = 150
    closes_after = 200
    message = Message(
        name="Signal lost",
        pattern=(
            "The GSNR from one source at one batch size drops far below its earlier interval and faster than it "
            "normally declines, while the learning rate is not rising."
        ),
        title="GSNR at a batch of {batch_size} fell from {before} before step {from_step} to {gsnr} (at most {high})",
        causes={
            "edge": "The weights reached high curvature, where steps at a learning rate of {lr} bounce back and forth",
            "data": "The data has changed: a different source, a different order, or wrong targets",
            "learned": (
                "The model has learned the easy part; the rest is indistinguishable from noise at this batch size"
            ),
        },
        fixes={
            "lower": "Lower the learning rate from {lr} to about {lr_proposed}",
            "data": "Compare batches from before step {from_step} with those after it",
            "batch": "Double the batch: the GSNR of a step doubles with it",
        },
        passed="the signal did not drop",
    )

    FACTOR = 3.0  # how far below the earlier interval the new one must be, beyond what a decline explains
    DECLINE = 2.0  # power of the step number that a GSNR may fall with by itself
    READINGS = 5  # readings in each of the two averages, at least
    IN_A_ROW = 3  # readings

    streak: Streak = field(default_factory=Streak, init=False)

    def check(self, step: Step) -> Observation | None:
        now, averages = step.average, step.history.averages
        before = None if now is None else averages.before(now.begins)
        if now is None or before is None or min(now.count, before.count) < self.READINGS:
            return None
        usual = self._decline(now, before, averages.before(before.begins))
        dropped = before.established and now.most * self.FACTOR < before.low * usual
        self.streak.add(dropped and not self._warming_up(step, before.begins), step.number, averages.begins)
        if self.streak.count < self.IN_A_ROW:
            return None
        lr, since = step.value("lr"), averages.below_since(before.low)
        seen = dict[str, Any](gsnr=now.value, high=now.most, before=before.value, low_before=before.low)
        seen |= {"from_step": since, "batch_size": now.batch_size, "source": averages.source}
        seen |= {"lr": lr, "lr_proposed": lr / 3}
        return Observation(severity="warning", seen=seen, expected={"gsnr": before.value * usual}, since=since)

    def _decline(self, now: Average, before: Average, earlier: Average | None) -> float:
        """The share that an ordinary decline leaves: with the length of the run, or continuing as before."""
        power, line = self.DECLINE, 1.0
        if earlier is not None and earlier.value > before.value > 0 and earlier.middle > 0:
            fell, apart = earlier.value / before.value, before.middle - earlier.middle
            power = max(power, math.log(fell) / math.log(before.middle / earlier.middle))
            line = 1 - (fell - 1) * (now.middle - before.middle) / apart
        return float(min((before.middle / now.middle) ** power, line))

    def _warming_up(self, step: Step, begin: int) -> bool:
        """Whether the learning rate rose in the time that is compared."""
        rates = step.history["lr"].since(begin)[1]
        return len(rates) > 1 and bool(rates.max() > 1.05 * rates[0])


@register
@dataclass
class SparseFeatureNoise(Rule):
    """Some attention heads of a layer have a signal, and others next to none or no gradient at all."""

    id = "sparse_feature_noise"
    family = "signal"
    needs = ("heads:gsnr",)
    reads = "full"
    judges_after = 40
    closes_after = 500
    message = Message(
        name="Heads without signal",
        pattern=(
            "Some heads of an attention layer have a clear signal and others almost none (their intervals do not "
            "overlap), or some get no gradient at all."
        ),
        title="Attention head {where} {state}, while other heads of its layer have a GSNR of about {others}",
        causes={
            "masked": "The output of {first} never reaches the loss: masked, pruned, or multiplied by zero",
            "unbalanced": "Other heads of the layer already do what {first} could learn, so it gets no signal",
        },
        fixes={
            "unmask": "Find what silences {first}: a head mask, a gate, or zero columns in the output projection",
            "watch": "If {first} does not recover, prune it: attention works as well without it",
            "momentum": "Or give weak heads a parameter group: DeepKD raises the momentum of parts with a high GSNR",
        },
        passed="all attention heads have a signal",
        reference="arXiv 2505.15133 (DeepKD), arXiv 1905.09418 (pruning heads)",
    )

    FACTOR = 10.0  # how far below the best head of its layer a head must be, by intervals
    IN_A_ROW = 3  # readings at which a head has no gradient at all
    APART_FOR = 20  # readings at which a head is so far below; as many as an average covers

    dead_for: Floats = field(default_factory=empty, init=False)
    low_for: Floats = field(default_factory=empty, init=False)

    def check(self, step: Step) -> Observation | None:
        reading = step.samples
        if reading is None or not reading.heads.keys() >= set(INTERVAL):
            return None
        value, low, high = (np.asarray(reading.heads[name]) for name in INTERVAL)
        starts, size = first_heads(step.layout.heads), len(value)
        if not size or len(step.layout.heads) != size:
            return None
        if len(self.dead_for) != size:
            self.dead_for, self.low_for = np.zeros(size), np.zeros(size)
        counts = np.diff(np.append(starts, size))
        best = np.repeat(np.fmax.reduceat(low, starts), counts)
        alive = np.repeat(np.add.reduceat(np.isfinite(value).astype(np.float64), starts), counts)
        dead = np.isnan(value) & (alive >= np.repeat(counts, counts) / 2)
        weak = (best > 0) & (high * self.FACTOR < best)
        self.dead_for = np.where(dead, self.dead_for + 1, 0.0)
        self.low_for = np.where(weak, self.low_for + 1, 0.0)
        gone = self.dead_for >= self.IN_A_ROW
        found = np.flatnonzero(gone | (self.low_for >= self.APART_FOR))
        if not len(found):
            return None
        found = found[np.lexsort((value[found], ~gone[found]))]
        worst = int(found[0])
        others = finite_median(value[best == best[worst]])
        seen = dict[str, Any](heads=len(found), others=others, gsnr=float(value[worst]), batch_size=reading.batch_size)
        return Observation(
            severity="warning" if gone.any() else "info",
            seen=seen,
            expected={"gsnr": float(best[worst])},
            text={"state": "has no gradient" if gone[worst] else f"has a GSNR of {number(float(value[worst]), 2)}"},
            tensors=tuple(step.layout.heads[int(head)] for head in found),
            causes=("masked",) if gone[worst] else ("unbalanced",),
            fixes=("unmask",) if gone[worst] else ("watch",),
        )


@lru_cache(maxsize=8)
def first_heads(heads: tuple[str, ...]) -> NDArray[np.intp]:
    """Returns the index of the first head of each attention module."""
    modules = [name.rsplit("/", 1)[0] for name in heads]
    return np.flatnonzero([i == 0 or module != modules[i - 1] for i, module in enumerate(modules)])


@register
@dataclass
class HighEffortLowProgress(Rule):
    """The gradient is large for this run, mostly noise, and the loss is not improving."""

    id = "high_effort_low_progress"
    family = "signal"
    is_symptom = True
    needs = ("gsnr", "loss", "grad/norm")
    needs_known = "gsnr"
    reads = "full"
    expects_fall = True
    judges_after = 200
    min_steps = 60
    closes_after = 100
    follows = ("stale_gradients", "lr_too_high")
    message = Message(
        name="High effort, low progress",
        pattern="The gradient norm is high for this run, the GSNR is near zero, and the loss is above its median.",
        title=(
            "Large steps, no progress: the gradient norm is {ratio}× the median, its GSNR at most {high}, and the loss "
            "{loss} (normally {usual_loss})"
        ),
        causes={
            "edge": "The learning rate of {lr} throws the weights back and forth across a valley",
            "damaged": "An earlier step damaged the weights, and the run has not recovered",
            "data": "The data has changed, so what was learned no longer helps",
        },
        fixes={
            "lower": "Lower the learning rate from {lr} to about {lr_proposed}",
            "go_back": "If the loss does not recover by itself, restore a checkpoint from before it rose",
            "reset": "Reset the optimizer's momentum, which still holds the bad steps",
        },
        passed="large gradients came with progress",
    )

    RATIO = 1.5  # norm over the median of the run so far
    MOST = 0.5  # GSNR of one step that the upper end of the interval must be below
    WORSE = 0.05  # share by which the loss exceeds its median over the run so far
    LEFT = 0.05  # share of the first loss below which there is little left to learn, and losses swing by nature
    SPAN = 30  # steps whose mean loss and median norm are compared
    IN_A_ROW = 3  # readings

    streak: Streak = field(default_factory=Streak, init=False)

    def check(self, step: Step) -> Observation | None:
        average = step.average
        if average is None:
            return None
        norms, losses = step.history["grad/norm"], step.losses_since(step.ago(self.SPAN))
        if len(norms) < 2 * self.SPAN or len(losses) < self.SPAN // 2:
            return None
        loss, error = float(losses.mean()), float(losses.std() / math.sqrt(len(losses)))
        usual_loss = step.history["loss"].median(1024)
        usual, now = norms.median(1024), norms.median(self.SPAN)
        high = average.high * average.per_step
        low_signal = average.low <= 0 and high < self.MOST
        little_left = loss < self.LEFT * step.first_loss
        worse = not little_left and loss - usual_loss > max(self.WORSE * abs(usual_loss), 3 * error)
        self.streak.add(now > self.RATIO * usual and low_signal and worse, step.number, step.history.averages.begins)
        if self.streak.count < self.IN_A_ROW:
            return None
        lr = step.value("lr")
        seen = dict[str, Any](norm=now, usual_norm=usual, ratio=now / usual, loss=loss, usual_loss=usual_loss)
        seen |= {"gsnr": average.value * average.per_step, "high": high, "batch_size": average.step_size}
        return Observation(
            severity="info",
            seen=seen | {"lr": lr, "lr_proposed": lr / 3},
            expected={"norm": usual, "gsnr": f"{self.MOST:g} or more", "loss": usual_loss},
            since=self.streak.since,
        )


@register
@dataclass
class NoisyGradients(Rule):
    """Most coordinates of the gradient have more noise than signal, at the batch size in use."""

    id = "noisy_gradients"
    family = "signal"
    needs = ("gsnr",)
    needs_known = "gsnr"
    reads = "full"
    judges_after = 150
    closes_after = 500
    follows = ("stale_gradients", "lr_too_high")
    ordinary = True
    default = False
    message = Message(
        name="Noisy gradients",
        pattern="The median GSNR is below 1 at the current batch size.",
        title=(
            "Gradient noise exceeds signal: at a batch of {batch_size} the median GSNR per tensor is {median}, and "
            "{share} are below 1"
        ),
        causes={
            "ordinary": (
                "This is normal: healthy runs stay below 1 most of the time and learn by taking many steps. The "
                "threshold of 1 is a convention and depends on the batch size. A negative estimate means that signal "
                "and noise cannot be distinguished yet"
            ),
            "small_batch": (
                "A larger batch has less noise: doubling the {batch_size} samples per step doubles the true GSNR"
            ),
        },
        fixes={
            "nothing": "No action needed while the loss falls",
            "batch": (
                "If the loss stalls, accumulate gradients to a batch above {batch_size}, or lower the learning rate"
            ),
        },
        passed="most coordinates have more signal than noise",
        reference="arXiv 2001.07384",
    )

    AFTER = 100  # steps before it reports anything: nearly every run has more signal in its first steps

    threshold: float = 1.0
    """GSNR that counts as noisy. That it is 1 is a convention: healthy runs are below it most of the time."""

    share: float = field(default=math.nan, init=False)
    """Share of coordinates below 1, as last counted."""

    def check(self, step: Step) -> Observation | None:
        moments = step.adam
        if moments is not None and "gsnr/below_one_fraction" in moments.tensors:
            below = np.asarray(moments.tensors["gsnr/below_one_fraction"])
            sizes = step.layout.sizes[: len(below)]
            known = np.isfinite(below)
            self.share = float((below * sizes)[known].sum() / sizes[known].sum()) if known.any() else math.nan
        average = step.average
        if average is None or step.number < self.AFTER:
            return None
        of_tensors = None if step.gsnr is None else step.gsnr.tensors.get("gsnr")
        middle = finite_median(np.asarray(of_tensors)) * average.per_step if of_tensors is not None else math.nan
        high = average.high * average.per_step
        if not (middle < self.threshold and (high < self.threshold or self.share > 0.5)):
            return None
        share = f"{100 * self.share:.0f}% of coordinates" if math.isfinite(self.share) else "most tensors"
        seen = dict[str, Any](median=middle, share=share, whole=average.value * average.per_step, high=high)
        seen |= {"batch_size": average.step_size, "source": step.history.averages.source}
        expected = {"median": f"{self.threshold:g} or more"}
        return Observation(severity="info", seen=seen, expected=expected, since=average.begins)
