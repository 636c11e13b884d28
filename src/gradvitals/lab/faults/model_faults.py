"""Faults of the model and its numbers: initialisation, depth, dead parts, precision, NaN."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from gradvitals.lab.char_lm import Attention
from gradvitals.lab.faults.fault import Fault
from gradvitals.lab.faults.tasks import Recipe, Task, Training, small_gradients, with_changes

ALL: tuple[Task, ...] = ("mlp", "cnn", "transformer")
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
        tasks=ALL,
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
        tasks=ALL,
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
        tasks=ALL,
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
        tasks=ALL,
        finds=("explosion", "clip_saturated", "update_ratio", "nonfinite", "loss_nonfinite"),
        later=False,
        loss=lambda loss: 1e6 * loss,
    ),
)
