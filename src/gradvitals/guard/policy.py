"""What a Guard may do and when: the settings of each response, and the policy that picks one for a bad step.

Everything here is plain arithmetic on numbers that earlier steps produced: no tensors, no clock, no files.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from gradvitals.diagnose.baseline import MEAN_ABS_TO_STD, SMALLEST_SPREAD
from gradvitals.diagnose.rule import RULES
from gradvitals.errors import ConfigError

Mode = Literal["on", "off", "dry_run"]
MODES: tuple[str, ...] = get_args(Mode)

BUDGET_WINDOW = 1000
"""A budget limits how often a response acts within this many steps."""

Trouble = Literal["", "nonfinite", "norm", "loss"]

FINDING_OF: Mapping[str, str] = {"nonfinite": "nonfinite", "norm": "explosion", "loss": "loss_spike"}
"""The finding id that an action records for each kind of trouble."""

LARGEST_NORM = float(np.finfo(np.float32).max)
"""A norm above this is not finite."""


# -- settings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Response:
    """Settings that every response has. A response is on, off, or a dry run, which only records what it would do."""

    kind: ClassVar[str]
    mode: Mode | None = None
    """None: follow the Guard's own mode."""
    cooldown: int = 0
    """Steps to wait after it acted before it may act again."""
    budget: int | None = None
    """How often it may act within 1,000 steps; None for no limit."""
    on: tuple[str, ...] = ()
    """Ids of findings that trigger it at once, without the responses before it. Clip and Skip take none: they answer
    single steps."""

    def __post_init__(self) -> None:
        self._expect(self.mode in (None, *MODES), "mode", "one of " + ", ".join(map(repr, MODES)))
        self._expect_count(0, "cooldown")
        if self.budget is not None:
            self._expect_count(0, "budget", "how often it may act within 1,000 steps, 0 or more, or None for no limit")
        listed = isinstance(self.on, tuple) and all(isinstance(name, str) for name in self.on)
        unknown = [name for name in self.on if name not in RULES] if listed else []
        note = f"; unknown: {', '.join(unknown)}" if unknown else ""
        self._expect(listed and not unknown, "on", f"a tuple of finding ids, such as ('loss_rising',){note}")

    def _expect(self, fine: bool, name: str, expected: str) -> None:
        if not fine:
            raise ConfigError(f"{name} of {type(self).__name__} is {getattr(self, name)!r}; expected {expected}")

    def _expect_count(self, least: int, name: str, expected: str = "") -> None:
        value = getattr(self, name)
        fine = isinstance(value, int) and not isinstance(value, bool) and value >= least
        self._expect(fine, name, expected or f"a whole number, {least} or more")

    def _expect_between(self, low: float, high: float, *names: str, closed: bool = False) -> None:
        for name in names:
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            fine = number and (low <= value <= high if closed else low < value < high)
            ends = "a positive number" if high == math.inf and low == 0 else f"a number from {low:g} to {high:g}"
            self._expect(fine, name, ends if closed or high == math.inf else f"{ends}, without the ends")

    def _expect_no_findings(self) -> None:
        self._expect(not self.on, "on", "nothing: this response answers single steps, by their norm or loss")


@dataclass(frozen=True, kw_only=True)
class Clip(Response):
    """Scale down a gradient that is larger than the run's recent gradients suggest."""

    kind = "clip"
    method: Literal["outlier", "quantile", "zscore", "tensor"] = "outlier"
    """How to set the limit. ``outlier``: clip only far outliers. ``quantile``: a quantile of recent norms. ``zscore``:
    as in ZClip. ``tensor``: each tensor by its own recent norms, as in AdaGC. All but ``outlier`` also clip ordinary
    steps now and then."""
    ratio: float = 3.0
    """outlier: limit as a multiple of the baseline norm; `z` must be exceeded too."""
    z: float = 8.0
    """outlier: standard deviations of the log norm above the baseline."""
    quantile: float = 0.95
    """quantile: share of the last `window` healthy norms that stay untouched."""
    window: int = 200
    """quantile: number of norms to keep."""
    z_threshold: float = 2.5
    """zscore: standard deviations above the mean norm."""
    tensor_ratio: float = 1.05
    """tensor: limit as a multiple of the moving average of the tensor's norm."""
    first_steps: int = 25
    """Steps before it clips anything."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect_no_findings()
        methods = ("outlier", "quantile", "zscore", "tensor")
        self._expect(self.method in methods, "method", "one of " + ", ".join(map(repr, methods)))
        self._expect_between(0, math.inf, "ratio", "z", "z_threshold", "tensor_ratio")
        self._expect_between(0, 1, "quantile")
        self._expect_count(20, "window")
        self._expect_count(2, "first_steps")


@dataclass(frozen=True, kw_only=True)
class Skip(Response):
    """Skip a step whose gradient or loss is an outlier. A step that is not finite is always skipped."""

    kind = "skip"
    budget: int | None = 50
    ratio: float = 5.0
    """Limit as a multiple of the baseline gradient norm; `z` must be exceeded too."""
    z: float = 12.0
    """Standard deviations of the log norm above the baseline."""
    loss_z: float = 6.0
    """Standard deviations above the baseline loss, for the loss and for its logarithm."""
    loss_rise: float = 0.2
    """Least rise above the baseline loss, as a share of the first loss."""
    max_streak: int = 3
    """Steps to skip in a row. If the next one is bad as well, the batch is not the cause, and the policy escalates."""
    first_steps: int = 25
    """Steps before it skips anything but NaN and Inf."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect_no_findings()
        self._expect_between(0, math.inf, "ratio", "z", "loss_z", "loss_rise")
        self._expect_count(1, "max_streak")
        self._expect_count(2, "first_steps")


@dataclass(frozen=True, kw_only=True)
class ResetMomentum(Response):
    """Clear the optimizer's moments and step counts, then warm the learning rate up again."""

    kind = "reset_momentum"
    cooldown: int = 100
    budget: int | None = 3
    warmup: int = 150
    """Steps of cosine warmup afterwards, as in SPAM."""
    warmup_from: float = 0.01
    """Share of the learning rate that the warmup starts from."""
    whole: bool = True
    """Clear all moments. If False and a finding in `on` triggered it, clear only those of the finding's tensors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect_count(0, "warmup")
        self._expect_between(0, 1, "warmup_from", closed=True)
        self._expect(isinstance(self.whole, bool), "whole", "True or False")


@dataclass(frozen=True, kw_only=True)
class CutLR(Response):
    """Lower the learning rate for a while, below what the schedule sets."""

    kind = "cut_lr"
    cooldown: int = 100
    budget: int | None = 3
    factor: float = 0.5
    """Multiplies the schedule's learning rate."""
    hold: int = 100
    """Steps to keep the lower rate."""
    restore: int = 100
    """Steps of the linear return to the schedule's rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect_between(0, 1, "factor")
        self._expect_count(0, "hold")
        self._expect_count(0, "restore")


@dataclass(frozen=True, kw_only=True)
class RollBack(Response):
    """Restore the last healthy snapshot and continue from there with the next data."""

    kind = "roll_back"
    cooldown: int = 20
    budget: int | None = 3
    on: tuple[str, ...] = ("loss_rising", "update_spike")
    ratio: float | None = None
    """Roll back at once if the norm exceeds this multiple of its baseline; None for never."""
    every: int = 100
    """Steps between snapshots."""
    settle: int = 50
    """Steps without trouble after which a snapshot counts as healthy."""
    keep: int = 2
    """Healthy snapshots to keep."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio is not None:
            self._expect_between(1, math.inf, "ratio")
        self._expect_count(1, "every")
        self._expect_count(0, "settle")
        self._expect_count(1, "keep")


RESPONSES: dict[str, type[Response]] = {
    "clip": Clip,
    "skip": Skip,
    "reset": ResetMomentum,
    "lr": CutLR,
    "rollback": RollBack,
}
"""By the name of the Guard's argument, in the order of escalation."""


def response_from(name: str, given: Any, mode: Mode) -> Response:
    """The response that an argument of the Guard means: its settings, its mode alone, or None for `mode`."""
    kind = RESPONSES[name]
    if given is None:
        return kind(mode=mode)
    if isinstance(given, str):
        return kind(mode=given)  # type: ignore[arg-type]
    if isinstance(given, kind):
        return given if given.mode is not None else replace(given, mode=mode)
    expected = f"{', '.join(map(repr, MODES))} or a gradvitals.guard.{kind.__name__}"
    raise ConfigError(f"{name} is {given!r}; expected {expected}")


# -- what is normal for a run --------------------------------------------------------------------------------------


@dataclass
class RunningLevel:
    """Moving level and spread of a number. Outliers are excluded, unless they persist.

    `gradvitals.diagnose.baseline.Baseline` does the same for all tensors at once. This one handles a single number at
    every step, before the optimizer may step, so it avoids arrays.

    Example:
        >>> level = RunningLevel()
        >>> for value in (1.0, 1.1, 0.9, 1.0):
        ...     level.learn(value)
        >>> round(level.level, 2), level.z(1.5) > 3
        (1.0, True)
    """

    window: int = 50
    """Values that the moving average of the spread covers."""
    level_window: int = 20
    """Values that the moving average of the level covers."""
    outlier_z: float = 5.0
    patience: int = 40
    """Outliers in a row after which they are the new level: more than the policy takes to respond to them."""
    count: float = 0.0
    level: float = 0.0
    spread: float = 0.0
    """Mean absolute deviation from the level."""
    outside: int = 0
    """Outliers in a row."""

    def std(self) -> float:
        """The standard deviation, wider for a short history."""
        widened = 1 + 3 / max(self.count, 1.0)
        return max(self.spread, SMALLEST_SPREAD) * MEAN_ABS_TO_STD * widened

    def z(self, value: float) -> float:
        """Standard deviations from the level; NaN before there is one."""
        return (value - self.level) / self.std() if self.count >= 2 else math.nan

    def learn(self, value: float) -> None:
        """Add a value, unless it is an outlier or not finite."""
        if not math.isfinite(value):
            return
        if self.count >= 5 and abs(self.z(value)) > self.outlier_z:
            self.outside += 1
            if self.outside <= self.patience:
                return
            self.count = min(self.count, 1.0)
        else:
            self.outside = 0
        self.count += 1
        away = value - self.level
        if self.count > 1:
            self.spread += (abs(away) - self.spread) / min(self.count, self.window)
        self.level += away / min(self.count, self.level_window)


@dataclass
class StepBaseline:
    """Baseline of the norms and losses of one optimizer's steps."""

    window: int = 200
    """Healthy norms to keep."""
    norm: RunningLevel = field(default_factory=RunningLevel)
    """Of the log norm."""
    loss: RunningLevel = field(default_factory=RunningLevel)
    """Of the loss, in units of the first losses."""
    log_loss: RunningLevel = field(default_factory=RunningLevel)
    """Of the log loss, while it is positive."""
    first_losses: list[float] = field(default_factory=list)
    """The first five, whose mean size is the unit of the loss."""
    norms: deque[float] = field(default_factory=deque)

    def learn(self, norm: float, loss: float) -> None:
        """Add a step."""
        if 0 < norm < math.inf:
            before = self.norm.count
            self.norm.learn(math.log(norm))
            if self.norm.count != before:
                self.norms.append(norm)
                if len(self.norms) > self.window:
                    self.norms.popleft()
        if math.isfinite(loss):
            if len(self.first_losses) < 5:
                self.first_losses.append(loss)
            self.loss.learn(loss / self.unit)
            if loss > 0:
                self.log_loss.learn(math.log(loss))

    @property
    def unit(self) -> float:
        """The mean size of the first losses."""
        sizes = [abs(loss) for loss in self.first_losses]
        return sum(sizes) / len(sizes) if any(sizes) else 1.0

    @property
    def typical_norm(self) -> float:
        """The level of the norm; NaN before there is one."""
        return math.exp(self.norm.level) if self.norm.count else math.nan

    def norm_limit(self, ratio: float, z: float, first_steps: int) -> float:
        """The norm both `ratio` times and `z` deviations above the baseline; inf before `first_steps`."""
        if self.norm.count < first_steps:
            return math.inf
        return math.exp(min(700.0, self.norm.level + max(math.log(ratio), z * self.norm.std())))

    def loss_limit(self, z: float, rise: float, first_steps: int) -> float:
        """The loss `z` deviations above the baseline, also in its logarithm, and at least `rise` first losses."""
        if self.loss.count < first_steps:
            return math.inf
        limit = self.unit * (self.loss.level + max(rise, z * self.loss.std()))
        if self.log_loss.count >= first_steps:
            limit = max(limit, math.exp(min(700.0, self.log_loss.level + z * self.log_loss.std())))
        return limit

    def limits(self, skip: Skip) -> tuple[float, float]:
        """The norm and the loss above which a step is bad."""
        norm = self.norm_limit(skip.ratio, skip.z, skip.first_steps)
        return norm, self.loss_limit(skip.loss_z, skip.loss_rise, skip.first_steps)

    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation of the kept norms."""
        mean = sum(self.norms) / len(self.norms)
        return mean, math.sqrt(sum((norm - mean) ** 2 for norm in self.norms) / len(self.norms))

    def quantile(self, share: float) -> float:
        """The norm that this share of the kept norms does not exceed."""
        ordered = sorted(self.norms)
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {**asdict(self), "norms": list(self.norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        for name in ("norm", "loss", "log_loss"):
            setattr(self, name, RunningLevel(**state[name]))
        self.first_losses, self.norms = list(state["first_losses"]), deque(state["norms"])


def classify(norm: float, loss: float, limits: tuple[float, float]) -> tuple[Trouble, str]:
    """What is wrong with a step, if anything, and a sentence about it."""
    norm_limit, loss_limit = limits
    if not norm <= LARGEST_NORM:
        return "nonfinite", f"the gradient norm is {norm}"
    if norm > norm_limit:
        return "norm", f"the gradient norm is {norm:.3g}, over the limit of {norm_limit:.3g}"
    if loss > loss_limit:
        return "loss", f"the loss is {loss:.4g}, over the limit of {loss_limit:.4g}"
    return "", ""


# -- which response to take ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one step showed."""

    step: int
    now: int | None = None
    """The step in progress, if `step` is judged later than it ran."""
    trouble: Trouble = ""
    words: str = ""
    """The observed number and its limit, for the record."""
    far: bool = False
    """Whether the norm exceeds `RollBack.ratio`."""
    findings: tuple[str, ...] = ()
    """Ids of findings that opened or got worse."""
    can_roll_back: bool = False
    """Whether there is a healthy snapshot."""
    persistent: bool = False
    """Whether a GradScaler has skipped many steps in a row, this one included."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A response to take; with ``taken=False`` one that a dry run, cooldown or budget withholds."""

    kind: str
    taken: bool
    finding: str
    reason: str


class ActionBudget:
    """How often a response may still act."""

    def __init__(self, response: Response) -> None:
        self.response = response
        self.spent: list[int] = []
        """Steps at which it acted, within the last 1,000."""

    def refusal(self, step: int) -> str:
        """Why it may not act at this step; empty if it may."""
        self.spent = [then for then in self.spent if step - then < BUDGET_WINDOW]
        if self.spent and step - self.spent[-1] < self.response.cooldown:
            return f"its cooldown of {self.response.cooldown} steps is not over"
        if self.response.budget is not None and len(self.spent) >= self.response.budget:
            return f"its budget of {self.response.budget} in {BUDGET_WINDOW:,} steps is spent"
        return ""


@dataclass
class EscalationPolicy:
    """Picks the response to each bad step.

    One bad step is skipped. After `Skip.max_streak` in a row, or `crowd` among the last `crowd_window` steps, the batch
    is not the cause, and the policy tries each stronger response in turn: reset the momentum, cut the learning rate,
    roll back. Each gets `patience` further bad steps to help before the next. After `calm_after` good steps in a row it
    starts over.

    A step may have several pieces of evidence, one per optimizer.
    """

    skip: Skip
    stronger: Sequence[Response]
    """The responses after skipping, in the order of escalation."""
    patience: int = 5
    calm_after: int = 50
    crowd: int = 8
    crowd_window: int = 20
    streak: int = field(default=0, init=False)
    """Bad steps in a row."""
    calm: int = field(default=0, init=False)
    """Good steps in a row."""
    waiting: int = field(default=0, init=False)
    """Bad steps that the last stronger response still has to help."""
    used: set[str] = field(default_factory=set, init=False)
    """Stronger responses that acted since the run was calm, or since all of them had."""
    refused: set[str] = field(default_factory=set, init=False)
    """Responses whose refusal was recorded since the run was calm."""
    recent: deque[int] = field(default_factory=deque, init=False)
    """Bad steps within `crowd_window`."""
    step: int = field(default=-1, init=False)
    """The last step it judged."""
    bad: bool = field(default=False, init=False)
    """Whether that step was bad."""
    acted: int = field(default=-1, init=False)
    """The step at which a stronger response last acted. Evidence from before it calls for no other."""

    def __post_init__(self) -> None:
        self.skip = replace(self.skip, mode=self.skip.mode or "on")
        self.stronger = [replace(response, mode=response.mode or "on") for response in self.stronger]
        self.budgets = {response.kind: ActionBudget(response) for response in (self.skip, *self.stronger)}

    def judge(self, evidence: Evidence) -> list[Decision]:
        """The responses to this evidence."""
        if evidence.step != self.step:
            if not self.bad and self.step >= 0:
                self.streak, self.calm = 0, self.calm + 1
                if self.calm >= self.calm_after:
                    self.waiting, self.used, self.refused = 0, set(), set()
            self.step, self.bad = evidence.step, False
        decisions = self._triggered(evidence)
        if evidence.trouble:
            decisions += self._respond_to_trouble(evidence, answered=any(one.taken for one in decisions))
        if rolls_back(decisions):
            self.streak, self.waiting, self.bad = 0, 0, False
            self.used.clear()
            self.recent.clear()
        return decisions

    def _triggered(self, evidence: Evidence) -> list[Decision]:
        """Responses that a finding or a very large norm triggers at once."""
        decisions: list[Decision] = []
        for response in self.stronger:
            named = [finding for finding in evidence.findings if finding in response.on]
            if named or (evidence.far and response.kind == RollBack.kind):
                decisions += self._decide(response, evidence, finding=named[0] if named else "explosion")
        return decisions

    def _respond_to_trouble(self, evidence: Evidence, *, answered: bool) -> list[Decision]:
        late = evidence.step < self.acted
        if not self.bad and not late:
            self.bad = True
            self.streak, self.calm = self.streak + 1, 0
            self.recent.append(evidence.step)
            while self.recent[0] <= evidence.step - self.crowd_window:
                self.recent.popleft()
            self.waiting -= 1
        decisions: list[Decision] = []
        persistent = self.streak > self.skip.max_streak or len(self.recent) >= self.crowd or evidence.persistent
        if persistent and not (answered or late) and self.waiting <= 0:
            decisions += self._escalate(evidence)
        if rolls_back(decisions) or evidence.persistent:
            return decisions
        # A step that is not finite would ruin the weights: it is skipped however often that happens.
        always = evidence.trouble == "nonfinite" and self.skip.mode == "on"
        if always or not (persistent or answered):
            decisions += self._decide(self.skip, evidence, limited=evidence.trouble != "nonfinite")
        return decisions

    def _escalate(self, evidence: Evidence) -> list[Decision]:
        """The first response that has not acted yet and may; if all have acted, start over with the first."""
        self.waiting = self.patience
        # Weights that are not finite can only be rolled back.
        able = [one for one in self.stronger if evidence.trouble != "nonfinite" or one.kind == RollBack.kind]
        able = [one for one in able if one.mode != "off"]
        if all(one.kind in self.used for one in able):
            if all(one.mode == "dry_run" for one in able):
                return []  # a dry run says what would happen first, not what would follow
            self.used.clear()
        decisions: list[Decision] = []
        for response in able:
            if response.kind in self.used:
                continue
            decisions += (decided := self._decide(response, evidence))
            if decided and (decided[0].taken or response.mode == "dry_run"):
                self.used.add(response.kind)
                self.acted = evidence.step if evidence.now is None else evidence.now
                break
        return decisions

    def _decide(
        self, response: Response, evidence: Evidence, *, finding: str | None = None, limited: bool = True
    ) -> list[Decision]:
        if response.mode == "off":
            return []
        budget = self.budgets[response.kind]
        refusal = budget.refusal(evidence.step)
        if not limited:
            refusal = ""
        if response.kind == RollBack.kind and response.mode == "on" and not evidence.can_roll_back:
            refusal = "there is no healthy snapshot yet"
        finding = finding or FINDING_OF[evidence.trouble]
        if refusal:
            known = response.kind in self.refused or response.mode == "dry_run"
            self.refused.add(response.kind)
            return [] if known else [Decision(kind=response.kind, taken=False, finding=finding, reason=refusal)]
        if not budget.spent or budget.spent[-1] != evidence.step:
            budget.spent.append(evidence.step)
        reason = evidence.words if response.mode == "on" else f"dry run; {evidence.words}"
        return [Decision(kind=response.kind, taken=response.mode == "on", finding=finding, reason=reason)]

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, as plain values."""
        own = {name: getattr(self, name) for name in ("streak", "calm", "waiting", "step", "bad", "acted")}
        spent = {kind: list(budget.spent) for kind, budget in self.budgets.items()}
        sets = {"used": sorted(self.used), "refused": sorted(self.refused)}
        return {**own, **sets, "recent": list(self.recent), "spent": spent}

    def load_state_dict(self, state: Mapping[str, Any], shift: int = 0) -> None:
        """Continue from a saved state; `shift` is added to its step numbers."""
        for name in ("streak", "calm", "waiting", "bad"):
            setattr(self, name, type(getattr(self, name))(state[name]))
        self.step, self.acted = int(state["step"]) + shift, int(state["acted"]) + shift
        self.recent = deque(step + shift for step in state["recent"])
        self.used, self.refused = set(state["used"]), set(state["refused"])
        for kind, spent in state["spent"].items():
            if kind in self.budgets:
                self.budgets[kind].spent = [step + shift for step in spent]


def rolls_back(decisions: Sequence[Decision]) -> bool:
    """Whether one of the decisions is to roll back now."""
    return any(one.kind == RollBack.kind and one.taken for one in decisions)
