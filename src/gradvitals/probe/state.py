"""Keeps what a probe must not change: weights, gradients, modes, buffers, hooks and random states."""

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

    This covers parameters and buffers with their bits, `.grad` (None inside), train and eval flags, attributes that a
    module sets on itself, `requires_grad`, hooks, and the random numbers of Python, NumPy and torch. Parameters are
    not copied: to try other weights inside, give a parameter other `.data`.

    Raises:
        GradvitalsError: when a parameter has no shape yet, or a forward pass changed one in place.

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
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(_saved_module(module))
        for buffer in model.buffers():
            stack.callback(_saved_bits(buffer))
        for name, parameter in model.named_parameters():
            stack.callback(_saved_parameter(name, parameter))
        stack.enter_context(same_randomness(None))
        for parameter in model.parameters():
            parameter.grad = None
        yield


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the bits of all buffers at the end: a forward pass in train mode changes the statistics of batch norm."""
    with ExitStack() as stack:
        for buffer in model.buffers():
            stack.callback(_saved_bits(buffer))
        yield


@contextmanager
def same_randomness(seed: int | None = 0) -> Iterator[None]:
    """Restore all random number generators at the end; inside, start torch's from a seed unless it is None."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    try:
        if seed is not None:
            torch.manual_seed(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)


def _saved_module(module: nn.Module) -> Callable[[], None]:
    """Returns a function that restores the tensors, attributes and hooks of one module."""
    holders = [vars(module), module._parameters, module._buffers, *(vars(module).get(name) for name in HOOKS)]
    saved: list[tuple[dict[Any, Any], dict[Any, Any]]] = [
        (holder, dict(holder)) for holder in holders if holder is not None
    ]

    def restore() -> None:
        for holder, contents in saved:
            # By identity: `==` of tensors compares elements.
            if list(holder) != list(contents) or any(holder[key] is not contents[key] for key in contents):
                holder.clear()
                holder.update(contents)

    return restore


def _saved_bits(buffer: Tensor) -> Callable[[], None]:
    copy = buffer.detach().clone()

    def restore() -> None:
        # Only if it changed: a write would break a graph that still needs it.
        if not torch.equal(buffer, copy):
            with torch.no_grad():
                buffer.copy_(copy)

    return restore


def _saved_parameter(name: str, parameter: nn.Parameter) -> Callable[[], None]:
    grad, requires_grad = parameter.grad, parameter.requires_grad
    version, data = parameter._version, parameter.data

    def restore() -> None:
        if parameter.data_ptr() != data.data_ptr():
            parameter.data = data
        parameter.requires_grad_(requires_grad)
        parameter.grad = grad
        if parameter._version != version:
            raise GradvitalsError(
                f"{name} was changed in place by the model or by loss_fn, and there is no copy of its old values; "
                "expected a forward pass that leaves parameters alone: give probe() a deepcopy of the model"
            )

    return restore
