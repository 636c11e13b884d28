"""GSNR from samples: known answers, bias, scale, precision, and what happens at the edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gradvitals.functional import gsnr, gsnr_elementwise, gsnr_from_norms, gsnr_interval, gsnr_plug_in

ENTRY_POINTS = [gsnr, gsnr_plug_in, gsnr_elementwise]


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_two_samples_by_hand():
    assert gsnr_plug_in(torch.tensor([3.0, 1.0])) == 4
    assert gsnr(torch.tensor([3.0, 1.0])).value == 1.5  # (4 - 2/2) / 2


def test_four_samples_by_hand():
    samples = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert gsnr_plug_in(samples) == pytest.approx(5, rel=1e-14)
    assert gsnr(samples).value == pytest.approx(3.5, rel=1e-14)
    assert gsnr_elementwise(samples).item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("num_samples", "r", "plug_in_unbiased_variance"),
    [(10, 0.0, 0.12857), (32, 1.0, 1.1024), (8, 0.1, 0.3150)],
)
def test_one_gaussian_coordinate_has_the_bias_of_the_noncentral_f(num_samples, r, plug_in_unbiased_variance):
    samples = math.sqrt(r) + normal(num_samples, 400_000, seed=1)
    elementwise = gsnr_elementwise(samples)
    # The plug-in with the unbiased variance is recovered from the unbiased estimate of the same samples.
    plug_in = (elementwise + 1 / num_samples) * (num_samples - 1) / (num_samples - 3)
    assert plug_in.mean().item() == pytest.approx(plug_in_unbiased_variance, rel=0.01)
    assert elementwise.mean().item() == pytest.approx(r, abs=0.005)


@pytest.mark.parametrize("num_samples", [4, 10])
def test_aggregate_is_unbiased_and_the_plug_in_is_not(num_samples):
    rng = np.random.default_rng(2)
    variance = rng.lognormal(0, 1, 300)
    mean = 0.05 * rng.standard_normal(300) * np.sqrt(variance)
    truth = (mean**2).sum() / variance.sum()
    debiased, plug_in = [], []
    for i in range(400):
        samples = torch.from_numpy(mean) + normal(num_samples, 300, seed=i) * torch.from_numpy(np.sqrt(variance))
        plug_in.append(gsnr_plug_in(samples))
        sums = (samples.square().sum() / num_samples).item(), samples.mean(0).square().sum().item()
        debiased.append(gsnr_from_norms(*sums, num_samples))
    error = 4 * np.std(debiased) / 20
    assert np.mean(debiased) == pytest.approx(truth, abs=error)
    assert np.mean(plug_in) == pytest.approx((num_samples * truth + 1) / (num_samples - 1), abs=error * 1.5)


def test_linear_regression_has_the_closed_form():
    rng = np.random.default_rng(3)
    d, noise, n = 10, 1.0, 200_000
    delta = rng.standard_normal(d)
    x = rng.standard_normal((n, d))
    grads = (x @ delta - noise * rng.standard_normal(n))[:, None] * x
    expected = delta**2 / (delta**2 + delta @ delta + noise**2)
    np.testing.assert_allclose(gsnr_elementwise(torch.from_numpy(grads)).numpy(), expected, atol=0.01)
    b_simple = (d + 1) + d * noise**2 / (delta @ delta)
    from_norms = gsnr_from_norms((grads**2).sum(1).mean(), (grads.mean(0) ** 2).sum(), n)
    assert 1 / from_norms == pytest.approx(b_simple, rel=0.02)


@settings(max_examples=12, deadline=None)
@given(exponent=st.floats(-12, 12), seed=st.integers(0, 1000), num_samples=st.integers(4, 12))
def test_scale_does_not_matter(exponent, seed, num_samples):
    samples = normal(num_samples, 5, seed=seed) + 0.3
    scaled = samples * 10**exponent
    for name in ("value", "low", "high"):
        assert getattr(gsnr(scaled), name) == pytest.approx(getattr(gsnr(samples), name), rel=1e-6, abs=1e-12)
    torch.testing.assert_close(gsnr_elementwise(scaled), gsnr_elementwise(samples), rtol=1e-9, atol=1e-12)
    assert gsnr_plug_in(scaled) == pytest.approx(gsnr_plug_in(samples), rel=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), num_samples=st.integers(2, 20), size=st.integers(1, 40))
def test_the_two_norms_carry_the_same_value(seed, num_samples, size):
    samples = normal(num_samples, size, seed=seed) + 0.2
    mean_sq_norm = (samples.square().sum() / num_samples).item()
    sq_norm_of_mean = samples.mean(0).square().sum().item()
    value = gsnr_from_norms(mean_sq_norm, sq_norm_of_mean, num_samples)
    assert value == pytest.approx(gsnr(samples).value, rel=1e-10, abs=1e-12)


def test_doubling_the_batch_doubles_the_value():
    mean = torch.full((400,), 0.2, dtype=torch.float64)
    values = {}
    for batch in (1, 2, 4):
        sums = np.zeros(2)
        for i in range(50):
            samples = mean + normal(8, batch, 400, seed=i).mean(1)
            sums += samples.square().sum().item() / 8, samples.mean(0).square().sum().item()
        values[batch] = gsnr_from_norms(sums[0], sums[1], 8)
    assert values[1] == pytest.approx(0.04, rel=0.1)
    assert values[2] / values[1] == pytest.approx(2, rel=0.1)
    assert values[4] / values[2] == pytest.approx(2, rel=0.1)


def test_norms_as_arrays_and_tensors_go_elementwise():
    total, mean = np.array([7.5, 0.0, 1.0, np.nan, 2.0]), np.array([6.25, 0.0, 1.0, 1.0, 1.0])
    counts = np.array([4, 4, 4, 4, 1])
    expected = [3.5, np.nan, np.inf, np.nan, np.nan]
    np.testing.assert_allclose(gsnr_from_norms(total, mean, counts), expected)
    result = gsnr_from_norms(torch.from_numpy(total).float(), torch.from_numpy(mean).float(), counts)
    assert result.dtype == torch.float64
    np.testing.assert_allclose(result.numpy(), expected)
    assert isinstance(gsnr_from_norms(7.5, 6.25, 4), float)


@pytest.mark.parametrize("r", [1e2, 1e4, 1e6, 1e8])
def test_a_large_mean_does_not_cancel_the_variance(r):
    samples = (math.sqrt(r) + normal(8, 500, seed=5)).float()
    exact = samples.double().numpy()
    variance = exact.var(0, ddof=1)
    expected = ((exact.mean(0) ** 2).sum() - variance.sum() / 8) / variance.sum()
    assert gsnr(samples).value == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(
        gsnr_elementwise(samples).double().numpy(), 5 / 7 * exact.mean(0) ** 2 / variance - 1 / 8, rtol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_samples_are_summed_in_float64(dtype):
    samples = (1e-3 * (normal(8, 3000, seed=6) + 0.5)).to(dtype)
    assert gsnr(samples).value == pytest.approx(gsnr(samples.double()).value, rel=1e-12)
    assert gsnr_elementwise(samples).dtype == torch.float32


def test_chunks_add_up_to_the_whole(monkeypatch):
    samples = normal(6, 1000, seed=7) + 0.1
    whole, whole_elements = gsnr(samples), gsnr_elementwise(samples)
    monkeypatch.setattr("gradvitals.functional.norms._CHUNK_ELEMENTS", 600)
    pieces = gsnr(samples)
    assert pieces.value == pytest.approx(whole.value, rel=1e-12)
    assert pieces.high == pytest.approx(whole.high, rel=1e-6)
    torch.testing.assert_close(gsnr_elementwise(samples), whole_elements)


def test_more_samples_than_coordinates_take_the_other_gram_matrix():
    samples = normal(30, 29, seed=8) + 0.2
    padded = torch.cat([samples, torch.zeros(30, 5, dtype=torch.float64)], dim=1)
    narrow, wide = gsnr(samples), gsnr(padded)
    assert wide.value == pytest.approx(narrow.value, rel=1e-12)
    assert wide.low == pytest.approx(narrow.low, rel=1e-6)
    assert wide.high == pytest.approx(narrow.high, rel=1e-6)


@pytest.mark.parametrize("statistic", [10.0, 30.0, 90.0])
def test_one_coordinate_has_the_exact_interval(statistic):
    low, high = (float(x) for x in gsnr_interval(statistic, 1.0, 1.0, 20))
    # The share of error at the lower end goes from 5 % for no signal to 2.5 % for a clear one.
    assert 0.02499 <= stats.ncf.sf(statistic, 1, 19, 20 * low) <= 0.05
    assert stats.ncf.cdf(statistic, 1, 19, 20 * high) == pytest.approx(0.025, abs=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_one_coordinate_is_seen_as_one_dimension(seed):
    samples = 1 + normal(20, seed=seed)
    statistic = 20 * samples.mean().item() ** 2 / samples.var().item()
    low, high = gsnr_interval(statistic, 1.0, 1.0, 20)
    estimate = gsnr(samples)
    # Longer only where the sample itself has tails heavier than Gaussian.
    assert estimate.low <= float(low) * (1 + 1e-6)
    assert estimate.high >= float(high) * (1 - 1e-6)
    assert estimate.high - estimate.low < 1.3 * float(high - low)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), num_samples=st.integers(2, 12), size=st.integers(1, 30), shift=st.floats(0, 100))
def test_the_interval_is_ordered_and_finite(seed, num_samples, size, shift):
    estimate = gsnr(normal(num_samples, size, seed=seed) + shift)
    assert estimate.low <= estimate.value <= estimate.high < math.inf
    assert estimate.low >= min(0, estimate.value)


def test_interval_narrows_with_samples_and_coordinates():
    def width(*shape):
        estimate = gsnr(normal(*shape, seed=9) + 0.3)
        return estimate.high - estimate.low

    assert width(100, 10) < width(8, 10)
    assert width(8, 10_000) < width(8, 10)


@pytest.mark.parametrize(
    ("samples", "value"),
    [
        (torch.ones(4, 3), math.inf),
        (torch.full((4, 3), 0.1), math.inf),
        (torch.zeros(4, 3), math.nan),
        (torch.tensor([[1.0], [float("nan")], [2.0]]), math.nan),
        (torch.tensor([[1.0], [float("inf")], [2.0]]), math.nan),
        (torch.ones(1, 3), math.nan),
        (torch.ones(0, 3), math.nan),
        (torch.ones(4, 0), math.nan),
    ],
)
def test_edges_of_gsnr(samples, value):
    estimate = gsnr(samples)
    assert estimate.value == pytest.approx(value, nan_ok=True)
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)
    assert estimate.num_samples == len(samples)


def test_two_and_three_samples_have_a_wide_interval():
    for num_samples in (2, 3):
        estimate = gsnr(normal(num_samples, 1000, seed=10))
        assert estimate.low <= 0
        assert estimate.high > 1


def test_edges_of_elementwise():
    samples = torch.tensor([[1.0, 0.0, 2.0, math.nan], [2, 0, 2, 1], [3, 0, 2, 1], [4, 0, 2, 1]])
    result = gsnr_elementwise(samples)
    assert result[0] == pytest.approx(1.0)
    assert result[2] == math.inf
    assert torch.isnan(result[[1, 3]]).all()
    assert torch.isnan(gsnr_elementwise(samples[:3])).all()
    assert gsnr_elementwise(torch.ones(5, 2, 0)).shape == (2, 0)
    assert gsnr_elementwise(normal(5, 2, 3)).shape == (2, 3)


def test_edges_of_plug_in():
    assert gsnr_plug_in(torch.ones(3, 2)) == math.inf
    assert math.isnan(gsnr_plug_in(torch.zeros(3, 2)))
    assert math.isnan(gsnr_plug_in(torch.tensor([1.0, math.nan])))


@pytest.mark.parametrize("function", ENTRY_POINTS)
def test_a_single_number_is_refused(function):
    with pytest.raises(ValueError, match="0 dimensions"):
        function(torch.tensor(1.0))


def test_a_window_over_sgd_steps_telescopes_and_reads_below_the_noise_floor():
    # Why steps of training are no substitute for samples at one point: the mean gradient is the distance travelled.
    rng = np.random.default_rng(11)
    lr, steps = 0.1, 200
    theta = rng.standard_normal(2000) * math.sqrt(lr / (2 - lr))
    start, grads = theta.copy(), []
    for _ in range(steps):
        grads.append(theta + rng.standard_normal(2000))
        theta = theta - lr * grads[-1]
    window = torch.from_numpy(np.array(grads))
    np.testing.assert_allclose(window.mean(0).numpy(), (start - theta) / (lr * steps), atol=1e-12)
    assert gsnr_plug_in(window) < 0.1 / steps
    assert gsnr(window).value < 0


def test_duplicated_shards_pass_for_signal():
    # 8 ranks on 4 distinct shards of pure noise read (1/4) / ((8/7) * (3/4)) - 1/8.
    samples = normal(4, 100_000, seed=12).repeat_interleave(2, dim=0)
    assert gsnr(samples).value == pytest.approx(1 / 6, abs=0.01)


def test_gradients_keep_out_of_autograd():
    samples = normal(5, 4).requires_grad_()
    assert not gsnr_elementwise(samples).requires_grad
    assert gsnr(samples).num_samples == 5
