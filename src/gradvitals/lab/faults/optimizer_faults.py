"""Faults of the step: learning rate, momentum, decay, and what is left out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradvitals.lab.faults.fault import Fault
from gradvitals.lab.faults.tasks import Recipe, Task, Training, with_changes

ALL: tuple[Task, ...] = ("mlp", "cnn", "transformer")
FROZEN: dict[Task, str] = {"mlp": "layers.2", "cnn": "stages.1", "transformer": "blocks.1.mlp.0"}
"""The layer that is left behind."""

DIVERGES = ("explosion", "loss_rising", "nonfinite", "loss_nonfinite")

POISON = 30.0
"""How many times a usual step the poisoned momentum asks for."""

POISON_ADAM = 10.0
"""The same for Adam, in units of its own scale: most of its steps are a third of the learning rate."""


def _parameters(training: Training, layer: str) -> set[Tensor]:
    return set(training.layer(layer).parameters())


def _poison_momentum(training: Training, age: int) -> None:
    """The average points anywhere and is far too long, while the gradients themselves are fine."""
    if age != 0:
        return
    for state in training.optimizer.state.values():
        if "exp_avg" in state:
            noise = torch.randn(state["exp_avg"].shape, generator=training.generator)
            state["exp_avg"].add_(POISON_ADAM * noise * state["exp_avg_sq"].sqrt())
        else:
            average = state["momentum_buffer"]
            noise = torch.randn(average.shape, generator=training.generator)
            average.add_(noise * (POISON * average.norm() / noise.norm()))


def _leave_out(training: Training, planted: int) -> None:
    left = _parameters(training, FROZEN[training.recipe.task])
    for group in training.optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter not in left]


def _rate_of_zero(training: Training, planted: int) -> None:
    left = _parameters(training, FROZEN[training.recipe.task])
    _leave_out(training, planted)
    training.optimizer.add_param_group({"params": list(left), "lr_scale": 0.0})


def _detach(training: Training, planted: int) -> None:
    """The layer computes with copies of its weights that the gradient does not reach."""
    layer = training.layer(FROZEN[training.recipe.task])

    def hide(module: nn.Module, *args: object) -> None:
        for part in module.modules():
            for name, parameter in list(part._parameters.items()):
                if parameter is not None:
                    hidden[part, name] = parameter
                    del part._parameters[name]
                    setattr(part, name, parameter.detach())

    def show(module: nn.Module, *args: object) -> None:
        for (part, name), parameter in hidden.items():
            delattr(part, name)
            part.register_parameter(name, parameter)
        hidden.clear()

    hidden: dict[tuple[nn.Module, str], nn.Parameter] = {}
    layer.register_forward_pre_hook(hide)
    layer.register_forward_hook(show)


def _never_zero(training: Training, planted: int) -> None:
    """The loop calls it and nothing happens, as if it did not."""
    training.optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]


def _without_schedule(recipe: Recipe) -> Recipe:
    """As a plain loop is: the full learning rate at every step."""
    return with_changes(recipe, schedule="constant")


def _strong_decay(recipe: Recipe) -> Recipe:
    """Ten percent off every weight at every step."""
    return with_changes(recipe, weight_decay=0.1 / recipe.lr)


OPTIMIZER_FAULTS = (
    Fault(
        id="lr_x30",
        description="learning rate × 30 from one step on",
        kind="step",
        tasks=ALL,
        finds=(*DIVERGES, "update_spike", "update_ratio", "loss_spike", "oscillation"),
        lr_factor=30.0,
    ),
    Fault(
        id="lr_x30_always",
        description="learning rate × 30 from the start to the end, without a warmup",
        kind="slow",
        tasks=ALL,
        finds=("lr_too_high",),
        later=False,
        change=_without_schedule,
        lr_factor=30.0,
    ),
    Fault(
        id="lr_x0.001",
        description="learning rate × 0.001 from the start",
        kind="slow",
        tasks=ALL,
        finds=("unchanged_weights", "update_ratio", "loss_plateau"),
        later=False,
        lr_factor=0.001,
    ),
    Fault(
        id="momentum_poisoned",
        description="noise of 30 times its length added to the optimizer's momentum at one step",
        kind="step",
        tasks=ALL,
        finds=("update_spike", "update_ratio", "loss_spike", "explosion"),
        before_step=_poison_momentum,
    ),
    Fault(
        id="weight_decay",
        description="weight decay that takes a tenth of the weights at every step",
        kind="slow",
        tasks=ALL,
        finds=("update_ratio", "loss_plateau", "vanishing", "high_effort_low_progress"),
        later=False,
        change=_strong_decay,
    ),
    Fault(
        id="never_zeroed",
        description="gradients are not zeroed between steps",
        kind="slow",
        tasks=ALL,
        finds=("stale_gradients",),
        later=False,
        attach=_never_zero,
    ),
    Fault(
        id="frozen_left_out",
        description="one layer was not given to the optimizer",
        kind="slow",
        tasks=ALL,
        finds=("unchanged_weights", "update_ratio"),
        later=False,
        place={task: (layer,) for task, layer in FROZEN.items()},
        attach=_leave_out,
    ),
    Fault(
        id="frozen_lr_0",
        description="one layer is in a parameter group with a learning rate of 0",
        kind="slow",
        tasks=ALL,
        finds=("unchanged_weights", "update_ratio"),
        later=False,
        place={task: (layer,) for task, layer in FROZEN.items()},
        attach=_rate_of_zero,
    ),
    Fault(
        id="frozen_detached",
        description="one layer's weights are detached in the forward pass",
        kind="slow",
        tasks=ALL,
        finds=("dead_tensor", "unchanged_weights"),
        later=False,
        place={task: (layer,) for task, layer in FROZEN.items()},
        attach=_detach,
    ),
)
