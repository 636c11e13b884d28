"""Twelve workloads that are healthy but not smooth: controls for the Guard and for the diagnosis.

Each is a function of a seed that builds a `Workload`: tiny models, so that 3,000 steps take seconds. Data comes from a
generator of the workload's own, weights and dropout from torch's. All of them learn; none has a fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Observe = Callable[[Tensor], object]


@dataclass
class Workload:
    """A training run before its first step."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    step: Callable[[int, Observe], None]
    """Makes step `i`: forward, backward, a call with the loss, and the optimizer's step."""
    metric: Callable[[], float]
    """What the run is judged by at its end; lower is better."""
    schedulers: list[Any] = field(default_factory=list)


def mlp(*sizes: int, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        layers.append(nn.Linear(inputs, outputs))
        if i < len(sizes) - 2:
            layers += [nn.ReLU(), nn.Dropout(dropout)] if dropout else [nn.ReLU()]
    return nn.Sequential(*layers)


def _simple(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], Tensor],
    metric: Callable[[], float],
    scheduler: Any = None,
) -> Workload:
    """The ordinary loop."""

    def step(i: int, observe: Observe) -> None:
        optimizer.zero_grad()
        value = loss(i)
        value.backward()
        observe(value)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()

    return Workload(model, [optimizer], step, _judged(model, metric), [scheduler] if scheduler is not None else [])


def _judged(model: nn.Module, metric: Callable[[], float]) -> Callable[[], float]:
    def judge() -> float:
        model.eval()
        with torch.no_grad():
            value = metric()
        model.train()
        return value

    return judge


def _start(seed: int) -> torch.Generator:
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(1_000_003 * (seed + 1))


def _held_out() -> torch.Generator:
    return torch.Generator().manual_seed(7)


class Blobs:
    """Classes of Gaussian inputs around fixed centers."""

    def __init__(self, classes: int = 4, features: int = 8, spread: float = 1.0, centers: int = 0) -> None:
        self.classes, self.features, self.spread = classes, features, spread
        self.centers = 1.5 * torch.randn(classes, features, generator=torch.Generator().manual_seed(99 + centers))

    def draw(self, count: int, generator: torch.Generator, spread: float | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        labels = torch.randint(self.classes, (count,), generator=generator)
        noise = torch.randn(count, self.features, generator=generator)
        return self.centers[labels] + (self.spread if spread is None else spread) * noise, labels


def rare_class(seed: int) -> Workload:
    """A positive class of 0.5% with weight 100: batches with a positive have large losses and gradients."""
    data, model = _start(seed), mlp(8, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    weight = torch.tensor(100.0)
    direction = torch.randn(8, generator=torch.Generator().manual_seed(3))

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = (torch.rand(count, generator=generator) < 0.005).float()
        return torch.randn(count, 8, generator=generator) + labels[:, None] * direction, labels

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(inputs)[:, 0], labels, pos_weight=weight)

    test = draw(20_000, _held_out())
    return _simple(model, optimizer, lambda i: loss(*draw(32, data)), lambda: float(loss(*test)))


def tiny_batches(seed: int) -> Workload:
    """Momentum SGD with batches of 1, 2 or 4 samples, by seed."""
    data, model, blobs = _start(seed), mlp(8, 16, 4), Blobs()
    size = (1, 2, 4)[seed % 3]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), labels)

    test = blobs.draw(2000, _held_out())
    return _simple(model, optimizer, lambda i: loss(*blobs.draw(size, data)), lambda: float(loss(*test)))


def alternating_tasks(seed: int) -> Workload:
    """Two tasks in turn, 50 steps each, with a shared body and two heads."""
    data, model = _start(seed), nn.ModuleDict({"body": mlp(8, 24, 16), "a": nn.Linear(16, 4), "b": nn.Linear(16, 4)})
    tasks = (Blobs(), Blobs(spread=2.0, centers=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(task: int, inputs: Tensor, labels: Tensor) -> Tensor:
        return (1.0, 3.0)[task] * F.cross_entropy(model["ab"[task]](torch.relu(model["body"](inputs))), labels)

    tests = [task.draw(2000, _held_out()) for task in tasks]
    return _simple(
        model,
        optimizer,
        lambda i: loss((task := i // 50 % 2), *tasks[task].draw(16, data)),
        lambda: sum(float(loss(task, *tests[task])) for task in range(2)),
    )


def curriculum(seed: int) -> Workload:
    """Harder data at steps 600, 1,200, 1,800 and 2,400: the loss jumps, and stays higher."""
    data, model, blobs = _start(seed), mlp(8, 24, 4), Blobs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), labels)

    test = blobs.draw(2000, _held_out(), 2.2)
    return _simple(
        model,
        optimizer,
        lambda i: loss(*blobs.draw(16, data, 0.6 + 0.4 * min(4, i // 600))),
        lambda: float(loss(*test)),
    )


def label_noise(seed: int) -> Workload:
    """A third of the labels are random throughout."""
    data, model, blobs = _start(seed), mlp(8, 24, 4), Blobs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def batch() -> tuple[Tensor, Tensor]:
        inputs, labels = blobs.draw(16, data)
        noisy = torch.rand(16, generator=data) < 1 / 3
        return inputs, torch.where(noisy, torch.randint(4, (16,), generator=data), labels)

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), labels)

    test = blobs.draw(2000, _held_out())
    return _simple(model, optimizer, lambda i: loss(*batch()), lambda: float(loss(*test)))


def policy_gradient(seed: int) -> Workload:
    """REINFORCE on a cart that must be kept near 0: the loss says little about the policy."""
    data, model = _start(seed), mlp(2, 16, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def play(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Log probabilities and rewards, time x episodes."""
        place = torch.randn(count, generator=generator)
        speed = torch.zeros(count)
        logs, rewards = [], []
        for _ in range(12):
            scores = F.log_softmax(model(torch.stack([place, speed], 1)), 1)
            choice = torch.multinomial(scores.exp().detach(), 1, generator=generator)
            push = 2.0 * choice[:, 0] - 1
            speed = 0.9 * speed + 0.3 * push + 0.1 * torch.randn(count, generator=generator)
            place = place + 0.3 * speed
            logs.append(scores.gather(1, choice)[:, 0])
            rewards.append(-place.square())
        return torch.stack(logs), torch.stack(rewards)

    def loss(i: int) -> Tensor:
        logs, rewards = play(8, data)
        returns = rewards.flip(0).cumsum(0).flip(0)
        return -(logs * (returns - returns.mean(1, keepdim=True)).detach()).sum(0).mean()

    return _simple(model, optimizer, loss, lambda: -float(play(500, _held_out())[1].sum(0).mean()))


def gan(seed: int) -> Workload:
    """A generator and a discriminator on a ring of Gaussians, each with its optimizer."""
    data, model = _start(seed), nn.ModuleDict({"d": mlp(2, 24, 1), "g": mlp(4, 24, 2)})
    d_optimizer = torch.optim.Adam(model["d"].parameters(), lr=1e-3, betas=(0.5, 0.99))
    g_optimizer = torch.optim.Adam(model["g"].parameters(), lr=1e-3, betas=(0.5, 0.99))

    def real(count: int, generator: torch.Generator) -> Tensor:
        angle = 2 * math.pi * torch.randint(6, (count,), generator=generator) / 6
        center = torch.stack([angle.cos(), angle.sin()], 1)
        return center + 0.1 * torch.randn(count, 2, generator=generator)

    def fake(count: int, generator: torch.Generator) -> Tensor:
        made: Tensor = model["g"](torch.randn(count, 4, generator=generator))
        return made

    def step(i: int, observe: Observe) -> None:
        d_optimizer.zero_grad()
        loss = F.softplus(-model["d"](real(32, data))).mean() + F.softplus(model["d"](fake(32, data).detach())).mean()
        loss.backward()
        observe(loss)
        d_optimizer.step()
        g_optimizer.zero_grad()
        loss = F.softplus(-model["d"](fake(32, data))).mean()
        loss.backward()
        observe(loss)
        g_optimizer.step()

    def metric() -> float:
        """Energy distance between generated and real points."""
        ours, theirs = fake(500, _held_out()), real(500, torch.Generator().manual_seed(8))
        between = torch.cdist(ours, theirs).mean()
        return float(2 * between - torch.cdist(ours, ours).mean() - torch.cdist(theirs, theirs).mean())

    return Workload(model, [d_optimizer, g_optimizer], step, _judged(model, metric))


def warm_restarts(seed: int) -> Workload:
    """The learning rate falls to a hundredth and jumps back up (even seeds), or rises and falls in triangles (odd)."""
    data, model, blobs = _start(seed), mlp(8, 24, 4), Blobs(spread=1.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler: Any
    if seed % 2:
        scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-3, 0.1, step_size_up=200)
    else:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 300, eta_min=1e-3)

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), labels)

    test = blobs.draw(2000, _held_out())
    return _simple(model, optimizer, lambda i: loss(*blobs.draw(16, data)), lambda: float(loss(*test)), scheduler)


def dropout(seed: int) -> Workload:
    """Dropout of 0.5 with batches of 4."""
    data, model, blobs = _start(seed), mlp(8, 24, 24, 4, dropout=0.5), Blobs()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), labels)

    test = blobs.draw(2000, _held_out())
    return _simple(model, optimizer, lambda i: loss(*blobs.draw(4, data)), lambda: float(loss(*test)))


class Tagger(nn.Module):
    """A GRU that predicts the next symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(8, 12), nn.GRU(12, 16, batch_first=True), nn.Linear(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the symbol after each."""
        scores: Tensor = self.head(self.rnn(self.embed(tokens))[0])
        return scores


def sequence_lengths(seed: int) -> Workload:
    """Sequences of 2 to 32 symbols, one length per batch, and a loss that is summed over them."""
    data, model = _start(seed), Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    chances = (3 * torch.randn(8, 8, generator=torch.Generator().manual_seed(5))).softmax(1)

    def draw(count: int, length: int, generator: torch.Generator) -> Tensor:
        tokens = [torch.randint(8, (count,), generator=generator)]
        for _ in range(length):
            tokens.append(torch.multinomial(chances[tokens[-1]], 1, generator=generator)[:, 0])
        return torch.stack(tokens, 1)

    def loss(tokens: Tensor) -> Tensor:
        scores = model(tokens[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / len(tokens)

    test = draw(200, 16, _held_out())
    lengths = (2, 4, 8, 32)
    return _simple(
        model,
        optimizer,
        lambda i: loss(draw(4, lengths[int(torch.randint(4, (1,), generator=data))], data)),
        lambda: float(loss(test)) / 16,
    )


def contrastive(seed: int) -> Workload:
    """InfoNCE with 16 pairs per batch and a temperature of 0.1."""
    data, model, blobs = _start(seed), mlp(8, 24, 8), Blobs(classes=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def loss(generator: torch.Generator, count: int) -> Tensor:
        inputs, _ = blobs.draw(count, generator)
        first, second = (
            F.normalize(model(inputs + 0.3 * torch.randn(inputs.shape, generator=generator)), dim=1) for _ in range(2)
        )
        return F.cross_entropy(first @ second.T / 0.1, torch.arange(count))

    return _simple(model, optimizer, lambda i: loss(data, 16), lambda: float(loss(_held_out(), 256)))


def fine_tuning(seed: int) -> Workload:
    """A trained body is frozen for 500 steps while a new head learns, then trained with it."""
    data, body, head = _start(seed), mlp(8, 24, 16), nn.Linear(16, 4)
    first, blobs = Blobs(), Blobs(spread=1.5, centers=1)
    before = nn.Linear(16, 4)
    optimizer = torch.optim.Adam([*body.parameters(), *before.parameters()], lr=3e-3)
    for _ in range(300):
        inputs, labels = first.draw(32, data)
        optimizer.zero_grad()
        F.cross_entropy(before(torch.relu(body(inputs))), labels).backward()
        optimizer.step()
    model = nn.Sequential(body, nn.ReLU(), head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    body.requires_grad_(False)

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), labels)

    def training_loss(i: int) -> Tensor:
        if i == 500:
            body.requires_grad_(True)
        return loss(*blobs.draw(16, data))

    optimizer.zero_grad()
    test = blobs.draw(2000, _held_out())
    return _simple(model, optimizer, training_loss, lambda: float(loss(*test)))


WORKLOADS: dict[str, Callable[[int], Workload]] = {
    build.__name__: build
    for build in (
        rare_class,
        tiny_batches,
        alternating_tasks,
        curriculum,
        label_noise,
        policy_gradient,
        gan,
        warm_restarts,
        dropout,
        sequence_lengths,
        contrastive,
        fine_tuning,
    )
}


def all_runs(seeds: int, first_seed: int = 0) -> Iterator[tuple[str, int]]:
    """Yields every workload with every seed."""
    for seed in range(first_seed, first_seed + seeds):
        for name in WORKLOADS:
            yield name, seed
