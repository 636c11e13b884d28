"""What all ranks train: a small classifier of drawn digits, and how each rank comes by its samples."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradvitals.lab.distributed.cell import Cell
from gradvitals.lab.faults.models import MLP
from gradvitals.lab.faults.pictures import digits

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
