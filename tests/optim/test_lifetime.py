"""Hooks on parameters: they live as long as the optimizer, and copies do not have them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from feeding import (
    SHAPES,
    Pair,
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

STEPS = gradients(8)
KINDS: dict[str, dict[str, Any]] = {
    "sgd": {"rule": "sgd", "lr": 0.1, "momentum": 0.9},
    "adamw": {"rule": "adamw", "lr": 0.02},
    "lars": {"rule": "lars", "lr": 1.0},
    "wrapper": {"rule": "adam", "lr": 0.02, "wrap": True, "beta3": 0.5},
}
EVERY = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def live_hooks(parameter: torch.Tensor) -> int:
    found = [getattr(parameter, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]
    return sum(len(hooks) for hooks in found if hooks)


@EVERY
def test_deleted_optimizer_leaves_no_hooks(kind: dict[str, Any]) -> None:
    params = parameters(starting_weights())
    assert [live_hooks(p) for p in params] == [0] * 4
    optimizer = build(params=params, **kind)
    train(optimizer, params, STEPS[:2])
    assert sum(live_hooks(p) for p in params) >= len(params)  # the test looks in the right place
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert [live_hooks(p) for p in params] == [0] * 4
    accumulate(params, STEPS[0])


@EVERY
def test_parameters_do_not_keep_each_other_alive(kind: dict[str, Any]) -> None:
    params = parameters(starting_weights())
    optimizer = build(params=params, **kind)
    train(optimizer, params, STEPS[:2])
    gone = [weakref.ref(p) for p in params]
    del optimizer, params
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4


@EVERY
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_independent(kind: dict[str, Any], how: str) -> None:
    params = nn.ParameterList(parameters(starting_weights(), torch.float32))
    optimizer = build(params=list(params), **kind)
    train(optimizer, params, STEPS[:3])
    if how == "deepcopy":
        others, other = copy.deepcopy((params, optimizer))
    elif how == "pickle":
        others, other = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        file = io.BytesIO()
        torch.save((params, optimizer), file)
        file.seek(0)
        others, other = torch.load(file, weights_only=False)
    assert other.param_groups[0]["params"][0] is others[0]
    before = [p.detach().clone() for p in params]
    train(other, others, STEPS[3:])
    assert same(params, before)  # the first is untouched
    train(optimizer, params, STEPS[3:])
    assert same(params, others)
    assert not same(params, before)


def test_copy_during_accumulation_starts_empty() -> None:
    params = nn.ParameterList(parameters(starting_weights()))
    optimizer = build("sgd", list(params), lr=0.1)
    accumulate(params, STEPS[0][:3])
    others, other = copy.deepcopy((params, optimizer))
    other.zero_grad()
    train(other, others, STEPS[:1])
    truth = Transcription("sgd", starting_weights(), [{"lr": 0.1} for _ in SHAPES])
    truth.step(weighted(STEPS[0]))
    compare(others, truth)


def test_copied_model_has_no_hooks() -> None:
    """torch warns when a tensor with hooks is pickled; an EMA copy must not feed the optimizer either."""
    params = nn.ParameterList(parameters(starting_weights()))
    optimizer = build("sgd", list(params), lr=0.1)
    train(optimizer, params, STEPS[:1])
    for other in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert [live_hooks(p) for p in other] == [0] * 4
        accumulate(other, STEPS[1])
    truth = Transcription("sgd", [p.detach().numpy() for p in params], [{"lr": 0.1} for _ in SHAPES])
    truth.step(weighted(STEPS[1]))
    train(optimizer, params, STEPS[1:2])
    compare(params, truth)


@EVERY
def test_saving_a_model_raises_no_warning(kind: dict[str, Any]) -> None:
    """torch would warn about hooks that cannot be saved, for a tensor that is no Parameter."""
    model = nn.ParameterList(parameters(starting_weights()))
    plain = [torch.tensor(w, requires_grad=True) for w in starting_weights()]
    for params, what in ((list(model), model), (plain, plain), (plain, {"state": plain})):
        optimizer = build(params=params, **kind)
        train(optimizer, params, STEPS[:1])
        assert live_hooks(params[0])
        file = io.BytesIO()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.save(what, file)
            copy.deepcopy(what)
            pickle.dumps(what)
        assert [str(warning.message) for warning in caught] == []
        train(optimizer, params, STEPS[1:2])  # hooks are still there
        assert optimizer.last_num_parts == 8


@EVERY
def test_parameters_added_later(kind: dict[str, Any]) -> None:
    params = parameters(starting_weights())
    options = {k: v for k, v in kind.items() if k not in ("rule", "wrap")}
    optimizer = build(params=params[:2], **kind)
    train(optimizer, params[:2], [[part[:2] for part in parts] for parts in STEPS[:3]])
    optimizer.add_param_group({"params": params[2:], "gamma": 0.4, "lr": 0.05})
    assert optimizer.param_groups[1]["gamma"] == 0.4
    train(optimizer, params, STEPS[3:])
    first = Transcription(kind["rule"], starting_weights()[:2], [options] * 2)
    later = Transcription(kind["rule"], starting_weights()[2:], [options | {"gamma": 0.4, "lr": 0.05}] * 2)
    for number, parts in enumerate(STEPS):
        first.step(weighted([part[:2] for part in parts]))
        if number >= 3:
            later.step(weighted([part[2:] for part in parts]))
    compare(params[:2], first)
    compare(params[2:], later)


def test_optimizers_with_different_step_intervals() -> None:
    """The second steps half as often, with twice the micro-batches."""
    params = parameters(starting_weights())
    one, two = gv.optim.VRSGD(params[:2], lr=0.1), gv.optim.VRSGD(params[2:], lr=0.1)
    truths = [Transcription("sgd", starting_weights()[half], [{"lr": 0.1}] * 2) for half in (slice(2), slice(2, 4))]
    for number, parts in enumerate(STEPS):
        accumulate(params, parts)
        one.step()
        one.zero_grad()
        truths[0].step(weighted([part[:2] for part in parts]))
        if number % 2:
            two.step()
            two.zero_grad()
            truths[1].step([[c / 8 for c in part[2:]] for part in STEPS[number - 1] + parts])
            assert two.last_num_parts == 16
    compare(params[:2], truths[0])
    compare(params[2:], truths[1])


@pytest.mark.parametrize("scale", ["paper", "wiener"])
def test_autograd_grad_between_parts_counts_no_part(scale: str) -> None:
    """torch.autograd.grad of another loss between backward passes, of all parameters or of one not reached next."""
    pair = Pair("sgd", scale=scale)
    params = pair.params
    for parts in STEPS[:3]:
        seen = [[None if number in (0, 3, 4) else part[0], *part[1:]] for number, part in enumerate(parts)]
        for number, part in enumerate(seen):
            torch.autograd.grad(sum(p.square().sum() for p in params), params)
            accumulate(params, [part], weight=1 / 8)
            torch.autograd.grad(params[0].square().sum() * 100, params[0])
            if number == 5:
                (first,) = torch.autograd.grad(params[1].pow(3).sum(), params[1], create_graph=True)
                torch.autograd.grad(first.sum(), params[1])
        pair.finish(seen)
        assert pair.optimizer.last_num_parts == 8


def test_gradient_penalty() -> None:
    """A penalty computed by torch.autograd.grad inside the loss is in the same backward: one part."""
    params = parameters(starting_weights()[:2])
    optimizer = build("sgd", params, lr=0.1)
    truth = Transcription("sgd", starting_weights()[:2], [{"lr": 0.1}] * 2)
    expected: list[list[Any]] = []
    for part in STEPS[0]:
        loss = sum((p.pow(3) * torch.tensor(c)).sum() for p, c in zip(params, part[:2], strict=True)) / 8
        slopes = torch.autograd.grad(loss, params, create_graph=True)
        whole = loss + sum(slope.square().sum() for slope in slopes)
        expected.append([g.numpy() for g in torch.autograd.grad(whole, params, retain_graph=True)])
        whole.backward()
    optimizer.step()
    assert optimizer.last_num_parts == 8
    truth.step(expected)
    compare(params, truth)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def run(checkpointed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))).double()
        optimizer = gv.optim.VRAdamW(model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for _ in range(6):
                x = torch.randn(5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
                h = x
                for block in model:
                    h = checkpoint(block, h, use_reentrant=use_reentrant) if checkpointed else block(h)
                (h.square().mean() / 6).backward()
            optimizer.step()
            assert optimizer.last_num_parts == 6
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    for one, other in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
