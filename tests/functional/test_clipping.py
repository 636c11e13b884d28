"""What is left of a gradient, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradvitals.functional.clipping import adagc_factors, clip_factor, zclip_norm

norms = st.floats(min_value=1e-20, max_value=1e20)


def test_a_gradient_is_scaled_to_the_norm_allowed_and_never_up() -> None:
    factors = clip_factor(torch.tensor([0.5, 2.0, 4.0, 8.0]), 2.0)
    assert factors.tolist() == [1.0, 1.0, 0.5, 0.25]


def test_a_gradient_of_zeros_is_left_alone() -> None:
    assert float(clip_factor(torch.tensor(0.0), 2.0)) == 1.0


def test_what_is_not_a_number_stays_so() -> None:
    assert math.isnan(float(clip_factor(torch.tensor(math.nan), 2.0)))


def test_nothing_is_left_of_an_infinite_gradient() -> None:
    assert float(clip_factor(torch.tensor(math.inf), 2.0)) == 0.0


@given(norms, norms)
def test_what_is_left_is_the_smaller_of_the_two(norm: float, limit: float) -> None:
    left = norm * float(clip_factor(torch.tensor(norm, dtype=torch.float64), limit))
    assert left == pytest.approx(min(norm, limit), rel=1e-12)


def test_zclip_leaves_mean_and_a_quarter_of_five_deviations_at_a_score_of_five() -> None:
    """Acceptance test A16: z = 5 over a threshold of 2.5 leaves mean + 2.5 ** 2 / 5 std."""
    for mean, std in ((10.0, 1.0), (3.0, 0.2), (1e-4, 1e-5)):
        norm = torch.tensor(mean + 5 * std, dtype=torch.float64)
        assert float(zclip_norm(norm, mean, std)) == pytest.approx(mean + 1.25 * std, rel=1e-9)


@pytest.mark.parametrize(("z", "left"), [(-3.0, -3.0), (0.0, 0.0), (2.4, 2.4), (3.0, 6.25 / 3), (10.0, 0.625)])
def test_zclip_leaves_less_of_a_larger_spike(z: float, left: float) -> None:
    norm = torch.tensor(20 + 2 * z, dtype=torch.float64)
    assert float(zclip_norm(norm, 20.0, 2.0)) == pytest.approx(20 + 2 * left, rel=1e-12)


def test_zclip_at_another_threshold() -> None:
    assert float(zclip_norm(torch.tensor(14.0), 10.0, 1.0, threshold=2.0)) == pytest.approx(10 + 4 / 4)


@given(st.floats(min_value=2.51, max_value=1e6), st.floats(min_value=0.1, max_value=10.0))
def test_zclip_ends_between_the_mean_and_the_threshold(z: float, std: float) -> None:
    left = float(zclip_norm(torch.tensor(5 + z * std, dtype=torch.float64), 5.0, std))
    assert 5 <= left <= 5 + 2.5 * std * (1 + 1e-9)


def test_adagc_clips_each_tensor_by_its_own_past() -> None:
    factors = adagc_factors(torch.tensor([1.0, 1.05, 4.2, 30.0]), torch.tensor([1.0, 1.0, 2.0, 1.0]))
    torch.testing.assert_close(factors, torch.tensor([1.0, 1.0, 0.5, 0.035]))


def test_adagc_with_another_ratio() -> None:
    assert adagc_factors(torch.tensor([4.0]), torch.tensor([1.0]), ratio=2.0).tolist() == [0.5]
