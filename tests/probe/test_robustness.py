"""Robustness: losses whose worst change is known by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradvitals.errors import ConfigError
from gradvitals.probe.perturb import Opening, Sample
from gradvitals.probe.robustness import accuracy, lipschitz, robustness


def linear(weights: list[list[float]]) -> nn.Linear:
    model = nn.Linear(len(weights[0]), len(weights), bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(weights))
    return model


def test_attacks_on_a_linear_loss_raise_it_by_the_size_times_the_sum_of_absolute_weights() -> None:
    model = linear([[1.0, -2.0, 0.5]])
    x = torch.randn(5, 3, dtype=torch.float64)
    found = robustness(model, Sample(loss=lambda: model(x).mean()))
    clean = model(x).mean().item()
    # Each column of a table moves by its own standard deviation.
    reach = float((x.std(0) * torch.tensor([1.0, 2.0, 0.5])).sum())
    for size, fgsm, pgd, noise in zip(
        found.relative,
        found.curves["fgsm"]["loss"],
        found.curves["pgd"]["loss"],
        found.curves["noise"]["loss"],
        strict=True,
    ):
        assert fgsm == pytest.approx(clean + size * reach, rel=1e-9)
        assert pgd == pytest.approx(clean + size * reach, rel=1e-9)
        assert abs(noise - clean) <= size * reach + 1e-12
    assert found.scale == pytest.approx(float(x.std(0).median()))
    assert found.slope * found.sizes[1] == pytest.approx(reach * found.relative[1])
    assert found.relative == [0.0, 0.01, 0.03, 0.1, 0.3, 1.0]
    assert math.isnan(found.curves["fgsm"]["accuracy"][0])


def test_the_lipschitz_constant_of_a_linear_model_is_its_largest_singular_value() -> None:
    torch.manual_seed(0)
    one = linear([[3.0, 4.0]])
    x = torch.randn(4, 2, dtype=torch.float64)
    assert robustness(one, Sample(loss=lambda: one(x).mean())).lipschitz["largest"] == pytest.approx(5.0)

    many = nn.Linear(6, 4, dtype=torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64)
    found = robustness(many, Sample(loss=lambda: many(x).mean()), iterations=60)
    sigma = torch.linalg.matrix_norm(many.weight, 2).item()
    assert found.lipschitz["median"] == pytest.approx(sigma, rel=1e-4)
    assert found.lipschitz["largest"] == pytest.approx(sigma, rel=1e-4)


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

    model = Net()
    opening = Opening(model, Sample(loss=lambda: model(x).mean()))
    found = lipschitz(opening, iterations, generator)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(row @ first) @ last))(x)
    exact = torch.linalg.matrix_norm(jacobians, 2)
    assert all(value <= float(limit) * (1 + 1e-5) for value, limit in zip(found, exact, strict=True))


def test_the_gradient_norm_of_one_example_is_the_constant_of_its_loss() -> None:
    model = linear([[3.0, 4.0]])
    x = torch.randn(8, 2, dtype=torch.float64)
    assert robustness(model, Sample(loss=lambda: model(x).mean())).lipschitz["loss"] == pytest.approx(5.0)


def two_classes() -> tuple[nn.Linear, Tensor, Tensor]:
    """Points at a distance of 1 from the border in the maximum norm, half on each side: they fall together."""
    model = linear([[0.0, 0.0], [1.0, 0.0]])
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]] * 4, dtype=torch.float64)
    return model, x, torch.tensor([1, 0] * 4)


def test_accuracy_falls_where_the_border_is() -> None:
    model, x, y = two_classes()
    scale = float(x[:, 0].std())  # the other column is constant
    sizes = [0.5 / scale, 0.99 / scale, 1.01 / scale, 2 / scale]
    found = robustness(model, Sample(loss=lambda: cross_entropy(model(x), y), target=y), relative=sizes)
    assert found.curves["fgsm"]["accuracy"] == [1, 1, 1, 0, 0]
    assert found.curves["pgd"]["accuracy"] == [1, 1, 1, 0, 0]
    # Halfway from 1 to what the commonest answer gets, a half, on the line from 0.99 to 1.01.
    assert found.half_at["fgsm"] * scale == pytest.approx(0.995)
    assert found.sizes[1] == pytest.approx(0.5)
    assert found.verdict == []


def test_data_stay_within_bounds() -> None:
    seen = []

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((float(x.detach().min()), float(x.detach().max())))
            return x.sum(dim=1)

    model, x = Net(), torch.rand(4, 3)
    robustness(model, Sample(loss=lambda: model(x).mean()), bounds=(0.0, 1.0), iterations=1)
    before_lipschitz = seen[:-3]
    assert min(low for low, _ in before_lipschitz) >= 0
    assert max(high for _, high in before_lipschitz) <= 1


def test_pgd_is_never_weaker_than_fgsm() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    x, y = torch.randn(20, 6), torch.randint(0, 3, (20,))
    found = robustness(model, Sample(loss=lambda: cross_entropy(model(x), y), target=y))
    for fgsm, pgd, noise in zip(
        found.curves["fgsm"]["loss"], found.curves["pgd"]["loss"], found.curves["noise"]["loss"], strict=True
    ):
        assert pgd >= fgsm
        assert pgd >= noise
    assert all(set(curve) == {"loss", "accuracy"} for curve in found.curves.values())
    json.dumps(found.record())


def test_a_model_that_small_directed_changes_break_is_named() -> None:
    model = linear([[1.0] * 400, [-1.0] * 400])
    x = torch.randn(20, 400, dtype=torch.float64)
    y = torch.tensor([0, 1] * 10)
    # The two classes differ by 0.05 in every value: hidden in the spread of the data, plain in their sum.
    x = x - x.mean(dim=1, keepdim=True) + 0.05 * (1 - 2 * y)[:, None]
    found = robustness(model, Sample(loss=lambda: cross_entropy(model(x), y), target=y))
    assert found.curves["noise"]["accuracy"][3] == 1.0
    assert found.half_at["pgd"] < 0.1
    assert found.verdict[0]["title"] == "small directed changes break the model"
    assert found.verdict[0]["question"] == "robustness"


def test_a_model_that_noise_breaks_is_named() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(11, 10, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(11)[:10])
    y = torch.arange(100) % 10
    x = torch.zeros(100, 11)
    x[torch.arange(100), y] = 1e-3
    x[:, 10] = 10.0  # a value that nothing depends on makes the spread of the data, and with it the noise
    table = robustness(model, Sample(loss=lambda: cross_entropy(model(x), y), target=y))
    assert table.half_at["noise"] > 0.1 or math.isnan(table.half_at["noise"])  # a table's columns have each their own
    x = x[:, None]
    found = robustness(model, Sample(loss=lambda: cross_entropy(model(x), y), target=y))
    assert found.verdict[0]["title"] == "random noise breaks the model"
    assert found.half_at["noise"] < 0.01
    assert found.chance == 0.1


def test_a_model_that_has_learnt_nothing_has_nothing_to_break() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    x, y = torch.randn(64, 16), torch.arange(64) % 4
    found = robustness(model, Sample(loss=lambda: cross_entropy(model(x), y), target=y))
    assert found.curves["pgd"]["accuracy"][-1] < found.curves["pgd"]["accuracy"][0] / 2
    assert all(math.isnan(value) for value in found.half_at.values())
    assert found.verdict == []


def test_words_are_perturbed_as_vectors() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).sum(dim=(1, 2))

    model, ids = Net(), torch.tensor([[0, 1], [2, 3]])
    found = robustness(model, Sample(loss=lambda: model(ids).mean()))
    assert (found.where, found.place) == ("embeddings", "table")
    clean = model(ids).mean().item()
    assert found.curves["fgsm"]["loss"][-1] == pytest.approx(clean + found.sizes[-1] * 6, rel=1e-5)
    assert found.lipschitz["median"] == pytest.approx(math.sqrt(6), rel=1e-5)


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    x, y = torch.randn(6, 4), torch.randint(0, 2, (6,))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    robustness(model, Sample(loss=lambda: cross_entropy(model(x), y), target=y))
    assert all(before[name].equal(tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    assert torch.get_rng_state().equal(random)


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


@pytest.mark.parametrize(
    "setting", [{"relative": []}, {"relative": [-1.0]}, {"steps": 0}, {"draws": 0}, {"bounds": (1, 0)}]
)
def test_settings_are_checked(setting: dict[str, Any]) -> None:
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    with pytest.raises(ConfigError, match=next(iter(setting))):
        robustness(model, Sample(loss=lambda: model(x).mean()), **setting)
