"""Missing gradients, frozen, unfrozen and shared parameters, and NaN."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from feeding import (
    BASES,
    SHAPES,
    Parts,
    accumulate,
    build,
    compare,
    gradients,
    parameters,
    same,
    starting_weights,
    train,
    weighted,
)
from torch import nn
from transcription import Transcription

import gradvitals as gv

STEPS = gradients(6)
LR = {"sgd": 0.1, "adam": 0.02, "adamw": 0.02, "lamb": 0.02, "lars": 1.0}
ALL_RULES = pytest.mark.parametrize("rule", list(LR))


def truth_of(rule: str, **options: Any) -> Transcription:
    return Transcription(rule, starting_weights(), [{"lr": LR[rule]} | options for _ in SHAPES])


# -- missing gradients --------------------------------------------------------------------------------------------


def without(parts: Parts, tensor: int, micro_batches: list[int]) -> Parts:
    return [
        [None if i == tensor and number in micro_batches else c for i, c in enumerate(part)]
        for number, part in enumerate(parts)
    ]


MISSING = {"the first": [0], "the last": [7], "some": [1, 2, 5], "all but one": [0, 1, 2, 3, 5, 6, 7]}


@pytest.mark.parametrize("scale", ["paper", "wiener"])
@pytest.mark.parametrize("rule", ["sgd", "adamw"])
@pytest.mark.parametrize("missing", MISSING.values(), ids=MISSING)
def test_missing_gradient_counts_as_zero(missing: list[int], rule: str, scale: str) -> None:
    steps = [without(parts, 0, missing) for parts in STEPS]
    params, truth = parameters(starting_weights()), truth_of(rule, scale=scale)
    optimizer = build(rule, params, lr=LR[rule], scale=scale)
    for parts in steps:
        truth.step(weighted(parts))
        train(optimizer, params, [parts])
        compare(params, truth)
    zeros = [[[np.zeros(SHAPES[0]) if c is None else c for c in part] for part in parts] for parts in steps]
    others = parameters(starting_weights())
    train(build(rule, others, lr=LR[rule], scale=scale), others, zeros)
    for one, other in zip(params, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@ALL_RULES
@pytest.mark.parametrize("wrap", [False, True])
def test_parameter_without_gradient_stays_unchanged(rule: str, wrap: bool) -> None:
    params, truth = parameters(starting_weights()), truth_of(rule, **({"beta3": 0.5} if wrap else {}))
    optimizer = build(rule, params, wrap=wrap, lr=LR[rule], **({"beta3": 0.5} if wrap else {}))
    train(optimizer, params, STEPS[:2])
    state = {
        key: value.clone() if torch.is_tensor(value) else value for key, value in optimizer.state[params[1]].items()
    }
    before = params[1].detach().clone()
    train(optimizer, params, [without(STEPS[2], 1, list(range(8)))])
    assert torch.equal(params[1], before)
    after = optimizer.state[params[1]]
    assert state.keys() == after.keys()
    for key, value in state.items():
        assert torch.equal(value, after[key]) if torch.is_tensor(value) else value == after[key], key
    train(optimizer, params, STEPS[3:])
    for number, parts in enumerate(STEPS):
        truth.step(weighted(without(parts, 1, list(range(8))) if number == 2 else parts))
    compare(params, truth)


@pytest.mark.parametrize("rule", ["sgd", "lamb"])
def test_frozen_parameter(rule: str) -> None:
    params, truth = parameters(starting_weights()), truth_of(rule)
    params[2].requires_grad_(False)
    optimizer = build(rule, params, lr=LR[rule])
    steps = [without(parts, 2, list(range(8))) for parts in STEPS]
    for parts in steps:
        truth.step(weighted(parts))
    train(optimizer, params, steps)
    compare(params, truth)


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_parameter_unfrozen_later(rule: str) -> None:
    params, truth = parameters(starting_weights()), truth_of(rule)
    params[0].requires_grad_(False)
    optimizer = build(rule, params, lr=LR[rule])
    for number, parts in enumerate(STEPS):
        if number == 2:
            params[0].requires_grad_(True)
        if number == 4:
            params[0].requires_grad_(False)
        seen = parts if number in (2, 3) else without(parts, 0, list(range(8)))
        truth.step(weighted(seen))
        train(optimizer, params, [seen])
        compare(params, truth, what=f"weights after step {number}")


def test_shared_parameter_counts_once() -> None:
    """Used twice in one forward pass, its gradient of one micro-batch is the sum."""
    p = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    parts = gradients(1, 8, [(5,)])[0]
    optimizer = gv.optim.VRSGD([p], lr=1.0)
    for (c,) in parts:
        c = torch.tensor(c)
        (((p * c * 0.25).sum() + (p * c * 0.75).sum()) / 8).backward()
    optimizer.step()
    assert optimizer.last_num_parts == 8
    truth = Transcription("sgd", [np.zeros(5)], [{"lr": 1.0}])
    truth.step(weighted(parts))
    compare([p], truth)


# -- nan ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("micro_batch", [0, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"granularity": "row"},
        {"scale": "wiener"},
        {"scale": "wiener", "granularity": "tensor"},
        {"scale": "wiener", "granularity": "element"},
        {"scale": "wiener", "granularity": "row"},
    ],
    ids=str,
)
@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_nan_does_not_spread(rule: str, options: dict[str, str], micro_batch: int, bad: float) -> None:
    parts = gradients(1)[0]
    parts[micro_batch][0][1, 2] = bad
    params, truth = parameters(starting_weights()), truth_of(rule, **options)
    optimizer = build(rule, params, lr=LR[rule], **options)
    accumulate(params, parts)
    optimizer.step()
    truth.step(weighted(parts))
    expected = truth.weights[0]
    got = params[0].detach().numpy().copy()
    assert not np.isfinite(got[1, 2])
    got[1, 2] = expected[1, 2] = 0.0
    np.testing.assert_allclose(got, expected, rtol=1e-10)
    compare(params[1:], Frozen(truth.weights[1:]))
    if rule == "adamw":
        assert optimizer.state[params[0]]["factor_avg"][1, 2] == 1
        assert torch.isfinite(optimizer.state[params[0]]["factor_avg"]).all()


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("kind", ["base", "class", "wrapper"])
@pytest.mark.parametrize(("rule", "decay"), [("lars", 0.0), ("lars", 0.1), ("lamb", 0.0), ("lamb", 0.1)])
def test_nan_norm_is_not_taken_for_zero(rule: str, decay: float, kind: str, foreach: bool) -> None:
    """The ratio of LARS and LAMB is then unknown. A ratio of 1 would make the step a thousand times too long."""
    results = []
    for bad in (False, True):
        parts = gradients(1)[0]
        if bad:
            parts[4][0][1, 2] = math.nan
        params = parameters(starting_weights())
        options = {"lr": LR[rule], "weight_decay": decay, "foreach": foreach}
        optimizer = (BASES[rule] if kind == "base" else partial(build, rule, wrap=kind == "wrapper"))(params, **options)
        train(optimizer, params, [parts])
        results.append(params)
    clean, spoilt = results
    assert spoilt[0].isnan().all()
    assert same(clean[1:], spoilt[1:])
    assert not same(clean[1:], parameters(starting_weights())[1:])


class Frozen:
    """Weights to compare with."""

    def __init__(self, weights: list[np.ndarray]) -> None:
        self.weights = weights


def test_nan_is_gone_after_the_step() -> None:
    """A NaN in the accumulators must not outlive the step, even if the user skipped it."""
    params, truth = parameters(starting_weights()), truth_of("sgd")
    optimizer = build("sgd", params, lr=0.1)
    spoilt = gradients(1)[0]
    spoilt[2][0][1, 2] = math.nan
    accumulate(params, spoilt)
    optimizer.zero_grad()  # the step is skipped
    train(optimizer, params, STEPS[:2])
    for parts in STEPS[:2]:
        truth.step(weighted(parts))
    compare(params, truth)
    accumulate(params, spoilt)
    for p in params:
        p.grad.nan_to_num_(nan=0.0)
    optimizer.step()
    optimizer.zero_grad()
    assert all(torch.isfinite(p).all() for p in params)
    truth.weights = [p.detach().numpy().copy() for p in params]
    truth.step(weighted(STEPS[3]))
    train(optimizer, params, STEPS[3:4])
    compare(params, truth)
