"""What is usual: level and spread without the outliers they should reveal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradvitals.diagnose.baseline import Baseline


def fed(values: np.ndarray, **settings: float) -> Baseline:
    baseline = Baseline(**settings)
    for value in values:
        baseline.learn(np.atleast_1d(value))
    return baseline


def lognormal(count: int, sigma: float, seed: int = 0) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(0, sigma, count))


@pytest.mark.parametrize("sigma", [0.05, 0.2, 0.5])
def test_level_and_spread_of_noise(sigma: float) -> None:
    ratio, z = fed(lognormal(2000, sigma)).compare(np.array([np.exp(3 * sigma)]))
    assert ratio[0] == pytest.approx(np.exp(3 * sigma), rel=0.5 * sigma + 0.02)
    assert z[0] == pytest.approx(3, rel=0.35)


def test_an_outlier_does_not_enter_its_own_baseline() -> None:
    values = lognormal(200, 0.1)
    baseline = fed(values)
    before = baseline.usual()[0]
    baseline.learn(np.array([1e6]))
    assert baseline.usual()[0] == before
    assert baseline.compare(np.array([1e6]))[0][0] == pytest.approx(1e6 / before)


def test_what_is_not_a_number_is_neither_judged_nor_remembered() -> None:
    baseline = fed(lognormal(50, 0.1))
    before = baseline.usual()[0]
    for value in (np.nan, np.inf, 0.0, -1.0):
        assert np.isnan(baseline.compare(np.array([value]))[1][0])
        baseline.learn(np.array([value]))
    assert baseline.usual()[0] == before


def test_a_new_level_is_learnt_after_a_while() -> None:
    baseline = fed(np.concatenate([lognormal(200, 0.05), 10 * lognormal(60, 0.05)]))
    assert baseline.usual()[0] == pytest.approx(10, rel=0.1)


def test_it_says_nothing_before_it_has_seen_two() -> None:
    baseline = fed(np.array([1.0]))
    assert np.isnan(baseline.compare(np.array([100.0]))[0][0])


def test_new_tensors_come_after_the_others() -> None:
    baseline = Baseline()
    for _ in range(10):
        baseline.learn(np.array([1.0]))
    for _ in range(10):
        baseline.learn(np.array([1.0, 5.0]))
    assert baseline.usual() == pytest.approx([1.0, 5.0])
    assert baseline.count.tolist() == [20, 10]


@given(st.floats(1e-20, 1e20))
def test_the_scale_of_a_series_does_not_matter(scale: float) -> None:
    values = lognormal(30, 0.3)
    plain, scaled = fed(values), fed(scale * values)
    assert scaled.compare(np.array([3 * scale]))[1][0] == pytest.approx(plain.compare(np.array([3.0]))[1][0], rel=1e-6)


@given(st.lists(st.one_of(st.floats(1e-6, 1e6), st.just(float("nan")), st.just(0.0)), max_size=80), st.integers(0, 40))
def test_one_series_in_plain_floats_gives_the_same_to_the_last_bit(values: list[float], shift: int) -> None:
    """Two series at once, the second one shifted."""
    arrays, few = Baseline(), Baseline()
    pairs = list(zip(values, [*values[shift:], *values[:shift]], strict=True))
    for pair in pairs:
        singles = [few.compare_one(value, index) for index, value in enumerate(pair)]
        np.testing.assert_array_equal(np.transpose(arrays.compare(np.array(pair))), singles)
        arrays.learn(np.array(pair))
        for index, value in enumerate(pair):
            few.learn_one(value, index)
