"""How far apart workers are: against the definition, written out, and in the corners."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from gradvitals.functional.dispersion import LEAST_SPREAD, leave_one_out_z, norm_dispersion, norm_ratios


def z_by_definition(norms: np.ndarray) -> np.ndarray:
    logs = np.log(norms)
    result = []
    for worker, own in enumerate(logs):
        others = np.delete(logs, worker)
        centre = np.median(others)
        spread = max(1.4826 * np.median(np.abs(others - centre)), LEAST_SPREAD) * math.sqrt(1 + 4 / len(others))
        result.append((own - centre) / spread)
    return np.array(result)


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 6, 7, 8, 33, 64])
@pytest.mark.parametrize("ties", [False, True])
def test_z_is_what_the_formula_says(workers: int, ties: bool) -> None:
    rng = np.random.default_rng(workers)
    for spread in (1e-3, 0.1, 1.0):
        norms = np.exp(spread * rng.standard_normal(workers))
        if ties:
            norms = np.round(norms, 1) + 0.1
        np.testing.assert_allclose(leave_one_out_z(norms), z_by_definition(norms), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_the_scale_of_all_norms_does_not_matter(scale: float) -> None:
    norms = np.array([1.0, 1.3, 0.9, 2.5, 0.0])
    np.testing.assert_allclose(leave_one_out_z(norms * scale), leave_one_out_z(norms), rtol=1e-9)
    np.testing.assert_allclose(norm_ratios(norms * scale), norm_ratios(norms), rtol=1e-9)
    assert norm_dispersion(norms * scale) == pytest.approx(norm_dispersion(norms))


@pytest.mark.parametrize("workers", [3, 4, 8, 100])
def test_one_odd_worker_stands_out_and_the_others_do_not(workers: int) -> None:
    norms = np.exp(0.02 * np.random.default_rng(0).standard_normal(workers))
    norms[1] *= 4
    z = leave_one_out_z(norms)
    assert np.argmax(z) == 1
    assert z[1] > 10
    assert np.abs(np.delete(z, 1)).max() < 4
    assert norm_ratios(norms)[1] == pytest.approx(4, rel=0.1)


def test_of_two_neither_is_the_odd_one() -> None:
    z = leave_one_out_z([1.0, 2.0])
    assert z[1] == pytest.approx(-z[0]) == pytest.approx(math.log(2) / (LEAST_SPREAD * math.sqrt(5)))
    np.testing.assert_allclose(norm_ratios([1.0, 2.0]), [0.5, 2.0])


def test_what_cannot_be_compared_is_nan() -> None:
    assert np.isnan(leave_one_out_z([1.0])).all()
    assert np.isnan(norm_ratios([])).all()
    assert np.isnan(norm_ratios([0.0, 0.0])).all()
    assert math.isnan(norm_dispersion([1.0]))
    assert math.isnan(norm_dispersion([0.0, 0.0]))
    norms = np.array([1.0, math.nan, 1.1, math.inf, 0.9])
    finite = np.isfinite(norms)
    np.testing.assert_array_equal(np.isnan(leave_one_out_z(norms)), ~finite)
    np.testing.assert_allclose(leave_one_out_z(norms)[finite], leave_one_out_z(norms[finite]))
    np.testing.assert_allclose(norm_ratios(norms)[finite], norm_ratios(norms[finite]))


def test_a_worker_without_any_gradient_is_far_off() -> None:
    z = leave_one_out_z([1.0, 1.1, 0.0, 0.9])
    assert z[2] < -10
    assert norm_ratios([1.0, 1.1, 0.0, 0.9])[2] == 0
    assert np.isfinite(z).all()


def test_ten_thousand_workers_are_quick() -> None:
    norms = np.exp(0.1 * np.random.default_rng(0).standard_normal(10_000))
    start = time.process_time()
    z = leave_one_out_z(norms)
    assert time.process_time() - start < 0.5
    assert z.std() == pytest.approx(1, abs=0.05)
