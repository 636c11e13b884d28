"""One parameter that tells what happens to the gradients of its optimizer between two steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gradvitals.measure.ranks.shards import local


def is_distributed() -> bool:
    """Whether gradients are shared with other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Sentinel:
    """Counts backward passes, and notices gradients that were altered or thrown away outside them.

    Autograd adds to ``.grad`` in place, which moves the tensor's version by one. Any other change between two
    backward passes is the loop's: gradients that were zeroed without a step, i.e. a batch given up.

    Args:
        on_given_up: Told after how many passes it was, as soon as the next one shows it, and whether the gradient is
            another tensor since: one that was changed in place may have been clipped, and not thrown away.
    """

    def __init__(self, on_given_up: Callable[[int, bool], None]) -> None:
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
        self._read: tuple[weakref.ref[Tensor], int] | None = None

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
        self.rest()
        self._parameter = None

    def rest(self) -> None:
        """Look away for a while."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def resume(self) -> None:
        """Watch the same parameter again; where its gradient is not what was left of the last step, as after a pass."""
        if self._parameter is not None:
            parameter, self._parameter = self._parameter, None
            self.follow(parameter)
            self.backwards, self._grad, self.carried, self._read = 0, None, False, None
            grad = parameter.grad
            if grad is not None and (self._left is None or not _same(self._left, grad)):
                self.backwards, self._grad, self._version, self._left = 1, weakref.ref(grad), _version_of(grad), None

    def note_left(self) -> None:
        """A step was made while it rested."""
        self._left = self._now()

    def reset(self) -> None:
        """The optimizer has stepped: what happens to its gradients now is only of concern if it is nothing."""
        self.backwards, self._grad, self.carried = 0, None, False
        self._left, self._read = self._now(), None

    def note_read(self) -> None:
        """The gradients are read as they are now."""
        self._read = self._now()

    def _now(self) -> tuple[weakref.ref[Tensor], int] | None:
        grad = self._parameter.grad if self._parameter is not None else None
        return (weakref.ref(grad), _version_of(grad)) if grad is not None else None

    def altered(self) -> bool:
        """Whether the loop changed the gradients since the last backward pass, by means nobody hears."""
        if self._parameter is None or self._grad is None:
            return False
        grad = self._parameter.grad
        if is_distributed():  # the reduction over ranks writes into gradients too, but not once they have been read
            return self._read is not None and not _same(self._read, grad)
        return not _same((self._grad, self._version), grad)

    def _after_accumulation(self, parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is None:
            return
        in_place = not torch.is_grad_enabled()  # with create_graph autograd makes a new tensor each time
        if (
            in_place
            and not is_distributed()
            and self._grad is not None
            and not _same((self._grad, self._version + 1), grad)
        ):
            passes, self.backwards = self.backwards, 0
            self._on_given_up(passes, self._grad() is not grad)
        if self.backwards == 0 and self._left is not None and in_place:
            self.carried = _same((self._left[0], self._left[1] + 1), grad)
        self.backwards += 1
        self._grad, self._version, self._read = weakref.ref(grad), _version_of(grad), None


def _same(seen: tuple[weakref.ref[Tensor], int], grad: Tensor | None) -> bool:
    """Whether a gradient is the tensor that was seen, at that version."""
    return grad is not None and seen[0]() is grad and _version_of(grad) == seen[1]


def _version_of(grad: Tensor) -> int:
    """How often a gradient was changed in place; of a DTensor, by its own operations or behind their back."""
    part = local(grad)
    return grad._version if part is grad else grad._version + part._version
