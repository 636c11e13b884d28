"""Gradients that are broken, too large, too small or unsteady, in runs where it is known which."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from by_hand import Run, healthy_run, only

# -- nonfinite ------------------------------------------------------------------------------------------------------


def with_nan(run: Run, step: int, tensors: list[int], count: float = 1.0) -> Run:
    run.tensors["grad/nonfinite"][step, tensors] = count
    run.tensors["grad/norm"][step, tensors] = np.nan
    run.values["grad/norm"][step] = np.nan
    run.values["grad/nonfinite"][step] = count * len(tensors)
    return run


def test_nonfinite_names_the_first_tensor_in_the_order_of_backward() -> None:
    run = with_nan(healthy_run(), 120, [0, 2, 3], 5.0)
    finding = only(run.findings("nonfinite"))
    assert (finding.severity, finding.first_step, finding.last_step) == ("critical", 120, 120)
    assert finding.tensors == ("layers.1.bias", "layers.1.weight", "layers.0.weight")
    assert "3 of 8 tensors" in finding.title
    assert finding.evidence["seen"]["share"] == pytest.approx(15 / (32 + 32 * 32 + 64 * 32))
    assert "layers.1.bias" in finding.causes[0]
    assert "step 120" in finding.fixes[0]


def test_nonfinite_keeps_its_origin_when_all_is_nan_a_step_later() -> None:
    run = with_nan(healthy_run(), 120, [2])
    for step in range(121, 400):
        with_nan(run, step, list(range(8)))
        run.values["loss"][step] = np.nan
    finding = only(run.findings("nonfinite"))
    assert finding.tensors == ("layers.1.weight",)
    assert "backward fails in layers.1.weight" in finding.causes[0]


def test_nonfinite_tells_the_forward_pass_from_the_backward_pass() -> None:
    run = with_nan(healthy_run(), 120, list(range(8)))
    run.values["loss"][120] = np.nan
    assert "the forward pass fails" in only(run.findings("nonfinite")).causes[0]
    run.values["loss"][120] = 1.0
    assert "fails at the loss itself" in only(run.findings("nonfinite")).causes[0]


def test_a_scaler_that_looks_for_its_scale_is_no_alarm_until_it_never_finds_it() -> None:
    run = healthy_run()
    run.values["step/skipped"] = np.zeros(len(run))
    for step in (0, 1, 2, 200):
        with_nan(run, step, list(range(8)))
        run.values["step/skipped"][step] = 1
    assert [f.severity for f in run.findings("nonfinite")] == ["info", "info"]
    for step in range(300, 330):
        with_nan(run, step, list(range(8)))
        run.values["step/skipped"][step] = 1
    last = run.findings("nonfinite")[-1]
    assert (last.severity, last.first_step) == ("critical", 300)


# -- explosion ------------------------------------------------------------------------------------------------------


def test_one_large_gradient_is_a_note_unless_the_loss_stays_up() -> None:
    run = healthy_run()
    run.scale_gradient(150, 30.0)
    run.values["loss"][150] *= 5
    finding = only(run.findings("explosion"))
    assert (finding.severity, finding.first_step, finding.found_step, finding.last_step) == ("info", 150, 150, 150)
    assert 20 < finding.evidence["seen"]["ratio"] < 60
    run.values["loss"][151:] *= 2
    finding = only(run.findings("explosion"))
    assert (finding.severity, finding.first_step, finding.last_step) == ("warning", 150, 150)
    assert "batch of step 150 is corrupted" in finding.causes[0]
    assert "Skip the batch of step 150" in finding.fixes[0]


def test_gradients_of_a_rare_class_become_normal() -> None:
    run = healthy_run(1000)
    rare = np.random.default_rng(3).random(1000) < 0.1
    run.scale_gradient(np.flatnonzero(rare).tolist(), 15.0)
    run.values["loss"][rare] *= 6
    assert all(finding.severity == "info" for finding in run.findings("explosion"))
    assert [finding.first_step for finding in run.findings("loss_spike") if finding.first_step > 100] == []


def test_a_harmless_spike_of_two_steps_is_dated_alike_in_both_texts() -> None:
    run = healthy_run(spread=0.05)
    run.scale_gradient(150, 3.0)
    run.scale_gradient(151, 4.0)
    finding = only(run.findings("explosion"))
    assert (finding.severity, finding.first_step) == ("info", 150)
    assert finding.fixes[0].text.startswith("No action needed at step 150;")


def test_a_spike_of_one_tensor_that_the_norm_of_all_hides() -> None:
    run = healthy_run(spread=0.1)
    run.scale_gradient(300, 20.0, tensor=3)
    assert run.values["grad/norm"][300] < 4 * np.median(run.values["grad/norm"])
    finding = only(run.findings("explosion"))
    assert (finding.first_step, finding.tensors) == (300, ("layers.1.bias",))


def test_an_explosion_that_goes_on_with_the_loss_is_critical_and_the_learning_rates_doing() -> None:
    run = healthy_run()
    run.values["lr"][200:] *= 30
    growth = np.minimum(2.0 ** np.arange(200), 1e6)
    run.scale_gradient(slice(200, 400), growth)
    run.values["loss"][202:] = 50
    finding = run.findings("explosion")[0]
    assert finding.severity == "critical"
    assert 201 <= finding.first_step <= 203
    assert "learning rate" in finding.causes[0]


def test_updates_that_stay_large_after_the_gradient_recovered_are_its_batchs_doing_still() -> None:
    run = healthy_run()
    run.scale_gradient(200, 100.0)
    for name in (run.values, run.tensors):
        for step in range(200, 230):
            name["update/rms"][step] *= 1 + 50 * 0.9 ** (step - 200)
    finding = only(run.findings("explosion"))
    assert (finding.first_step, finding.last_step) == (200, 200)
    assert finding.causes[0].startswith("The batch of step 200 is corrupted")
    assert "stayed in the optimizer's momentum" in finding.causes[0]
    assert finding.fixes[0].startswith("Skip the batch of step 200")
    assert "reset the optimizer state" in finding.fixes[0]


def test_an_explosion_that_an_update_spike_came_before_is_momentums_doing() -> None:
    run = healthy_run()
    run.values["update/rms"][200] *= 100
    run.scale_gradient([201, 202, 203], [30.0, 20.0, 10.0])
    assert "momentum" in only(run.findings("explosion")).causes[0]


def test_what_clipping_takes_care_of_is_told_without_alarm() -> None:
    run = healthy_run()
    run.values["clip/max_norm"] = np.ones(len(run))
    run.scale_gradient(slice(150, 170), 100.0)
    run.values["loss"][150:] *= np.minimum(2.0 + np.arange(250), 10)
    assert run.findings("explosion")[0].severity == "info"
    del run.values["clip/max_norm"]
    assert run.findings("explosion")[0].severity == "critical"


def test_slow_growth_with_a_rising_loss_is_found_and_growth_alone_is_not() -> None:
    run = healthy_run(600)
    run.scale_gradient(slice(200, 600), 1.015 ** np.arange(400))
    assert run.findings("explosion") == []
    run.values["loss"][200:] *= np.linspace(1, 6, 400)
    finding = only(run.findings("explosion"))
    assert 250 < finding.first_step < 450
    assert "has grown" in finding.title


def test_growth_in_one_side_of_a_game_is_found_whatever_its_loss_does() -> None:
    run = healthy_run(800)
    run.values["step/in_turn"] = np.ones(800)
    run.scale_gradient(slice(200, 800), 1.005 ** np.arange(600))  # twentyfold
    assert run.findings("explosion") == []
    run.scale_gradient(slice(200, 800), 1.01 ** np.arange(600))
    assert "has grown" in only(run.findings("explosion")).title


def test_weights_too_large_at_the_start() -> None:
    run = healthy_run()
    run.scale_gradient(slice(0, 20), 400.0, tensor=2)
    finding = only(run.findings("explosion"))
    assert (finding.first_step, finding.tensors) == (0, ("layers.1.weight",))
    assert "initial weights are too large" in finding.causes[0]


def test_what_the_first_steps_made_was_not_there_from_the_start() -> None:
    run = healthy_run()
    run.scale_gradient(slice(1, 20), 400.0, tensor=2)
    assert run.findings("explosion") == []


def test_a_handful_of_weights_says_little_about_the_start() -> None:
    """Two numbers of norm 1.5, with a gradient of norm 0.4 and a loss that is small by chance."""
    run = healthy_run()
    info = run.layout.tensors[1]
    tensors = (*run.layout.tensors[:1], replace(info, shape=(2,)), *run.layout.tensors[2:])
    run.layout = replace(run.layout, tensors=tensors)
    run.tensors["weight/norm"][:, 1], run.tensors["grad/norm"][:, 1], run.values["loss"][0] = 1.5, 0.4, 0.2
    run.add_up()
    assert run.findings("explosion") == []


@pytest.mark.parametrize("loss", [-0.02, 0.02])
def test_a_loss_that_can_have_either_sign_is_no_measure_of_the_start(loss: float) -> None:
    """As that of a generator in a Wasserstein GAN, which begins near 0."""
    run = healthy_run()
    run.values["loss"][:] = 2.3
    run.scale_gradient(slice(None), np.full(len(run), 0.4))
    assert run.findings("explosion") == []
    run.values["loss"][:] = loss
    assert run.findings("explosion") == []


def test_a_loss_on_the_wrong_scale() -> None:
    run = healthy_run()
    run.values["loss"] *= 1e6
    run.scale_gradient(slice(None), np.full(len(run), 1e6))
    finding = only(run.findings("explosion"))
    assert (finding.first_step, finding.tensors) == (0, ())
    assert "wrong scale" in finding.causes[0]


def test_the_check_against_the_learning_rate_is_an_option() -> None:
    run = healthy_run()
    run.values["lr"] = np.full(len(run), 10.0)
    assert run.findings("explosion") == []
    assert run.findings("explosion", settings={"explosion": {"lr_check": True}})


# -- vanishing ------------------------------------------------------------------------------------------------------


def test_vanishing_names_the_depth_at_which_the_signal_dies() -> None:
    run = healthy_run()
    run.values["loss"] = np.full(len(run), 2.3)
    run.tensors["grad/norm"] *= 1e-4 ** (3 - np.arange(8) // 2)
    run.add_up()
    finding = only(run.findings("vanishing"))
    assert (finding.severity, finding.first_step, finding.found_step) == ("warning", 0, 19)
    assert set(finding.tensors) == {f"layers.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")}
    assert "Gradients vanish at layer `layers.1`" in finding.title
    run.values["loss"] = np.append(np.full(10, 2.3), np.full(len(run) - 10, 0.5))
    assert only(run.findings("vanishing")).severity == "info"


@pytest.mark.parametrize(("loss", "found"), [(2.3, True), (1.2, False)])
def test_less_is_enough_if_it_shrinks_from_layer_to_layer_and_the_loss_does_not_fall(loss: float, found: bool) -> None:
    run = healthy_run()
    run.values["loss"] = np.append(np.full(10, 2.3), np.full(len(run) - 10, loss))
    run.tensors["grad/norm"] *= np.repeat([2e-5, 2e-4, 3e-2, 1.0], 2)
    run.add_up()
    assert bool(run.findings("vanishing")) == found


def test_layers_that_no_gradient_was_computed_for_do_not_vanish() -> None:
    run = healthy_run()
    run.values["loss"] = np.full(len(run), 2.3)
    run.tensors["grad/norm"][:, :6] = np.nan
    run.add_up()
    assert run.findings("vanishing") == []  # they are detached or not used
    assert only(run.findings("dead_tensor")).severity == "warning"
    freeze(run, 6)
    assert run.findings("vanishing") == run.findings("dead_tensor") == []


def test_a_signal_that_dies_behind_a_frozen_layer_is_found() -> None:
    run = healthy_run()
    run.values["loss"] = np.full(len(run), 2.3)
    run.tensors["grad/norm"][:, :2] = np.nan
    run.tensors["grad/norm"][:, 2:6] *= 1e-9
    run.add_up()
    freeze(run, 2)
    assert set(only(run.findings("vanishing")).tensors) == {
        f"layers.{i}.{k}" for i in (1, 2) for k in ("weight", "bias")
    }


def freeze(run: Run, count: int) -> None:
    tensors = tuple(replace(info, frozen=info.index < count) for info in run.layout.tensors)
    run.layout = replace(run.layout, tensors=tensors)


def test_gradients_that_grow_from_nothing_by_themselves_do_not_vanish() -> None:
    run = healthy_run(120)
    run.tensors["grad/norm"][:, :6] *= np.minimum(1e-9 * 1.3 ** np.arange(120), 1.0)[:, None]
    run.add_up()
    assert run.findings("vanishing") == []


def test_a_gradient_that_is_gone() -> None:
    run = healthy_run()
    run.values["loss"][:] = 2.3
    run.scale_gradient(slice(200, 400), np.full(200, 1e-8))
    finding = only(run.findings("vanishing"))
    assert (finding.first_step, finding.found_step, finding.tensors) == (200, 219, ())
    assert "Gradients vanished" in finding.title
    run.values["loss"][100:] = 1e-9
    assert run.findings("vanishing") == []  # there is nothing left to learn


@pytest.mark.parametrize("setting", [{"absolute": 1e-5}, {"lr_factor": 1e-7}])
def test_the_manuals_figures_are_options(setting: dict[str, float]) -> None:
    run = healthy_run()
    run.scale_gradient(slice(None), np.full(len(run), 1e-7))
    assert run.findings("vanishing") == []
    assert run.findings("vanishing", settings={"vanishing": setting})


# -- ordinary noise -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_ordinary_noise_is_no_alarm(seed: int) -> None:
    run = healthy_run(1500, seed, spread=(0.1, 0.3, 0.6, 1.0)[seed], correlation=(0.0, 0.3, 0.6, 0.9)[seed], warmup=200)
    assert [f for f in run.findings("nonfinite", "explosion", "vanishing") if f.severity != "info"] == []


@pytest.mark.slow
def test_ten_thousand_ordinary_steps_are_no_alarm_to_any_rule() -> None:
    run = healthy_run(10_000, 9, spread=0.4, loss_spread=0.15, warmup=500, correlation=0.5)
    run.every = 50
    diagnosis = run.diagnosis()
    for step in run.readings():
        diagnosis.read(step)
    assert [str(f) for f in diagnosis.findings if f.severity != "info"] == []
