"""Healthy runs: nothing is wrong with them, and whatever is found in them is a false alarm.

Three models, each with two optimizers and two schedules; then dropout, augmentation, gradients as small as those of a
large model, and the recurrent network. Then the loops that people begin with: one linear layer, a plain classifier, a
bias before a batch norm, a schedule down to 0, a new head on frozen layers, an LSTM with clipping, a GAN.
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
    return found + _of_beginners()


def _of_beginners() -> list[Control]:
    mlp, cnn = RECIPES["mlp"], OTHER_OPTIMIZER["cnn"]
    biased = with_changes(
        RECIPES["cnn"], lr=0.05, weight_decay=0.0, schedule="constant", micro_batch_size=32, model={"bias": True}
    )
    one_layer = with_changes(
        OTHER_OPTIMIZER["mlp"], lr=0.1, weight_decay=0.0, schedule="constant", micro_batches=1, micro_batch_size=1024
    )
    plain = with_changes(mlp, schedule="constant", micro_batches=1, micro_batch_size=64, lr=1e-3)
    return [
        Control(id="regression", recipe=RECIPES["linear"]),
        Control(id="logistic", recipe=with_changes(one_layer, model={"depth": 0})),
        Control(id="conv_bias", recipe=biased),
        Control(id="cosine_to_0", recipe=with_changes(mlp, floor=0.0, micro_batches=1, micro_batch_size=64)),
        Control(id="new_head", recipe=with_changes(cnn, frozen=("stages",), schedule="constant")),
        Control(id="plain", recipe=plain),
        Control(id="lstm", recipe=with_changes(RECIPES["rnn"], model={"lstm": True}, lr=3e-3)),
        Control(id="two_sides", recipe=RECIPES["gan"]),
    ]


CONTROLS: tuple[Control, ...] = tuple(_controls())
