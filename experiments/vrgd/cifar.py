"""A ResNet on CIFAR-10: k micro-batches per step in every arm, warm-up, cosine decay to 0, label smoothing.

The images come from a folder of WebP files, stay on the device as bytes and are augmented there. The networks are those
of He et al. (2015), section 4.2: 6n + 2 layers of 16, 32 and 64 channels. If a block halves the image and doubles the
channels, its shortcut takes every second pixel and fills the new channels with zeros (option A: no parameters). Batch
norm sees the micro-batch, in the base arm too.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.vrgd.loop import WARM_UP, GraphedPasses
from experiments.vrgd.trial import Result, Trial, make_optimizer, scaled_start_lr, warmup_cosine
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
        raise GradvitalsError("reading the images needs Pillow, which is not installed: pip install pillow") from None
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


NUM_CLASSES = 10
CURVE_POINTS = 6
TRAIN_EVAL_IMAGES = 10_000
EVAL_BATCH = 2_000
START_LR = {"sgd": 3.2, "momentum": 0.8, "adam": 3.2e-3, "adamw": 3.2e-3, "lamb": 1.28e-2, "lars": 12.8}
"""Where a sweep begins at `START_BATCH`: in the middle of what it is likely to need."""
START_BATCH = 4096


@dataclass(frozen=True, kw_only=True)
class CifarSettings:
    """What all trials of a comparison share, and their results depend on."""

    warmup: float = 0.15
    """Share of the steps over which the learning rate rises."""
    smoothing: float = 0.1
    """Of the labels."""
    precision: str = "bf16"
    """bf16 (autocast, float32 weights) or float32."""

    def as_dict(self) -> dict[str, float | str]:
        """For `records.Settings`."""
        return asdict(self)


def start_lr(optimizer: str, batch: int) -> float:
    """Where a sweep begins."""
    return scaled_start_lr(START_LR, START_BATCH, optimizer, batch)


@dataclass(frozen=True)
class _Data:
    train: Images
    test: Images


@cache
def _data(folder: Path, device: torch.device) -> _Data:
    """Read once in each process."""
    train, test = load_cifar10(folder)
    return _Data(train.to(device), test.to(device))


def train_cifar(
    trial: Trial,
    *,
    data: Path,
    device: str = "cpu",
    settings: CifarSettings | None = None,
    compiled: bool = False,
    graphs: bool = True,
) -> Result:
    """Train one trial.

    Args:
        trial: What to train.
        data: Folder that holds ``cifar10``.
        device: Where.
        settings: See `CifarSettings`.
        compiled: Compile the blocks of the network for training; evaluation runs as it is.
        graphs: On a GPU, replay the passes of a step as one CUDA graph; see `graphs`.

    Returns:
        ``score`` and ``train_score``: accuracy in % of the test images and of the first 10,000 training images, the
        latter as they are. ``loss``: mean over the last epoch, smoothed labels included. ``score@e``: the score after
        e epochs. ``images_per_second``: of training alone, without the first steps, in which passes are compiled and
        captured. Scores are nan where the run diverged, which is looked for at the end of each epoch.

    Raises:
        GradvitalsError: when the data is not there or the batch does not fit it.
    """
    settings = settings or CifarSettings()
    where = torch.device(device)
    if where.type == "cuda":
        torch.backends.cudnn.benchmark = True
    images = _data(data, where)
    _check(trial, len(images.train))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial.seed)
        model = make_resnet(trial.model)
    model = model.to(where)
    if compiled:
        model.compile_blocks()
    return _Training(trial, model, images, settings, where, graphs=graphs).run()


def _check(trial: Trial, num_images: int) -> None:
    if trial.batch > num_images:
        raise GradvitalsError(f"batch is {trial.batch} and there are {num_images} training images; expected no more")
    if trial.batch % trial.k:
        raise GradvitalsError(f"batch is {trial.batch}; expected a multiple of k, which is {trial.k}")


class _Training:
    def __init__(
        self,
        trial: Trial,
        model: ResNet,
        data: _Data,
        settings: CifarSettings,
        device: torch.device,
        *,
        graphs: bool,
    ) -> None:
        self.trial = trial
        self.model = model
        self.data = data
        self.settings = settings
        self.device = device
        self.graphs = graphs
        self.steps_per_epoch = len(data.train) // trial.batch
        self.num_steps = max(1, round(trial.epochs * self.steps_per_epoch))
        self.optimizer = make_optimizer(trial, model.named_parameters(), self.num_steps)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, partial(warmup_cosine, num_steps=self.num_steps, warmup=settings.warmup)
        )
        self.normalise = Normalise(device, torch.bfloat16 if settings.precision == "bf16" else torch.float32)
        self.batches = Augmented(data.train, self.normalise, trial.seed)
        self.losses = torch.full((self.num_steps,), math.nan, device=device)
        self.clock = _Clock(device)

    def run(self) -> Result:
        start = time.perf_counter()
        untimed = min(WARM_UP + 1, self.num_steps - 1)
        evaluate_after = {round(self.num_steps * point / CURVE_POINTS) - 1 for point in range(1, CURVE_POINTS + 1)}
        curve: dict[int, Tensor] = {}
        done = 0
        self.model.train()
        with closing(
            GraphedPasses(self._loss, self.optimizer, self.trial.k, device=self.device, graphs=self.graphs)
        ) as passes:
            for step in range(self.num_steps):
                place = step % self.steps_per_epoch
                if step and place == 0:
                    if not self._is_finite(step):
                        break
                    self.batches.start_epoch()
                if step == untimed:
                    self.clock.restart()
                self.losses[step] = passes(*self.batches.batch(place * self.trial.batch, self.trial.batch))
                self.optimizer.step()
                self.scheduler.step()
                done = step + 1
                if step in evaluate_after:
                    with self.clock.stopped():
                        curve[done] = self._accuracy(self.data.test)
            training_seconds = self.clock.read()
            diverged = not self._is_finite(done)
        train_score = None if diverged else self._accuracy(self.data.train, TRAIN_EVAL_IMAGES)
        result = {
            "score": math.nan if diverged else float(curve[done]),
            "train_score": math.nan if train_score is None else float(train_score),
            "loss": float(self.losses[max(0, done - self.steps_per_epoch) : done].mean()),
            "chance": 100 / NUM_CLASSES,
            "seconds": time.perf_counter() - start,
            "images_per_second": max(0, done - untimed) * self.trial.batch / training_seconds,
            "steps": float(done),
        }
        return result | {f"score@{step / self.steps_per_epoch:.4g}": float(score) for step, score in curve.items()}

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        with self._autocast():
            logits = self.model(images)
        return F.cross_entropy(logits.float(), labels, label_smoothing=self.settings.smoothing)

    @torch.no_grad()
    def _accuracy(self, images: Images, limit: int | None = None) -> Tensor:
        """In %, as a number that is still on the device."""
        self.model.eval()
        pixels, labels = images.pixels[:limit], images.labels[:limit]
        correct = torch.zeros((), device=self.device)
        for some, truth in zip(pixels.split(EVAL_BATCH), labels.split(EVAL_BATCH), strict=True):
            with self._autocast():
                logits = self.model(self.normalise(some))
            correct += (logits.argmax(1) == truth).sum()
        self.model.train()
        return 100 * correct / len(labels)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.settings.precision == "bf16":
            # A cast that outlived its pass would not be made again when a graph is replayed.
            return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        return nullcontext()

    def _is_finite(self, steps: int) -> bool:
        """Whether no loss so far was nan or infinite. Waits for the device."""
        return bool(torch.isfinite(self.losses[:steps]).all())


class _Clock:
    """Seconds of work on a device. Waits for it when it is read, started or stopped."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stopped = 0.0
        self._start = self._now()

    def restart(self) -> None:
        self._stopped, self._start = 0.0, self._now()

    def read(self) -> float:
        return self._now() - self._start - self._stopped

    @contextmanager
    def stopped(self) -> Iterator[None]:
        before = self._now()
        yield
        self._stopped += self._now() - before

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
