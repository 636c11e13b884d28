"""Noise scale and its parts: identities, unbiasedness, intervals, and when it cannot be told."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradvitals.functional import gsnr_from_norms, noise_scale, ratio_of_means, signal_and_noise


def sq(x):
    return (x**2).sum(-1)


def test_by_hand():
    result = noise_scale(5.0, 2.0, 2, 8)
    assert (result.value, result.signal_sq, result.noise_trace) == (8, 1, 8)
    assert math.isnan(result.low)
    assert math.isnan(result.high)
    assert result.identifiable


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(2, 16), b=st.integers(1, 64), exponent=st.integers(-12, 12))
def test_two_batch_form_is_the_scatter_of_micro_batches(seed, k, b, exponent):
    g = (0.3 + np.random.default_rng(seed).standard_normal((k, 20))) * 10.0**exponent
    mean = g.mean(0)
    scatter = b / (k - 1) * sq(g - mean).sum()
    result = noise_scale(sq(g).mean(), sq(mean), b, k * b)
    assert result.noise_trace == pytest.approx(scatter, rel=1e-12)
    assert result.signal_sq == pytest.approx(sq(mean) - scatter / (k * b), rel=1e-11, abs=1e-12 * sq(mean))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(2, 16), b=st.integers(1, 64))
def test_equal_micro_batches_agree_with_the_other_functions(seed, k, b):
    g = 0.5 + np.random.default_rng(seed).standard_normal((k, 20))
    signal_sq, noise_trace = signal_and_noise(sq(g / k), sq(g.mean(0)), np.full(k, b), np.full(k, 1 / k))
    two_batches = noise_scale(sq(g).mean(), sq(g.mean(0)), b, k * b)
    assert float(noise_trace) == pytest.approx(two_batches.noise_trace, rel=1e-11)
    assert float(signal_sq) == pytest.approx(two_batches.signal_sq, rel=1e-10, abs=1e-12)
    assert b * float(signal_sq) / float(noise_trace) == pytest.approx(
        gsnr_from_norms(sq(g).mean(), sq(g.mean(0)), k), rel=1e-9, abs=1e-11
    )


def test_size_weights_reduce_to_the_analysis_of_variance():
    rng = np.random.default_rng(0)
    b = np.array([3.0, 5, 2, 7])
    h = (b / b.sum())[:, None] * rng.standard_normal((4, 6))
    _, noise_trace = signal_and_noise(sq(h), sq(h.sum(0)), b, b / b.sum())
    n = b.sum()
    assert float(noise_trace) == pytest.approx((n**2 * (sq(h) / b).sum() - n * sq(h.sum(0))) / 3, rel=1e-12)


@pytest.mark.parametrize("weighting", ["size", "equal", "uneven"])
def test_unequal_micro_batches_are_unbiased(weighting):
    rng = np.random.default_rng(1)
    b = np.array([1.0, 4, 9, 2])
    w = {"size": b / b.sum(), "equal": np.full(4, 0.25), "uneven": np.array([0.7, 0.1, 0.4, 0.3])}[weighting]
    mean, sd = np.array([0.5, -0.2, 0.1]), np.array([1.0, 2.0, 0.5])
    g = mean + rng.standard_normal((200_000, 4, 3)) * sd / np.sqrt(b)[:, None]
    h = w[:, None] * g
    signal_sq, noise_trace = signal_and_noise(sq(h).T, sq(h.sum(1)), b, w)
    assert signal_sq.shape == (200_000,)
    assert (noise_trace >= 0).all()
    assert noise_trace.mean() == pytest.approx((sd**2).sum(), rel=0.02)
    assert signal_sq.mean() == pytest.approx((mean**2).sum(), abs=5 * signal_sq.std() / math.sqrt(200_000))


def test_micro_batches_of_weight_zero_are_left_out():
    full = signal_and_noise([0.25, 2.25], 4.0, [1, 1], [0.5, 0.5])
    padded = signal_and_noise([0.25, 0.0, 2.25], 4.0, [1, 0, 1], [0.5, 0.0, 0.5])
    assert [float(x) for x in padded] == [float(x) for x in full] == [3.0, 2.0]


def test_one_micro_batch_says_nothing():
    signal_sq, noise_trace = signal_and_noise(np.ones((1, 3)), np.ones(3), [4], [1.0])
    assert np.isnan(signal_sq).all()
    assert np.isnan(noise_trace).all()
    assert signal_sq.shape == (3,)


@pytest.mark.parametrize(
    "arguments",
    [([1.0, 2.0], 3.0, [1], [1.0]), ([1.0, 2.0], 3.0, [1, 1], [1.0, -1.0]), ([1.0, 2.0], 3.0, [0, 1], [1.0, 1.0])],
)
def test_signal_and_noise_refuses_what_makes_no_sense(arguments):
    with pytest.raises(ValueError, match="expected"):
        signal_and_noise(*arguments)


def micro_batch_series(rng, steps, k, b, mean, sd):
    g = mean + rng.standard_normal((steps, k, len(mean))) * sd / math.sqrt(b)
    return sq(g).mean(1), sq(g.mean(1))


def test_ratio_of_means_finds_the_value_and_its_interval_covers():
    rng = np.random.default_rng(2)
    d, k, b = 50, 8, 16
    sd = np.sqrt(rng.lognormal(0, 1, d))
    mean = 0.1 * rng.standard_normal(d)
    truth = (sd**2).sum() / (mean**2).sum()
    held = 0
    for _ in range(400):
        result = noise_scale(*micro_batch_series(rng, 60, k, b, mean, sd), b, k * b)
        assert result.identifiable
        held += result.low <= truth <= result.high
    assert 0.92 <= held / 400 <= 0.98
    small, big = micro_batch_series(rng, 4000, k, b, mean, sd)
    assert noise_scale(small, big, b, k * b).value == pytest.approx(truth, rel=0.05)


def test_pure_noise_is_not_identifiable():
    rng = np.random.default_rng(3)
    unidentified = 0
    for _ in range(50):
        result = noise_scale(*micro_batch_series(rng, 30, 4, 8, np.zeros(20), np.ones(20)), 8, 32)
        if not result.identifiable:
            unidentified += 1
            assert math.isnan(result.value)
            assert 0 < result.low < math.inf
            assert result.high == math.inf
    assert unidentified >= 45


def test_linear_regression_has_the_closed_form():
    rng = np.random.default_rng(4)
    d, steps, k, b = 10, 2000, 4, 8
    delta = rng.standard_normal(d)
    x = rng.standard_normal((steps, k, b, d))
    g = ((x @ delta)[..., None] * x).mean(2)  # no label noise: B_simple is d + 1 exactly
    result = noise_scale(sq(g).mean(1), sq(g.mean(1)), b, k * b)
    assert result.low < d + 1 < result.high
    assert result.value == pytest.approx(d + 1, rel=0.05)


def test_at_the_noise_scale_a_quadratic_gets_half_the_best_decrease():
    # With a Hessian that is a multiple of the identity the simple noise scale is the one that matters.
    rng = np.random.default_rng(5)
    d, h = 20, 2.0
    theta, sd = rng.standard_normal(d), np.sqrt(5 * rng.lognormal(0, 1, d))
    mean = h * theta
    small, big = micro_batch_series(rng, 5000, 4, 1, mean, sd)
    scale = noise_scale(small, big, 1, 4).value
    best_lr, best_decrease = 1 / h, (mean @ mean) / (2 * h)
    g = mean + rng.standard_normal((100_000, d)) * sd / math.sqrt(scale)
    after = theta - best_lr / 2 * g
    decrease = h / 2 * (theta @ theta - sq(after).mean())
    assert decrease / best_decrease == pytest.approx(0.5, abs=0.03)


def test_series_edges():
    assert math.isnan(noise_scale([], [], 1, 2).value)
    assert math.isnan(noise_scale(1.0, 1.5, 1, 2).value)  # more noise than nothing: negative
    assert not noise_scale(5.0, 1.0, 1, 2).identifiable  # signal is -3
    with_gap = noise_scale([5.0, math.nan, 5.5, 4.5], [2.0, 2.0, 2.1, 1.9], 2, 8)
    without = noise_scale([5.0, 5.5, 4.5], [2.0, 2.1, 1.9], 2, 8)
    assert with_gap == without
    assert noise_scale([2.0, 2.0, 2.0], [2.0, 2.0, 2.0], 1, 2).noise_trace == 0


def test_batch_sizes_may_change_along_the_series():
    small, big = [5.0, 1 + 8 / 4], [2.0, 1 + 8 / 16]
    result = noise_scale(small, big, [2, 4], [8, 16])
    assert result.value == pytest.approx(8)


@pytest.mark.parametrize("batches", [(8, 8), (8, 2), (0, 8), (-1, 8)])
def test_batches_must_grow(batches):
    with pytest.raises(ValueError, match="batch_small"):
        noise_scale(1.0, 2.0, *batches)


def test_ratio_of_means_by_hand_and_at_the_edges():
    value, low, high = ratio_of_means(
        [6.0, 6.0, 6.0, 6.0], [2.0, 0.0, -1.0, 2.0], 5.0, 0.0, 0.0, np.array([5.0, 5.0, 5.0, 1.5])
    )
    np.testing.assert_allclose(value, [3, np.nan, np.nan, 3])
    np.testing.assert_allclose(low, [3 - 2.7764451 / 2, np.nan, np.nan, np.nan], rtol=1e-7)
    np.testing.assert_allclose(high, [3 + 2.7764451 / 2, np.nan, np.nan, np.nan], rtol=1e-7)
    with pytest.raises(ValueError, match="level"):
        ratio_of_means(1.0, 1.0, 1.0, 1.0, 0.0, 5, level=95)


def test_ratio_of_means_covers():
    rng = np.random.default_rng(6)
    x = rng.standard_normal((3000, 12)) + 1
    y = 0.5 * x + rng.standard_normal((3000, 12)) + 8
    centred_x, centred_y = x - x.mean(1, keepdims=True), y - y.mean(1, keepdims=True)
    cov = (centred_x * centred_y).sum(1) / 11
    _, low, high = ratio_of_means(x.mean(1), y.mean(1), x.var(1, ddof=1), y.var(1, ddof=1), cov, 12)
    truth = 1 / 8.5
    assert 0.94 <= np.mean((low <= truth) & (high >= truth)) <= 0.96
