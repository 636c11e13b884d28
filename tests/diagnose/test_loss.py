"""Losses that break, jump, rise or stand still, in runs where it is known which."""

from __future__ import annotations

import math

import numpy as np
import pytest
from by_hand import Run, healthy_run, only
from hypothesis import given, settings
from hypothesis import strategies as st

from gradvitals.diagnose import RunInfo
from gradvitals.diagnose.history import fall

ALL = ("loss_nonfinite", "loss_spike", "loss_rising", "loss_plateau")


# -- loss_nonfinite ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_first_loss_that_is_not_finite(value: float) -> None:
    run = healthy_run(250)
    run.values["loss"][150] = value
    finding = only(run.findings("loss_nonfinite"))
    assert (finding.severity, finding.first_step, finding.last_step) == ("critical", 150, 150)
    assert "batch holds NaN" in finding.causes[0]
    assert "step 150" in finding.fixes[0]


def test_weights_that_broke_earlier_are_to_blame() -> None:
    run = healthy_run(200)
    run.values["grad/nonfinite"][140] = 1
    run.values["loss"][141:] = np.nan
    finding = only(run.findings("loss_nonfinite"))
    assert "since step 140" in finding.causes[0]
    assert "before step 140" in finding.fixes[0]


def test_a_skipped_step_does_not_break_weights() -> None:
    run = healthy_run(200)
    run.values["step/skipped"] = np.zeros(200)
    run.values["step/skipped"][140] = run.values["grad/nonfinite"][140] = 1
    run.values["loss"][150:] = np.nan
    assert "since step" not in only(run.findings("loss_nonfinite")).causes[0]


def test_a_run_that_diverges_until_numbers_end() -> None:
    run = healthy_run(200)
    run.scale_gradient(slice(145, 200), 10.0 ** np.arange(55))
    run.values["loss"][150:] = np.nan
    finding = only(run.findings("loss_nonfinite"))
    assert "diverged" in finding.causes[0]
    assert "lower the learning rate" in finding.fixes[0]


# -- loss_spike -------------------------------------------------------------------------------------------------------


def test_one_high_loss_is_a_spike_of_its_batch() -> None:
    run = healthy_run()
    run.values["loss"][250] = 2.2
    finding = only(run.findings(*ALL))
    assert (finding.id, finding.severity, finding.first_step, finding.last_step) == ("loss_spike", "warning", 250, 250)
    assert "batch of step 250" in finding.causes[0]
    assert finding.evidence["expected"]["loss"] == pytest.approx(0.58, rel=0.1)


@pytest.mark.parametrize(("weights", "fires"), [(100.0, False), (2.0, True)])
def test_a_class_of_large_weight_may_raise_the_loss_by_as_much(weights: float, fires: bool) -> None:
    run = healthy_run()
    run.values["loss"][250] = 2.2  # of 0.58
    run.values["head/weights"] = np.full(len(run.values["loss"]), weights)
    assert bool(run.findings("loss_spike")) is fires


def test_a_spike_after_a_large_update_is_not_the_batchs_doing() -> None:
    run = healthy_run()
    run.values["loss"][250] = 2.2
    run.values["update/rms"][249] *= 20
    assert "Step 249 moved the weights" in only(run.findings("loss_spike")).causes[0]


def test_losses_below_zero_are_judged_too() -> None:
    run = healthy_run()
    run.values["loss"] -= 5.0
    run.values["loss"][250] += 2.0
    assert only(run.findings("loss_spike")).first_step == 250


@pytest.mark.parametrize("seed", range(3))
def test_long_tails_of_small_losses_do_not_fire(seed: int) -> None:
    run = healthy_run(1500, seed, floor=0.01)
    rng = np.random.default_rng(seed)
    tail = np.where(rng.random(1500) < 0.05, 10.0, 1.0)  # one hard sample in a batch
    run.values["loss"] *= np.exp(0.6 * rng.standard_normal(1500)) * np.where(np.arange(1500) > 300, tail, 1.0)
    assert run.findings("loss_spike", "loss_rising") == []


# -- loss_rising ------------------------------------------------------------------------------------------------------


def test_harder_data_is_a_note_and_the_run_is_then_compared_with_itself() -> None:
    run = healthy_run(1000)
    run.values["loss"][250:] += 0.7
    finding = only(run.findings("loss_rising"))
    assert finding.severity == "info"
    assert 250 <= finding.found_step <= 270
    assert "data changed around step 250" in finding.causes[0]
    assert finding.last_step is not None


@pytest.mark.parametrize(("loss", "severity"), [(1.9, "warning"), (2.8, "critical")])
def test_data_that_what_was_learned_is_of_no_use_to_is_damage(loss: float, severity: str) -> None:
    run = healthy_run(loss_spread=0.02)
    run.values["loss"][250:] += loss - run.values["loss"][250:].mean()
    finding = only(run.findings("loss_rising"))
    assert finding.severity == severity
    assert "data changed around step 250" in finding.causes[0]


def test_tasks_that_take_turns_are_no_damage() -> None:
    run = healthy_run(1200)
    run.values["loss"] = run.values["loss"] + np.where(np.arange(1200) // 50 % 2, 1.0, 0.0)
    assert all(finding.severity == "info" for finding in run.findings("loss_rising"))


def test_a_loss_that_follows_the_learning_rate_up_as_before_is_not_rising() -> None:
    run = healthy_run(900, floor=0.1)
    phase = np.arange(900) % 300
    run.values["lr"] = 1e-3 * (0.01 + 0.99 * (1 + np.cos(np.pi * phase / 300)) / 2)
    run.values["loss"] = run.values["loss"] + 0.8 * run.values["lr"] / 1e-3
    assert run.findings("loss_rising") == []


def test_a_noisy_loss_that_rose_far_over_its_start_stays_found() -> None:
    run = healthy_run(600)
    noise = np.random.default_rng(0).lognormal(0, 0.25, 600)
    run.values["loss"] = noise * np.interp(np.arange(600), [0, 100, 300, 600], [1.0, 0.6, 3.0, 3.0])
    finding = only(run.findings("loss_rising"))
    assert finding.severity == "critical"
    assert finding.last_step is None


def test_a_loss_that_comes_down_from_far_over_its_start_is_not_over_before_it_is_back() -> None:
    run = healthy_run(600)
    run.values["lr"][150:] *= 1000
    run.values["loss"][152:] += np.geomspace(5000, 40, 448)
    finding = only(run.findings("loss_rising"))
    assert (finding.severity, finding.last_step) == ("critical", None)
    assert "learning rate rose" in finding.causes[0]
    run.values["loss"][300:] = 0.6  # it is back
    assert only(run.findings("loss_rising")).last_step is not None


def test_a_learning_rate_that_rose_is_to_blame() -> None:
    run = healthy_run()
    run.values["lr"][245:] *= 10
    run.values["loss"][250:] += 1.2
    finding = only(run.findings("loss_rising"))
    assert "learning rate rose" in finding.causes[0]


def test_one_gradient_far_larger_than_the_others_is_to_blame() -> None:
    run = healthy_run()
    run.values["loss"][250:] += 1.2
    run.values["grad/norm"][249] *= 300
    finding = only(run.findings("loss_rising"))
    assert finding.causes[0].startswith("The gradient of step 249 was ")
    assert "before step 249" in finding.fixes[0]
    for metric, value in (("clip/max_norm", 1.0), ("step/skipped", 1.0), ("step/left_out", 1.0)):
        held = healthy_run()
        held.values |= {"loss": run.values["loss"], "grad/norm": run.values["grad/norm"]}
        held.values[metric] = np.full(400, value)
        assert "data changed" in only(held.findings("loss_rising")).causes[0], metric  # it cannot have done it
    run.values["grad/norm"][[*range(245, 249), *range(250, 260)]] *= 300  # all are: they do not tell what came first
    finding = only(run.findings("loss_rising"))
    assert "data changed" in finding.causes[0]


def test_a_loss_over_where_it_began_is_critical() -> None:
    run = healthy_run()
    run.values["loss"][250:] = np.linspace(0.6, 8, 150)
    finding = only(run.findings("loss_rising"))
    assert finding.severity == "critical"


def test_a_loss_that_rises_from_the_first_steps_on() -> None:
    run = healthy_run(100)
    run.values["loss"][:30] = np.minimum(2.3 * 1.4 ** np.arange(30), 13.0)
    finding = run.findings("loss_rising")[0]
    assert finding.found_step <= 10
    assert "learning rate" in finding.causes[0]


def test_one_broken_batch_is_no_rise() -> None:
    run = healthy_run()
    run.values["loss"][250] = 500.0
    assert run.findings("loss_rising") == []


# -- loss_plateau -----------------------------------------------------------------------------------------------------


def flat_run(steps: int = 200, level: float = 2.3, first: float = 2.5) -> Run:
    run = healthy_run(steps)
    noise = 0.02 * np.random.default_rng(3).standard_normal(steps)
    run.values["loss"] = level + (first - level) * np.exp(-np.arange(steps) / 8) + noise
    return run


def test_a_loss_that_never_falls() -> None:
    finding = only(flat_run().findings("loss_plateau"))
    assert (finding.severity, finding.found_step) == ("warning", 80)
    assert "may not match" in finding.causes[0]


def test_what_is_told_of_a_plateau_is_how_far_the_loss_fell_since_the_start() -> None:
    finding = only(flat_run(first=2.5).findings("loss_plateau"))
    assert "is flat, barely below its start" in finding.title
    assert finding.evidence["seen"]["fell"] == pytest.approx(0.11, abs=0.03)
    finding = only(flat_run(first=2.3).findings("loss_plateau"))
    assert "has hardly fallen since the start" in finding.title
    assert abs(finding.evidence["seen"]["fell"]) < 0.02


def test_a_loss_that_has_not_begun_to_fall_is_no_cause_for_alarm_yet() -> None:
    run = flat_run(400)
    run.values["loss"][90:] *= np.linspace(1.0, 0.5, 310)
    finding = only(run.findings("loss_plateau"))
    assert (finding.severity, finding.found_step) == ("info", 80)
    finding = only(run.findings("loss_plateau", settings={"loss_plateau": {"sure": 80}}))
    assert finding.severity == "warning"


def test_a_learning_rate_too_small_is_named_and_a_larger_one_proposed() -> None:
    run = flat_run()
    run.values["update/ratio"] *= 1e-4
    run.values["lr"] *= 1e-4
    finding = only(run.findings("loss_plateau"))
    assert "too low" in finding.causes[0]
    assert "Raise the learning rate" in finding.fixes[0]


def test_weight_decay_that_takes_the_weights_is_the_root_and_stays() -> None:
    run = flat_run()
    run.info = RunInfo(optimizer="AdamW", weight_decay=100.0)
    run.values["weight/norm"] = 10 * 0.98 ** np.arange(len(run))
    found = {finding.id: finding for finding in run.findings("loss_plateau", "strong_decay")}
    assert found["loss_plateau"].follows == "strong_decay"
    assert found["strong_decay"].last_step is None
    assert 0 < found["strong_decay"].fixes[0].change["weight_decay"] < 1
    run.info = RunInfo(optimizer="AdamW", weight_decay=0.1)
    assert run.findings("strong_decay") == []
    run.values["lr"][:] = 0.3  # this decay is ordinary, so the learning rate is the cause
    assert run.findings("strong_decay") == []


def test_nothing_is_said_in_a_warmup() -> None:
    run = flat_run(300)
    run.values["lr"] = np.linspace(1e-6, 1e-3, 300)
    assert run.findings("loss_plateau") == []


def test_a_run_whose_begin_was_not_seen_is_not_said_to_have_never_learned() -> None:
    run = flat_run(300)
    for name in (run.values, run.tensors):
        name["update/ratio"] *= 1e-2
    diagnosis = run.diagnosis("loss_plateau", "update_ratio")
    for step in run.readings(100):
        diagnosis.read(step)
    assert diagnosis.findings == []


def test_a_noisy_loss_may_take_its_time() -> None:
    run = healthy_run(300, loss_spread=0.3, floor=0.9)
    assert run.findings("loss_plateau") == []


def test_a_late_plateau_is_advice() -> None:
    run = healthy_run(2000, loss_spread=0.02)
    finding = only(run.findings("loss_plateau"))
    assert finding.severity == "info"
    assert 1000 < finding.found_step < 1600
    assert "has not fallen since" in finding.title


# -- what they rest on ------------------------------------------------------------------------------------------------


@given(st.floats(-10, 10), st.floats(-1, 1), st.integers(20, 200))
@settings(max_examples=50, deadline=None)
def test_fall_of_a_line_is_its_height(level: float, slope: float, count: int) -> None:
    fell, error = fall(level - slope * np.arange(count))
    assert fell == pytest.approx(slope * (count - 1), abs=1e-6)
    assert error < 1e-6


def test_the_error_of_a_fall_is_right() -> None:
    rng = np.random.default_rng(0)
    found = np.array([fall(rng.standard_normal(100)) for _ in range(500)])
    assert found[:, 0].std() == pytest.approx(found[:, 1].mean(), rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_healthy_losses_are_no_alarm(seed: int) -> None:
    run = healthy_run(1500, seed, loss_spread=(0.02, 0.1, 0.3)[seed], warmup=(10, 100, 300)[seed], floor=0.3)
    assert [f for f in run.findings(*ALL) if f.severity != "info"] == []


# -- against the trivial prediction -----------------------------------------------------------------------------------


def stuck_run(level: float, steps: int = 400, noise: float = 0.25) -> Run:
    """A regression whose loss starts at 1.5, reaches a level within 20 steps, and stays there."""
    run = healthy_run(steps)
    rng = np.random.default_rng(0)
    losses = level + 0.5 * np.exp(-np.arange(steps) / 5) + noise * rng.standard_normal(steps)
    run.values["loss"] = np.maximum(losses, 0.05)
    run.values["target/trivial_loss"] = np.ones(steps)
    return run


def test_a_loss_that_is_no_better_than_predicting_the_mean_stands_still_whatever_its_start() -> None:
    finding = only(stuck_run(1.02).findings("loss_plateau"))
    assert (finding.severity, finding.last_step) == ("warning", None)


def test_a_run_that_ends_without_using_its_inputs_has_learned_nothing() -> None:
    run = stuck_run(1.0, noise=0.02)
    run.values["loss"] += np.linspace(2.0, 0.1, 400)  # it falls all the time, to what predicting the mean gives
    diagnosis = run.diagnosis("loss_plateau")
    for step in run.readings():
        diagnosis.read(step)
    finding = only(diagnosis.finish())
    assert finding.severity == "warning"
    assert "ignoring the inputs" in finding.title


def test_a_noisy_loss_below_that_of_predicting_the_mean_is_no_plateau() -> None:
    assert stuck_run(0.75).findings("loss_plateau") == []


def test_a_loss_that_stood_still_does_so_until_a_tenth_is_gone() -> None:
    run = stuck_run(1.0, steps=900, noise=0.02)
    run.values["loss"][300:] -= np.minimum(np.arange(600) / 600 * 0.06, 0.06)
    assert only(run.findings("loss_plateau")).last_step is None
    run.values["loss"][300:] -= np.minimum(np.arange(600) / 200 * 0.4, 0.4)
    assert only(run.findings("loss_plateau")).last_step is not None


def test_outputs_that_explode_are_named_when_the_loss_becomes_nan() -> None:
    run = stuck_run(1.0)
    run.values["loss"][1], run.values["loss"][2:] = 1e9, np.nan
    finding = only(run.findings("loss_nonfinite"))
    assert "Outputs explode" in finding.causes[0]
    assert "clip gradients" in finding.fixes[0].text


def test_a_step_that_replaced_the_weights_just_before_nan_is_named() -> None:
    run = healthy_run(40)
    run.every = 1
    run.values["update/ratio"][20] = 0.9
    run.values["loss"][21:] = np.nan
    finding = only(run.findings("loss_nonfinite"))
    assert "changed the weights by 90%" in finding.causes[0]


def test_short_steps_explain_a_run_that_ends_hardly_better_than_ignoring_its_inputs() -> None:
    for ratio, expected in ((2e-5, ["warning"]), (2e-3, [])):
        run = healthy_run(400)
        run.values["loss"] = 2.0 - 2.5e-4 * np.arange(400) + 0.1 * np.sin(np.arange(400))
        run.values["target/trivial_loss"] = np.full(400, 2.1)
        run.values["update/ratio"] = np.full(400, ratio)
        diagnosis = run.diagnosis("loss_plateau")
        for step in run.readings():
            diagnosis.read(step)
        diagnosis.finish()
        assert [f.severity for f in diagnosis.findings if "too low" in f.causes[0]] == expected


# -- memorizing and schedules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "severity"), [(0.40, "info"), (0.90, "warning")])
def test_memorizing_is_a_note_until_much_of_what_validation_gained_is_lost(last: float, severity: str) -> None:
    run = healthy_run(400, floor=0.01)
    run.values["loss"] = 2.0 * np.exp(-np.arange(400) / 80)
    run.values["val/loss"] = np.full(400, np.nan)
    run.values["val/loss"][39::40] = [0.9, 0.5, 0.32, 0.30, 0.32, 0.34, 0.36, 0.38, 0.39, last]
    assert only(run.findings("memorizing")).severity == severity


def test_overfitting_is_told_with_the_latest_numbers() -> None:
    run = healthy_run(1000, floor=0.01)
    run.values["loss"] = 2.0 * np.exp(-np.arange(1000) / 80)
    run.values["val/loss"] = np.full(1000, np.nan)
    run.values["val/loss"][39::40] = [0.9, 0.5, 0.32, 0.30, *np.linspace(0.32, 2.0, 21)]
    diagnosis, titles = run.diagnosis("memorizing"), []
    for step in run.readings():
        titles += [finding.title for finding in diagnosis.read(step)]
    assert len(titles) == len(set(titles)) > 8  # renewed while it is open
    assert all(title.startswith("The validation loss rose from 0.3 at step 159 to ") for title in titles)
    diagnosis.finish()
    finding = only(diagnosis.findings)
    assert (finding.severity, finding.first_step, finding.last_step) == ("warning", 159, None)
    assert "to 2, while the training loss fell to " in finding.title
    assert finding.evidence["seen"]["val"] == 2.0
    assert finding.evidence["seen"]["loss"] == pytest.approx(2.0 * math.exp(-989 / 80), rel=0.05)
    assert "latest" not in finding.evidence


@pytest.mark.parametrize(("stands_at", "severities"), [(0.9, ["warning"]), (0.1, [])])
def test_validation_that_stands_still_far_over_the_training_loss_is_memorizing(
    stands_at: float, severities: list[str]
) -> None:
    run = healthy_run(400)
    run.values["loss"] = 2.0 * np.exp(-np.arange(400) / 40)
    run.values["val/loss"] = np.full(400, np.nan)
    run.values["val/loss"][39::40] = stands_at * np.array([1.1, 1.0, *[1.01] * 8])
    assert [finding.severity for finding in run.findings("memorizing")] == severities


@pytest.mark.parametrize(("floor", "severity"), [(0.9, "warning"), (0.1, "info")])
def test_a_schedule_that_is_over_long_before_the_run(floor: float, severity: str) -> None:
    run = healthy_run(400, floor=floor)
    run.values["lr"] = 0.1 * 0.5 ** (np.arange(400) // 5)
    finding = only(run.findings("schedule_over"))
    assert finding.severity == severity
    assert "scheduler.step()" in finding.causes[0]


def test_a_cosine_to_zero_is_a_schedule_that_lasts() -> None:
    run = healthy_run(400)
    run.values["lr"] = 0.05 * (1 + np.cos(np.pi * np.arange(400) / 400))
    assert run.findings("schedule_over") == []


def test_a_run_of_few_steps_whose_loss_still_falls_gets_a_note() -> None:
    run = healthy_run(60)
    run.values["loss"], run.values["lr"] = 2.3 - 0.02 * np.arange(60), np.full(60, 1e-3)
    diagnosis = run.diagnosis("still_falling")
    for step in run.readings():
        diagnosis.read(step)
    assert only(diagnosis.finish()).severity == "info"


def test_a_run_that_ends_in_nan_was_not_stopped_while_learning() -> None:
    run = healthy_run(100)
    run.values["loss"], run.values["lr"] = 2.3 - 0.02 * np.arange(100), np.full(100, 1e-3)
    run.values["loss"][80:] = np.nan
    diagnosis = run.diagnosis("still_falling")
    for step in run.readings():
        diagnosis.read(step)
    assert diagnosis.finish() == []


@pytest.mark.parametrize(("factor", "found"), [(50.0, True), (1.0, False)])
def test_a_run_wrecked_by_a_learning_rate_that_jumped_is_not_healthy_at_its_end(factor: float, found: bool) -> None:
    run, t = healthy_run(378), np.arange(378)
    run.values["lr"] = np.where(t < 189, 1e-3, factor * 1e-3)
    run.values["loss"] = np.where(t < 189, 0.3 + 2 * np.exp(-t / 50), 2.3 + 3 * np.exp(-np.abs(t - 189) / 5))
    diagnosis = run.diagnosis("loss_rising", "loss_spike")
    for step in run.readings():
        diagnosis.read(step)
    diagnosis.finish()
    rose = [one for one in diagnosis.findings if "learning rate rose from 0.001" in str(one.causes[0])]
    assert any(one.id == "loss_rising" and one.last_step is None for one in rose) == found


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_a_loss_that_returns_to_its_start_is_followed_over_calm_steps(noise: float) -> None:
    run = healthy_run(2000)
    rng, t = np.random.default_rng(0), np.arange(2000) % 100
    run.values["loss"] = 2 * np.exp(-t / 10) * (1 + noise * rng.standard_normal(2000))
    finding = only(run.findings("loss_resets"))
    assert (finding.severity, finding.last_step) == ("warning", None)
    assert "every 100 steps" in finding.title


@pytest.mark.parametrize(("falls", "found"), [(True, False), (False, True)])
def test_a_validation_loss_that_is_a_sum_falls_all_the_same(falls: bool, found: bool) -> None:
    run = healthy_run(400)
    run.values["val/loss"] = np.full(400, np.nan)
    run.values["val/loss"][49::50] = (40 * run.values["loss"] if falls else np.full(400, 40.0))[49::50]
    assert bool([one for one in run.findings("memorizing") if one.severity == "warning"]) == found


def test_two_tasks_in_turn_are_no_resets() -> None:
    run = healthy_run(2000)
    t, task = np.arange(2000), np.arange(2000) // 50 % 2
    run.values["loss"] = np.where(task, 3.0, 1.4) * (0.2 + 0.8 * np.exp(-(t % 50) / 10 - t / 600))
    assert run.findings("loss_resets") == []
