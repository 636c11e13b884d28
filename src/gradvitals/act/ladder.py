"""The ladder: which rung answers the trouble of a step. Pure decisions, from what the steps showed and nothing else.

One bad step is left out. Where `max_streak` steps in a row were, or `crowd` of the last `crowd_window`, it is not the
batch that is bad, and each rung above is tried in turn: forget the momentum, lower the learning rate, roll back. Every
rung gets `patience` further bad steps to help before the next. A run that has been calm for `calm_after` steps begins
at the bottom again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gradvitals.act.rungs import PER_STEPS, RollBack, Rung, Skip

Trouble = Literal["", "nonfinite", "norm", "loss"]

FINDING_OF: Mapping[str, str] = {"nonfinite": "nonfinite", "norm": "explosion", "loss": "loss_spike"}
"""The finding that each kind of trouble would be."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one step showed."""

    step: int
    now: int | None = None
    """The step in progress when it is judged, where that is a later one."""
    trouble: Trouble = ""
    words: str = ""
    """What was seen beside what was expected, for the record."""
    far: bool = False
    """Whether the norm is so large that the user wants to roll back at once."""
    findings: tuple[str, ...] = ()
    """Ids of findings that opened or got worse since the step before."""
    can_roll_back: bool = False
    """Whether there is a healthy snapshot."""
    persistent: bool = False
    """Whether it is known to go on, as with a GradScaler that has refused many steps; it has left this one out, too."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A rung answers, or would in a dry run, or would but may not."""

    kind: str
    taken: bool
    finding: str
    reason: str


class Purse:
    """What a rung may still spend."""

    def __init__(self, rung: Rung) -> None:
        self.rung = rung
        self.spent: list[int] = []
        """Steps at which it acted, those of the last 1,000."""

    def refusal(self, step: int) -> str:
        """Why it may not act at this step; empty where it may."""
        self.spent = [then for then in self.spent if step - then < PER_STEPS]
        if self.spent and step - self.spent[-1] < self.rung.cooldown:
            return f"its cooldown of {self.rung.cooldown} steps is not over"
        if self.rung.budget is not None and len(self.spent) >= self.rung.budget:
            return f"its budget of {self.rung.budget} in {PER_STEPS:,} steps is spent"
        return ""


@dataclass
class Ladder:
    """Decides about one step after the other. A step may have several pieces of evidence, one for each optimizer."""

    skip: Skip
    higher: Sequence[Rung]
    """The rungs above it, from the bottom up."""
    patience: int = 5
    calm_after: int = 50
    crowd: int = 8
    crowd_window: int = 20
    streak: int = field(default=0, init=False)
    """Bad steps in a row."""
    calm: int = field(default=0, init=False)
    """Good steps in a row."""
    waiting: int = field(default=0, init=False)
    """Bad steps that the last rung above skipping still has to help."""
    used: set[str] = field(default_factory=set, init=False)
    """Rungs above skipping that have acted since the run was calm, or since all of them had."""
    refused: set[str] = field(default_factory=set, init=False)
    """Rungs whose refusal has been recorded since the run was calm."""
    recent: deque[int] = field(default_factory=deque, init=False)
    """Bad steps among the last ones."""
    step: int = field(default=-1, init=False)
    """The last step it was shown."""
    bad: bool = field(default=False, init=False)
    """Whether that one was bad."""
    acted: int = field(default=-1, init=False)
    """The step at which a rung above skipping last acted. What steps before it showed calls for no other."""

    def __post_init__(self) -> None:
        self.skip = replace(self.skip, mode=self.skip.mode or "on")
        self.higher = [replace(rung, mode=rung.mode or "on") for rung in self.higher]
        self.purses = {rung.kind: Purse(rung) for rung in (self.skip, *self.higher)}

    def judge(self, evidence: Evidence) -> list[Call]:
        """Who answers this step."""
        if evidence.step != self.step:
            self._begin(evidence.step)
        calls = self._called_for(evidence)
        if evidence.trouble:
            calls += self._trouble(evidence, answered=any(call.taken for call in calls))
        if any(call.kind == RollBack.kind and call.taken for call in calls):
            self._start_over()
        return calls

    def _begin(self, step: int) -> None:
        """The step before is over: was it a good one?"""
        if not self.bad and self.step >= 0:
            self.streak, self.calm = 0, self.calm + 1
            if self.calm >= self.calm_after:
                self.waiting, self.used, self.refused = 0, set(), set()
        self.step, self.bad = step, False

    def _trouble(self, evidence: Evidence, *, answered: bool) -> list[Call]:
        late = evidence.step < self.acted
        if not self.bad and not late:
            self.bad = True
            self.streak, self.calm = self.streak + 1, 0
            self.recent.append(evidence.step)
            while self.recent[0] <= evidence.step - self.crowd_window:
                self.recent.popleft()
            self.waiting -= 1
        calls: list[Call] = []
        persistent = self.streak > self.skip.max_streak or len(self.recent) >= self.crowd or evidence.persistent
        if persistent and not (answered or late) and self.waiting <= 0:
            calls += self._escalate(evidence)
        if any(call.kind == RollBack.kind and call.taken for call in calls):
            return calls
        if evidence.persistent:
            return calls
        # What is not finite would ruin the weights: it is left out however often it comes.
        forever = evidence.trouble == "nonfinite" and self.skip.mode == "on"
        if forever or not (persistent or answered):
            calls += self._answer(self.skip, evidence, bounded=evidence.trouble != "nonfinite")
        return calls

    def _called_for(self, evidence: Evidence) -> list[Call]:
        """Rungs that a finding calls for, or a norm that is so large that the user wants to roll back."""
        calls: list[Call] = []
        for rung in self.higher:
            named = [finding for finding in evidence.findings if finding in rung.on]
            if named or (evidence.far and rung.kind == RollBack.kind):
                calls += self._answer(rung, evidence, finding=named[0] if named else "explosion")
        return calls

    def _escalate(self, evidence: Evidence) -> list[Call]:
        """The lowest rung that has not acted yet and may; where all have acted, they begin anew."""
        self.waiting = self.patience
        # Nothing but going back helps weights that are not finite.
        able = [rung for rung in self.higher if evidence.trouble != "nonfinite" or rung.kind == RollBack.kind]
        able = [rung for rung in able if rung.mode != "off"]
        if all(rung.kind in self.used for rung in able):
            if all(rung.mode == "dry_run" for rung in able):
                return []  # what would have followed is not what follows
            self.used.clear()
        calls: list[Call] = []
        for rung in able:
            if rung.kind in self.used:
                continue
            calls += (answer := self._answer(rung, evidence))
            if answer and (answer[0].taken or rung.mode == "dry_run"):
                self.used.add(rung.kind)
                self.acted = evidence.step if evidence.now is None else evidence.now
                break
        return calls

    def _answer(
        self, rung: Rung, evidence: Evidence, *, finding: str | None = None, bounded: bool = True
    ) -> list[Call]:
        if rung.mode == "off":
            return []
        purse = self.purses[rung.kind]
        refusal = purse.refusal(evidence.step)
        if not bounded:
            refusal = ""
        if rung.kind == RollBack.kind and rung.mode == "on" and not evidence.can_roll_back:
            refusal = "there is no healthy snapshot yet"
        finding = finding or FINDING_OF[evidence.trouble]
        if refusal:
            told = rung.kind in self.refused or rung.mode == "dry_run"
            self.refused.add(rung.kind)
            return [] if told else [Call(kind=rung.kind, taken=False, finding=finding, reason=refusal)]
        if not purse.spent or purse.spent[-1] != evidence.step:
            purse.spent.append(evidence.step)
        reason = evidence.words if rung.mode == "on" else f"dry run; {evidence.words}"
        return [Call(kind=rung.kind, taken=rung.mode == "on", finding=finding, reason=reason)]

    def _start_over(self) -> None:
        """The state is that of a healthy step again."""
        self.streak, self.waiting, self.bad = 0, 0, False
        self.used.clear()
        self.recent.clear()

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, as plain values."""
        own = {name: getattr(self, name) for name in ("streak", "calm", "waiting", "step", "bad", "acted")}
        spent = {kind: list(purse.spent) for kind, purse in self.purses.items()}
        sets = {"used": sorted(self.used), "refused": sorted(self.refused)}
        return {**own, **sets, "recent": list(self.recent), "spent": spent}

    def load_state_dict(self, state: Mapping[str, Any], shift: int = 0) -> None:
        """Go on from a saved state; `shift` is added to the numbers of its steps."""
        for name in ("streak", "calm", "waiting", "bad"):
            setattr(self, name, type(getattr(self, name))(state[name]))
        self.step, self.acted = int(state["step"]) + shift, int(state["acted"]) + shift
        self.recent = deque(step + shift for step in state["recent"])
        self.used, self.refused = set(state["used"]), set(state["refused"])
        for kind, spent in state["spent"].items():
            if kind in self.purses:
                self.purses[kind].spent = [step + shift for step in spent]
