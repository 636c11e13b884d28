"""What single examples add to the gradient of a norm layer's weight, against autograd."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from gradvitals.functional import layer_shares, norm_example_gradients


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


@given(
    st.lists(st.tuples(st.floats(0.01, 100.0), st.floats(-12, 12)), min_size=1, max_size=20),
    st.floats(0.01, 100.0),
)
def test_layers_with_one_noise_scale_have_it_together_whatever_their_size(
    layers: list[tuple[float, float]], scale: float
) -> None:
    size = np.array([10.0**power for _, power in layers])
    signal, noise = layer_shares(size, scale * size)
    assert noise / signal == pytest.approx(scale)
    apart = np.array([one for one, _ in layers])
    signal, noise = layer_shares(size, apart * size)
    assert min(apart) * (1 - 1e-9) <= noise / signal <= max(apart) * (1 + 1e-9)


def test_a_layer_without_numbers_is_left_out() -> None:
    signal, noise = np.array([1.0, np.nan, 0.0, -2.0, np.inf]), np.array([3.0, 1.0, 0.0, 1.0, 1.0])
    assert layer_shares(signal, noise) == (0.25, 0.75)
    assert all(map(math.isnan, layer_shares(np.array([np.nan]), np.array([1.0]))))


def test_a_signal_below_zero_by_chance_counts() -> None:
    signal, noise = layer_shares(np.array([-1.0, 1.0]), np.array([3.0, 1.0]))
    assert (signal, noise) == (0.0, 2.0)
