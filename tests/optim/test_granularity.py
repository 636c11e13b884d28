"""Granularities of the mean of r, and Wiener factors, against the transcription."""

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

STEPS = gradients(6)
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
    Pair(rule, wrap=wrap, names=NAMES, foreach=foreach, scale=scale, granularity=granularity).step(*STEPS)


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
