"""Step: everything a rule may look at when it checks one optimizer step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.baseline import Floats
from gradvitals.diagnose.history import FIRST, HUGE, Average, Averages, History, forgotten_at, median
from gradvitals.types import LOSSES, SOURCES, FloatArray, Layout, Reading, Source, json_ready

NEGLIGIBLE = 1e-6
"""A tensor's gradient below this share of the largest tensor's is rounding error."""

MAX_NAMED = 50
"""Tensors that a finding names, at most."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What is known about a run besides its readings. Unknown fields keep their default."""

    optimizer: str = ""
    """Class name of the first optimizer, e.g. ``AdamW``."""
    betas: tuple[float, float] | None = None
    """Of an Adam-like optimizer."""
    momentum: float | None = None
    weight_decay: float | None = None
    eps: float | None = None
    autocast: str | None = None
    """The dtype of autocast, e.g. ``float16``; None if it is off or unknown."""
    world_size: int = 1

    def to_json(self) -> dict[str, Any]:
        """Returns the record as plain JSON values."""
        data: dict[str, Any] = json_ready(asdict(self))
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunInfo:
        """The inverse of `to_json`; skips fields that this version does not know."""
        known = {name: value for name, value in data.items() if name in cls.__dataclass_fields__}
        if known.get("betas") is not None:
            known["betas"] = tuple(known["betas"])
        return cls(**known)


LIKELIHOODS = ("cross_entropy", "bce", "bce_logits")


class Step:
    """One step's readings, with the run they are part of.

    Attributes:
        readings: All of this step: the general one (no source) and one for each GSNR source that was read.
        layout: What the rows of per-tensor arrays stand for.
        info: What kind of run it is.
        history: The past, without this step.
        frozen: Indices of tensors that are not trained.
        general: The reading with loss, norms, weights and updates.
        number: The optimizer step, counted from 0.
    """

    def __init__(
        self, readings: Sequence[Reading], layout: Layout, info: RunInfo, history: History, frozen: Sequence[int] = ()
    ) -> None:
        self.readings, self.layout, self.info, self.history, self.frozen = readings, layout, info, history, frozen
        first = readings[0]
        self._is_single = len(readings) == 1 and first.source is None
        if self._is_single:
            self._by_source: dict[Source | None, Reading] = {None: first}
            self.general = first
        else:
            self._by_source = {reading.source: reading for reading in readings}
            self.general = self._by_source.get(None) or Reading(step=first.step, time=first.time)
        self.number = self.general.step
        self.values = self.general.values
        self._losses_since: dict[float, Floats] = {}

    # -- this step ---------------------------------------------------------------------------------------------------

    def value(self, metric: str) -> float:
        """Returns a global value of this step; NaN if it was not read."""
        return self.values.get(metric, math.nan)

    def tensors(self, metric: str) -> FloatArray | None:
        """Returns one number per tensor, in the order of `layout.tensors`; None if it was not read at this step."""
        return self.general.tensors.get(metric)

    def reads(self, metrics: Iterable[str]) -> bool:
        """Whether all of these were read of single tensors at this step; each may have a prefix, as in `Rule.needs`."""
        return all(self.tensors(metric.rpartition(":")[2]) is not None for metric in metrics)

    def reading(self, source: Source) -> Reading | None:
        """Returns the reading of one GSNR source, if this step has one."""
        return self._by_source.get(source)

    @cached_property
    def was_taken(self) -> bool:
        """Whether the optimizer stepped: neither a GradScaler nor a Guard skipped it."""
        return self.value("step/skipped") != 1 and self.value("step/left_out") != 1

    @property
    def is_full(self) -> bool:
        """Whether this is a full reading, with more than every step has."""
        return len(self.readings) > 1 or "weight/norm" in self.values

    @property
    def alternating(self) -> bool:
        """Whether the model alternates with another one, as in a GAN, so that its loss need not fall."""
        return self.values.get("step/in_turn") == 1

    def fact(self, metric: str) -> float:
        """Returns what an inspected batch showed last; NaN if none did."""
        value = self.values.get(metric)
        known = self.history.series.get(metric)
        return value if value is not None else known.values[-1] if known else math.nan

    @cached_property
    def loss_function(self) -> str:
        """The loss, as one of `types.LOSSES`; empty if it is unknown."""
        place = self.fact("head/loss")
        return LOSSES[int(place)] if 0 <= place < len(LOSSES) else ""

    @cached_property
    def is_reinforced(self) -> bool:
        """Whether the loss is that of a policy or of action values, as in reinforcement learning."""
        weighted = self.fact("head/signed_weights") == 1 and self.loss_function in ("", "log", "mse", "l1", "smooth_l1")
        chosen = self.fact("head/chosen") == 1 and self.loss_function in ("mse", "l1", "smooth_l1")
        return weighted or chosen

    @cached_property
    def loss_should_fall(self) -> bool:
        """Whether training is to lower this loss: not in a GAN, nor in reinforcement learning."""
        return not (self.alternating or self.is_reinforced or self.fact("head/foreign") == 1)

    @cached_property
    def trivial_loss(self) -> float:
        """The loss of predicting the mean, or the frequency of each class; inf if it is unknown.

        With more classes than samples in a batch, the first batches do not show how frequent each is. A likelihood of
        targets between 0 and 1 cannot reach 0, so that a good prediction may be little better than a trivial one.
        """
        trivial, classes = self.fact("target/trivial_loss"), self.fact("head/softmax_units")
        soft = self.loss_function in LIKELIHOODS and self.fact("target/integer") < 0.99
        return trivial if trivial > 0 and not soft and not classes > self.fact("head/samples") else math.inf

    @cached_property
    def loss_left(self) -> float:
        """The recent loss over that of the trivial prediction, or over the first losses if that is unknown."""
        level = self.trivial_loss if self.trivial_loss < math.inf else self.first_loss
        return self.history["loss"].median(50) / level if level > 0 else math.nan

    def names(self, chosen: Sequence[int] | NDArray[np.intp]) -> tuple[str, ...]:
        """Returns the names of tensors by their indices."""
        return tuple(self.layout.tensors[int(index)].name for index in chosen)

    # -- earlier steps -----------------------------------------------------------------------------------------------

    @property
    def unread(self) -> int:
        """Steps just before this one that were not read."""
        steps = self.history.numbers
        return max(self.number - steps[-1] - 1, 0) if steps else 0

    def ago(self, readings: int, every: int = 1) -> int:
        """Returns the step so many readings before this one, counting steps that are a multiple of `every`.

        Assumes that readings older than the history had no gaps.
        """
        steps = self.history.numbers
        steps = steps if every == 1 else [step for step in steps if step % every == 0]
        found = min(readings, len(steps))
        return (steps[-found] if found else self.number) - every * (readings - found)

    @cached_property
    def first_losses(self) -> list[float]:
        """The first finite losses of the run, at most ten, this step's included."""
        losses, loss = self.history.first_losses, self.value("loss")
        return [*losses, loss] if len(losses) < FIRST and math.isfinite(loss) else losses

    @cached_property
    def first_loss(self) -> float:
        """The mean of the first losses, where the run started; NaN if there are none."""
        return float(np.mean(self.first_losses)) if self.first_losses else math.nan

    def losses_since(self, start: float) -> Floats:
        """Returns the losses from a step up to this one, with outliers moved to the edge of the others."""
        if start not in self._losses_since:
            now = self.value("loss")
            losses = np.append(self.history["loss"].since(start)[1], now if math.isfinite(now) else [])
            if len(losses):
                middle = median(losses)
                reach = 6 * median(np.abs(losses - middle))
                losses = np.minimum(np.maximum(losses, middle - reach), middle + reach)
            self._losses_since[start] = losses
        return self._losses_since[start]

    def largest_update(self, back: int = 20, before: int | None = None) -> tuple[float, int]:
        """Returns the largest update of the last `back` steps before one over the median of those earlier, its step.

        Updates are compared by learning rate.
        """
        updates, rates = self.history["update/rms"], self.history["lr"]
        end = len(updates) if before is None else bisect_left(updates.steps, before)
        steps, moves = (np.array(kept[max(end - back - 50, 0) : end]) for kept in (updates.steps, updates.values))
        if len(rates) and len(moves):
            moves = moves / np.maximum(np.interp(steps, rates.steps, rates.values), 1e-30)
        if len(moves) <= back or not np.median(moves[:-back]) > 0:
            return math.nan, self.number
        recent = moves[-back:] / np.median(moves[:-back])
        return float(recent.max()), int(steps[-back:][recent.argmax()])

    def single_spike(self, before: int, back: int = 40) -> tuple[float, int]:
        """Returns the one gradient before a step that was far larger than the others, over the median, and its step.

        Returns (0, 0) if there is none that can have moved the weights: it was clipped, or its step was skipped.
        """
        steps, norms = self.history["grad/norm"].since(before - back - 50)
        steps, norms = steps[steps < before], norms[steps < before]
        if len(norms) <= back or not np.median(norms[:-back]) > 0:
            return 0.0, 0
        recent = norms[-back:] / np.median(norms[:-back])
        at, number = int(recent.argmax()), int(steps[-back:][recent.argmax()])
        skipped = any(self.history[name].at(number) == 1 for name in ("step/skipped", "step/left_out"))
        clipped = self.history["clip/max_norm"].at(number) < norms[-back:][at]
        alone = np.delete(recent, at).max() < recent[at] / 3
        return (float(recent[at]), number) if alone and not clipped and not skipped else (0.0, 0)

    def lr_increase(self, back: int = 20) -> float:
        """Returns the learning rate over its median before the last `back` steps; NaN if unknown."""
        rates = self.history["lr"].last(back + 50)[:-back]
        return self.value("lr") / float(np.median(rates)) if len(rates) and np.median(rates) > 0 else math.nan

    @cached_property
    def lower_lr(self) -> float:
        """A learning rate whose first steps change the weights by 0.3% of their norm: 1/10 to 1/3 of the first."""
        rates, ratios = self.history["lr"].values[:5] or [self.value("lr")], self.history["update/ratio"].values[:5]
        lr, ratio = max(rates), max(ratios, default=math.nan)
        proposed = lr * min(0.003 / ratio, 1 / 3) if ratio > 0 else lr / 10
        return max(proposed, lr / 10)

    def higher_lr(self, least: float = 3.0, ratio: float = 2e-3) -> float:
        """Returns a rate whose steps change the weights by an ordinary share, at least so many times as high."""
        now = self.history["update/ratio"].median(50)
        return self.value("lr") * (min(max(ratio / now, least), 1000.0) if now > 0 else 30.0)

    @cached_property
    def ordinary_lr(self) -> float:
        """A rate whose steps change the weights by 0.1% of their norm, at most 1,000 times this one; NaN if unknown.

        It is the lowest that the last readings tell, each by its own rate: a schedule may have changed it since.
        """
        ratios, rates = self.history["update/ratio"], self.history["lr"]
        last = zip(ratios.steps[-10:], ratios.values[-10:], strict=True)
        told = [1e-3 * rates.at(int(step)) / ratio for step, ratio in last if ratio > 0]
        lowest = min((rate for rate in told if rate > 0), default=math.nan)
        return min(lowest, 1000 * self.value("lr"))

    # -- against the baselines ---------------------------------------------------------------------------------------

    @cached_property
    def norm_deviation(self) -> tuple[float, float]:
        """The global norm against its baseline: ratio and z-score."""
        return self.history.norm.compare_one(self.value("grad/norm"))

    @cached_property
    def tensor_norm_deviations(self) -> tuple[Floats, Floats] | None:
        """Every tensor's norm against its baseline."""
        norms = self.tensors("grad/norm")
        return None if norms is None else self.history.norms.compare(np.asarray(norms))

    @cached_property
    def update_deviations(self) -> tuple[Floats, Floats] | None:
        """The update of the whole model, then of every tensor, against its baseline."""
        updates = self.updates
        return None if updates is None else self.history.updates.compare(updates)

    @cached_property
    def updates(self) -> Floats | None:
        """`update/rms` of the whole model, then of every tensor; None if it was not read."""
        rms = self.tensors("update/rms")
        return None if rms is None else np.append(self.value("update/rms"), rms)

    @cached_property
    def negligible(self) -> NDArray[np.bool_]:
        """Tensors whose gradient is rounding error, such as a bias in front of a batch norm."""
        norms = self.tensors("grad/norm")
        if norms is None:
            return np.zeros(0, dtype=bool)
        known = np.where(np.isfinite(norms), norms, 0.0)
        return np.asarray((known > 0) & (known < NEGLIGIBLE * known.max(initial=0.0)))

    # -- GSNR --------------------------------------------------------------------------------------------------------

    @cached_property
    def samples(self) -> Reading | None:
        """The reading of samples taken at the same weights: micro-batches or ranks.

        None if there is none, or if they are not samples of one distribution: their gradients oppose each other, or the
        model alternates with another one, so that its passes are of real and generated samples.
        """
        reading = self.reading("microbatch") or self.reading("ranks")
        if reading is None:
            return None
        passes = self.history.passes
        passes.add(reading, self.alternating)
        if (passes.mixed or self.alternating) and self.history.averages.same_weights:
            self.history.averages = Averages()  # of the next best source
        return None if passes.mixed or passes.below > 1 or self.alternating else reading

    @cached_property
    def gsnr(self) -> Reading | None:
        """The reading of the most trustworthy GSNR source of this step that has a global value."""
        for source in SOURCES:
            reading = self.samples if source in ("microbatch", "ranks") else self.reading(source)
            if reading is not None and math.isfinite(reading.values.get("gsnr", math.nan)):
                return reading
        return None

    @property
    def adam_valid_from(self) -> int:
        """The first step at which Adam's moments hold no huge gradient. Asking puts this step into the history."""
        history = self.history
        if self.value("grad/spike_ratio") >= HUGE:
            forgotten = forgotten_at(self.number, self.values, self.info.betas)
            history.adam_valid_from = max(history.adam_valid_from, forgotten)
        return history.adam_valid_from

    @property
    def adam(self) -> Reading | None:
        """The reading of Adam's moments, if this step has one and they hold no huge gradient.

        Valid for what is of this step alone; its GSNR also averages earlier readings, see `average`.
        """
        return self.reading("adam") if self.number >= self.adam_valid_from else None

    @cached_property
    def average(self) -> Average | None:
        """The averaged GSNR of the whole model, if this step adds to it. Asking puts this step into the history.

        None for the GSNR of Adam's moments while they hold a huge gradient.
        """
        valid_from = self.adam_valid_from
        if self._is_single or self.gsnr is None:
            return None
        return self.history.averages.take(self.gsnr, self.general, valid_from if self.gsnr.source == "adam" else 0)

    # -- remembering -------------------------------------------------------------------------------------------------

    def remember(self, *, calm: bool = False) -> None:
        """Put this step into the history, after every rule has checked it.

        Args:
            calm: Whether it is one of many like it. The baselines of single tensors do without it.
        """
        history = self.history
        history.push_loss(self.value("loss"))
        if calm:
            history.push_values(self.number, self.values)
            history.norm.learn_one(self.value("grad/norm"))
            history.push_number(self.number)
            return
        _ = self.average
        history.first_losses = self.first_losses
        for reading in self.readings:
            prefix = "" if reading.source is None else f"{reading.source}:"
            history.push_values(reading.step, reading.values, prefix)
        history.norm.learn_one(self.value("grad/norm"))
        norms = self.tensors("grad/norm")
        if norms is not None:
            history.norms.learn(np.asarray(norms))
        if self.updates is not None:
            history.updates.learn(self.updates)
        history.push_number(self.number)
