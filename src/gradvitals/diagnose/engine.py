"""Diagnosis: runs every rule on every step and keeps one finding for each pattern while it lasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.history import History, Series
from gradvitals.diagnose.message import Message, Observation, explain
from gradvitals.diagnose.rule import RULES, Rule, build_rules, plain, restored
from gradvitals.diagnose.step import RunInfo, Step
from gradvitals.types import SEVERITIES, Finding, Fix, Layout, PlainReadings, Reading

FURTHEST = 10.0
"""Factor by which a finding changes the learning rate at most, unless updates show that it is further off."""

SILENT_CHECKS = 2
"""Checks without an observation, at least, before a finding closes: some rules check only now and then."""

RENEWED = ("steps", "times", "loss", "lasting")
"""Numbers of a title that are those of the last observation, if it counts steps."""

RENEW_GROWTH = 1.1
"""A finding whose rule renews it is reported again after it has lasted this many times as long."""

QUIET_STEPS = 10
"""When the run ends, a finding that could show at every step closes if this many last steps did not show it."""


CALM_AFTER = 200
"""Steps of a run after which calm steps are only sampled."""

CALM_EVERY = 50
"""Of calm steps, rules check one in so many; the history takes all of them."""

CALM_VALUES = {
    "loss": 0.0, "lr": 0.0, "clip/max_norm": 0.0,
    "grad/norm": 0.0, "grad/nonfinite": 0.0, "grad/spike_ratio": 1.0, "grad/norm_cv": 0.0,
}  # fmt: skip
"""What a plain step may have, each with a calm number for steps without it. Anything more is worth a check."""

CALM_RATIO = 2.0
"""A norm of a calm step is less than this many times its moving average."""

LARGE_NORM = 1e17
"""From here on norms are read in float64: in float32 the squares of some element may overflow."""

CALM_LR = 0.1
"""The learning rate of a calm step changed by no more than this share."""

CALM_MOVE = 4.0
"""The loss of a calm step changed by less than this many times its usual change."""


@dataclass
class _Open:
    """An open finding."""

    place: int
    """Its index in the list of all findings."""
    last_seen: int
    reported: int
    """How long the pattern had lasted when its latest numbers were reported."""
    silent: int
    """Checks since then that saw nothing."""
    observation: Observation
    """What its texts are made of: from when it opened, got worse, or became better understood; the latest if its rule
    renews it."""
    renewed: dict[str, Any] = field(default_factory=dict)
    """What its title has from the last observation."""


class Diagnosis:
    """Turns the readings of a run, step by step, into findings. Uses no torch and starts no thread.

    Args:
        info: What kind of run it is.
        settings: By rule id: False turns a rule off, a mapping sets its fields.
        rules: The rules, instead of one of each that is registered.
        on_error: Called with the id of a rule and the error it raised; that rule is removed.

    Example:
        >>> diagnosis = Diagnosis(settings={"explosion": {"ratio": 3.0}})
        >>> diagnosis.read([Reading(step=0, time=0.0, values={"loss": float("nan")})])[0].id
        'loss_nonfinite'
    """

    def __init__(
        self,
        *,
        info: RunInfo | None = None,
        settings: Mapping[str, Any] | None = None,
        rules: Sequence[Rule] | None = None,
        on_error: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self.info = info if info is not None else RunInfo()
        self.layout = Layout()
        self._frozen: list[int] = []
        self.history = History()
        self.findings: list[Finding] = []
        """All so far; those without a `last_step` are open."""
        self._open: dict[str, _Open] = {}
        self._last = -1
        self._last_step: Step | None = None
        self._on_error = on_error
        self._set_rules(list(rules) if rules is not None else build_rules(settings or {}))

    def _set_rules(self, rules: list[Rule]) -> None:
        self.rules = rules
        self._rules_for = {
            "values": [rule for rule in rules if rule.reads == "values"],
            "tensors": [rule for rule in rules if rule.reads != "full"],
            "full": rules,
        }

    def start_over(self) -> list[Finding]:
        """Forget everything learned: training was rolled back, so it is no baseline for what comes.

        Returns:
            The findings that were open; they are closed.
        """
        closed = [self._close(name) for name in list(self._open)]
        self._set_rules(
            [
                type(rule)(**{f.name: getattr(rule, f.name) for f in fields(rule) if f.init})  # type: ignore[arg-type]
                for rule in self.rules
            ]
        )
        self.history = History()
        return closed

    def describe(self, layout: Layout) -> None:
        """Set what the rows of per-tensor arrays stand for from here on. Rows are only ever added."""
        if layout is not self.layout:
            self.layout = layout
            self._frozen = [info.index for info in layout.tensors if info.frozen]

    def read(self, readings: Sequence[Reading]) -> list[Finding]:
        """Check all readings of one step.

        Returns:
            The findings that opened, changed or closed, as they are now.
        """
        if not readings:
            return []
        step = Step(readings, self.layout, self.info, self.history, self._frozen)
        if self._is_calm(step):
            step.remember(calm=True)
            self._last = step.number
            return []
        changed: list[Finding] = []
        seen, falls = self.history.steps_seen, step.loss_should_fall
        kind = "full" if step.is_full else "tensors" if step.general.tensors else "values"
        with np.errstate(all="ignore"):  # 0 / 0 is an answer in a rule's arithmetic
            for rule in self._rules_for[kind]:
                if seen < rule.min_steps:
                    continue
                try:
                    observation = None
                    if falls or not rule.expects_fall:
                        rule.learn(step)
                        observation = None if step.number % rule.every else rule.check(step)
                    if observation is not None or rule.id in self._open:
                        changed += self._note(rule, observation, step)
                except Exception as error:
                    changed += self._remove(rule, error)
            if kind == "values" and self._open:
                # A rule that reads single tensors saw nothing at a step without them.
                for rule in self._rules_for["tensors"]:
                    if rule.reads == "tensors" and rule.id in self._open and seen >= rule.min_steps:
                        changed += self._note(rule, None, step)
            step.remember()
        self._last, self._last_step = step.number, step
        return self._linked(changed)

    def _linked(self, changed: list[Finding]) -> list[Finding]:
        if not changed:
            return changed
        return link_to_roots(self.findings, changed, {name: entry.last_seen for name, entry in self._open.items()})

    def _is_calm(self, step: Step) -> bool:
        """Whether a step has nothing to show that the steps around it do not: most steps of a long run."""
        history, values = self.history, step.values
        if history.steps_seen < CALM_AFTER or values.keys() - CALM_VALUES.keys() or len(step.readings) > 1:
            return False
        known, ratios = {**CALM_VALUES, **values}, step.tensors("grad/spike_ratio")
        highest = float(np.fmax.reduce(ratios)) if ratios is not None and len(ratios) else math.nan
        calm = _calm(step.number, known, self._last_lr if "lr" in values else 0.0, highest)
        return bool(calm) and ("loss" not in values or history.loss_is_calm(values["loss"], CALM_MOVE))

    @property
    def _last_lr(self) -> float:
        return (self.history["lr"].values or [math.nan])[-1]

    def skim(self, plain: PlainReadings, start: int, layout: Layout) -> int:
        """Remember the calm ones of plain steps, up to one that is not calm.

        Args:
            plain: The steps.
            start: The first of them to look at.
            layout: What their tensors stand for.

        Returns:
            The first step that `read` must see; the number of steps if there is none.
        """
        self.describe(layout)
        history = self.history
        if history.steps_seen < CALM_AFTER:
            return start
        calm = _calm_steps(plain, self._last_lr)
        losses = plain.values["loss"].tolist() if plain.present["loss"].any() else None
        end = start
        while end < len(plain) and calm[end]:
            if losses is not None and plain.present["loss"][end]:
                if not history.loss_is_calm(losses[end], CALM_MOVE):
                    break
                history.push_loss(losses[end])
            end += 1
        if end > start:
            history.push_plain(plain.part(start, end))
            self._last = int(plain.steps[end - 1])
        return end

    def finish(self) -> list[Finding]:
        """Judge the run as a whole, and close findings that its last steps did not show. Returns what has changed."""
        # Without a check since, nobody knows whether it is over.
        silent = {name: self._last - entry.last_seen for name, entry in self._open.items() if entry.silent}
        changed = [
            self._close(rule.id)
            for rule in self.rules
            if rule.reads != "full" and silent.get(rule.id, 0) > max(QUIET_STEPS, rule.closes_after // 2)
        ]
        last = self._last_step
        if last is not None:
            with np.errstate(all="ignore"):
                for rule in list(self.rules):
                    try:
                        concluded = None if rule.expects_fall and not last.loss_should_fall else rule.conclude(last)
                        changed += self._note(rule, concluded, last) if concluded is not None else []
                    except Exception as error:
                        changed += self._remove(rule, error)
        for name, entry in self._open.items():
            before = self.findings[entry.place]
            self.findings[entry.place] = self._retitled(name, before)
            changed += [self.findings[entry.place]] if self.findings[entry.place] != before else []
        return self._linked(changed)

    def _remove(self, rule: Rule, error: Exception) -> list[Finding]:
        self._set_rules([other for other in self.rules if other is not rule])
        closed = [self._close(rule.id)] if rule.id in self._open else []
        if self._on_error is None:
            raise error
        self._on_error(rule.id, error)
        return closed

    def _note(self, rule: Rule, observation: Observation | None, step: Step) -> list[Finding]:
        entry = self._open.get(rule.id)
        observation = _bounded(rule, observation, step) if observation is not None else None
        if observation is not None and entry is None and observation.active:
            return [self._start(rule, observation, step)]
        if observation is not None and entry is not None:
            return self._continue(rule, entry, observation, step.number)
        if entry is not None and rule.holds and not step.reads(rule.needs):
            entry.last_seen = step.number if entry.silent == 0 else entry.last_seen
        elif entry is not None:
            entry.silent += 1
            if step.number - entry.last_seen > rule.closes_after and entry.silent >= SILENT_CHECKS:
                return [self._close(rule.id)]
        return []

    def _start(self, rule: Rule, seen: Observation, step: Step) -> Finding:
        now = step.number
        first = now if seen.since is None else min(now, seen.since)
        blank = Finding(id=rule.id, severity=seen.severity, title="", first_step=first, found_step=now, rank=seen.rank)
        if first == now and step.unread:
            blank = replace(blank, evidence={"unread": step.unread})
        finding = _explained(blank, seen, rule.message)
        self._open[rule.id] = _Open(place=len(self.findings), last_seen=now, reported=0, silent=0, observation=seen)
        self.findings.append(finding)
        return finding

    def _continue(self, rule: Rule, entry: _Open, seen: Observation, step: int) -> list[Finding]:
        old = self.findings[entry.place]
        if seen.active:
            entry.last_seen, entry.silent = step, 0
            numbers = {**seen.seen, **seen.text}
            counts = "steps" in numbers or "times" in numbers
            entry.renewed = {name: numbers[name] for name in RENEWED if counts and name in numbers}
        worse = SEVERITIES.index(seen.severity) > SEVERITIES.index(old.severity)
        elsewhere = not set(seen.tensors) <= set(old.tensors)
        lasted = step - old.first_step
        # The latest numbers are reported less and less often, so that a long finding does not fill the file.
        often = RENEW_GROWTH if rule.renews else 2
        renewed = seen.active and lasted >= often * max(entry.reported, 1) and _has_news(seen, old)
        if rule.renews and seen.active:
            entry.observation = seen
        if not (worse or elsewhere or renewed or not seen.active):
            return []
        if not seen.active or (worse and not rule.renews):  # the texts change; otherwise those from when it opened stay
            known = entry.observation
            entry.observation = replace(
                seen,
                seen={**known.seen, **seen.seen},
                expected={**known.expected, **seen.expected},
                text={**known.text, **seen.text},
                causes=seen.causes or known.causes,
                fixes=seen.fixes or known.fixes,
            )
        entry.observation = replace(entry.observation, tensors=tuple(dict.fromkeys((*old.tensors, *seen.tensors))))
        new = _explained(old, entry.observation, rule.message)
        if renewed:
            entry.reported = lasted
        if not rule.renews and (renewed or "latest" in old.evidence):
            latest = {"step": step, **plain(dict(seen.seen))} if renewed else old.evidence["latest"]
            new = replace(new, evidence={**new.evidence, "latest": latest})
        new = self._retitled(rule.id, new)
        self.findings[entry.place] = new
        return [new] if new != old else []

    def _close(self, name: str) -> Finding:
        finding = self._retitled(name, self.findings[self._open[name].place])
        entry = self._open.pop(name)
        finding = replace(finding, last_step=entry.last_seen)
        self.findings[entry.place] = finding
        return finding

    def _retitled(self, name: str, finding: Finding) -> Finding:
        """Returns a finding whose title, and evidence if its rule renews it, has the latest numbers."""
        entry, message = self._open[name], RULES[name].message if name in RULES else None
        if name in RULES and RULES[name].renews:
            new = _explained(finding, entry.observation, message)
            if finding.follows is None:
                return new
            return replace(new, follows=finding.follows, causes=finding.causes, fixes=finding.fixes)
        if message is None or not entry.renewed:
            return finding
        now = replace(entry.observation, text={**entry.observation.text, **entry.renewed})
        return replace(finding, title=explain(message, now, finding.first_step).title)

    # -- resuming ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns everything remembered and the findings so far, for a checkpoint."""
        return {
            "rules": {rule.id: rule.state_dict() for rule in self.rules},
            "history": plain(self.history),
            "findings": [finding.to_json() for finding in self.findings],
            "open": {name: plain(entry) for name, entry in self._open.items()},
            "last": self._last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. A rule that is not in it starts fresh."""
        state = deepcopy(dict(state))  # the same state may be loaded again
        for rule in self.rules:
            rule.load_state_dict(state["rules"].get(rule.id, {}))
        saved = dict(state["history"])
        series = {name: Series(**kept) for name, kept in saved.pop("series").items()}
        self.history = replace(restored({**saved, "series": {}}, History()), series=series)
        self.findings = [Finding.from_json(finding) for finding in state["findings"]]
        self._open = {
            name: _Open(**{**entry, "observation": _observation(entry["observation"])})
            for name, entry in state["open"].items()
        }
        self._last = state["last"]
        for name in self._open.keys() - {rule.id for rule in self.rules}:
            self._close(name)  # its rule no longer exists


def _calm(number: Any, values: Mapping[str, Any], lr_before: Any, highest: Any) -> Any:
    """Whether a step is calm, but for its loss; or which steps are, given arrays.

    Args:
        number: The step.
        values: A number for each of `CALM_VALUES`.
        lr_before: The learning rate of the step before.
        highest: The largest spike ratio of a tensor; NaN if none was read.
    """
    lr, ratio = values["lr"], values["grad/spike_ratio"]
    steady = abs(lr - lr_before) <= CALM_LR * abs(lr_before)
    usual = (ratio > 1 / CALM_RATIO**2) & (ratio < CALM_RATIO) & ~np.greater_equal(highest, CALM_RATIO)
    finite = (values["grad/nonfinite"] == 0) & (values["grad/norm"] < LARGE_NORM)
    return (number % CALM_EVERY != 0) & steady & usual & finite


def _calm_steps(plain: PlainReadings, last_lr: float) -> NDArray[np.bool_]:
    """Which plain steps are calm, but for their losses."""
    values, present = plain.values, plain.present
    known = {
        name: np.where(present[name], values[name], none) if name in values else none
        for name, none in CALM_VALUES.items()
    }
    before = np.where(present["lr"], np.concatenate(([last_lr], values["lr"][:-1])), 0.0)
    ratios = plain.tensors.get("grad/spike_ratio")
    highest = math.nan if ratios is None else np.fmax.reduce(ratios, axis=1, initial=np.nan)
    calm: NDArray[np.bool_] = _calm(plain.steps, known, before, highest)
    for name in values.keys() - CALM_VALUES.keys():
        calm &= ~present[name]
    return calm


def _bounded(rule: Rule, seen: Observation, step: Step) -> Observation:
    """An observation whose proposed learning rates stay within `FURTHEST` of the one it names.

    What is right further off, only a run at the new rate shows. But steps that hardly change the weights are too short
    whatever the task: the peak of the schedule may rise until they change them by an ordinary share.
    """
    rates = [rate for rate in (*step.history["lr"].values, step.value("lr")) if rate > 0]
    lr = seen.seen.get("lr")
    if not rates or not isinstance(lr, float) or not lr > 0:
        return seen
    measured = step.ordinary_lr * lr / max(rates)
    highest = measured if measured > lr * FURTHEST else lr * FURTHEST
    near = (
        {}
        if rule.measures_lr
        else {
            name: min(max(value, lr / FURTHEST), highest)
            for name, value in seen.seen.items()
            if name in ("lr_proposed", "lr_lower") and isinstance(value, float)
        }
    )
    return replace(seen, seen={**seen.seen, **near}, text={**seen.text, "peak_lr": max(rates)})


def _explained(finding: Finding, seen: Observation, message: Message | None) -> Finding:
    """A finding with its texts and evidence; it never becomes less severe."""
    kept = {"unread": finding.evidence["unread"]} if "unread" in finding.evidence else {}
    texts = explain(message, seen, finding.first_step, **kept)
    return replace(
        finding,
        severity=max(finding.severity, seen.severity, key=SEVERITIES.index),
        title=texts.title,
        tensors=seen.tensors,
        evidence={"seen": plain(dict(seen.seen)), "expected": plain(dict(seen.expected)), **kept},
        causes=texts.causes,
        fixes=texts.fixes,
        follows=None,
    )


def _has_news(seen: Observation, finding: Finding) -> bool:
    """Whether an observation has other numbers than those reported: a rule may repeat what it saw at its worst."""
    known = {name: value for name, value in finding.evidence.get("latest", {}).items() if name != "step"}
    return repr(plain(dict(seen.seen))) != repr(known or finding.evidence["seen"])


def _observation(saved: Mapping[str, Any]) -> Observation:
    tuples = {name: tuple(saved[name]) for name in ("tensors", "causes", "fixes")}
    return Observation(**{**saved, **tuples})


# -- which finding is a consequence of which: only the root has a fix of its own --------------------------------------


def link_to_roots(findings: list[Finding], changed: Sequence[Finding], last_seen: Mapping[str, int]) -> list[Finding]:
    """Make findings that are consequences of another point to it, in place.

    A symptom follows from what is wrong with the setup, if anything is, and else from what its rule names. A root
    that is open becomes as serious as the symptoms that confirm it.

    Args:
        findings: All of a run.
        changed: Those that opened, changed or closed at this step.
        last_seen: The last step that showed each open finding, by rule id.

    Returns:
        What has changed, including findings that now point to a root.
    """
    before, places = list(findings), dict[str, list[int]]()
    for place, finding in enumerate(findings):
        places.setdefault(finding.id, []).append(place)
    setup = [place for name, some in places.items() if name in RULES and RULES[name].is_setup for place in some]
    setup.sort(key=lambda place: -SEVERITIES.index(findings[place].severity))
    root_of = dict[int, int]()

    def chain(place: int) -> list[int]:
        """What a finding follows from, what that follows from, and so on."""
        found = list[int]()
        while place in root_of:
            place = root_of[place]
            found.append(place)
        return found

    for place, finding in enumerate(findings):
        if (rule := RULES.get(finding.id)) is None:
            continue
        named = [root for name in rule.follows for root in places.get(name, ())]
        for root in (*(setup if rule.is_symptom else ()), *named):
            if place not in (root, *chain(root)) and _is_consequence(finding, findings[root], last_seen):
                root_of[place] = root
                break
    for place in root_of:
        for root in (roots := chain(place)):
            severity = max(findings[root].severity, before[place].severity, key=SEVERITIES.index)
            if findings[root].last_step is None and severity != findings[root].severity:
                findings[root] = replace(findings[root], severity=severity)
        findings[place] = _linked(findings[place], before[roots[-1]])
    news = {id(finding) for finding in changed}
    return [now for then, now in zip(before, findings, strict=True) if id(then) in news or now != then]


def _is_consequence(finding: Finding, root: Finding, last_seen: Mapping[str, int]) -> bool:
    found = finding.first_step if finding.found_step is None else finding.found_step
    ended = last_seen.get(root.id) if root.last_step is None else root.last_step
    if RULES[root.id].is_setup:
        return root.last_step is None
    in_time = found >= root.first_step and (ended is None or finding.first_step <= ended)
    explained = not RULES[finding.id].follows_if_later or finding.id in RULES[root.id].masks
    return in_time and (explained or finding.first_step > root.first_step)


def _linked(finding: Finding, root: Finding) -> Finding:
    own = finding.causes if finding.follows is None else finding.causes[1:]
    first = root.fixes[0] if root.fixes else Fix("")
    text = f"Fix {root.id} first" + (f": {first}" if first else "")
    change, snippet = (first.change, first.snippet) if isinstance(first, Fix) else ({}, "")
    return replace(
        finding,
        follows=root.id,
        causes=(f"Consequence of {root.id}: {root.title.partition(':')[0]}", *own),
        fixes=(Fix(text, change, snippet),),
    )
