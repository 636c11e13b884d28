"""A lower rate is used in the step alone: schedules and users never see it."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

sys.path.insert(0, str(Path(__file__).parent))
from guarded_runs import bits

from gradvitals.guard.actions import LRCut, LRCuts

CUT = {"share": 0.5, "hold": 10, "rise": 20}


def optimizer_of(rate: Any, groups: int = 1, **options: Any) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 2) for _ in range(groups)]
    return torch.optim.SGD([{"params": layer.parameters()} for layer in layers], lr=rate, **options)


def test_a_cut_is_held_and_then_comes_back_in_a_line() -> None:
    ease = LRCut(100, 0.5, 10, 20, False)
    assert [ease.factor(step) for step in (100, 109, 110, 115, 120, 129)] == [0.5, 0.5, 0.5, 0.625, 0.75, 0.975]
    assert [ease.factor(step) for step in (130, 1000)] == [1.0, 1.0]


def test_a_warm_up_is_that_of_spam() -> None:
    """SPAM multiplies by 1 - CosineDecay(0.99, 150), which torch's own cosine schedule gives."""
    ease = LRCut(7, 0.01, 0, 150, True)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.99)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=150 + 1, eta_min=0)
    cosine.T_max = 150
    for passed in range(150):
        decay = 0.99 * (1 + math.cos(math.pi * passed / 150)) / 2
        assert ease.factor(7 + passed) == pytest.approx(1 - decay, abs=1e-12)
        assert cosine.get_last_lr()[0] == pytest.approx(decay, abs=1e-6)
        optimizer.step()
        cosine.step()
    assert ease.factor(157) == 1.0


def test_two_reasons_multiply_and_the_same_reason_starts_over() -> None:
    rates = LRCuts()
    rates.cuts["cut_lr"] = LRCut(0, **CUT)
    rates.cuts["reset_momentum"] = LRCut(0, share=0.1, hold=5, rise=0, cosine=False)
    assert rates.factor(0) == pytest.approx(0.05)
    rates.cuts["cut_lr"] = LRCut(8, **CUT)
    assert rates.factor(17) == 0.5
    assert rates.remove_expired(30) == ["reset_momentum"]
    assert rates.remove_expired(37) == []
    assert rates.remove_expired(38) == ["cut_lr"]
    assert rates.remove_expired(39) == []


def moved(optimizer: torch.optim.Optimizer) -> list[float]:
    """How far one step with gradients of ones moves each group."""
    firsts = [group["params"][0] for group in optimizer.param_groups]
    before = [float(first.detach().flatten()[0]) for first in firsts]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return [old - float(first.detach().flatten()[0]) for old, first in zip(before, firsts, strict=True)]


@pytest.mark.parametrize("tensor", [False, True])
def test_the_step_is_smaller_and_the_rate_is_the_same_after_it(tensor: bool) -> None:
    rate = torch.tensor(0.01) if tensor else 0.01
    optimizer, rates = optimizer_of(rate), LRCuts()
    rates.cuts["cut_lr"] = LRCut(0, **CUT)
    before = bits(optimizer.param_groups[0]["lr"])
    rates.apply(optimizer, 0)
    assert bits(optimizer.param_groups[0]["lr"]) == before
    assert moved(optimizer) == pytest.approx([0.005], rel=1e-4)
    assert bits(optimizer.param_groups[0]["lr"]) == before
    if tensor:
        assert optimizer.param_groups[0]["lr"] is rate  # a CUDA graph knows it by its address


def test_groups_that_share_one_tensor_are_lowered_once() -> None:
    optimizer, rates = optimizer_of(torch.tensor(0.01), groups=3), LRCuts()
    rates.cuts["cut_lr"] = LRCut(0, **CUT)
    for _ in range(3):
        rates.apply(optimizer, 0)
        assert moved(optimizer) == pytest.approx([0.005] * 3, rel=1e-4)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.01] * 3)
