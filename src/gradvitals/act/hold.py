"""A step that was left out did not happen: schedules that count steps do not count it, nor does a GradScaler."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Saved = tuple[dict[str, Any], list[dict[str, Any]]]
"""A scheduler's state, and the settings of the groups it sets."""


class Hold:
    """Takes the tick back that a loop gives its schedulers after a step that was left out.

    A scheduler is left alone while the loop runs, and put right before the next step. One that does not tick at every
    step, but once an epoch, is never held.
    """

    def __init__(self, schedulers: Sequence[Any], scaler: torch.amp.GradScaler | None) -> None:
        self._schedulers = list(schedulers)
        self._scaler = scaler
        self._counts = [_count(scheduler) for scheduler in self._schedulers]
        self._each_step = [True] * len(self._schedulers)
        self._saved: list[Saved] | None = None

    def left_out(self) -> None:
        """The step in progress is left out, or was rolled back."""
        self._saved = [
            (copy.deepcopy(scheduler.state_dict()), [_settings(group) for group in scheduler.optimizer.param_groups])
            for scheduler in self._schedulers
        ]
        self._counts = [_count(scheduler) for scheduler in self._schedulers]

    def begin(self) -> None:
        """The next step begins: take back what was counted for one that was left out."""
        for index, scheduler in enumerate(self._schedulers):
            ticked = _count(scheduler) != self._counts[index]
            if self._saved is None:
                self._each_step[index] = ticked or _count(scheduler) == 0
            elif ticked and self._each_step[index]:
                state, groups = self._saved[index]
                scheduler.load_state_dict(state)
                for group, saved in zip(scheduler.optimizer.param_groups, groups, strict=True):
                    _put_back(group, saved)
            self._counts[index] = _count(scheduler)
        self._saved = None

    def uncount(self, left_out: Tensor | None = None) -> None:
        """Have the scaler not count this step among those that went well.

        Args:
            left_out: 1 on the device where the step is left out; None where it is known to be.
        """
        tracker = self._scaler._growth_tracker if self._scaler is not None else None
        if tracker is not None:  # `update` adds the 1 that is taken away here
            tracker.sub_(1 if left_out is None else left_out.to(tracker))


def _count(scheduler: Any) -> int:
    return int(getattr(scheduler, "last_epoch", 0))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    chosen = {name: value for name, value in group.items() if name != "params"}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in chosen.items()}


def _put_back(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
            group[name].copy_(value)
        else:
            group[name] = value
