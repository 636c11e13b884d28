"""Where torch is listened to: optimizers that are made, optimizers that step, backward passes.

What the script calls does what it did before and returns what it returned. Whatever goes wrong on our side is said once
and ends our listening, never the script.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as optim

from gradvitals.collect.backward import STEPS
from gradvitals.integrations.backward import Backwards
from gradvitals.integrations.zero_code.watcher import Watcher
from gradvitals.worker.worker import print_line


class _Here(threading.local):
    """What is going on in this thread."""

    def __init__(self) -> None:
        self.steps: list[torch.optim.Optimizer] = []
        """The optimizers that are stepping, one inside the other."""


class Hooks:
    """Listens for a Watcher, from `install` to `remove`."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._active = True
        self._undo: list[Callable[[], object]] = []
        self._here = _Here()
        self._backwards = Backwards(
            lambda: self._tell(watcher.before_backward), lambda loss: self._tell(watcher.after_backward, loss)
        )
        watcher.ear = self._backwards.ear

    def install(self) -> None:
        """Begin."""
        os.register_at_fork(after_in_child=self._stop)  # whoever a script forks is no part of its training
        original = torch.optim.Optimizer.__init__
        torch.optim.Optimizer.__init__ = self._heard(original)  # type: ignore[method-assign]
        self._undo = [
            lambda: setattr(torch.optim.Optimizer, "__init__", original),
            optim.register_optimizer_step_pre_hook(self._before_step).remove,
            optim.register_optimizer_step_post_hook(self._after_step).remove,
            self._backwards.stop,
            STEPS.release,
        ]
        STEPS.hold()  # models are found, and let go, while an optimizer steps
        self._backwards.start()

    def remove(self) -> None:
        """Leave torch as it was."""
        self._stop()
        while self._undo:
            self._undo.pop()()

    def _stop(self) -> None:
        self._active = False

    def _tell(self, method: Callable[..., Any], *args: Any) -> None:
        if not self._active:
            return
        try:
            method(*args)
        except Exception as error:
            self._stop()
            quiet = self._watcher.settings.quiet
            print_line(f"stopped watching after an error of its own: {error!r}; the script goes on", quiet)

    def _heard(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._tell(self._watcher.on_made, optimizer)

        return __init__

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._here.steps:  # its last step ended in an error that the script has caught
            self._here.steps.clear()
        if not self._here.steps:
            self._tell(self._watcher.before_step, optimizer)
        self._here.steps.append(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        while self._here.steps:  # a step inside it that ended in an error was not told to be over
            if self._here.steps.pop() is optimizer:
                break
        if not self._here.steps:
            self._tell(self._watcher.after_step, optimizer)
