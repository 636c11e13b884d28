"""Sums and medians of Adam's moments by kernels, against float64 and against the sample that torch takes."""

from __future__ import annotations

import pytest
import torch

import gradvitals as gv
from gradvitals.kernels import moments
from gradvitals.kernels.moments import MomentReader

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

SIZES = (7, 1, 3000, 8192, 5 * 8192 + 100)
BETAS = {"beta1": 0.9, "beta2": 0.999, "step": 50}


def some(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    firsts, seconds = [], []
    for size in SIZES:
        signal = torch.rand(size, generator=generator)  # m²/v runs over some octaves
        firsts.append((torch.randn(size, generator=generator) * signal).to(device, dtype))
        seconds.append((torch.rand(size, generator=generator) + 0.5).to(device, dtype))
    seconds[2][:500] = 0  # no gradient has come there yet
    firsts[2][:500] = 0
    return firsts, seconds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_match_float64(dtype: torch.dtype, device: torch.device) -> None:
    firsts, seconds = some(device, dtype)
    factor = 0.5 * (1 - 0.9**50) ** 2 / (1 - 0.999**50) * (1 + 1 / 19 * (1 + 0.9**50) / (1 - 0.9**50))
    limits = torch.full((len(SIZES),), factor, device=device)
    found = MomentReader(SIZES, device).sums(firsts, seconds, limits).cpu()
    for column, (m, v) in enumerate(zip(firsts, seconds, strict=True)):
        m, v = m.double().cpu(), v.double().cpu()
        alive = int((v > 0).sum())
        below = gv.functional.adam_gsnr_below_one(m, v, **BETAS)
        expected = torch.tensor([m.norm(), v.sum(), alive, below * alive], dtype=torch.float64)
        torch.testing.assert_close(found[:, column], expected, rtol=2e-6, atol=1.001)  # one may be on the edge
        assert found[2, column] == alive


def sampled(values: torch.Tensor) -> torch.Tensor:
    if len(values) < moments.SPAN:
        return values
    runs = values.split(moments.SPAN)
    every = -(-len(runs) // moments.MAX_RUNS) | 1
    found = []
    for place in range(0, len(runs), every):
        shift = moments.BLOCK * (7 * place % 16) if place < len(runs) - 1 else 0
        found.append(runs[place][shift : shift + moments.BLOCK])
    return torch.cat(found)


@pytest.mark.parametrize("size", [1.0, 1e-3, 2.0])
def test_medians_match_the_sample(size: float, device: torch.device) -> None:
    firsts, seconds = some(device)
    firsts = [m * size for m in firsts]
    found = MomentReader(SIZES, device).medians(firsts, seconds).cpu()
    for place, (m, v) in enumerate(zip(firsts, seconds, strict=True)):
        m, v = sampled(m).double().cpu(), sampled(v).double().cpu()
        ratio = (m.square() / v)[v > 0]
        # An edge is up to 13 % above the last one; with few coordinates a bin says no more than that.
        spacing = 0.13 if len(ratio) < 100 else 0.03 if len(ratio) < 1000 else 0.02
        assert float(found[place]) == pytest.approx(float(ratio.quantile(0.5)), rel=spacing)


def test_long_tensor_is_sampled_over_its_whole_length(device: torch.device) -> None:
    size = 150 * moments.SPAN
    rising = torch.linspace(0.1, 2.0, size, device=device)
    reader = MomentReader([size, 100], device)
    found = reader.medians([rising, rising[:100]], [torch.ones_like(rising), torch.ones_like(rising[:100])]).cpu()
    expected = float(sampled(rising.cpu()).square().quantile(0.5))
    assert float(found[0]) == pytest.approx(expected, rel=0.02)
    assert float(found[0]) == pytest.approx(float(rising.square().median()), rel=0.05)
    assert float(found[1]) == pytest.approx(0.01, rel=0.13)
    assert reader.num_sampled == 50 * moments.BLOCK + 100


def test_extreme_ratios_and_empty_tensors(device: torch.device) -> None:
    ones = torch.ones(64, device=device)
    firsts = [ones * 1e-12, ones * 1e12, ones * 0, ones]
    seconds = [ones, ones, ones, ones * 0]
    found = MomentReader([64] * 4, device).medians(firsts, seconds).cpu()
    assert 0 < float(found[0]) < 2**-27
    assert 15 <= float(found[1]) <= 16 * 1.13
    assert 0 < float(found[2]) < 2**-27
    assert found[3].isnan()
