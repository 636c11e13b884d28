"""What the device hands to the host for one step: sums on their way, and what is needed to read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from gradvitals.measure.clock import Lap
from gradvitals.measure.observed import Observed
from gradvitals.measure.packet import Packet, Shipment
from gradvitals.types import Layout, Stage


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
    observed: Observed = field(default_factory=Observed)
    """What the loop told."""
    batch_size: float | None = None
    """Samples in the step, where known."""
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
