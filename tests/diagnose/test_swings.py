"""Gradients, updates and losses that swing, in runs where it is known what does."""

from __future__ import annotations

import numpy as np
import pytest
from by_hand import healthy_run

from gradvitals.diagnose import RunInfo
from gradvitals.diagnose.history import step_spread
from gradvitals.types import Reading


def test_updates_that_turn_round_are_at_the_edge_of_stability() -> None:
    run = healthy_run()
    run.values["update/cosine"][200:] = -0.6
    (finding,) = run.findings("oscillation")
    assert finding.severity == "warning"
    assert 200 < finding.first_step < 240
    assert "edge" in finding.causes[0]


def test_what_momentum_makes_of_noise_is_not_turning_round() -> None:
    run = healthy_run()
    run.info = RunInfo(optimizer="SGD", momentum=0.0)
    run.values["update/cosine"] = np.random.default_rng(0).normal(0, 0.1, len(run))
    assert run.findings("oscillation") == []
    run.info = RunInfo(optimizer="SGD", momentum=0.9)
    assert len(run.findings("oscillation")) == 1


@pytest.mark.parametrize(("scale", "cause"), [(5000.0, "small compared with"), (3.0, "edge")])
def test_the_noise_scale_tells_a_small_batch_from_a_high_learning_rate(scale: float, cause: str) -> None:
    run = healthy_run(loss_spread=0.3, floor=0.9)
    diagnosis = run.diagnosis("oscillation")
    for step in run.readings():
        values = {"noise_scale_low": scale, "gsnr": 1.0}
        micro = Reading(step=step[0].step, time=0.0, source="microbatch", batch_size=16, values=values)
        diagnosis.read([*step, micro])
    (finding,) = diagnosis.findings
    assert finding.severity == "info"
    assert cause in finding.causes[0]


def test_a_small_loss_swings_by_nature() -> None:
    run = healthy_run(600, loss_spread=0.3, spread=1.0, floor=0.02)
    assert [f for f in run.findings("oscillation") if f.first_step > 100] == []


def test_unstable_norm_names_the_tensor_and_leaves_out_a_norm_that_falls() -> None:
    run = healthy_run(spread=0.3)
    rng = np.random.default_rng(1)
    run.tensors["grad/norm"][:, 5] *= np.exp(1.5 * rng.standard_normal(len(run)))
    run.tensors["grad/norm"][:, 2] *= np.exp(-np.arange(len(run)) / 20)
    run.add_up()
    (finding,) = run.findings("unstable_norm")
    assert (finding.severity, finding.tensors) == ("info", ("layers.2.bias",))


@pytest.mark.parametrize(
    ("limit", "cure"),
    [
        (None, "Clip gradients to a norm of "),
        (0.1, "Clipping to 0.1 already applies to 100% of recent steps: lower the learning rate of "),
        (
            50.0,
            "instead of 50: 90% of this run's steps are below it, and the current limit applies to 0% of recent steps",
        ),
    ],
)
def test_a_run_that_clips_is_not_told_to_clip(limit: float | None, cure: str) -> None:
    run = healthy_run(spread=0.3)
    run.tensors["grad/norm"][:, 5] *= np.exp(1.5 * np.random.default_rng(1).standard_normal(len(run)))
    run.add_up()
    if limit is not None:
        run.values["clip/max_norm"] = np.full(len(run), limit)
    (finding,) = run.findings("unstable_norm")
    assert cure in finding.fixes[0]
    assert sum("clip" in text.lower() for text in finding.fixes) == 1


def test_step_spread_is_that_of_the_noise_on_a_slope() -> None:
    noise = np.random.default_rng(0).normal(0, 0.2, 4000)
    assert step_spread(noise) == pytest.approx(0.2, rel=0.05)
    assert step_spread(noise + np.linspace(0, 50, 4000)) == pytest.approx(0.2, rel=0.05)


def test_a_cosine_over_0_is_not_said_to_turn_round() -> None:
    run = healthy_run()
    run.info = RunInfo(optimizer="SGD", momentum=0.9)
    run.values["update/cosine"][200:] = 0.3
    (finding,) = run.findings("oscillation")
    assert finding.title.startswith("Updates turn sharply: their mean cosine is 0.3")
    assert finding.title.endswith("(momentum alone gives 0.9)")
    expected = finding.evidence["expected"]
    assert expected == {"cosine": "over 0.4", "swing": "under 0.8", "loss_swing": "under 0.12"}
    run.info = RunInfo(optimizer="SGD", momentum=0.0)
    run.values["update/cosine"][200:] = -0.9
    (finding,) = run.findings("oscillation")
    assert finding.title.startswith("Updates reverse direction: the mean cosine between consecutive updates is -0.")
