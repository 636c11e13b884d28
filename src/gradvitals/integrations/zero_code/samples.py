"""How many samples a step has, learnt from what goes into the model during a few steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

STEPS = 3
"""Steps to look at. Listening to every module costs too much to go on with it."""


class SampleCount:
    """Counts the samples of the first steps of a model, and tells if each of them had the same number.

    The first dimension of what the model is called with is taken for the number of samples, where all tensors it gets
    agree on it and it is called once for each backward pass. Else nothing is told.

    Args:
        model: The model, or what contains it.
        tell: Called with the number of samples of a step, once.
    """

    def __init__(self, model: nn.Module, tell: Callable[[float], None]) -> None:
        self._parts = {id(part) for part in model.modules()}
        self._tell = tell
        self._depth = 0
        self._calls: list[int | None] = []
        self._samples: list[int | None] = []
        self._steps: list[int] = []
        self._begun = False  # the step that is going on now may have made its calls already
        self.in_backward = False
        """Whether a backward pass is going on: what is called in it is called again, to save memory."""
        self._handles: list[Any] = []
        if not _is_compiled():  # it would be compiled anew, with our hook in it
            self._handles = [
                modules.register_module_forward_pre_hook(self._before),
                modules.register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
            ]

    @property
    def is_counting(self) -> bool:
        """Whether the number may still be found."""
        return bool(self._handles)

    def after_backward(self) -> None:
        """A backward pass of the model is over."""
        if self._handles:
            self._samples.append(self._calls[0] if len(self._calls) == 1 else None)
            self._calls = []

    def forget(self) -> None:
        """The backward pass that has just run is the first of its step: none before it counts."""
        self._samples = []

    def after_step(self) -> None:
        """An optimizer of the model has stepped."""
        samples = [size for size in self._samples if size is not None]
        if not self._handles or not self._samples:
            return
        if self._begun and len(samples) == len(self._samples):
            self._steps.append(sum(samples))
        elif self._begun:
            self.stop()
        self._begun, self._samples = True, []
        if len(self._steps) == STEPS:
            self.stop()
            if len(set(self._steps)) == 1:
                self._tell(float(self._steps[0]))

    def stop(self) -> None:
        """Listen no more."""
        while self._handles:
            handle = self._handles.pop()
            handle.remove()
            modules._global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch leaves it, and goes on as if hooked

    def _before(self, module: nn.Module, args: Any) -> None:
        self._depth += id(module) in self._parts

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if id(module) not in self._parts:
            return
        self._depth -= 1
        if self._depth <= 0:
            self._depth = 0
            if module.training and torch.is_grad_enabled() and not self.in_backward:
                self._calls.append(_first_dimension([*args, *kwargs.values()]))


def _first_dimension(inputs: list[Any]) -> int | None:
    sizes = {thing.shape[0] for thing in inputs if isinstance(thing, Tensor) and thing.dim() > 0}
    return int(sizes.pop()) if len(sizes) == 1 else None


def _is_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))
