"""Runs of which one step in several is read: rules name the steps of what they saw, and count like with like."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
import pytest
from by_hand import Run, healthy_run, layout_of, only
from made_up import diagnose, make_run

from gradvitals.diagnose import RunInfo
from gradvitals.diagnose.history import LENGTH, History
from gradvitals.diagnose.rules.signal import HighEffortLowProgress
from gradvitals.diagnose.step import Step
from gradvitals.types import Finding, Layout, Reading

APART = [2, 5, 10, 20, 50]
FAULT = 200
"""Readings before the fault that is put into a run."""


def stretched(run: Run, apart: int) -> list[list[Reading]]:
    """The readings of a run, so many steps apart."""
    return [[replace(reading, step=apart * reading.step) for reading in step] for step in run.readings()]


def found(run: Run, apart: int, *ids: str) -> list[Finding]:
    """What is found in them; the same where it is saved halfway as JSON and goes on from that."""
    straight, resumed = run.diagnosis(*ids), run.diagnosis(*ids)
    half = len(run) // 2
    for number, step in enumerate(stretched(run, apart)):
        if number == half:
            resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
        straight.read(step)
        if number >= half:
            resumed.read(step)
    assert [str(f.to_json()) for f in resumed.findings] == [str(f.to_json()) for f in straight.findings]
    return straight.findings


# -- which step a reading was of ---------------------------------------------------------------------------------------


def step_after(numbers: list[int], number: int) -> Step:
    history = History()
    for earlier in numbers:
        history.push_number(earlier)
    return Step(readings=[Reading(step=number, time=0.0)], layout=Layout(), info=RunInfo(), history=history)


def test_the_step_of_an_earlier_reading() -> None:
    step = step_after([0, 1, 2, 10, 15, 20, 30], 40)
    assert [step.ago(readings) for readings in range(8)] == [40, 30, 20, 15, 10, 2, 1, 0]
    assert [step.ago(looks, every=10) for looks in range(5)] == [40, 30, 20, 10, 0]


def test_further_back_than_is_remembered_readings_followed_on_each_other() -> None:
    assert step_after([], 500).ago(100) == 400  # resumed from a state that had none
    step = step_after([*range(5000)], 5000)
    assert len(step.history.numbers) <= 2 * LENGTH
    assert [step.ago(readings) for readings in (1, LENGTH, 4000)] == [4999, 5000 - LENGTH, 1000]
    assert step.ago(400, every=10) == 1000


def test_a_state_that_was_saved_without_steps_of_readings_is_gone_on_from() -> None:
    run = dying(400)
    diagnosis = run.diagnosis("dead_tensor")
    for readings in run.readings(0, 210):
        diagnosis.read(readings)
    saved = diagnosis.state_dict()
    del saved["history"]["numbers"]
    diagnosis = run.diagnosis("dead_tensor")
    diagnosis.load_state_dict(saved)
    for readings in run.readings(210):
        diagnosis.read(readings)
    assert only(diagnosis.findings).first_step == FAULT


# -- since when ------------------------------------------------------------------------------------------------------


def carried(steps: int) -> Run:
    run = healthy_run(steps)
    run.values["grad/carried"] = (np.arange(steps) >= FAULT).astype(float)
    return run


def dying(steps: int) -> Run:
    run = healthy_run(steps)
    run.tensors["grad/norm"][FAULT:, 3] = 0
    run.add_up()
    return run


def stuck(steps: int) -> Run:
    run = healthy_run(steps)
    run.tensors["update/rms"][FAULT:, 3] = 0
    return run


def vanishing(steps: int) -> Run:
    run = healthy_run(steps)
    run.values["loss"] = np.full(steps, 2.3)
    run.tensors["grad/norm"][FAULT:] *= 1e-4 ** (3 - np.arange(8) // 2)
    run.add_up()
    return run


def underflow(steps: int) -> Run:
    run = healthy_run(steps)
    run.layout = layout_of("float16")
    run.scale_gradient(slice(FAULT, None), np.full(steps - FAULT, 1e-6))
    return run


@pytest.mark.parametrize("apart", [1, *APART])
@pytest.mark.parametrize(
    ("rule", "make"),
    [
        ("stale_gradients", carried),
        ("dead_tensor", dying),
        ("unchanged_weights", stuck),
        ("vanishing", vanishing),
        ("precision_underflow", underflow),
    ],
)
def test_a_pattern_began_at_the_reading_that_showed_it_first(rule: str, make: Callable[[int], Run], apart: int) -> None:
    finding = only(found(make(300), apart, rule))
    assert finding.first_step == FAULT * apart
    assert finding.evidence["seen"].get("at", FAULT * apart) == FAULT * apart


@pytest.mark.parametrize("apart", [10, 20, 50])
def test_swings_began_where_they_were_first_seen(apart: int) -> None:
    run = healthy_run()
    run.values["update/cosine"][FAULT:] = -0.6
    seen = next(f for f in found(run, apart, "oscillation") if f.severity == "warning")
    assert apart * FAULT < seen.first_step <= seen.found_step < apart * (FAULT + 40)
    rng = np.random.default_rng(1)
    run.tensors["grad/norm"][FAULT:, 5] *= np.exp(2.5 * rng.standard_normal(len(run) - FAULT))
    run.add_up()
    finding = only(found(run, apart, "unstable_norm"))
    assert finding.first_step == finding.found_step - apart - 9  # at the look before, within ten steps


@pytest.mark.parametrize("apart", [1, *APART])
def test_a_rising_loss_began_and_was_pushed_at_steps_that_were_read(apart: int) -> None:
    run = healthy_run()
    run.values["update/rms"][FAULT - 2] *= 100
    run.values["loss"][FAULT:] = 5.0
    told = only(found(run, apart, "loss_rising")).evidence["seen"]
    assert told["pushed"] == apart * (FAULT - 2)
    assert told["at"] % apart == 0
    assert FAULT <= told["at"] // apart < FAULT + 10


@pytest.mark.parametrize("apart", [1, *APART])
def test_a_loss_that_jumped_was_pushed_at_a_step_that_was_read(apart: int) -> None:
    run = healthy_run()
    run.values["update/rms"][FAULT - 2] *= 100
    run.values["loss"][FAULT] = 50.0
    assert only(found(run, apart, "loss_spike")).evidence["seen"]["pushed"] == apart * (FAULT - 2)


@pytest.mark.parametrize("apart", [1, *APART])
def test_what_is_told_of_the_last_readings_is_told_since_the_first_of_them(apart: int) -> None:
    run = healthy_run(1300)
    run.values["loss"] = np.append(run.values["loss"][:100], np.full(1200, run.values["loss"][100]))
    plateau = only(found(run, apart, "loss_plateau"))
    assert plateau.first_step == plateau.found_step - 1000 * apart
    assert f"since step {plateau.first_step:,}" in plateau.title
    run = healthy_run(600)
    run.info = RunInfo(optimizer="SGD")
    run.values["clip/max_norm"] = np.full(600, 0.01)
    assert found(run, apart, "clip_saturated")[0].first_step == 0  # of 40 readings, which were all there were
    run.values["clip/max_norm"] = np.full(600, 1000.0)
    assert only(found(run, apart, "clip_idle")).first_step == 0


# -- counts against what was counted -----------------------------------------------------------------------------------


def giving_up(at: Collection[int], loss: float, apart: int, steps: int = 2000) -> list[Finding]:
    """Batches are given up before some steps; those with a broken loss are always read, others one step in several."""
    diagnosis = healthy_run(1).diagnosis("batches_given_up")
    for step in range(steps):
        values = {"batches/given_up": 1.0, "batches/given_up_loss": loss} if step in at else {}
        if step % apart == 0 or (values and not math.isfinite(loss)):
            diagnosis.read([Reading(step=step, time=0.0, values={"loss": 1.0, **values})])
    return diagnosis.findings


@pytest.mark.parametrize("apart", [1, *APART])
def test_a_method_that_throws_away_a_gradient_at_every_step_stays_one(apart: int) -> None:
    assert giving_up(range(2000), 1.0, apart) == []
    assert only(giving_up([1500], 1.0, apart)).severity == "info"


@pytest.mark.parametrize("apart", [1, *APART])
def test_broken_batches_are_a_share_of_all_steps(apart: int) -> None:
    assert {f.severity for f in giving_up(range(3, 2000, 5), math.nan, apart)} == {"warning"}
    assert giving_up(range(0, 2000, 2), math.nan, apart)[-1].severity == "critical"


def lost_zeros(at: int, last: int) -> Run:
    run = healthy_run(last)
    run.values["lr"] = np.where(np.arange(last) < at, 1e-3, 1e-6)
    run.values["update/rms"] = run.values["lr"].copy()
    run.tensors["update/ratio"][:] = 1e-3
    run.values["update/ratio"][:] = 1e-3
    return run


@pytest.mark.parametrize(("apart", "after"), [(1, 3), (2, 4), (5, 5), (10, 10), (20, 20), (50, 50)])
def test_a_learning_rate_that_lost_its_zeros_is_told_once_three_steps_later_or_at_the_next_reading(
    apart: int, after: int
) -> None:
    run = lost_zeros(FAULT, 500)
    finding = only(found(run, apart, "update_ratio"))
    assert (finding.first_step, finding.found_step) == (apart * FAULT, apart * FAULT + after)
    diagnosis = run.diagnosis("update_ratio")
    told = [finding for step in stretched(run, apart) for finding in diagnosis.read(step)]
    assert [f.last_step is None for f in told] == [True, False]  # opened once, and closed


@pytest.mark.parametrize("apart", APART)
def test_a_schedule_that_comes_to_its_end_between_two_readings_is_no_cut(apart: int) -> None:
    run = lost_zeros(FAULT, 400)
    steps = apart * np.arange(400)
    run.values["lr"] = np.maximum(1e-3 * (1 - steps / (apart * FAULT - 1)), 1e-7)
    run.values["update/rms"] = run.values["lr"].copy()
    assert found(run, apart, "update_ratio") == []


@pytest.mark.parametrize("apart", [1, *APART])
def test_large_steps_without_progress(apart: int) -> None:
    run = make_run(
        steps=600,
        gsnr=lambda step: 1.0 if step < 300 else 0.0,
        norm=lambda step: 1.0 if step < 300 else 4.0,
        loss=lambda step: 1 + 2 * math.exp(-step / 60) if step < 300 else 3.0,
        every=2,
        spread=0.1,
    )
    readings = [[replace(reading, step=apart * reading.step) for reading in step] for step in run]
    finding = diagnose(readings, HighEffortLowProgress())[0]  # rarely read, it may close and open again
    assert 300 < finding.found_step / apart < 400
