"""Spikes, variation, and the thresholds that follow from the learning rate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradvitals.functional import coefficient_of_variation, gss, is_exploding, is_vanishing, spike_ratio


def test_spike_ratio():
    assert float(spike_ratio(6.0, [1.0, 2.0, 3.0])) == 3
    assert float(spike_ratio(6.0, [1.0, 2.0, math.nan, math.inf, 3.0])) == 3
    assert float(spike_ratio(6e-12, [1e-12, 2e-12, 3e-12])) == pytest.approx(3)
    np.testing.assert_array_equal(spike_ratio([6.0, 1.0], [[1.0, 2.0], [3.0, 2.0]]), [3.0, 0.5])


def test_spike_ratio_edges():
    assert math.isnan(spike_ratio(1.0, []))
    assert math.isnan(spike_ratio(0.0, [0.0]))
    assert float(spike_ratio(1.0, [0.0])) == math.inf
    assert math.isnan(spike_ratio(math.nan, [1.0]))
    assert float(spike_ratio(math.inf, [1.0])) == math.inf


def test_gss_is_elementwise_over_time():
    history = torch.ones(99, 2)
    history[:, 1] = 0
    score = gss(torch.tensor([-1.0, 3.0]), history)
    torch.testing.assert_close(score, torch.tensor([1.0, 100.0]))


def test_gss_cannot_pass_the_number_of_gradients():
    few = gss(torch.tensor([1e30]), torch.ones(20, 1))
    many = gss(torch.tensor([1e30]), torch.ones(200, 1))
    assert few.item() == pytest.approx(21)
    assert many.item() == pytest.approx(201)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gss_in_low_precision(dtype):
    history = torch.full((4000, 1), 60.0, dtype=dtype)  # the sum is out of float16's range
    assert gss(torch.tensor([120.0], dtype=dtype), history).item() == pytest.approx(2, rel=1e-3)


def test_gss_edges():
    assert math.isnan(gss(torch.zeros(1), torch.zeros(5, 1)).item())
    assert gss(torch.ones(1), torch.zeros(0, 1)).item() == 1
    with pytest.raises(ValueError, match="history"):
        gss(torch.ones(2), torch.ones(5, 3))


def test_a_spam_spike_is_seen_only_against_the_past():
    # A second moment that already holds the spike can never exceed the threshold of 5000.
    beta2, past = 0.999, 1.0
    spike = 100 * math.sqrt(past)
    assert spike**2 / past > 5000
    assert spike**2 / (beta2 * past + (1 - beta2) * spike**2) < 1 / (1 - beta2) < 5000


def test_coefficient_of_variation():
    assert float(coefficient_of_variation([1.0, 2.0, 3.0])) == 0.5
    assert float(coefficient_of_variation([1e-12, 2e-12, 3e-12])) == pytest.approx(0.5)
    assert float(coefficient_of_variation([1.0, math.nan, 2.0, 3.0])) == 0.5
    np.testing.assert_allclose(coefficient_of_variation([[1.0, 5.0], [3.0, 5.0]]), [math.sqrt(2) / 2, 0])
    assert float(coefficient_of_variation(1e8 + np.array([-1.0, 0.0, 1.0]))) == pytest.approx(1e-8, rel=1e-7)
    for nothing in ([], [1.0], [0.0, 0.0], [math.nan, 1.0]):
        assert math.isnan(coefficient_of_variation(nothing))


def test_thresholds():
    assert is_vanishing(1e-8, 1e-3)
    assert not is_vanishing(1e-6, 1e-3)
    assert is_vanishing(0.5, 1.0, factor=1.0)
    assert is_exploding(1001.0, 1e-3)
    assert not is_exploding(999.0, 1e-3)
    assert is_exploding(math.inf, 1e-3)
    for check in (is_vanishing, is_exploding):
        assert not check(math.nan, 1e-3)
        assert not check(1.0, 0.0)
        with pytest.raises(ValueError, match="lr"):
            check(1.0, -1.0)
