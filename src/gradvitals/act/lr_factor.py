"""Learning rates multiplied during the optimizer's step, and only then.

Outside of a step `group["lr"]` is what the user's scheduler, or the loop, has set. So every kind of schedule goes on
as if nobody else touched it, those that read the rate back too; a saved optimizer holds the schedule's own rate; and
several factors on one optimizer multiply without knowing each other.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor


class LrFactors:
    """The factors of one optimizer, one for each who asks. Where their product is 1 nothing is touched."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._factors: dict[object, float] = {}
        self._undo: list[tuple[dict[str, Any], Any, Any]] = []
        optimizer.register_step_pre_hook(self._multiply)
        optimizer.register_step_post_hook(self._put_back)

    def set(self, owner: object, factor: float) -> None:
        """From the next step on, multiply by this for this owner."""
        self._factors[owner] = factor

    def drop(self, owner: object) -> None:
        """This owner no longer multiplies."""
        self._factors.pop(owner, None)

    @property
    def product(self) -> float:
        """What the rates of the next step are multiplied by."""
        return math.prod(self._factors.values())

    def _multiply(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.restore()
        factor = self.product
        if factor == 1:
            return
        done: set[int] = set()
        for group in optimizer.param_groups:
            lr = group.get("lr")
            if isinstance(lr, Tensor):
                if id(lr) in done:  # groups built from one default share the tensor
                    continue
                done.add(id(lr))
                self._undo.append((group, lr, lr.detach().clone()))
                with torch.no_grad():
                    lr.mul_(factor)  # in place: compiled and captured steps read this very tensor
            elif lr is not None:
                group["lr"] = lr * factor
                self._undo.append((group, group["lr"], lr))

    def _put_back(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the rates back; after a step that ended in an error, where its post-hook did not."""
        undo, self._undo = self._undo, []
        for group, multiplied, lr in undo:
            if isinstance(multiplied, Tensor):
                with torch.no_grad():
                    multiplied.copy_(lr)
            elif group["lr"] is multiplied:  # else somebody has set another one meanwhile
                group["lr"] = lr


_OF: weakref.WeakKeyDictionary[torch.optim.Optimizer, LrFactors] = weakref.WeakKeyDictionary()


def lr_factors(optimizer: torch.optim.Optimizer) -> LrFactors:
    """The factors of an optimizer: one object however many ask."""
    if optimizer not in _OF:
        _OF[optimizer] = LrFactors(optimizer)
    return _OF[optimizer]


def optimizer_of(given: Any, taker: str) -> torch.optim.Optimizer:
    """The optimizer that was given, or that a given scheduler or wrapper belongs to."""
    found = given
    for _ in range(3):
        if isinstance(found, torch.optim.Optimizer) and not hasattr(found, "optimizer"):
            return found
        # Accelerate wraps both: its optimizer has an `optimizer`, its scheduler a `scheduler`.
        inner = getattr(found, "optimizer", getattr(found, "scheduler", None))
        if inner is None:
            break
        found = inner
    if isinstance(found, torch.optim.Optimizer):
        return found
    raise TypeError(
        f"{taker} got a {type(given).__name__}; expected a torch.optim.Optimizer or one of torch.optim.lr_scheduler"
    )
