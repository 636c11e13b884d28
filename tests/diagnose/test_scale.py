"""trapped_scale: fires where norms are those of noise and decay, and only once that says something."""

from __future__ import annotations

import numpy as np
import pytest
from by_hand import SHAPES, Floats, Run, healthy_run, only

from gradvitals.diagnose import RunInfo
from gradvitals.diagnose.rules.scale import NoiseWalk

SIZES = np.array([float(np.prod(shape)) for shape in SHAPES])
MATRICES = [0, 2, 4, 6]
DECAY = 0.5


def noise_norms(lr: Floats, start_rms: float = 0.1, decay: float = DECAY) -> Floats:
    """Norms of all tensors if their gradients are pure noise: AdamW's recursion, written out."""
    squares = [start_rms**2]
    for rate in lr[:-1]:
        kept = 1 - rate * decay
        squares.append(kept**2 * squares[-1] + 0.1 / 1.9 * (1 + 0.9 * kept) / (1 - 0.9 * kept) * rate**2)
    return np.sqrt(np.array(squares)[:, None] * SIZES)


def made_run(steps: int = 700, lr: float = 8e-3) -> Run:
    """A healthy run of AdamW at one learning rate, whose weights all follow noise."""
    run = healthy_run(steps)
    run.values["lr"] = np.full(steps, lr)
    run.info = RunInfo(optimizer="AdamW", betas=(0.9, 0.999), weight_decay=DECAY)
    run.tensors["weight/norm"] = noise_norms(run.values["lr"])
    return run


def test_a_healthy_run_has_none_of_it() -> None:
    assert healthy_run(600).findings("trapped_scale") == []


def test_norms_of_noise_are_found_and_named() -> None:
    run = made_run()
    run.tensors["weight/norm"][:, [2, 6]] *= 1.5  # these two are larger, by something else than noise
    run.tensors["weight/norm"][0] /= [1, 1, 1.5, 1, 1, 1, 1.5, 1]
    finding = only(run.findings("trapped_scale"))
    assert finding.severity == "info"
    assert set(finding.tensors) == {"layers.0.weight", "layers.2.weight"}  # matrices only
    assert finding.evidence["seen"]["matrices"] == 4
    assert finding.evidence["seen"]["ratio"] == pytest.approx(1.0, abs=0.01)
    assert "multipliers" in finding.fixes[0]
    assert finding.last_step is None


def test_it_says_nothing_before_the_start_is_forgotten() -> None:
    assert made_run(steps=200).findings("trapped_scale") == []


def test_a_norm_that_only_passes_by_is_not_held() -> None:
    run = made_run(steps=1000)
    run.tensors["weight/norm"] *= np.exp(np.linspace(-1, 1, len(run)))[:, None]  # crosses at about the middle
    assert run.findings("trapped_scale") == []


@pytest.mark.parametrize(
    "info",
    [
        RunInfo(),
        RunInfo(optimizer="SGD", momentum=0.9, weight_decay=DECAY),
        RunInfo(optimizer="Adam", weight_decay=DECAY),
        RunInfo(optimizer="AdamW", weight_decay=0.0),
        RunInfo(optimizer="AdamW", weight_decay=None),
    ],
)
def test_it_judges_only_where_the_formula_holds(info: RunInfo) -> None:
    run = made_run()
    run.info = info
    assert run.findings("trapped_scale") == []


def test_a_learning_rate_that_falls_is_followed() -> None:
    run = made_run(steps=1400)
    run.values["lr"] = 8e-3 * (0.1 + 0.45 * (1 + np.cos(np.pi * np.arange(1400) / 1400)))
    run.tensors["weight/norm"] = noise_norms(run.values["lr"])
    assert len(only(run.findings("trapped_scale")).tensors) == len(MATRICES)


def test_steps_that_were_not_made_do_not_count() -> None:
    run = made_run()
    skipped = np.zeros(len(run))
    skipped[50:650] = 1
    run.values["step/skipped"] = skipped
    assert run.findings("trapped_scale") == []


def test_steps_that_were_not_read_had_a_learning_rate_like_their_neighbours() -> None:
    every, tenth = NoiseWalk(), NoiseWalk(last=-1)
    for step in range(1001):
        every.advance(step, 1e-2, 0.1)
        if step % 10 == 0:
            tenth.advance(step, 1e-2, 0.1)
    assert tenth.kept == pytest.approx(every.kept)
    assert tenth.made == pytest.approx(every.made)


def test_a_long_way_between_two_readings_is_gone_whole() -> None:
    every, rarely = NoiseWalk(), NoiseWalk()
    for step in range(20_001):
        every.advance(step, 1e-3, 0.1)
    for step in range(0, 20_001, 5_000):
        rarely.advance(step, 1e-3, 0.1)
    assert (rarely.kept, rarely.made) == pytest.approx((every.kept, every.made), rel=1e-9)


def test_no_healthy_run_of_the_zoo_is_long_enough_to_be_judged() -> None:
    """At least half of the start's mean square is left at their end, whatever their norms do."""
    from benchmarks.faults.zoo import CONTROLS

    for control in CONTROLS:
        recipe, walk = control.recipe, NoiseWalk()
        for step in range(recipe.num_steps):
            walk.advance(step, recipe.lr * recipe.lr_factor(step), recipe.weight_decay)
        assert recipe.optimizer == "sgd" or walk.kept > 0.8, control.id
