"""What the device hands to the host for one step: sums on their way, and what is needed to read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.errors import ObserveError
from gradvitals.measure.clock import Lap
from gradvitals.measure.packet import Packet, Shipment
from gradvitals.types import Layout, Stage


def check_observed(loss: Any, batch_size: Any) -> None:
    """Raise an `ObserveError` that says what `observe` was given instead of numbers, and what to do."""
    if not (loss is None or isinstance(loss, (Tensor, Real)) or hasattr(loss, "__float__")):
        inside = " as out.loss, if that is what it holds" if hasattr(loss, "loss") else ""
        raise ObserveError(
            f"observe got a {type(loss).__name__} as loss; expected a tensor or a number: pass the loss itself{inside}"
        )
    if isinstance(loss, Tensor) and not loss.numel():
        raise ObserveError("observe got a tensor without elements as loss; expected one number or the mean of several")
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
class Arrival:
    """What an optimizer is about to step with, still on the device."""

    norms: list[tuple[Sequence[int], Sequence[Tensor] | Tensor]]
    """Norms of its gradients, one a tensor, before any clipping: rows, and a vector or a list of single numbers."""
    parameters: Sequence[nn.Parameter]
    """The parameter of every row."""
    scale: Tensor | None
    """The loss scale that the norms still carry; None for none."""
    losses: list[Tensor | float]
    """What the loop has told in this step."""
    clipped: bool
    """Whether the loop has clipped the gradients since."""
    max_norm: float | None
    """What it clipped their norm to, where known."""
    by_hand: bool = False
    """Whether it did so by means that nobody hears, so that they may be anything by now."""


@dataclass
class StationStep:
    """One optimizer's part of a step."""

    rows: list[int]
    stage: Stage = "raw"
    scaled: bool = False
    """Whether gradients were read while still multiplied by a loss scale (``scale{index}`` in the packet)."""
    ignore_scale: bool = False
    """The scale that was noted turned out to be another model's."""
    clipped: bool = False
    """Whether the loop clipped gradients after they were read: what the optimizer, and its moments, got."""
    micro_batches: int = 0
    """Number of micro-batches; 0 where they were not counted."""
    examples: dict[int, tuple[int, ...]] | None = None
    """Of each norm layer the examples in every micro-batch; None where they were not looked for."""
    divided: float = 1.0
    """What the sum of its micro-batches was divided by since, where a pipeline did so."""


@dataclass
class RawStep:
    """The sums of one step."""

    step: int
    full: bool
    """Whether this step was due for a per-tensor reading."""
    detail: bool
    """Whether it was due for the costly metrics too."""
    stations: list[StationStep]
    packet: Packet = field(default_factory=Packet)
    time: float = 0.0
    lr: float | None = None
    losses: list[Tensor | float] = field(default_factory=list)
    """The losses the loop told; those that are tensors travel in the packet as ``loss{i}``."""
    sizes: list[float | None] = field(default_factory=list)
    """Samples behind each observation, where told."""
    batch_size: float | None = None
    betas: dict[int, tuple[float, float]] = field(default_factory=dict)
    fractions: dict[int, float] = field(default_factory=dict)
    sampled: list[dict[int, tuple[int, int]]] = field(default_factory=list)
    """Coordinates of each row that its change was read of, and all there are on this rank."""
    weights: Sequence[float] | None = None
    """What each row counts beside those of other ranks; None for a single process."""
    audit: bool = False
    """Whether ranks were compared at this step."""
    max_norm: float | None = None
    """What the loop clipped the gradient's norm to."""
    windows: dict[int, int | None] = field(default_factory=dict)
    """Rows that went into a sliding window; where it is complete, the steps in one of its blocks."""
    skipped: bool = False
    carried: bool = False
    """Whether gradients were added to those of the step before."""
    in_turn: bool = False
    """Whether the model is one side of a game."""
    layout: Layout = field(default_factory=Layout)
    slots: list[tuple[int, int]] = field(default_factory=list)
    """Row and head that each number of the head views belongs to."""
    shipment: Shipment = field(default_factory=Shipment)
    lap: Lap = field(default_factory=Lap)

    def note(self, loss: Tensor | float | None, batch_size: float | None) -> None:
        """The loop told a loss, and the samples behind it.

        Raises:
            ObserveError: If these are not numbers; nothing of them is kept.
        """
        check_observed(loss, batch_size)
        if not isinstance(loss, Tensor) and loss is not None:
            loss = _number(loss)
        if isinstance(loss, Tensor):
            # On the host there is nothing to wait for; but a tensor that is spread over ranks takes them all to tell.
            at_hand = type(loss) is Tensor and loss.device.type == "cpu" and loss.is_floating_point()
            at_hand = at_hand and not torch.compiler.is_compiling()
            if loss.dim():
                loss = loss.detach().float().mean()
            self.losses.append(loss.item() if at_hand else loss.detach().clone())
        elif loss is not None:
            self.losses.append(loss)
        self.sizes.append(batch_size)
        if batch_size is not None:
            self.batch_size = (self.batch_size or 0.0) + batch_size

    def forget_observations(self) -> None:
        """The batch they belonged to was given up."""
        self.losses, self.sizes, self.batch_size = [], [], None

    def pack_losses(self) -> None:
        """Put the losses that are on a device into the packet."""
        for index, loss in enumerate(self.losses):
            if isinstance(loss, Tensor):
                self.packet.add(f"loss{index}", loss)
