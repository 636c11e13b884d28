"""Mistakes in the training loop itself, in runs where it is known which."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from by_hand import Run, healthy_run, only


def never_zeroed(steps: int = 200) -> Run:
    run = healthy_run(steps)
    run.values["grad/carried"] = np.append(0.0, np.ones(steps - 1))
    return run


def test_gradients_that_are_never_zeroed_are_a_warning_while_the_loss_falls() -> None:
    finding = only(never_zeroed().findings("stale_gradients"))
    assert finding.fixes[0].change == {"zero_grad": "after_step"}
    assert (finding.severity, finding.first_step, finding.found_step) == ("warning", 1, 5)


def test_gradients_that_are_never_zeroed_are_critical_once_the_loss_rises_and_are_named_as_its_cause() -> None:
    run = never_zeroed()
    run.values["loss"] = 2.3 * np.maximum(1.0, np.exp((np.arange(200) - 60) / 40))
    stale, rising = run.findings("stale_gradients", "loss_rising")
    assert (stale.id, stale.severity, stale.first_step) == ("stale_gradients", "critical", 1)
    assert (rising.id, rising.severity) == ("loss_rising", "critical")
    assert stale.first_step < rising.first_step  # of two as severe, what began first is told first
    assert "not zeroed" in rising.causes[0]
    assert "zero_grad()" in rising.fixes[0]


def test_swings_of_gradients_that_are_never_zeroed_are_not_laid_to_the_batch() -> None:
    run = never_zeroed()
    run.values["loss"] = 2.3 * np.where(np.arange(200) % 2, 1.3, 0.8)
    assert run.findings("oscillation") == []
    run.values["grad/carried"][:] = 0
    finding = only(run.findings("oscillation"))
    assert "noise_scale" not in finding.evidence["seen"]  # it is not known here


def test_frozen_tensors_that_the_optimizer_holds_are_noted() -> None:
    run = healthy_run(60)
    assert run.findings("frozen_weights") == []
    frozen = (2, 3)
    tensors = tuple(replace(info, frozen=info.index in frozen) for info in run.layout.tensors)
    run.layout = replace(run.layout, tensors=tensors)
    finding = only(run.findings("frozen_weights"))
    assert (finding.severity, finding.first_step, finding.last_step) == ("info", 0, None)
    assert finding.title.startswith("2 of 8 tensors are frozen")
    assert finding.tensors == ("layers.1.weight", "layers.1.bias")


def one_side(steps: int = 200) -> Run:
    run = healthy_run(steps)
    run.values["loss"] = 0.7 * np.exp(np.arange(steps) / 60)
    return run


def test_the_loss_of_one_side_of_a_game_is_not_judged_for_rising() -> None:
    run = one_side()
    assert only(run.findings("loss_rising")).severity == "critical"
    run.values["step/in_turn"] = np.ones(len(run))
    found = {finding.id: finding for finding in run.findings()}
    assert {finding.id for finding in found.values() if finding.severity != "info"} == set()
    assert found["trained_in_turn"].severity == "info"
    assert "GAN" in found["trained_in_turn"].title


def test_what_was_found_before_a_game_was_known_closes() -> None:
    run = one_side(400)
    run.values["step/in_turn"] = np.where(np.arange(400) < 150, np.nan, 1.0)
    before = only(run.findings("loss_rising"))
    assert before.last_step is not None
    assert before.last_step < 150


def test_nan_is_told_of_a_game_too() -> None:
    run = one_side(60)
    run.values["step/in_turn"] = np.ones(60)
    run.values["loss"][50] = np.nan
    assert only(run.findings("loss_nonfinite")).severity == "critical"


def throwing_away(at: list[int], loss: float = 1.0, steps: int = 200) -> Run:
    run = healthy_run(steps)
    run.values["batches/given_up"] = np.full(steps, np.nan)
    run.values["batches/given_up_loss"] = np.full(steps, np.nan)
    run.values["batches/given_up"][at] = 1.0
    run.values["batches/given_up_loss"][at] = loss
    return run


def test_batches_with_a_broken_loss_that_the_loop_gave_up_are_a_warning() -> None:
    finding = only(throwing_away([40, 60], np.inf).findings("batches_given_up"))
    assert (finding.severity, finding.first_step, finding.found_step) == ("warning", 40, 40)
    assert "loss was inf" in finding.causes[0]
    assert "batch counter is ahead" in finding.fixes[0]
    assert not any("meant" in cure for cure in finding.fixes)


def test_batches_with_a_broken_gradient_are_a_warning_though_their_loss_was_finite() -> None:
    run = throwing_away([40, 60])
    run.values["batches/given_up_norm"] = np.full(200, np.nan)
    run.values["batches/given_up_norm"][[40, 60]] = [np.inf, 3.0]
    finding = only(run.findings("batches_given_up"))
    assert (finding.severity, finding.first_step) == ("warning", 40)
    assert "gradient norm was inf" in finding.causes[0]
    assert finding.evidence["seen"]["norm"] == np.inf
    assert "loss" not in finding.evidence["seen"]


def test_batches_that_the_loop_gave_up_for_reasons_of_its_own_are_noted() -> None:
    finding = only(throwing_away([40]).findings("batches_given_up"))
    assert finding.severity == "info"
    assert not any("NaN" in words for words in (*finding.causes, *finding.fixes))


def test_a_batch_given_up_early_is_told_once_a_game_would_be_known() -> None:
    finding = only(throwing_away([3], np.inf).findings("batches_given_up"))
    assert (finding.first_step, finding.found_step) == (3, 20)


def test_a_method_that_throws_away_a_gradient_at_every_step_is_no_exception() -> None:
    assert throwing_away(list(range(200))).findings("batches_given_up") == []
    assert throwing_away(list(range(0, 200, 2))).findings("batches_given_up") == []


def test_what_one_side_of_a_game_throws_away_is_no_batch() -> None:
    run = throwing_away(list(range(4, 200, 5)))
    run.values["step/in_turn"] = np.where(np.arange(200) < 15, 0.0, 1.0)
    assert run.findings("batches_given_up") == []
