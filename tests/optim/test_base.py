"""VRGD equals its base optimizer for gamma = 1, for a constant factor under Adam, and without variance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from feeding import (
    BASES,
    SHAPES,
    accumulate,
    build,
    factors_of_one_step,
    gradients,
    parameters,
    same,
    starting_weights,
    train,
)
from torch import Tensor, nn

import gradvitals as gv

BASE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {"lr": 0.1}),
    "momentum": ("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": ("adam", {"lr": 0.02, "weight_decay": 0.1}),
    "adamw": ("adamw", {"lr": 0.02, "amsgrad": True}),
    "lamb": ("lamb", {"lr": 0.02, "weight_decay": 0.1}),
    "lars": ("lars", {"lr": 3.0, "weight_decay": 0.1}),
}
WAYS: dict[str, dict[str, Any]] = {"foreach": {"foreach": True}, "single": {"foreach": False}, "fused": {"fused": True}}
STEPS = gradients(6)


def base_and_reduced(rule: str, options: dict[str, Any], vr: dict[str, Any], *, wrap: bool, steps: Any) -> bool:
    base, reduced = (parameters(starting_weights(), torch.float32) for _ in range(2))
    train(BASES[rule](base, **options), base, steps)
    train(build(rule, reduced, wrap=wrap, **options, **vr), reduced, steps)
    assert not same(base, parameters(starting_weights(), torch.float32))
    return same(base, reduced)


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("rule", "options"), BASE_CASES.values(), ids=BASE_CASES)
def test_gamma_of_one_equals_the_base_bit_for_bit(rule: str, options: dict[str, Any], way: str, wrap: bool) -> None:
    if way == "fused" and rule in ("lamb", "lars"):
        pytest.skip("has no fused form")
    assert base_and_reduced(rule, options | WAYS[way], {"gamma": 1.0}, wrap=wrap, steps=STEPS)
    assert not base_and_reduced(rule, options | WAYS[way], {"gamma": 0.1}, wrap=wrap, steps=STEPS[:2])


@pytest.mark.parametrize("scale", ["paper", "wiener"])
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize(("rule", "options"), BASE_CASES.values(), ids=BASE_CASES)
def test_identical_micro_batches_equal_the_base(rule: str, options: dict[str, Any], wrap: bool, scale: str) -> None:
    steps = [[parts[0]] * 8 for parts in STEPS]
    assert base_and_reduced(rule, options, {"scale": scale}, wrap=wrap, steps=steps)


@pytest.mark.parametrize("k", [8, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_identical_parts_in_16_bits_are_no_noise(dtype: torch.dtype, k: int) -> None:
    part = gradients(1, 1, [(500,)])[0][0]
    assert (factors_of_one_step([part] * k, dtype=dtype)[0] == 1).all()


def test_wrapper_works_with_other_optimizers() -> None:
    for kind in (torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adamax, torch.optim.RMSprop):
        base, reduced = (parameters(starting_weights(), torch.float32) for _ in range(2))
        train(kind(base, lr=0.01), base, STEPS)
        train(gv.optim.VRGD(kind(reduced, lr=0.01), gamma=1.0), reduced, STEPS)
        assert same(base, reduced), kind


# -- a factor that never changes cancels in Adam (A14) ------------------------------------------------------------


def spread(mean: Tensor, variance: Tensor, num_parts: int, gamma: float) -> Tensor:
    return torch.linspace(0.1, 1.0, mean.numel(), dtype=mean.dtype).reshape(mean.shape)


def half(mean: Tensor, variance: Tensor, num_parts: int, gamma: float) -> Tensor:
    return torch.full_like(mean, 0.5)


@pytest.mark.parametrize("beta3", [0.0, 0.9])
@pytest.mark.parametrize("scale", [half, spread])
@pytest.mark.parametrize("rule", ["adam", "adamw", "lamb"])
def test_constant_factor_equals_adam(rule: str, scale: Any, beta3: float) -> None:
    plain, reduced = (parameters(starting_weights()) for _ in range(2))
    train(BASES[rule](plain, lr=0.02, eps=0.0), plain, STEPS)
    train(build(rule, reduced, lr=0.02, eps=0.0, scale=scale, beta3=beta3), reduced, STEPS)
    for one, other in zip(plain, reduced, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def growing(rule: str, *, same_noise: bool) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Steps whose gradients differ only in size and sign have the same factors; others do not."""
    sizes = [1.0, -3.0, 0.2, 7.0, -0.01, 2.0, 2.0, -5.0]
    one = gradients(len(sizes))
    steps = [
        [[c * size for c in part] for part in one[0 if same_noise else number]] for number, size in enumerate(sizes)
    ]
    plain, reduced = (parameters(starting_weights()) for _ in range(2))
    train(BASES[rule](plain, lr=0.02, eps=0.0), plain, steps)
    train(build(rule, reduced, lr=0.02, eps=0.0), reduced, steps)
    return plain, reduced


@pytest.mark.parametrize("rule", ["adam", "adamw", "lamb"])
def test_only_a_paper_factor_that_changes_differs_from_adam(rule: str) -> None:
    for one, other in zip(*growing(rule, same_noise=True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    plain, reduced = growing(rule, same_noise=False)
    assert (plain[0] - reduced[0]).abs().max() > 1e-3


# -- custom rules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [6, 8])
def test_custom_rule_receives_mean_variance_k_and_gamma(k: int, dtype: torch.dtype) -> None:
    calls: list[tuple[Tensor, Tensor, int, float]] = []

    def scale(mean: Tensor, variance: Tensor, num_parts: int, gamma: float) -> Tensor:
        calls.append((mean.clone(), variance.clone(), num_parts, gamma))
        return torch.full_like(mean, 0.25)

    params = parameters(starting_weights(), dtype)
    groups = [{"params": params[:2]}, {"params": params[2:], "gamma": lambda step: 0.7 - step / 2}]
    optimizer = gv.optim.VRSGD(groups, lr=0.1, scale=scale, gamma=0.3)
    for step, parts in enumerate(gradients(2, k)):
        calls.clear()
        accumulate(params, parts, weight=1.0)
        grads = [p.grad.clone() for p in params]
        optimizer.step()
        for p, g in zip(params, grads, strict=True):
            torch.testing.assert_close(p.grad, g * 0.25)
        optimizer.zero_grad()
        assert len(calls) == len(SHAPES)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
        for number, (mean, variance, num_parts, gamma) in enumerate(calls):
            stack = torch.stack([torch.tensor(part[number], dtype=dtype) for part in parts]).double()
            assert mean.dtype == variance.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            torch.testing.assert_close(mean.double(), stack.mean(0), rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(variance.double(), stack.var(0, correction=0), rtol=tolerance, atol=tolerance)
            assert num_parts == k
            assert gamma == pytest.approx(0.3 if number < 2 else 0.7 - step / 2)


OWN_RULES: dict[str, Any] = {
    "by variance": lambda mean, variance, k, gamma: (mean.square() / variance).clamp(gamma, 1),
    "by mean": lambda mean, variance, k, gamma: (1 - variance / (k * mean.square())).clamp(gamma, 1),
    "not clamped": lambda mean, variance, k, gamma: 1 / (1 + variance / mean.square()),
    "zero": lambda mean, variance, k, gamma: torch.zeros_like(mean),
}


@pytest.mark.parametrize("scale", OWN_RULES.values(), ids=OWN_RULES)
@pytest.mark.parametrize(("rule", "wrap"), [("sgd", False), ("adamw", False), ("sgd", True)], ids=str)
def test_custom_rule_need_not_handle_dead_elements(rule: str, wrap: bool, scale: Any) -> None:
    """0 / 0 occurs in rows of an embedding that no part uses, or that all parts use equally."""
    model = nn.Embedding(9, 3)
    generator = torch.Generator().manual_seed(0)
    optimizer = build(rule, model.parameters(), wrap=wrap, lr=0.1, scale=scale)
    found: list[torch.Tensor] = []
    optimizer.register_factors_hook(lambda parameters, factors, gamma: found.extend(f.clone() for f in factors))
    for _ in range(3):
        dead = model.weight[6:].detach().clone()
        grads = []
        for _ in range(8):
            pull = torch.randn(5, 3, generator=generator)
            loss = (model(torch.arange(5)) * pull).sum() + model(torch.tensor([5])).sum()
            grads.append(torch.autograd.grad(loss / 8, model.weight, retain_graph=True)[0])
            (loss / 8).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(model.weight).all()
        if rule == "sgd":
            assert torch.equal(model.weight[6:], dead)
        (factors,) = found
        found.clear()
        assert (factors[5:] == 1).all()
        stack = torch.stack(grads)[:, :5]
        expected = scale(stack.mean(0), stack.var(0, correction=0), 8, 0.1)
        torch.testing.assert_close(factors[:5], expected, rtol=1e-3, atol=1e-4)


def test_custom_rule_must_return_the_right_shape() -> None:
    params = parameters(starting_weights())
    optimizer = gv.optim.VRSGD(params, scale=lambda mean, variance, num_parts, gamma: mean.flatten()[:1].repeat(3))
    accumulate(params, STEPS[0])
    with pytest.raises((ValueError, RuntimeError), match="shape"):
        optimizer.step()
