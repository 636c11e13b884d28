"""What all ranks train, what happens to one of them, and which findings recognize it."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.faults.tasks import MLP, digits
from benchmarks.recovery.faults import flip_bit

WrapName = Literal["ddp", "fsdp"]
FaultName = Literal[
    "clean",
    "clean_dropout",
    "seed",
    "shard",
    "shard_dropout",
    "weight_bit",
    "state_bit",
    "scaled",
    "nan",
    "killed",
    "sampler_seed",
]

WRAPS: tuple[WrapName, ...] = get_args(WrapName)
CLEAN: tuple[FaultName, ...] = ("clean", "clean_dropout")
KILLED: FaultName = "killed"
UNSEEN: tuple[FaultName, ...] = ("sampler_seed",)
"""Faults that an audit cannot see; planted only where they are asked for by name."""
FAULTS: tuple[FaultName, ...] = tuple(name for name in get_args(FaultName) if name not in CLEAN)
OF_REPLICAS: tuple[FaultName, ...] = ("weight_bit", "state_bit")
"""Faults in copies, which a sharded model does not have."""

DEFAULT_RANKS = 4
DEFAULT_STEPS = 500
DEFAULT_CLEAN_STEPS = 1000
DEFAULT_FAULT_STEP = 123
"""Neither an audit nor a full reading is due then: a fault must not be planted where it happens to be looked at."""
DEFAULT_AUDIT_EVERY = 100


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run to make. Everything in it depends on these values alone."""

    fault: FaultName
    wrap: WrapName = "ddp"
    ranks: int = DEFAULT_RANKS
    steps: int = DEFAULT_STEPS
    fault_step: int = DEFAULT_FAULT_STEP
    audit_every: int = DEFAULT_AUDIT_EVERY
    seed: int = 0

    @property
    def label(self) -> str:
        """A few words for a line of progress, and a name for its folder."""
        return f"{self.wrap}.{self.fault}.{self.seed}"

    @property
    def is_clean(self) -> bool:
        """Whether nothing happens in it."""
        return self.fault in CLEAN

    @property
    def odd_rank(self) -> int:
        """The rank that it happens to: neither the first nor, where there are three or more, the last."""
        return max(1, self.ranks - 2)

    @property
    def twin(self) -> int:
        """The rank whose samples it reads, where that is the fault."""
        return self.odd_rank - 1

    @property
    def has_dropout(self) -> bool:
        """Whether the model has dropout, and every rank random numbers of its own."""
        return self.fault in ("clean_dropout", "shard_dropout")

    @property
    def is_guarded(self) -> bool:
        """Whether a Guard may act."""
        return self.fault == "nan"


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """How a run ended for one rank."""

    rank: int
    steps: int
    seconds: float
    """Wall time of a step."""
    loss: float
    left_out: tuple[int, ...] = ()
    """Steps that its Guard has left out."""
    digest: str = ""
    """Of all its weights at the end, bit for bit; empty where they are sharded."""
    collectives: int = 0
    """Collectives of gradvitals' own."""
    bytes_sent: int = 0
    """Handed to them."""
    error: str = ""
    """What ended its training early."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankResult:
        """The inverse of `to_json`."""
        return cls(**{**data, "left_out": tuple(data["left_out"])})


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended."""

    cell: Cell
    ranks: tuple[RankResult, ...]
    """Of those that lived to tell."""
    findings: tuple[Mapping[str, Any], ...] = field(default=())
    """What the record of the run has, as `Finding.to_json` writes it."""
    steps_kept: int = 0
    """Steps that the record has a norm of."""


NUM_SAMPLES = 16384
BATCH_SIZE = 32
"""Of one rank."""
LEARNING_RATE = 1e-3
DROPOUT = 0.1
RESEEDED = 1000
"""Added to a seed to make it another one."""


class Shards:
    """The samples of one rank: every epoch is shuffled alike on all ranks, and each takes every so many-th of it.

    Args:
        rank: Whose samples these are. May be changed: the next batch is then another rank's.
        world: Number of ranks.
        seed: Of the pictures.
        generator: What epochs are shuffled with; None for torch's own random numbers, which must then be the same on
            all ranks.
    """

    def __init__(self, rank: int, world: int, *, seed: int, generator: torch.Generator | None) -> None:
        self.rank, self.world, self.generator = rank, world, generator
        self.inputs, self.targets = digits(NUM_SAMPLES, torch.Generator().manual_seed(seed))
        self._batches = self._epochs()

    def take(self) -> tuple[Tensor, Tensor]:
        """The next batch."""
        chosen = next(self._batches)[self.rank :: self.world]
        return self.inputs[chosen], self.targets[chosen]

    def shuffle_again(self) -> None:
        """Begin another epoch now."""
        self._batches = self._epochs()

    def _epochs(self) -> Iterator[Tensor]:
        together = BATCH_SIZE * self.world
        while True:
            order = torch.randperm(NUM_SAMPLES, generator=self.generator)
            yield from order[: NUM_SAMPLES // together * together].split(together)


def build(cell: Cell) -> nn.Module:
    """The model as one rank holds it, wrapped."""
    torch.manual_seed(cell.seed)
    model = MLP(depth=3, width=64, dropout=DROPOUT if cell.has_dropout else 0.0)
    if cell.wrap == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def shards(cell: Cell, rank: int) -> Shards:
    """A rank's samples. The order comes from torch's own random numbers only where a fault is to upset it."""
    generator = None if cell.fault == "seed" else torch.Generator().manual_seed(cell.seed)
    return Shards(rank, cell.ranks, seed=cell.seed, generator=generator)


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
