"""The zoo: every fault with the place and step it is planted at and the findings that recognize it, and healthy runs.

Whatever is found in a healthy run is a false alarm. There are three models, each with two optimizers and two schedules;
dropout, augmentation, gradients as small as those of a large model, a recurrent network; and the loops that people
start with: one linear layer, a bias before a batch norm, a schedule down to 0, a new head on frozen layers, an LSTM
with clipping, a GAN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from benchmarks.faults.tasks import RECIPES, MicroBatch, Recipe, Task, Training, small_gradients, with_changes
from gradvitals.demo import Attention

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


SMALL_MODELS: tuple[Task, ...] = ("mlp", "cnn", "transformer")
BROKEN: dict[Task, str] = {"mlp": "layers.1", "cnn": "stages.2", "transformer": "blocks.1"}
"""The layer that gets a NaN."""

DEAD_BLOCK, DEAD_HEAD = "blocks.1.attn", 2
STACK_DEPTH = 20


def _inject_nan(training: Training, planted: int) -> None:
    """One element of one gradient, as a bad kernel or a broken memory cell would do it."""
    layer = training.layer(BROKEN[training.recipe.task])
    weight = next(parameter for parameter in layer.parameters() if parameter.dim() >= 2)
    calls = 0

    def spoil(grad: Tensor) -> Tensor:
        nonlocal calls
        step, first = divmod(calls, training.recipe.micro_batches)
        calls += 1
        if step != planted or first != 0:
            return grad
        spoilt = grad.clone()
        spoilt.view(-1)[0] = torch.nan
        return spoilt

    weight.register_hook(spoil)


def _scale_weights(model: nn.Module, *, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(factor)


def _kill_head(model: nn.Module) -> None:
    """What one head says never reaches the stream, as after pruning that forgot to take it out."""
    attention = model.get_submodule(DEAD_BLOCK)
    assert isinstance(attention, Attention)
    width = attention.proj.in_features // attention.n_head
    mask = torch.ones(attention.proj.in_features)
    mask[DEAD_HEAD * width : (DEAD_HEAD + 1) * width] = 0

    def silence(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] * mask, *args[1:])

    attention.proj.register_forward_pre_hook(silence)


def _sigmoid_stack(recipe: Recipe) -> Recipe:
    return with_changes(recipe, model={"depth": STACK_DEPTH, "width": 64, "activation": torch.sigmoid})


def _post_ln(recipe: Recipe) -> Recipe:
    """Deep, normalised behind the sums, and without the warmup that this needs."""
    return with_changes(recipe, schedule="constant", stop=120, model={"post_ln": True, "n_layer": 10, "d_model": 32})


def _explode(recipe: Recipe) -> Recipe:
    return with_changes(recipe, max_norm=None, model={"gain": 4.0})


def _pure_float16(recipe: Recipe) -> Recipe:
    """Also the optimizer's own numbers: its eps of 1e-8 becomes zero."""
    return with_changes(recipe, half=True, stop=40)


def _unscaled_float16(recipe: Recipe) -> Recipe:
    """Autocast without a loss scale.

    Gradients of so small a model are too large to suffer, so they are made as small as those of a large one. In
    float32 that does no harm: the control `small_gradients` is the healthy twin.
    """
    return with_changes(small_gradients(recipe), autocast=True, stop=60)


MODEL_FAULTS = (
    Fault(
        id="nan_in_layer",
        description="one NaN in the gradient of one layer",
        kind="step",
        tasks=SMALL_MODELS,
        finds=("nonfinite", "loss_nonfinite"),
        place={task: (layer,) for task, layer in BROKEN.items()},
        attach=_inject_nan,
    ),
    Fault(
        id="sigmoid_stack",
        description=f"{STACK_DEPTH} layers of sigmoids",
        kind="slow",
        tasks=("mlp",),
        finds=("vanishing", "deep_layer_collapse"),
        later=False,
        place={"mlp": tuple(f"layers.{i}" for i in range(STACK_DEPTH // 2))},
        change=_sigmoid_stack,
    ),
    Fault(
        id="init_x100",
        description="all weights 100 times too large at the start",
        kind="slow",
        tasks=SMALL_MODELS,
        finds=("explosion", "update_ratio", "unchanged_weights", "clip_saturated", "loss_plateau"),
        later=False,
        build=partial(_scale_weights, factor=100.0),
    ),
    Fault(
        id="init_x0.01",
        description="all weights 100 times too small at the start",
        kind="slow",
        tasks=("mlp", "transformer"),  # batch norm makes up for it in the CNN
        finds=("vanishing", "update_ratio", "loss_plateau", "deep_layer_collapse"),
        later=False,
        build=partial(_scale_weights, factor=0.01),
    ),
    Fault(
        id="post_ln",
        description="a deep transformer with its norms behind the sums and no warmup",
        kind="slow",
        tasks=("transformer",),
        finds=("warmup_needed", "vanishing", "deep_layer_collapse", "explosion", "loss_plateau", "update_ratio"),
        later=False,
        change=_post_ln,
    ),
    Fault(
        id="dead_head",
        description="one attention head's output is masked",
        kind="slow",
        tasks=("transformer",),
        finds=("sparse_feature_noise", "dead_tensor"),
        later=False,
        place={"transformer": (DEAD_BLOCK,)},
        build=_kill_head,
    ),
    Fault(
        id="fp16_unscaled",
        description="autocast to float16 without a loss scale, gradients as small as in a large model",
        kind="slow",
        tasks=SMALL_MODELS,
        finds=("precision_underflow", "dead_tensor"),
        later=False,
        change=_unscaled_float16,
    ),
    Fault(
        id="fp16_weights",
        description="weights, activations, gradients and the optimizer's moments in float16",
        kind="slow",
        tasks=("mlp", "transformer"),
        finds=("precision_underflow", "nonfinite", "loss_nonfinite"),
        later=False,
        change=_pure_float16,
    ),
    Fault(
        id="exploding_rnn",
        description="a recurrent network whose weights multiply the gradient at every character, without clipping",
        kind="slow",
        tasks=("rnn",),
        finds=("explosion", "nonfinite", "unstable_norm", "loss_nonfinite"),
        later=False,
        place={"rnn": ("recur", "embed")},
        change=_explode,
    ),
    Fault(
        id="loss_x1e6",
        description="the loss multiplied by a million, and never divided again",
        kind="slow",
        tasks=SMALL_MODELS,
        finds=("explosion", "clip_saturated", "update_ratio", "nonfinite", "loss_nonfinite"),
        later=False,
        loss=lambda loss: 1e6 * loss,
    ),
)


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
        tasks=SMALL_MODELS,
        finds=(*DIVERGES, "update_spike", "update_ratio", "loss_spike", "oscillation"),
        lr_factor=30.0,
    ),
    Fault(
        id="lr_x30_always",
        description="learning rate × 30 from the start to the end, without a warmup",
        kind="slow",
        tasks=SMALL_MODELS,
        finds=("lr_too_high",),
        later=False,
        change=_without_schedule,
        lr_factor=30.0,
    ),
    Fault(
        id="lr_x0.001",
        description="learning rate × 0.001 from the start",
        kind="slow",
        tasks=SMALL_MODELS,
        finds=("unchanged_weights", "update_ratio", "loss_plateau"),
        later=False,
        lr_factor=0.001,
    ),
    Fault(
        id="momentum_poisoned",
        description="noise of 30 times its length added to the optimizer's momentum at one step",
        kind="step",
        tasks=SMALL_MODELS,
        finds=("update_spike", "update_ratio", "loss_spike", "explosion"),
        before_step=_poison_momentum,
    ),
    Fault(
        id="weight_decay",
        description="weight decay that takes a tenth of the weights at every step",
        kind="slow",
        tasks=SMALL_MODELS,
        finds=("strong_decay", "update_ratio", "loss_plateau", "vanishing", "high_effort_low_progress"),
        later=False,
        change=_strong_decay,
    ),
    Fault(
        id="never_zeroed",
        description="gradients are not zeroed between steps",
        kind="slow",
        tasks=SMALL_MODELS,
        finds=("stale_gradients",),
        later=False,
        attach=_never_zero,
    ),
    Fault(
        id="frozen_left_out",
        description="one layer was not given to the optimizer",
        kind="slow",
        tasks=SMALL_MODELS,
        finds=("unchanged_weights", "update_ratio"),
        later=False,
        place={task: (layer,) for task, layer in FROZEN.items()},
        attach=_leave_out,
    ),
    Fault(
        id="frozen_lr_0",
        description="one layer is in a parameter group with a learning rate of 0",
        kind="slow",
        tasks=SMALL_MODELS,
        finds=("unchanged_weights", "update_ratio"),
        later=False,
        place={task: (layer,) for task, layer in FROZEN.items()},
        attach=_rate_of_zero,
    ),
    Fault(
        id="frozen_detached",
        description="one layer's weights are detached in the forward pass",
        kind="slow",
        tasks=SMALL_MODELS,
        finds=("dead_tensor", "unchanged_weights"),
        later=False,
        place={task: (layer,) for task, layer in FROZEN.items()},
        attach=_detach,
    ),
)


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


FAULTS: dict[str, Fault] = {fault.id: fault for fault in (*DATA_FAULTS, *OPTIMIZER_FAULTS, *MODEL_FAULTS)}
