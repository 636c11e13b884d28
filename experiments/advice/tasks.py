"""The six tasks, and one training of each under settings that a program can change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.faults.tasks import CharRNN
from benchmarks.real_bugs.data import mixed_units
from experiments.vrgd.cifar import MEAN, STD, _tiles, make_resnet
from gradvitals.config import Config
from gradvitals.demo import CharLM, CharLMConfig, shakespeare
from gradvitals.errors import GradvitalsError
from gradvitals.monitor import Monitor, watch


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything about a training that a start can have wrong and a change can set."""

    lr: float
    batch_size: int
    max_norm: float | None = None
    warmup: int = 0
    """Steps over which the learning rate rises."""
    weight_decay: float = 0.0
    momentum: float = 0.9
    """Of SGD, or Adam's first beta."""
    schedule: Literal["cosine", "constant"] = "cosine"
    decay_step: int | None = None
    """Step from which the learning rate is a third, if advised."""
    initialization: float = 1.0
    """What the usual initial weights are multiplied by."""
    normalization: bool = True
    """Whether the model has its normalization layers."""
    inputs: Literal["raw", "standardize"] = "standardize"
    targets: Literal["raw", "standardize"] = "standardize"
    zero_grad: Literal["after_step", "before_step", "never"] = "after_step"
    shuffle: bool = True
    output: Literal["none", "softmax"] = "none"
    requires_grad: bool = True
    """Whether all layers but the last are trained."""


@dataclass(frozen=True)
class Columns:
    """Training and held-out samples, in random order."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, on how many samples, and where its sweep begins."""

    data: Callable[[Path | None], Columns]
    model: Callable[[], nn.Module]
    start: Settings
    samples: int
    """Drawn in one training, whatever the batch: every training costs about the same."""
    chance: float
    """Held-out loss of a model that knows only the frequencies; no run counts as worse."""
    optimizer: Literal["sgd", "adam"] = "adam"
    regression: bool = False
    parts: int = 1
    """Micro-batches per step."""
    faults: tuple[str, ...] = ()
    """Settings that every start has wrong."""


# -- data ------------------------------------------------------------------------------------------------------------


@cache
def tabular(_: Path | None) -> Columns:
    """Four classes that depend on 16 columns through a random network."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(24_000, 16, generator=generator)
    hidden = torch.tanh(1.5 * x @ torch.randn(16, 32, generator=generator) / 4)
    scores = hidden @ torch.randn(32, 4, generator=generator)
    return _split(x, (scores - scores.mean(0)).argmax(1), 20_000)


@cache
def raw_regression(_: Path | None) -> Columns:
    """A smooth function of 8 columns in units from 0.02 to 60,000, around 250,000 with a spread of 80,000."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(12_000, 8, generator=generator)
    y = torch.tanh(x @ torch.randn(8, 12, generator=generator) / 8**0.5) @ torch.randn(12, 1, generator=generator)
    y = (y - y.mean()) / y.std() + 0.1 * torch.randn(len(x), 1, generator=generator)
    return _split(mixed_units(x), 250_000 + 80_000 * y, 10_000)


@cache
def images(folder: Path | None, size: int = 32) -> Columns:
    """20,000 images of CIFAR-10, and 2,000 of its test images; at 16 pixels each is the mean of four."""
    if folder is None or not (folder / "cifar10").is_dir():
        raise GradvitalsError("this task needs --data FOLDER with cifar10/; docs/commands.md says how to prepare it")
    home = folder / "cifar10"
    pixels = np.concatenate([_tiles(home / f"train_{part}.webp") for part in (0, 1)] + [_tiles(home / "test.webp")])
    with np.load(home / "labels.npz") as labels:
        y = torch.from_numpy(np.concatenate([labels["y_train"][:20_000], labels["y_test"]]).astype(np.int64))
    x = (torch.from_numpy(pixels[:22_000]) / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    x = x.permute(0, 3, 1, 2).contiguous()
    return _split(F.avg_pool2d(x, 2) if size == 16 else x, y[:22_000], 20_000)


CONTEXT = 32


@cache
def text(folder: Path | None) -> Columns:
    """Windows of Shakespeare's plays; the last tenth is held out."""
    found = folder / "tinyshakespeare.txt" if folder is not None else None
    content = found.read_text("utf-8") if found is not None and found.exists() else shakespeare()
    letters = {letter: place for place, letter in enumerate(sorted(set(content)))}
    codes = torch.tensor([letters[letter] for letter in content])
    windows = codes[: len(codes) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    border = len(windows) * 9 // 10
    held = windows[border : border + 1000]
    return Columns(windows[:border, :-1], windows[:border, 1:], held[:, :-1], held[:, 1:])


def _split(x: Tensor, y: Tensor, train: int) -> Columns:
    return Columns(x[:train], y[:train], x[train:], y[train:])


# -- models ----------------------------------------------------------------------------------------------------------


def mlp(*sizes: int, norm: bool) -> nn.Module:
    """Linear layers with batch norm, if wished, and ReLU between them."""
    layers: list[nn.Module] = []
    for place, width in enumerate(sizes[1:]):
        layers.append(nn.Linear(sizes[place], width))
        if place < len(sizes) - 2:
            layers += [nn.BatchNorm1d(width)] * norm + [nn.ReLU()]
    return nn.Sequential(*layers)


def cnn() -> nn.Module:
    """Three convolutions with batch norm, each halving the picture."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, 2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))


class Logits(nn.Module):
    """A language model of the benchmarks, without its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """`[batch, classes, length]`."""
        model = self.model
        if isinstance(model, CharRNN):
            assert model.lstm is not None
            states = model.lstm(model.embed(tokens))[0]
        else:
            assert isinstance(model, CharLM)
            states = model.embed(tokens) + model.position[: tokens.shape[1]]
            for block in model.blocks:
                states = block(states)
            states = model.final_norm(states)
        logits: Tensor = model.head(states)
        return logits.transpose(1, 2)


VOCABULARY = 66
"""Letters of the text, with room for one more."""

TASKS: dict[str, Task] = {
    "mlp": Task(
        data=tabular,
        model=lambda: mlp(16, 64, 64, 64, 4, norm=True),
        start=Settings(lr=0.05, batch_size=64, weight_decay=1e-4),
        samples=40_000,
        chance=1.35,
        optimizer="sgd",
        parts=2,
    ),
    "cnn": Task(
        data=images,
        model=cnn,
        start=Settings(lr=3e-3, batch_size=32, weight_decay=1e-4),
        samples=12_800,
        chance=math.log(10),
    ),
    "resnet20": Task(
        data=lambda folder: images(folder, 16),
        model=lambda: make_resnet("resnet20-w8"),
        start=Settings(lr=0.1, batch_size=32, weight_decay=5e-4),
        samples=9_600,
        chance=math.log(10),
        optimizer="sgd",
    ),
    "lstm": Task(
        data=text,
        model=lambda: Logits(CharRNN(vocab_size=VOCABULARY, width=64, lstm=True)),
        start=Settings(lr=1e-2, batch_size=32, max_norm=1.0),
        samples=9_600,
        chance=3.35,
        parts=2,
    ),
    "gpt": Task(
        data=text,
        model=lambda: Logits(CharLM(CharLMConfig(vocab_size=VOCABULARY, context=CONTEXT, d_model=48, n_layer=3))),
        start=Settings(lr=5e-3, batch_size=32, max_norm=1.0, weight_decay=0.01),
        samples=6_400,
        chance=3.35,
        parts=2,
    ),
    "regression": Task(
        data=raw_regression,
        model=lambda: mlp(8, 32, 32, 1, norm=False),
        start=Settings(lr=5e-3, batch_size=32),
        samples=24_000,
        chance=1.0,
        regression=True,
        parts=2,
        faults=("inputs", "targets"),
    ),
}
NEEDS_DATA = ("cnn", "resnet20")


# -- one training ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training."""

    task: str
    settings: Settings
    seed: int
    data: Path | None = None
    scale: float = 1.0
    """Share of the samples of a whole training, for quick runs."""


def num_steps(job: Job) -> int:
    """Returns the optimizer steps of a training: its samples over its batch."""
    return max(10, round(job.scale * TASKS[job.task].samples / job.settings.batch_size))


def lr_factor(settings: Settings, step: int, steps: int) -> float:
    """Returns the share of the learning rate at a step: warmup, cosine down to a twentieth, an advised decay."""
    rising = min(1.0, (step + 1) / (settings.warmup + 1))
    falling = 0.525 + 0.475 * math.cos(math.pi * step / steps) if settings.schedule == "cosine" else 1.0
    late = settings.decay_step is not None and step >= settings.decay_step
    return rising * falling / (3 if late else 1)


def build(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the model as the settings have it, and its optimizer."""
    task, own = TASKS[job.task], job.settings
    torch.manual_seed(job.seed)
    model = task.model()
    if not own.normalization:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm)):
                    setattr(module, name, nn.Identity())
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    if own.initialization != 1.0:
        with torch.no_grad():
            for matrix in matrices:
                matrix.mul_(own.initialization)
    if not own.requires_grad:
        last = {id(parameter) for parameter in list(model.parameters())[-2:]}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in last)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer
    if task.optimizer == "sgd":
        optimizer = torch.optim.SGD(trained, lr=own.lr, momentum=own.momentum, weight_decay=own.weight_decay)
    else:
        betas = (own.momentum, 0.99)
        optimizer = torch.optim.AdamW(trained, lr=own.lr, betas=betas, weight_decay=own.weight_decay)
    return model, optimizer


def prepared(task: Task, own: Settings, data: Path | None) -> tuple[Columns, Tensor, Tensor]:
    """Returns the samples as the settings scale them, and the mean and deviation of the targets as they come out."""
    found = task.data(data)
    if not task.regression:
        return found, torch.zeros(1), torch.ones(1)
    x, held_x, y = found.x, found.held_x, found.y
    mean, std = torch.zeros(1), torch.ones(1)
    if own.inputs == "standardize":
        x, held_x = ((some - found.x.mean(0)) / found.x.std(0) for some in (x, held_x))
    if own.targets == "standardize":
        mean, std = y.mean(0), y.std(0)
        y = (y - mean) / std
    return Columns(x, y, held_x, found.held_y), mean, std


def batches(columns: Columns, own: Settings, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields batches, epoch after epoch; unshuffled ones come sorted by their first target."""
    count = len(columns.x)
    size = min(own.batch_size, count)
    by_target = columns.y.flatten(1)[:, 0].argsort() if columns.y.dim() > 1 else columns.y.argsort()
    while True:
        order = torch.randperm(count, generator=generator) if own.shuffle else by_target
        for part in order[: count // size * size].split(size):
            yield columns.x[part], columns.y[part]


def loss_of(task: Task, own: Settings, outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the training loss as the settings have it."""
    if task.regression:
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs.softmax(1) if own.output == "softmax" else outputs, targets)


@torch.no_grad()
def held_out_loss(task: Task, model: nn.Module, columns: Columns, mean: Tensor, std: Tensor) -> float:
    """Returns the loss on held-out samples, at most that of chance: cross-entropy, or unexplained variance."""
    model.eval()
    outputs = torch.cat([model(x) for x in columns.held_x.split(500)])
    if task.regression:
        value = (outputs * std + mean - columns.held_y).square().mean() / columns.held_y.var()
    else:
        value = F.cross_entropy(outputs, columns.held_y)
    model.train()
    return min(float(value), task.chance) if bool(value.isfinite()) else task.chance


PATIENCE = 20
"""Steps with a loss that is not finite after which a training ends."""
TENSOR_EVERY = 10
"""Trainings are short: a full reading this often."""


def train(job: Job, run: Path | None = None, lrs: Iterator[float] | None = None) -> tuple[float, list[float]]:
    """Train once, watched if a folder for the run is given.

    Args:
        job: What to train.
        run: Folder of the run; None trains unwatched.
        lrs: The learning rate of each step, instead of the schedule's; training ends with it.

    Returns:
        The held-out loss and the training loss of each step.
    """
    task, own = TASKS[job.task], job.settings
    columns, mean, std = prepared(task, own, job.data)
    model, optimizer = build(job)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    steps, losses, broken = num_steps(job), list[float](), 0
    source = batches(columns, own, torch.Generator().manual_seed(job.seed))
    parts = task.parts if own.batch_size >= 2 * task.parts else 1
    config = Config(tensor_every=TENSOR_EVERY, overhead_budget=1, quiet=True, worker="thread", audit_every=None)
    monitor = watch(model, optimizer, run=run, config=config) if run is not None else None
    rates = lrs or (own.lr * lr_factor(own, step, steps) for step in range(steps))
    with monitor or nullcontext():
        for lr in rates:
            for group in optimizer.param_groups:
                group["lr"] = lr
            losses.append(_backward(task, own, model, next(source), parts, monitor))
            if own.zero_grad == "before_step":
                optimizer.zero_grad()
            if own.max_norm is not None:
                nn.utils.clip_grad_norm_(trained, own.max_norm)
            optimizer.step()
            if own.zero_grad == "after_step":
                optimizer.zero_grad()
            broken = 0 if math.isfinite(losses[-1]) else broken + 1
            if broken >= PATIENCE:
                break
    return held_out_loss(task, model, columns, mean, std), losses


def _backward(
    task: Task,
    own: Settings,
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    parts: int,
    monitor: Monitor | None,
) -> float:
    total = 0.0
    for x, y in zip(*(column.chunk(parts) for column in batch), strict=True):
        loss = loss_of(task, own, model(x), y)
        (loss / parts).backward()
        if monitor is not None:
            monitor.observe(loss, batch_size=len(x))
        total += float(loss.detach()) / parts
    return total


def to_json(settings: Settings) -> dict[str, Any]:
    """Returns settings as plain values."""
    return asdict(settings)


def changed(settings: Settings, **values: Any) -> Settings:
    """Returns settings with some of them changed."""
    return replace(settings, **values)
