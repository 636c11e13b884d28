"""Arms differ in what they do to gradients, and in nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.vrgd.trial import (
    ARMS,
    OPTIMIZERS,
    Trial,
    adaptive_factor,
    cap4_factor,
    make_optimizer,
    mean_factor,
)
from gradvitals.functional import vrgd_scale_from_variance, wiener_scale

TRIAL = Trial(
    task="cifar", model="resnet20", batch=64, optimizer="sgd", arm="base", lr=1.0, seed=3, weight_decay=0.0, k=8
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 5, generator=generator))
        self.bias = nn.Parameter(torch.randn(5, generator=generator))


def gradients(step: int = 0) -> dict[str, Tensor]:
    """Eight gradients of each parameter, with a signal that differs between elements."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.linspace(0, 1, p.numel()).view_as(p) + torch.randn(8, *p.shape, generator=generator)
        for name, p in Model().named_parameters()
    }


def run(trial: Trial, steps: int = 1) -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
    """The parameters after some steps of eight micro-batches."""
    model = Model()
    optimizer = make_optimizer(trial, model.named_parameters(), num_steps=10)
    for step in range(steps):
        parts = gradients(step)
        for part in range(8):
            loss = sum((p * parts[name][part]).sum() for name, p in model.named_parameters())
            assert isinstance(loss, Tensor)
            (loss / 8).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, optimizer


def factors(trial: Trial, steps: int = 1) -> dict[str, Tensor]:
    """What the last step multiplied gradients with: plain SGD with learning rate 1 moves by factor times mean."""
    before = run(trial, steps - 1)[0]
    after = run(trial, steps)[0]
    parts = gradients(steps - 1)
    return {name: (before[name] - after[name]) / parts[name].mean(0) for name in before}


def papers(step: int = 0, gamma: float = 0.1) -> dict[str, Tensor]:
    return {
        name: vrgd_scale_from_variance(parts.mean(0), parts.var(0, correction=0), gamma)
        for name, parts in gradients(step).items()
    }


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_with_factors_of_one_the_vr_twin_is_its_base(kind: str) -> None:
    trial = replace(TRIAL, optimizer=kind, lr=0.05, weight_decay=0.1)
    base, _ = run(trial, steps=3)
    twin, _ = run(replace(trial, arm="vr", gamma=1.0), steps=3)
    scaled, _ = run(replace(trial, arm="vr"), steps=3)
    for name, parameter in base.items():
        torch.testing.assert_close(twin[name], parameter, rtol=0, atol=1e-7)
        assert not torch.allclose(scaled[name], parameter, rtol=0, atol=1e-5)


@pytest.mark.parametrize("arm", ["base", "vr"])
def test_only_matrices_decay(arm: str) -> None:
    moved, _ = run(replace(TRIAL, arm=arm))
    decayed, _ = run(replace(TRIAL, arm=arm, weight_decay=0.5))
    torch.testing.assert_close(decayed["weight"], moved["weight"] - 0.5 * Model().weight.detach())
    torch.testing.assert_close(decayed["bias"], moved["bias"])


def test_the_papers_arm_has_the_papers_factors() -> None:
    for name, factor in factors(replace(TRIAL, arm="vr")).items():
        torch.testing.assert_close(factor, papers()[name], rtol=1e-3, atol=1e-4)


def test_rows_and_layers_have_their_own_means() -> None:
    found = factors(replace(TRIAL, arm="vr-row"))["weight"]
    parts = gradients()["weight"]
    expected = vrgd_scale_from_variance(parts.mean(0), parts.var(0, correction=0), 0.1, by_row=True)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found, papers()["weight"], atol=1e-2)
    by_layer = factors(replace(TRIAL, arm="vr-layer"))  # weight and bias are one layer, but decay differently
    assert by_layer.keys() == papers().keys()


def test_the_mean_arm_is_only_a_smaller_step() -> None:
    for name, factor in factors(replace(TRIAL, arm="mean")).items():
        expected = papers()[name].mean()
        assert 0.2 < expected < 0.9
        torch.testing.assert_close(factor, expected.expand_as(factor), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("arm", ["shuffled", "shuffled-fixed"])
def test_shuffled_factors_are_the_papers_on_other_elements(arm: str) -> None:
    trial = replace(TRIAL, arm=arm)
    for name, factor in factors(trial).items():
        paper = papers()[name]
        torch.testing.assert_close(factor.flatten().sort().values, paper.flatten().sort().values, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(factors(trial)["weight"], papers()["weight"], atol=1e-2)
    torch.testing.assert_close(factors(trial), factors(trial))
    assert not torch.allclose(factors(trial)["weight"], factors(replace(trial, seed=4))["weight"], atol=1e-2)


@pytest.mark.parametrize("level", ["element", "row", "tensor", "hierarchical"])
@pytest.mark.parametrize("gamma", [0.0, 0.8])
def test_wiener_arms_shrink_at_their_level(level: Any, gamma: float) -> None:
    found = factors(replace(TRIAL, arm=f"wiener-{level}", gamma=gamma))["weight"]
    parts = gradients()["weight"]
    expected = wiener_scale(parts.mean(0), parts.var(0, correction=0), 8, level=level, gamma=gamma)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert found.min() < 0.801


def test_an_adaptive_floor_worked_by_hand() -> None:
    # Noise of the mean of 3 parts: variance / 2, so 1 and 1; squared mean 9 and 1: signal share 1 - 2/10.
    # The paper's ratios are 9/2 and 1/2 with mean 2.5: 1.8 and 0.2, clipped to [0.8, 1].
    mean, variance = torch.tensor([3.0, -1.0]), torch.tensor([2.0, 2.0])
    torch.testing.assert_close(adaptive_factor(mean, variance, 3, 0.1), torch.tensor([1.0, 0.8]))
    torch.testing.assert_close(adaptive_factor(mean, variance, 3, 0.9), torch.tensor([1.0, 0.9]))
    # All noise: nothing is left of the floor but gamma.
    torch.testing.assert_close(adaptive_factor(mean, 100 * variance, 3, 0.1), torch.tensor([1.0, 0.2]))
    torch.testing.assert_close(mean_factor(mean, variance, 3, 0.1), torch.tensor([0.6, 0.6]))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_gamma_comes_down_from_one(schedule: str) -> None:
    trial = replace(TRIAL, arm="vr", gamma_schedule=schedule)
    found = factors(trial)
    for factor in found.values():
        torch.testing.assert_close(factor, torch.ones_like(factor), rtol=1e-3, atol=1e-4)
    gammas = [run(trial, steps)[1].param_groups[0]["gamma"] for steps in range(1, 11)]
    assert gammas[0] == 1
    assert all(later < earlier for earlier, later in pairwise(gammas))
    assert 0.1 <= gammas[-1] < 0.25


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "rmsprop"}, "momentum, adam"),
        ({"arm": "vs"}, "wiener-row"),
        ({"arm": "vr", "gamma_schedule": "steep"}, "cosine, adaptive"),
        ({"arm": "mean", "gamma_schedule": "adaptive"}, "expected arm 'vr'"),
    ],
)
def test_what_is_not_there_is_named(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(replace(TRIAL, **changes))


def test_every_arm_takes_a_step() -> None:
    for arm in ARMS:
        moved, optimizer = run(replace(TRIAL, arm=arm))
        assert all(torch.isfinite(parameter).all() for parameter in moved.values())
        assert arm == "base" or optimizer.last_num_parts == 8  # type: ignore[attr-defined]


def test_a_cap_at_4_lets_elements_go_faster() -> None:
    """Ratios 16, 1, 1 and 0.02 have the mean 4.505; an element without variance does not enter it."""
    mean = torch.tensor([4.0, 1.0, -1.0, 0.02**0.5, 5.0])
    variance = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    factors = cap4_factor(mean, variance, 8, 0.1)[:4]
    torch.testing.assert_close(factors, torch.tensor([16 / 4.505, 1 / 4.505, 1 / 4.505, 0.1]))
    assert cap4_factor(torch.tensor([100.0, 0.1, 0.1, 0.1, 0.1, 0.1]), torch.ones(6), 8, 0.1)[0] == 4
