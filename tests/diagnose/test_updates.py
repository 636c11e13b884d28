"""Weights without a gradient, that do not move, or move too far, in runs where it is known which."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from by_hand import Run, healthy_run, layout_of, only

ALL = ("dead_tensor", "unchanged_weights", "update_ratio", "update_spike")


def without_gradient(run: Run, steps: slice, tensors: list[int], value: float = np.nan) -> Run:
    for tensor in tensors:
        run.tensors["grad/norm"][steps, tensor] = value
    run.add_up()
    return run


# -- dead_tensor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "cause"), [(np.nan, "no gradient since step 0"), (0.0, "exactly zero")])
def test_a_tensor_that_never_has_a_gradient(value: float, cause: str) -> None:
    run = without_gradient(healthy_run(100), slice(None), [4, 5], value)
    finding = only(run.findings("dead_tensor"))
    assert (finding.severity, finding.first_step, finding.found_step) == ("warning", 0, 19)
    assert finding.tensors == ("layers.2.weight", "layers.2.bias")
    assert cause in finding.causes[0]
    assert "layers.2.weight" in finding.fixes[0]


@pytest.mark.parametrize(("value", "cause"), [(np.nan, "until step 150"), (0.0, "All units after")])
def test_a_tensor_that_loses_its_gradient_is_found_sooner(value: float, cause: str) -> None:
    run = without_gradient(healthy_run(200), slice(150, 200), [4], value)
    finding = only(run.findings("dead_tensor"))
    assert (finding.first_step, finding.found_step, finding.tensors) == (150, 154, ("layers.2.weight",))
    assert cause in finding.causes[0]


def test_a_tensor_that_is_used_now_and_then_is_not_dead() -> None:
    run = healthy_run(300)
    for step in range(300):
        if step % 15:
            run.tensors["grad/norm"][step, 4] = np.nan
    run.add_up()
    assert run.findings("dead_tensor") == []


def test_nothing_is_dead_where_everything_is() -> None:
    assert without_gradient(healthy_run(100), slice(30, 100), list(range(8)), 0.0).findings("dead_tensor") == []


# -- unchanged_weights ------------------------------------------------------------------------------------------------


def test_gradients_zeroed_before_every_step() -> None:
    run = healthy_run(100)
    run.tensors["update/rms"][:] = 0.0
    finding = only(run.findings("unchanged_weights"))
    assert "zero_grad() runs between backward and step" in finding.causes[0]
    assert finding.fixes[0].change == {"zero_grad": "after_step"}


def test_weights_that_were_left_out_of_the_optimizer() -> None:
    run = healthy_run(100)
    run.tensors["update/rms"][:, [2, 3]] = 0
    finding = only(run.findings("unchanged_weights"))
    assert (finding.severity, finding.first_step, finding.found_step) == ("warning", 0, 19)
    assert finding.tensors == ("layers.1.weight", "layers.1.bias")
    assert "optimizer does not have" in finding.causes[0]


def test_weights_that_stop_are_found_sooner() -> None:
    run = healthy_run(200)
    run.tensors["update/rms"][150:, 2] = 0
    finding = only(run.findings("unchanged_weights"))
    assert (finding.first_step, finding.found_step) == (150, 154)
    assert "changed until step 150" in finding.causes[0]


def test_a_schedule_at_its_end_is_no_fault() -> None:
    run = healthy_run(200)
    run.tensors["update/rms"][150:] = 0
    run.values["update/rms"][150:] = run.values["lr"][150:] = 0
    finding = only(run.findings(*ALL))
    assert (finding.id, finding.severity, finding.tensors) == ("unchanged_weights", "info", ())
    assert "learning rate is 0" in finding.causes[0]


def test_updates_lost_to_rounding_in_half_precision() -> None:
    run = healthy_run(100)
    run.layout = layout_of("bfloat16")
    run.tensors["update/rms"][np.arange(100) % 2 == 0, 1] = 0
    finding = only(run.findings("unchanged_weights"))
    assert finding.tensors == ("layers.0.bias",)
    assert finding.found_step < 20
    assert "bfloat16" in finding.causes[0]
    run.layout = layout_of("float32")
    assert run.findings("unchanged_weights") == []


def test_steps_that_a_scaler_skipped_do_not_count() -> None:
    run = healthy_run(100)
    run.values["step/skipped"] = np.zeros(100)
    run.values["step/skipped"][40:70] = 1
    run.tensors["update/rms"][40:70] = 0
    assert run.findings("unchanged_weights") == []


def test_tensors_whose_change_is_not_read_are_left_alone() -> None:
    run = healthy_run(100)
    run.tensors["update/rms"][:, 0] = np.nan
    assert run.findings(*ALL) == []


# -- update_ratio -----------------------------------------------------------------------------------------------------


def test_an_update_of_a_tenth_of_the_weights() -> None:
    run = healthy_run(200)
    run.tensors["update/ratio"][100:, 4] = 0.4
    finding = only(run.findings("update_ratio"))
    assert (finding.severity, finding.first_step, finding.found_step) == ("warning", 100, 110)
    assert finding.tensors == ("layers.2.weight",)


def test_an_update_that_is_large_everywhere_is_the_learning_rates_doing() -> None:
    run = healthy_run(200)
    run.tensors["update/ratio"][100:] = 0.4
    finding = only(run.findings("update_ratio"))
    assert "learning rate" in finding.causes[0]
    assert "Lower the learning rate" in finding.fixes[0]


def test_most_updates_too_large_at_the_start_and_why() -> None:
    run = healthy_run(200)
    run.tensors["update/ratio"][:20] = 0.5
    finding = only(run.findings("update_ratio"))
    assert finding.found_step < 10
    assert "too high" in finding.causes[0]
    run.tensors["weight/norm"] *= 0.01
    assert "very small" in only(run.findings("update_ratio")).causes[0]


def test_biases_that_begin_at_zero_and_one_zero_matrix_may_grow() -> None:
    run = healthy_run(200)
    run.tensors["update/ratio"][:, 1::2] = 0.5
    run.tensors["update/ratio"][:, 2] = np.minimum(1.0, 1 / (1 + np.arange(200)))
    assert run.findings("update_ratio") == []


def test_a_learning_rate_too_small_from_the_start() -> None:
    run = healthy_run(200, floor=0.99)
    for name in (run.values, run.tensors):
        name["update/ratio"] *= 1e-3
    run.values["lr"] *= 1e-3
    finding = only(run.findings("update_ratio"))
    assert finding.found_step <= 60
    assert "too low" in finding.causes[0]
    assert "Raise the learning rate" in finding.fixes[0]


def test_small_steps_are_fine_where_the_loss_falls() -> None:
    run = healthy_run(200)
    for name in (run.values, run.tensors):
        name["update/ratio"] *= 3e-3
    assert run.findings("update_ratio") == []


def test_a_learning_rate_that_lost_its_zeros() -> None:
    run = healthy_run(200)
    for name in ("lr", "update/rms"):
        run.values[name][150:] *= 1e-3
    run.tensors["update/rms"][150:] *= 1e-3
    finding = only(run.findings("update_ratio"))
    assert (finding.first_step, finding.found_step) == (150, 153)
    assert "at step 150" in finding.causes[0]


def test_a_tensor_that_hardly_moves_is_advice() -> None:
    run = healthy_run(200)
    run.tensors["update/ratio"][:, 6] = 1e-9
    finding = only(run.findings("update_ratio"))
    assert (finding.severity, finding.tensors) == ("info", ("layers.3.weight",))


# -- update_spike -----------------------------------------------------------------------------------------------------


def pushed(run: Run, steps: slice, factor: float) -> Run:
    run.values["update/rms"][steps] *= factor
    run.tensors["update/rms"][steps] *= factor
    return run


def test_what_a_gradient_left_in_momentum_is_laid_to_that_gradient() -> None:
    run = pushed(healthy_run(), slice(251, 253), 50.0)
    run.scale_gradient(250, 100.0)
    finding = only(run.findings("update_spike"))
    assert finding.causes[0].startswith("The gradient of step 250 was far too large")
    assert "step 250" in finding.fixes[0]


def test_a_large_update_on_an_ordinary_gradient_is_momentums_doing() -> None:
    finding = only(pushed(healthy_run(), slice(250, 252), 50.0).findings("update_spike"))
    assert (finding.severity, finding.first_step, finding.last_step, finding.tensors) == ("warning", 250, 251, ())
    assert "momentum" in finding.causes[0]
    assert "before step 251" in finding.fixes[0] or "before step 250" in finding.fixes[0]


def test_a_large_update_of_one_tensor() -> None:
    run = healthy_run()
    run.tensors["update/rms"][250, 6] *= 100
    assert only(run.findings("update_spike")).tensors == ("layers.3.weight",)


def test_a_large_update_on_a_large_gradient_is_an_explosion() -> None:
    run = pushed(healthy_run(), slice(250, 251), 50.0)
    run.scale_gradient(250, 50.0)
    assert run.findings("update_spike") == []


def test_a_learning_rate_that_jumps_is_named() -> None:
    run = pushed(healthy_run(), slice(250, 400), 30.0)
    run.values["lr"][250:] *= 30
    finding = only(run.findings("update_spike"))
    assert finding.first_step == 250
    assert "The learning rate rose" in finding.causes[0]


def test_a_warm_restart_is_meant() -> None:
    run = healthy_run(400)
    run.values["lr"][250:] = 1e-3
    run = pushed(run, slice(250, 400), 1.0)
    for name in (run.values, run.tensors):
        name["update/rms"][250:] *= 8.0
    assert run.findings("update_spike") == []


@pytest.mark.parametrize("seed", range(3))
def test_healthy_updates_are_no_alarm(seed: int) -> None:
    run = healthy_run(1500, seed, warmup=(5, 50, 500)[seed])
    assert run.findings(*ALL) == []


# -- what is only rounding --------------------------------------------------------------------------------------------


def in_front_of_batch_norm(steps: int = 200) -> Run:
    """The gradient of one bias is zero but for rounding."""
    run = healthy_run(steps)
    run.tensors["grad/norm"][:, 1] = 1e-8 * np.exp(np.random.default_rng(1).standard_normal(steps))
    run.add_up()
    return run


def test_a_bias_whose_gradient_is_rounding_may_stand_still_or_jump() -> None:
    run = in_front_of_batch_norm()
    run.tensors["update/rms"][:, 1] = 0
    assert run.findings(*ALL) == []
    run = in_front_of_batch_norm()
    run.tensors["update/rms"][150, 1] *= 100
    run.tensors["update/ratio"][:, 1] = 1e-12
    assert run.findings(*ALL) == []


def test_weights_that_stand_still_once_all_is_fitted() -> None:
    run = healthy_run(200)
    run.scale_gradient(slice(100, 200), np.full(100, 1e-9))
    run.tensors["update/rms"][100:] = 0
    assert run.findings("unchanged_weights") == []


@pytest.mark.parametrize(("left", "found"), [(1e-4, False), (0.5, True)])
def test_an_optimizer_that_stops_by_itself_has_converged(left: float, found: bool) -> None:
    """As L-BFGS does; one whose gradient is as large as ever was stopped."""
    run = healthy_run(200)
    run.scale_gradient(slice(100, 200), np.full(100, left))
    run.tensors["update/rms"][100:] = 0
    assert bool(run.findings("unchanged_weights")) == found


def test_a_learning_rate_that_was_lowered_is_not_told_to_be_too_low() -> None:
    run = healthy_run(300)
    lr = 1e-3 * np.minimum(1, np.exp(-(np.arange(300) - 100) / 10))
    for name in ("update/ratio", "update/norm", "update/rms"):
        run.values[name] *= lr / run.values["lr"]
    run.values["lr"] = lr
    assert run.findings("update_ratio") == []
    run.values["lr"] = np.full(300, 1e-3)
    assert "Raise the learning rate" in run.findings("update_ratio")[0].fixes[0]


def test_a_learning_rate_is_not_too_low_where_the_gradient_is_gone() -> None:
    run = healthy_run(200)
    run.scale_gradient(slice(5, 200), np.full(195, 1e-5))
    for name in ("update/ratio", "update/norm", "update/rms"):
        run.values[name][5:] *= 1e-5
    assert run.findings("update_ratio") == []


def test_large_first_steps_with_which_the_loss_falls_are_no_fault() -> None:
    run = healthy_run(100)
    run.tensors["update/ratio"][:9] = 0.3
    assert run.findings("update_ratio") != []
    run.values["loss"][1:9] *= np.linspace(0.8, 0.3, 8)
    assert run.findings("update_ratio") == []


def test_the_one_matrix_of_a_linear_model_may_begin_small() -> None:
    run = healthy_run(100)
    run.tensors["update/ratio"][:9] = 0.3
    run.values["loss"][:9] = run.values["loss"][0]
    assert run.findings("update_ratio") != []
    one = [replace(info, shape=(info.numel,)) if info.index else info for info in run.layout.tensors]
    run.layout = replace(run.layout, tensors=tuple(one))
    assert run.findings("update_ratio") == []


def test_a_single_weight_may_pass_through_zero() -> None:
    run = healthy_run(100)
    run.tensors["update/ratio"][20:60, 0] = 0.3
    assert run.findings("update_ratio") != []
    run.layout = replace(run.layout, tensors=(replace(run.layout.tensors[0], shape=(1, 1)), *run.layout.tensors[1:]))
    assert run.findings("update_ratio") == []
