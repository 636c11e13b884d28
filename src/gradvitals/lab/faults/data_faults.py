"""Faults of the data: what comes in is wrong, too little, too much, or always the same."""

from __future__ import annotations

import torch
from torch import Tensor

from gradvitals.lab.faults.fault import Fault
from gradvitals.lab.faults.tasks import MicroBatch, Recipe, Training, with_changes

UNNORMALISED = 20.0
"""How much larger pictures are that nobody divided by their spread."""

RECURS_EVERY = 20


def corrupt(training: Training, batch: MicroBatch) -> MicroBatch:
    """Garbage: pictures that were not normalised, or letters at random; and targets that belong to nothing."""
    inputs, targets = batch
    classes = training.source.num_classes
    if inputs.is_floating_point():
        inputs = UNNORMALISED * inputs
    else:
        inputs = torch.randint(classes, inputs.shape, generator=training.generator)
    return inputs, torch.randint(classes, targets.shape, generator=training.generator)


def _corrupt_once(training: Training, batches: list[MicroBatch], age: int) -> list[MicroBatch]:
    return [corrupt(training, batch) for batch in batches] if age == 0 else batches


def _corrupt_now_and_then(training: Training, batches: list[MicroBatch], age: int) -> list[MicroBatch]:
    return [corrupt(training, batch) for batch in batches] if age % RECURS_EVERY == 0 else batches


def _shuffle(training: Training, batches: list[MicroBatch], age: int) -> list[MicroBatch]:
    def shuffled(targets: Tensor) -> Tensor:
        order = torch.randperm(targets.numel(), generator=training.generator)
        return targets.flatten()[order].view_as(targets)

    return [(inputs, shuffled(targets)) for inputs, targets in batches]


def _repeat_first(training: Training, batches: list[MicroBatch], age: int) -> list[MicroBatch]:
    return [batches[0]] * len(batches)


def _batch_of_two(recipe: Recipe) -> Recipe:
    micro_batches = min(2, recipe.micro_batches)
    return with_changes(recipe, micro_batches=micro_batches, micro_batch_size=2 // micro_batches)


def _huge_batch(recipe: Recipe) -> Recipe:
    """Split, as large batches are."""
    size = {"mlp": 2048, "cnn": 512, "transformer": 32, "rnn": 32}[recipe.task]
    return with_changes(recipe, micro_batches=4, micro_batch_size=size, stop=150 if recipe.task == "mlp" else 80)


DATA_FAULTS = (
    Fault(
        id="bad_batch",
        description="one corrupted batch: inputs not normalised or random text, random targets",
        kind="step",
        tasks=("mlp", "cnn", "transformer"),
        finds=("explosion", "loss_spike", "update_spike"),
        batches=_corrupt_once,
    ),
    Fault(
        id="bad_batches",
        description=f"the same at every {RECURS_EVERY}th step from then on",
        kind="step",
        tasks=("mlp", "cnn", "transformer"),
        finds=("explosion", "loss_spike", "update_spike", "unstable_norm", "oscillation"),
        batches=_corrupt_now_and_then,
    ),
    Fault(
        id="shuffled_labels",
        description="targets shuffled within each batch, from the start",
        kind="slow",
        tasks=("mlp", "cnn", "transformer"),
        finds=("loss_plateau", "near_zero_initial_gsnr", "high_effort_low_progress", "noisy_gradients"),
        later=False,
        batches=_shuffle,
    ),
    Fault(
        id="labels_shuffled_later",
        description="targets shuffled within each batch, from one step on",
        kind="step",
        tasks=("mlp", "cnn", "transformer"),
        finds=("explosion", "loss_spike", "loss_rising", "sudden_gsnr_drop", "high_effort_low_progress"),
        batches=_shuffle,
    ),
    Fault(
        id="batch_of_2",
        description="two samples a step at the learning rate of a large batch",
        kind="slow",
        tasks=("mlp", "cnn", "transformer"),
        finds=("batch_too_small", "noisy_gradients", "oscillation", "unstable_norm", "high_effort_low_progress"),
        later=False,
        change=_batch_of_two,
    ),
    Fault(
        id="huge_batch",
        description="a batch far over the noise scale, in four micro-batches",
        kind="slow",
        tasks=("mlp", "cnn", "transformer"),
        finds=("batch_too_large",),
        later=False,
        change=_huge_batch,
    ),
    Fault(
        id="same_micro_batches",
        description="every micro-batch of a step holds the same samples",
        kind="slow",
        tasks=("mlp", "transformer"),
        finds=("identical_microbatches", "low_dispersion"),
        later=False,
        batches=_repeat_first,
    ),
)
