"""Optimizers that evaluate the loss themselves: gradients are read from inside their closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def heard(closure: Callable[[], Any], mute: Callable[[bool], None], first: Callable[[Any], None]) -> Callable[[], Any]:
    """A closure that does the same and tells of its first evaluation.

    Args:
        closure: What the optimizer was given.
        mute: Called with True before every later evaluation, and with False after it: a line search evaluates again, at
            other weights.
        first: Called with the loss of the first evaluation.
    """
    evaluated = False

    def evaluate() -> Any:
        nonlocal evaluated
        mute(evaluated)
        try:
            loss = closure()
        finally:
            mute(False)
        if not evaluated:
            evaluated = True
            first(loss)
        return loss

    return evaluate


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure among the arguments of an optimizer's step hook, whose first is the optimizer itself."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)
