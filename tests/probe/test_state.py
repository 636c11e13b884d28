from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import probed
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import gradvitals as gv
from gradvitals.errors import GradvitalsError
from gradvitals.probe.state import HOOKS, untouched


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything there is to a model, in a form that can be compared."""
    return {
        "tensors": {n: (id(t), t.data_ptr(), t.detach().clone()) for n, t in model.state_dict(keep_vars=True).items()},
        "grads": {n: (id(p.grad), None if p.grad is None else p.grad.clone()) for n, p in model.named_parameters()},
        "flags": {n: m.training for n, m in model.named_modules()},
        "requires": {n: p.requires_grad for n, p in model.named_parameters()},
        "hooks": {n: [list(getattr(m, kind).items()) for kind in HOOKS] for n, m in model.named_modules()},
        "random": (random.getstate(), str(np.random.get_state()), torch.get_rng_state()),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for part in ("tensors", "grads"):
        assert before[part].keys() == after[part].keys()
        for name, (*identity, bits) in before[part].items():
            *found, now = after[part][name]
            assert identity == found, name
            assert bits is now is None or torch.equal(bits, now), name
    assert all(before[part] == after[part] for part in ("flags", "requires", "hooks"))
    assert before["random"][:2] == after["random"][:2]
    assert torch.equal(before["random"][2], after["random"][2])


def model_in_use() -> nn.Module:
    model = probed.everything()
    model(torch.randn(4, 6)).sum().backward()
    model[5].weight.grad = None
    model[3].eval()
    model[2].register_forward_hook(lambda *_: None)
    model[5].register_full_backward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("question", gv.probe.QUESTIONS)
def test_every_question_leaves_the_model_as_it_was(question: str) -> None:
    model, loader = model_in_use(), probed.classes()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    kept = copy.deepcopy(optimizer.state_dict())
    before = state_of(model)
    found = probed.ask(model, loader, n_batches=4, optimizer=optimizer, questions=question)
    assert getattr(found, question) is not None, found.notes
    assert_same(before, state_of(model))
    assert optimizer.state_dict() == kept


def test_also_after_an_error_in_the_loss() -> None:
    model, calls = model_in_use(), []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(random.random() + np.random.rand() + float(torch.rand(1)))
        if len(calls) == 3:
            raise ZeroDivisionError
        return nn.functional.cross_entropy(output, target)

    loader = probed.classes()
    before = state_of(model)
    with pytest.raises(ZeroDivisionError):
        probed.ask(model, loader, loss)
    assert_same(before, state_of(model))


def test_buffers_that_are_replaced_or_new_are_put_back() -> None:
    model = nn.BatchNorm1d(2)
    before = state_of(model)
    with untouched(model):
        model.running_mean = torch.ones(2)
        model.running_var.data.mul_(3.0)
        model.register_buffer("cache", torch.zeros(1))
        model.train(False).requires_grad_(False)
        model.register_forward_pre_hook(lambda *_: None)
        model.weight.data = torch.full((2,), 9.0)
        model.bias.grad = torch.ones(2)
    assert_same(before, state_of(model))


def test_a_graph_made_before_still_has_its_backward() -> None:
    model = probed.mlp()
    loss = model(torch.randn(4, 6)).square().sum()
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    probed.ask(model, n_batches=3, lr=0.1)
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, expected, found))


def test_a_forward_that_changes_parameters_is_told() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(GradvitalsError, match=r"weight was changed in place.*deepcopy"), untouched(model):
        nn.init.ones_(model.weight)


def test_a_model_without_shapes_is_told() -> None:
    with pytest.raises(GradvitalsError, match="run one batch"):
        gv.probe(nn.LazyLinear(1), [torch.ones(2, 2)], lambda output: output.sum())


def test_a_shuffling_loader_goes_on_where_it_stood() -> None:
    data = TensorDataset(torch.arange(20.0).reshape(10, 2))
    generator = torch.Generator().manual_seed(3)
    for loader in (
        DataLoader(data, 2, shuffle=True),
        DataLoader(data, 2, shuffle=True, generator=generator),
        DataLoader(data, 2, sampler=RandomSampler(data, generator=generator)),
    ):
        model = nn.Linear(2, 1)
        before = torch.get_rng_state(), generator.get_state()
        probed.ask(model, loader, lambda output: output.mean(), 3, questions="signal")
        assert torch.equal(before[0], torch.get_rng_state())
        assert torch.equal(before[1], generator.get_state())


def test_works_without_gradients_outside() -> None:
    model, loader = probed.mlp(), probed.classes()
    for without in (torch.no_grad(), torch.inference_mode()):
        with without:
            found = probed.ask(model, loader, n_batches=3, questions="signal")
        assert found.signal["total"]["norm"] > 0


def test_a_model_that_cannot_have_gradients_is_told() -> None:
    with torch.inference_mode():
        model = probed.mlp()
    with pytest.raises(GradvitalsError, match="made in inference mode"):
        gv.probe(model, probed.classes(), nn.CrossEntropyLoss())
    with pytest.raises(GradvitalsError, match="no parameter with requires_grad"):
        gv.probe(probed.mlp().requires_grad_(False), probed.classes(), nn.CrossEntropyLoss())
