"""A Guard's place at one optimizer: it stands before the optimizer's step and may leave it out."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradvitals.act.clipper import Clipper
from gradvitals.act.gate import DeviceGate, Landing
from gradvitals.act.limits import Usual
from gradvitals.act.rungs import Clip, Skip

Before = Callable[["Post"], bool]
"""Decides whether the step is made."""
After = Callable[["Post", bool], None]


class Post:
    """One optimizer under guard.

    Args:
        optimizer: Its `step` is replaced, on this object alone, until `leave`.
        on_device: Whether steps are left out on the device, by ``found_inf``.
        clip: How to clip.
        skip: When to leave a step out.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, on_device: bool, clip: Clip, skip: Skip) -> None:
        self.optimizer = optimizer
        self.on_device = on_device
        self.usual = Usual(window=clip.window)
        self.clipper = Clipper(clip)
        self.gate = DeviceGate(skip.max_streak)
        self.landing = Landing()
        self.is_new = True
        """Whether the optimizer has no state yet: some make it in the step that is left out, and do not fill it."""
        self._marked = False
        self._theirs: Tensor | None = None
        self._leave: Callable[[], None] = lambda: None

    # -- in the place of step() ---------------------------------------------------------------------------------

    def stand(
        self, before: Before, after: After, failed: Callable[[Post], None], unguarded: Callable[[], None]
    ) -> None:
        """Take the place of the optimizer's `step`.

        Args:
            before: Decides whether the step is made.
            after: Told whether it was.
            failed: Told of a step that ended in an error.
            unguarded: Told of a step with a closure, which is made without being looked at.
        """
        optimizer = self.optimizer
        original = optimizer.step
        own = "step" in vars(optimizer)

        # Schedulers, which wrap `step` too, want a bound method; GradScaler looks at its arguments.
        @functools.wraps(original)
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if (args[0] if args else kwargs.get("closure")) is not None:
                unguarded()
                return original(*args, **kwargs)
            if not before(self):
                after(self, False)
                return None
            try:
                result = original(*args, **kwargs)
            except BaseException:  # Ctrl-C too
                self.unmark()
                failed(self)
                raise
            self.unmark()
            after(self, True)
            return result

        step.guarded = True  # type: ignore[attr-defined]
        replacement = types.MethodType(step, optimizer)
        optimizer.step = replacement  # type: ignore[method-assign]

        def leave() -> None:
            if vars(optimizer).get("step") is not replacement:
                return  # someone has wrapped it since; `before` lets everything pass from now on
            if own:
                optimizer.step = original  # type: ignore[method-assign]
            else:
                del optimizer.step

        self._leave = leave

    def leave(self) -> None:
        """Give the optimizer its own `step` back."""
        self._leave()

    # -- leaving out on the device ------------------------------------------------------------------------------

    def mark(self, left_out: Tensor, refused: Tensor | None = None) -> Tensor:
        """Tell the optimizer's step to do nothing where `left_out` is 1, or a GradScaler says so already.

        Args:
            left_out: 1 or 0.
            refused: Not 0 where the scaler of any rank said so; None in a single process.

        Returns:
            What the scaler said, or those of all ranks; 0 where there is none.
        """
        theirs = getattr(self.optimizer, "found_inf", None)
        self._marked, self._theirs = True, theirs
        both = left_out if theirs is None else torch.maximum(left_out, theirs.to(left_out))
        self.optimizer.found_inf = both  # type: ignore[attr-defined]
        if refused is not None:
            return (refused > 0).to(left_out)
        return torch.zeros_like(left_out) if theirs is None else theirs

    def unmark(self) -> None:
        """The step is over."""
        if self._marked and self._theirs is not None:
            self.optimizer.found_inf = self._theirs  # type: ignore[attr-defined]  # the scaler takes it away itself
        elif self._marked:
            vars(self.optimizer).pop("found_inf", None)
        self._marked, self._theirs = False, None

    def state_dict(self) -> dict[str, Any]:
        """What it has learnt; what is still on its way to the host is a function that waits for it."""
        flying = self.landing.still_flying()
        learnt = {"usual": self.usual.state_dict(), "clipper": self.clipper.state_dict(), "is_new": self.is_new}
        return {**learnt, "flying": flying}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what it had learnt."""
        self.usual.load_state_dict(state["usual"])
        self.clipper.load_state_dict(state["clipper"])
        self.is_new = bool(state["is_new"])
        self.landing.take_off(state["flying"])
        self.gate.streak = state["flying"][-1]["streak"] if state["flying"] else 0.0


def is_guarded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a Guard stands before this optimizer already."""
    return getattr(optimizer.step, "guarded", False) is True


def can_be_told(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer's step does nothing when its ``found_inf`` is 1: torch's fused ones."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and type(optimizer).__module__.startswith(
        "torch.optim"
    )
