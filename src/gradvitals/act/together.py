"""What the ranks of a run decide, they decide together: each tells its numbers, and all see the same sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from gradvitals.act.inbox import leads
from gradvitals.act.snap_place import Place
from gradvitals.errors import RunError
from gradvitals.worker.worker import print_line
from gradvitals.distributed.topology import call_meeting
from gradvitals.collect.recorder import StepInputs
from gradvitals.monitor import Monitor


class Together:
    """The ranks of a run as the Guard sees them. Its messages go through the group that training uses, between steps.

    Args:
        monitor: It knows who takes part, and who holds what.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._known: dict[tuple[tuple[int, ...], torch.device], tuple[Tensor, Tensor]] = {}

    @property
    def _ranks(self) -> Any:
        return self._monitor.ranks

    @property
    def several(self) -> bool:
        """Whether there is more than one rank."""
        return self._ranks is not None

    @property
    def leads(self) -> bool:
        """Whether this is the one that speaks for all."""
        return leads(self._monitor)

    @property
    def group(self) -> Any:
        """The process group of the training; None for all processes."""
        return None if self._ranks is None else self._ranks.device_group

    @property
    def place(self) -> Place | None:
        """Where this rank stands among them; None where it is alone."""
        ranks = self._ranks
        if ranks is None:
            return None
        return Place(ranks.rank, int(ranks.data_index[ranks.rank]), self._monitor.config.pipeline_stage)

    def agree(self, settings: str) -> None:
        """Find that every rank has a Guard, and all the same one: what one decides the others wait for.

        Raises:
            RunError: Where a rank has none, or another one.
        """
        if self._ranks is None:
            return
        meeting = call_meeting(self.group, self._monitor.config.rank_timeout)
        meeting.tell(f"guard/{meeting.rank}", settings)
        keys = [f"guard/{rank}" for rank in range(len(meeting.ranks))]
        meeting.wait(keys, "set a Guard")
        odd = [rank for rank, told in enumerate(meeting.told(keys)) if told != settings]
        if odd:
            raise RunError(f"the Guard of rank {odd[0]} has other settings than this; give all ranks the same Guard")

    def print_line(self, words: str) -> None:
        """Tell the user, once and not by every rank."""
        if self.leads:
            print_line(words, self._monitor.config.quiet)

    def nothing(self) -> StepInputs | None:
        """What a rank that has nothing to tell looks with, as all must look; None in a single process."""
        return StepInputs([], self._monitor.recorder.table.parameters, None, [], False, None) if self.several else None

    # -- numbers ------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where numbers are told when there are none on a device yet."""
        return self._monitor.recorder.table.parameters[0].device

    @property
    def num_rows(self) -> int:
        """The rows of all ranks together: stages of a pipeline have different ones."""
        return len(self._ranks.layout.tensors)

    def local_rows(self) -> list[int]:
        """For each row of all ranks, which one of this rank's it is; -1 where it has nothing of it."""
        found = [-1] * self.num_rows
        for row, number in enumerate(self._ranks.rows.tolist()):
            found[number] = row
        return found

    def shares(self, rows: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """What each of these rows counts in a sum over ranks, and which row of all it is."""
        key = tuple(rows), device
        if key not in self._known:  # on a GPU every such copy would make the host wait
            weights = torch.tensor([self._monitor.recorder.table.weight(row) for row in rows], dtype=torch.float64)
            numbers = torch.tensor([int(self._ranks.rows[row]) for row in rows])
            self._known[key] = weights.to(device), numbers.to(device)
        return self._known[key]

    def summed(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each; on a GPU the host does not wait for it."""
        there = numbers.to(self._reachable(numbers.device))
        dist.all_reduce(there, group=self.group)
        return there.to(numbers.device)

    def gathered(self, value: Any) -> list[Any]:
        """What every rank says, in their order; the host waits for it."""
        if self._ranks is None:
            return [value]
        values: list[Any] = [None] * self._ranks.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _reachable(self, device: torch.device) -> torch.device:
        """A device that the group can send from: NCCL knows no host memory."""
        group = self.group if self.group is not None else dist.group.WORLD
        types = [one.type for one in getattr(group, "_device_types", [])]
        if not types or device.type in types:
            return device
        return torch.device("cuda", torch.cuda.current_device()) if "cuda" in types else torch.device(types[0])
