"""After momentum was forgotten, an optimizer's next step is that of a new one at the same weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from guarded_runs import bits

import gradvitals.optim as gvo
from gradvitals.guard.actions import reset_momentum

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "radam": lambda parameters: torch.optim.RAdam(parameters, lr=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.5, centered=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


def fill(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def trained(make: Make, steps: int = 5) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = make(model.parameters())
    for step in range(steps):
        fill(model, step)
        optimizer.step()
    return model, optimizer


def fresh_at(model: nn.Module, make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    other = net()
    other.load_state_dict(model.state_dict())
    return other, make(other.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_steps_are_those_of_a_new_optimizer(name: str) -> None:
    model, optimizer = trained(OPTIMIZERS[name])
    other, new = fresh_at(model, OPTIMIZERS[name])
    assert reset_momentum(optimizer) == 4
    for step in range(90, 93):
        for each in (model, other):
            fill(each, step)
        optimizer.step()
        new.step()
        assert bits(model.state_dict()) == bits(other.state_dict())


def test_vr_adamw_starts_over() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return gvo.VRAdamW(parameters, lr=0.01)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(seed)
        for _ in range(8):
            model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        optimizer.step()

    model = net()
    optimizer = make(model.parameters())
    for seed in range(4):
        step(model, optimizer, seed)
    other, new = fresh_at(model, make)
    assert reset_momentum(optimizer) == 4
    for seed in range(10, 13):
        step(model, optimizer, seed)
        step(other, new, seed)
    assert bits(model.state_dict()) == bits(other.state_dict())


def test_some_tensors_alone() -> None:
    model, optimizer = trained(OPTIMIZERS["adam"])
    chosen = model[0].weight
    kept = {name: bits(optimizer.state[p]) for name, p in model.named_parameters() if p is not chosen}
    assert reset_momentum(optimizer, [chosen]) == 1
    assert not optimizer.state.get(chosen)
    assert {name: bits(optimizer.state[p]) for name, p in model.named_parameters() if p is not chosen} == kept
    other, new = fresh_at(model, OPTIMIZERS["adam"])
    for each in (model, other):
        fill(each, 50)
    optimizer.step()
    new.step()
    assert bits(model[0].weight) == bits(other[0].weight)
    assert bits(model[1].weight) != bits(other[1].weight)


def test_what_a_graph_may_know_by_address_stays_and_is_zero() -> None:
    model, optimizer = trained(OPTIMIZERS["adam"])
    for group in optimizer.param_groups:
        group["capturable"] = True
    before = {name: [value for value in optimizer.state[p].values()] for name, p in model.named_parameters()}
    assert reset_momentum(optimizer) == 4
    for name, parameter in model.named_parameters():
        after = list(optimizer.state[parameter].values())
        assert [value is old for value, old in zip(after, before[name], strict=True)] == [True] * len(after)
        assert all(float(value.abs().sum()) == 0 for value in after)
