"""What the zoo trains: a recipe says how, and `prepare` makes a training run of it that depends on its seed alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradvitals.lab.char_lm import Block, Characters, CharLM, CharLMConfig, shakespeare
from gradvitals.lab.faults.beginners import Discriminator, LinearRegression, Rival, line
from gradvitals.lab.faults.models import CNN, MLP, CharRNN, post_ln
from gradvitals.lab.faults.pictures import clothes, digits

Task = Literal["mlp", "cnn", "transformer", "rnn", "linear", "gan"]
MicroBatch = tuple[Tensor, Tensor]
"""Inputs and targets."""

NUM_PICTURES = {"mlp": 6000, "cnn": 3000}
CONTEXT = 32
DECAY_FLOOR = 0.1


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run but its seed."""

    task: Task
    optimizer: Literal["adamw", "sgd"]
    lr: float
    weight_decay: float
    schedule: Literal["cosine", "step", "constant"] = "cosine"
    """Cosine down to `floor`; or two drops to a third; both after a warmup. Or no change at all."""
    floor: float = DECAY_FLOOR
    """Share of the learning rate that a cosine schedule ends at."""
    warmup: int = 20
    micro_batches: int = 1
    micro_batch_size: int = 64
    max_norm: float | None = None
    steps: int = 200
    """What the schedule is made for."""
    stop: int | None = None
    """Ends after this many steps, where the fault shows early and steps are slow; None goes on to the end."""
    dropout: float = 0.0
    augment: bool = False
    """Pictures are moved a little, and mirrored if they are clothes; text begins anywhere anyway."""
    half: bool = False
    """Weights, activations and gradients in float16."""
    autocast: bool = False
    """Matrix products in float16, weights in float32."""
    loss_weight: float = 1.0
    """What the loss is multiplied by before its gradient is taken; it is shown without."""
    frozen: tuple[str, ...] = ()
    """Layers that are not trained, as the beginnings of names: a backbone under a new head."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model, where they are not the usual ones."""

    @property
    def num_steps(self) -> int:
        """How many steps are made."""
        return self.steps if self.stop is None else min(self.steps, self.stop)

    @property
    def batch_size(self) -> int:
        """Samples of one optimizer step."""
        return self.micro_batches * self.micro_batch_size

    def lr_factor(self, step: int) -> float:
        """Share of the learning rate at a step."""
        if self.schedule == "constant":
            return 1.0
        rising = min(1.0, (step + 1) / self.warmup)
        done = step / self.steps
        if self.schedule == "step":
            return rising * (1.0 if done < 0.6 else 0.3 if done < 0.85 else 0.1)
        return rising * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


RECIPES: dict[Task, Recipe] = {
    "mlp": Recipe(task="mlp", optimizer="adamw", lr=2e-3, weight_decay=0.01, micro_batches=4, micro_batch_size=16),
    "cnn": Recipe(task="cnn", optimizer="sgd", lr=0.2, weight_decay=5e-4),
    "transformer": Recipe(
        task="transformer",
        optimizer="adamw",
        lr=3e-3,
        weight_decay=0.1,
        micro_batches=4,
        micro_batch_size=4,
        max_norm=1.0,
    ),
    "rnn": Recipe(
        task="rnn", optimizer="adamw", lr=2e-3, weight_decay=0.01, micro_batches=2, micro_batch_size=8, max_norm=1.0
    ),
    "linear": Recipe(task="linear", optimizer="sgd", lr=0.01, weight_decay=0.0, schedule="constant"),
    "gan": Recipe(
        task="gan", optimizer="adamw", lr=2e-4, weight_decay=0.0, schedule="constant", micro_batches=2, steps=400
    ),
}
"""How each model is usually trained: what faults are planted in."""


class Source:
    """Where batches come from."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(1000 + seed)
        self.augment = recipe.augment
        self.text = Characters(_text(), seed=1000 + seed) if recipe.task in ("transformer", "rnn") else None
        if self.text is None and recipe.task != "linear":
            draw = clothes if recipe.task == "cnn" else digits
            number = NUM_PICTURES.get(recipe.task, NUM_PICTURES["mlp"])
            self.pictures, self.labels = draw(number, torch.Generator().manual_seed(7 + seed))
        elif recipe.task == "linear":
            self.pictures, self.labels = line(torch.Generator().manual_seed(7 + seed))
        self.rival: Rival | None = None

    @property
    def num_classes(self) -> int:
        """How many different targets there are."""
        return self.text.vocab_size if self.text is not None else 10

    def batch(self, size: int) -> MicroBatch:
        """The next micro-batch."""
        if self.text is not None:
            return self.text.batch(size, CONTEXT)
        if self.rival is not None and self.rival.is_next():
            return self.rival.batch(size)
        chosen = torch.randint(len(self.labels), (size,), generator=self.generator)
        pictures = self.pictures[chosen]
        if self.rival is not None:
            return pictures, torch.ones(size, 1)
        return (self._vary(pictures) if self.augment else pictures), self.labels[chosen]

    def _vary(self, pictures: Tensor) -> Tensor:
        square = pictures.view(len(pictures), *((8, 8) if pictures.dim() == 2 else (28, 28)))
        side = square.shape[1]
        reach = side // 8  # one pixel of eight, three of twenty-eight
        shift = torch.randint(-reach, reach + 1, (2, len(square), 1), generator=self.generator)
        down, across = (torch.arange(side) + shift) % side
        moved = square[torch.arange(len(square))[:, None, None], down[:, :, None], across[:, None, :]]
        if pictures.dim() == 2:
            return moved.flatten(1)
        mirrored = torch.rand(len(square), 1, 1, generator=self.generator) < 0.5
        return torch.where(mirrored, moved.flip(2), moved).unsqueeze(1)


@cache
def _text() -> str:
    return shakespeare()


@dataclass
class Training:
    """A run that can be stepped. What a fault changes, it changes here."""

    recipe: Recipe
    model: nn.Module
    optimizer: torch.optim.Optimizer
    source: Source
    loss: Callable[[Tensor, Tensor], Tensor]
    generator: torch.Generator
    """For the randomness of faults, so that the data goes on as in the healthy twin."""

    def batches(self) -> list[MicroBatch]:
        """The micro-batches of the next step."""
        return [self.source.batch(self.recipe.micro_batch_size) for _ in range(self.recipe.micro_batches)]

    def set_lr(self, step: int, factor: float = 1.0) -> None:
        """Follow the schedule."""
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("lr_scale", 1.0) * factor * self.recipe.lr * self.recipe.lr_factor(step)

    def layer(self, name: str) -> nn.Module:
        """A part of the model."""
        return self.model.get_submodule(name)


def prepare(recipe: Recipe, seed: int, *, build: Callable[[nn.Module], None] | None = None) -> Training:
    """A training run, ready for its first step.

    Args:
        recipe: How to train.
        seed: Of the weights, the data and the order of the data.
        build: Changes the model before the optimizer sees it.
    """
    torch.manual_seed(seed)
    source = Source(recipe, seed)
    model = _model(recipe, source)
    if build is not None:
        build(model)
    if recipe.half:
        model.half()
    if isinstance(model, Discriminator):
        source.rival = Rival(model, recipe.lr)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(recipe.frozen) if recipe.frozen else True)
    return Training(
        recipe=recipe,
        model=model,
        optimizer=_optimizer(recipe, model),
        source=source,
        loss=_loss(recipe, model),
        generator=torch.Generator().manual_seed(2000 + seed),
    )


def _model(recipe: Recipe, source: Source) -> nn.Module:
    options = dict(recipe.model)
    if recipe.task == "mlp":
        return MLP(dropout=recipe.dropout, **options)
    if recipe.task == "cnn":
        return CNN(dropout=recipe.dropout, **options)
    if recipe.task == "rnn":
        return CharRNN(vocab_size=source.num_classes, **options)
    if recipe.task == "linear":
        return LinearRegression()
    if recipe.task == "gan":
        return Discriminator()
    norms_behind = options.pop("post_ln", False)
    shape = CharLMConfig(vocab_size=source.num_classes, **{"context": CONTEXT, "d_model": 48, "n_layer": 3, **options})
    model = CharLM(shape)
    if recipe.dropout:
        for block in model.blocks:
            assert isinstance(block, Block)
            block.mlp.append(nn.Dropout(recipe.dropout))
    return post_ln(model) if norms_behind else model


def _optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """As is usual, biases, norms and embeddings are not decayed."""
    decayed = [p for name, p in model.named_parameters() if p.dim() >= 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if not (p.dim() >= 2 and "embed" not in name)]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.99))
    return torch.optim.SGD(groups, lr=recipe.lr, momentum=0.9)


def _loss(recipe: Recipe, model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16, enabled=recipe.autocast):
            mean: Tensor = model(inputs.half() if recipe.half and inputs.is_floating_point() else inputs, targets)
        return mean

    return loss


def with_changes(recipe: Recipe, **changes: Any) -> Recipe:
    """The same recipe but for some of it; options of the model are added to those it has."""
    if "model" in changes:
        changes["model"] = {**recipe.model, **changes["model"]}
    return replace(recipe, **changes)


def small_gradients(recipe: Recipe) -> Recipe:
    """The same run with gradients as small as those of a large model, by a weight on the loss.

    Adam does not feel it, and for SGD the learning rate makes up for it.
    """
    weight = 1e-5 if recipe.task == "mlp" else 1e-4
    back = 1 / weight if recipe.optimizer == "sgd" else 1.0
    return with_changes(
        recipe,
        loss_weight=weight,
        lr=back * recipe.lr,
        weight_decay=recipe.weight_decay / back,
        max_norm=None if recipe.max_norm is None else weight * recipe.max_norm,
    )
