"""Every optimizer over fifteen steps against the literal transcription of its rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from feeding import Pair, accumulate, build, compare, gradients, parameters, starting_weights, train, weighted
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


@EVERY
@pytest.mark.parametrize("foreach", [True, False])
def test_float64(rule: str, options: dict[str, Any], wrap: bool, foreach: bool) -> None:
    Pair(rule, wrap=wrap, foreach=foreach, **options).step(*STEPS)


@EVERY
def test_float32(rule: str, options: dict[str, Any], wrap: bool) -> None:
    Pair(rule, wrap=wrap, dtype=torch.float32, **options).step(*STEPS, rtol=2e-5, atol=5e-6)


@EVERY
def test_maximize(rule: str, options: dict[str, Any], wrap: bool) -> None:
    Pair(rule, wrap=wrap, maximize=True, **options).step(*STEPS[:4])


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
    defaults = {"beta3": 0.0} if wrap else {}
    truth = Transcription(rule, starting_weights(), [defaults | options for options in each])
    for parts in STEPS:
        truth.step(weighted(parts))
        train(optimizer, params, [parts])
        compare(params, truth)


@pytest.mark.parametrize(("rule", "lr"), [("sgd", 0.1), ("adam", 0.02), ("lars", 1.0)])
def test_gamma_may_be_a_schedule(rule: str, lr: float) -> None:
    seen: list[int] = []

    def gamma(step: int) -> float:
        seen.append(step)
        return 0.5 / (1 + step)

    Pair(rule, lr=lr, gamma=gamma).step(*STEPS)
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


@pytest.mark.parametrize("k", [6, 7, 11, 64])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_any_number_of_parts(rule: str, k: int) -> None:
    pair = Pair(rule, lr=0.05, k=k)
    pair.step(*gradients(3, k))
    assert pair.optimizer.last_num_parts == k


def test_number_of_parts_may_change_from_step_to_step() -> None:
    pair = Pair("adamw", lr=0.05)
    for k in (8, 6, 16):
        pair.step(*gradients(1, k, seed=k))
        assert pair.optimizer.last_num_parts == k


@pytest.mark.parametrize("weight", [1.0, 1 / 8, 100.0])
def test_loss_divisor_does_not_change_the_factors(weight: float) -> None:
    pair = Pair("sgd")
    accumulate(pair.params, STEPS[0], weight)
    grads = [p.grad.clone() for p in pair.params]
    pair.optimizer.step()
    pair.truth.step(weighted(STEPS[0], weight))
    pair.compare()
    for p, g, factor in zip(pair.params, grads, pair.truth.factors, strict=True):
        np.testing.assert_allclose((p.grad / g).numpy(), factor, rtol=1e-10)


def test_learning_rate_may_be_a_tensor() -> None:
    pair = Pair("adamw", lr=torch.tensor(0.02, dtype=torch.float64))
    for options in pair.truth.options:
        options["lr"] = 0.02
    pair.step(*STEPS)


def test_changed_group_settings_take_effect() -> None:
    pair = Pair("sgd")
    for parts, gamma in zip(STEPS[:4], (0.1, 0.5, 0.0, 1.0), strict=True):
        for options in (*pair.truth.options, pair.optimizer.param_groups[0]):
            options["gamma"] = gamma
        pair.step(parts)
