"""Findings that are consequences of another point to it, whichever came first."""

from __future__ import annotations

import numpy as np
from made_up import make_layout

from gradvitals.diagnose import RULES, Diagnosis
from gradvitals.diagnose.engine import link_to_roots
from gradvitals.report.verdict import judge
from gradvitals.types import Finding, Reading


def finding(name: str, first: int, last: int | None = None, found: int | None = None, cure: str = "own") -> Finding:
    return Finding(
        id=name,
        severity="warning",
        title=f"{name}: of step {first}",
        first_step=first,
        last_step=last,
        found_step=found,
        causes=("own",),
        fixes=(cure,),
    )


def test_the_lesser_ones_take_the_roots_cure() -> None:
    findings = [finding("update_ratio", 1, 4, found=4), finding("oscillation", 80), finding("lr_too_high", 0)]
    changed = link_to_roots(findings, findings[2:], {})
    assert [(one.id, one.follows) for one in findings] == [
        ("update_ratio", "lr_too_high"),
        ("oscillation", "lr_too_high"),
        ("lr_too_high", None),
    ]
    assert findings[0].causes == ("Consequence of lr_too_high: lr_too_high", "own")
    assert findings[1].fixes == ("Fix lr_too_high first: own",)
    assert changed == findings  # all of them are told anew
    assert link_to_roots(findings, [], {}) == []  # and once is enough


def test_a_batch_with_nan_has_one_cure() -> None:
    findings = [finding("loss_nonfinite", 150, cure="check the batch"), finding("nonfinite", 150)]
    link_to_roots(findings, findings, {})
    assert [one.follows for one in findings] == [None, "loss_nonfinite"]
    assert findings[1].fixes == ("Fix loss_nonfinite first: check the batch",)


def test_a_backward_pass_that_failed_explains_the_losses_after_it() -> None:
    findings = [finding("nonfinite", 149, cure="look at the root"), finding("loss_nonfinite", 150)]
    link_to_roots(findings, findings, {})
    assert [one.follows for one in findings] == [None, "nonfinite"]
    assert findings[1].fixes == ("Fix nonfinite first: look at the root",)


def test_the_deepest_root_is_named() -> None:
    findings = [finding("lr_too_high", 0, found=60), finding("stale_gradients", 1), finding("explosion", 30)]
    link_to_roots(findings, findings, {})
    assert [one.follows for one in findings] == ["stale_gradients", None, "stale_gradients"]


def test_what_has_a_reason_of_its_own_stays_as_it_is() -> None:
    findings = [
        finding("lr_too_high", 0, last=40),
        finding("loss_spike", 150),  # long after
        finding("dead_tensor", 0, found=19),  # it never had a gradient
        finding("frozen_weights", 0),
    ]
    before = list(findings)
    assert link_to_roots(findings, findings[1:2], {}) == [before[1]]
    assert findings == before


def test_a_root_that_is_silent_explains_nothing_new() -> None:
    findings = [finding("lr_too_high", 0), finding("loss_spike", 60), finding("explosion", 110)]
    link_to_roots(findings, findings, {"lr_too_high": 80})  # not closed yet, but not seen since
    assert [one.follows for one in findings] == [None, "lr_too_high", None]


def test_a_root_is_the_one_that_was_there_then() -> None:
    findings = [
        finding("lr_too_high", 5, last=20),
        finding("explosion", 10, last=15),
        finding("stale_gradients", 400),
        finding("lr_too_high", 500),  # a consequence of what began at step 400, unlike the first
    ]
    link_to_roots(findings, findings, {"stale_gradients": 600, "lr_too_high": 600})
    assert [one.follows for one in findings] == [None, "lr_too_high", None, "stale_gradients"]
    assert findings[1].causes[0] == "Consequence of lr_too_high: lr_too_high"


def test_findings_that_could_follow_from_each_other_keep_a_root() -> None:
    findings = [finding(name, 0) for name in ("stale_gradients", "unchanged_weights", "lr_too_high")]
    link_to_roots(findings, findings, {})
    assert None in [one.follows for one in findings]


def test_every_id_is_that_of_a_rule() -> None:
    for rule in RULES.values():
        assert {*rule.follows, *rule.masks} <= set(RULES)


def never_zeroed(steps: int = 120) -> list[list[Reading]]:
    """Sums of gradients that grow without end, and a loss that rises with them."""
    return [
        [
            Reading(
                step=step,
                time=0.0,
                values={
                    "loss": 2.0 * 1.05**step,
                    "lr": 0.1,
                    "grad/norm": 1.1**step,
                    "grad/carried": float(step > 0),
                },
                tensors={"grad/norm": np.full(6, 1.1**step / 6**0.5)},
            )
        ]
        for step in range(steps)
    ]


def test_a_run_whose_gradients_are_never_zeroed_has_one_cure() -> None:
    diagnosis = Diagnosis()
    diagnosis.describe(make_layout())
    told = [one for readings in never_zeroed() for one in diagnosis.read(readings)]
    found = {one.id: one for one in diagnosis.findings if one.severity != "info"}
    assert {"stale_gradients", "loss_rising", "warmup_needed"} <= set(found)
    assert {found[name].follows for name in found if name != "stale_gradients"} == {"stale_gradients"}
    assert all("learning rate" not in cure for one in found.values() for cure in one.fixes)
    assert {one.id: one for one in told}["warmup_needed"] == found["warmup_needed"]  # as it is kept
    verdict = judge(diagnosis.findings, last_step=119, steps=120)
    assert verdict.worst is not None
    assert verdict.worst.finding.id == "stale_gradients"
