"""Training with steps scaled by the signal in each tensor's gradient.

A step's batch comes in two halves. For each tensor their gradients a and b give an unbiased square of the signal,
s = a·b, and the noise of their mean, n = |a - b|²/4. Moving averages of both give the factor on the tensor's step:

================== ===================================================================================================
``base``           1
``tensor``         s / (s + n): Wiener's shrinkage, which is also the best step of a noisy quadratic
``layer``          the same for the tensors of a layer together, over its mean: rates differ, their mean stays
``above``          as ``tensor`` while the batch is over the noise scale of the model (s > n over all tensors), else 1
================== ===================================================================================================

The factor is on the step, not on the gradient: Adam divides a factor on the gradient out again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.batch_schedule.training import texts
from experiments.vrgd.cifar import Augmented, Images, Normalise, load_cifar10, make_resnet
from experiments.vrgd.loop import WARM_UP, make_recorder
from experiments.vrgd.text import evaluate, window_loss
from experiments.vrgd.trial import warmup_cosine
from gradvitals.demo import CharLM, CharLMConfig

ARMS = ("base", "tensor", "layer", "above")
DECAY = 0.9
"""Of the moving averages of signal and noise."""
LEAST, MOST = 0.02, 4.0
"""Smallest and largest factor."""
WARMUP = 0.1


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training."""

    task: str
    arm: str
    batch: int
    lr: float
    seed: int
    samples: int
    data: Path | None = None
    device: str = "cpu"
    graphs: bool = True
    """On a GPU, replay the passes of a step as one CUDA graph."""
    small: bool = False
    """A model for trying things."""


@dataclass(frozen=True)
class Problem:
    """A model, where its batches come from, and what it is judged by."""

    model: nn.Module
    draw: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    judge: Callable[[], float]
    adam: bool


def train(trial: Trial) -> dict[str, Any]:
    """Returns the score (lower is better; NaN where it diverged), the steps, and the noise scale of the second half."""
    device = torch.device(trial.device)
    torch.manual_seed(trial.seed)
    problem = (text_problem if trial.task == "text" else image_problem)(trial, device)
    steps = max(8, trial.samples // trial.batch)
    stepper = Stepper(problem.model, trial.arm, adam=problem.adam)
    halves = Halves(problem, device, graphs=trial.graphs)
    later = torch.zeros(2, device=device)
    start = time.perf_counter()
    for step in range(steps):
        loss, first, second = halves(problem.draw(trial.batch))
        stepper.step(first, second, trial.lr * warmup_cosine(step, steps, WARMUP))
        if step >= steps // 2:
            later += torch.stack([stepper.signal.sum(), stepper.noise.sum()])
        if step % 50 == 49 and not bool(loss.isfinite()):
            break
    signal, noise = later.tolist()
    score = problem.judge()
    return {
        "score": score if math.isfinite(score) and bool(loss.isfinite()) else math.nan,
        "steps": steps,
        "noise_scale": trial.batch * noise / signal if signal > 0 else math.nan,
        "seconds": time.perf_counter() - start,
    }


class Halves:
    """The loss of a batch and the gradients of its halves; on a GPU soon by replaying a graph."""

    def __init__(self, problem: Problem, device: torch.device, *, graphs: bool) -> None:
        self._problem = problem
        self._parameters = list(problem.model.parameters())
        self._recorder = make_recorder(device) if graphs else None
        self._runs = 0
        self._inputs: tuple[Tensor, ...] = ()
        self._found: list[list[Tensor]] = []
        self._loss = torch.zeros((), device=device)

    def __call__(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Returns what the next call may overwrite."""
        if not self._inputs:
            self._inputs = tuple(torch.empty_like(column) for column in batch)
        for mine, given in zip(self._inputs, batch, strict=True):
            mine.copy_(given)
        if self._recorder is None:
            self._loss = self._passes()
        elif self._runs < WARM_UP:
            self._loss = self._recorder.run(self._passes)
            self._runs += 1
        else:
            if self._runs == WARM_UP:
                self._loss = self._recorder.record(self._passes)
                self._runs += 1
            self._recorder.replay()
        first, second = self._found
        return self._loss, first, second

    def _passes(self) -> Tensor:
        self._found = []
        total = torch.zeros_like(self._loss)
        for part in zip(*(column.chunk(2) for column in self._inputs), strict=True):
            loss = self._problem.loss(*part)
            self._found.append(list(torch.autograd.grad(loss, self._parameters)))
            total += loss.detach() / 2
        return total


class Stepper:
    """AdamW or momentum SGD with a factor for each tensor. Weight decay is for matrices and kernels, unscaled."""

    def __init__(self, model: nn.Module, arm: str, *, adam: bool) -> None:
        named = list(model.named_parameters())
        self._parameters: list[Tensor] = [parameter for _, parameter in named]
        self._arm, self._adam, self._count = arm, adam, 0
        self._momentum = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._square = [torch.zeros_like(parameter) for parameter in self._parameters] if adam else []
        device = self._parameters[0].device
        decay = 0.05 if adam else 5e-4
        self._decay = [decay if parameter.dim() > 1 else 0.0 for parameter in self._parameters]
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in named))
        places = [layers.index(name.rpartition(".")[0]) for name, _ in named]
        self._layer = torch.tensor(places, device=device)
        self._layers = len(layers)
        self.signal, self.noise = (torch.zeros(len(named), device=device) for _ in range(2))

    @torch.no_grad()
    def step(self, first: list[Tensor], second: list[Tensor], lr: float) -> None:
        """One step from the gradients of two halves of a batch."""
        self._count += 1
        mean = torch._foreach_add(first, second)
        torch._foreach_mul_(mean, 0.5)
        whole = torch.stack(torch._foreach_norm(mean)).square()
        apart = torch.stack(torch._foreach_norm(torch._foreach_sub(first, second))).square() / 4
        self.signal.lerp_(whole - apart, 1 - DECAY)
        self.noise.lerp_(apart, 1 - DECAY)
        factors = (lr * self.factors()).unbind()
        weights, momentum = self._parameters, self._momentum
        decayed = torch._foreach_mul(weights, [lr * decay for decay in self._decay])
        if self._adam:
            torch._foreach_lerp_(momentum, mean, 0.1)
            torch._foreach_mul_(self._square, 0.99)
            torch._foreach_addcmul_(self._square, mean, mean, 0.01)
            root = torch._foreach_sqrt(self._square)
            torch._foreach_mul_(root, (1 - 0.99**self._count) ** -0.5)
            torch._foreach_add_(root, 1e-8)
            update = torch._foreach_div(momentum, root)
            torch._foreach_mul_(update, 1 / (1 - 0.9**self._count))
        else:
            torch._foreach_mul_(momentum, 0.9)
            torch._foreach_add_(momentum, mean)
            update = torch._foreach_mul(momentum, 1.0)
        torch._foreach_mul_(update, list(factors))
        torch._foreach_sub_(weights, list(update))
        torch._foreach_sub_(weights, list(decayed))

    def factors(self) -> Tensor:
        """Returns the factor of each tensor's step. The averages are of one age, so that their bias cancels."""
        signal, noise = self.signal.clamp_min(0), self.noise
        if self._arm == "base":
            return torch.ones_like(signal)
        if self._arm == "layer":
            zeros = torch.zeros(self._layers, device=signal.device)
            signal, noise = (zeros.index_add(0, self._layer, some) for some in (signal, noise))
            share = shrinkage(signal, noise)
            return (share / share.mean()).clamp(LEAST, MOST)[self._layer]
        share = shrinkage(signal, noise)
        if self._arm == "above":
            return torch.where(signal.sum() > noise.sum(), share, 1.0)
        return share


def shrinkage(signal: Tensor, noise: Tensor) -> Tensor:
    """Returns the share of signal; 1 where there is neither.

    >>> shrinkage(torch.tensor([3.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 0.0])).tolist()
    [0.75, 0.019999999552965164, 1.0]
    """
    return torch.where(signal + noise > 0, signal / (signal + noise), 1.0).clamp(LEAST, 1.0)


# -- the two tasks ---------------------------------------------------------------------------------------------------


def text_problem(trial: Trial, device: torch.device) -> Problem:
    """A GPT of 2 million parameters on books, byte by byte; the score is the held-out loss in nats per byte."""
    text, unseen = texts(trial.data, device)
    small = CharLMConfig(vocab_size=256, context=16, d_model=16, n_layer=1, n_head=1)
    model = CharLM(
        small if trial.small else CharLMConfig(vocab_size=256, context=128, d_model=192, n_layer=4, n_head=3)
    ).to(device)
    generator = torch.Generator(device).manual_seed(trial.seed)
    context = model.config.context
    return Problem(
        model=model,
        draw=lambda size: (text.windows(size, context, generator),),
        loss=lambda windows: window_loss(model, windows),
        judge=lambda: float(evaluate(model, unseen, 64 if trial.small else 4096)),
        adam=True,
    )


@cache
def _images(folder: Path | None, device: torch.device) -> tuple[Images, Images]:
    if folder is None:
        generator = torch.Generator().manual_seed(5)
        labels = torch.randint(10, (2000,), generator=generator)
        pixels = (labels[:, None, None, None] * 20 + torch.randint(60, (2000, 32, 32, 3), generator=generator)).byte()
        return Images(pixels[:1600], labels[:1600]).to(device), Images(pixels[1600:], labels[1600:]).to(device)
    train_images, test_images = load_cifar10(folder)
    return train_images.to(device), test_images.to(device)


def image_problem(trial: Trial, device: torch.device) -> Problem:
    """ResNet-20 on CIFAR-10 with crops and flips, batch norm on halves; the score is the error on test images in %."""
    learnt, unseen = _images(trial.data, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    normalise = Normalise(device, dtype)
    model = make_resnet("resnet8-w4" if trial.small else "resnet20").to(device)
    source = Augmented(learnt, normalise, trial.seed)
    place = 0

    def draw(size: int) -> tuple[Tensor, ...]:
        nonlocal place
        if place + size > len(learnt):
            source.start_epoch()
            place = 0
        place += size
        return source.batch(place - size, size)

    def outputs(images: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False):
            logits: Tensor = model(images)
        return logits.float()

    @torch.no_grad()
    def judge() -> float:
        model.eval()
        parts = zip(unseen.pixels.split(1000), unseen.labels.split(1000), strict=True)
        wrong = torch.stack([(outputs(normalise(pixels)).argmax(1) != labels).sum() for pixels, labels in parts])
        return 100 * float(wrong.sum()) / len(unseen)

    loss = lambda images, labels: F.cross_entropy(outputs(images), labels, label_smoothing=0.1)  # noqa: E731
    return Problem(model=model, draw=draw, loss=loss, judge=judge, adam=False)
