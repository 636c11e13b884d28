"""What shows after steps that were not read may have begun in one of them: findings say so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from by_hand import Run, healthy_run, only

from gradvitals.diagnose.message import unread_steps
from gradvitals.report.replay import replay
from gradvitals.report.verdict import judge
from gradvitals.store import RunWriter, open_run
from gradvitals.types import Finding, Reading

BROKEN = 150
"""The reading from which on nothing is finite."""


def broken(tensors: slice = slice(None), *, loss: bool = True) -> Run:
    run = healthy_run()
    run.tensors["grad/nonfinite"][BROKEN, tensors] = 1.0
    run.tensors["grad/norm"][BROKEN, tensors] = np.nan
    run.values["grad/norm"][BROKEN] = np.nan
    run.values["grad/nonfinite"][BROKEN] = 1.0
    if not loss:
        del run.values["loss"]
    return run


def found(run: Run, apart: int, rule: str) -> Finding:
    diagnosis = run.diagnosis(rule)
    for step in run.readings():
        diagnosis.read([replace(reading, step=apart * reading.step) for reading in step])
    return only(diagnosis.findings)


@pytest.mark.parametrize("apart", [2, 50])
def test_a_gradient_that_is_nowhere_finite_may_come_from_a_step_that_was_not_read(apart: int) -> None:
    finding = found(broken(), apart, "nonfinite")
    assert finding.first_step == apart * BROKEN
    assert finding.evidence["unread"] == apart - 1
    assert "first in" not in finding.title
    assert finding.causes[0].startswith(f"{unread_steps(apart - 1).capitalize()} not read")
    assert f"before step {apart * (BROKEN - 1) + 1:,} and" in finding.fixes[0]


def test_where_every_step_is_read_it_is_said_where_it_began() -> None:
    finding = found(broken(), 1, "nonfinite")
    assert "unread" not in finding.evidence
    assert f"first in {finding.tensors[0]}, at step {BROKEN}" in finding.title
    assert "not read" not in " ".join(finding.causes)


def test_where_some_tensors_are_finite_the_step_itself_has_broken_the_others() -> None:
    finding = found(broken(slice(0, 2)), 50, "nonfinite")
    assert f"first in {finding.tensors[0]}," in finding.title
    assert "not read" not in " ".join(finding.causes)


def test_a_loss_that_nobody_told_is_not_spoken_of() -> None:
    finding = found(broken(loss=False), 1, "nonfinite")
    assert "loss" not in finding.evidence["seen"]
    assert finding.causes[0].startswith("No gradient is finite: backward fails")
    assert "and the loss is" in found(broken(), 1, "nonfinite").causes[0]


def test_a_loss_that_is_not_finite_after_steps_that_were_not_read() -> None:
    run = healthy_run()
    run.values["loss"][BROKEN:] = np.nan
    finding = found(run, 20, "loss_nonfinite")
    assert finding.causes[0].startswith(
        "The 19 steps before it were not read and may have left NaN or infinite weights"
    )
    assert finding.fixes[0].startswith(
        f"Restore a checkpoint from before step {20 * (BROKEN - 1) + 1:,} and check the batch"
    )
    assert "Check the batch of step 150" in found(run, 1, "loss_nonfinite").fixes[0]


def test_what_is_fine_is_fine_up_to_the_last_step_that_was_read() -> None:
    run = broken()
    open_end = replace(found(run, 50, "nonfinite"), last_step=None)
    verdict = judge([open_end], last_step=50 * BROKEN, steps=50 * BROKEN + 1, read=BROKEN + 1)
    assert verdict.ranked[0].unread_before == 49
    assert "(the 49 steps before it were not read)" in verdict.ranked[0].when(live=False)


@pytest.mark.parametrize("unread", ["x", None, -3, 1e9, [4], {}])
def test_a_number_that_is_none_is_left_aside(unread: object) -> None:
    odd = replace(found(broken(), 50, "nonfinite"), last_step=None, evidence={"unread": unread})
    verdict = judge([odd], last_step=50 * BROKEN, steps=50 * BROKEN + 1, read=BROKEN + 1)
    assert verdict.ranked[0].unread_before == 0


def test_a_last_step_that_was_not_read_closes_nothing_when_a_run_is_judged_again(tmp_path: Path) -> None:
    run = healthy_run(steps=200)
    run.values["loss"][-2:] = np.nan
    last = 50 * 199
    with RunWriter(tmp_path / "run", meta={}) as writer:
        writer.write(run.layout)
        for step in run.readings():
            for reading in step:
                writer.write(replace(reading, step=50 * reading.step))
        writer.write(Reading(step=last + 49, time=1e6))
    with open_run(tmp_path / "run") as kept:
        assert kept.last_step == last + 49
        (finding,) = (one for one in replay(kept).findings if one.id == "loss_nonfinite")
        assert (finding.first_step, finding.last_step) == (last - 50, None)
