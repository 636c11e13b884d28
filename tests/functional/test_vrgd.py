"""The VRGD factor: the paper's formula, its published behaviour under pure noise, and elements without variance."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradvitals.functional import vrgd_scale


def scale_of(parts, **kwargs):
    return vrgd_scale(parts.mean(0), parts.square().mean(0), **kwargs)


def test_by_hand():
    parts = torch.tensor([[3.0, 2.0], [1.0, 0.0]])  # means 2 and 1, variances 1 and 1
    torch.testing.assert_close(scale_of(parts), torch.tensor([1.0, 0.4]))


@pytest.mark.parametrize(("k", "mean_scale"), [(8, 0.492), (32, 0.525), (256, 0.531)])
def test_pure_noise_shrinks_the_gradient_by_half(k, mean_scale):
    rng = np.random.default_rng(0)
    mean = rng.standard_normal(300_000) / np.sqrt(k)
    mean_of_squares = mean**2 + rng.chisquare(k - 1, 300_000) / k
    scale = vrgd_scale(torch.from_numpy(mean), torch.from_numpy(mean_of_squares))
    assert scale.mean().item() == pytest.approx(mean_scale, abs=0.006)
    assert scale.min() >= 0.1
    assert scale.max() <= 1


def test_two_parts_collapse_to_gamma():
    parts = torch.randn(2, 300_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert scale_of(parts).mean().item() == pytest.approx(0.1, abs=0.01)


def test_signal_is_told_from_noise():
    k, n = 32, 50_000
    parts = torch.randn(k, 2 * n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parts[:, :n] += 1
    scale = scale_of(parts)
    assert scale[:n].mean().item() == pytest.approx(0.978, abs=0.01)
    assert scale[n:].mean().item() == pytest.approx(0.119, abs=0.01)


@pytest.mark.parametrize("factor", [1e-12, 1e12])
def test_scale_does_not_matter(factor):
    parts = torch.randn(8, 100, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(scale_of(factor * parts), scale_of(parts))


def test_elements_without_variance():
    mean = torch.tensor([2.0, 0.0, 2.0, 1.0, 0.0, float("nan")])
    mean_of_squares = torch.tensor([4.0, 0.0, 5.0, 2.0, 1.0, 1.0])
    # Only r = 4, 1 and 0 enter the mean, which is 5/3.
    expected = torch.tensor([1.0, 1.0, 1.0, 0.6, 0.1, 1.0])
    torch.testing.assert_close(vrgd_scale(mean, mean_of_squares), expected)


def test_nothing_to_average_over():
    zeros = torch.zeros(3)
    torch.testing.assert_close(vrgd_scale(zeros, zeros), torch.ones(3))
    torch.testing.assert_close(vrgd_scale(zeros, zeros + 1), torch.ones(3))
    torch.testing.assert_close(vrgd_scale(zeros + 1, zeros + 1), torch.ones(3))
    assert vrgd_scale(torch.zeros(0, 2), torch.zeros(0, 2)).shape == (0, 2)


def test_gamma_of_one_is_plain_descent():
    parts = torch.randn(8, 10, generator=torch.Generator().manual_seed(3))
    assert (scale_of(parts, gamma=1.0) == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_keeps_its_dtype(dtype):
    mean = torch.tensor([2.0, 1.0], dtype=dtype)
    scale = vrgd_scale(mean, torch.tensor([5.0, 2.0]))
    assert scale.dtype == dtype
    torch.testing.assert_close(scale.float(), torch.tensor([1.0, 0.4]), atol=2e-3, rtol=0)


def test_what_is_refused():
    with pytest.raises(ValueError, match="gamma"):
        vrgd_scale(torch.ones(2), torch.ones(2), gamma=1.5)
    with pytest.raises(ValueError, match="shape"):
        vrgd_scale(torch.ones(2), torch.ones(3))
