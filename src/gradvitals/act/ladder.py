"""The ladder: which rung answers the trouble of a step. Pure decisions, from what the steps showed and nothing else.

One bad step is left out. Where `max_streak` steps in a row were, or `crowd` of the last `crowd_window`, it is not the
batch that is bad, and each rung above is tried in turn: forget the momentum, lower the learning rate, roll back. Every
rung gets `patience` further bad steps to help before the next. A run that has been calm for `calm_after` steps begins
at the bottom again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gradvitals.act.rungs import PER_STEPS, RollBack, Rung, Skip

Trouble = Literal["", "nonfinite", "norm", "loss"]

FINDING_OF: Mapping[str, str] = {"nonfinite": "nonfinite", "norm": "explosion", "loss": "loss_spike"}
"""The finding that each kind of trouble would be."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one step showed."""

    step: int
    trouble: Trouble = ""
    words: str = ""
    """What was seen beside what was expected, for the record."""
    far: bool = False
    """Whether the norm is so large that the user wants to roll back at once."""
    findings: tuple[str, ...] = ()
    """Ids of findings that opened or got worse since the step before."""
    can_roll_back: bool = False
    """Whether there is a healthy snapshot."""


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
    """Decides about one step after the other."""

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
    tried: int = field(default=0, init=False)
    """Rungs above skipping that were tried since the run was calm."""
    waiting: int = field(default=0, init=False)
    """Bad steps that the last of them still has to help."""
    recent: deque[int] = field(default_factory=deque, init=False)
    """Bad steps among the last ones."""
    refused: set[str] = field(default_factory=set, init=False)
    """Rungs whose refusal has been recorded since the run was calm."""

    def __post_init__(self) -> None:
        self.purses = {rung.kind: Purse(rung) for rung in (self.skip, *self.higher)}

    def judge(self, evidence: Evidence) -> list[Call]:
        """Who answers this step."""
        calls = self._called_for(evidence)
        if evidence.trouble:
            calls = self._trouble(evidence, calls)
        else:
            self.streak, self.calm = 0, self.calm + 1
            if self.calm >= self.calm_after:
                self.tried, self.waiting, self.refused = 0, 0, set()
        if any(call.kind == RollBack.kind and call.taken for call in calls):
            self._start_over()
        return calls

    def _trouble(self, evidence: Evidence, calls: list[Call]) -> list[Call]:
        self.streak, self.calm = self.streak + 1, 0
        self.recent.append(evidence.step)
        while self.recent[0] <= evidence.step - self.crowd_window:
            self.recent.popleft()
        if any(call.taken for call in calls):
            return calls
        persistent = self.streak > self.skip.max_streak or len(self.recent) >= self.crowd
        if persistent:
            self.waiting -= 1
            if self.waiting <= 0:
                calls += self._escalate(evidence)
        # What is not finite would ruin the weights: it is left out however often it comes.
        if not any(call.kind == RollBack.kind and call.taken for call in calls) and (
            not persistent or evidence.trouble == "nonfinite"
        ):
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
        calls: list[Call] = []
        while self.tried < len(self.higher):
            rung = self.higher[self.tried]
            self.tried += 1
            if evidence.trouble == "nonfinite" and rung.kind != RollBack.kind:
                continue  # weights that are not finite stay so
            calls += self._answer(rung, evidence)
            if calls and (calls[-1].taken or rung.mode == "dry_run"):
                self.waiting = self.patience
                break
        return calls

    def _answer(
        self, rung: Rung, evidence: Evidence, *, finding: str | None = None, bounded: bool = True
    ) -> list[Call]:
        if rung.mode == "off":
            return []
        purse = self.purses[rung.kind]
        refusal = purse.refusal(evidence.step) if bounded else ""
        if rung.kind == RollBack.kind and not evidence.can_roll_back:
            refusal = "there is no healthy snapshot yet"
        finding = finding or FINDING_OF[evidence.trouble]
        if refusal:
            told = rung.kind in self.refused
            self.refused.add(rung.kind)
            return [] if told else [Call(kind=rung.kind, taken=False, finding=finding, reason=refusal)]
        purse.spent.append(evidence.step)
        reason = evidence.words if rung.mode == "on" else f"dry run; {evidence.words}"
        return [Call(kind=rung.kind, taken=rung.mode == "on", finding=finding, reason=reason)]

    def _start_over(self) -> None:
        """The state is that of a healthy step again."""
        self.streak, self.waiting, self.tried = 0, 0, 0
        self.recent.clear()

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, as plain values."""
        names = ("streak", "calm", "tried", "waiting")
        spent = {kind: list(purse.spent) for kind, purse in self.purses.items()}
        own: dict[str, Any] = {name: getattr(self, name) for name in names}
        return {**own, "recent": list(self.recent), "refused": sorted(self.refused), "spent": spent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        for name in ("streak", "calm", "tried", "waiting"):
            setattr(self, name, int(state[name]))
        self.recent, self.refused = deque(state["recent"]), set(state["refused"])
        for kind, spent in state["spent"].items():
            if kind in self.purses:
                self.purses[kind].spent = list(spent)
