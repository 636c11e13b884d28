"""Every optimizer over fifteen steps against the literal transcription of its rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from feeding import (
    Pair,
    accumulate,
    build,
    compare,
    factors_of_one_step,
    gradients,
    parameters,
    starting_weights,
    train,
    weighted,
)
from torch import nn
from transcription import Transcription

import gradvitals as gv

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


GROUPS: dict[str, list[dict[str, Any]]] = {
    "sgd": [
        {"lr": 0.1, "gamma": 0.3, "beta3": 0.5},
        {"lr": 0.3, "gamma": 0.0, "momentum": 0.9},
        {"lr": 0.2},
        {"lr": 0.01, "gamma": 1.0},
    ],
    "adamw": [
        {"lr": 0.02, "gamma": 0.3, "beta3": 0.5},
        {"lr": 0.05, "beta3": 0.0, "weight_decay": 0.0},
        {"lr": 0.01, "betas": (0.5, 0.9)},
        {"lr": 0.01, "gamma": 0.05, "beta3": 0.99},
    ],
    "lamb": [{"lr": 0.01, "gamma": g, "beta3": b} for g, b in ((0.2, 0.5), (0.4, 0.0), (0.1, 0.9), (0.0, 0.9))],
    "lars": [{"lr": 1.0, "gamma": g, "momentum": m} for g, m in ((0.2, 0.5), (0.4, 0.0), (0.1, 0.9), (0.0, 0.9))],
}


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize(("rule", "each"), GROUPS.items(), ids=list(GROUPS))
def test_groups_with_their_own_settings(rule: str, each: list[dict[str, Any]], wrap: bool) -> None:
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


WRONG: list[dict[str, Any]] = [
    *({"beta3": beta3} for beta3 in (1.0, -0.1)),
    *({"k": k} for k in (1, 0)),
    *({"moments_dtype": dtype} for dtype in (torch.int32, torch.float16, "bf16")),
    {"scale": "magic"},
    {"granularity": "galaxy"},
    {"granularity": "hierarchical"},  # wiener's
    {"granularity": "layer", "scale": "wiener"},  # the paper's
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("wrap", [False, True])
def test_invalid_options_raise(wrong: dict[str, Any], wrap: bool) -> None:
    named = [(f"layer{i}.weight", p) for i, p in enumerate(parameters(starting_weights()))]
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
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


NAMES = ("blocks.0.attn.weight", "blocks.0.attn.bias", "blocks.1.scale", "head.weight")


@pytest.mark.parametrize(
    ("rule", "foreach", "wrap"),
    [("sgd", True, False), ("sgd", False, False), ("sgd", True, True), ("adamw", True, False), ("lars", True, False)],
)
@pytest.mark.parametrize(
    ("scale", "granularity"),
    [("paper", g) for g in (None, "tensor", "layer", "row")]
    + [("wiener", g) for g in (None, "element", "row", "tensor", "hierarchical")],
)
def test_matches_the_transcription(rule: str, scale: str, granularity: str | None, foreach: bool, wrap: bool) -> None:
    Pair(rule, wrap=wrap, names=NAMES, foreach=foreach, scale=scale, granularity=granularity).step(*STEPS[:6])


def test_rows_match_a_hand_computed_step() -> None:
    means, variances = torch.tensor([[2.0, 1.0], [30.0, 10.0]]).double(), torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0]).double()
    parts = [[(means + sign * variances.sqrt()).numpy()] for sign in signs]
    # Rows: r = 4, 1 and 900, 100, with means 2.5 and 500. The whole tensor: mean 251.25.
    np.testing.assert_allclose(factors_of_one_step(parts, granularity="row")[0], [[1, 0.4], [1, 0.2]])
    whole = np.array([[4, 1], [900, 100]]) / 251.25
    np.testing.assert_allclose(factors_of_one_step(parts, gamma=0.0)[0], np.minimum(whole, 1))


def test_wiener_matches_a_hand_computed_step() -> None:
    mean = torch.tensor([2.0, 1.0]).double()
    noise = torch.tensor([5.0, 5.0]).double().sqrt()  # unbiased variance 6, noise of the mean of six parts: 1
    parts = [[(mean + sign * noise).numpy()] for sign in (1, -1, 1, -1, 1, -1)]
    expected = {
        "element": [0.75, 0.1],
        "tensor": [1 - 2 / 5] * 2,
        "hierarchical": [1.5 / 2.5] * 2,  # tau^2 = ((4 - 1) + (1 - 1)) / 2
    }
    for granularity, factor in expected.items():
        got = factors_of_one_step(parts, scale="wiener", granularity=granularity)[0]
        np.testing.assert_allclose(got, factor, rtol=1e-12, err_msg=granularity)


def test_layer_granularity_needs_names() -> None:
    params = parameters(starting_weights())

    def go() -> None:
        optimizer = build("sgd", params, granularity="layer")
        accumulate(params, STEPS[0])
        optimizer.step()

    with pytest.raises((ValueError, RuntimeError), match="named_parameters"):
        go()


def test_layers_of_a_real_model() -> None:
    """The weight and bias of one module share their mean of r across groups."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    names = [name for name, _ in model.named_parameters()]
    decay = [(n, p) for n, p in model.named_parameters() if p.ndim > 1]
    rest = [(n, p) for n, p in model.named_parameters() if p.ndim <= 1]
    optimizer = gv.optim.VRSGD([{"params": decay}, {"params": rest}], lr=1.0, granularity="layer")
    params = list(model.parameters())
    parts = gradients(1, shapes=[tuple(p.shape) for p in params])[0]
    truth = Transcription(
        "sgd",
        [p.detach().numpy() for p in params],
        [{"lr": 1.0, "granularity": "layer"} for _ in params],
        names=names,
    )
    truth.step(weighted(parts))
    train(optimizer, params, [parts])
    compare(params, truth)


def test_layer_of_large_tensors() -> None:
    """One mean of r, however much memory the tensors of a layer take."""
    torch.manual_seed(0)
    sizes, k = (1_500_000, 1_000, 1_500_000), 6
    params = [nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in sizes]
    named = [(f"layer.{name}", p) for name, p in zip("abc", params, strict=True)]
    optimizer = gv.optim.VRSGD(named, lr=1.0, granularity="layer")
    signal = (0.0, 10.0, 2.0)  # so that the tensors by themselves would have very different means
    parts = [
        [torch.randn(size, dtype=torch.float64) + s for size, s in zip(sizes, signal, strict=True)] for _ in range(k)
    ]
    for part in parts:
        (sum((p * c).sum() for p, c in zip(params, part, strict=True)) / k).backward()
    optimizer.step()
    stacks = [torch.stack(column) for column in zip(*parts, strict=True)]
    ratios = [stack.mean(0).square() / stack.var(0, correction=0) for stack in stacks]
    mean = torch.cat(ratios).mean()
    for p, stack, ratio in zip(params, stacks, ratios, strict=True):
        torch.testing.assert_close(-p.detach(), stack.mean(0) * (ratio / mean).clamp(0.1, 1), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("setting", [{"granularity": "row"}, {"scale": "wiener"}])
def test_groups_with_their_own_rule(setting: dict[str, Any]) -> None:
    params = parameters(starting_weights())
    options = [{"lr": 0.1} | setting] * 2 + [{"lr": 0.1}] * 2
    optimizer = gv.optim.VRSGD([{"params": params[:2], **setting}, {"params": params[2:]}], lr=0.1)
    train(optimizer, params, STEPS[:3])
    for half in (slice(0, 2), slice(2, 4)):
        truth = Transcription("sgd", starting_weights()[half], options[half])
        for parts in STEPS[:3]:
            truth.step(weighted([part[half] for part in parts]))
        compare(params[half], truth)


@pytest.mark.parametrize("scale", ["paper", "wiener"])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_dead_elements(scale: str, granularity: str) -> None:
    """An embedding row that no micro-batch uses has factor 1 and does not affect the others."""
    parts = gradients(1)[0]
    for part in parts:
        part[0][1] = 0.0  # a row
        part[0][2, 3] = 0.0
        part[1][4] = 0.0
    Pair("sgd", lr=1.0, scale=scale, granularity=granularity).step(parts)
