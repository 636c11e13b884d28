"""LAMB and LARS against the rules of their papers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from feeding import BASES, compare, gradients, parameters, same, starting_weights, train, weighted
from torch import nn
from transcription import Transcription

import gradvitals as gv

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lamb": ("lamb", {"lr": 0.02}),
    "lamb, decay": ("lamb", {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-3}),
    "lars": ("lars", {"lr": 3.0}),
    "lars, decay": ("lars", {"lr": 3.0, "momentum": 0.5, "weight_decay": 0.1, "trust_coefficient": 0.02}),
    "lars, no momentum": ("lars", {"lr": 3.0, "momentum": 0.0}),
    "lars, nesterov": ("lars", {"lr": 3.0, "nesterov": True}),
    "lars, eps": ("lars", {"lr": 3.0, "eps": 0.5}),
}
STEPS = gradients(15, k=1)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize(("rule", "options"), CASES.values(), ids=CASES)
def test_matches_the_papers_algorithm(rule: str, options: dict[str, Any], foreach: bool, maximize: bool) -> None:
    params = parameters(starting_weights())
    optimizer = BASES[rule](params, foreach=foreach, maximize=maximize, **options)
    truth = Transcription(rule, starting_weights(), [options | {"maximize": maximize} for _ in params], vr=False)
    for parts in STEPS:
        truth.step(weighted(parts))
        train(optimizer, params, [parts])
        compare(params, truth)


def one_step(optimizer: torch.optim.Optimizer, p: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    before = p.detach().clone()
    p.grad = gradient.clone()
    optimizer.step()
    return before - p.detach()


def test_lamb_matches_a_hand_computed_step() -> None:
    p = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    # The first step of Adam is the sign; its norm is sqrt 2, the weight's 5.
    moved = one_step(gv.optim.LAMB([p], lr=0.1, eps=0.0), p, torch.tensor([7.0, -0.01]).double())
    np.testing.assert_allclose(moved, np.array([1, -1]) * 0.1 * 5 / np.sqrt(2))


def test_lars_matches_a_hand_computed_step() -> None:
    p = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    optimizer = gv.optim.LARS([p], lr=2.0, momentum=0.5, weight_decay=0.2, trust_coefficient=0.01)
    # local = 0.01 * 5 / (10 + 0.2 * 5)
    moved = one_step(optimizer, p, torch.tensor([6.0, 8.0]).double())
    np.testing.assert_allclose(moved, 2 * 0.05 / 11 * np.array([6.6, 8.8]))


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("rule", ["lamb", "lars"])
def test_zero_weights_still_move(rule: str, foreach: bool) -> None:
    """A bias starts at 0; a ratio of norms would keep it there forever."""
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = BASES[rule]([p], lr=0.5, foreach=foreach, weight_decay=0.1)
    gradient = torch.tensor([1.0, -2.0, 3.0]).double()
    moved = one_step(optimizer, p, gradient)
    expected = 0.5 * (gradient if rule == "lars" else gradient.sign())
    np.testing.assert_allclose(moved, expected, rtol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("rule", ["lamb", "lars"])
def test_zero_gradient_gives_no_nan(rule: str, foreach: bool, decay: float) -> None:
    other, p = (nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64)) for _ in range(2))
    optimizer = BASES[rule]([other, p], lr=0.1, foreach=foreach, weight_decay=decay)
    other.grad = torch.ones(2).double()
    moved = one_step(optimizer, p, torch.zeros(2).double())
    assert torch.isfinite(moved).all()
    assert torch.isfinite(other).all()
    assert bool((moved == 0).all()) == (decay == 0)
    everything_zero = nn.Parameter(torch.zeros(2))
    assert (one_step(BASES[rule]([everything_zero], lr=0.1), everything_zero, torch.zeros(2)) == 0).all()


@pytest.mark.parametrize("rule", ["lamb", "lars"])
def test_parameter_without_gradient_stays_unchanged(rule: str) -> None:
    params = parameters(starting_weights())
    before = [p.detach().clone() for p in params]
    optimizer = BASES[rule](params, lr=0.1, weight_decay=0.1)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert not torch.equal(params[0], before[0])
    assert same(params[1:], before[1:])
    assert all(not optimizer.state[p] for p in params[1:])


@pytest.mark.parametrize("rule", ["lamb", "lars"])
def test_invalid_settings_raise(rule: str) -> None:
    params = parameters(starting_weights())
    with pytest.raises(ValueError, match=r"lr|[Ll]earning rate"):
        BASES[rule](params, lr=-0.1)
    with pytest.raises(ValueError, match="decay"):
        BASES[rule](params, lr=0.1, weight_decay=-1.0)
    if rule == "lamb":
        with pytest.raises(ValueError, match="beta"):
            BASES[rule](params, lr=0.1, betas=(1.0, 0.9))
    else:
        with pytest.raises(ValueError, match="momentum"):
            BASES[rule](params, lr=0.1, momentum=-0.5)
        with pytest.raises(ValueError, match=r"(?i)nesterov"):
            BASES[rule](params, lr=0.1, momentum=0.0, nesterov=True)


@pytest.mark.parametrize("rule", ["lamb", "lars"])
def test_sparse_gradients_raise(rule: str) -> None:
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = BASES[rule](model.parameters(), lr=0.1)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


@pytest.mark.parametrize("rule", ["lamb", "lars"])
def test_training_continues_from_a_state_dict(rule: str) -> None:
    params = parameters(starting_weights(), torch.float32)
    optimizer = BASES[rule](params, lr=0.1, weight_decay=0.01)
    train(optimizer, params, STEPS[:5])
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    other = BASES[rule](copies, lr=9.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, params, STEPS[5:])
    train(other, copies, STEPS[5:])
    assert same(params, copies)
