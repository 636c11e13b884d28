"""Which response answers: never more, never sooner and never more often than the user allows."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from gradvitals.guard.policy import (
    BUDGET_WINDOW,
    ActionBudget,
    CutLR,
    Decision,
    EscalationPolicy,
    Evidence,
    ResetMomentum,
    RollBack,
    Skip,
)

FINITE, NONFINITE = ("norm", "loss"), "nonfinite"

modes = st.sampled_from(["on", "off", "dry_run"])
limits = {"cooldown": st.integers(0, 60), "budget": st.one_of(st.none(), st.integers(0, 4))}


@st.composite
def policies(draw: st.DrawFn) -> EscalationPolicy:
    skip = Skip(
        mode=draw(modes),
        cooldown=draw(st.integers(0, 5)),
        budget=draw(st.one_of(st.none(), st.integers(0, 20))),
        max_streak=draw(st.integers(1, 5)),
    )
    common = {name: draw(values) for name, values in limits.items()}
    reset = ResetMomentum(mode=draw(modes), on=draw(st.sampled_from([(), ("loss_rising",)])), **common)
    cut = CutLR(mode=draw(modes), **{name: draw(values) for name, values in limits.items()})
    back = RollBack(mode=draw(modes), **{name: draw(values) for name, values in limits.items()})
    return EscalationPolicy(skip, [reset, cut, back])


troubles = st.sampled_from(["", "", "", "norm", "norm", "loss", "nonfinite"])


@st.composite
def stories(draw: st.DrawFn) -> list[Evidence]:
    """Runs of the same kind of step, as they come: long calm, long trouble, and anything between."""
    told: list[Evidence] = []
    for _ in range(draw(st.integers(1, 12))):
        trouble, length = draw(troubles), draw(st.sampled_from([1, 1, 2, 5, 20, 60, 300]))
        healthy, far = draw(st.booleans()), draw(st.booleans())
        told += [
            Evidence(
                step=len(told) + offset,
                trouble=trouble,
                words="w",
                far=far and trouble == "norm",
                can_roll_back=healthy,
            )
            for offset in range(length)
        ]
    return told


def calls_of(policy: EscalationPolicy, story: Sequence[Evidence]) -> list[list[Decision]]:
    return [policy.judge(evidence) for evidence in story]


def taken_steps(story: Sequence[Evidence], calls: Sequence[Sequence[Decision]], kind: str) -> list[int]:
    return [
        evidence.step
        for evidence, several in zip(story, calls, strict=True)
        for call in several
        if call.kind == kind and call.taken
    ]


# -- properties -------------------------------------------------------------------------------------------------


@given(policies(), stories())
@settings(max_examples=80, deadline=None)
def test_finite_trouble_is_never_skipped_more_than_max_streak_times_in_a_row(
    policy: EscalationPolicy, story: list[Evidence]
) -> None:
    row = 0
    for evidence, calls in zip(story, calls_of(policy, story), strict=True):
        skipped = any(call.kind == "skip" and call.taken for call in calls)
        back = any(call.kind == "roll_back" and call.taken for call in calls)
        row = row + 1 if skipped and evidence.trouble in FINITE else 0
        assert row <= policy.skip.max_streak
        assert not (skipped and back)


@given(policies(), stories())
@settings(max_examples=80, deadline=None)
def test_budgets_and_cooldowns_are_kept(policy: EscalationPolicy, story: list[Evidence]) -> None:
    calls = calls_of(policy, story)
    for response in (policy.skip, *policy.stronger):
        steps = taken_steps(story, calls, response.kind)
        if response.kind == "skip":  # what is not finite is skipped always, and counts
            steps = [step for step in steps if story[step].trouble != NONFINITE]
        if response.budget is not None:
            for index, first in enumerate(steps):
                assert sum(step < first + BUDGET_WINDOW for step in steps[index:]) <= response.budget
        assert all(later - earlier >= response.cooldown for earlier, later in pairwise(steps))
        assert len(set(steps)) == len(steps)


@given(policies(), stories())
@settings(max_examples=80, deadline=None)
def test_each_response_does_what_its_mode_says(policy: EscalationPolicy, story: list[Evidence]) -> None:
    mode = {response.kind: response.mode for response in (policy.skip, *policy.stronger)}
    for evidence, calls in zip(story, calls_of(policy, story), strict=True):
        for call in calls:
            assert mode[call.kind] != "off"
            assert not call.taken or mode[call.kind] == "on"
            assert call.taken or mode[call.kind] == "dry_run" or call.reason != evidence.words
            assert call.finding


@given(policies(), stories())
@settings(max_examples=80, deadline=None)
def test_it_never_rolls_back_to_nothing(policy: EscalationPolicy, story: list[Evidence]) -> None:
    for evidence, calls in zip(story, calls_of(policy, story), strict=True):
        assert not any(call.kind == "roll_back" and call.taken and not evidence.can_roll_back for call in calls)


@given(policies(), stories())
@settings(max_examples=80, deadline=None)
def test_what_is_not_finite_is_skipped_or_rolled_back_always(policy: EscalationPolicy, story: list[Evidence]) -> None:
    if policy.skip.mode != "on":
        return
    for evidence, calls in zip(story, calls_of(policy, story), strict=True):
        if evidence.trouble == NONFINITE:
            assert any(call.taken and call.kind in ("skip", "roll_back") for call in calls)


@given(policies(), stories(), st.integers(0, 500))
@settings(max_examples=80, deadline=None)
def test_a_saved_state_has_the_same_future(policy: EscalationPolicy, story: list[Evidence], cut: int) -> None:
    other = EscalationPolicy(policy.skip, policy.stronger)
    again = EscalationPolicy(policy.skip, policy.stronger)
    whole = calls_of(policy, story)
    calls_of(other, story[:cut])
    again.load_state_dict(json.loads(json.dumps(other.state_dict())))
    assert calls_of(again, story[cut:]) == whole[cut:]
    assert again.state_dict() == policy.state_dict()


# -- known answers ----------------------------------------------------------------------------------------------


def ladder_of(**settings: Any) -> EscalationPolicy:
    skip = settings.pop("skip", Skip())
    reset, cut, back = (
        settings.pop("reset", ResetMomentum()),
        settings.pop("lr", CutLR()),
        settings.pop("back", RollBack()),
    )
    return EscalationPolicy(skip, [reset, cut, back], **settings)


def bad(
    policy: EscalationPolicy, steps: range, trouble: str = "norm", *, can_roll_back: bool = True
) -> list[tuple[str, int, bool]]:
    told = []
    for step in steps:
        evidence = Evidence(step=step, trouble=trouble, words="w", can_roll_back=can_roll_back)  # type: ignore[arg-type]
        told += [(call.kind, step, call.taken) for call in policy.judge(evidence)]
    return told


def calm(policy: EscalationPolicy, steps: range) -> None:
    for step in steps:
        assert policy.judge(Evidence(step=step, can_roll_back=True)) == []


def test_the_order_of_escalation() -> None:
    assert bad(ladder_of(), range(100, 114)) == [
        ("skip", 100, True),
        ("skip", 101, True),
        ("skip", 102, True),
        ("reset_momentum", 103, True),
        ("cut_lr", 108, True),
        ("roll_back", 113, True),
    ]


def test_responses_that_are_off_are_passed_over() -> None:
    policy = ladder_of(reset=ResetMomentum(mode="off"), lr=CutLR(mode="off"))
    assert bad(policy, range(4))[3:] == [("roll_back", 3, True)]
    policy = ladder_of(skip=Skip(mode="off"))
    assert bad(policy, range(4)) == [("reset_momentum", 3, True)]


def test_dry_responses_are_reported_in_the_same_order() -> None:
    policy = ladder_of(
        skip=Skip(mode="dry_run"),
        reset=ResetMomentum(mode="dry_run"),
        lr=CutLR(mode="dry_run"),
        back=RollBack(mode="dry_run"),
    )
    assert bad(policy, range(14)) == [
        ("skip", 0, False),
        ("skip", 1, False),
        ("skip", 2, False),
        ("reset_momentum", 3, False),
        ("cut_lr", 8, False),
        ("roll_back", 13, False),
    ]


def test_a_calm_run_starts_from_the_first_response_again() -> None:
    policy = ladder_of(reset=ResetMomentum(cooldown=0))
    bad(policy, range(4))
    calm(policy, range(4, 4 + policy.calm_after))
    assert bad(policy, range(100, 104)) == [
        ("skip", 100, True),
        ("skip", 101, True),
        ("skip", 102, True),
        ("reset_momentum", 103, True),
    ]


def test_a_run_that_was_not_calm_for_long_continues_where_it_was() -> None:
    policy = ladder_of(reset=ResetMomentum(cooldown=0))
    bad(policy, range(4))
    calm(policy, range(4, 4 + policy.calm_after - 1))
    waited = bad(policy, range(100, 120))
    assert next(kind for kind, _, _ in waited if kind != "skip") == "cut_lr"


def test_a_crowd_of_bad_steps_is_trouble_too() -> None:
    """Every second step is bad: a streak never gets long, but leaving out half of all steps is no cure."""
    policy, calls = ladder_of(), []
    for step in range(60):
        evidence = Evidence(step=step, trouble="norm" if step % 2 else "", words="w", can_roll_back=True)
        calls += [(call.kind, step) for call in policy.judge(evidence)]
    higher = [("reset_momentum", 15), ("cut_lr", 25), ("roll_back", 35)]
    assert calls[:10] == [*(("skip", step) for step in range(1, 15, 2)), *higher]


def test_a_refusal_is_reported_once_until_the_run_is_calm() -> None:
    policy = ladder_of(skip=Skip(budget=0))
    assert bad(policy, range(3)) == [("skip", 0, False)]
    calm(policy, range(3, 60))
    assert bad(policy, range(60, 62)) == [("skip", 60, False)]


def test_rolling_back_starts_from_the_first_response_and_keeps_what_was_spent() -> None:
    policy = ladder_of(back=RollBack(budget=1, cooldown=0))
    assert ("roll_back", 13, True) in bad(policy, range(14))
    told = bad(policy, range(14, 30))
    assert told[:3] == [("skip", 14, True), ("skip", 15, True), ("skip", 16, True)]
    assert ("roll_back", 17, False) in told  # the responses before it are on cooldown, and its budget is spent


def test_a_roll_back_that_had_to_wait_for_its_cooldown_comes_after_it() -> None:
    policy = ladder_of(back=RollBack(cooldown=20))
    assert ("roll_back", 3, True) in bad(policy, range(4), "nonfinite")
    told = bad(policy, range(4, 60), "nonfinite")
    assert any(kind == "roll_back" and taken for kind, _, taken in told)


def test_a_roll_back_that_had_no_snapshot_comes_when_there_is_one() -> None:
    policy = ladder_of()
    bad(policy, range(10), "nonfinite", can_roll_back=False)
    assert any(kind == "roll_back" and taken for kind, _, taken in bad(policy, range(10, 30), "nonfinite"))


def test_a_norm_that_is_far_too_large_rolls_back_at_once() -> None:
    policy = ladder_of()
    calls = policy.judge(Evidence(step=5, trouble="norm", words="w", far=True, can_roll_back=True))
    assert [(call.kind, call.taken, call.finding) for call in calls] == [("roll_back", True, "explosion")]


def test_a_finding_calls_for_the_responses_that_name_it() -> None:
    policy = ladder_of(reset=ResetMomentum(on=("loss_rising",)), back=RollBack(on=("loss_rising", "explosion")))
    calls = policy.judge(Evidence(step=5, words="w", findings=("loss_rising",), can_roll_back=True))
    assert [(call.kind, call.finding) for call in calls] == [
        ("reset_momentum", "loss_rising"),
        ("roll_back", "loss_rising"),
    ]
    assert policy.judge(Evidence(step=200, words="w", findings=("loss_spike",), can_roll_back=True)) == []


def test_a_finding_in_the_middle_of_a_streak_does_not_make_it_longer() -> None:
    """The Guard tells findings before it has looked at the step, as evidence of their own."""
    policy = ladder_of(reset=ResetMomentum(mode="off"), lr=CutLR(mode="off"), back=RollBack(mode="off"))
    told = bad(policy, range(8, 10))
    policy.judge(Evidence(step=10, words="w", findings=("loss_rising",)))
    told += bad(policy, range(10, 16))
    assert len([one for one in told if one[0] == "skip"]) == 3


def test_each_kind_of_trouble_has_its_finding() -> None:
    for trouble, finding in (("norm", "explosion"), ("loss", "loss_spike"), ("nonfinite", "nonfinite")):
        (call,) = ladder_of().judge(Evidence(step=0, trouble=trouble, words="w"))  # type: ignore[arg-type]
        assert call.finding == finding


def test_a_budget_says_why_not() -> None:
    budget = ActionBudget(CutLR(cooldown=10, budget=2))
    assert budget.refusal(0) == ""
    budget.spent.append(0)
    assert budget.refusal(9) == "its cooldown of 10 steps is not over"
    assert budget.refusal(10) == ""
    budget.spent.append(10)
    assert budget.refusal(999) == "its budget of 2 in 1,000 steps is spent"
    assert budget.refusal(1000) == ""
