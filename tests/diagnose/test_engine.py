"""Findings open once, go on, get worse, close; rules that fail are left out; state survives a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from gradvitals.diagnose import RULES, Diagnosis, Observation, Rule, Step, register
from gradvitals.errors import ConfigError
from gradvitals.types import Finding, Reading


@dataclass
class LossOver(Rule):
    """Ten lines are enough for a rule of one's own."""

    id = "loss_over"
    needs = ("loss",)
    closes_after = 3
    limit: float = 10.0
    times: int = field(default=0, init=False)

    def check(self, step: Step) -> Observation | None:
        loss = step.value("loss")
        if not loss > self.limit:
            return None
        self.times += 1
        severity = "critical" if loss > 10 * self.limit else "warning"
        return Observation(
            severity=severity, seen={"loss": loss, "times": self.times}, title="the loss is over its limit"
        )


def read(diagnosis: Diagnosis, losses: Iterable[float], first: int = 0) -> list[Finding]:
    told = []
    for step, loss in enumerate(losses, first):
        told += diagnosis.read([Reading(step=step, time=0.0, values={"loss": loss})])
    return told


def test_a_pattern_that_goes_on_is_one_finding() -> None:
    diagnosis = Diagnosis(rules=[LossOver()])
    read(diagnosis, [1, 1, 50, 50, 50, 50, 1, 1])
    (finding,) = diagnosis.findings
    assert (finding.id, finding.first_step, finding.found_step, finding.last_step) == ("loss_over", 2, 2, None)
    assert finding.title == "the loss is over its limit"


def test_it_closes_after_the_last_sign_and_may_open_again() -> None:
    diagnosis = Diagnosis(rules=[LossOver()])
    told = read(diagnosis, [1, 50, 1, 50, 1, 1, 1, 1, 1, 50])
    assert [(f.first_step, f.last_step) for f in diagnosis.findings] == [(1, 3), (9, None)]
    assert [f.last_step for f in told if f.last_step is not None] == [3]


def test_worse_is_told_and_better_is_not_made_of_it() -> None:
    diagnosis = Diagnosis(rules=[LossOver()])
    told = read(diagnosis, [50, 500, 50])
    assert [f.severity for f in told[:2]] == ["warning", "critical"]
    assert diagnosis.findings[0].severity == "critical"


def test_what_goes_on_for_long_is_told_ever_more_rarely() -> None:
    diagnosis = Diagnosis(rules=[LossOver()])
    told = read(diagnosis, [50] * 2000)
    assert len(told) < 20
    assert diagnosis.findings[0].evidence["latest"]["times"] > 1000
    assert diagnosis.findings[0].evidence["seen"]["times"] == 1


def test_numbers_that_a_rule_repeats_are_not_told_as_those_of_a_later_step() -> None:
    @dataclass
    class AtItsWorst(Rule):
        id = "at_its_worst"
        worst: float = field(default=0.0, init=False)

        def check(self, step: Step) -> Observation | None:
            self.worst = max(self.worst, step.value("loss"))
            return Observation(severity="warning", seen={"loss": self.worst})

    diagnosis = Diagnosis(rules=[AtItsWorst()])
    read(diagnosis, [50, 60, 500, *[1] * 400])
    assert diagnosis.findings[0].evidence["latest"] == {"step": 2, "loss": 500}


def test_several_places_are_gathered() -> None:
    @dataclass
    class Places(Rule):
        id = "places"

        def check(self, step: Step) -> Observation | None:
            return Observation(severity="warning", seen={}, tensors=(("a",), ("b",), ("a", "c"))[step.number])

    diagnosis = Diagnosis(rules=[Places()])
    read(diagnosis, [1, 1, 1])
    assert set(diagnosis.findings[0].tensors) == {"a", "b", "c"}


def test_an_inactive_sign_adds_to_a_finding_but_does_not_make_or_prolong_one() -> None:
    @dataclass
    class After(Rule):
        id = "after"
        closes_after = 2

        def check(self, step: Step) -> Observation | None:
            active = step.number == 3
            return Observation(severity="warning", seen={"step": step.number}, title=f"at {step.number}", active=active)

    diagnosis = Diagnosis(rules=[After()])
    read(diagnosis, [1] * 3)
    assert diagnosis.findings == []
    read(diagnosis, [1] * 2, first=3)
    (finding,) = diagnosis.findings
    assert finding.evidence["seen"]["step"] == 4
    assert finding.first_step == 3


def test_what_the_last_steps_did_not_show_is_over_with_the_run() -> None:
    diagnosis = Diagnosis(rules=[LossOver()])
    LossOver.closes_after, before = 50, LossOver.closes_after
    try:
        read(diagnosis, [1, 50, *[1] * 30])
        assert diagnosis.findings[0].last_step is None
        assert [f.last_step for f in diagnosis.finish()] == [1]
        read(diagnosis, [50, 50], first=32)
        assert diagnosis.finish() == []
    finally:
        LossOver.closes_after = before


def test_a_rule_that_fails_is_left_out_and_told() -> None:
    @dataclass
    class Broken(Rule):
        id = "broken"

        def check(self, step: Step) -> Observation | None:
            raise ZeroDivisionError("of its own")

    failed = []
    diagnosis = Diagnosis(rules=[Broken(), LossOver()], on_error=lambda rule, error: failed.append((rule, repr(error))))
    read(diagnosis, [50, 50])
    assert failed == [("broken", "ZeroDivisionError('of its own')")]
    assert [f.id for f in diagnosis.findings] == ["loss_over"]


def test_a_rule_of_ones_own_is_registered_and_set() -> None:
    try:
        register(LossOver)
        read(diagnosis := Diagnosis(settings={"loss_over": {"limit": 0.5}}), [1.0])
        assert "loss_over" in [f.id for f in diagnosis.findings]
        read(diagnosis := Diagnosis(settings={"loss_over": False}), [100.0])
        assert "loss_over" not in [rule.id for rule in diagnosis.rules]
    finally:
        del RULES["loss_over"]


def test_mistakes_in_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="there is no rule 'explosoin'; did you mean 'explosion'"):
        Diagnosis(settings={"explosoin": {}})
    with pytest.raises(ConfigError, match="'loss_nonfinite' has no setting 'treshold'"):
        Diagnosis(settings={"loss_nonfinite": {"treshold": 3}})
    with pytest.raises(ConfigError, match="'explosion' has no setting 'rato'; did you mean 'ratio'"):
        Diagnosis(settings={"explosion": {"rato": 3}})
    with pytest.raises(ConfigError, match="ratio of rule 'explosion' is '3'; expected a number"):
        Diagnosis(settings={"explosion": {"ratio": "3"}})

    class NotADataclass(Rule):
        id = "plain"

    with pytest.raises(ConfigError, match="not a dataclass"):
        register(NotADataclass)


def losses(start: int, stop: int) -> list[float]:
    return [3 + 0.1 * math.sin(step) + (400.0 if step in (70, 71, 150) else 0.0) for step in range(start, stop)]


@pytest.mark.parametrize("cut", [1, 40, 71, 72, 149])
def test_a_resumed_diagnosis_goes_on_as_if_nothing_had_been(cut: int) -> None:
    whole = Diagnosis()
    read(whole, losses(0, 200))
    first = Diagnosis()
    read(first, losses(0, cut))
    second = Diagnosis()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    read(second, losses(cut, 200), first=cut)
    assert [f.to_json() for f in second.findings] == [f.to_json() for f in whole.findings]
    assert whole.findings, "the series must have something to find"
