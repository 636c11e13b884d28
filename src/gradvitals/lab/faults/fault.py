"""What a fault is: a name, where and when it is planted, what would recognise it, and how it changes a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from gradvitals.lab.faults.tasks import MicroBatch, Recipe, Task, Training

MIDDLE = 120
"""About where a fault of kind "step" is planted: late enough for every detector to have filled its window."""

SEED_SHIFT = 3
"""Each seed plants a few steps later than the last, so that no schedule falls in with it by chance."""


def _same_recipe(recipe: Recipe) -> Recipe:
    return recipe


def _same_model(model: nn.Module) -> None:
    """Leave the model as it is."""


def _same_training(training: Training, step: int) -> None:
    """Leave the training run as it is."""


def _same_batches(training: Training, batches: list[MicroBatch], age: int) -> list[MicroBatch]:
    return batches


def _same_loss(loss: Tensor) -> Tensor:
    return loss


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way for a run to go wrong. Where no function is given, everything is as in the healthy twin."""

    id: str
    description: str
    kind: Literal["step", "slow"]
    """Whether it strikes at one step, or shows only over many."""
    tasks: tuple[Task, ...]
    finds: tuple[str, ...]
    """Ids of findings that name its symptom or its cause; any of them counts as having recognised it."""
    later: bool = True
    """Planted in the middle of the run, else there from the start."""
    place: Mapping[Task, Sequence[str]] = field(default_factory=dict)
    """The layers it hits, as the beginnings of names; none where it hits the whole model."""

    change: Callable[[Recipe], Recipe] = _same_recipe
    """Changes the recipe, before anything is built."""
    build: Callable[[nn.Module], None] = _same_model
    """Changes the model, before the optimizer sees it."""
    attach: Callable[[Training, int], None] = _same_training
    """Called once with the step it is planted at, when everything stands and before the monitor watches."""
    batches: Callable[[Training, list[MicroBatch], int], list[MicroBatch]] = _same_batches
    """Changes the data. This and what follows is called only from the planted step on; the last argument is how many
    steps ago that was."""
    loss: Callable[[Tensor], Tensor] = _same_loss
    before_step: Callable[[Training, int], None] = _same_training
    """Called between the gradients and the optimizer's step."""
    lr_factor: float = 1.0

    def planted(self, seed: int) -> int:
        """The step it is planted at."""
        return MIDDLE + SEED_SHIFT * (seed % 10) if self.later else 0

    def place_in(self, task: str) -> tuple[str, ...]:
        """The layers it hits in one model."""
        return next((tuple(layers) for name, layers in self.place.items() if name == task), ())
