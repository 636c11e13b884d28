"""Norms and the component along the weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradvitals.functional import global_norm, gsnr, radial, radial_gsnr, squared_norm


def test_norms_by_hand():
    assert squared_norm(torch.tensor([[3.0], [4.0]])) == 25
    assert global_norm([torch.tensor([3.0]), None, torch.tensor([[0.0, 4.0]])]) == 5
    assert global_norm([]) == 0
    assert squared_norm(torch.zeros(0, 3)) == 0
    assert squared_norm(torch.tensor(2.0)) == 4


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 60000.0), (torch.bfloat16, 1e30), (torch.float32, 1e30)])
def test_large_elements_do_not_overflow(dtype, size):
    x = torch.full((4,), size, dtype=dtype)
    assert global_norm([x]) == pytest.approx(2 * x[0].double().item(), rel=1e-14)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 6e-8), (torch.bfloat16, 1e-38), (torch.float32, 1e-38)])
def test_small_elements_do_not_underflow(dtype, size):
    x = torch.full((4,), size, dtype=dtype)
    assert global_norm([x]) == pytest.approx(2 * x[0].double().item(), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_many_elements_keep_their_digits(dtype):
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert squared_norm(x) == pytest.approx(float((x.double().numpy() ** 2).sum()), rel=1e-12)


def test_chunks_add_up(monkeypatch):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = squared_norm(x)
    monkeypatch.setattr("gradvitals.functional.norms._CHUNK_ELEMENTS", 77)
    assert squared_norm(x) == pytest.approx(whole, rel=1e-13)


def test_nonfinite_elements_show():
    assert math.isnan(global_norm([torch.tensor([1.0, math.nan])]))
    assert global_norm([torch.tensor([1.0, math.inf])]) == math.inf


def test_radial_by_hand():
    assert radial(torch.tensor([3.0, 4.0]), torch.tensor([5.0, 0.0])) == 3
    assert radial(torch.tensor([3.0, 4.0]).bfloat16(), torch.tensor([-4.0, 3.0])) == 0
    assert math.isnan(radial(torch.zeros(2), torch.ones(2)))


def test_radial_gsnr_is_that_of_one_coordinate():
    weight = torch.tensor([[2.0, 0.0]])
    grads = torch.randn(8, 1, 2, generator=torch.Generator().manual_seed(0)) + 1
    estimate = radial_gsnr(weight, grads)
    along = gsnr(grads[:, 0, 0])
    assert (estimate.low, estimate.high) == (pytest.approx(along.low), pytest.approx(along.high))
    assert estimate.value == pytest.approx((along.value + 1 / 8) * 5 / 7 - 1 / 8)
    assert estimate.num_samples == 8


@pytest.mark.parametrize(("cosine", "tolerance"), [(0.3, 0.02), (1.0, 0.06)])
def test_radial_gsnr_grows_with_alignment(cosine, tolerance):
    rng = np.random.default_rng(0)
    mean, across = 0.02 * rng.standard_normal((2, 512))
    across -= (across @ mean) / (mean @ mean) * mean
    weight = cosine * mean / np.linalg.norm(mean) + math.sqrt(1 - cosine**2) * across / np.linalg.norm(across)
    grads = mean + rng.standard_normal((3000, 512))
    estimate = radial_gsnr(torch.from_numpy(weight), torch.from_numpy(grads))
    assert estimate.value == pytest.approx(cosine**2 * (mean @ mean), abs=tolerance)
    assert estimate.low < cosine**2 * (mean @ mean) < estimate.high


def test_radial_edges():
    assert math.isnan(radial_gsnr(torch.ones(2), torch.ones(3, 2)).value)
    assert math.isnan(radial_gsnr(torch.zeros(2), torch.ones(8, 2)).value)
    assert math.isnan(radial_gsnr(torch.ones(2), torch.ones(0, 2)).value)
    assert radial_gsnr(torch.ones(2), torch.ones(8, 2)).value == math.inf
    with pytest.raises(ValueError, match="shape"):
        radial(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match="shape"):
        radial_gsnr(torch.ones(2), torch.ones(5, 3))
