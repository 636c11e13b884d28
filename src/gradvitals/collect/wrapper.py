"""Wraps functions of torch, once for all Monitors together."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch


class Wrapper:
    """Wraps a function of torch for all Monitors together, from the first that listens to the last.

    One wrapper for all: Monitors come and go in any order, and a wrapper of each would pile up.

    Args:
        owner: The module or class that holds the function.
        name: Its name there.
        before: Called with a listener and the arguments before each call.
        after: Called with a listener and the result after each call.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., None] | None = None,
        after: Callable[[Any, Any], None] | None = None,
    ) -> None:
        self._owner, self._name, self._before, self._after = owner, name, before, after
        self._listeners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._original: Any = None
        self._replacement: Any = None

    def add(self, listener: Any) -> None:
        """Call this listener too."""
        self._listeners.add(listener)
        if self._replacement is not None:
            return
        original = self._original = getattr(self._owner, self._name)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if self._before is not None:
                self._call(self._before, *args, **kwargs)
            result = original(*args, **kwargs)
            if self._after is not None:
                self._call(self._after, result)
            return result

        # A loop that is compiled as a whole must not compile this too.
        self._replacement = torch.compiler.disable(replacement) if is_compiled() else replacement
        setattr(self._owner, self._name, self._replacement)

    def discard(self, listener: Any) -> None:
        """Call this listener no more; with the last one gone, torch is as it was."""
        self._listeners.discard(listener)
        # If another tool has wrapped the function since, ours stays, and does nothing without listeners.
        if not self._listeners and getattr(self._owner, self._name) is self._replacement:
            setattr(self._owner, self._name, self._original)
            self._replacement = None

    def _call(self, method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        for listener in tuple(self._listeners):
            try:
                method(listener, *args, **kwargs)
            except Exception:  # ours, in the middle of the script's own call: it must continue
                self._listeners.discard(listener)


def is_compiled() -> bool:
    """Whether torch.compile is in use."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))
