from __future__ import annotations

import copy
import math

import probed
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradvitals.probe.layers import Activations, effective_rank, planned_update


def test_effective_rank_of_known_matrices() -> None:
    left, right = torch.linalg.qr(torch.randn(9, 4)).Q, torch.linalg.qr(torch.randn(12, 4)).Q
    matrix = left @ torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0])) @ right.T
    shares = [0.5, 0.25, 0.125, 0.125]
    assert effective_rank(matrix) == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)), rel=1e-4)
    assert effective_rank(matrix.reshape(9, 3, 2, 2)) == pytest.approx(effective_rank(matrix))
    assert effective_rank(1e-30 * matrix) == pytest.approx(effective_rank(matrix), rel=1e-4)


def test_effective_rank_of_what_has_none() -> None:
    for tensor in (torch.ones(5), torch.zeros(3, 3), torch.full((2, 2), math.nan), torch.zeros(0, 3)):
        assert math.isnan(effective_rank(tensor))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_the_planned_update_is_the_one_the_optimizer_makes(make: type[torch.optim.Optimizer]) -> None:
    model = probed.mlp()
    optimizer = make(model.parameters(), lr=0.01)
    for x, y in list(probed.classes())[:2]:  # so that it has moments
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    parameters = list(model.parameters())
    before, state = [p.detach().clone() for p in parameters], copy.deepcopy(optimizer.state_dict())
    planned = planned_update(optimizer, parameters, [p.grad for p in parameters])
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    assert str(optimizer.state_dict()) == str(state)
    optimizer.step()
    for p, b, update in zip(parameters, before, planned, strict=True):
        torch.testing.assert_close(p - b, update)


def test_norms_by_hand() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[3.0, 4.0]])
    batches = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])]
    found = probed.ask(model, batches, lambda output: output.sum(), lr=0.1, questions="layers")
    [row] = found.layers["tensors"]
    assert row["grad_norm"] == pytest.approx(math.sqrt(0.5))
    assert row["weight_norm"] == pytest.approx(5.0)
    assert row["update_ratio"] == pytest.approx(0.1 * math.sqrt(0.5) / 5)
    assert found.layers["update_by"] == "lr"
    assert (row["effective_rank"], row["full_rank"]) == (pytest.approx(1.0), 1)


def test_an_optimizer_that_wants_a_closure_is_a_note() -> None:
    model = probed.mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    found = probed.ask(model, n_batches=3, optimizer=optimizer, questions="layers")
    assert found.layers["update_by"] == "lr"
    assert any("could not be made on a copy" in note for note in found.notes)


class Called(nn.Module):
    """Activations in all the ways they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.relu, self.b = nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 5)
        self.c = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * torch.sigmoid(self.c(F.relu(self.b(self.relu(self.a(x))))).tanh())


def test_dead_and_saturated_units() -> None:
    model = Called()
    model.a.bias.data = torch.tensor([-100.0, 0.0, 0.0])
    model.c.weight.data.zero_()
    model.c.bias.data = torch.tensor([100.0, 0.0])
    seen = Activations(model)
    with seen.watching():
        for _ in range(3):
            model(torch.randn(50, 4))
    found = {(row["module"], row["kind"]): row for row in seen.records()}
    assert set(found) == {("relu", "relu"), ("", "relu"), ("", "tanh"), ("", "sigmoid")}
    assert (found["relu", "relu"]["dead"], found["relu", "relu"]["units"]) == (1, 3)
    assert math.isnan(found["relu", "relu"]["saturated_share"])
    assert found["", "tanh"]["saturated_share"] == 0.5
    assert found["", "tanh"]["values"] == 300
    assert found["", "sigmoid"]["saturated_share"] == 0.0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_unit_that_was_on_once_is_not_dead_and_channels_are_units() -> None:
    model = nn.ReLU()
    seen = Activations(model)
    pictures = -torch.ones(2, 3, 4, 4)
    with seen.watching():
        model(pictures)
        pictures[1, 2, 0, 0] = 1.0
        model(pictures)
    [row] = seen.records()
    assert (row["units"], row["dead"], row["zero_share"]) == (3, 2, 191 / 192)


def test_the_same_gradients_with_or_without_looking_at_activations() -> None:
    model, loader = probed.everything(), probed.classes()
    alone = probed.ask(model, loader, n_batches=3, questions="signal")
    both = probed.ask(model, loader, n_batches=3, questions=["signal", "layers"])
    assert alone.signal["total"] == both.signal["total"]


class Twice(nn.Module):
    """Two calls of one kind in one forward, of different widths, and a sigmoid at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 3), nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        return torch.sigmoid(100 * self.c(F.relu(self.b(x) - 100)))


def test_calls_of_one_kind_in_one_forward_are_told_apart_and_the_output_is_left_out() -> None:
    model = Twice()
    seen = Activations(model)
    with seen.watching():
        for _ in range(2):
            model(torch.randn(50, 4))
    assert [(row["module"], row["units"], row["dead"]) for row in seen.records()] == [
        ("", 3, 0),
        ("forward, relu 2", 5, 5),
    ]


def test_units_behind_a_convolution_are_channels_and_behind_a_linear_layer_the_last() -> None:
    conv, linear = nn.Conv1d(2, 3, 3), nn.Linear(6, 7)
    conv.bias.data[1] = -100.0
    seen = Activations(model := nn.Sequential(conv, nn.ReLU(), linear, nn.ReLU()))
    with seen.watching():
        model(torch.randn(8, 2, 8))
    assert [(row["units"], row["dead"]) for row in seen.records()] == [(3, 1), (7, 0)]


class NewGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (torch.tanh(40 * x) + 1.0)


class Written(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(40 * x))


@pytest.mark.parametrize("kind", [NewGELU, Written])
def test_gelu_is_no_tanh(kind: type[nn.Module]) -> None:
    seen = Activations(model := nn.Sequential(nn.Linear(4, 8), kind(), nn.Linear(8, 2), nn.Tanh(), nn.Linear(2, 1)))
    with seen.watching():
        model(torch.randn(8, 4))
    assert [(row["module"], row["kind"]) for row in seen.records()] == [("3", "tanh")]


def test_a_loss_that_is_nowhere_finite_has_no_gradients_to_show() -> None:
    found = probed.ask(
        loss_fn=lambda output, target: output.sum() * math.nan,
        n_batches=3,
        lr=0.1,
        questions=["layers", "landscape", "samples"],
    )
    assert all(math.isnan(row["grad_norm"]) for row in found.layers["tensors"])
    assert math.isnan(found.landscape["edge"])
    assert {item["severity"] for item in found.verdict if item["question"] in ("landscape", "samples")} == {"critical"}
