"""Rules about tensors that get no gradient, weights that do not move, and weights that move too little or too much."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.history import Floats, median_of
from gradvitals.diagnose.pushes import pushed_by, rate_rose
from gradvitals.diagnose.rule import Rule, Sign, register
from gradvitals.diagnose.step import NAMED, NEGLIGIBLE, Step

HALF = ("float16", "bfloat16")
LINGERS = 5  # steps for which momentum shows a gradient that was far too large


def grown(kept: Floats, size: int) -> Floats:
    """An array with room for tensors that came later."""
    return kept if len(kept) >= size else np.append(kept, np.zeros(size - len(kept)))


def empty() -> Floats:
    """One number a tensor, before there is any."""
    return np.zeros(0)


@register
@dataclass
class DeadTensor(Rule):
    """A tensor has no gradient, or one that is exactly zero, for many steps, while others have one."""

    id = "dead_tensor"
    needs = ("tensors:grad/norm",)

    patience: int = 20
    """Steps in a row without a gradient."""
    patience_alive: int = 5
    """The same of a tensor that had a gradient at nearly every step before."""

    zero_for: Floats = field(default_factory=empty, init=False)
    alive: Floats = field(default_factory=empty, init=False)
    """Steps at which it had a gradient."""

    def look(self, step: Step) -> Sign | None:
        """Fires while a tensor stays without a gradient."""
        norms = step.tensors("grad/norm")
        if norms is None or not step.value("grad/norm") > 0:
            return None
        self.zero_for, self.alive = grown(self.zero_for, len(norms)), grown(self.alive, len(norms))
        counts = step.tensors("grad/nonfinite")
        missing = np.isnan(norms if counts is None else counts)
        zero = missing | (norms == 0)
        zero[step.frozen] = False
        self.zero_for = np.where(zero, self.zero_for + 1, 0.0)
        self.alive += ~zero
        if not zero.any():
            return None
        steady = (self.alive >= 20) & (self.alive + self.zero_for > 0.95 * (step.history.steps_seen + 1))
        dead = np.flatnonzero(self.zero_for >= np.where(steady, self.patience_alive, self.patience))
        if not len(dead):
            return None
        dead = dead[np.argsort(-self.zero_for[dead], kind="stable")]
        since = step.ago(int(self.zero_for[dead[0]]) - 1)
        without = bool(missing[dead].all())
        cause = ("cut_off" if without else "died") if self.alive[dead[0]] else ("unused" if without else "zero")
        half = step.facts.autocast == "float16" or step.layout.tensors[int(dead[0])].dtype == "float16"
        cause = "rounded" if half and not without else cause
        return Sign(
            severity="warning",
            seen={"steps": step.number - since + 1, "tensors": len(dead), "at": since},
            expected={"steps": 0},
            tensors=step.names(dead[:NAMED]),
            since=since,
            causes=(cause,),
            cures=(cause,),
        )


@register
@dataclass
class UnchangedWeights(Rule):
    """Weights have a gradient and do not move."""

    id = "unchanged_weights"
    needs = ("grad/norm", "update/rms")

    patience: int = 20
    """Steps in a row. Those that a GradScaler skipped do not count."""
    patience_moved: int = 5
    """The same of weights that moved at nearly every step before."""
    lost: float = 0.25
    """Weights in half precision that stand still at this share of the last steps lose their updates to rounding."""

    still_for: Floats = field(default_factory=empty, init=False)
    moved: Floats = field(default_factory=empty, init=False)
    """Steps at which it moved."""
    share: Floats = field(default_factory=empty, init=False)
    """Moving average of whether it stood still."""
    seen_steps: int = field(default=0, init=False)
    highest: float = field(default=0.0, init=False)
    """Of the usual norms so far: where the run has fitted all there is, nothing is left to move the weights."""

    def look(self, step: Step) -> Sign | None:
        """Fires while weights with a gradient stay as they are."""
        rms, norms = step.tensors("update/rms"), step.tensors("grad/norm")
        if rms is None or norms is None or not step.was_made:
            return None
        size = len(rms)
        self.still_for, self.moved = grown(self.still_for, size), grown(self.moved, size)
        self.share = grown(self.share, size)
        self.seen_steps += 1
        usual = step.history.norm
        if len(usual.count) and usual.count[0] >= 5:
            self.highest = max(self.highest, float(np.exp(usual.level[0])))
        still = (rms == 0) & (norms > NEGLIGIBLE * self.highest) & ~step.negligible
        self.still_for = np.where(still, self.still_for + 1, np.where(rms > 0, 0.0, self.still_for))
        self.moved += rms > 0
        self.share += (still - self.share) / min(self.seen_steps, self.patience)
        if not still.any():
            return None
        steady = (self.moved >= 20) & (self.moved + self.still_for > 0.95 * self.seen_steps)
        stuck = still & (self.still_for >= np.where(steady, self.patience_moved, self.patience))
        if self.seen_steps >= 10 and (self.share > self.lost).any():
            half = np.array([info.dtype in HALF for info in step.layout.tensors], dtype=bool)
            stuck |= still & half & (self.share > self.lost)
        chosen = np.flatnonzero(stuck)
        return self._sign(step, chosen, norms, rms) if len(chosen) else None

    def _sign(self, step: Step, chosen: NDArray[np.intp], norms: Any, rms: Any) -> Sign:
        chosen = chosen[np.argsort(-self.still_for[chosen], kind="stable")]
        worst = int(chosen[0])
        lasted, lr = int(self.still_for[worst]), step.value("lr")
        everything = not np.any(rms > 0)
        dtype = step.layout.tensors[worst].dtype
        cause = "resolution" if dtype in HALF else "stopped" if self.moved[worst] else "left_out"
        cause = "zero_lr" if everything and lr == 0 else cause
        seen = {"steps": lasted, "tensors": len(chosen), "at": step.ago(lasted - 1), "lr": lr, "dtype": dtype}
        seen |= {"gradient": float(norms[worst]), "percent": 100 * float(self.share[worst])}
        return Sign(
            # A schedule that has come to its end, or not yet begun, is no fault.
            severity="info" if cause == "zero_lr" else "warning",
            seen=seen,
            expected={"steps": f"fewer than {self.patience}"},
            tensors=() if everything else step.names(chosen[:NAMED]),
            since=step.ago(lasted - 1),
            causes=(cause,),
            cures=(cause,),
        )


@register
@dataclass
class UpdateRatio(Rule):
    """One step changes weights by an unhealthy share of their size, or by next to nothing, again and again."""

    id = "update_ratio"
    judges_after = 30
    needs = ("update/ratio",)
    closes_after = 110

    low: float = 1e-8
    """Smallest healthy change of a tensor in one step, as a share of its norm."""
    high: float = 1e-1
    """Largest healthy one."""
    low_model: float = 1e-6
    """Smallest healthy change of the whole model."""
    slow_model: float = 5e-5
    """The same where the loss has not fallen either."""
    fallen: float = 0.03
    """Share of the first loss that it must have fallen by for that."""
    collapse: float = 0.02
    """A learning rate under this share of what it was ten steps before is a cut, not a schedule."""
    decayed: float = 0.3
    """A learning rate under this share of its highest has been lowered on purpose, and is not told to be too low."""
    gone: float = 1e-3
    """A gradient under this share of its largest is why steps are small, whatever the learning rate."""
    patience: int = 10
    """Steps that it must last, over two readings or more."""
    patience_slow: int = 30
    """The same for steps that are too small, none of them in a warmup."""
    patience_most: int = 3
    """The same where most matrices are too large at once."""
    young: int = 10
    """Steps at which weights that began at zero may still grow from nothing; most of them do not."""

    above: Floats = field(default_factory=empty, init=False)
    """The step of the reading since which it is too large, plus one; 0 where it is not."""
    below: Floats = field(default_factory=empty, init=False)
    most_since: int = field(default=-1, init=False)
    slow_since: int = field(default=-1, init=False)
    highest_lr: float = field(default=0.0, init=False)
    rose_at: int = field(default=0, init=False)
    first_losses: list[float] = field(default_factory=list, init=False)
    cut_at: int = field(default=-1, init=False)
    cut: dict[str, float] = field(default_factory=dict, init=False)
    largest: float = field(default=0.0, init=False)
    """Gradient norm so far."""

    def look(self, step: Step) -> Sign | None:
        """Fires at readings of weights while the ratio is outside, and at any step when the learning rate is cut."""
        lr, loss = step.value("lr"), step.value("loss")
        if step.number > 0 == step.history.steps_seen:
            self.first_losses = [math.nan] * 10  # resumed without what was remembered: how it began is not known
        if len(self.first_losses) < 10 and math.isfinite(loss):
            self.first_losses.append(loss)
        if lr > 1.001 * self.highest_lr:
            self.highest_lr, self.rose_at = lr, step.number
        norm = step.value("grad/norm")
        self.largest = max(self.largest, norm) if math.isfinite(norm) else self.largest
        if not step.was_made or lr == 0:
            return None
        sign = self._cut(step)
        ratios, weights = step.tensors("update/ratio"), step.tensors("weight/norm")
        if sign is not None or ratios is None or weights is None or step.number < 1:
            return sign
        whole = step.value("update/ratio")
        self.above, self.below = grown(self.above, len(ratios)), grown(self.below, len(ratios))
        now = step.number + 1.0
        too_much, too_little = (ratios > self.high) & (weights > 0), (ratios < self.low) & (ratios > 0)
        if len(step.negligible) == len(ratios):
            too_little &= ~step.negligible
        most = False
        if too_much.any():  # a bias, a gain or a few weights have no size of their own to be compared with
            matrix = step.layout.matrices & (step.layout.sizes >= 16)
            too_much &= matrix
            # One matrix alone, as in linear regression, has no depth to pass a signal through: it may begin small.
            most = bool(too_much.sum() > max(1, 0.5 * matrix.sum()))
        self.most_since = -1 if not most else step.number if self.most_since < 0 else self.most_since
        recent = step.history["loss"].last(3)
        first = self.first_losses[0] if self.first_losses else math.nan
        falls = len(recent) == 3 and step.number < self.young and np.median(recent) < first - 0.2 * abs(first)
        if most and not falls and step.number - self.most_since >= self.patience_most:
            chosen = np.flatnonzero(too_much)
            return self._too_large(step, chosen[np.argsort(-ratios[chosen])], ratios, self.most_since)
        if step.number < self.young:
            return None
        self.above = np.where(too_much, np.where(self.above > 0, self.above, now), 0.0)
        self.below = np.where(too_little, np.where(self.below > 0, self.below, now), 0.0)
        large = np.flatnonzero((self.above > 0) & (now - self.above >= self.patience))
        small = np.flatnonzero((self.below > 0) & (now - self.below >= self.patience_slow))
        if len(large):
            large = large[np.argsort(-ratios[large])]
            return self._too_large(step, large, ratios, int(self.above[large].min()) - 1)
        return self._slow(step, whole) or (self._too_small(step, small, ratios) if len(small) else None)

    def _too_large(self, step: Step, chosen: NDArray[np.intp], ratios: Any, since: int) -> Sign:
        weights = np.asarray(step.tensors("weight/norm"))
        ratio, lr, decay = float(ratios[chosen[0]]), step.value("lr"), step.facts.weight_decay or 0.0
        seen = {"ratio": ratio, "of": "of its size", "lr": lr, "lr_proposed": lr * 0.003 / ratio, "at": since}
        seen |= {"tensors": len(chosen), "weight_decay": decay, "taken": lr * decay}
        moved, rose = pushed_by(step)[0], rate_rose(step)
        # Weights of a layer begin near 1 / sqrt(inputs), so that each row of them has a norm near 1.
        rows = float(step.layout.tensors[int(chosen[0])].shape[0])
        cause = "small_weights" if weights[chosen[0]] < 0.05 * math.sqrt(rows) else "high_lr"
        if rose > 1.5:
            cause, seen["lr_proposed"] = "high_lr", lr / rose
        elif moved > 5:
            cause = "momentum"
        elif lr * decay > 0.01:
            cause = "decay"
        return Sign(
            severity="warning",
            seen=seen,
            expected={"ratio": f"under {self.high:g}"},
            tensors=step.names(chosen[:NAMED]),
            since=since,
            causes=(cause,),
            cures=(cause,),
        )

    def _too_small(self, step: Step, chosen: NDArray[np.intp], ratios: Any) -> Sign:
        chosen = chosen[np.argsort(ratios[chosen])]
        seen = {"ratio": float(ratios[chosen[0]]), "of": "of its size", "lr": step.value("lr"), "tensors": len(chosen)}
        return Sign(
            severity="info",
            seen=seen,
            expected={"ratio": f"over {self.low:g}"},
            tensors=step.names(chosen[:NAMED]),
            since=int(self.below[chosen].min()) - 1,
            causes=("small_gradient",),
            cures=("small_gradient",),
        )

    def _slow(self, step: Step, whole: float) -> Sign | None:
        recent, start = median_of(step.history["loss"].last(20)), float(np.mean(self.first_losses or [math.nan]))
        hardly = start - recent < self.fallen * abs(start)
        lr, gone = step.value("lr"), step.value("grad/norm") < self.gone * self.largest
        meant = lr < self.decayed * self.highest_lr
        if meant or gone or not 0 < whole < (self.slow_model if hardly else self.low_model):
            self.slow_since = -1
            return None
        if self.slow_since < 0:
            self.slow_since = step.number
        if step.number - max(self.slow_since, self.rose_at) < self.patience_slow:
            return None
        proposed = lr * min(max(1e-3 / whole, 1.0), 1000.0)
        seen = {"ratio": whole, "of": "of its size", "lr": lr, "lr_proposed": proposed, "needed": int(1 / whole)}
        return Sign(
            severity="warning",
            seen=seen,
            expected={"ratio": f"over {self.slow_model if hardly else self.low_model:g}"},
            since=self.slow_since,
            causes=("low_lr",),
            cures=("low_lr",),
        )

    def _cut(self, step: Step) -> Sign | None:
        """From one step to the next the learning rate is a small part of what it was, as when it lost its zeros."""
        lr, rms = step.value("lr"), step.value("update/rms")
        rates, moves = step.history["lr"].values[-10:], step.history["update/rms"].values[-20:]
        if self.cut_at < 0:
            fell = len(rates) == 10 and len(moves) == 20 and 0 < lr < self.collapse * min(rates)
            # A schedule comes to its end step by step; where some are not read, it was on its way down before.
            if fell and (step.ago(10) == step.number - 10 or max(rates) < 2 * min(rates)):
                self.cut_at, self.cut = step.number, {"lr": rates[-1], "rms": float(np.median(moves))}
            return None
        if not 0 < lr < self.collapse * self.cut["lr"]:
            self.cut_at = -1
            return None
        if not step.ago(1) < self.cut_at + 3 <= step.number or not 0 < rms < 5 * self.collapse * self.cut["rms"]:
            return None  # told once, three steps after the cut, or at the next that is read
        seen = {"ratio": rms / self.cut["rms"], "of": f"of what it did before step {self.cut_at}", "lr": lr}
        return Sign(
            severity="warning",
            seen=seen | {"lr_proposed": self.cut["lr"], "at": self.cut_at},
            expected={"ratio": f"over {self.collapse:g}"},
            since=self.cut_at,
            causes=("cut_lr",),
            cures=("cut_lr",),
        )


@register
@dataclass
class UpdateSpike(Rule):
    """One step moves the weights far more than usual, while the gradient is as usual: the loss follows."""

    id = "update_spike"
    needs = ("update/rms",)

    ratio: float = 4.0
    """Over the usual change of the whole model."""
    z: float = 5.0
    """Standard deviations over it. Updates are smooth, as optimizers average, so that few are enough."""
    tensor_ratio: float = 6.0
    """The same for one tensor, which is judged on fewer coordinates and as one of many."""
    tensor_z: float = 7.0
    """Standard deviations, likewise."""
    gradient_z: float = 4.0
    """The gradient counts as usual up to here; above, the spike is one of the gradient."""
    first_steps: int = 20
    """Updates before one can be unusual."""

    highest_lr: float = field(default=0.0, init=False)
    exploded: int = field(default=-LINGERS - 1, init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires at every step that moves the weights too far."""
        self.exploded = step.number if step.norm_judged[1] > 2 * self.gradient_z else self.exploded
        lr, highest = step.value("lr"), self.highest_lr
        self.highest_lr = max(highest, lr) if lr == lr else highest
        judged, gradients = step.updates_judged, step.norms_judged
        if judged is None or step.history.steps_seen < self.first_steps:
            return None
        (ratio, z), known = judged, step.history.updates.count >= self.first_steps
        whole = bool(known[0] and ratio[0] > self.ratio and z[0] > self.z)
        hot = np.flatnonzero(known[1:] & (ratio[1:] > self.tensor_ratio) & (z[1:] > self.tensor_z))
        if not (whole or len(hot)):
            return None
        rates = step.history["lr"].last(20)
        before = float(rates.min()) if len(rates) else math.nan
        jumped = lr > 1.5 * before
        # A schedule that goes back up to where it was (warm restarts) moves weights more, and is meant to.
        if jumped and lr <= 1.5 * highest:
            return None
        if len(step.negligible):
            hot = hot[~step.negligible[hot]]
        if gradients is not None:  # a tensor whose own gradient is as large is the explosion's to tell
            hot = hot[~(gradients[1][hot] > self.gradient_z)]
        if step.norm_judged[1] > self.gradient_z or not (whole or len(hot)):
            return None
        hot = hot[np.argsort(-ratio[1:][hot])]
        place = 0 if whole else int(hot[0]) + 1
        seen = {"ratio": float(ratio[place]), "z": float(z[place]), "at": step.number, "lr": lr, "lr_before": before}
        seen |= {"gradient_z": step.norm_judged[1], "exploded": self.exploded}
        limit = self.ratio if whole else self.tensor_ratio
        cause = "lr" if jumped else "lingers" if step.number - self.exploded <= LINGERS else "momentum"
        return Sign(
            severity="warning",
            seen=seen,
            expected={"ratio": f"under {limit:g}", "gradient_z": f"under {self.gradient_z:g}"},
            # Where it is everywhere there is no use in naming all.
            tensors=() if whole and len(hot) > 0.5 * len(known) else step.names(hot[:NAMED]),
            causes=("unread", cause) if step.unread and cause == "momentum" else (cause,),
            cures=(cause,),
        )
