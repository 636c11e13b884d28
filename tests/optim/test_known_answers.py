"""The published behavior of the factor under noise and signal, through the optimizer itself (science A1, A2, A13)."""

from __future__ import annotations

import warnings
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import gradvitals as gv

N = 60_000


def factors(k: int, signal: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors and mean gradient of one step whose k gradients are `signal` plus unit noise."""
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(len(signal)))
    optimizer = gv.optim.VRSGD([p], lr=1.0, **options)
    for _ in range(k):
        ((p * (signal + torch.randn(len(signal), generator=generator))).sum() / k).backward()
    mean = p.grad.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few parts
        optimizer.step()
    return -p.detach() / mean, mean


@cache
def paper_factors(k: int, *, half_signal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The same under no signal at all, or with signal in the first half of the elements."""
    signal = torch.zeros(N)
    signal[: N // 2] = float(half_signal)
    return factors(k, signal)


@pytest.mark.parametrize(("k", "mean_scale"), [(4, 0.394), (8, 0.492), (16, 0.516), (32, 0.525), (256, 0.531)])
def test_pure_noise(k: int, mean_scale: float) -> None:
    scale, _ = paper_factors(k)
    # r has no finite variance with four parts, and so the mean of a hundred thousand of them still wanders.
    assert scale.mean().item() == pytest.approx(mean_scale, abs=0.05 if k == 4 else 0.006)


@pytest.mark.parametrize(("k", "kept"), [(8, 0.868), (256, 0.913)])
def test_pure_noise_in_energy(k: int, kept: float) -> None:
    scale, mean = paper_factors(k)
    assert ((scale * mean.square()).sum() / mean.square().sum()).item() == pytest.approx(kept, abs=0.008)


def test_shares_at_the_two_ends() -> None:
    scale, _ = paper_factors(8)
    assert (scale <= 0.1 + 1e-6).float().mean().item() == pytest.approx(0.281, abs=0.008)
    assert (scale >= 1 - 1e-6).float().mean().item() == pytest.approx(0.275, abs=0.008)


def test_two_parts_collapse_to_gamma() -> None:
    scale, _ = paper_factors(2)
    assert scale.mean().item() == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(("k", "signal", "noise"), [(8, 0.815, 0.216), (32, 0.978, 0.119), (256, 1.000, 0.100)])
def test_half_signal(k: int, signal: float, noise: float) -> None:
    scale, _ = paper_factors(k, half_signal=True)
    assert scale[: N // 2].mean().item() == pytest.approx(signal, abs=0.008)
    assert scale[N // 2 :].mean().item() == pytest.approx(noise, abs=0.008)


def test_a1_and_a2_match_hand_computed_values() -> None:
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = gv.optim.VRSGD([p], lr=1.0, gamma=0.0)
    # A2 beside an element with mean 2.5 and variance 6.25: r is 5 and 1, their mean 3, the factors 1 and 1/3.
    for c in ([1.0, 0.0], [2.0, 0.0], [3.0, 5.0], [4.0, 5.0]):
        (p * torch.tensor(c, dtype=torch.float64)).sum().backward()
    with pytest.warns(UserWarning, match="4"):
        optimizer.step()
    np.testing.assert_allclose(p.detach(), [-10.0, -10 / 3], rtol=1e-12)


@pytest.mark.parametrize("granularity", ["element", "tensor", "hierarchical"])
def test_wiener_shrinks_towards_the_truth(granularity: str) -> None:
    """The shrunken mean has a smaller squared error than the mean. Hierarchical is nearly optimal."""
    k = 16
    truth = 0.25 * torch.randn(N, generator=torch.Generator().manual_seed(3))  # as strong as the noise of the mean
    scale, mean = factors(k, truth, scale="wiener", granularity=granularity, gamma=0.0)
    plain, shrunk = ((mean - truth).square().mean().item(), (scale * mean - truth).square().mean().item())
    assert plain == pytest.approx(1 / k, rel=0.02)
    assert shrunk < 0.95 * plain
    if granularity != "element":  # the best linear shrinkage halves it
        assert shrunk == pytest.approx(0.5 / k, rel=0.06)


def test_wiener_of_pure_noise_is_nearly_gamma() -> None:
    scale, _ = factors(16, torch.zeros(N), scale="wiener", granularity="tensor", gamma=0.05)
    assert scale.mean().item() == pytest.approx(0.05, abs=0.01)


def test_wiener_of_pure_signal_is_one() -> None:
    scale, _ = factors(16, torch.full((N,), 100.0), scale="wiener")
    assert scale.min().item() > 0.999
