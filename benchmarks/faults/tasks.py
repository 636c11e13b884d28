"""What the zoo trains: drawn pictures and text, small models, and recipes that `prepare` turns into training runs.

A run depends on its recipe and seed alone. Pictures are drawn, not downloaded: 8×8 digits and 28×28 silhouettes of
clothes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradvitals.demo import Block, Characters, CharLM, CharLMConfig, shakespeare

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


Activation = Callable[[Tensor], Tensor]


class MLP(nn.Module):
    """A plain classifier of small pictures."""

    def __init__(
        self, *, depth: int = 4, width: int = 128, dropout: float = 0.0, activation: Activation = F.relu
    ) -> None:
        super().__init__()
        widths = [64] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))
        self.head = nn.Linear(widths[-1], NUM_CLASSES)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy."""
        x = inputs
        for layer in self.layers:
            x = self.dropout(self.activation(layer(x)))
        return F.cross_entropy(self.head(x), targets)


class CNN(nn.Module):
    """Three stages of convolution, batch norm and ReLU, each halving the picture."""

    def __init__(self, *, width: int = 12, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        channels = (1, width, 2 * width, 4 * width)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 3, 2, padding=1, bias=bias), nn.BatchNorm2d(after), nn.ReLU())
            for before, after in pairwise(channels)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels[-1], NUM_CLASSES)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy."""
        x = inputs
        for stage in self.stages:
            x = stage(x)
        return F.cross_entropy(self.head(self.dropout(x.mean((2, 3)))), targets)


class PostLN(nn.Module):
    """A transformer block as first published: the sum is normalised, so that no path around the layers stays."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.attn, self.mlp = block.attn, block.mlp
        self.norm1, self.norm2 = block.norm1, block.norm2

    def forward(self, x: Tensor) -> Tensor:
        """One layer of the stream."""
        x = self.norm1(x + self.attn(x))
        out: Tensor = self.norm2(x + self.mlp(x))
        return out


def post_ln(model: CharLM) -> CharLM:
    """The same transformer with its norms moved behind the sums, and the usual larger weights of that time."""
    model.blocks = nn.ModuleList(PostLN(block) for block in model.blocks if isinstance(block, Block))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return model


class CharRNN(nn.Module):
    """A plain recurrent network, or an LSTM, that reads text and predicts each next character."""

    def __init__(self, *, vocab_size: int, width: int = 64, gain: float = 1.0, lstm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.recur = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab_size)
        nn.init.orthogonal_(self.recur.weight, gain)
        nn.init.zeros_(self.recur.bias)
        self.lstm = nn.LSTM(width, width, batch_first=True) if lstm else None
        if lstm:
            del self.recur

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the targets, in nats a character."""
        inputs = self.embed(tokens)
        if self.lstm is not None:
            return F.cross_entropy(self.head(self.lstm(inputs)[0]).flatten(0, 1), targets.flatten())
        state = torch.zeros_like(inputs[:, 0])
        states = []
        for position in range(tokens.shape[1]):
            state = torch.tanh(self.recur(state) + inputs[:, position])
            states.append(state)
        return F.cross_entropy(self.head(torch.stack(states, 1)).flatten(0, 1), targets.flatten())


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
    pretrained = torch.Generator().manual_seed(3000 + seed)
    for name, parameter in model.named_parameters():
        if recipe.frozen and name.startswith(recipe.frozen):  # no longer as torch initialized it
            parameter.requires_grad_(False).mul_(1 + 0.3 * torch.randn(parameter.shape, generator=pretrained))
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
