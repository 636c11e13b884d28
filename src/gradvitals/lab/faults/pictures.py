"""Pictures to learn from, drawn rather than downloaded: 8×8 digits, and 28×28 silhouettes of clothes.

Each picture is turned, moved, scaled, textured and given noise, and some classes are close to each other, so that
a model learns fast but does not reach a loss of zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

NUM_CLASSES = 10

DIGITS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11110 00001 00001 01110 00001 00001 11110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
"""The ten digits, seven rows of five dots."""

Box = tuple[float, float, float, float]
"""Middle across, middle down, half the width, half the height; the picture goes from -1 to 1."""

CLOTHES: tuple[tuple[Box, ...], ...] = (
    ((0, 0.1, 0.4, 0.6), (0, -0.35, 0.75, 0.18)),  # T-shirt
    ((-0.22, 0, 0.16, 0.8), (0.22, 0, 0.16, 0.8), (0, -0.65, 0.38, 0.15)),  # trousers
    ((0, 0, 0.38, 0.6), (-0.58, 0, 0.16, 0.6), (0.58, 0, 0.16, 0.6)),  # pullover
    ((0, -0.4, 0.22, 0.4), (0, 0.35, 0.42, 0.45)),  # dress
    ((-0.22, 0, 0.19, 0.75), (0.22, 0, 0.19, 0.75), (-0.6, 0, 0.14, 0.65), (0.6, 0, 0.14, 0.65)),  # coat
    ((0, 0.4, 0.75, 0.1), (0.3, 0.1, 0.35, 0.07), (-0.4, 0.1, 0.1, 0.3)),  # sandal
    ((0, 0.05, 0.38, 0.62), (-0.55, -0.25, 0.18, 0.3), (0.55, -0.25, 0.18, 0.3)),  # shirt
    ((0, 0.3, 0.78, 0.22), (-0.4, 0.1, 0.3, 0.25)),  # sneaker
    ((0, 0.2, 0.65, 0.45), (0, -0.45, 0.35, 0.07), (-0.3, -0.3, 0.06, 0.2), (0.3, -0.3, 0.06, 0.2)),  # bag
    ((-0.2, -0.2, 0.28, 0.6), (0.1, 0.5, 0.6, 0.2)),  # boot
)

EDGE = 25.0
"""How sharp the outlines are."""


def digits(count: int, generator: torch.Generator, *, noise: float = 0.35) -> tuple[Tensor, Tensor]:
    """Digits as `[count, 64]` with mean near zero, and which they are."""
    rows = [[[float(dot) for dot in row] for row in glyph.split()] for glyph in DIGITS]
    glyphs = F.pad(torch.tensor(rows), (2, 2, 1, 1))  # 9 rows of 9
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    grid = _jittered_grid(count, 8, generator, turn=0.25, stretch=0.15, move=0.15)
    drawn = F.grid_sample(glyphs[labels].unsqueeze(1), grid, align_corners=False).flatten(1)
    contrast = 0.6 + 0.8 * torch.rand(count, 1, generator=generator)
    drawn = contrast * drawn + noise * torch.randn(drawn.shape, generator=generator)
    return (drawn - 0.27) / 0.5, labels


def clothes(count: int, generator: torch.Generator, *, noise: float = 0.25) -> tuple[Tensor, Tensor]:
    """Silhouettes with a woven texture as `[count, 1, 28, 28]` with mean near zero, and which they are."""
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    grid = _jittered_grid(count, 28, generator, turn=0.2, stretch=0.15, move=0.12)
    shape = torch.empty(count, 28, 28)
    for label, boxes in enumerate(CLOTHES):
        shape[labels == label] = _silhouette(boxes, grid[labels == label])
    angle = math.pi * torch.rand(count, 1, 1, generator=generator)
    fineness = 4 + 14 * torch.rand(count, 1, 1, generator=generator)
    along = grid[..., 0] * torch.cos(angle) + grid[..., 1] * torch.sin(angle)
    weave = 0.7 + 0.3 * torch.sin(fineness * along)
    brightness = 0.4 + 0.6 * torch.rand(count, 1, 1, generator=generator)
    drawn = brightness * weave * shape + noise * torch.randn(shape.shape, generator=generator)
    return ((drawn - 0.15) / 0.35).unsqueeze(1), labels


def _silhouette(boxes: tuple[Box, ...], grid: Tensor) -> Tensor:
    x, y = grid[..., 0], grid[..., 1]
    parts = [
        torch.sigmoid(EDGE * (width - (x - across).abs())) * torch.sigmoid(EDGE * (height - (y - down).abs()))
        for across, down, width, height in boxes
    ]
    return torch.stack(parts).amax(0)


def _jittered_grid(
    count: int, size: int, generator: torch.Generator, *, turn: float, stretch: float, move: float
) -> Tensor:
    """Where each pixel of each picture looks, as `[count, size, size, 2]`: turned, stretched and moved at random."""

    def spread(scale: float) -> Tensor:
        return scale * (2 * torch.rand(count, generator=generator) - 1)

    angle, wider, taller = spread(turn), 1 + spread(stretch), 1 + spread(stretch)
    cos, sin = torch.cos(angle), torch.sin(angle)
    theta = torch.stack([wider * cos, -sin, spread(move), sin, taller * cos, spread(move)], dim=1)
    return F.affine_grid(theta.view(count, 2, 3), [count, 1, size, size], align_corners=False)
