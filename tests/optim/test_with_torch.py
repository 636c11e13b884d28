"""Together with what torch has: schedulers, loss scaling, clipping, torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from feeding import (
    SHAPES,
    Pair,
    accumulate,
    build,
    gradients,
    parameters,
    same,
    starting_weights,
    weighted,
)
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from transcription import cells_of, paper_factors, wiener_factors

import gradvitals as gv

STEPS = gradients(7)


# -- learning-rate schedulers -------------------------------------------------------------------------------------


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 7),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=9),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize(("rule", "wrap"), [("sgd", False), ("adamw", False), ("lars", False), ("sgd", True)], ids=str)
def test_schedulers(rule: str, wrap: bool, scheduler: Callable[[torch.optim.Optimizer], Any]) -> None:
    pair = Pair(rule, wrap=wrap, lr=0.1, **({"momentum": 0.9} if rule == "sgd" else {}))
    schedule = scheduler(pair.optimizer)
    rates = []
    for parts in STEPS:
        group = pair.optimizer.param_groups[0]
        rates.append(group["lr"])
        for o in pair.truth.options:
            o |= {name: group[name] for name in ("lr", "momentum", "betas") if name in o and name in group}
        pair.step(parts)
        schedule.step()
    assert len({round(rate, 9) for rate in rates}) > 5


# -- GradScaler ---------------------------------------------------------------------------------------------------


def scaled_loop(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: Any, *, unscale: bool, clip: float | None
) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for parts in steps:
        for part in parts:
            loss = sum((p * torch.tensor(c, dtype=p.dtype)).sum() for p, c in zip(params, part, strict=True))
            scaler.scale(loss / len(parts)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        if clip is not None:
            clip_grad_norm_(params, clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler


@pytest.mark.parametrize("scale", ["paper", "wiener"])
@pytest.mark.parametrize("how", ["plain", "unscale", "unscale and clip"])
@pytest.mark.parametrize("wrap", [False, True])
def test_loss_scaling_changes_nothing(how: str, scale: str, wrap: bool) -> None:
    clip = 0.5 if "clip" in how else None
    pair = Pair("sgd", scale=scale, wrap=wrap)
    for parts in STEPS:
        rate = 0.1
        if clip:
            total = np.sqrt(sum((sum(part[i] for part in parts) / 8).__pow__(2).sum() for i in range(len(SHAPES))))
            rate *= min(1.0, clip / (total + 1e-6))  # clipping after factors that it leaves alone is a smaller rate
        for o in pair.truth.options:
            o["lr"] = rate
        scaled_loop(pair.optimizer, pair.params, [parts], unscale="unscale" in how, clip=clip)
        pair.truth.step(weighted(parts))
        pair.compare(rtol=1e-8, atol=1e-9)


def test_overflow_skips_the_step() -> None:
    pair = Pair("adamw")
    pair.step(*STEPS[:2])
    before, spoilt = [p.detach().clone() for p in pair.params], gradients(1)[0]
    spoilt[3][0][0, 0] = np.inf
    scaled_loop(pair.optimizer, pair.params, [spoilt], unscale=False, clip=None)
    assert same(pair.params, before)
    pair.step(*STEPS[2:])


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_overflow_skips_the_fused_step(rule: str, wrap: bool, when: int) -> None:
    """A fused optimizer is called even then, with found_inf set: its factors must not change either."""
    spoilt = gradients(1)[0]
    spoilt[3][0][0, 0] = np.inf
    results = []
    for steps in (STEPS, [*STEPS[:when], spoilt, *STEPS[when:]]):
        params = parameters(starting_weights(), torch.float32)
        optimizer = build(rule, params, wrap=wrap, fused=True, lr=0.02, beta3=0.9, gamma=0.1)
        scaled_loop(optimizer, params, steps, unscale=False, clip=None)
        results.append(params)
    assert all(torch.isfinite(p).all() for p in results[1])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# -- clipping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"scale": "wiener"}, {"scale": "wiener", "granularity": "tensor"}], ids=str)
@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_clipping_does_not_change_the_factors(rule: str, options: dict[str, str]) -> None:
    """Nor does setting another rule in the group, from the next step on."""
    pair = Pair(rule, **options)
    for number, parts in enumerate(STEPS):
        if number in (2, 5) and not options:
            for settings in (pair.optimizer.param_groups[0], pair.truth.options[0]):
                settings["scale"] = "wiener" if number == 2 else "paper"
        accumulate(pair.params, parts)
        unclipped = [p.grad.clone() for p in pair.params]
        clip_grad_norm_(pair.params, 0.01)
        clipped = [p.grad.clone() for p in pair.params]
        assert (clipped[0].abs() < 0.1 * unclipped[0].abs()).all()
        pair.optimizer.step()
        pair.truth.step(weighted(parts))
        for p, g, factor in zip(pair.params, clipped, pair.truth.factors, strict=True):
            np.testing.assert_allclose((p.grad / g).numpy(), factor, rtol=1e-8, err_msg=f"factors of step {number}")
        pair.optimizer.zero_grad()


CONSTANT = np.arange(60) % 3 == 0


def partly_constant_parts() -> list[np.ndarray]:
    """Eight parts of which every third element is the same in all; not all sums of those are exact in float32."""
    rng = np.random.default_rng(3)
    fixed, signal = rng.standard_normal(60), 0.4 * rng.standard_normal(60)
    return [np.where(CONSTANT, fixed, signal + rng.standard_normal(60)).astype(np.float32) for _ in range(8)]


@pytest.mark.parametrize("scale", ["paper", "wiener"])
@pytest.mark.parametrize("how", ["plain", "clipped", "scaled", "scaled and clipped"])
@pytest.mark.parametrize("granularity", [None, "row"])
def test_constant_elements_stay_constant(how: str, scale: str, granularity: str | None) -> None:
    """Rounding of a variance of 0 must not be compared with a gradient that was scaled down."""
    parts = partly_constant_parts()
    rule = wiener_factors if scale == "wiener" else paper_factors
    stack = np.stack(parts).astype(np.float64).reshape(8, 6, 10)
    level = granularity or ("hierarchical" if scale == "wiener" else "tensor")
    expected = rule([stack], [0.1], level if scale == "wiener" else cells_of([(6, 10)], level))[0].ravel()
    assert (expected[CONSTANT] == 1).all()
    assert (expected[~CONSTANT] < 0.9).mean() > 0.2

    p = nn.Parameter(torch.zeros(6, 10))
    optimizer = gv.optim.VRSGD([p], lr=1.0, scale=scale, granularity=granularity)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, enabled="scaled" in how)
    for part in parts:
        scaler.scale((p * torch.tensor(part).view(6, 10)).sum() / 8).backward()
    scaler.unscale_(optimizer)
    if "clipped" in how:
        clip_grad_norm_([p], 1e-3)
    grad = p.grad.clone()
    optimizer.step()
    factors = (p.grad / grad).double().numpy().ravel()
    np.testing.assert_array_equal(factors[CONSTANT], 1.0)
    np.testing.assert_allclose(factors, expected, rtol=1e-4)


@pytest.mark.parametrize("scale", ["paper", "wiener"])
def test_gradient_multiplied_by_the_user(scale: str) -> None:
    pair = Pair("sgd", scale=scale)
    for number, parts in enumerate(STEPS):
        accumulate(pair.params, parts, weight=1.0)
        for p in pair.params:
            if number % 2:
                p.grad /= 8
            else:
                p.grad = p.grad / 8
        pair.finish(parts, rtol=1e-9, atol=1e-11)


# -- torch.compile ------------------------------------------------------------------------------------------------


def compiled(rule: str, backend: str, **options: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    results = []
    for compile_it in (False, True):
        torch._dynamo.reset()
        params = parameters(starting_weights()[:2], torch.float32)
        optimizer = build(rule, params, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about itself
            step = torch.compile(optimizer.step, backend=backend) if compile_it else optimizer.step
            for parts in STEPS[:4]:
                accumulate(params, [part[:2] for part in parts])
                step()
                optimizer.zero_grad()
        results.append(params)
    torch._dynamo.reset()
    return results[0], results[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("sgd", {"lr": 0.1, "momentum": 0.9}),
        ("adamw", {"lr": 0.02, "wrap": True, "beta3": 0.5, "scale": "wiener"}),
        ("lamb", {"lr": 0.02}),
        ("lars", {"lr": 1.0, "gamma": lambda step: 1 / (1 + step)}),
    ],
    ids=["momentum", "wrapped adamw, wiener", "lamb", "lars with a schedule"],
)
def test_compiled_step(rule: str, options: dict[str, Any]) -> None:
    eager, fast = compiled(rule, "eager", **options)
    assert not same(eager, parameters(starting_weights()[:2], torch.float32))
    for one, other in zip(eager, fast, strict=True):  # torch itself corrects Adam's bias in float32 when compiled
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


def test_compiled_model() -> None:
    """Hooks on parameters see the gradients of a compiled forward and backward as well."""
    torch._dynamo.reset()
    results = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        optimizer = gv.optim.VRSGD(model.parameters(), lr=0.1)
        forward = torch.compile(model, backend=backend) if backend else model
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for _ in range(6):
                x = torch.randn(7, 5, generator=generator, dtype=torch.float64)
                (forward(x).square().mean() / 6).backward()
            optimizer.step()
            assert optimizer.last_num_parts == 6
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    torch._dynamo.reset()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# -- an ordinary model --------------------------------------------------------------------------------------------


def test_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = gv.optim.VRAdamW(model.parameters(), lr=0.1)
    x = torch.randn(64, 6)
    y = x[:, :3].clone()
    losses = []
    for _ in range(40):
        for inputs, targets in zip(x.chunk(8), y.chunk(8), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(inputs).float() - targets).square().mean() / 8
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
