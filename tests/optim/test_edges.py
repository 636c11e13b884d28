"""Too few parts or not k, unusual shapes, discarded parts, and everything that raises."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from functools import partial
from typing import Any

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
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transcription import Transcription

import gradvitals as gv

STEPS = gradients(6)
ALL_RULES = pytest.mark.parametrize("rule", list(LR))
BOTH = pytest.mark.parametrize("wrap", [False, True])

# -- how many parts -----------------------------------------------------------------------------------------------


@ALL_RULES
@BOTH
def test_one_gradient_raises_and_says_how_to_get_more(rule: str, wrap: bool) -> None:
    pair = Pair(rule, wrap=wrap)
    accumulate(pair.params, STEPS[0][:1], weight=1 / 8)
    with pytest.raises(RuntimeError, match=r"(?s)micro-batch.*use_ranks|use_ranks.*micro-batch"):
        pair.optimizer.step()
    pair.compare(rtol=0, atol=0)
    accumulate(pair.params, STEPS[0][1:], weight=1 / 8)  # the fix
    pair.finish(STEPS[0])


@ALL_RULES
@BOTH
def test_step_without_gradients(rule: str, wrap: bool) -> None:
    """As in torch, nothing happens: weights and state stay unchanged, and no step is counted."""
    pair = Pair(rule, wrap=wrap, beta3=0.5, gamma=lambda step: 0.5 / (1 + step))
    pair.optimizer.step()
    pair.compare(rtol=0, atol=0)
    assert not pair.optimizer.state
    for parts in STEPS[:3]:
        pair.step(parts)
        pair.optimizer.step()
        pair.compare()


@ALL_RULES
@BOTH
def test_last_step_of_an_epoch_with_one_part_is_the_bases(rule: str, wrap: bool) -> None:
    """A single micro-batch has nothing to compare with, so its gradient is not scaled."""
    pair = Pair(rule, wrap=wrap, beta3=0.5)
    rest = [parts[:1] for parts in gradients(2, seed=5)]
    for number, parts in enumerate([STEPS[0], rest[0], STEPS[1], rest[1], STEPS[2]]):
        before = [nn.Parameter(p.detach().clone()) for p in pair.params]
        state = copy.deepcopy(pair.optimizer.state_dict())
        pair.truth.vr = len(parts) > 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pair.step(parts, what=f"weights after step {number}")
        assert len(caught) == (number == 1)  # once
        assert pair.optimizer.last_num_parts == len(parts)
        if len(parts) == 1:
            base = BASES[rule](before, lr=LR[rule])
            base.load_state_dict(state)
            train(base, before, [parts])
            assert same(pair.params, before)
        if number == 1:
            assert issubclass(caught[0].category, UserWarning)
            assert "1 gradient," in str(caught[0].message)
            assert "not scaled" in str(caught[0].message)


@ALL_RULES
@BOTH
def test_gamma_of_one_needs_no_micro_batches(rule: str, wrap: bool) -> None:
    """It equals the base from the first step, without a warning."""
    params, others = (parameters(starting_weights()) for _ in range(2))
    steps = [parts[:1] for parts in STEPS[:3]] + STEPS[3:4] + [STEPS[4][:1]]
    train(build(rule, params, wrap=wrap, lr=LR[rule], gamma=1.0), params, steps)
    train(BASES[rule](others, lr=LR[rule]), others, steps)
    assert same(params, others)


@pytest.mark.parametrize("how", ["plain", "wrapped", "closure", "scheduler"])
@pytest.mark.parametrize("came", [3, 1])
def test_warnings_point_at_the_users_line(came: int, how: str) -> None:
    params = parameters(starting_weights())
    optimizer = build("sgd", params, wrap=how == "wrapped")
    if how == "scheduler":
        LambdaLR(optimizer, lambda step: 1.0)  # wraps step in its own function
    train(optimizer, params, STEPS[:1])
    accumulate(params, STEPS[1][:came])
    with pytest.warns(UserWarning, match=f"a step of {came}") as caught:
        optimizer.step(lambda: 0.0) if how == "closure" else optimizer.step()
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("k", [2, 3, 4, 5])
@BOTH
def test_few_parts_warn_once(k: int, wrap: bool) -> None:
    pair = Pair("sgd", wrap=wrap)
    for number, parts in enumerate(STEPS[:3]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pair.step(parts[:k])
        assert len(caught) == (number == 0)
        if number == 0:
            assert issubclass(caught[0].category, UserWarning)
            assert str(k) in str(caught[0].message)
            assert "6" in str(caught[0].message)


@pytest.mark.parametrize("came", [7, 9, 1])
@BOTH
def test_other_number_of_parts_than_k_raises(came: int, wrap: bool) -> None:
    pair = Pair("sgd", wrap=wrap, k=8)
    accumulate(pair.params, gradients(1, came)[0])
    with pytest.raises(RuntimeError, match=rf"(?s){came}.*8|8.*{came}"):
        pair.optimizer.step()
    pair.compare(rtol=0, atol=0)
    pair.optimizer.zero_grad()
    pair.step(STEPS[0])


@pytest.mark.parametrize("scale", ["paper", "wiener"])
def test_training_continues_after_an_error(scale: str) -> None:
    """What a step added before it raised must not be added twice."""
    pair = Pair("sgd", k=8, scale=scale)
    parts = [[None if i in (1, 4) else part[0], *part[1:]] for i, part in enumerate(STEPS[0])]
    accumulate(pair.params, parts[:7], weight=1 / 8)
    with pytest.raises(RuntimeError, match="7"):
        pair.optimizer.step()
    accumulate(pair.params, parts[7:], weight=1 / 8)
    pair.finish(parts)


@pytest.mark.parametrize("foreach", [True, False])
@ALL_RULES
def test_empty_parameter(rule: str, foreach: bool) -> None:
    shapes = ((3, 2), (0, 4), (5,))
    Pair(rule, shapes=shapes, foreach=foreach).step(*gradients(3, shapes=shapes))


@pytest.mark.parametrize("options", [{}, {"granularity": "row"}, {"scale": "wiener"}, {"beta3": 0.5}], ids=str)
def test_strides_do_not_matter(options: dict[str, Any]) -> None:
    """Weights in channels_last, with gradients in channels_last or not."""
    shape = (4, 3, 2, 2)
    steps = gradients(3, shapes=[shape])
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        weight = torch.tensor(starting_weights([shape])[0]).contiguous(memory_format=memory_format)
        params = [nn.Parameter(weight)]
        optimizer = build("sgd", params, lr=0.1, **options)
        for parts in steps:
            for (c,) in parts:
                given = torch.tensor(c).contiguous(memory_format=memory_format)
                ((params[0] * given).sum() / 8).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert params[0].is_contiguous(memory_format=memory_format)
        results.append(params[0].detach())
    torch.testing.assert_close(*results, rtol=1e-12, atol=0, check_stride=False)


# -- discarding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["optimizer, none", "optimizer, zeros", "model, none", "by hand"])
@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_zero_grad_discards_collected_parts(rule: str, how: str) -> None:
    pair = Pair(rule)
    holder = nn.ParameterList(pair.params)
    for number, parts in enumerate(STEPS):
        accumulate(pair.params, gradients(1, 3 + number, seed=99)[0], weight=7.0)  # discarded
        if how == "model, none":
            holder.zero_grad()
        elif how == "by hand":
            for p in pair.params:
                p.grad = None
        else:
            pair.optimizer.zero_grad(set_to_none=how == "optimizer, none")
        pair.step(parts)
        assert pair.optimizer.last_num_parts == 8


@pytest.mark.parametrize("scale", ["paper", "wiener"])
def test_removed_gradient_discards_its_parts(scale: str) -> None:
    """Eight parts were discarded; the step uses the three that reached other parameters since."""
    pair = Pair("sgd", scale=scale)
    accumulate(pair.params, STEPS[0], weight=7.0)
    for p in pair.params:
        p.grad = None
    with pytest.warns(UserWarning, match="a step of 3 gradients"):
        pair.step([[None, *part[1:]] for part in STEPS[1][:3]])
    assert pair.optimizer.last_num_parts == 3
    pair.step(*STEPS[2:4])


@BOTH
def test_closure_runs_all_parts(wrap: bool) -> None:
    pair = Pair("sgd", wrap=wrap)
    for parts in STEPS:
        calls = []

        def closure(parts: Parts = parts, calls: list[int] = calls) -> torch.Tensor:
            calls.append(1)
            pair.optimizer.zero_grad()
            accumulate(pair.params, parts)
            return torch.tensor(float(len(parts)))

        with torch.no_grad():
            assert pair.optimizer.step(closure) == 8
        assert calls == [1]
        pair.truth.step([[c / 8 for c in part] for part in parts])
        pair.compare()


# -- errors -------------------------------------------------------------------------------------------------------


@BOTH
def test_sparse_gradients_raise(wrap: bool) -> None:
    model = nn.Embedding(10, 3, sparse=True)
    optimizer = build("sgd", model.parameters(), wrap=wrap)

    def go() -> None:
        for _ in range(8):
            model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match="sparse"):
        go()


@pytest.mark.parametrize("rule", ["sgd", "adam", "adamw"])
@BOTH
def test_differentiable_raises(rule: str, wrap: bool) -> None:
    with pytest.raises(ValueError, match="differentiable"):
        build(rule, parameters(starting_weights()), wrap=wrap, differentiable=True)


def test_wrapper_accepts_only_optimizers() -> None:
    with pytest.raises(TypeError, match="Optimizer"):
        gv.optim.VRGD(parameters(starting_weights()))
    inner = build("sgd", parameters(starting_weights()))
    with pytest.raises((TypeError, ValueError)):  # would scale twice
        gv.optim.VRGD(inner)


def test_unknown_options_raise() -> None:
    params = parameters(starting_weights())
    with pytest.raises(TypeError, match="unknown options: gama"):
        gv.optim.VRSGD(params, lr=0.1, gama=0.1)
    with pytest.raises(TypeError, match="unknown options: gama"):
        gv.optim.VRGD(torch.optim.SGD(params), gama=0.1)


def test_arguments_of_the_base_and_options_go_together() -> None:
    optimizer = gv.optim.VRSGD(parameters(starting_weights()), 0.5, 0.9, gamma=0.3, nesterov=True)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"], group["gamma"]) == (0.5, 0.9, True, 0.3)
    assert gv.optim.VRAdamW(parameters(starting_weights()), max_norm=1.0).max_norm == 1.0
    assert {"params", "lr", "momentum", "gamma", "beta3"} <= set(inspect.signature(gv.optim.VRSGD).parameters)


def test_averages_follow_the_models_dtype() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = gv.optim.VRSGD(model.parameters(), lr=0.1, beta3=0.9)
    for dtype in (torch.float32, torch.float64, torch.float64):
        model.to(dtype)
        for _ in range(8):
            model(torch.randn(5, 4, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {optimizer.state[p]["factor_avg"].dtype for p in model.parameters()} == {torch.float64}


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
