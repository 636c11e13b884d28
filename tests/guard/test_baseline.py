"""What is baseline for a run: levels that outliers do not move, unless they stay."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradvitals.guard.policy import RunningLevel, StepBaseline

finite = st.floats(min_value=-50, max_value=50)


def healthy(count: int, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [math.exp(generator.gauss(0.0, 0.1)) for _ in range(count)]


def learned(norms: list[float], losses: list[float] | None = None) -> StepBaseline:
    baseline = StepBaseline()
    for norm, loss in zip(norms, losses or [1.0] * len(norms), strict=True):
        baseline.learn(norm, loss)
    return baseline


def test_the_spread_of_normal_numbers_is_their_deviation() -> None:
    level, generator = RunningLevel(window=500, level_window=500), random.Random(1)
    for _ in range(3000):
        level.learn(generator.gauss(2.0, 0.5))
    assert level.level == pytest.approx(2.0, abs=0.05)
    assert level.std() == pytest.approx(0.5, rel=0.1)
    assert level.z(4.0) == pytest.approx(4.0, rel=0.15)


def test_an_outlier_does_not_move_the_level() -> None:
    level = RunningLevel()
    for value in healthy(50):
        level.learn(value)
    before = (level.level, level.spread, level.count)
    level.learn(1e6)
    assert (level.level, level.spread, level.count) == before


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_learned(value: float) -> None:
    level = RunningLevel(count=9, level=1.0, spread=0.1, outside=2)
    level.learn(value)
    assert level == RunningLevel(count=9, level=1.0, spread=0.1, outside=2)


def test_outliers_that_stay_are_the_new_level() -> None:
    level = RunningLevel()
    for value in healthy(60):
        level.learn(value)
    taken = 0
    while level.count > 1.5 or not level.outside > level.patience:
        level.learn(100.0)
        taken += 1
        if level.outside > level.patience:
            break
    assert taken == level.patience + 1
    for _ in range(60):
        level.learn(100.0)
    assert level.level == pytest.approx(100.0, rel=0.05)


def test_outliers_now_and_then_never_become_the_level() -> None:
    level = RunningLevel()
    for index, value in enumerate(healthy(1000)):
        level.learn(1e4 if index % 3 == 0 and index > 30 else value)
    assert level.level == pytest.approx(1.0, abs=0.3)


def test_nothing_is_too_large_before_the_first_steps_are_over() -> None:
    baseline = learned(healthy(9))
    assert baseline.norm_limit(5.0, 12.0, 10) == math.inf
    assert baseline.loss_limit(9.0, 0.2, 10) == math.inf
    baseline.learn(1.0, 1.0)
    assert baseline.norm_limit(5.0, 12.0, 10) < math.inf
    assert baseline.loss_limit(9.0, 0.2, 10) < math.inf


def test_the_limit_of_the_norm_is_the_ratio_if_norms_hardly_scatter() -> None:
    baseline = learned([2.0] * 100)
    assert baseline.norm_limit(5.0, 12.0, 25) == pytest.approx(10.0)
    assert baseline.typical_norm == pytest.approx(2.0)


def test_the_limit_of_the_norm_is_the_score_if_norms_scatter_widely() -> None:
    baseline = learned(healthy(200))
    baseline.norm.spread = 1.0
    std = baseline.norm.std()
    assert baseline.norm_limit(5.0, 2.0, 25) == pytest.approx(baseline.typical_norm * math.exp(2.0 * std))


def test_the_limit_of_the_loss_is_a_share_of_the_first_loss_over_the_baseline() -> None:
    baseline = learned([1.0] * 100, [4.0] * 100)
    assert baseline.unit == 4.0
    assert baseline.loss_limit(9.0, 0.5, 25) == pytest.approx(4.0 + 2.0, rel=1e-6)


def test_losses_may_be_negative() -> None:
    baseline = learned([1.0] * 60, [-100.0 - index for index in range(60)])
    limit = baseline.loss_limit(9.0, 0.2, 25)
    assert -159 < limit < math.inf


def test_a_very_large_level_does_not_overflow() -> None:
    assert learned([1e300] * 60).norm_limit(1e300, 12.0, 25) < math.inf


def test_a_quantile_is_a_norm_that_this_share_does_not_exceed() -> None:
    baseline = StepBaseline()
    baseline.norms.extend(float(value) for value in range(1, 101))
    assert baseline.quantile(0.95) == 95.0
    assert baseline.quantile(0.5) == 50.0
    assert baseline.quantile(0.999) == 100.0
    assert baseline.quantile(0.001) == 1.0


def test_only_so_many_norms_are_kept_and_no_outliers() -> None:
    baseline = StepBaseline(window=20)
    for norm in [*healthy(100), 1e9]:
        baseline.learn(norm, 1.0)
    assert len(baseline.norms) == 20
    assert max(baseline.norms) < 10


@given(st.lists(finite, min_size=2, max_size=200))
@settings(max_examples=50, deadline=None)
def test_a_level_stays_between_the_values_it_was_shown(values: list[float]) -> None:
    level = RunningLevel()
    for value in values:
        level.learn(value)
    assert min(values) - 1e-9 <= level.level <= max(values) + 1e-9
    assert level.spread >= 0
