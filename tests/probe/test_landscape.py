from __future__ import annotations

import math
from collections.abc import Sequence

import probed
import pytest
import torch
from torch import Tensor, nn

from gradvitals.probe.data import Subject
from gradvitals.probe.landscape import Curvature, landscape_record, top_eigenvalue


class Quadratic(nn.Module):
    """Loss w' diag(h) w / 2 + b w."""

    def __init__(self, h: Sequence[float], start: Sequence[float], slope: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))
        self.h, self.slope = torch.tensor(h, dtype=torch.float64), slope

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (self.h * self.w**2).sum() + self.slope * self.w.sum()


def curvature(model: nn.Module) -> Curvature:
    subject = Subject(model, None, "own", torch.device("cpu"))
    return Curvature(subject, list(model.parameters()), torch.zeros(1))


@pytest.mark.parametrize(
    ("h", "top"), [([3.0, 1.0, 0.5], 3.0), ([-9.0, 2.0, 1.0], 2.0), ([-9.0, -2.0, -1.0], -1.0), ([0.0, 0.0], 0.0)]
)
def test_the_largest_eigenvalue(h: list[float], top: float) -> None:
    value, products, settled = top_eigenvalue(curvature(Quadratic(h, [1.0] * len(h))))
    assert value == pytest.approx(top, abs=0.02)
    assert settled
    assert products <= 100


def test_products_by_double_backward_and_by_differences_agree() -> None:
    model = probed.mlp().double()
    subject = Subject(model, nn.CrossEntropyLoss(), "output, target", torch.device("cpu"))
    x, y = next(iter(probed.classes()))
    parameters = list(model.parameters())
    vector = [torch.randn_like(p) for p in parameters]
    exact = Curvature(subject, parameters, (x.double(), y))
    by_differences = Curvature(subject, parameters, (x.double(), y))
    by_differences.method = "differences"
    before = [p.data_ptr() for p in parameters]
    for a, b in zip(exact.times(vector), by_differences.times(vector), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)
    assert [p.data_ptr() for p in parameters] == before


class Once(torch.autograd.Function):
    """A square whose gradient cannot be differentiated."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return 2 * ctx.saved_tensors[0] * grad


def test_without_a_second_derivative_differences_are_taken() -> None:
    class Model(Quadratic):
        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * (self.h * Once.apply(self.w)).sum()

    looked = curvature(Model([3.0, 1.0], [1.0, 1.0]))
    assert top_eigenvalue(looked)[0] == pytest.approx(3.0, rel=0.01)
    assert looked.method == "differences"


def line_of(model: nn.Module, lr: float | None, optimizer: torch.optim.Optimizer | None = None) -> dict[str, object]:
    subject = Subject(model, None, "own", torch.device("cpu"))
    record, notes = landscape_record(subject, list(model.parameters()), torch.zeros(1), lr=lr, optimizer=optimizer)
    assert notes == []
    return record


def test_the_line_of_a_quadratic() -> None:
    model = Quadratic([2.0], [3.0])
    found = line_of(model, lr=0.25)
    # The loss is w^2 and the gradient 2 w: after a step of s, (3 - 6 s)^2.
    assert found["line"]["loss"] == pytest.approx([(3 - 6 * step) ** 2 for step in found["line"]["step"]])
    assert found["line"]["step"] == pytest.approx([0.25 * factor for factor in found["line"]["factor"]])
    assert found["best_step"] == 0.5
    assert found["curvature"] == pytest.approx(2.0)
    assert found["slope"] == pytest.approx(-6.0)
    assert found["edge"] == pytest.approx(1.0)
    assert found["sharpness_limit"] == 8.0
    assert found["lr_over_edge"] == pytest.approx(0.25)


def test_the_line_of_an_optimizers_step() -> None:
    model = Quadratic([2.0, 8.0], [3.0, 1.0])
    found = line_of(model, lr=0.1, optimizer=torch.optim.Adam(model.parameters(), lr=0.1))
    # Adam's first step is 0.1 in each coordinate, whatever the gradient.
    assert found["direction"] == "update"
    expected = [(3 - 0.1 * f) ** 2 + 4 * (1 - 0.1 * f) ** 2 for f in found["line"]["factor"]]
    assert found["line"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_linear_loss_has_no_edge() -> None:
    found = line_of(Quadratic([0.0, 0.0], [1.0, 1.0], slope=1.0), lr=0.1)
    assert math.isinf(found["edge"])
    assert found["lr_over_edge"] == 0.0


def test_beyond_the_edge_is_a_warning() -> None:
    model = Quadratic([2.0], [3.0])
    for lr, severity in ((1.5, "warning"), (0.5, "fine")):
        found = probed.ask(model, [torch.zeros(1)], None, lr=lr, questions="landscape")
        assert found.verdict[0]["severity"] == severity
        assert ("2/lr is 1.33" in found.verdict[0]["detail"]) == (lr == 1.5)


def test_attention_has_a_second_derivative_here() -> None:
    found = probed.ask(probed.Blocks(), probed.tokens(), None, lr=0.1, questions="landscape")
    assert found.landscape["method"] == "double backward"
    assert found.landscape["top_eigenvalue"] > 0


def test_dropout_does_not_shake_the_line() -> None:
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    found = probed.ask(model, n_batches=1, lr=1e-06, questions="landscape")
    losses = found.landscape["line"]["loss"]
    assert max(losses) - min(losses) < 1e-4


def test_without_a_learning_rate_the_unit_is_the_best_step_of_a_quadratic() -> None:
    found = line_of(Quadratic([2.0, 2.0], [3.0, 1.0]), lr=None)
    assert found["unit"] == pytest.approx(0.5)
    assert found["best_step"] == pytest.approx(0.5)
    assert found["sharpness_limit"] is found["lr_over_edge"] is None
