"""What happens to one rank, and which findings tell of it."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradvitals.lab.distributed.cell import Cell, FaultName
from gradvitals.lab.distributed.task import RESEEDED, Shards
from gradvitals.lab.recovery.faults import flip_bit

SCALE = 3.0
WEIGHT_BIT = 12
"""In the middle of the mantissa: the number changes by a two-thousandth or less."""
STATE_BIT = 20
"""Near the top of the mantissa: the number changes by an eighth or less."""
ELEMENT = 7


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A fault."""

    description: str
    found_by: tuple[str, ...]
    """Ids of the findings that tell of it, any of them."""


KINDS: Mapping[FaultName, Kind] = {
    "seed": Kind(
        description="one rank's random numbers, which shuffle its data, are seeded anew and alone",
        found_by=("rng_mismatch", "low_dispersion"),
    ),
    "shard": Kind(
        description="one rank reads the samples of another",
        found_by=("low_dispersion",),
    ),
    "shard_dropout": Kind(
        description="the same under dropout, each rank with random numbers of its own: gradients differ",
        found_by=("low_dispersion",),
    ),
    "weight_bit": Kind(
        description="one bit of one weight flips on one rank",
        found_by=("replica_mismatch",),
    ),
    "state_bit": Kind(
        description="one bit of Adam's second moment flips on one rank",
        found_by=("replica_mismatch",),
    ),
    "scaled": Kind(
        description=f"one rank's gradients are {SCALE:g} times too large before they are averaged",
        found_by=("high_dispersion",),
    ),
    "nan": Kind(
        description="NaN in the gradients of one rank, in one step; a Guard may act",
        found_by=("nonfinite",),
    ),
    "killed": Kind(
        description="the process of one rank is killed",
        found_by=("ranks_lost",),
    ),
    "sampler_seed": Kind(
        description="one rank shuffles with another seed, and nothing else about it changes",
        found_by=("low_dispersion", "rng_mismatch"),
    ),
}


class Planted:
    """The fault of a cell, on one rank.

    Args:
        cell: What to plant, and when.
        rank: The rank this is; nothing happens but on the odd one.
        data: Its samples.
    """

    def __init__(self, cell: Cell, rank: int, data: Shards) -> None:
        self._cell, self._data = cell, data
        self._is_here = rank == cell.odd_rank and not cell.is_clean

    def before_step(self, step: int) -> None:
        """What happens before a step's data is drawn."""
        if not self._is_here or step != self._cell.fault_step:
            return
        seed, fault = self._cell.seed + RESEEDED, self._cell.fault
        if fault == "seed":
            torch.manual_seed(seed)
            self._data.shuffle_again()
        elif fault == "sampler_seed":
            self._data.generator = torch.Generator().manual_seed(seed)
            self._data.shuffle_again()
        elif fault in ("shard", "shard_dropout"):
            self._data.rank = self._cell.twin
        elif fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """What backward starts from: all gradients of this rank are multiplied by what the loss is."""
        if self._is_here and self._cell.fault == "scaled" and step >= self._cell.fault_step:
            return SCALE * loss
        if self._is_here and self._cell.fault == "nan" and step == self._cell.fault_step:
            return math.nan * loss
        return loss

    def after_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """What happens between two steps."""
        if not self._is_here or step != self._cell.fault_step:
            return
        weight = optimizer.param_groups[0]["params"][0]
        if self._cell.fault == "weight_bit":
            flip_bit(weight.data, ELEMENT, WEIGHT_BIT)
        elif self._cell.fault == "state_bit":
            flip_bit(optimizer.state[weight]["exp_avg_sq"], ELEMENT, STATE_BIT)
