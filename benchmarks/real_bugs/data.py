"""Small synthetic data sets of the kinds and scales that the bug reports had."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

Data = tuple[Tensor, Tensor]


def split(x: Tensor, y: Tensor, train: int = 1000) -> tuple[Data, Data]:
    """Returns training and test samples."""
    return (x[:train], y[:train]), (x[train:], y[train:])


def tabular(classes: int = 3, columns: int = 8, count: int = 1600) -> tuple[Data, Data]:
    """Standard normal columns; the class depends on them through a random network."""
    x = torch.randn(count, columns)
    hidden = torch.tanh(1.5 * x @ torch.randn(columns, 16) / columns**0.5)
    scores = hidden @ torch.randn(16, classes)
    return split(x, (scores - scores.mean(0)).argmax(1))


def binary(columns: int = 8, count: int = 1600) -> tuple[Data, Data]:
    """The same with two classes, as floats of shape (samples, 1)."""
    (x, y), (test_x, test_y) = tabular(2, columns, count)
    return (x, y.float()[:, None]), (test_x, test_y.float()[:, None])


def mixed_units(x: Tensor) -> Tensor:
    """Gives columns the units of ages, incomes, years and shares."""
    scales = torch.tensor([12.0, 30_000.0, 0.1, 400.0, 1.0, 5_000.0, 0.02, 60.0])[: x.shape[1]]
    means = torch.tensor([45.0, 60_000.0, 0.5, 1_900.0, 0.0, 20_000.0, 0.1, 120.0])[: x.shape[1]]
    return x * scales + means


def images(classes: int = 6, size: int = 10, count: int = 1600, noise: float = 0.25) -> tuple[Data, Data]:
    """Gray images in [0, 1]: a smooth pattern per class, shifted and noisy."""
    coarse = torch.rand(classes, 1, 4, 4)
    patterns = functional.interpolate(coarse, size=(size, size), mode="bilinear")
    y = torch.randint(classes, (count,))
    x = patterns[y]
    x = torch.stack([torch.roll(one, int(torch.randint(3, ())) - 1, dims=-1) for one in x])
    return split((x + noise * torch.randn_like(x)).clamp(0, 1), y)


def regression(columns: int = 8, count: int = 1600) -> tuple[Data, Data]:
    """A smooth function of standard normal columns, with mean 0 and variance 1."""
    x = torch.randn(count, columns)
    y = torch.tanh(x @ torch.randn(columns, 12) / columns**0.5) @ torch.randn(12, 1)
    y = (y - y.mean()) / y.std() + 0.1 * torch.randn(count, 1)
    return split(x, y)


def curve(count: int = 800) -> tuple[Data, Data]:
    """A parabola with x and y of order one, in random order."""
    x = 2 * torch.rand(count, 1) - 1
    return split(x, x**2 - 0.5 * x + 0.02 * torch.randn(count, 1), 600)


def xor() -> Data:
    """The four points."""
    return torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0], [1.0], [1.0], [0.0]])


def sequences(length: int = 12, count: int = 1600) -> tuple[Data, Data]:
    """Sequences of numbers and their mean, scaled to variance 1."""
    x = torch.randn(count, length, 1)
    return split(x, x.mean(1) * length**0.5)


def sentences(vocabulary: int = 60, length: int = 12, count: int = 1200, train: int = 800) -> tuple[Data, Data]:
    """Sentences of word ids; the class is whether good words outweigh bad ones. Id 0 is padding."""
    x = torch.randint(1, vocabulary, (count, length))
    worth = torch.randn(vocabulary)
    lengths = torch.randint(length // 2, length + 1, (count, 1))
    x = torch.where(torch.arange(length) < lengths, x, 0)
    worth[0] = 0.0
    return split(x, (worth[x].sum(1) > 0).long(), train)


def text(vocabulary: int = 24, length: int = 16, count: int = 600) -> Tensor:
    """Token sequences of a random Markov chain."""
    table = torch.softmax(3 * torch.randn(vocabulary, vocabulary), 1)
    tokens = torch.randint(vocabulary, (count, 1))
    for _ in range(length):
        tokens = torch.cat([tokens, torch.multinomial(table[tokens[:, -1]], 1)], 1)
    return tokens


def mlp(*sizes: int, act: type[nn.Module] | None = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for place, (before, after) in enumerate(pairwise(sizes)):
        layers.append(nn.Linear(before, after))
        if act is not None and place < len(sizes) - 2:
            layers.append(act())
    return nn.Sequential(*layers)


def cnn(classes: int = 6, channels: int = 8, size: int = 10) -> nn.Sequential:
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * channels * (size // 2) ** 2, classes),
    )
