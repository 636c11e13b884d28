"""What single examples add to the gradient of a norm layer's weight, against autograd."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from gradvitals.functional import norm_example_gradients


@pytest.mark.parametrize("example_dim", [0, 1])
def test_against_one_backward_for_each_example(example_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(2, 5, 3, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    y = F.layer_norm(x, [4]) * weight
    y.retain_grad()
    (y - target).pow(4).mean().backward()
    assert y.grad is not None
    parts = norm_example_gradients(F.layer_norm(x, [4]), y.grad, example_dim=example_dim)
    assert parts.shape == (x.shape[example_dim], 4)
    for i, part in enumerate(parts):
        one, wanted = x.select(example_dim, i), target.select(example_dim, i)
        loss = (F.layer_norm(one, [4]) * weight - wanted).pow(4).sum() / x.numel()
        assert torch.allclose(part, torch.autograd.grad(loss, weight)[0], rtol=1e-12)
    assert torch.allclose(parts.sum(0), weight.grad, rtol=1e-12)


def test_a_weight_of_several_dimensions_keeps_its_order() -> None:
    x, dy = torch.rand(3, 2, 4), torch.rand(3, 2, 4)
    assert torch.equal(norm_example_gradients(x, dy, weight_dims=(-2, -1)), (x * dy).reshape(3, 8))
    assert torch.equal(norm_example_gradients(x, dy, weight_dims=(2, 1)), (x * dy).transpose(1, 2).reshape(3, 8))
    assert torch.allclose(norm_example_gradients(x, dy, weight_dims=(1,)), (x * dy).sum(2))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"example_dim": 2}, "example_dim is 2 and weight_dims are \\(-1,\\); expected different dimensions"),
        ({"example_dim": 3}, "of a tensor that has 3"),
        ({"weight_dims": (1, -2)}, "expected different dimensions"),
    ],
)
def test_dimensions_that_cannot_be(options: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        norm_example_gradients(torch.zeros(2, 2, 2), torch.zeros(2, 2, 2), **options)  # type: ignore[arg-type]


def test_shapes_that_differ() -> None:
    with pytest.raises(ValueError, match=r"the shapes are \(2, 3\) and \(3, 2\); expected equal ones"):
        norm_example_gradients(torch.zeros(2, 3), torch.zeros(3, 2))
