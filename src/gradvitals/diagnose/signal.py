"""Rules that look at the gradient signal-to-noise ratio: of the run, of its layers, and of its attention heads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.averages import Average, Streak
from gradvitals.diagnose.history import median, median_of
from gradvitals.diagnose.loss import fall, losses_since
from gradvitals.diagnose.rule import Rule, Sign, register
from gradvitals.diagnose.step import Step

Floats = NDArray[np.float64]

INTERVAL = ("gsnr", "gsnr_low", "gsnr_high")


@register
@dataclass
class NearZeroInitialGsnr(Rule):
    """A young run has no signal in its gradients, and its loss stays where it began."""

    id = "near_zero_initial_gsnr"
    expects_fall = True
    judges_after = 60
    every_step = False
    needs = ("microbatch:gsnr", "loss")
    closes_after = 100

    within: int = 500
    """Steps from the start that it looks at."""
    after: int = 40
    """Steps before it says anything."""
    readings: int = 6
    """Readings in the average at least."""
    most: float = 0.5
    """GSNR at the batch of one step that the upper end of the interval must be below; the lower must be 0 or less."""
    fallen: float = 0.3
    """Share of its first value that the loss has lost at most."""
    falls: float = 0.05
    """Share that it may have lost over the second half of the run so far, by the upper end of the interval of that."""
    in_a_row: int = 3
    """Readings at which all of this must be so."""
    moves: float = 1e-3
    """Share of the weights that a usual step changes, from which it is a warning. With smaller steps, as in
    fine-tuning, the loss may just not have moved yet."""

    lowest: float = field(default=math.inf, init=False)
    """Lowest mean of ten losses."""
    seen_for: int = field(default=0, init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires at readings whose interval holds 0 and little more, while the loss does not fall."""
        average, losses = step.average, step.history["loss"].values
        if step.number > self.within or average is None or not step.history.averages.at_one_point or len(losses) < 10:
            return None
        self.lowest = min(self.lowest, float(np.mean(losses[-10:])))
        recent = losses_since(step, step.number / 2)
        if step.number < self.after or average.count < self.readings or len(recent) < 10:
            return None
        begin, now, high = median(np.array(losses[:5])), float(recent.mean()), average.high * average.per_step
        fell, error = fall(recent)
        silent = average.low <= 0 and high < self.most
        stays = fell + 2 * error < self.falls * abs(now) and begin - self.lowest < self.fallen * abs(begin)
        self.seen_for = self.seen_for + 1 if silent and stays and not lr_rises(step) else 0
        if self.seen_for < self.in_a_row:
            return None
        seen = dict[str, Any](gsnr=average.value * average.per_step, low=average.low * average.per_step, high=high)
        seen |= {"batch_size": average.step_size, "source": step.history.averages.source, "readings": average.count}
        rates, ratios = step.history["lr"].values, step.history["update/ratio"].last(100)
        first = rates[0] if rates else math.nan
        seen |= {"loss": now, "lr": step.value("lr"), "lr_first": first, "lr_proposed": first / 10}
        cold = bool(rates) and rates[0] >= 0.9 * max(rates)
        return Sign(
            severity="warning" if len(ratios) and np.median(ratios) > self.moves else "info",
            seen=seen,
            expected={"gsnr": "above 0", "loss": f"below {begin:.3g}"},
            since=average.begins,
            causes=("no_warmup",) if cold else (),
            cures=("labels", "warmup") if cold else (),
        )


def lr_rises(step: Step, back: int = 5) -> bool:
    """Whether the learning rate is still being raised, as in a warmup."""
    rates = step.history["lr"].values
    return bool(rates) and step.value("lr") > rates[-min(back, len(rates))]


@register
@dataclass
class DeepLayerCollapse(Rule):
    """The GSNR falls from layer to layer towards one end of the model."""

    id = "deep_layer_collapse"
    judges_after = 60
    every_step = False
    needs = ("microbatch:gsnr",)
    closes_after = 500

    factor: float = 5.0
    """How far the ends must be apart: the lowest of one over the highest of the other, by their intervals."""
    order: float = 0.7
    """Rank correlation of GSNR and depth."""
    layers: int = 4
    """Layers with an interval at least."""
    readings: int = 5
    """Readings in the average at least."""

    since: int = field(default=-1, init=False)
    """Step of the first reading at which it was so, without a break; -1 where it was not at the last one."""

    def look(self, step: Step) -> Sign | None:
        """Fires when it is so at readings that share no sample."""
        average, reading = step.average, step.parts
        if average is None or reading is None or not reading.layers.keys() >= set(INTERVAL):
            return None
        value, low, high = (np.asarray(reading.layers[name], dtype=np.float64) for name in INTERVAL)
        alike = np.array(stack(step.layout.layers), dtype=np.intp)
        alike = alike[alike < len(value)]
        known = alike[np.isfinite(low[alike] + high[alike])]
        enough = len(known) >= self.layers and average.count >= self.readings
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
        return Sign(
            severity="warning",
            seen=seen,
            expected={"ratio": f"below {self.factor:g}"},
            tensors=tuple(names[: max(1, len(names) // 4)]),
            since=self.since,
            causes=("attenuation",) if to_input else ("output",),
        )

    def _ends(self, value: Floats, low: Floats, high: Floats) -> tuple[bool, float] | None:
        """Whether it falls towards the input, and by how much at least; None where it does neither."""
        count = len(value)
        place = np.arange(count) - (count - 1) / 2
        ranks = np.argsort(np.argsort(value)) - (count - 1) / 2
        order = float((place * ranks).sum() / (place**2).sum())
        part, to_input = max(1, count // 4), order > 0
        weak, strong = (slice(None, part), slice(-part, None)) if to_input else (slice(-part, None), slice(None, part))
        least, most = float(low[strong].min()), float(high[weak].max())
        if abs(order) < self.order or least <= 0 or most * self.factor > least:
            return None
        return to_input, least / most if most > 0 else math.inf


@lru_cache(maxsize=8)
def stack(layers: tuple[str, ...]) -> tuple[int, ...]:
    """The layers that can be compared: the longest row of layers that are alike by name, such as ``blocks.0`` and on.

    An embedding or an output head has a GSNR of its own kind.
    """
    rows: dict[str, list[int]] = {}
    for index, name in enumerate(layers):
        prefix, _, number = name.rpartition(".")
        if number.isdigit():
            rows.setdefault(prefix, []).append(index)
    longest: list[int] = max(rows.values(), key=len, default=[])
    return tuple(longest)


@register
@dataclass
class SuddenGsnrDrop(Rule):
    """The GSNR of one source at one batch size drops, and not as it does by itself while a run goes on."""

    id = "sudden_gsnr_drop"
    judges_after = 150
    every_step = False
    needs = ("gsnr",)
    closes_after = 200

    factor: float = 3.0
    """How far below the earlier interval the new one must lie, beyond what a decline would explain."""
    decline: float = 2.0
    """Power of the step number that a GSNR may fall with by itself."""
    readings: int = 5
    """Readings in each of the two averages at least."""
    in_a_row: int = 3
    """Readings at which it must be so."""

    streak: Streak = field(default_factory=Streak, init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires when an average lies far below the one before it that shares no reading with it."""
        now, averages = step.average, step.history.averages
        before = None if now is None else averages.before(now.begins)
        if now is None or before is None or min(now.count, before.count) < self.readings:
            return None
        usual = self._usual(now, before, averages.before(before.begins))
        dropped = before.established and now.most * self.factor < before.low * usual
        self.streak.see(dropped and not self._warming_up(step, before.begins), step.number, averages.begins)
        if self.streak.count < self.in_a_row:
            return None
        lr, since = step.value("lr"), averages.below_since(before.low)
        seen = dict[str, Any](gsnr=now.value, high=now.most, before=before.value, low_before=before.low)
        seen |= {"from_step": since, "batch_size": now.batch_size, "source": averages.source}
        seen |= {"lr": lr, "lr_proposed": lr / 3}
        expected = {"gsnr": before.value * usual}
        return Sign(severity="warning", seen=seen, expected=expected, since=since)

    def _usual(self, now: Average, before: Average, earlier: Average | None) -> float:
        """What a decline leaves of it, as a share: with the length of the run, or going on as it went before."""
        power, line = self.decline, 1.0
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
    judges_after = 40
    every_step = False
    needs = ("heads:gsnr",)
    closes_after = 500

    factor: float = 10.0
    """How far below the best head of its layer a head must lie, by their intervals."""
    in_a_row: int = 3
    """Readings at which a head has no gradient at all."""
    apart_for: int = 20
    """Readings at which a head lies so far below, which are as many as an average is over."""

    dead_for: Floats = field(default_factory=lambda: np.zeros(0), init=False)
    low_for: Floats = field(default_factory=lambda: np.zeros(0), init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires while a head stays far below the others of its layer."""
        reading = step.parts
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
        weak = (best > 0) & (high * self.factor < best)
        self.dead_for = np.where(dead, self.dead_for + 1, 0.0)
        self.low_for = np.where(weak, self.low_for + 1, 0.0)
        gone = self.dead_for >= self.in_a_row
        found = np.flatnonzero(gone | (self.low_for >= self.apart_for))
        if not len(found):
            return None
        found = found[np.lexsort((value[found], ~gone[found]))]
        worst = int(found[0])
        others = median_of(value[best == best[worst]])
        seen = dict[str, Any](heads=len(found), others=others, gsnr=float(value[worst]), batch_size=reading.batch_size)
        return Sign(
            severity="warning" if gone.any() else "info",
            seen=seen | {"state": "has no gradient" if gone[worst] else f"has a GSNR of {value[worst]:.2g}"},
            expected={"gsnr": float(best[worst])},
            tensors=tuple(step.layout.heads[int(head)] for head in found),
            causes=("masked",) if gone[worst] else ("unbalanced",),
            cures=("unmask",) if gone[worst] else ("watch",),
        )


@lru_cache(maxsize=8)
def first_heads(heads: tuple[str, ...]) -> NDArray[np.intp]:
    """Where the heads of each attention module begin."""
    modules = [name.rsplit("/", 1)[0] for name in heads]
    return np.flatnonzero([i == 0 or module != modules[i - 1] for i, module in enumerate(modules)])


@register
@dataclass
class HighEffortLowProgress(Rule):
    """The gradient is large for this run, mostly noise, and the loss is not getting better."""

    id = "high_effort_low_progress"
    expects_fall = True
    judges_after = 200
    every_step = False
    needs = ("gsnr", "loss", "grad/norm")
    min_steps = 60
    closes_after = 100

    ratio: float = 1.5
    """Norm over the median of the run so far."""
    most: float = 0.5
    """GSNR at the batch of one step that the upper end of the interval must be below."""
    worse: float = 0.05
    """Share by which the loss lies over the best it has been."""
    span: int = 30
    """Steps whose mean loss and median norm are compared."""
    in_a_row: int = 3
    """Readings at which it must be so."""

    best: float = field(default=math.inf, init=False)
    """Lowest mean loss of any such span."""
    streak: Streak = field(default_factory=Streak, init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires at readings where all three come together."""
        average = step.average
        if average is None:
            return None
        norms, losses = step.history["grad/norm"], losses_since(step, step.ago(self.span))
        if len(norms) < 2 * self.span or len(losses) < self.span // 2:
            return None
        loss, error = float(losses.mean()), float(losses.std() / math.sqrt(len(losses)))
        self.best = min(self.best, loss)
        usual, now = median(norms.last(1024)), median(norms.last(self.span))
        high = average.high * average.per_step
        low_signal = average.low <= 0 and high < self.most
        worse = loss - self.best > max(self.worse * abs(self.best), 3 * error)
        is_so = now > self.ratio * usual and low_signal and worse
        self.streak.see(is_so, step.number, step.history.averages.begins)
        if self.streak.count < self.in_a_row:
            return None
        lr = step.value("lr")
        seen = dict[str, Any](norm=now, usual_norm=usual, ratio=now / usual, loss=loss, best_loss=self.best)
        seen |= {"gsnr": average.value * average.per_step, "high": high, "batch_size": average.step_size}
        return Sign(
            severity="warning",
            seen=seen | {"lr": lr, "lr_proposed": lr / 3},
            expected={"norm": usual, "gsnr": f"{self.most:g} or more", "loss": self.best},
            since=self.streak.since,
        )


@register
@dataclass
class NoisyGradients(Rule):
    """Most coordinates of the gradient have more noise than signal, at the batch size in use."""

    id = "noisy_gradients"
    judges_after = 150
    every_step = False
    needs = ("gsnr",)
    closes_after = 500

    threshold: float = 1.0
    """GSNR that counts as noisy. That this is 1 is a convention: healthy runs are below it most of the time."""
    after: int = 100
    """Steps before it says anything: in its first steps nearly every run has more signal than later."""

    share: float = field(default=math.nan, init=False)
    """Share of coordinates below 1, where it was last counted."""

    def look(self, step: Step) -> Sign | None:
        """Fires where the median is below, by the interval of the whole or the count of the coordinates."""
        moments = step.adam
        if moments is not None and "gsnr/below_one_fraction" in moments.tensors:
            below = np.asarray(moments.tensors["gsnr/below_one_fraction"])
            sizes = step.layout.sizes[: len(below)]
            known = np.isfinite(below)
            self.share = float((below * sizes)[known].sum() / sizes[known].sum()) if known.any() else math.nan
        average = step.average
        if average is None or step.number < self.after:
            return None
        reading = step.gsnr
        of_tensors = None if reading is None else reading.tensors.get("gsnr")
        median = median_of(np.asarray(of_tensors)) * average.per_step if of_tensors is not None else math.nan
        high = average.high * average.per_step
        if not (median < self.threshold and (high < self.threshold or self.share > 0.5)):
            return None
        share = f"{100 * self.share:.0f} % of coordinates" if math.isfinite(self.share) else "most tensors"
        seen = dict[str, Any](median=median, share=share, whole=average.value * average.per_step, high=high)
        seen |= {"batch_size": average.step_size, "source": step.history.averages.source}
        expected = {"median": f"{self.threshold:g} or more"}
        return Sign(severity="info", seen=seen, expected=expected, since=average.begins)
