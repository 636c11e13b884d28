"""What beginners train beside classifiers: linear regression, and the two sides of a GAN."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_POINTS, NUM_INPUTS, NUM_OUTPUTS = 1000, 4, 2
NUM_LATENT = 16
PICTURE = 64
"""Pixels of a small picture."""


class LinearRegression(nn.Module):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_INPUTS, NUM_OUTPUTS)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error."""
        return F.mse_loss(self.layer(inputs), targets)


def line(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points near a plane."""
    inputs = torch.randn(NUM_POINTS, NUM_INPUTS, generator=generator)
    weight = torch.randn(NUM_INPUTS, NUM_OUTPUTS, generator=generator)
    return inputs, inputs @ weight + 0.1 * torch.randn(NUM_POINTS, NUM_OUTPUTS, generator=generator)


class Discriminator(nn.Module):
    """Tells real pictures from generated ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(PICTURE, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, pictures: Tensor, real: Tensor) -> Tensor:
        """Mean binary cross-entropy."""
        return F.binary_cross_entropy_with_logits(self.layers(pictures), real)


class Rival:
    """The generator: it draws every second batch of the discriminator, and is trained in turn with it."""

    def __init__(self, discriminator: Discriminator, lr: float) -> None:
        self.generator = nn.Sequential(nn.Linear(NUM_LATENT, 64), nn.ReLU(), nn.Linear(64, PICTURE))
        self._discriminator = discriminator
        self._optimizer = torch.optim.Adam(self.generator.parameters(), lr=lr)
        self._turn = False

    def is_next(self) -> bool:
        """Whether it draws the next batch; the other is of real pictures."""
        self._turn = not self._turn
        return not self._turn

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Generated pictures, and that they are not real."""
        with torch.no_grad():
            return self.generator(torch.randn(size, NUM_LATENT)), torch.zeros(size, 1)

    def take_turn(self, size: int) -> None:
        """One step of its own, with a loss that goes through the discriminator."""
        self._optimizer.zero_grad()
        self._discriminator(self.generator(torch.randn(size, NUM_LATENT)), torch.ones(size, 1)).backward()
        self._optimizer.step()
