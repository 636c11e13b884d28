"""Rules about gradients and their norms: not finite, too large, too small, or unsteady."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gradvitals.diagnose.baseline import MEAN_ABS_TO_STD, Floats, empty, resized
from gradvitals.diagnose.history import step_spread
from gradvitals.diagnose.message import Message, Observation
from gradvitals.diagnose.rule import Rule, register
from gradvitals.diagnose.rules.clipping import CLIPPED_ALREADY, clipping_fix, proposed_limit
from gradvitals.diagnose.step import MAX_NAMED, Step
from gradvitals.format import number, percent
from gradvitals.types import Layout, Severity


@register
@dataclass
class Nonfinite(Rule):
    """A gradient is NaN or Inf."""

    id = "nonfinite"
    family = "gradients"
    is_symptom = True
    needs = ("grad/nonfinite",)
    follows = ("loss_nonfinite",)
    masks = ("explosion", "unstable_norm")
    taints_steps = True
    message = Message(
        name="Gradient not finite",
        pattern="A gradient is NaN or Inf. The finding names the first tensor in the order of backward.",
        title="NaN or Inf in the gradient of {affected}{first_in} at step {at}",
        causes={
            "scaler": "GradScaler is still searching for its scale and skips steps that overflow ({steps} so far)",
            "diverged": "The loss had already risen to {loss}: most often the learning rate is too high",
            "forward": "The loss is already {loss}: the forward pass fails, and backward only passes it on",
            "backward": (
                "The layers after {first} are finite{known_loss}: backward fails in {first}, for example at a square "
                "root or norm of zero, or by an overflow"
            ),
            "float16": "The weights are float16, which overflows above 65,504 and rounds Adam's eps of {eps} to zero",
            "root": "The loss of {loss} takes a square root, whose gradient at 0 (as of equal outputs) is infinite",
            "earlier": "{unread} not read and may have left NaN or infinite weights",
            "batch": "No gradient is finite{known_loss}: backward fails at the loss itself, or the batch is not finite",
        },
        fixes={
            "scaler": "No action needed at step {at}, unless this continues for many steps",
            "guard": (
                "Look at the batch of step {at}; the Guard has skipped {steps} steps so far, and training continues"
            ),
            "diverged": "Restore a checkpoint from before the loss rose, and lower the learning rate of {lr}",
            "skipping": "Stop the run: GradScaler has skipped {steps} steps in a row, and no scale can fix a NaN",
            "backward": "Run step {at} again under torch.autograd.detect_anomaly() and look at {first}",
            "earlier": (
                "Restore a checkpoint from before step {safe} and check the batch of step {at} with torch.isfinite"
            ),
            "forward": (
                "Restore a checkpoint from before step {safe} and check the batch of step {at} with torch.isfinite"
            ),
            "float16": "Keep weights and optimizer state in float32 from step {at} on, and compute under autocast",
            "root": "Restore a checkpoint from before step {at}, and add a small epsilon inside the square root",
            "batch": "Check the batch of step {at} with torch.isfinite, and the loss for a log or square root of zero",
            "skip": (
                "Skip steps with a NaN or infinite gradient: clip_grad_norm_(error_if_nonfinite=True) raises an error"
            ),
        },
        snippets={"root": "d = torch.sqrt(((a - b) ** 2).sum(1) + 1e-8)"},
        only_if_chosen=("root",),
        passed="every gradient was finite",
    )

    DIVERGED = 1e3  # a loss of this many times the first one was lost before anything overflowed

    skips: int = 10
    """Steps in a row that a GradScaler may skip: it searches for its scale that way."""

    bad_for: int = field(default=0, init=False)
    """Steps in a row."""
    last: int = field(default=-1, init=False)
    since: int = field(default=-1, init=False)
    first: list[str] = field(default_factory=list, init=False)
    """Where it started: one step later it is everywhere."""
    seen: dict[str, Any] = field(default_factory=dict, init=False)
    text: dict[str, Any] = field(default_factory=dict, init=False)
    cause: str = field(default="", init=False)
    earlier: bool = field(default=False, init=False)
    """Whether it may come from a step that was not read: weights that are not finite make every gradient so."""
    rank: int | None = field(default=None, init=False)
    """The one rank that had it before gradients were reduced, if known."""

    def check(self, step: Step) -> Observation | None:
        if not step.value("grad/nonfinite") > 0:
            self.bad_for = 0
            return None
        if self.last < 0 or step.number - self.last > self.closes_after:
            self._start(step)
        self.bad_for, self.last = self.bad_for + 1, step.number
        late = self.cause == "batch" and self.seen.get("loss", math.nan) < math.inf and step.fact("head/root") == 1
        if late and not self.earlier:  # no batch was inspected before
            self.cause = "root"
            return replace(self._observe("critical", (self.cause,), (self.cause,)), active=False)
        skipped, guarded = step.value("step/skipped") == 1, step.value("step/left_out") == 1
        ordinary = (skipped or guarded) and self.bad_for <= self.skips
        if guarded:
            return self._observe("info" if ordinary else "critical", (self.cause,), ("guard", self.cause))
        if ordinary:
            return self._observe("info", ("scaler", self.cause), ("scaler",))
        if self.earlier:
            return self._observe("critical", ("earlier", self.cause), ("earlier",))
        return self._observe("critical", (self.cause,), ("skipping", self.cause) if skipped else (self.cause,))

    def _observe(self, severity: Severity, causes: tuple[str, ...], fixes: tuple[str, ...]) -> Observation:
        return Observation(
            severity=severity,
            seen={**self.seen, "steps": self.bad_for},
            expected={"share": 0.0} if "share" in self.seen else {},
            text=self.text,
            tensors=tuple(self.first),
            since=self.since,
            causes=causes,
            fixes=fixes,
            rank=self.rank,
        )

    def _start(self, step: Step) -> None:
        counts, infos = step.tensors("grad/nonfinite"), step.layout.tensors
        bad = [] if counts is None else [infos[i] for i in np.flatnonzero(counts > 0)]
        bad.sort(key=lambda info: (-info.depth, -info.index))  # the order of backward
        loss = step.values.get("loss")
        everywhere = len(bad) == len(infos)
        broken = loss is not None and not math.isfinite(loss)
        self.cause = "forward" if broken else "batch" if everywhere else "backward"
        self.earlier = everywhere and step.unread > 0 and step.was_taken
        first = step.history["loss"].values[:1]
        if everywhere and infos and infos[0].dtype == "float16":
            self.cause = "float16"
        elif first and loss is not None and math.isfinite(loss) and loss > self.DIVERGED * abs(first[0]):
            self.cause = "diverged"
        elif self.cause == "batch" and loss is not None and step.fact("head/root") == 1:
            self.cause = "root"
        on_ranks = np.flatnonzero(step.general.ranks.get("ranks/nonfinite", ()))
        self.rank = int(on_ranks[0]) if len(on_ranks) == 1 else None
        self.since, self.bad_for = step.number, 0
        self.first = [info.name for info in bad[:MAX_NAMED]]
        where = "all tensors" if everywhere else f"{len(bad)} of {len(infos)} tensors"
        named = f", first in {self.first[0]}," if self.first and not self.earlier else ""
        self.text = {"affected": where, "first_in": named, "known_loss": ""}
        self.seen = {"tensors": len(bad), "of": len(infos)}
        # The first step that is not finite has 1 for "some"; from the next one on they are counted.
        if counts is not None and np.nanmax(counts, initial=0.0) > 1:
            elements = float(np.nansum(counts))
            self.seen |= {"elements": elements, "share": elements / (sum(info.numel for info in bad) or 1)}
        self.seen |= {"at": step.number, "eps": step.info.eps or 1e-8, "lr": step.value("lr")}
        if loss is not None:
            self.seen["loss"] = loss
            self.text["known_loss"] = f", and the loss is {number(loss)}"


@register
@dataclass
class Explosion(Rule):
    """The gradient of the model or of a tensor is far above its baseline, or far too large from the start."""

    id = "explosion"
    family = "gradients"
    is_symptom = True
    follows = ("stale_gradients", "lr_too_high", "dead_units")
    taints_steps = True
    message = Message(
        name="Gradient explosion",
        pattern=(
            "The gradient norm of the model or of a tensor is more than twice its baseline and far outside its spread; "
            "or it has grown tenfold while the loss rose; or it is far too large for the weights from the start."
        ),
        title="{what}",
        causes={
            "dirty_batch": "The batch of step {at} is corrupted: the norm rose at this step and returned to normal",
            "learning_rate": "The learning rate of {lr} is too high: the norm stays up or keeps growing",
            "momentum": (
                "The optimizer's momentum still holds bad steps, so ordinary gradients move the weights too far"
            ),
            "lingers": (
                "The batch of step {began} is corrupted: the norm rose at this step and returned to normal, but the "
                "spike stayed in the optimizer's momentum for several steps"
            ),
            "harmless": "A single step that left no trace in the loss: healthy runs have such steps too",
            "initialization": "The initial weights are too large, or a recurrence amplifies its input",
            "loss_scale": "The loss has the wrong scale: summed instead of averaged, or multiplied and never divided",
        },
        fixes={
            "dirty_batch": (
                "Skip the batch of step {at}, and check it for broken or unnormalized inputs and wrong labels"
            ),
            "skipped": "Check the batch of step {at} for broken inputs and wrong labels; its step was skipped",
            "learning_rate": "Lower the learning rate from {lr} to {lr_proposed}, or lengthen the warmup",
            "momentum": "Restore a checkpoint from before step {began} and reset the optimizer state",
            "lingers": (
                "Skip the batch of step {began} and look at it; if the loss has not recovered, restore an earlier "
                "checkpoint and reset the optimizer state"
            ),
            "harmless": "No action needed at step {began}; if it happens again, look at those batches",
            "initialization": (
                "Start with smaller weights (standard deviation 1 / sqrt(inputs)): the norm at step {at} is {norm}"
            ),
            "loss_scale": "Average the loss over samples and micro-batches: the norm at step {at} was {norm}",
            "clip": "Clip gradients to a norm of {max_norm}, which 90% of this run's steps stay below",
        },
        passed="no gradient stood out",
        reference="arXiv 2501.06842 (SPAM), 2504.02507 (ZClip)",
    )

    # One tensor: of many, some deviate by chance, and the global norm hides its spike.
    TENSOR_RATIO, TENSOR_Z = 4.0, 8.0
    TENSOR_SHARE = 0.02  # a tensor counts from this share of the global norm on
    LASTS = 5  # steps of a spike that is not one of a single batch
    FIRST_STEPS = 15  # steps before anything is an outlier
    # At the start there is no baseline. If every weight changed at random by its own size, the loss would change by
    # |g| |W| / sqrt(number of weights), to first order. Healthy models start under 0.2 of their loss.
    SENSITIVITY = 1.0
    FAR_TOO_LARGE = 5.0  # above this it is a warning, even if the loop clips
    LEAST_LOSS = 0.1  # for that, a loss counts as this large at least: one of either sign can start near 0
    FEWEST = 100  # and a tensor as having this many weights
    SCALE = 1e4  # gradient norm over weight norm, at the start, that only a loss on the wrong scale has
    GROWTH = 10.0  # baseline over its lowest level so far, if the loss has risen too
    AGAIN = 1.5  # and over the highest level that it had before the lowest: what was there before is normal
    LOST = 0.3  # share of what was gained that the loss must have lost again
    GROWTH_ALTERNATING = 100.0  # the same if the model alternates with another one, so that its loss says nothing
    RECOVERED = 0.8  # share of the first loss below which a run has recovered from what was there at the start
    RECOVERS = 5  # steps after which a spike that did not come back was that of one batch
    ORDINARY = 3  # norms, at least, that have been read since

    ratio: float = 2.0
    """Norm over its baseline."""
    z: float = 6.0
    """Standard deviations of its logarithm over the baseline, so that ordinary noise does not count."""
    lr_check: bool = False
    """Also fire if the norm exceeds 1 / learning rate, whatever the baseline."""

    since: int = field(default=-1, init=False)
    last: int = field(default=-1, init=False)
    """The last step that showed it."""
    times: int = field(default=0, init=False)
    """Steps that showed it."""
    skipped: int = field(default=0, init=False)
    """Those of them that a Guard skipped."""
    hot_updates: int = field(default=0, init=False)
    """Steps after a spike with an ordinary gradient at which the weights still moved too far."""
    verdict: str = field(default="", init=False)
    """The cause, once the steps after a spike have shown it."""
    lr_rose: bool = field(default=False, init=False)
    calm_loss: float = field(default=math.nan, init=False)
    calm_spread: float = field(default=math.nan, init=False)
    seen: dict[str, Any] = field(default_factory=dict, init=False)
    text: dict[str, Any] = field(default_factory=dict, init=False)
    names: list[str] = field(default_factory=list, init=False)
    pushed: int = field(default=-10, init=False)
    """The last step at which the weights moved too far on an ordinary gradient."""
    blamed: list[str] = field(default_factory=list, init=False)
    """Causes of what was there from the start, until it is over."""
    first_loss: float = field(default=math.nan, init=False)
    eased: bool = field(default=False, init=False)
    lowest: float = field(default=math.inf, init=False)
    lowest_loss: float = field(default=math.nan, init=False)
    highest: float = field(default=0.0, init=False)
    """Highest baseline so far."""
    before: float = field(default=0.0, init=False)
    """The same when it was lowest."""

    def check(self, step: Step) -> Observation | None:
        seen = self._spike(step) or self._grown(step) or self._from_start(step) or self._unrecovered(step)
        if seen is None:
            return self._afterwards(step)
        if self.since < 0 or step.number - self.last > self.closes_after:
            losses = step.history["loss"]
            self.calm_loss, self.calm_spread = losses.median(20), step_spread(losses.last(20))
            self.since, self.times, self.hot_updates, self.skipped, self.verdict = step.number, 0, 0, 0, ""
            self.seen, self.text, self.names = {}, {}, []
            self.lr_rose = step.value("lr") > 1.5 * step.history["lr"].median(20)
        self.last, self.times = step.number, self.times + 1
        self.skipped += step.value("step/left_out") == 1
        if not seen.seen["ratio"] <= self.seen.get("ratio", 0.0):
            self.seen, self.text, self.names = dict(seen.seen), dict(seen.text), list(seen.tensors)
        severity = self._severity(step, seen)
        causes = seen.causes or self._causes()
        worst = {**seen.seen, **self.seen, "began": self.since}
        text = {**seen.text, **self.text}
        fixes = self._fixes(causes)
        return replace(seen, severity=severity, seen=worst, text=text, since=self.since, causes=causes, fixes=fixes)

    def _fixes(self, causes: tuple[str, ...]) -> tuple[str, ...]:
        return ("skipped",) if causes[0] == "dirty_batch" and self.skipped == self.times else causes

    def _spike(self, step: Step) -> Observation | None:
        if step.history.steps_seen < self.FIRST_STEPS:
            return None
        ratio, z = step.norm_deviation
        norm = step.value("grad/norm")
        whole = ratio > self.ratio and z > self.z and step.history.norm.count.item(0) >= self.FIRST_STEPS
        whole = whole or (self.lr_check and norm * step.value("lr") > 1)
        hot = np.zeros(0, dtype=np.intp)
        deviations = step.tensor_norm_deviations
        if deviations is not None:
            ratios, zs = deviations
            hot = np.flatnonzero((ratios > self.TENSOR_RATIO) & (zs > self.TENSOR_Z))
            if len(hot):
                own = np.asarray(step.tensors("grad/norm"))[hot]
                hot = hot[(step.history.norms.count[hot] >= self.FIRST_STEPS) & (own > self.TENSOR_SHARE * norm)]
                hot = hot[np.argsort(-ratios[hot])]
        if not (whole or len(hot)):
            return None
        what, usual = "The gradient norm", float(np.exp(step.history.norm.level[0]))
        expected = dict[str, Any](ratio=f"under {self.ratio:g}", z=f"under {self.z:g}", norm=usual)
        if not whole:
            worst = int(hot[0])
            ratio, z = float(ratios[worst]), float(zs[worst])
            what = f"The gradient norm of {step.layout.tensors[worst].name}"
            expected = {"ratio": f"under {self.TENSOR_RATIO:g}", "z": f"under {self.TENSOR_Z:g}"}
        return Observation(
            severity="warning",
            seen=_numbers(step, ratio) | {"z": z},
            text={"what": f"{what} rose to {number(ratio)}× its baseline"},
            expected=expected,
            tensors=step.names(hot[:MAX_NAMED]),
        )

    def _grown(self, step: Step) -> Observation | None:
        """Slow growth is never far from the baseline just before."""
        baseline = step.history.norm
        if step.number % 10 or not len(baseline.count) or baseline.count.item(0) < baseline.window:
            return None
        level, loss = float(np.exp(baseline.level[0])), step.history["loss"].median(20)
        self.highest = max(self.highest, level)
        if level < self.lowest:
            self.lowest, self.lowest_loss, self.before = level, loss, self.highest
        ratio = level / self.lowest
        gained = max(0.0, step.first_loss - self.lowest_loss)
        harms = step.alternating or loss - self.lowest_loss > max(self.LOST * gained, 0.1 * abs(self.lowest_loss))
        growth = self.GROWTH_ALTERNATING if step.alternating else self.GROWTH
        if not (ratio > growth and level > self.AGAIN * self.before and harms):
            return None
        return Observation(
            severity="warning",
            seen=_numbers(step, ratio),
            text={"what": f"The gradient norm has grown to {number(ratio)}× its lowest level"},
            expected={"ratio": f"under {growth:g}", "norm": self.lowest},
            causes=("learning_rate",),
        )

    def _from_start(self, step: Step) -> Observation | None:
        # What the first reading did not show was made by the steps since: it was not there from the start.
        if not self.blamed and (step.number > 4 or self.since >= 0 or self.eased):
            return None
        loss, whole, norm = step.value("loss"), step.value("weight/norm"), step.value("grad/norm")
        if self._has_recovered(step):
            self.blamed, self.eased = [], True
            return None
        norms, weights = step.tensors("grad/norm"), step.tensors("weight/norm")
        if norms is None or weights is None or not (norm < math.inf and whole > 0):
            return None
        # The gradient of few weights points along them by chance, and a few batches have next to no loss.
        sizes = np.maximum(np.array([info.numel for info in step.layout.tensors], dtype=np.float64), self.FEWEST)
        # A negative loss has no size that a change of it could be compared with.
        size = max(loss, self.LEAST_LOSS) if loss >= 0 else math.inf if loss < 0 else math.nan
        size = size if step.loss_should_fall else math.inf
        own = np.nan_to_num(norms * weights / np.sqrt(sizes) / size)
        share = max(norm * whole / math.sqrt(sizes.sum()) / size, float(own.max()))
        text = {"what": f"Gradients are too large from the start: the norm is {number(norm)}"}
        # Layers start near 1 / sqrt(inputs), so that each row of weights has a norm near 1.
        rows = [
            w / math.sqrt(info.shape[0]) for w, info in zip(weights, step.layout.tensors, strict=True) if info.shape[1:]
        ]
        causes: tuple[str, ...] = ("loss_scale", "initialization")
        # A factor on the loss is one on its gradient too: it does not change their ratio.
        if (rows and np.median(rows) > 10) or share > self.SENSITIVITY:
            causes = ("initialization", "loss_scale")
        if norm > self.SCALE * whole:
            seen = _numbers(step, norm / whole) | {"scale": norm / whole}
            expected: dict[str, Any] = {"scale": 1.0}
            found = Observation(severity="warning", seen=seen, expected=expected, text=text, causes=causes)
            return self._blame(found, loss)
        if share > self.SENSITIVITY:
            worst = np.flatnonzero(own > max(0.5 * own.max(), 0.5 * self.SENSITIVITY))
            seen = _numbers(step, share) | {"sensitivity": share}
            expected, names = {"sensitivity": 0.2}, step.names(worst[np.argsort(-own[worst])])
            # Weights are read after the step: if it was as large as they are, they show the step.
            causes = ("loss_scale", "learning_rate") if step.value("update/ratio") > 0.3 else ("initialization",)
            found = Observation(
                severity="warning", seen=seen, expected=expected, text=text, tensors=names, causes=causes
            )
            return self._blame(found, loss)
        self.eased = True
        return None

    def _blame(self, found: Observation, loss: float) -> Observation:
        self.eased = False
        if not self.blamed:
            self.blamed, self.first_loss = list(found.causes), loss
        return found

    def _unrecovered(self, step: Step) -> Observation | None:
        """A run that started so recovers when its loss has fallen."""
        if not self.blamed or step.number % 5:
            return None
        names, causes = tuple(self.names), tuple(self.blamed)
        return Observation(severity="warning", seen=self.seen, text=self.text, tensors=names, causes=causes)

    def _has_recovered(self, step: Step) -> bool:
        """Whether the loss has fallen since: a gradient that is large beside a small loss is no fault of the start."""
        return bool(self.blamed) and step.history["loss"].median(20) < self.RECOVERED * self.first_loss

    @property
    def _was_pushed(self) -> bool:
        """Whether an update was too large just before any gradient was."""
        return 0 <= self.since - self.pushed <= 3

    def _causes(self) -> tuple[str, ...]:
        if self.lr_rose:
            return ("learning_rate",)
        if self._was_pushed or self.verdict == "momentum":
            return ("momentum",)
        if self.verdict == "lingers":
            return ("lingers",)
        if self.times > 3 and self.last - self.since < 2 * self.times:
            return ("learning_rate",)
        return ("harmless", "dirty_batch")

    def _severity(self, step: Step, seen: Observation) -> Severity:
        """A note while it is one batch that is harder than others; what it leaves behind is the damage."""
        clipped = step.value("grad/norm") > step.value("clip/max_norm")
        if "z" not in seen.seen:  # a loop that clips does not make steps longer than it wants, but weights stay large
            return "info" if clipped and self.blamed and seen.seen["ratio"] < self.FAR_TOO_LARGE else "warning"
        if self.times < self.LASTS or self.last - self.since >= 2 * self.times or clipped:
            return "info"
        thrown = self.lr_rose or self._was_pushed  # what moved the weights too far came before
        if not (thrown or self._is_harmed(step)):
            return "info"
        return "critical" if self.times > self.LASTS and step.value("loss") > 2 * self.calm_loss else "warning"

    def _is_harmed(self, step: Step) -> bool:
        """Whether the loss stays above that before a spike; while it lasts, rises: new data may only be harder."""
        losses = np.append(step.history["loss"].since(self.since + 1)[1], step.value("loss"))
        if step.alternating or len(losses) < self.LASTS:
            return False
        first, last = (float(np.median(some)) for some in (losses[: self.LASTS], losses[-self.LASTS :]))
        factor = 0.9 if self.times < self.LASTS else 1.1
        return last > max(self.calm_loss + 3 * self.calm_spread, factor * first)

    def _afterwards(self, step: Step) -> Observation | None:
        deviations = step.update_deviations
        hot = deviations is not None and bool(deviations[0][0] > 2 and deviations[1][0] > 3)
        if hot and step.norm_deviation[1] < 3:
            self.pushed = step.number
        passed = step.number - self.last
        if self.since < 0 or self.verdict or passed > 20 or "z" not in self.seen:
            return None
        self.hot_updates += hot
        if self.hot_updates >= 3 or (self._was_pushed and passed >= self.RECOVERS):
            own = "momentum" if self._was_pushed or self.times > 3 else "lingers"
            self.verdict = "learning_rate" if self.lr_rose else own
        elif passed >= self.RECOVERS and self.times <= 3 and not self.hot_updates:
            if len(step.history["grad/norm"].since(self.last + 1)[0]) < self.ORDINARY:
                return None  # norms are read rarely: nobody knows whether it was one batch
            self.verdict = "dirty_batch" if self._is_harmed(step) else "harmless"
        else:
            return None
        causes = (self.verdict,)
        return Observation(
            severity="warning" if self._is_harmed(step) else "info",
            seen={**self.seen, "began": self.since},
            text=self.text,
            tensors=tuple(self.names),
            causes=causes,
            fixes=self._fixes(causes),
            active=False,
        )


def _numbers(step: Step, ratio: float) -> dict[str, Any]:
    lr = step.value("lr")
    seen = {"ratio": ratio, "norm": step.value("grad/norm"), "at": step.number, "lr": lr, "lr_proposed": lr / 3}
    return seen | {"max_norm": proposed_limit(step)}


@register
@dataclass
class Vanishing(Rule):
    """No gradient reaches part of the model, or all of it."""

    id = "vanishing"
    family = "gradients"
    is_symptom = True
    needs = ("tensors:grad/norm",)
    judges_after = 30
    holds = True
    follows = ("stale_gradients", "lr_too_high", "dead_units")
    masks = ("dead_tensor",)
    message = Message(
        name="Vanishing gradient",
        pattern=(
            "For many steps, the layers nearest the input have less than 1e-5 of the largest layer's gradient, or less "
            "than 1e-3 if each layer has less than the next and the loss does not fall; or the global norm is below "
            "1e-5 of its peak, while the loss is high."
        ),
        title="{what}",
        causes={
            "depth": "Each layer passes on less than it receives: many layers with sigmoid or tanh, or no residuals",
            "gone": "All units are off or saturated, or the loss no longer depends on the weights",
            "initialization": "The weights start too small, so the signal shrinks from layer to layer",
            "precision": "Gradients are too small for float16 and become zero: see precision_underflow",
        },
        fixes={
            "depth": "Use fewer layers, residual paths, normalization, or ReLU instead of sigmoid (up to {layer})",
            "off": (
                "Look for dead ReLUs (off for every input) in the layers up to {layer}, and start with smaller weights"
            ),
            "gone": "Restore a checkpoint from before step {at} and use a learning rate below {lr}",
            "initialization": "Initialize with a standard deviation of 1 / sqrt(inputs), or by muP",
            "precision": "Use bfloat16, or a loss scale, so that gradients reach {layer}",
        },
        only_if_chosen=("precision", "off"),
        passed="gradients reach every layer",
        reference="arXiv 2002.04745 (why a norm in front of each layer helps)",
    )

    # A layer's gradient under this share of the largest layer's, or a global norm under this share of what it was, is
    # next to nothing. Layers are compared by the root mean square of an element.
    SCALE = 1e-5
    STEADY = 1e-3  # enough if each layer passes on less than it receives, and the loss has not fallen
    STUCK, STUCK_AFTER = 0.9, 100  # share of the first loss above which it has not, and steps it had for that
    LAYERS = 2  # layers in a row, from the input on
    PATIENCE = 20  # steps in a row
    FALLEN = 0.5  # the loss counts as high until it has fallen to this share of what it was at the start
    CONVERGED = 1e-6  # the loss, as a share of the first ones, at which training is over

    absolute: float = 0.0
    """Also fire if the global norm is under this, e.g. 1e-5."""
    lr_factor: float = 0.0
    """Also fire if the global norm is under this over the learning rate, e.g. 1e-10."""

    low_for: int = field(default=0, init=False)
    highest: float = field(default=0.0, init=False)
    """The highest level of the global norm so far."""
    earlier: float = field(default=0.0, init=False)
    """The weakest layer's share when it started: one that grows by itself is not dead."""

    def __post_init__(self) -> None:
        self._layout: Layout | None = None

    def check(self, step: Step) -> Observation | None:
        norm, baseline = step.value("grad/norm"), step.history.norm
        if len(baseline.count) and baseline.count.item(0) >= 5:
            self.highest = max(self.highest, float(np.exp(baseline.level.item(0))))
        if self.low_for == 0 and step.number % 5 and norm > 0:
            return None
        lr = step.value("lr")
        limit = max(self.SCALE * self.highest, self.absolute, self.lr_factor / lr if lr > 0 else 0.0)
        gone, shares = norm < limit, self._shares(step)
        if shares is None and not gone and step.tensors("grad/norm") is None:
            return None  # only the norm of the whole was read
        below, known, is_steady = 0, np.zeros(0), False  # layers from the input on that are weak, or frozen
        if shares is not None and not gone:
            below, known = self._weak(shares, self.SCALE)
            is_steady = (below == 0 or len(known) < self.LAYERS) and self._shrinks(shares)
            below, known = self._weak(shares, self.STEADY) if is_steady else (below, known)
        weakest = float(np.min(known, initial=math.inf))
        if not gone and (below == 0 or len(known) < self.LAYERS):
            self.low_for = 0
            return None
        self.low_for += 1
        grows = not gone and self.low_for >= self.PATIENCE and weakest > 3 * self.earlier
        if self.low_for == 1 or (grows and not self._is_stuck(step)):
            self.low_for, self.earlier = 1, weakest
        if self.low_for < self.PATIENCE or (is_steady and not self._is_stuck(step)):
            return None
        return self._observe(step, gone, below, weakest)

    def _observe(self, step: Step, gone: bool, below: int, weakest: float) -> Observation | None:
        loss, start = step.history["loss"].median(10), step.first_loss
        if gone and 0 <= loss < self.CONVERGED * start:
            return None  # there is nothing left to learn
        names = [info.name for info in step.layout.tensors if info.depth < below and not info.frozen and not gone]
        norm, layer, since = step.value("grad/norm"), "every layer", step.ago(self.low_for - 1)
        what = f"Gradients vanished: the global norm is {number(norm)}"
        if not gone:
            layer = step.layout.layers[below - 1]
            amount = f"{number(weakest)} of the largest layer's" if weakest > 0 else "none"
            what = f"Gradients vanish at layer `{layer}`: the layers before it receive {amount}"
        seen: dict[str, Any] = {"norm": norm, "share": weakest, "steps": self.low_for, "layer": layer, "at": since}
        seen["lr"] = step.value("lr")
        expected: dict[str, Any] = {
            "norm": self.highest,
            "share": f"over {self.SCALE if weakest < self.SCALE else self.STEADY:g}",
        }
        if not math.isnan(loss):
            seen["loss"], expected["loss"] = loss, self.FALLEN * start
        half = step.info.autocast == "float16" or any(info.dtype == "float16" for info in step.layout.tensors)
        cause = "gone" if gone or weakest == 0 else "depth"
        cause = "precision" if half else cause
        return Observation(
            severity="info" if loss < self.FALLEN * start else "warning",
            seen=seen,
            expected=expected,
            text={"what": what},
            tensors=tuple(names[:MAX_NAMED]),
            since=since,
            causes=(cause,),
            fixes=("off",) if cause == "gone" and since <= 0 else (cause,),
        )

    def _is_stuck(self, step: Step) -> bool:
        """Whether the loss has hardly fallen since the start."""
        return step.number >= self.STUCK_AFTER and step.history["loss"].median(20) > self.STUCK * step.first_loss

    def _weak(self, shares: Floats, scale: float) -> tuple[int, Floats]:
        """Returns how many layers from the input on have less than this share, or are frozen, and the shares known."""
        weak = ~(shares >= scale)
        below = 0 if weak.all() else int(np.argmin(weak))
        known = shares[: below or None]
        return below, known[known >= 0]

    def _shrinks(self, shares: Floats) -> bool:
        """Whether each of several layers has less gradient than the next, but for noise."""
        known = shares[np.isfinite(shares)]
        return len(known) >= 2 * self.LAYERS and bool(np.all(known[1:] > 0.5 * known[:-1]))

    def _shares(self, step: Step) -> Floats | None:
        """Root mean square gradient of each layer over that of the largest; NaN for one that is all frozen.

        None if it is unknown.
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
        # A layer that no gradient was computed for is detached, or not used: see `dead_tensor`.
        nothing = np.where(size > 0, self._nothing, math.nan)
        return rms / rms.max() + nothing if rms.max() > 0 else None


@register
@dataclass
class Oscillation(Rule):
    """Updates reverse from step to step, or norms and losses swing."""

    id = "oscillation"
    family = "gradients"
    is_symptom = True
    needs = ("grad/norm", "loss")
    every = 10
    judges_after = 60
    follows = ("stale_gradients", "lr_too_high")
    taints_steps = True
    message = Message(
        name="Oscillation",
        pattern=(
            "Over a window of steps, the direction of updates changes far more than momentum explains (a warning), or "
            "the norm or the loss swings by a large fraction of its value while the loss is still high (a note)."
        ),
        title="{what}",
        causes={
            "edge_of_stability": "The learning rate of {lr} is at the edge of stability: steps reverse the one before",
            "batch_too_small": (
                "The batch of {batch} is small compared with {noise}, so every gradient points in a different direction"
            ),
        },
        fixes={
            "edge_of_stability": "Lower the learning rate from {lr} to {lr_proposed}, or lengthen the warmup",
            "batch_too_small": "Accumulate micro-batches to a batch of {batch_proposed}, or lower the learning rate",
        },
        passed="steps do not undo each other",
        reference="arXiv 2103.00065 (edge of stability), 1812.06162 (noise scale)",
    )

    WINDOW = 40  # steps looked back on
    FEW, MANY = 10, 20  # cosines between consecutive updates that are averaged
    TURN = 0.5  # updates reverse if their mean cosine is this far below what momentum alone gives
    STILL, LEFT = 1e-5, 0.1  # update over weight norm, and loss over that of the trivial prediction
    SWING = 0.8  # spread of the norm from one step to the next, in units of log
    LOSS_SWING = 0.12  # the same of the loss, as a share of itself
    HIGH = 0.6  # swings count while the loss is above this share of its start: a small loss swings by nature
    PATIENCE = 10  # steps in a row

    lasted: int = field(default=0, init=False)

    def check(self, step: Step) -> Observation | None:
        losses, norms = step.history["loss"].last(self.WINDOW), step.history["grad/norm"].last(self.WINDOW)
        if len(losses) < self.WINDOW or step.history.steps_seen < self.WINDOW + 10:
            return None
        cosines = step.history["update/cosine"].last(self.MANY)
        cosine = float(cosines.mean()) if len(cosines) >= self.FEW else math.nan
        # Momentum gives updates this cosine even if gradients are independent.
        info = step.info
        expected = info.betas[0] if info.betas else info.momentum or 0.0
        level = float(np.median(losses))
        is_high = level > self.HIGH * step.first_loss > 0
        swing = step_spread(np.log(norms[norms > 0]))
        loss_swing = step_spread(losses) / abs(level) if level else 0.0
        # At a minimum that was reached, updates turn around it and are next to nothing.
        moves = step.history["update/ratio"].last(1)
        settled = (len(moves) and moves[0] < self.STILL) or step.loss_left < self.LEFT
        turning = cosine < expected - self.TURN and not settled
        carried = step.value("grad/carried") == 1  # then sums that were never zeroed swing, not the batch
        swinging = is_high and not carried and (swing > self.SWING or loss_swing > self.LOSS_SWING)
        self.lasted = self.lasted + self.every if turning or swinging else 0
        if self.lasted < self.PATIENCE:
            return None
        seen = self._seen(step) | {"cosine": cosine, "swing": swing, "loss_swing": loss_swing}
        what = f"The recorded loss scatters by {percent(loss_swing, 2)} of its mean"
        if turning and cosine < 0:
            what = f"Updates reverse direction: the mean cosine between consecutive updates is {cosine:.2g}"
        elif turning:
            what = f"Updates turn sharply: their mean cosine is {cosine:.2g} (momentum alone gives {expected:.2g})"
        elif swing > self.SWING:
            what = f"The gradient norm swings by a factor of {math.exp(swing):.2g} from one step to the next"
        scale = seen.get("noise_scale", math.nan)
        noise = f"a noise scale of at least {number(scale)} samples" if scale == scale else "the spread of its samples"
        cause = self._cause(step, seen, turning)
        return Observation(
            severity="warning" if turning else "info",
            seen=seen,
            expected={
                "cosine": f"over {expected - self.TURN:.2g}",
                "swing": f"under {self.SWING:g}",
                "loss_swing": f"under {self.LOSS_SWING:g}",
            },
            text={"what": what, "noise": noise},
            since=step.ago(self.lasted // self.every - 1, self.every) - self.every + 1,
            key=cause,
        )

    def _seen(self, step: Step) -> dict[str, Any]:
        noise = step.history["microbatch:noise_scale_low"].last(1)
        noise = noise if len(noise) else step.history["ranks:noise_scale_low"].last(1)
        size, lr = step.general.batch_size or math.nan, step.value("lr")
        scale = float(noise[0]) if len(noise) else math.nan
        proposed = scale if scale > 2 * size else 8 * size
        seen = {"lr": lr, "lr_proposed": lr / 2, "batch": size, "batch_proposed": proposed}
        return seen | ({"noise_scale": scale} if scale == scale else {})

    def _cause(self, step: Step, seen: dict[str, Any], turning: bool) -> str:
        gsnr = step.history["adam:gsnr"].last(1)
        if step.lr_increase(100) > 1.5:
            return "edge_of_stability"
        if math.isfinite(seen.get("noise_scale", math.nan) * seen["batch"]):
            return "batch_too_small" if seen["noise_scale"] > seen["batch"] else "edge_of_stability"
        if turning or not len(gsnr):
            return "edge_of_stability" if turning else "batch_too_small"
        return "batch_too_small" if gsnr[0] < 0.2 else "edge_of_stability"


@register
@dataclass
class UnstableNorm(Rule):
    """The norm of a tensor varies by more than its own size, step after step."""

    id = "unstable_norm"
    family = "gradients"
    is_symptom = True
    needs = ("tensors:grad/norm",)
    reads = "tensors"
    every = 10
    judges_after = 60
    closes_after = 200
    follows = ("stale_gradients", "lr_too_high")
    message = Message(
        name="Unstable norm",
        pattern=(
            "The gradient norm of a tensor varies by more than its mean from one step to the next, over many steps."
        ),
        title="The gradient norm of {where} varies by {cv}× its mean",
        causes={
            "noise": "Few samples reach {first}: a small batch, or rows that are rarely used",
            "sharp": "The learning rate is near the stability limit, so small changes have large effects",
        },
        fixes={
            "clip": "Clip gradients to a norm of {max_norm}, so that single steps do not dominate",
            **CLIPPED_ALREADY,
            "batch": "Use a larger batch, or accumulate micro-batches",
            "lr": "Give {first} a smaller learning rate",
        },
        passed="norms vary by less than their mean",
    )

    WINDOW = 50  # steps that the moving average covers
    PATIENCE = 20  # steps in a row
    HIGH = 0.1  # reported while the loss is above this share of its start: near zero, norms vary by nature

    cv: float = 1.0
    """Standard deviation of the norm over its mean, from one step to the next: a falling norm is stable."""

    last: Floats = field(default_factory=empty, init=False)
    """The logarithm of the last norm of each tensor; NaN if it had none."""
    change: Floats = field(default_factory=empty, init=False)
    """Moving average of its change per step."""
    count: Floats = field(default_factory=empty, init=False)
    high_for: Floats = field(default_factory=empty, init=False)

    def learn(self, step: Step) -> None:
        norms = step.tensors("grad/norm")
        if norms is None:
            return
        self.last = np.append(self.last, np.full(max(0, len(norms) - len(self.last)), np.nan))
        self.change, self.count, self.high_for = (
            resized(kept, len(norms)) for kept in (self.change, self.count, self.high_for)
        )
        logs = np.log(np.where((norms > 0) & (norms < math.inf), norms, np.nan))
        change = np.abs(logs - self.last)
        self.last = np.where(np.isnan(logs), self.last, logs)
        known = np.isfinite(change)
        self.count += known
        # A spike is one change up and one down: it must not count for many.
        least = np.minimum(change, 3 * self.change + 1)
        rate = 1 / np.minimum(np.maximum(self.count, 1), self.WINDOW)
        self.change = np.where(known, self.change + rate * (least - self.change), self.change)

    def check(self, step: Step) -> Observation | None:
        if step.tensors("grad/norm") is None:
            return None
        spread = MEAN_ABS_TO_STD / math.sqrt(2) * self.change
        variation = np.sqrt(np.expm1(np.minimum(spread**2, 50.0)))
        unstable = (variation > self.cv) & (self.count >= self.WINDOW) & ~step.negligible
        self.high_for = np.where(unstable, self.high_for + self.every, 0.0)
        chosen = np.flatnonzero(self.high_for >= self.PATIENCE)
        if not len(chosen):
            return None
        if step.history["loss"].median(20) < self.HIGH * step.first_loss:
            return None
        chosen = chosen[np.argsort(-variation[chosen])]
        seen = {"cv": float(variation[chosen[0]]), "tensors": len(chosen), "of": len(variation), "lr": step.value("lr")}
        clips, fixes = clipping_fix(step)
        return Observation(
            severity="info",
            seen=seen | {"max_norm": proposed_limit(step)} | clips,
            fixes=fixes,
            expected={"cv": f"under {self.cv:g}"},
            tensors=step.names(chosen[:MAX_NAMED]),
            since=step.ago(int(self.high_for[chosen[0]]) // self.every - 1, self.every) - self.every + 1,
        )
