"""Missing gradients, frozen, unfrozen and shared parameters, and NaN."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from feeding import (
    BASES,
    LR,
    SHAPES,
    Pair,
    Parts,
    accumulate,
    build,
    gradients,
    parameters,
    same,
    starting_weights,
    train,
    weighted,
)
from transcription import Transcription

STEPS = gradients(6)

# -- missing gradients --------------------------------------------------------------------------------------------


def without(parts: Parts, tensor: int, micro_batches: list[int] | range = range(8)) -> Parts:
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
    pair, filled = Pair(rule, scale=scale), Pair(rule, scale=scale)
    pair.step(*steps)
    filled.step(*[[[np.zeros(SHAPES[0]) if c is None else c for c in part] for part in parts] for parts in steps])
    for one, other in zip(pair.params, filled.params, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", list(LR))
@pytest.mark.parametrize("wrap", [False, True])
def test_parameter_without_gradient_stays_unchanged(rule: str, wrap: bool) -> None:
    pair = Pair(rule, wrap=wrap, **({"beta3": 0.5} if wrap else {}))
    pair.step(*STEPS[:2])
    absent = pair.params[1]
    kept = pair.optimizer.state[absent].items()
    state = {key: value.clone() if torch.is_tensor(value) else value for key, value in kept}
    before = absent.detach().clone()
    pair.step(without(STEPS[2], 1))
    assert torch.equal(absent, before)
    after = pair.optimizer.state[absent]
    assert state.keys() == after.keys()
    for key, value in state.items():
        assert torch.equal(value, after[key]) if torch.is_tensor(value) else value == after[key], key
    pair.step(*STEPS[3:])


@pytest.mark.parametrize("rule", ["sgd", "adamw", "lamb"])
def test_parameters_frozen_and_unfrozen(rule: str) -> None:
    pair = Pair(rule, frozen=[0, 2])  # the second until the end
    for number, parts in enumerate(STEPS):
        if number in (2, 4):
            pair.params[0].requires_grad_(number == 2)
        seen = without(parts, 2)
        pair.step(seen if number in (2, 3) else without(seen, 0), what=f"weights after step {number}")


def test_shared_parameter_counts_once() -> None:
    """Used twice in one forward pass, its gradient of one micro-batch is the sum."""
    pair = Pair("sgd", shapes=[(5,)])
    parts = gradients(1, 8, [(5,)])[0]
    for (c,) in parts:
        c = torch.tensor(c)
        (((pair.params[0] * c * 0.25).sum() + (pair.params[0] * c * 0.75).sum()) / 8).backward()
    pair.finish(parts)
    assert pair.optimizer.last_num_parts == 8


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
    params = parameters(starting_weights())
    optimizer = build(rule, params, lr=LR[rule], **options)
    truth = Transcription(rule, starting_weights(), [{"lr": LR[rule]} | options for _ in SHAPES])
    accumulate(params, parts)
    optimizer.step()
    truth.step(weighted(parts))
    found = [p.detach().numpy().copy() for p in params]
    assert not np.isfinite(found[0][1, 2])
    found[0][1, 2] = truth.weights[0][1, 2] = 0.0
    for got, expected in zip(found, truth.weights, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)
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


def test_nan_is_gone_after_the_step() -> None:
    """A NaN in the accumulators must not outlive the step, even if the user skipped it."""
    pair = Pair("sgd")
    spoilt = gradients(1)[0]
    spoilt[2][0][1, 2] = math.nan
    accumulate(pair.params, spoilt)
    pair.optimizer.zero_grad()  # the step is skipped
    pair.step(*STEPS[:2])
    accumulate(pair.params, spoilt)
    for p in pair.params:
        p.grad.nan_to_num_(nan=0.0)
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    assert all(torch.isfinite(p).all() for p in pair.params)
    pair.truth.weights = [p.detach().numpy().copy() for p in pair.params]
    pair.step(STEPS[3])
