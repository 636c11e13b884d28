"""Gradients of single examples by the plain way, one backward for each, to hold the norm-layer estimator against."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from gradvitals.measure.clock import Clock
from gradvitals.measure.examples import ExampleSums
from gradvitals.measure.examples_layers import norm_layers

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]

WIDTH = 6


class LlamaLike(nn.Module):
    """RMSNorm as the transformers library writes it."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        kind = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32 if kind != torch.float64 else kind)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon)).to(kind)


class GemmaLikeNorm(LlamaLike):
    """The weight is a difference from 1."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return (1 + self.weight) * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


class LlamaLikeNorm(LlamaLike):
    pass


class Block(nn.Module):
    """A norm layer and something after it; the norm may stand at the end."""

    def __init__(self, norm: nn.Module, *, norm_last: bool = False) -> None:
        super().__init__()
        self.norm = norm
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm_last = norm_last

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_last:
            return self.norm(x + torch.tanh(self.linear(x)))
        return x + torch.tanh(self.linear(self.norm(x)))


def plainly(block: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = block(x)
    return result


class Net(nn.Module):
    """Vectors `[B, T, 6]` to vectors, through norm layers; examples do not meet."""

    def __init__(
        self, make: Callable[[int], nn.Module], *, depth: int = 2, shared: bool = False, **block: bool
    ) -> None:
        super().__init__()
        norms = [make(WIDTH)] * depth if shared else [make(WIDTH) for _ in range(depth)]
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(norm, **block) for norm in norms)
        self.run: Callable[[nn.Module, Tensor], Tensor] = plainly

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x)
        return x


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights of norm layers are 1 at first, which would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


def mean_square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def batch(size: int, *shape: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = shape or (4, WIDTH)
    return torch.randn(size, *shape, generator=generator), torch.randn(size, *shape, generator=generator)


def example_parts(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], weights: Sequence[float], loss: Loss = mean_square
) -> dict[str, np.ndarray]:
    """For every parameter what each example of a step adds to the gradient, `[N, n]`, in float64.

    The loss of a batch is a mean, so an example's part is its own loss, over the number of examples.
    """
    dense = copy.deepcopy(model).double()
    dense.run = plainly  # nothing is recomputed here
    named = {name: p for name, p in dense.named_parameters() if p.requires_grad}
    parts: dict[str, list[np.ndarray]] = {name: [] for name in named}
    for (x, y), weight in zip(batches, weights, strict=True):
        for i in range(len(x)):
            value = loss(dense, x[i : i + 1].double(), y[i : i + 1].double()) * weight / len(x)
            for name, grad in zip(named, torch.autograd.grad(value, list(named.values())), strict=True):
                parts[name].append(grad.numpy().ravel().copy())
    return {name: np.stack(rows) for name, rows in parts.items()}


def collect(
    model: nn.Module, train: Callable[[], object], *, example_dim: int | None = None
) -> dict[str, tuple[tuple[int, ...], list[float], float]]:
    """What the collector says of a step: sizes of its micro-batches, sums of squares for each, norm of the sum."""
    names = [name for name, _ in model.named_parameters()]
    row_of = {id(p): row for row, p in enumerate(model.parameters())}
    errors: list[Exception] = []
    sums = ExampleSums(norm_layers(model, row_of, example_dim), clock=Clock(), on_error=errors.append)
    sums.arm()
    train()
    sizes, packet = sums.finish()
    sums.stop()
    assert not errors, errors
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    def told(name: str) -> Mapping[int, float]:
        return {r: float(v) for rows, values in packet.named(name) for r, v in zip(rows, values, strict=True)}

    return {
        names[row]: (found, [told(f"examples{i}")[row] ** 2 for i in range(len(found))], told("examples_sum")[row])
        for row, found in sizes.items()
    }
