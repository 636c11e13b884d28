"""One parameter that tells what happens to the gradients of its optimizer between two steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist


def is_distributed() -> bool:
    """Whether gradients are shared with other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Sentinel:
    """Counts backward passes, and notices gradients that were altered or thrown away outside them.

    Autograd adds to ``.grad`` in place, which moves the tensor's version by one. Any other change between two
    backward passes is the loop's: gradients that were zeroed without a step, i.e. a batch given up.
    """

    def __init__(self, on_given_up: Callable[[], None]) -> None:
        self.backwards = 0
        """Backward passes that reached the parameter since the last step."""
        self.carried = False
        """Whether the first of them added to what the step before had left: nobody has zeroed the gradients."""
        self._left: tuple[weakref.ref[Tensor], int] | None = None
        self._on_given_up = on_given_up
        self._parameter: nn.Parameter | None = None
        self._hook: Any = None
        self._grad: weakref.ref[Tensor] | None = None
        self._version = 0

    def follow(self, parameter: nn.Parameter) -> None:
        """Watch this parameter from now on."""
        if self._parameter is not parameter:
            self.unhook()
            self._parameter = parameter
            # Weakly: a parameter that held its watcher would hold the model, in a ring that Python cannot see.
            reference = weakref.WeakMethod(self._after_accumulation)

            def after_accumulation(parameter: Tensor) -> None:
                method = reference()
                if method is not None:
                    method(parameter)

            self._hook = parameter.register_post_accumulate_grad_hook(after_accumulation)

    def unhook(self) -> None:
        """Stop watching."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._parameter = None

    def reset(self) -> None:
        """The optimizer has stepped: what happens to its gradients now is only of concern if it is nothing."""
        self.backwards, self._grad, self.carried = 0, None, False
        grad = self._parameter.grad if self._parameter is not None else None
        self._left = (weakref.ref(grad), grad._version) if grad is not None else None

    def altered(self) -> bool:
        """Whether the loop changed the gradients since the last backward pass, by means nobody hears."""
        if self._parameter is None or self._grad is None or is_distributed():
            return False  # the reduction over ranks writes into gradients too
        grad = self._parameter.grad
        return grad is None or self._grad() is not grad or grad._version != self._version

    def _after_accumulation(self, parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is None:
            return
        in_place = not torch.is_grad_enabled()  # with create_graph autograd makes a new tensor each time
        if (
            in_place
            and not is_distributed()
            and self._grad is not None
            and (self._grad() is not grad or grad._version != self._version + 1)
        ):
            self.backwards = 0
            self._on_given_up()
        if self.backwards == 0 and self._left is not None and in_place and not is_distributed():
            self.carried = self._left[0]() is grad and grad._version == self._left[1] + 1
        self.backwards += 1
        self._grad, self._version = weakref.ref(grad), grad._version
