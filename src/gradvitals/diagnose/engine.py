"""Diagnosis: shows every step to every rule and keeps the findings, one for each pattern while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from gradvitals.diagnose.explain import Words, explain
from gradvitals.diagnose.facts import Facts
from gradvitals.diagnose.history import History, Series
from gradvitals.diagnose.roots import traced
from gradvitals.diagnose.rule import Rule, Sign, build_rules, plain, restored
from gradvitals.diagnose.step import Step
from gradvitals.diagnose.words import WORDS
from gradvitals.types import SEVERITIES, Finding, Layout, Reading

SILENT_LOOKS = 2
"""A rule that is shown a step now and then has to be silent this often before its finding is over."""

RULES_IN_A_BREATH = 4

QUIET_STEPS = 10
"""A pattern that every step can show, and that this many at the end did not, is over when the run is."""


@dataclass
class _Open:
    """A finding that goes on, and when its pattern was last seen."""

    place: int
    """Its place in the list of all findings."""
    last_seen: int
    told: int
    """How long the pattern had lasted when its latest numbers were told."""
    silent: int
    """How often its rule has looked since, and seen nothing."""
    sign: Sign
    """What its words are made of: what was seen when it opened, got worse, or was better understood."""


class Diagnosis:
    """Turns the readings of a run, step by step, into findings. Holds no torch and starts no thread.

    Args:
        facts: What kind of run it is.
        settings: By rule id: False leaves a rule out, a mapping sets its fields.
        rules: The rules themselves, instead of one of each that is registered.
        on_error: Called with the id of a rule and the error it raised; that rule is left out from then on.
        breath: Called now and then while rules look at a step, where others want to go on meanwhile.

    Example:
        >>> diagnosis = Diagnosis(settings={"explosion": {"ratio": 3.0}})
        >>> diagnosis.read([Reading(step=0, time=0.0, values={"loss": float("nan")})])[0].id
        'loss_nonfinite'
    """

    def __init__(
        self,
        *,
        facts: Facts | None = None,
        settings: Mapping[str, Any] | None = None,
        rules: Sequence[Rule] | None = None,
        on_error: Callable[[str, Exception], None] | None = None,
        breath: Callable[[], None] | None = None,
    ) -> None:
        self.facts = facts if facts is not None else Facts()
        self.rules = list(rules) if rules is not None else build_rules(settings or {})
        self.layout = Layout()
        self._frozen: list[int] = []
        self.history = History()
        self.findings: list[Finding] = []
        """All so far; those without a `last_step` go on."""
        self._open: dict[str, _Open] = {}
        self._last = -1
        self._on_error = on_error
        self._breath = breath

    def start_over(self) -> list[Finding]:
        """Training has gone back to an earlier state: what was seen since does not say what is usual there.

        Returns:
            The findings that were open; they are closed.
        """
        closed = [self._close(name) for name in list(self._open)]
        self.rules = [
            type(rule)(**{f.name: getattr(rule, f.name) for f in fields(rule) if f.init})  # type: ignore[arg-type]
            for rule in self.rules
        ]
        self.history = History()
        return closed

    def describe(self, layout: Layout) -> None:
        """What the rows of per-tensor arrays stand for, from here on. Rows are only ever added."""
        if layout is not self.layout:
            self.layout = layout
            self._frozen = [info.index for info in layout.tensors if info.frozen]

    def read(self, readings: Sequence[Reading]) -> list[Finding]:
        """Look at all readings of one step.

        Returns:
            The findings that opened, changed or closed, as they are now.
        """
        if not readings:
            return []
        step = Step(readings=readings, layout=self.layout, facts=self.facts, history=self.history, frozen=self._frozen)
        changed: list[Finding] = []
        seen, is_full, in_turn = self.history.steps_seen, step.is_full, step.in_turn
        # Zero over zero is an answer in a rule's arithmetic: nothing to tell.
        with np.errstate(all="ignore"):
            looked = 0
            for rule in list(self.rules):
                if seen < rule.min_steps or not (rule.every_step or is_full):
                    continue
                if self._breath is not None and looked % RULES_IN_A_BREATH == 0:
                    self._breath()
                looked += 1
                try:
                    sign = None if rule.expects_fall and in_turn else rule.look(step)
                    if sign is not None or rule.id in self._open:
                        changed += self._note(rule, sign, step)
                except Exception as error:
                    self.rules.remove(rule)
                    changed += [self._close(rule.id)] if rule.id in self._open else []
                    if self._on_error is None:
                        raise
                    self._on_error(rule.id, error)
            step.remember()
        self._last = step.number
        if not changed:
            return changed
        return traced(self.findings, changed, {name: entry.last_seen for name, entry in self._open.items()})

    def _note(self, rule: Rule, sign: Sign | None, step: Step) -> list[Finding]:
        entry = self._open.get(rule.id)
        if sign is not None and entry is None and sign.active:
            return [self._begin(rule, sign, step)]
        if sign is not None and entry is not None:
            return self._go_on(rule, entry, sign, step.number)
        if entry is not None:
            entry.silent += 1
            if step.number - entry.last_seen > rule.closes_after and entry.silent >= SILENT_LOOKS:
                return [self._close(rule.id)]
        return []

    def finish(self) -> list[Finding]:
        """The run is over: close what was not seen any more at its end. Returns what has closed."""
        silent = {name: self._last - entry.last_seen for name, entry in self._open.items()}
        return [
            self._close(rule.id)
            for rule in self.rules
            if rule.every_step and silent.get(rule.id, 0) > max(QUIET_STEPS, rule.closes_after // 2)
        ]

    def _close(self, name: str) -> Finding:
        entry = self._open.pop(name)
        finding = replace(self.findings[entry.place], last_step=entry.last_seen)
        self.findings[entry.place] = finding
        return finding

    def _begin(self, rule: Rule, sign: Sign, step: Step) -> Finding:
        now = step.number
        first = now if sign.since is None else min(now, sign.since)
        blank = Finding(id=rule.id, severity=sign.severity, title="", first_step=first, found_step=now, rank=sign.rank)
        if first == now and step.unread:
            blank = replace(blank, evidence={"unread": step.unread})
        finding = _worded(blank, sign, rule.words)
        self._open[rule.id] = _Open(place=len(self.findings), last_seen=now, told=0, silent=0, sign=sign)
        self.findings.append(finding)
        return finding

    def _go_on(self, rule: Rule, entry: _Open, sign: Sign, step: int) -> list[Finding]:
        old = self.findings[entry.place]
        if sign.active:
            entry.last_seen, entry.silent = step, 0
        worse = SEVERITIES.index(sign.severity) > SEVERITIES.index(old.severity)
        elsewhere = not set(sign.tensors) <= set(old.tensors)
        lasted = step - old.first_step
        # The latest numbers are told ever more rarely, so that what goes on for long does not fill the file.
        renewed = sign.active and lasted >= 2 * max(entry.told, 1) and _are_news(sign, old)
        if not (worse or elsewhere or renewed or not sign.active):
            return []
        if worse or not sign.active:  # a new story; else the one told when it opened stands
            known = entry.sign
            entry.sign = replace(
                sign,
                seen={**known.seen, **sign.seen},
                expected={**known.expected, **sign.expected},
                causes=sign.causes or known.causes,
                cures=sign.cures or known.cures,
            )
        entry.sign = replace(entry.sign, tensors=tuple(dict.fromkeys((*old.tensors, *sign.tensors))))
        new = _worded(old, entry.sign, rule.words)
        if renewed:
            entry.told = lasted
        if renewed or "latest" in old.evidence:
            latest = {"step": step, **plain(dict(sign.seen))} if renewed else old.evidence["latest"]
            new = replace(new, evidence={**new.evidence, "latest": latest})
        self.findings[entry.place] = new
        return [new] if new != old else []

    # -- resuming -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: everything remembered, and the findings so far."""
        return {
            "rules": {rule.id: rule.state_dict() for rule in self.rules},
            "history": plain(self.history),
            "findings": [finding.to_json() for finding in self.findings],
            "open": {name: plain(entry) for name, entry in self._open.items()},
            "last": self._last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. A rule that was not there begins anew."""
        state = deepcopy(dict(state))  # what is loaded may be loaded again
        for rule in self.rules:
            rule.load_state_dict(state["rules"].get(rule.id, {}))
        saved = dict(state["history"])
        series = {name: Series(**kept) for name, kept in saved.pop("series").items()}
        self.history = replace(restored({**saved, "series": {}}, History()), series=series)
        self.findings = [Finding.from_json(finding) for finding in state["findings"]]
        self._open = {name: _Open(**{**entry, "sign": _sign(entry["sign"])}) for name, entry in state["open"].items()}
        self._last = state["last"]
        for name in self._open.keys() - {rule.id for rule in self.rules}:
            self._close(name)  # nobody is left who could


def _worded(finding: Finding, sign: Sign, own: Words | None) -> Finding:
    """A finding with its words and evidence; it never becomes less severe than it was."""
    kept = {"unread": finding.evidence["unread"]} if "unread" in finding.evidence else {}
    words = explain(own or WORDS.get(finding.id), sign, finding.first_step, **kept)
    return replace(
        finding,
        severity=max(finding.severity, sign.severity, key=SEVERITIES.index),
        title=words.title,
        tensors=sign.tensors,
        evidence={"seen": plain(dict(sign.seen)), "expected": plain(dict(sign.expected)), **kept},
        causes=words.causes,
        cures=words.cures,
    )


def _are_news(sign: Sign, finding: Finding) -> bool:
    """Whether a sign has other numbers than those told: a rule may repeat what it saw at its worst."""
    known = {name: value for name, value in finding.evidence.get("latest", {}).items() if name != "step"}
    return repr(plain(dict(sign.seen))) != repr(known or finding.evidence["seen"])


def _sign(saved: Mapping[str, Any]) -> Sign:
    tuples = {name: tuple(saved[name]) for name in ("tensors", "causes", "cures")}
    return Sign(**{**saved, **tuples})
