"""The laws behind the intervals, against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special, stats

from gradvitals.functional import gsnr_interval
from gradvitals.functional.distributions import beta_cdf, f_cdf, student_t_quantile


def logs(rng, low, high, size=1000):
    return 10 ** rng.uniform(low, high, size)


def test_beta():
    rng = np.random.default_rng(0)
    a, b = logs(rng, -1, 3.5), logs(rng, -1, 3.5)
    x = rng.beta(a, b)
    np.testing.assert_allclose(beta_cdf(x, a, b), special.betainc(a, b, x), atol=1e-11)
    np.testing.assert_array_equal(beta_cdf([0.0, 1.0], 2.0, 3.0), [0, 1])
    assert math.isnan(beta_cdf(np.nan, 2.0, 3.0))


@pytest.mark.parametrize(
    ("dof1", "dof2", "noncentrality", "tolerance"),
    [
        ((0, 2), (0.3, 3), (-2, 2.4), 1e-11),  # summed as written
        ((0, 2.9), (0.5, 7), (-2, 2.5), 2e-3),
        ((0, 6), (0.5, 8), (-2, 8), 4e-3),  # near-normal stand-ins
    ],
)
def test_noncentral_f(dof1, dof2, noncentrality, tolerance):
    rng = np.random.default_rng(1)
    d1, d2, shift = logs(rng, *dof1), logs(rng, *dof2), logs(rng, *noncentrality)
    f = rng.noncentral_chisquare(d1, shift) / d1 / (rng.chisquare(d2) / d2)
    expected = stats.ncf.cdf(f, d1, d2, shift)
    known = np.isfinite(expected)  # scipy gives up on some
    ours = f_cdf(f, d1, d2, shift)
    assert np.isfinite(ours).all()
    np.testing.assert_allclose(ours[known], expected[known], atol=tolerance)
    np.testing.assert_allclose(f_cdf(f, d1, d2), stats.f.cdf(f, d1, d2), atol=2e-5)


def test_f_at_the_ends():
    np.testing.assert_array_equal(f_cdf([0.0, np.inf], 2.0, 3.0), [0, 1])
    assert float(f_cdf(0.0, 2.0, 3.0, 1.0)) == 0
    assert math.isnan(f_cdf(np.nan, 2.0, 3.0))
    assert f_cdf(np.ones((2, 3)), 2.0, 3.0, 1.0).shape == (2, 3)


@pytest.mark.parametrize("probability", [0.025, 0.6, 0.9, 0.975, 0.995, 1 - 1e-6])
def test_student_t(probability):
    dof = np.array([1, 1.3, 2, 2.5, 3, 7.7, 30, 100, 999, 1001, 1e4, 1e7])
    np.testing.assert_allclose(student_t_quantile(probability, dof), stats.t.ppf(probability, dof), rtol=1e-8)


def test_student_t_edges():
    assert float(student_t_quantile(0.975, np.inf)) == pytest.approx(1.959964, abs=1e-6)
    assert np.isnan(student_t_quantile(0.975, [np.nan, 0.5, -1.0])).all()
    assert float(student_t_quantile(0.5, 3)) == 0
    assert student_t_quantile(0.975, np.full((2, 3), 5.0)).shape == (2, 3)
    with pytest.raises(ValueError, match="probability"):
        student_t_quantile(1.0, 3)


def test_interval_of_anything_is_finite_and_ordered():
    rng = np.random.default_rng(2)
    q, d, rho = logs(rng, -8, 12, 150), logs(rng, 0, 13, 150), logs(rng, -6, 3, 150)
    low, high = gsnr_interval(q, d, rho, rng.integers(2, 500, 150))
    assert np.isfinite(low).all()
    assert np.isfinite(high).all()
    assert ((low >= 0) & (low <= high)).all()


def test_interval_edges():
    low, high = gsnr_interval([0.0, np.nan, 1.0, np.inf], 1.0, 1.0, [5, 5, 1, 5])
    assert low[0] == 0
    assert high[0] >= 0
    assert np.isnan(low[1:]).all()
    assert np.isnan(high[1:]).all()


def test_a_zero_signal_is_excluded_in_5_percent():
    rng = np.random.default_rng(3)
    low, _ = gsnr_interval(rng.f(1, 7, 1500), 1.0, 1.0, 8)
    assert np.mean(low > 0) == pytest.approx(0.05, abs=0.015)
