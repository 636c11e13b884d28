"""What is trained: a transformer, a CNN and an MLP, small enough for seconds, on data held out for judging them.

Batch number i of a seed is the same whenever it is drawn, so that a run can be repeated, and resumed, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.faults.tasks import CNN, MLP, clothes, digits
from benchmarks.recovery.cell import ModelName
from gradvitals.demo import Block, Characters, CharLM, CharLMConfig, shakespeare

Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""

CONTEXT = 32
HELD_OUT = 0.1
"""Share of the text, its end, that is kept for judging."""
JUDGED_WINDOWS = 256
PICTURES = {"cnn": 4000, "mlp": 6000}
JUDGED_PICTURES = 2000
PICTURE_NOISE = {"cnn": 1.0, "mlp": 0.6}
"""Enough for a loss well over zero, of which two percent is more than other batches in another order make."""
WARMUP = 20
DECAY_FLOOR = 0.02
"""Share of the learning rate at the end: low, so that the last batches do not decide how good the run was."""
FIRST_DATA_SEED = 10_000
"""Data of a seed shares nothing with its weights or its faults."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one model is trained."""

    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    weight_decay: float
    batch_size: int


RECIPES: dict[ModelName, Recipe] = {
    "transformer": Recipe(
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.99)),
        weight_decay=0.1,
        batch_size=8,
    ),
    "cnn": Recipe(
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        weight_decay=5e-4,
        batch_size=48,
    ),
    "mlp": Recipe(
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.99)),
        weight_decay=0.01,
        batch_size=64,
    ),
}


class Batches:
    """The training data as a row of numbered batches, and the place in it."""

    def __init__(self, model: ModelName, seed: int) -> None:
        self.index = 0
        """Number of the batch that comes next."""
        self._model, self._seed = model, seed
        self._size = RECIPES[model].batch_size

    def take(self) -> Batch:
        """The next batch."""
        generator = torch.Generator().manual_seed(1_000_000 * (FIRST_DATA_SEED + self._seed) + self.index)
        self.index += 1
        if self._model == "transformer":
            return _windows(_tokens()[0], self._size, generator)
        pictures, labels = _pictures(self._model)[0]
        chosen = torch.randint(len(labels), (self._size,), generator=generator)
        return pictures[chosen], labels[chosen]

    def state_dict(self) -> dict[str, int]:
        """The place."""
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a place."""
        self.index = state["index"]


@dataclass
class Training:
    """A run before its first step, or somewhere in its middle."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    data: Batches
    num_classes: int
    _held_out: list[Batch]

    def validation_loss(self) -> float:
        """Mean loss of what was held out; nan or inf where the model is broken."""
        self.model.eval()
        with torch.no_grad():
            losses = [float(self.model(*batch)) for batch in self._held_out]
        self.model.train()
        return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan


def prepare(model: ModelName, seed: int, steps: int) -> Training:
    """A training run, ready for its first step.

    Args:
        model: Which of the three.
        seed: Of the weights and of the order of the data.
        steps: What the learning rate is scheduled for.
    """
    torch.manual_seed(seed)
    net, num_classes = _build(model)
    recipe = RECIPES[model]
    optimizer = recipe.optimizer(_groups(net, recipe.weight_decay))
    return Training(
        model=net,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, steps)),
        data=Batches(model, seed),
        num_classes=num_classes,
        _held_out=_held_out(model),
    )


def lr_factor(step: int, steps: int) -> float:
    """Share of the learning rate: a linear warm-up, then cosine down to almost nothing."""
    rising = min(1.0, (step + 1) / WARMUP)
    done = min(1.0, step / steps)
    return rising * (DECAY_FLOOR + (1 - DECAY_FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


def _build(model: ModelName) -> tuple[nn.Module, int]:
    if model == "cnn":
        return CNN(width=8), 10
    if model == "mlp":
        return MLP(), 10
    vocab_size = _vocab_size()
    net = CharLM(CharLMConfig(vocab_size=vocab_size, context=CONTEXT, d_model=48, n_layer=2))
    for block in net.blocks:
        assert isinstance(block, Block)
        block.mlp.append(nn.Dropout(0.05))  # so that a run that is resumed must have its random numbers back, too
    return net, vocab_size


def _groups(net: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """As is usual, biases, norms and embeddings are not decayed."""
    decayed = [p for name, p in net.named_parameters() if p.dim() >= 2 and "embed" not in name]
    others = [p for name, p in net.named_parameters() if not (p.dim() >= 2 and "embed" not in name)]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


# -- data -----------------------------------------------------------------------------------------------------------


@cache
def _tokens() -> tuple[Tensor, Tensor]:
    """What is trained on, and what is held out."""
    tokens = Characters(shakespeare()).tokens
    cut = int((1 - HELD_OUT) * len(tokens))
    return tokens[:cut], tokens[cut:]


@cache
def _vocab_size() -> int:
    return Characters(shakespeare()).vocab_size


def _windows(tokens: Tensor, size: int, generator: torch.Generator) -> Batch:
    starts = torch.randint(len(tokens) - CONTEXT, (size, 1), generator=generator)
    places = starts + torch.arange(CONTEXT)
    return tokens[places], tokens[places + 1]


@cache
def _pictures(model: str) -> tuple[Batch, Batch]:
    """What is trained on, and what is held out. The same for all seeds: they differ in weights and order."""
    draw = clothes if model == "cnn" else digits
    noise = PICTURE_NOISE[model]
    known = draw(PICTURES[model], torch.Generator().manual_seed(FIRST_DATA_SEED), noise=noise)
    return known, draw(JUDGED_PICTURES, torch.Generator().manual_seed(FIRST_DATA_SEED + 1), noise=noise)


@cache
def _held_out(model: ModelName) -> list[Batch]:
    if model == "transformer":
        return [_windows(_tokens()[1], JUDGED_WINDOWS, torch.Generator().manual_seed(FIRST_DATA_SEED))]
    return [_pictures(model)[1]]
