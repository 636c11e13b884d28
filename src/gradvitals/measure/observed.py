"""What a loop tells of its step: losses, the samples behind them, and which of these batches it then gave up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradvitals.errors import ObserveError
from gradvitals.measure.packet import Packet
from gradvitals.measure.ranks.shards import local, placements


def check_observed(loss: Any, batch_size: Any) -> None:
    """Raise an `ObserveError` that says what `observe` was given instead of numbers, and what to do."""
    if not (loss is None or isinstance(loss, (Tensor, Real)) or hasattr(loss, "__float__")):
        inside = " as out.loss, if that is what it holds" if hasattr(loss, "loss") else ""
        raise ObserveError(
            f"observe got a {type(loss).__name__} as loss; expected a tensor or a number: pass the loss itself{inside}"
        )
    if isinstance(loss, Tensor) and not loss.numel():
        raise ObserveError("observe got a tensor without elements as loss; expected one number or the mean of several")
    spread = placements(loss) if isinstance(loss, Tensor) else ()
    if any(type(placement).__name__ != "Replicate" for placement in spread):
        raise ObserveError(
            f"observe got a DTensor as loss that lies on the ranks as {spread}; expected one that all of them know: "
            "pass loss.full_tensor()"
        )
    if batch_size is not None and not (isinstance(batch_size, Real) and float(batch_size) > 0):
        given = repr(batch_size) if isinstance(batch_size, Real) else f"a {type(batch_size).__name__}"
        raise ObserveError(
            f"observe got {given} as batch_size; expected the number of samples behind the loss: pass len(inputs)"
        )


def _number(loss: float) -> float:
    try:
        return float(loss)
    except (TypeError, ValueError) as error:
        kind = type(loss).__name__
        raise ObserveError(f"observe got a {kind} as loss that is not one number ({error}): pass its mean") from None


@dataclass(frozen=True)
class Observation:
    """One call of `observe`."""

    loss: Tensor | float | None
    size: float | None
    """Samples behind it."""
    passes: int
    """Backward passes of the step that had come before it."""


@dataclass
class Observed:
    """Everything that was told of one step."""

    told: list[Observation] = field(default_factory=list)
    adds_up: bool = False
    """Whether the step's loss is the sum of those told, and not their mean."""
    given_up: int = 0
    """Batches whose gradients were thrown away before this step."""
    lost: list[Tensor | float] = field(default_factory=list)
    """Their losses, as far as they were told."""

    @property
    def losses(self) -> list[Tensor | float]:
        """What was told of batches that are in the step; tensors travel in the packet as ``loss{i}``."""
        return [each.loss for each in self.told if each.loss is not None]

    def together(self) -> list[Tensor | float]:
        """The same, as one number where they add up."""
        first, *others = self.losses or [0.0]
        return [sum((_beside(first, other) for other in others), first)] if self.adds_up and others else self.losses

    @property
    def batch_size(self) -> float | None:
        """Samples of all of them together, of those who told."""
        sizes = [each.size for each in self.told if each.size is not None]
        return sum(sizes) if sizes else None

    def note(self, loss: Tensor | float | None, batch_size: float | None, passes: int) -> None:
        """The loop told a loss, and the samples behind it, after so many backward passes.

        Raises:
            ObserveError: If these are not numbers; nothing of them is kept.
        """
        check_observed(loss, batch_size)
        if not isinstance(loss, Tensor) and loss is not None:
            loss = _number(loss)
        if isinstance(loss, Tensor):
            loss = local(loss)
            # On the host there is nothing to wait for.
            at_hand = type(loss) is Tensor and loss.device.type == "cpu" and loss.is_floating_point()
            at_hand = at_hand and not torch.compiler.is_compiling()
            if loss.dim():
                loss = loss.detach().float().mean()
            loss = loss.item() if at_hand else loss.detach().clone()
        self.told.append(Observation(loss, batch_size, passes))

    def give_up(self, passes: float, *, counts: bool) -> None:
        """The gradients of so many backward passes were thrown away, as is now seen by the next one.

        Args:
            passes: How many; what was told of them is no part of the step.
            counts: Whether this was a batch given up, as far as can be known.
        """
        # Who tells a loss before its backward pass has told that of the next batch already.
        before = bool(self.told) and self.told[0].passes == 0
        kept = [each for each in self.told if before and each.passes >= passes]
        if counts:
            self.given_up += 1
            self.lost += [each.loss for each in self.told if each not in kept and each.loss is not None]
        self.told = [Observation(each.loss, each.size, 0) for each in kept]

    def pack(self, packet: Packet) -> None:
        """Put the losses that are on a device into the packet."""
        for name, losses in (("loss", self.losses), ("lost", self.lost)):
            for index, loss in enumerate(losses):
                if isinstance(loss, Tensor):
                    packet.add(f"{name}{index}", loss)


@dataclass(frozen=True)
class Heard:
    """What was told of a step, once its numbers are known."""

    loss: float | None = None
    """Averaged over the observations by their size; None where the loop told none."""
    sizes: tuple[float | None, ...] = ()
    """Samples behind each observation, where told."""
    skipped_size: float = 0.0
    """Samples that were told of batches which are not in the step."""
    given_up: int = 0
    lost_loss: float | None = None
    """The loss of the last batch that was given up, where told."""


def heard(observed: Observed, number: Callable[[str], float], *, is_clean: Callable[[], bool]) -> Heard:
    """Put together what was told.

    Args:
        observed: What was told.
        number: Gives a number that came in the packet, by its name.
        is_clean: Says whether the step's gradient is finite. Then a batch whose loss was not is no part of it: the loop
            went on without a backward pass.
    """
    losses = [loss if isinstance(loss, float) else number(f"loss{i}") for i, loss in enumerate(observed.losses)]
    lost = [loss if isinstance(loss, float) else number(f"lost{i}") for i, loss in enumerate(observed.lost)]
    sizes = [each.size for each in observed.told]
    given_up, skipped_size = observed.given_up, 0.0
    broken = [not math.isfinite(loss) for loss in losses]
    if any(broken) and not all(broken) and is_clean():
        given_up += sum(broken)
        lost += [loss for loss in losses if not math.isfinite(loss)]
        if len(sizes) == len(losses):
            skipped_size = sum(size or 0.0 for size, bad in zip(sizes, broken, strict=True) if bad)
            sizes = [size for size, bad in zip(sizes, broken, strict=True) if not bad]
        losses = [loss for loss in losses if math.isfinite(loss)]
    loss = _mean(losses, sizes)
    if observed.adds_up and loss is not None:
        loss = sum(losses)
    return Heard(loss, tuple(sizes), skipped_size, given_up, lost[-1] if lost else None)


def _beside(first: Tensor | float, loss: Tensor | float) -> Tensor | float:
    return loss.to(first.device) if isinstance(first, Tensor) and isinstance(loss, Tensor) else loss


def _mean(losses: list[float], sizes: list[float | None]) -> float | None:
    if not losses:
        return None
    if len(losses) == 1:
        return losses[0]
    weights = [size for size in sizes if size is not None]
    if len(weights) == len(sizes) == len(losses):
        return float(np.average(losses, weights=weights))
    return float(np.mean(losses))
