"""CIFAR-10 from a folder of WebP files, kept on the device as bytes and augmented there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradvitals.errors import GradvitalsError

SIDE = 32
PAD = 4
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
HOW_TO_PREPARE = (
    "expected FOLDER/cifar10/train_0.webp, train_1.webp, ..., test.webp (lossless, images as tiles of 32x32 pixels, "
    "row by row) and labels.npz (y_train, y_test). The images are at https://www.cs.toronto.edu/~kriz/cifar.html; "
    "docs/commands.md has a script that turns them into such files"
)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Images:
    """Images as bytes, ``[N, 32, 32, 3]``, and their classes, ``[N]``, on one device."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Images:
        """The same there."""
        return Images(self.pixels.to(device), self.labels.to(device))


def load_cifar10(folder: Path) -> tuple[Images, Images]:
    """The training and the test images under ``folder/cifar10``, in the order of their files.

    Raises:
        GradvitalsError: when files are missing or do not fit together, or Pillow is not installed.
    """
    home = folder / "cifar10"
    train_files = sorted(home.glob("train_*.webp"), key=lambda path: int(re.sub(r"\D", "", path.stem) or 0))
    test_file, label_file = home / "test.webp", home / "labels.npz"
    missing = [path.name for path in (test_file, label_file) if not path.exists()]
    missing += [] if train_files else ["train_*.webp"]
    if missing:
        raise GradvitalsError(f"{home} has no {', '.join(missing)}; {HOW_TO_PREPARE}")
    with np.load(label_file) as labels:
        train = _images(np.concatenate([_tiles(path) for path in train_files]), labels["y_train"], "train_*.webp")
        test = _images(_tiles(test_file), labels["y_test"], "test.webp")
    return train, test


def _images(pixels: Bytes, labels: npt.NDArray[np.integer], name: str) -> Images:
    if len(pixels) != len(labels):
        raise GradvitalsError(
            f"{name} holds {len(pixels)} images and labels.npz {len(labels)} labels for them; {HOW_TO_PREPARE}"
        )
    return Images(torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64)))


def _tiles(path: Path) -> Bytes:
    try:
        from PIL import Image
    except ImportError:
        raise GradvitalsError(
            "reading the images needs Pillow, which is not installed: pip install 'gradvitals[lab]'"
        ) from None
    with Image.open(path) as image:
        sheet = np.asarray(image.convert("RGB"))
    rows, columns = sheet.shape[0] // SIDE, sheet.shape[1] // SIDE
    if sheet.shape[:2] != (rows * SIDE, columns * SIDE):
        raise GradvitalsError(f"{path} is {sheet.shape[1]}x{sheet.shape[0]} pixels; {HOW_TO_PREPARE}")
    return sheet.reshape(rows, SIDE, columns, SIDE, 3).transpose(0, 2, 1, 3, 4).reshape(-1, SIDE, SIDE, 3)


class Normalise:
    """Bytes ``[N, H, W, 3]`` as numbers ``[N, 3, H, W]`` of mean 0 and deviation 1, in channels-last memory."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        mean, std = (torch.tensor(values, device=device) for values in (MEAN, STD))
        self._factor, self._offset = 1 / (255 * std), mean / std
        self._dtype = dtype

    def __call__(self, pixels: Tensor) -> Tensor:
        """A view of what was computed: the memory keeps its order."""
        return (pixels * self._factor).sub_(self._offset).to(self._dtype).permute(0, 3, 1, 2)


class Augmented:
    """Training images, each epoch in a new order, shifted by up to 4 pixels (black comes in) and mirrored at random.

    Nothing here waits for the device. The order and the shifts follow from the seed alone.
    """

    def __init__(self, images: Images, normalise: Normalise, seed: int) -> None:
        self._normalise = normalise
        self._labels = images.labels
        self._padded = torch.nn.functional.pad(images.pixels, (0, 0, PAD, PAD, PAD, PAD))
        self._generator = torch.Generator(images.pixels.device).manual_seed(seed)
        self._line = torch.arange(SIDE, device=images.pixels.device)
        self.start_epoch()

    def start_epoch(self) -> None:
        """Draw anew."""
        size, device = len(self._labels), self._labels.device
        self._order = torch.rand(size, generator=self._generator, device=device).argsort()
        self._top, self._left = (
            torch.randint(2 * PAD + 1, (size, 1), generator=self._generator, device=device) for _ in range(2)
        )
        self._mirror = torch.rand(size, 1, generator=self._generator, device=device) < 0.5

    def batch(self, start: int, size: int) -> tuple[Tensor, Tensor]:
        """Images and labels of a step, by place in the epoch's order."""
        here = slice(start, start + size)
        chosen = self._order[here]
        rows = self._top[here] + self._line
        columns = self._left[here] + torch.where(self._mirror[here], SIDE - 1 - self._line, self._line)
        pixels = self._padded[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
        return self._normalise(pixels), self._labels[chosen]
