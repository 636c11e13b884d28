"""Robustness: losses whose worst change is known by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradvitals.probe.data import Subject, form_of
from gradvitals.probe.opening import Opening
from gradvitals.probe.robustness import SIZES, accuracy, lipschitz, robustness_record


def mean(output: Tensor) -> Tensor:
    return output.mean()


def subject(model: nn.Module, loss_fn: Any = mean) -> Subject:
    return Subject(model, loss_fn, form_of(loss_fn), torch.device("cpu"))


def robustness(model: nn.Module, loss_fn: Any, *batch: Tensor) -> dict[str, Any]:
    return robustness_record(subject(model, loss_fn), batch)


def linear(weights: list[list[float]]) -> nn.Linear:
    model = nn.Linear(len(weights[0]), len(weights), bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(weights))
    return model


def test_attacks_on_a_linear_loss_raise_it_by_the_size_times_the_sum_of_absolute_weights() -> None:
    model = linear([[1.0, -2.0, 0.5]])
    x = torch.randn(5, 3, dtype=torch.float64)
    found = robustness(model, mean, x)
    clean = model(x).mean().item()
    # Each column of a table moves by its own standard deviation.
    reach = float((x.std(0) * torch.tensor([1.0, 2.0, 0.5])).sum())
    for at, size in enumerate(found["relative"]):
        assert found["curves"]["fgsm"]["loss"][at] == pytest.approx(clean + size * reach, rel=1e-9)
        assert found["curves"]["pgd"]["loss"][at] == pytest.approx(clean + size * reach, rel=1e-9)
        assert abs(found["curves"]["noise"]["loss"][at] - clean) <= size * reach + 1e-12
    assert found["scale"] == pytest.approx(float(x.std(0).median()))
    assert found["slope"] * found["sizes"][1] == pytest.approx(reach * found["relative"][1])
    assert found["relative"] == [0.0, *SIZES]
    assert math.isnan(found["curves"]["fgsm"]["accuracy"][0])


def test_the_lipschitz_constant_of_a_linear_model_is_its_largest_singular_value() -> None:
    torch.manual_seed(0)
    found = robustness(linear([[3.0, 4.0]]), mean, torch.randn(4, 2, dtype=torch.float64))["lipschitz"]
    assert found["largest"] == pytest.approx(5.0)
    assert found["loss"] == pytest.approx(5.0)
    model, x = nn.Linear(6, 4, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    values = lipschitz(Opening(subject(model), (x,)), torch.Generator(), iterations=60)
    assert values == pytest.approx([torch.linalg.matrix_norm(model.weight, 2).item()] * 3, rel=1e-4)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), iterations=st.integers(1, 20))
def test_the_lipschitz_estimate_is_never_above_the_jacobian_norm(seed: int, iterations: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(4, 6, generator=generator)
    last = torch.randn(6, 3, generator=generator)
    x = torch.randn(5, 4, generator=generator)

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ first) @ last

    found = lipschitz(Opening(subject(Net()), (x,)), generator, iterations)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(row @ first) @ last))(x)
    exact = torch.linalg.matrix_norm(jacobians, 2)
    assert all(value <= float(limit) * (1 + 1e-5) for value, limit in zip(found, exact, strict=True))


def test_accuracy_falls_where_the_border_is() -> None:
    # Points at a distance of 1 from the border in the maximum norm, half on each side: they fall together.
    model = linear([[0.0, 0.0], [1.0, 0.0]])
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]] * 4, dtype=torch.float64)
    x[:, 0] *= 0.2 / x[:, 0].std()
    x[0, 0] *= 8  # widens the data, so that a size of 0.3 reaches the border
    found = robustness(model, nn.CrossEntropyLoss(), x, torch.tensor([1, 0] * 4))
    at = next(at for at, share in enumerate(found["curves"]["fgsm"]["accuracy"]) if share < 1)
    before, border = found["relative"][at - 1], found["relative"][at]
    assert before < float(x[1:, 0].abs().max() / x[:, 0].std()) <= border
    assert before < found["half_at"]["fgsm"] <= border
    assert found["curves"]["pgd"]["accuracy"] == found["curves"]["fgsm"]["accuracy"]


def test_pgd_is_never_weaker_than_fgsm_or_noise() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    x, y = torch.randn(20, 6), torch.randint(0, 3, (20,))
    curves = robustness(model, nn.CrossEntropyLoss(), x, y)["curves"]
    losses = (curves[kind]["loss"] for kind in ("pgd", "fgsm", "noise"))
    assert all(pgd >= max(fgsm, noise) for pgd, fgsm, noise in zip(*losses, strict=True))


def test_a_model_that_small_directed_changes_break_is_named() -> None:
    model = linear([[1.0] * 400, [-1.0] * 400])
    x = torch.randn(20, 400, dtype=torch.float64)
    y = torch.tensor([0, 1] * 10)
    # The two classes differ by 0.05 in every value: hidden in the spread of the data, plain in their sum.
    x = x - x.mean(dim=1, keepdim=True) + 0.05 * (1 - 2 * y)[:, None]
    found = robustness(model, nn.CrossEntropyLoss(), x, y)
    assert found["curves"]["noise"]["accuracy"][3] == 1.0
    assert found["half_at"]["pgd"] < 0.1
    assert found["verdict"][0]["title"] == "small directed changes break the model"


def test_a_model_that_noise_breaks_is_named() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(11, 10, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(11)[:10])
    y = torch.arange(100) % 10
    x = torch.zeros(100, 11)
    x[torch.arange(100), y] = 1e-3
    x[:, 10] = 10.0  # a value that nothing depends on widens the data, and with it the noise
    table = robustness(model, nn.CrossEntropyLoss(), x, y)["half_at"]["noise"]
    assert table > 0.1 or math.isnan(table)  # each column of a table has its own width
    found = robustness(model, nn.CrossEntropyLoss(), x[:, None], y)
    assert found["verdict"][0]["title"] == "random noise breaks the model"
    assert found["half_at"]["noise"] < 0.01
    assert found["chance"] == pytest.approx(0.1)


def test_a_model_that_has_learned_nothing_has_nothing_to_break() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    found = robustness(model, nn.CrossEntropyLoss(), torch.randn(64, 16), torch.arange(64) % 4)
    accuracies = found["curves"]["pgd"]["accuracy"]
    assert accuracies[-1] < accuracies[0] / 2
    assert all(math.isnan(value) for value in found["half_at"].values())
    assert found["verdict"] == []


def test_words_are_perturbed_as_vectors() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).sum(dim=(1, 2))

    model, ids = Net(), torch.tensor([[0, 1], [2, 3]])
    found = robustness(model, mean, ids)
    assert (found["where"], found["place"]) == ("embeddings", "table")
    clean = model(ids).mean().item()
    assert found["curves"]["fgsm"]["loss"][-1] == pytest.approx(clean + found["sizes"][-1] * 6, rel=1e-5)
    assert found["lipschitz"]["median"] == pytest.approx(math.sqrt(6), rel=1e-5)


LOGITS = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]])  # answers 1, 0, 1


@pytest.mark.parametrize(
    ("output", "target", "tokens", "share"),
    [
        (LOGITS, torch.tensor([[1, 0, 0]]), None, 2 / 3),
        (LOGITS, torch.tensor([[1, -100, 0]]), None, 1 / 2),
        (LOGITS, torch.tensor([[-100, -100, -100]]), None, math.nan),
        (LOGITS, torch.tensor([[0, 1, 0]]), torch.tensor([[0, 1, 0]]), 1.0),  # the model shifts its labels itself
        (LOGITS, torch.tensor([[0, 1, 0]]), torch.tensor([[1, 1, 0]]), 0.0),
        (LOGITS.transpose(1, 2), torch.tensor([[1, 0, 0]]), None, 2 / 3),
        (LOGITS[0], torch.tensor([[1, 0, 0]]), None, 2 / 3),
        (torch.tensor([[2.0], [-1.0]]), torch.tensor([1, 1]), None, 1 / 2),
        (torch.tensor([0.9, 0.4]), torch.tensor([1.0, 0.0]), None, 1.0),
        (torch.tensor([[2.0, -1.0], [3.0, 5.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]), None, 1.0),
        (torch.tensor([[2.0, -1.0], [3.0, 5.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]), None, 1.0),
        (torch.tensor([0.3, 0.4]), torch.tensor([0.2, 7.0]), None, math.nan),
        (torch.tensor([[0.3, 0.4]]), torch.tensor([0.2]), None, math.nan),
        (None, torch.tensor([0]), None, math.nan),
        (LOGITS, None, None, math.nan),
    ],
)
def test_accuracy_of_many_kinds_of_answers(output: Any, target: Any, tokens: Any, share: float) -> None:
    assert accuracy(output, target, tokens) == pytest.approx(share, nan_ok=True)
