"""Every optimizer over fifteen steps against the literal transcription of its rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from feeding import accumulate, build, compare, gradients, parameters, starting_weights, train, weighted
from transcription import Transcription

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {"lr": 0.1}),
    "momentum": ("sgd", {"lr": 0.1, "momentum": 0.9}),
    "momentum, dampened": ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "nesterov": ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02}),
    "sgd, decay": ("sgd", {"lr": 0.1, "weight_decay": 0.05}),
    "sgd, averaged factors": ("sgd", {"lr": 0.1, "beta3": 0.8}),
    "sgd, gamma 0": ("sgd", {"lr": 0.1, "gamma": 0.0}),
    "adam": ("adam", {"lr": 0.02}),
    "adam, decay": ("adam", {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "adam, amsgrad": ("adam", {"lr": 0.02, "amsgrad": True, "gamma": 0.3}),
    "adam, plain factors": ("adam", {"lr": 0.02, "beta3": 0.0}),
    "adamw": ("adamw", {"lr": 0.02}),
    "adamw, decay": ("adamw", {"lr": 0.02, "weight_decay": 0.3, "beta3": 0.5}),
    "lamb": ("lamb", {"lr": 0.02}),
    "lamb, decay": ("lamb", {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.99), "gamma": 0.2}),
    "lars": ("lars", {"lr": 3.0}),
    "lars, decay": ("lars", {"lr": 3.0, "momentum": 0.7, "weight_decay": 0.1, "trust_coefficient": 0.02}),
    "lars, nesterov": ("lars", {"lr": 3.0, "nesterov": True, "eps": 0.1}),
}
WRAPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": ("adamw", {"lr": 0.02, "beta3": 0.9}),
    "adamw, plain factors": ("adamw", {"lr": 0.02}),
    "rmsprop": ("rmsprop", {"lr": 0.01, "momentum": 0.5, "weight_decay": 0.1}),
    "rmsprop, averaged factors": ("rmsprop", {"lr": 0.01, "beta3": 0.7, "gamma": 0.2}),
    "lamb": ("lamb", {"lr": 0.02, "weight_decay": 0.1, "beta3": 0.6}),
}
ALL = [(name, *case, False) for name, case in CASES.items()] + [
    (f"wrapped {name}", *case, True) for name, case in WRAPPED.items()
]
EVERY = pytest.mark.parametrize(("rule", "options", "wrap"), [case[1:] for case in ALL], ids=[case[0] for case in ALL])
STEPS = gradients(15)


def truth_of(
    rule: str, options: dict[str, Any] | list[dict[str, Any]], *, wrap: bool = False, **more: Any
) -> Transcription:
    weights = starting_weights()
    each = [dict(options) for _ in weights] if isinstance(options, dict) else options
    each = [({"beta3": 0.0} if wrap else {}) | o for o in each]
    return Transcription(rule, weights, each, **more)


def check(
    optimizer: torch.optim.Optimizer,
    params: list[Any],
    truth: Transcription,
    *,
    steps: int = 15,
    rtol: float = 1e-10,
    **options: Any,
) -> None:
    for number, parts in enumerate(STEPS[:steps]):
        truth.step(weighted(parts))
        accumulate(params, parts)
        optimizer.step()
        optimizer.zero_grad()
        compare(params, truth, rtol=rtol, what=f"weights after step {number}", **options)


@EVERY
@pytest.mark.parametrize("foreach", [True, False])
def test_float64(rule: str, options: dict[str, Any], wrap: bool, foreach: bool) -> None:
    params = parameters(starting_weights())
    check(build(rule, params, wrap=wrap, foreach=foreach, **options), params, truth_of(rule, options, wrap=wrap))


@EVERY
def test_float32(rule: str, options: dict[str, Any], wrap: bool) -> None:
    params = parameters(starting_weights(), torch.float32)
    truth = truth_of(rule, options, wrap=wrap)
    check(build(rule, params, wrap=wrap, **options), params, truth, rtol=2e-5, atol=5e-6)


@EVERY
def test_maximize(rule: str, options: dict[str, Any], wrap: bool) -> None:
    params = parameters(starting_weights())
    truth = truth_of(rule, options | {"maximize": True}, wrap=wrap)
    check(build(rule, params, wrap=wrap, maximize=True, **options), params, truth, steps=4)


GROUPS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "sgd": (
        "sgd",
        [
            {"lr": 0.1, "gamma": 0.3, "beta3": 0.5},
            {"lr": 0.3, "gamma": 0.0, "momentum": 0.9},
            {"lr": 0.2},
            {"lr": 0.01, "gamma": 1.0},
        ],
    ),
    "adamw": (
        "adamw",
        [
            {"lr": 0.02, "gamma": 0.3, "beta3": 0.5},
            {"lr": 0.05, "beta3": 0.0, "weight_decay": 0.0},
            {"lr": 0.01, "betas": (0.5, 0.9)},
            {"lr": 0.01, "gamma": 0.05, "beta3": 0.99},
        ],
    ),
    "lamb": (
        "lamb",
        [{"lr": 0.01, "gamma": g, "beta3": b} for g, b in ((0.2, 0.5), (0.4, 0.0), (0.1, 0.9), (0.0, 0.9))],
    ),
    "lars": (
        "lars",
        [{"lr": 1.0, "gamma": g, "momentum": m} for g, m in ((0.2, 0.5), (0.4, 0.0), (0.1, 0.9), (0.0, 0.9))],
    ),
}


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("name", GROUPS)
def test_groups_with_their_own_settings(name: str, wrap: bool) -> None:
    rule, each = GROUPS[name]
    params = parameters(starting_weights())
    groups = [{"params": [p], **options} for p, options in zip(params, each, strict=True)]
    optimizer = build(rule, groups, wrap=wrap, lr=123.0)
    check(optimizer, params, truth_of(rule, each, wrap=wrap))


@pytest.mark.parametrize(("rule", "lr"), [("sgd", 0.1), ("adam", 0.02), ("lars", 1.0)])
def test_gamma_may_be_a_schedule(rule: str, lr: float) -> None:
    seen: list[int] = []

    def gamma(step: int) -> float:
        seen.append(step)
        return 0.5 / (1 + step)

    params = parameters(starting_weights())
    truth = truth_of(rule, {"lr": lr, "gamma": lambda step: 0.5 / (1 + step)})
    check(build(rule, params, lr=lr, gamma=gamma), params, truth)
    assert sorted(set(seen)) == list(range(15))


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan")])
def test_gamma_out_of_range_raises(gamma: float) -> None:
    params = parameters(starting_weights())
    with pytest.raises(ValueError, match="gamma"):
        build("sgd", params, gamma=gamma)
    with pytest.raises(ValueError, match="gamma"):
        build("sgd", [{"params": params, "gamma": gamma}])
    optimizer = build("sgd", params, gamma=lambda step: gamma if step else 0.1)
    train(optimizer, params, STEPS[:1])
    accumulate(params, STEPS[1])
    with pytest.raises(ValueError, match="gamma"):
        optimizer.step()


@pytest.mark.parametrize(
    "wrong",
    [
        {"beta3": 1.0},
        {"beta3": -0.1},
        {"k": 1},
        {"k": 0},
        {"scale": "magic"},
        {"granularity": "galaxy"},
        {"granularity": "hierarchical"},  # wiener's
        {"scale": "wiener", "granularity": "layer"},  # the paper's
        {"moments_dtype": torch.int32},
        {"moments_dtype": torch.float16},
        {"moments_dtype": "bf16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("wrap", [False, True])
def test_invalid_options_raise(wrong: dict[str, Any], wrap: bool) -> None:
    named = [(f"layer{i}.weight", p) for i, p in enumerate(parameters(starting_weights()))]
    name = "granularity" if "granularity" in wrong else next(iter(wrong))
    with pytest.raises((ValueError, TypeError), match=name):
        build("sgd", named, wrap=wrap, **wrong)


def test_last_num_parts_is_the_number_of_parts() -> None:
    params = parameters(starting_weights())
    optimizer = build("sgd", params)
    train(optimizer, params, gradients(2, k=7))
    assert optimizer.last_num_parts == 7
    train(optimizer, params, gradients(1, k=9))
    assert optimizer.last_num_parts == 9


@pytest.mark.parametrize("k", [6, 7, 11, 64])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_any_number_of_parts(rule: str, k: int) -> None:
    steps = gradients(3, k)
    params = parameters(starting_weights())
    truth = truth_of(rule, {"lr": 0.05})
    for parts in steps:
        truth.step(weighted(parts))
    train(build(rule, params, lr=0.05, k=k), params, steps)
    compare(params, truth)


def test_number_of_parts_may_change_from_step_to_step() -> None:
    params = parameters(starting_weights())
    truth = truth_of("adamw", {"lr": 0.05})
    steps = [parts for k in (8, 6, 16) for parts in gradients(1, k, seed=k)]
    for parts in steps:
        truth.step(weighted(parts))
    train(build("adamw", params, lr=0.05), params, steps)
    compare(params, truth)


@pytest.mark.parametrize("weight", [1.0, 1 / 8, 100.0])
def test_loss_divisor_does_not_change_the_factors(weight: float) -> None:
    params = parameters(starting_weights())
    truth = truth_of("sgd", {"lr": 0.1})
    truth.step(weighted(STEPS[0], weight))
    optimizer = build("sgd", params, lr=0.1)
    accumulate(params, STEPS[0], weight)
    grads = [p.grad.clone() for p in params]
    optimizer.step()
    compare(params, truth)
    for p, g, factor in zip(params, grads, truth.factors, strict=True):
        np.testing.assert_allclose((p.grad / g).numpy(), factor, rtol=1e-10)


def test_learning_rate_may_be_a_tensor() -> None:
    params = parameters(starting_weights())
    truth = truth_of("adamw", {"lr": 0.02})
    check(build("adamw", params, lr=torch.tensor(0.02, dtype=torch.float64)), params, truth)


def test_changed_group_settings_take_effect() -> None:
    params = parameters(starting_weights())
    truth = truth_of("sgd", {"lr": 0.1})
    optimizer = build("sgd", params, lr=0.1)
    for parts, gamma in zip(STEPS[:4], (0.1, 0.5, 0.0, 1.0), strict=True):
        optimizer.param_groups[0]["gamma"] = gamma
        for o in truth.options:
            o["gamma"] = gamma
        truth.step(weighted(parts))
        train(optimizer, params, [parts])
        compare(params, truth)
