"""Weights that a script updates without an optimizer of torch's: Keras, or ``p -= lr * p.grad``."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from gradvitals.integrations.zero_code.discovery import Found, find

SAMPLED = 16
"""Elements of each tensor that are compared to see whether the script changed it."""
MOST_PASSES = 64
"""Stop looking after this many backward passes: nothing was updated."""


class OwnUpdates(torch.optim.Optimizer):
    """Stands for the updates that a script makes itself. It changes nothing; it says when a step begins and ends.

    The gradients of a step are complete after its last backward pass. The step shows at the next one: by then the
    script has zeroed the gradients or changed the weights.

    Args:
        parameters: What the script updates.
        passes: Backward passes of its first step; later ones are expected to have as many.
    """

    def __init__(self, parameters: Iterable[Tensor], passes: int) -> None:
        super().__init__(parameters, {})
        self._probe: Tensor = self.param_groups[0]["params"][-1]
        self._expected = passes
        self._passes = 0
        self._begun = False
        self._seen: tuple[Any, ...] = ()
        self.has_new_gradients = False
        """Whether the script had changed the gradients, and so may have zeroed them, when the last step was seen."""
        self._before: Tensor | None = None

    def after_backward(self) -> None:
        """A backward pass has reached the parameters."""
        self._passes += 1
        if self._passes == self._expected:
            self._begin()
        self._seen = self._state()
        if self._probe.is_cpu:  # elsewhere a look at the values would wait for the device
            self._before = _sample(self._probe).clone()

    def made_step(self) -> bool:
        """Returns whether the script has updated the weights since the last backward pass."""
        if not self._passes or self._state() != self._seen:
            return self._passes > 0
        return self._before is not None and _differ(_sample(self._probe), self._before)

    def end_step(self) -> None:
        """The script has updated the weights."""
        if not self._begun:
            self._begin()
        self.has_new_gradients = self._state()[1:] != self._seen[1:]
        for hook in list(self._optimizer_step_post_hooks.values()):
            hook(self, (), {})
        self._expected, self._passes, self._begun = self._passes, 0, False

    def _begin(self) -> None:
        self._begun = True
        for hook in list(self._optimizer_step_pre_hooks.values()):
            hook(self, (), {})

    def _state(self) -> tuple[Any, ...]:
        grad = self._probe.grad
        return self._probe._version, id(grad), None if grad is None else grad._version


class UpdateFinder:
    """Looks at the backward passes of a script that has no torch optimizer, until it sees what the script updates."""

    def __init__(self) -> None:
        self._passes = 0
        self._sampled: list[tuple[Tensor, Tensor]] = []

    @property
    def has_given_up(self) -> bool:
        """Whether many passes went by without an update."""
        return self._passes > MOST_PASSES

    @torch.no_grad()
    def before_backward(self) -> Found | None:
        """Returns what the script has updated since the last pass; None if nothing yet."""
        updated = [tensor for tensor, before in self._sampled if _differ(_sample(tensor), before)]
        if not updated:
            return None
        model = find([OwnUpdates(updated, 1)])[0].model
        owned = {id(parameter) for parameter in model.parameters()} | set(map(id, updated))
        found = find([OwnUpdates([tensor for tensor, _ in self._sampled if id(tensor) in owned], self._passes)])[0]
        return found if found.has_modules else replace(found, name="tensors of the script")

    @torch.no_grad()
    def after_backward(self) -> None:
        """A pass is over: note the weights that it reached."""
        if not self._sampled:
            self._sampled = [(tensor, _sample(tensor).clone()) for tensor in _leaves()]
        self._passes += bool(self._sampled)
        if self.has_given_up:
            self._sampled = []


def _leaves() -> Sequence[Tensor]:
    """Returns every tensor that is alive and has been given a gradient by backward.

    Leaves out those without memory, which torch.compile traces with.
    """
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and not is_fake(thing)]
    return [one for one in alive if one.requires_grad and one.is_leaf and one.grad is not None and one.numel()]


def _sample(tensor: Tensor) -> Tensor:
    """Returns a few elements, spread over the tensor."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)]


def _differ(sample: Tensor, before: Tensor) -> bool:
    """Returns whether any element has changed: NaN is no change of NaN."""
    same = (sample == before) | (sample.isnan() & before.isnan())
    return not bool(same.all())


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Returns what an optimizer is called on screens."""
    return "updates of its own" if isinstance(optimizer, OwnUpdates) else type(optimizer).__name__
