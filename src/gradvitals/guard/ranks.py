"""The ranks of a guarded run, which decide as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from gradvitals.distributed.topology import find_rendezvous
from gradvitals.errors import RunError
from gradvitals.monitor import Monitor


class Ranks:
    """The ranks of one Monitor's run. Uses the process group of the training, between steps."""

    def __init__(self, monitor: Monitor) -> None:
        self._table, self._config, self._topology = monitor.recorder.table, monitor.config, monitor.ranks
        self._shares: dict[tuple[tuple[int, ...], torch.device], tuple[Tensor, Tensor]] = {}
        self.several = self._topology is not None  # whether there is more than one rank
        self.leads = self._topology is None or self._topology.rank == 0
        """Whether this is the first rank, the one that prints."""
        self.group: Any = None if self._topology is None else self._topology.device_group
        """The process group of the training; None for all processes."""
        self.stage = None if self._topology is None else self._config.pipeline_stage
        """The pipeline stage, if stages use the same names for different tensors."""
        self.num_rows = 0 if self._topology is None else len(self._topology.layout.tensors)
        """The rows of all ranks together: pipeline stages hold different ones."""

    @property
    def device(self) -> torch.device:
        """The device for numbers that are on none yet."""
        return self._table.parameters[0].device

    def local_rows(self) -> list[int]:
        """This rank's row for each row of all ranks; -1 if the rank does not hold it."""
        assert self._topology is not None
        found = [-1] * self.num_rows
        for row, number in enumerate(self._topology.rows.tolist()):
            found[number] = row
        return found

    def shares(self, rows: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """The weight of each of these rows in a sum over ranks, and its number among the rows of all ranks."""
        assert self._topology is not None
        key = tuple(rows), device
        if key not in self._shares:  # cached: on a GPU every such copy would block the host
            weights = torch.tensor([self._table.weight(row) for row in rows], dtype=torch.float64)
            numbers = torch.tensor([int(self._topology.rows[row]) for row in rows])
            self._shares[key] = weights.to(device), numbers.to(device)
        return self._shares[key]

    def require_same(self, settings: str) -> None:
        """Check that every rank has a Guard with the same settings: ranks wait for each other's decisions.

        Raises:
            RunError: If a rank has no Guard, or one with other settings.
        """
        if not self.several:
            return
        rendezvous = find_rendezvous(self.group, self._config.rank_timeout)
        rendezvous.publish(f"guard/{rendezvous.rank}", settings)
        keys = [f"guard/{rank}" for rank in range(len(rendezvous.ranks))]
        rendezvous.wait(keys, "set a Guard")
        odd = [rank for rank, theirs in enumerate(rendezvous.read(keys)) if theirs != settings]
        if odd:
            raise RunError(f"the Guard of rank {odd[0]} has other settings than this; give all ranks the same Guard")

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each. On a GPU the host does not wait for it."""
        group = self.group if self.group is not None else dist.group.WORLD
        types = [one.type for one in getattr(group, "_device_types", [])]
        device = numbers.device
        if types and device.type not in types:  # NCCL cannot send host memory
            device = torch.device("cuda", torch.cuda.current_device()) if "cuda" in types else torch.device(types[0])
        there = numbers.to(device)
        dist.all_reduce(there, group=self.group)
        return there.to(numbers.device)
