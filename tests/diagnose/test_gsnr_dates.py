"""Findings about the GSNR begin where it changed, and none rests on averages of Adam that are known to be false."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from made_up import Run, diagnose, diagnose_with_breaks, make_run, same_findings

from gradvitals.diagnose import Rule, RunInfo
from gradvitals.diagnose.history import History, forgotten_at
from gradvitals.diagnose.rules.batch import EstimatorUnreliable
from gradvitals.diagnose.rules.schedule import DecayDue
from gradvitals.diagnose.rules.signal import HighEffortLowProgress, SuddenGsnrDrop
from gradvitals.diagnose.step import Step
from gradvitals.types import Layout, Reading, Source

CHANGE = 6000
SPIKE = CHANGE + 7
BETAS = (0.9, 0.99)


def broken(steps: int = 8000, source: Source = "adam") -> Run:
    """One step in 50 is read, and step 6,007; from step 6,000 on the loss and the norm are higher, without a signal."""
    run = make_run(
        steps=steps,
        gsnr=lambda step: 1.0 if step < CHANGE else 0.0,
        loss=lambda step: 1.0 if step < CHANGE else 3.0,
        norm=lambda step: 1.0 if step < CHANGE else 4.0,
        lr=lambda step: 1e-3,
        every=50,
        spread=0.1,
        source=source,
    )
    return [readings for readings in run if readings[0].step % 50 == 0 or readings[0].step == SPIKE]


def with_values(run: Run, step: int, values: dict[str, float]) -> Run:
    """The same, with other values of one step."""
    changed: Run = []
    for general, *others in run:
        own = {**general.values, **values} if general.step == step else general.values
        changed.append([replace(general, values=own), *others])
    return changed


def with_spike(run: Run, ratio: float = 100.0) -> Run:
    """The same, with a gradient of so many times the usual."""
    return with_values(run, SPIKE, {"grad/spike_ratio": ratio})


def until(run: Run, step: int) -> Run:
    return [readings for readings in run if readings[0].step < step]


# -- where they begin ------------------------------------------------------------------------------------------------


def reading(step: int, low: float, high: float, *, loss: float = 1.0, norm: float = 1.0) -> list[Reading]:
    """A step with a GSNR from Adam's moments, between two ends."""
    values = {"gsnr": (low + high) / 2, "gsnr_low": low, "gsnr_high": high}
    whole = {"loss": loss, "grad/norm": norm, "lr": 1e-3}
    return [
        Reading(step=step, time=0.0, batch_size=64.0, values=whole),
        Reading(step=step, time=0.0, source="adam", batch_size=64.0, values=values),
    ]


def at_once() -> Run:
    """As `broken`, where the first average behind the change shows all of it, as Adam's moments can."""
    run = [reading(step, 0.9, 1.1) for step in range(0, CHANGE, 50)]
    return run + [reading(step, -0.01, 0.01, loss=3.0, norm=4.0) for step in range(CHANGE, 8000, 50)]


@pytest.mark.parametrize("rule", [SuddenGsnrDrop, DecayDue])
def test_it_began_at_the_first_reading_that_shows_it(rule: type[Rule]) -> None:
    """An average reaches back a thousand steps: twenty readings, 50 steps apart."""
    [finding] = diagnose(at_once(), rule())
    assert (finding.first_step, finding.found_step) == (CHANGE, CHANGE + 100)


def test_no_progress_began_when_most_of_the_last_thirty_norms_were_large() -> None:
    [finding] = diagnose(at_once(), HighEffortLowProgress())
    assert (finding.first_step, finding.found_step) == (CHANGE + 15 * 50, CHANGE + 17 * 50)


def test_a_drop_that_an_average_shows_bit_by_bit_began_when_it_was_clear() -> None:
    [finding] = diagnose(broken(), SuddenGsnrDrop())
    assert CHANGE <= finding.first_step <= CHANGE + 500
    assert f"before step {finding.first_step:,} to" in finding.title


def test_a_gsnr_that_was_well_known_in_between_is_badly_known_since_then() -> None:
    """From step 400 to 2,000 readings are so far apart that an average holds fewer than fifteen of them."""
    wide, narrow = (-0.01, 0.01), (0.009, 0.011)
    run = [reading(step, *wide) for step in (*range(0, 400, 10), *range(400, 1000, 100))]
    run += [reading(step, *narrow) for step in range(1000, 2000, 100)]
    run += [reading(step, *wide) for step in range(2000, 8000, 50)]
    [finding] = diagnose(run, EstimatorUnreliable())
    assert finding.found_step is not None
    assert 2000 <= finding.first_step < finding.found_step


# -- what is no sudden drop ------------------------------------------------------------------------------------------


def test_a_slide_over_many_readings_is_not_sudden() -> None:
    """A straight line from 1 to 0 over sixty readings."""
    run = make_run(
        steps=6000, gsnr=lambda step: min(1.0, max(0.0, 1 - (step - 2000) / 3000)), spread=0.02, every=50, source="adam"
    )
    assert diagnose(run, SuddenGsnrDrop()) == []


@pytest.mark.parametrize(("half", "drops"), [(0.003, False), (0.0003, True)])
def test_a_gsnr_below_zero_is_read_as_zero(half: float, drops: bool) -> None:
    """0.0055 ± 0.0023, then -0.0032 ± 0.003: that it is below 0 shows an error which the interval leaves out."""
    run = [reading(step, 0.0032, 0.0078) for step in range(0, 3000, 50)]
    run += [reading(step, -0.0032 - half, -0.0032 + half) for step in range(3000, 5000, 50)]
    found = diagnose(run, SuddenGsnrDrop())
    assert [finding.evidence["seen"]["high"] for finding in found] == ([pytest.approx(half)] if drops else [])


# -- what Adam's averages hold ---------------------------------------------------------------------------------------


def test_when_a_gradient_is_forgotten() -> None:
    """By hand: (1 - b2) R² b2^t is half an ordinary square at t = ln(0.01 × 10⁴ / 0.5) / -ln 0.99 = 527.2."""
    huge = {"grad/spike_ratio": 100.0, "grad/norm": 100.0}
    assert forgotten_at(3000, huge, BETAS) == 3528
    assert forgotten_at(3000, {**huge, "clip/max_norm": 100.0}, BETAS) == 3528
    assert forgotten_at(3000, {**huge, "clip/max_norm": 1.0}, BETAS) == 0
    assert forgotten_at(3000, {**huge, "step/skipped": 1.0}, BETAS) == 0
    assert forgotten_at(3000, {**huge, "step/left_out": 1.0}, BETAS) == 0
    assert forgotten_at(3000, {"grad/spike_ratio": 4.9}, BETAS) == 0
    assert forgotten_at(3000, {"grad/spike_ratio": math.inf}, BETAS) == 0
    assert forgotten_at(3000, {}, None) == 0
    assert forgotten_at(3000, huge, None) == forgotten_at(3000, huge, (0.9, 0.999)) == 3000 + 2995


@pytest.mark.parametrize("rule", [SuddenGsnrDrop, HighEffortLowProgress, DecayDue])
def test_nothing_is_judged_by_averages_that_hold_a_huge_gradient(rule: type[Rule]) -> None:
    """False up to step 6,534; the first average of twenty readings without it is that of step 7,500."""
    run = with_spike(broken())
    assert diagnose(until(run, 7500), rule(), info=RunInfo(betas=BETAS)) == []
    left_out = with_values(run, SPIKE, {"step/left_out": 1.0})
    assert len(diagnose(until(left_out, 7500), rule(), info=RunInfo(betas=BETAS))) == 1
    # With so short a memory it is forgotten within a hundred steps.
    assert len(diagnose(until(run, 7500), rule(), info=RunInfo(betas=(0.9, 0.9)))) == 1


def test_adams_reading_is_there_again_when_a_huge_gradient_is_forgotten() -> None:
    """By hand: step 3,528, as above."""
    history = History()

    def adam(number: int, **values: float) -> Reading | None:
        general, own = Reading(step=number, time=0.0, values=values), Reading(step=number, time=0.0, source="adam")
        return Step(readings=[general, own], layout=Layout(), info=RunInfo(betas=BETAS), history=history).adam

    assert adam(2999) is not None
    assert adam(3000, **{"grad/spike_ratio": 100.0}) is None  # whichever rule asks first
    assert adam(3527) is None
    assert adam(3528) is not None


def test_micro_batches_know_nothing_of_adam() -> None:
    run = broken(source="microbatch")
    [finding] = diagnose(run, SuddenGsnrDrop())
    assert same_findings(diagnose(with_spike(run), SuddenGsnrDrop()), [finding])


def test_a_drop_that_lasts_is_found_when_they_have_forgotten() -> None:
    [finding] = diagnose(with_spike(broken()), SuddenGsnrDrop(), info=RunInfo(betas=BETAS))
    assert (finding.first_step, finding.found_step) == (7500, 7600)


def test_what_was_so_before_is_not_gone_on_from() -> None:
    """Badly known from the first to the last step: when they have forgotten, that is counted anew."""
    run = [reading(step, -0.01, 0.01) for step in range(0, 12000, 50)]
    run = with_values(run, CHANGE, {"grad/spike_ratio": 100.0})
    before, after = diagnose(run, EstimatorUnreliable(), info=RunInfo(betas=BETAS))
    assert (before.last_step, after.first_step) == (CHANGE - 50, 7500)


@pytest.mark.parametrize("rule", [SuddenGsnrDrop, HighEffortLowProgress, DecayDue, EstimatorUnreliable])
def test_resuming_changes_nothing(rule: type[Rule]) -> None:
    run = with_spike(broken(), 10.0)
    assert same_findings(diagnose_with_breaks(run, rule, (200, 6050, 6100, 7100, 7150)), diagnose(run, rule()))
