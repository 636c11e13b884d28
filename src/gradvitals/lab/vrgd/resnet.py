"""ResNets for 32x32 images, as He et al. (2015), section 4.2, describe them: 6n + 2 layers of 16, 32 and 64 channels.

Where a block halves the image and doubles the channels, its shortcut takes every second pixel and fills the new
channels with zeros (option A: no parameters).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradvitals.errors import GradvitalsError

_NAME = re.compile(r"resnet(\d+)(?:-w(\d+))?")


class Stem(nn.Module):
    """The first convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Images to channels."""
        return F.relu(self.norm(self.conv(x)))


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        stride = 1 if channels_in == channels else 2
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.new_channels = channels - channels_in

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        inner = F.relu(self.norm1(self.conv1(x)))
        inner = self.norm2(self.conv2(inner))
        if self.new_channels:
            half = self.new_channels // 2
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, half, self.new_channels - half))
        return F.relu(inner + x)


class ResNet(nn.Module):
    """See the file's description."""

    def __init__(self, depth: int, width: int = 16, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = Stem(width)
        sizes = [width] * (depth // 6) + [2 * width] * (depth // 6) + [4 * width] * (depth // 6)
        self.blocks = nn.ModuleList(Block(a, b) for a, b in zip([width, *sizes], sizes, strict=False))
        self.head = nn.Linear(4 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of normalised images."""
        for part in (self.stem, *self.blocks):
            # Called by name in evaluation, which goes round `compile_blocks`: not worth compiling a second time.
            x = part(x) if self.training else part.forward(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits

    def compile_blocks(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile block by block. Blocks alike share their code, so that 56 layers compile as fast as 20."""
        # Code is kept for each kind of block and each size of micro-batch a process meets.
        torch._dynamo.config.recompile_limit = 64
        for part in (self.stem, *self.blocks):
            part.compile(dynamic=False, backend=backend)


def make_resnet(name: str) -> ResNet:
    """The network of a name: ``resnet20``, ``resnet56``, ``resnet8``; ``resnet8-w4`` begins with 4 channels, not 16.

    Raises:
        GradvitalsError: when the name is of another form.
    """
    match = _NAME.fullmatch(name)
    depth = int(match[1]) if match else 0
    if match is None or depth < 8 or depth % 6 != 2:
        raise GradvitalsError(f"model is {name!r}; expected resnet20, resnet56, or another of 6n + 2 layers")
    return ResNet(depth, int(match[2] or 16))
