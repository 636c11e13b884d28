"""Rules that look at gradients and their norms: too large, or too small."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.baseline import MEAN_ABS_TO_STD
from gradvitals.diagnose.rule import Rule, Sign, register
from gradvitals.diagnose.step import NAMED, Step
from gradvitals.types import Layout, Severity

Floats = NDArray[np.float64]


def usual_limit(step: Step) -> float:
    """A norm to clip to that leaves nine in ten of the run's recent steps alone."""
    norms = step.history["grad/norm"].last(200)
    return float(f"{np.quantile(norms, 0.9):.2g}") if len(norms) else math.nan


@register
@dataclass
class Explosion(Rule):
    """The gradient is far larger than usual, of the whole model or of one tensor; or far too large from the start."""

    id = "explosion"

    ratio: float = 2.0
    """The norm over what is usual."""
    z: float = 6.0
    """Standard deviations of its logarithm over what is usual, so that ordinary noise does not count."""
    tensor_ratio: float = 4.0
    """The same of one tensor, one of many, whose spike the norm of all hides."""
    tensor_z: float = 8.0
    """Standard deviations of its logarithm, likewise."""
    tensor_share: float = 0.02
    """A tensor counts from this share of the whole norm on."""
    extreme_ratio: float = 5.0
    """A spike of one step that the loss does not show is a warning from here on; below, it is told without alarm."""
    extreme_z: float = 10.0
    """Standard deviations that go with it."""
    first_steps: int = 15
    """Steps before anything is unusual."""
    sensitivity: float = 1.0
    """At the start there is nothing to compare with. If every weight changed at random by its own size, the loss would
    change by |g| |W| / sqrt(number of weights), to first order. Healthy models begin under 0.2 of their loss."""
    least_loss: float = 0.1
    """A loss counts as this large at least, for that: one that may be of either sign can begin near 0."""
    fewest: int = 100
    """A tensor counts as having this many weights at least, for that."""
    scale: float = 1e4
    """Gradient norm over weight norm, at the start, that only a loss on the wrong scale has."""
    growth: float = 10.0
    """The usual norm over its lowest level so far, where the loss has risen since as well."""
    growth_in_turn: float = 100.0
    """The same in one side of a game, whose loss says nothing."""
    lr_check: bool = False
    """Fire also where the norm is over 1 / learning rate, whatever is usual."""
    recovered: float = 0.8
    """Share of the first loss below which a run has got over what was there from the start."""
    recovers: int = 5
    """Steps after which a spike that did not come back was that of one batch."""

    since: int = field(default=-1, init=False)
    last: int = field(default=-1, init=False)
    """The last step it was seen at."""
    times: int = field(default=0, init=False)
    """Steps it was seen at."""
    left_out: int = field(default=0, init=False)
    """Those of them that a Guard has left out."""
    hot_updates: int = field(default=0, init=False)
    """Steps after a spike at which the gradient was as usual again and the weights still moved too far."""
    told: str = field(default="", init=False)
    lr_rose: bool = field(default=False, init=False)
    harmless: bool = field(default=True, init=False)
    calm_loss: float = field(default=math.nan, init=False)
    seen: dict[str, Any] = field(default_factory=dict, init=False)
    names: list[str] = field(default_factory=list, init=False)
    pushed: int = field(default=-10, init=False)
    """The last step at which the weights moved too far on a gradient that was as usual."""
    blamed: list[str] = field(default_factory=list, init=False)
    """Causes of what was there from the start, until it is over."""
    first_loss: float = field(default=math.nan, init=False)
    eased: bool = field(default=False, init=False)
    lowest: float = field(default=math.inf, init=False)
    lowest_loss: float = field(default=math.nan, init=False)

    def look(self, step: Step) -> Sign | None:
        """Fires at every step whose gradient is too large, and says more once it is known how it went on."""
        sign = self._spike(step) or self._grown(step) or self._from_the_start(step) or self._not_over(step)
        if sign is None:
            return self._afterwards(step)
        if self.since < 0 or step.number - self.last > self.closes_after:
            losses = step.history["loss"].last(20)
            self.calm_loss = float(np.median(losses)) if len(losses) else math.nan
            self.since, self.times, self.hot_updates, self.told, self.seen, self.names = step.number, 0, 0, "", {}, []
            self.left_out = 0
            rates, self.harmless = step.history["lr"].last(20), True
            self.lr_rose = len(rates) > 0 and step.value("lr") > 1.5 * float(np.median(rates))
        self.last, self.times = step.number, self.times + 1
        self.left_out += step.value("step/left_out") == 1
        if not sign.seen["ratio"] <= self.seen.get("ratio", 0.0):
            self.seen, self.names = dict(sign.seen), list(sign.tensors)
        severity = self._severity(step, sign)
        self.harmless &= severity == "info"
        causes = sign.causes or self._causes()
        seen = {**sign.seen, **self.seen, "began": self.since}  # at its worst
        return replace(sign, severity=severity, seen=seen, since=self.since, causes=causes, cures=self._cures(causes))

    def _cures(self, causes: tuple[str, ...]) -> tuple[str, ...]:
        return ("left_out",) if causes[0] == "dirty_batch" and self.left_out == self.times else causes

    def _spike(self, step: Step) -> Sign | None:
        if step.history.steps_seen < self.first_steps:
            return None
        ratio, z = step.norm_judged
        norm, lr = step.value("grad/norm"), step.value("lr")
        known = step.history.norm.count[0] >= self.first_steps
        whole = (known and ratio > self.ratio and z > self.z) or (self.lr_check and norm * lr > 1)
        ratios, zs = step.norms_judged or (np.zeros(0), np.zeros(0))
        hot = np.flatnonzero((ratios > self.tensor_ratio) & (zs > self.tensor_z))
        if len(hot):
            own = np.asarray(step.tensors("grad/norm"))[hot]
            hot = hot[(step.history.norms.count[hot] >= self.first_steps) & (own > self.tensor_share * norm)]
            hot = hot[np.argsort(-ratios[hot])]
        if not (whole or len(hot)):
            return None
        what = "the gradient norm"
        usual = float(np.exp(step.history.norm.level[0]))
        expected = dict[str, Any](ratio=f"under {self.ratio:g}", z=f"under {self.z:g}", norm=usual)
        if not whole:
            worst = int(hot[0])
            ratio, z = float(ratios[worst]), float(zs[worst])
            what = f"the gradient norm of {step.layout.tensors[worst].name}"
            expected = {"ratio": f"under {self.tensor_ratio:g}", "z": f"under {self.tensor_z:g}"}
        seen = _numbers(step, ratio, f"{what} rose to {ratio:.3g}× its usual size") | {"z": z}
        return Sign(severity="warning", seen=seen, expected=expected, tensors=step.names(hot[:NAMED]))

    def _grown(self, step: Step) -> Sign | None:
        """What grows slowly is never far from what was usual just before."""
        usual = step.history.norm
        if step.number % 10 or not len(usual.count) or usual.count[0] < usual.window:
            return None
        losses = step.history["loss"].last(20)
        level, loss = float(np.exp(usual.level[0])), float(np.median(losses)) if len(losses) else math.nan
        if level < self.lowest:
            self.lowest, self.lowest_loss = level, loss
        ratio = level / self.lowest
        harms = step.in_turn or loss > self.lowest_loss + 0.1 * abs(self.lowest_loss)
        growth = self.growth_in_turn if step.in_turn else self.growth
        if not (ratio > growth and harms):
            return None
        seen = _numbers(step, ratio, f"the gradient norm has grown to {ratio:.3g}× what it was")
        expected = {"ratio": f"under {growth:g}", "norm": self.lowest}
        return Sign(severity="warning", seen=seen, expected=expected, causes=("learning_rate",))

    def _from_the_start(self, step: Step) -> Sign | None:
        loss, whole, norm = step.value("loss"), step.value("weight/norm"), step.value("grad/norm")
        norms, weights = step.tensors("grad/norm"), step.tensors("weight/norm")
        # What the first reading did not show was made by the steps since: it was not there from the start.
        late = not self.blamed and (step.number > 4 or self.since >= 0 or self.eased)
        if late or norms is None or weights is None or not (norm < math.inf and whole > 0):
            return None
        sizes = np.array([info.numel for info in step.layout.tensors], dtype=np.float64)
        # Of few weights the gradient points along them by chance, and one batch in some has next to no loss.
        sizes = np.maximum(sizes, self.fewest)
        # A loss below 0 has no size that a change of it could be compared with.
        size = max(loss, self.least_loss) if loss >= 0 else math.inf if loss < 0 else math.nan
        own = np.nan_to_num(norms * weights / np.sqrt(sizes) / size)
        share = max(norm * whole / math.sqrt(sizes.sum()) / size, float(own.max()))
        what = f"the gradient norm is {norm:.3g} from the start"
        # Weights of a layer begin near 1 / sqrt(inputs), so that each row of them has a norm near 1.
        rows = [
            w / math.sqrt(info.shape[0]) for w, info in zip(weights, step.layout.tensors, strict=True) if info.shape[1:]
        ]
        causes: tuple[str, ...] = (
            ("initialisation", "loss_scale") if rows and np.median(rows) > 10 else ("loss_scale", "initialisation")
        )
        if norm > self.scale * whole:
            seen = _numbers(step, norm / whole, what) | {"scale": norm / whole}
            return self._begun(Sign(severity="warning", seen=seen, expected={"scale": 1.0}, causes=causes), loss)
        if share > self.sensitivity:
            worst = np.flatnonzero(own > max(0.5 * own.max(), 0.5 * self.sensitivity))
            seen = _numbers(step, share, what) | {"sensitivity": share}
            expected, names = {"sensitivity": 0.2}, step.names(worst[np.argsort(-own[worst])])
            # Weights are read after the step: where it was as large as they are, it is they that it shows.
            causes = ("loss_scale", "learning_rate") if step.value("update/ratio") > 0.3 else ("initialisation",)
            sign = Sign(severity="warning", seen=seen, expected=expected, tensors=names, causes=causes)
            return self._begun(sign, loss)
        self.eased = True
        return None

    def _begun(self, sign: Sign, loss: float) -> Sign:
        self.eased = False
        if not self.blamed:
            self.blamed, self.first_loss = list(sign.causes), loss
        return sign

    def _not_over(self, step: Step) -> Sign | None:
        """A run that began so has not got over it before it no longer is so, and its loss has fallen."""
        if not self.blamed or step.number % 5:
            return None
        losses = step.history["loss"].last(20)
        if not len(losses) or float(np.median(losses)) < self.recovered * self.first_loss:
            self.blamed = [] if self.eased else self.blamed
            return None
        return Sign(severity="warning", seen=self.seen, tensors=tuple(self.names), causes=tuple(self.blamed))

    @property
    def _was_pushed(self) -> bool:
        """Whether an update was too large just before any gradient was."""
        return 0 <= self.since - self.pushed <= 3

    def _causes(self) -> tuple[str, ...]:
        if self.lr_rose:
            return ("learning_rate",)
        if self._was_pushed or self.told == "momentum":
            return ("momentum",)
        if self.told == "lingers":
            return ("lingers",)
        if self.times > 3 and self.last - self.since < 2 * self.times:
            return ("learning_rate",)
        return ("harmless", "dirty_batch") if self.harmless else ("dirty_batch",)

    def _severity(self, step: Step, sign: Sign) -> Severity:
        """Critical where it goes on and the loss goes with it; no cause to worry where one step alone did no harm."""
        loss, losses = step.value("loss"), step.history["loss"].last(50)
        if self.times >= 5 and loss > 2 * self.calm_loss > 0:
            return "critical"
        if "z" not in sign.seen:
            return "warning"
        extreme = bool(sign.seen["ratio"] > self.extreme_ratio and sign.seen["z"] > self.extreme_z)
        if len(losses) < 10 or not math.isfinite(loss):
            return "warning" if extreme else "info"
        middle = float(np.median(losses))
        usual = middle + 3 * MEAN_ABS_TO_STD * float(np.mean(np.abs(losses - middle)))
        harm = loss > usual and not step.in_turn
        lasts = self.times >= 3 and self.last - self.since < 2 * self.times
        clipped = step.value("grad/norm") > step.value("clip/max_norm")
        return "warning" if harm or ((extreme or lasts) and not clipped) else "info"

    def _afterwards(self, step: Step) -> Sign | None:
        judged = step.updates_judged
        hot = judged is not None and bool(judged[0][0] > 2 and judged[1][0] > 3)
        if hot and step.norm_judged[1] < 3:
            self.pushed = step.number
        passed = step.number - self.last
        if self.since < 0 or self.told or passed > 20 or "z" not in self.seen:
            return None
        self.hot_updates += hot
        if self.hot_updates >= 3 or (self._was_pushed and passed >= self.recovers):
            own = "momentum" if self._was_pushed or self.times > 3 else "lingers"
            self.told = "learning_rate" if self.lr_rose else own
        elif passed >= self.recovers and self.times <= 3 and not self.hot_updates:
            self.told = "harmless" if self.harmless else "dirty_batch"
        else:
            return None
        seen, causes = {**self.seen, "began": self.since}, (self.told,)
        cures, names = self._cures(causes), tuple(self.names)
        return Sign(severity="info", seen=seen, tensors=names, causes=causes, cures=cures, active=False)


def _numbers(step: Step, ratio: float, what: str) -> dict[str, Any]:
    lr, norm = step.value("lr"), step.value("grad/norm")
    seen = {"ratio": ratio, "norm": norm, "at": step.number, "lr": lr, "lr_proposed": lr / 3}
    return {**seen, "max_norm": usual_limit(step), "what": what}


@register
@dataclass
class Vanishing(Rule):
    """No signal reaches part of the model, or all of it."""

    id = "vanishing"
    needs = ("tensors:grad/norm",)
    judges_after = 30

    scale: float = 1e-5
    """A layer's gradient under this share of the largest layer's, or the norm of all under this share of what it was,
    is next to nothing. Layers are compared by the root mean square of an element."""
    layers: int = 2
    """Layers in a row, from the input on, that must be so."""
    patience: int = 20
    """Steps in a row."""
    absolute: float = 0.0
    """Fire also where the norm of all is under this figure, e.g. 1e-5."""
    lr_factor: float = 0.0
    """Fire also where the norm of all is under this over the learning rate, e.g. 1e-10."""
    fallen: float = 0.5
    """The loss counts as high until it has fallen to this share of what it was at the start."""

    low_for: int = field(default=0, init=False)
    highest: float = field(default=0.0, init=False)
    """Of the usual norms so far."""
    first_losses: list[float] = field(default_factory=list, init=False)
    earlier: float = field(default=0.0, init=False)
    """The weakest layer's share when it began: what grows by itself is not dead."""

    def __post_init__(self) -> None:
        self._layout: Layout | None = None

    def look(self, step: Step) -> Sign | None:
        """Fires while the gradient is next to nothing for many steps."""
        loss, norm, lr = step.value("loss"), step.value("grad/norm"), step.value("lr")
        if len(self.first_losses) < 10 and math.isfinite(loss):
            self.first_losses.append(loss)
        usual = step.history.norm
        if len(usual.count) and usual.count[0] >= 5:
            self.highest = max(self.highest, float(np.exp(usual.level[0])))
        if self.low_for == 0 and step.number % 5 and norm > 0:
            return None
        limit = max(self.scale * self.highest, self.absolute, self.lr_factor / lr if lr > 0 else 0.0)
        gone, shares = norm < limit, self._shares(step)
        weak = np.zeros(1, dtype=bool) if shares is None or gone else ~(shares >= self.scale)
        below = 0 if weak.all() else int(np.argmin(weak))  # layers from the input on that are weak, or frozen
        known = shares[: below or None] if shares is not None else np.zeros(0)
        known = known[known >= 0]
        weakest = float(np.min(known, initial=math.inf))
        if not gone and (below == 0 or len(known) < self.layers):
            self.low_for = 0
            return None
        self.low_for += 1
        if self.low_for == 1 or (not gone and self.low_for >= self.patience and weakest > 3 * self.earlier):
            self.low_for, self.earlier = 1, weakest
        return self._sign(step, gone, below, weakest) if self.low_for >= self.patience else None

    def _sign(self, step: Step, gone: bool, below: int, weakest: float) -> Sign:
        recent, start = step.history["loss"].last(10), float(np.mean(self.first_losses or [math.nan]))
        loss = float(np.median(recent)) if len(recent) else math.nan
        names = [info.name for info in step.layout.tensors if info.depth < below and not info.frozen and not gone]
        norm = step.value("grad/norm")
        what = f"the gradient is gone: its norm is {norm:.2g}"
        if not gone:
            layer = step.layout.layers[below - 1]
            what = f"the gradient dies at {layer}: layers before it get {weakest:.1g} of the largest layer's"
        seen: dict[str, Any] = {"norm": norm, "share": weakest, "steps": self.low_for, "what": what}
        seen |= {} if math.isnan(loss) else {"loss": loss}
        seen |= {"layer": "every layer" if gone else layer, "at": step.ago(self.low_for - 1)}
        expected = {"norm": self.highest, "share": f"over {self.scale:g}"}
        expected |= {"loss": self.fallen * start} if "loss" in seen else {}
        lr, decay = step.value("lr"), step.facts.weight_decay or 0.0
        seen |= {"lr": lr, "weight_decay": decay, "taken": lr * decay}
        half = step.facts.autocast == "float16" or any(info.dtype == "float16" for info in step.layout.tensors)
        cause = "decay" if lr * decay > 0.01 else "gone" if gone or weakest == 0 else "depth"
        cause = "precision" if half else cause
        return Sign(
            severity="info" if loss < self.fallen * start else "warning",
            seen=seen,
            expected=expected,
            tensors=tuple(names[:NAMED]),
            since=step.ago(self.low_for - 1),
            causes=(cause,),
            cures=(cause,),
        )

    def _shares(self, step: Step) -> Floats | None:
        """Root mean square gradient of each layer over that of the largest; nan for one that is all frozen.

        None where it cannot be told.
        """
        norms = step.tensors("grad/norm")
        if norms is None or not step.layout.layers:
            return None
        if step.layout is not self._layout:
            self._layout = step.layout
            self._depths = np.array([info.depth for info in step.layout.tensors])
            self._sizes = np.array([float(info.numel) for info in step.layout.tensors])
            trained = np.bincount(self._depths, [not info.frozen for info in step.layout.tensors])
            self._nothing = np.where(trained > 0, 0.0, math.nan)
        known, count = np.isfinite(norms), len(step.layout.layers)
        total = np.bincount(self._depths, np.where(known, norms, 0.0) ** 2, minlength=count)
        size = np.bincount(self._depths, np.where(known, self._sizes, 0.0), minlength=count)
        rms = np.sqrt(total / np.maximum(size, 1.0))
        return rms / rms.max() + self._nothing if rms.max() > 0 else None
