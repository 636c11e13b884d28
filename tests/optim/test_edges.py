"""Too few parts or not k, unusual shapes, discarded parts, and everything that raises."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

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
from torch.optim.lr_scheduler import LambdaLR
from transcription import Transcription

import gradvitals as gv

STEPS = gradients(6)
LR = {"sgd": 0.1, "adam": 0.02, "adamw": 0.02, "lamb": 0.02, "lars": 1.0}
ALL_RULES = pytest.mark.parametrize("rule", list(LR))


def truth_of(rule: str, **options: Any) -> Transcription:
    return Transcription(rule, starting_weights(), [{"lr": LR[rule]} | options for _ in SHAPES])


# -- how many parts -----------------------------------------------------------------------------------------------


@ALL_RULES
@pytest.mark.parametrize("wrap", [False, True])
def test_one_gradient_raises_and_says_how_to_get_more(rule: str, wrap: bool) -> None:
    params = parameters(starting_weights())
    optimizer = build(rule, params, wrap=wrap, lr=LR[rule])
    accumulate(params, STEPS[0][:1])
    with pytest.raises(RuntimeError, match=r"(?s)micro-batch.*use_ranks|use_ranks.*micro-batch"):
        optimizer.step()
    compare(params, truth_of(rule), rtol=0, atol=0)


@ALL_RULES
@pytest.mark.parametrize("wrap", [False, True])
def test_step_without_gradients(rule: str, wrap: bool) -> None:
    """As in torch, nothing happens: weights and state stay unchanged, and no step is counted."""
    params, truth = parameters(starting_weights()), truth_of(rule, beta3=0.5, gamma=lambda step: 0.5 / (1 + step))
    vr = {"beta3": 0.5, "gamma": lambda step: 0.5 / (1 + step)}
    optimizer = build(rule, params, wrap=wrap, lr=LR[rule], **vr)
    optimizer.step()
    compare(params, truth, rtol=0, atol=0)
    assert not optimizer.state
    for parts in STEPS[:3]:
        train(optimizer, params, [parts])
        optimizer.step()
        truth.step(weighted(parts))
        compare(params, truth)


@ALL_RULES
@pytest.mark.parametrize("wrap", [False, True])
def test_last_step_of_an_epoch_with_one_part_is_the_bases(rule: str, wrap: bool) -> None:
    """A single micro-batch has nothing to compare with, so its gradient is not scaled."""
    params, truth = parameters(starting_weights()), truth_of(rule, beta3=0.5)
    optimizer = build(rule, params, wrap=wrap, lr=LR[rule], beta3=0.5)
    rest = [parts[:1] for parts in gradients(2, seed=5)]
    for number, parts in enumerate([STEPS[0], rest[0], STEPS[1], rest[1], STEPS[2]]):
        before, state = [nn.Parameter(p.detach().clone()) for p in params], copy.deepcopy(optimizer.state_dict())
        accumulate(params, parts)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        optimizer.zero_grad()
        assert len(caught) == (number == 1)  # once
        assert optimizer.last_num_parts == len(parts)
        truth.vr = len(parts) > 1
        truth.step(weighted(parts))
        compare(params, truth, what=f"weights after step {number}")
        if len(parts) == 1:
            base = BASES[rule](before, lr=LR[rule])
            base.load_state_dict(state)
            train(base, before, [parts])
            assert same(params, before)
        if number == 1:
            assert issubclass(caught[0].category, UserWarning)
            assert "1 gradient," in str(caught[0].message)
            assert "not scaled" in str(caught[0].message)


@ALL_RULES
@pytest.mark.parametrize("wrap", [False, True])
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
@pytest.mark.parametrize("wrap", [False, True])
def test_few_parts_warn_once(k: int, wrap: bool) -> None:
    params = parameters(starting_weights())
    truth = truth_of("sgd")
    optimizer = build("sgd", params, wrap=wrap, lr=0.1)
    for number, parts in enumerate(STEPS[:3]):
        accumulate(params, parts[:k])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        optimizer.zero_grad()
        assert len(caught) == (number == 0)
        if number == 0:
            assert issubclass(caught[0].category, UserWarning)
            assert str(k) in str(caught[0].message)
            assert "6" in str(caught[0].message)
        truth.step(weighted(parts[:k]))
        compare(params, truth)


@pytest.mark.parametrize("came", [7, 9, 1])
@pytest.mark.parametrize("wrap", [False, True])
def test_other_number_of_parts_than_k_raises(came: int, wrap: bool) -> None:
    params = parameters(starting_weights())
    optimizer = build("sgd", params, wrap=wrap, k=8, lr=0.1)
    accumulate(params, gradients(1, came)[0])
    with pytest.raises(RuntimeError, match=rf"(?s){came}.*8|8.*{came}"):
        optimizer.step()
    compare(params, truth_of("sgd"), rtol=0, atol=0)
    optimizer.zero_grad()
    train(optimizer, params, STEPS[:1])
    truth = truth_of("sgd")
    truth.step(weighted(STEPS[0]))
    compare(params, truth)


@pytest.mark.parametrize("scale", ["paper", "wiener"])
def test_training_continues_after_an_error(scale: str) -> None:
    """What a step added before it raised must not be added twice."""
    params, truth = parameters(starting_weights()), truth_of("sgd", scale=scale)
    optimizer = build("sgd", params, lr=0.1, k=8, scale=scale)
    parts = [[None if i in (1, 4) else part[0], *part[1:]] for i, part in enumerate(STEPS[0])]
    accumulate(params, parts[:7], weight=1 / 8)
    with pytest.raises(RuntimeError, match="7"):
        optimizer.step()
    accumulate(params, parts[7:], weight=1 / 8)
    optimizer.step()
    truth.step(weighted(parts))
    compare(params, truth)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("rule", list(LR))
def test_empty_parameter(rule: str, foreach: bool) -> None:
    shapes = ((3, 2), (0, 4), (5,))
    params = parameters(starting_weights(shapes))
    optimizer = build(rule, params, lr=LR[rule], foreach=foreach)
    truth = Transcription(rule, starting_weights(shapes), [{"lr": LR[rule]} for _ in shapes])
    steps = gradients(3, shapes=shapes)
    for parts in steps:
        truth.step(weighted(parts))
    train(optimizer, params, steps)
    compare(params, truth)


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
    params, truth = parameters(starting_weights()), truth_of(rule)
    optimizer = build(rule, params, lr=LR[rule])
    holder = nn.ParameterList(params)
    for number, parts in enumerate(STEPS):
        accumulate(params, gradients(1, 3 + number, seed=99)[0], weight=7.0)  # discarded
        if how == "model, none":
            holder.zero_grad()
        elif how == "by hand":
            for p in params:
                p.grad = None
        else:
            optimizer.zero_grad(set_to_none=how == "optimizer, none")
        accumulate(params, parts)
        optimizer.step()
        assert optimizer.last_num_parts == 8
        optimizer.zero_grad(set_to_none=how != "optimizer, zeros")
        truth.step(weighted(parts))
        compare(params, truth)


@pytest.mark.parametrize("scale", ["paper", "wiener"])
def test_removed_gradient_discards_its_parts(scale: str) -> None:
    """Eight parts were discarded; the step uses the three that reached other parameters since."""
    params, truth = parameters(starting_weights()), truth_of("sgd", scale=scale)
    optimizer = build("sgd", params, lr=0.1, scale=scale)
    accumulate(params, STEPS[0], weight=7.0)
    for p in params:
        p.grad = None
    parts = [[None, *part[1:]] for part in STEPS[1][:3]]
    accumulate(params, parts)
    with pytest.warns(UserWarning, match="a step of 3 gradients"):
        optimizer.step()
    assert optimizer.last_num_parts == 3
    optimizer.zero_grad()
    truth.step(weighted(parts))
    compare(params, truth)
    train(optimizer, params, STEPS[2:4])
    for parts in STEPS[2:4]:
        truth.step(weighted(parts))
    compare(params, truth)


def test_closure_runs_all_parts() -> None:
    params, truth = parameters(starting_weights()), truth_of("sgd")
    optimizer = build("sgd", params, lr=0.1)
    for parts in STEPS:
        calls = []

        def closure(parts: Parts = parts, calls: list[int] = calls) -> torch.Tensor:
            calls.append(1)
            optimizer.zero_grad()
            accumulate(params, parts)
            return torch.tensor(float(len(parts)))

        with torch.no_grad():
            assert optimizer.step(closure) == 8
        assert calls == [1]
        truth.step(weighted(parts))
        compare(params, truth)


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [False, True])
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
@pytest.mark.parametrize("wrap", [False, True])
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
