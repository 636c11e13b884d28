"""What a probe must not change: weights, gradients, modes, buffers, hooks and random states are put back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradvitals.errors import GradvitalsError

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""The attributes in which a module keeps its hooks."""


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore everything at the end, also after an exception.

    What is put back: which tensors are parameters and buffers, the bits of all buffers (the running statistics of batch
    norm among them), `.grad` (the same tensors; inside it is None), train and eval flags, what a module sets on itself
    while it runs, `requires_grad`, hooks, and the random numbers of Python, NumPy and torch. Parameters are not copied:
    who wants other weights inside gives a parameter other `.data`, and the old one is put back, without a trace even in
    a graph that was made before.

    Args:
        model: The model.

    Raises:
        GradvitalsError: when the model has parameters whose shape is not known yet, or a forward pass changed a
            parameter in place, of which there is no copy.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> with untouched(model):
        ...     _ = model.eval().requires_grad_(False)
        >>> model.training, model.weight.requires_grad
        (True, True)
    """
    lazy = [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise GradvitalsError(
            f"the shape of {lazy[0]} is not known yet; expected a model that has seen data: run one batch through it"
        )
    with ExitStack() as putting_back:
        for put_back in (
            *(_structure(module) for module in model.modules()),
            *(_bits(buffer) for buffer in model.buffers()),
            *(_parameter(name, p) for name, p in model.named_parameters()),
            random_numbers(),
        ):
            putting_back.callback(put_back)
        for parameter in model.parameters():
            parameter.grad = None
        yield


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the bits of all buffers at the end: a forward pass in train mode changes the statistics of batch norm."""
    kept = [_bits(buffer) for buffer in model.buffers()]
    try:
        yield
    finally:
        for put_back in kept:
            put_back()


def random_numbers() -> Callable[[], None]:
    """Returns a function that restores the current state of all random number generators."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if on_gpu is not None:
            torch.cuda.set_rng_state_all(on_gpu)

    return put_back


@contextmanager
def same_randomness(seed: int = 0) -> Iterator[None]:
    """Use the same random numbers every time inside, so that dropout drops the same elements."""
    put_back = random_numbers()
    try:
        torch.manual_seed(seed)
        yield
    finally:
        put_back()


def _structure(module: nn.Module) -> Callable[[], None]:
    """The tensors, training flag, attributes and hooks of one module."""
    holders = (module._parameters, module._buffers, *(getattr(module, name, None) for name in HOOKS))
    kept: list[tuple[dict[Any, Any], dict[Any, Any]]] = [(h, dict(h)) for h in holders if h is not None]
    own = dict(vars(module))

    def put_back() -> None:
        # Attributes that a module set during a forward pass go back to the same objects, not copies.
        if list(vars(module)) != list(own) or any(vars(module)[key] is not own[key] for key in own):
            vars(module).clear()
            vars(module).update(own)
        for holder, contents in kept:
            # By identity: `==` of tensors compares elements.
            if list(holder) != list(contents) or any(holder[key] is not contents[key] for key in contents):
                holder.clear()
                holder.update(contents)

    return put_back


def _bits(buffer: Tensor) -> Callable[[], None]:
    copy = buffer.detach().clone()

    def put_back() -> None:
        # Only if it changed: a write would break a graph that still needs it.
        if not torch.equal(buffer, copy):
            with torch.no_grad():
                buffer.copy_(copy)

    return put_back


def _parameter(name: str, parameter: nn.Parameter) -> Callable[[], None]:
    grad, requires_grad = parameter.grad, parameter.requires_grad
    version, data = parameter._version, parameter.data

    def put_back() -> None:
        if parameter.data_ptr() != data.data_ptr():
            parameter.data = data
        parameter.requires_grad_(requires_grad)
        parameter.grad = grad
        if parameter._version != version:
            raise GradvitalsError(
                f"{name} was changed in place by the model or by loss_fn, and there is no copy of what it was; "
                "expected a forward pass that leaves parameters alone: give probe() a deepcopy of the model"
            )

    return put_back
