"""Healthy runs: nothing is wrong with them, and whatever is found in them is a false alarm.

Three models, each with two optimizers and two schedules; then dropout, augmentation, gradients as small
as those of a large model, and the recurrent network.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradvitals.lab.faults.tasks import RECIPES, Recipe, Task, small_gradients, with_changes

OTHER_OPTIMIZER: dict[Task, Recipe] = {
    "mlp": with_changes(RECIPES["mlp"], optimizer="sgd", lr=0.05, weight_decay=5e-4),
    "cnn": with_changes(RECIPES["cnn"], optimizer="adamw", lr=4e-3, weight_decay=0.05),
    "transformer": with_changes(RECIPES["transformer"], optimizer="sgd", lr=0.3, weight_decay=0.0),
}


@dataclass(frozen=True, kw_only=True)
class Control:
    """A healthy run by name."""

    id: str
    recipe: Recipe


def _controls() -> list[Control]:
    found = []
    for task, other in OTHER_OPTIMIZER.items():
        for recipe in (RECIPES[task], other):
            for schedule in ("cosine", "step"):
                found.append(
                    Control(id=f"{recipe.optimizer}_{schedule}", recipe=with_changes(recipe, schedule=schedule))
                )
        found.append(Control(id="dropout", recipe=with_changes(RECIPES[task], dropout=0.1)))
        found.append(Control(id="small_gradients", recipe=small_gradients(RECIPES[task])))
    found += [Control(id="augment", recipe=with_changes(RECIPES[task], augment=True)) for task in ("mlp", "cnn")]
    found.append(Control(id="usual", recipe=RECIPES["rnn"]))
    return found


CONTROLS: tuple[Control, ...] = tuple(_controls())
