"""Saving in the middle of training and going on, to the last bit."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import pytest
import torch
from feeding import BASES, build, gradients, parameters, same, starting_weights, train
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import gradvitals as gv

STEPS = gradients(9)
KINDS: dict[str, dict[str, Any]] = {
    "sgd": {"rule": "sgd", "lr": 0.1},
    "momentum": {"rule": "sgd", "lr": 0.1, "momentum": 0.9, "beta3": 0.8},
    "adam": {"rule": "adam", "lr": 0.02},
    "adamw": {"rule": "adamw", "lr": 0.02, "scale": "wiener", "granularity": "row"},
    "lamb": {"rule": "lamb", "lr": 0.02, "gamma": 0.3},
    "lars": {"rule": "lars", "lr": 1.0, "beta3": 0.5},
    "wrapped": {"rule": "rmsprop", "lr": 0.01, "wrap": True, "beta3": 0.7},
    "bfloat16 moments": {"rule": "adamw", "lr": 0.02, "moments_dtype": torch.bfloat16},
    "schedule": {"rule": "sgd", "lr": 0.1, "gamma": lambda step: 1 / (1 + step)},
    "linear": {"rule": "adam", "lr": 0.02, "gamma": "linear"},
}
EVERY = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def make(kind: dict[str, Any], params: Any, **changes: Any) -> torch.optim.Optimizer:
    kind = kind | changes
    if kind.get("gamma") == "linear":
        kind["gamma"] = gv.optim.schedules.linear(1.0, 0.0, 10)
    return build(params=params, **kind)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_training_is_equal_bit_for_bit(kind: dict[str, Any], dtype: torch.dtype) -> None:
    params = parameters(starting_weights(), dtype)
    optimizer = make(kind, params)
    train(optimizer, params, STEPS[:4])
    saved, state = [p.detach().clone() for p in params], through_a_file(optimizer.state_dict())
    train(optimizer, params, STEPS[4:])

    others = [nn.Parameter(p.clone()) for p in saved]
    other = make(kind, others, lr=77.0)
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == kind["lr"]
    train(other, others, STEPS[4:])
    assert same(params, others)
    assert not same(params, saved)


@EVERY
def test_loading_an_earlier_state(kind: dict[str, Any]) -> None:
    """Into the same optimizer, which has moved on."""
    params = parameters(starting_weights(), torch.float32)
    optimizer = make(kind, params)
    train(optimizer, params, STEPS[:4])
    saved, state = [p.detach().clone() for p in params], through_a_file(optimizer.state_dict())
    train(optimizer, params, STEPS[4:8])
    there = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p, before in zip(params, saved, strict=True):
            p.copy_(before)
    optimizer.load_state_dict(state)
    train(optimizer, params, STEPS[4:8])
    assert same(params, there)


def test_factors_keep_their_precision() -> None:
    """torch casts loaded state to the parameter's dtype; the average of factors of bfloat16 weights must not be."""
    params = parameters(starting_weights(), torch.bfloat16)
    optimizer = build("adamw", params, lr=0.02)
    train(optimizer, params, STEPS[:3])
    before = optimizer.state[params[0]]["factor_avg"]
    other = build("adamw", params, lr=0.02)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    after = other.state[params[0]]["factor_avg"]
    assert after.dtype == before.dtype
    assert torch.equal(after, before)


@pytest.mark.parametrize("way", ["from the base", "from the base, wrapped", "to the base"])
@pytest.mark.parametrize("rule", ["sgd", "adam", "adamw", "lamb", "lars"])
def test_state_is_exchanged_with_the_base_optimizer(rule: str, way: str) -> None:
    """Its moments are taken over, and with gamma = 1 nothing changes."""
    extra = {"momentum": 0.9} if rule == "sgd" else {}
    reduced = partial(build, rule, wrap="wrapped" in way, gamma=1.0, **extra)
    base = partial(BASES[rule], **extra)
    make, make_other = (reduced, base) if way == "to the base" else (base, reduced)
    params = parameters(starting_weights(), torch.float32)
    optimizer = make(params, lr=0.02)
    train(optimizer, params, STEPS[:4])
    others = [nn.Parameter(p.detach().clone()) for p in params]
    other = make_other(others, lr=0.5)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert other.param_groups[0]["lr"] == 0.02
    assert other.param_groups[0].get("gamma", 1.0) == 1.0
    train(optimizer, params, STEPS[4:])
    train(other, others, STEPS[4:])
    assert same(params, others)


def test_custom_rule_is_not_saved() -> None:
    """Functions stay out of the file. Where one is missing that is said, and not another rule used."""
    params = parameters(starting_weights())

    def scale(mean: Any, variance: Any, num_parts: int, gamma: float) -> Any:
        return torch.full_like(mean, 0.5)

    optimizer = build("sgd", params, lr=0.1, scale=scale)
    train(optimizer, params, STEPS[:2])
    state = through_a_file(optimizer.state_dict())
    others = [nn.Parameter(p.detach().clone()) for p in params]
    other = build("sgd", others, lr=0.1, scale=scale)
    other.load_state_dict(state)
    train(optimizer, params, STEPS[2:4])
    train(other, others, STEPS[2:4])
    assert same(params, others)

    def load_into_the_papers() -> None:
        papers = build("sgd", others, lr=0.1)
        papers.load_state_dict(state)
        train(papers, others, STEPS[:1])

    with pytest.raises((ValueError, RuntimeError), match="scale"):
        load_into_the_papers()


@pytest.mark.parametrize("vr", [{}, {"k": 8}, {"gamma": "linear"}, {"scale": "wiener"}], ids=str)
@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoint_round_trip(flat: bool, vr: dict[str, Any]) -> None:
    """Which makes the state of a new optimizer by a step without effect, to know what to load."""
    kind = {"rule": "adamw", "lr": 0.02} | vr
    model = nn.ParameterList(parameters(starting_weights(), torch.float32))
    optimizer = make(kind, model.parameters())
    train(optimizer, list(model), STEPS[:4])
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = through_a_file(get_optimizer_state_dict(model, optimizer, options=options))
    other_model = nn.ParameterList([nn.Parameter(p.detach().clone()) for p in model])
    other = make(kind, other_model.parameters(), lr=0.77)
    set_optimizer_state_dict(other_model, other, state, options=options)
    assert same(list(model), list(other_model))
    assert other.param_groups[0]["lr"] == 0.02
    for p, q in zip(model, other_model, strict=True):
        assert torch.equal(optimizer.state[p]["factor_avg"], other.state[q]["factor_avg"])
        assert optimizer.state[p]["factor_step"] == other.state[q]["factor_step"] == 4
    train(optimizer, list(model), STEPS[4:])
    train(other, list(other_model), STEPS[4:])
    assert same(list(model), list(other_model))


@pytest.mark.parametrize("vr", [{}, {"k": 8}, {"gamma": "linear"}], ids=str)
@pytest.mark.parametrize("wrap", [False, True])
def test_distributed_checkpoint_before_the_first_step(wrap: bool, vr: dict[str, Any]) -> None:
    """To ask for the state changes nothing: neither weights nor factors that come later."""
    kind = {"rule": "sgd", "lr": 0.1, "beta3": 0.5, "wrap": wrap} | vr
    results = []
    for asked in (False, True):
        model = nn.ParameterList(parameters(starting_weights(), torch.float32))
        optimizer = make(kind, model.parameters())
        if asked:
            get_optimizer_state_dict(model, optimizer)
            assert same(list(model), parameters(starting_weights(), torch.float32))
        train(optimizer, list(model), STEPS[:3])
        results.append(list(model))
    assert same(*results)


class Remembers(torch.optim.SGD):
    """A base with a state of its own, which it saves in its own way."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "count"})


def test_base_with_its_own_state_dict() -> None:
    params = parameters(starting_weights(), torch.float32)
    optimizer = gv.optim.VRGD(Remembers(params, lr=0.1, momentum=0.9), beta3=0.5)
    train(optimizer, params, STEPS[:4])
    state = through_a_file(optimizer.state_dict())
    assert state["count"] == 4
    others = [nn.Parameter(p.detach().clone()) for p in params]
    other = gv.optim.VRGD(Remembers(others, lr=0.77))
    other.load_state_dict(state)
    assert other.base.count == 4
    assert (other.param_groups[0]["lr"], other.param_groups[0]["beta3"]) == (0.1, 0.5)
    train(optimizer, params, STEPS[4:])
    train(other, others, STEPS[4:])
    assert same(params, others)
