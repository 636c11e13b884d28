"""Everything a Guard asks of the Monitor, in one place: nothing else in this package touches a Monitor's parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gradvitals.collect.recorder import StepInputs
from gradvitals.distributed.topology import call_meeting
from gradvitals.errors import GradvitalsError, RunError
from gradvitals.monitor import Monitor
from gradvitals.types import Action, Finding
from gradvitals.worker.worker import print_line


class MonitorLink:
    """A Guard's view of one Monitor."""

    def __init__(self, monitor: Monitor) -> None:
        if not isinstance(monitor, Monitor):
            raise TypeError(f"Guard got a {type(monitor).__name__} as monitor; expected what gradvitals.watch returns")
        if monitor._closed:
            raise GradvitalsError("this Monitor is closed; make a new one with gradvitals.watch")
        self._monitor = monitor
        self.ranks = Ranks(monitor)
        self.model: nn.Module = monitor.recorder.table.model
        self.optimizers: Sequence[torch.optim.Optimizer] = monitor.recorder.table.optimizers
        self.parameters: Sequence[nn.Parameter] = monitor.recorder.table.parameters

    @property
    def step(self) -> int:
        """The number of the optimizer step in progress. It advances when all optimizers have stepped."""
        return self._monitor.step

    @property
    def run_path(self) -> Path:
        """The run's folder."""
        return self._monitor.run_path

    @property
    def actions(self) -> list[Action]:
        """The actions recorded so far."""
        return self._monitor.actions

    # -- around an optimizer's step -------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> StepInputs | None:
        """Read the gradients that the optimizer is about to step with; None if nothing was read.

        With several ranks it always returns inputs, if empty ones: all ranks must take part in the reduction.
        """
        inputs = self._monitor.recorder.arrive(optimizer)
        return StepInputs([], self.parameters) if inputs is None and self.ranks.several else inputs

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """The Guard skipped this optimizer's step."""
        self._monitor.recorder.skip_step(optimizer)

    def step_failed(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer's step raised an error."""
        self._monitor.recorder.abandon(optimizer)

    def on_scaler_skip(self, callback: Callable[[torch.optim.Optimizer], None] | None) -> None:
        """Call back when a GradScaler skips a step without calling `optimizer.step`; None to stop."""
        self._monitor.recorder.on_scaler_skip = callback

    def restart_baselines(self) -> None:
        """Forget what was normal before a rollback, once the steps so far are diagnosed."""
        self._monitor.start_diagnosis_over()

    # -- the record ---------------------------------------------------------------------------------------------------

    def record(self, action: Action) -> None:
        """Store an action with the run."""
        self._monitor.record(action)

    def report(self, finding: Finding) -> None:
        """Store and print a finding about the Guard itself."""
        self._monitor.report(finding)

    def print(self, text: str) -> None:
        """Print a line to stderr, on the first rank, unless the config is quiet."""
        if self.ranks.leads:
            print_line(text, self._monitor.config.quiet)

    def on_close(self, callback: Callable[[], object]) -> None:
        """Call back when the Monitor closes, while it still records."""
        self._monitor.at_close(callback)

    # -- its state in a snapshot --------------------------------------------------------------------------------------

    def state_later(self) -> Callable[[], dict[str, Any]]:
        """The Monitor's state as of now, as a function that waits for it, to be called on another thread."""
        return self._monitor.state_soon()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue the Monitor from a saved state. Called before the first step only."""
        self._monitor.load_state_dict(state)


class Ranks:
    """The ranks of a run, which decide as one. Uses the process group of the training, between steps."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._shares: dict[tuple[tuple[int, ...], torch.device], tuple[Tensor, Tensor]] = {}

    @property
    def several(self) -> bool:
        """Whether there is more than one rank."""
        return self._monitor.ranks is not None

    @property
    def leads(self) -> bool:
        """Whether this is the first rank, the one that prints."""
        return self._monitor.ranks is None or self._monitor.ranks.rank == 0

    @property
    def group(self) -> Any:
        """The process group of the training; None for all processes."""
        return None if self._monitor.ranks is None else self._monitor.ranks.device_group

    @property
    def stage(self) -> int | None:
        """The pipeline stage, if stages use the same names for different tensors."""
        return None if self._monitor.ranks is None else self._monitor.config.pipeline_stage

    @property
    def device(self) -> torch.device:
        """The device for numbers that are on none yet."""
        return self._monitor.recorder.table.parameters[0].device

    @property
    def num_rows(self) -> int:
        """The rows of all ranks together: pipeline stages hold different ones."""
        assert self._monitor.ranks is not None
        return len(self._monitor.ranks.layout.tensors)

    def local_rows(self) -> list[int]:
        """This rank's row for each row of all ranks; -1 if the rank does not hold it."""
        assert self._monitor.ranks is not None
        found = [-1] * self.num_rows
        for row, number in enumerate(self._monitor.ranks.rows.tolist()):
            found[number] = row
        return found

    def shares(self, rows: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """The weight of each of these rows in a sum over ranks, and its number among the rows of all ranks."""
        assert self._monitor.ranks is not None
        key = tuple(rows), device
        if key not in self._shares:  # cached: on a GPU every such copy would block the host
            weights = torch.tensor([self._monitor.recorder.table.weight(row) for row in rows], dtype=torch.float64)
            numbers = torch.tensor([int(self._monitor.ranks.rows[row]) for row in rows])
            self._shares[key] = weights.to(device), numbers.to(device)
        return self._shares[key]

    def require_same(self, settings: str) -> None:
        """Check that every rank has a Guard with the same settings: ranks wait for each other's decisions.

        Raises:
            RunError: If a rank has no Guard, or one with other settings.
        """
        if not self.several:
            return
        meeting = call_meeting(self.group, self._monitor.config.rank_timeout)
        meeting.tell(f"guard/{meeting.rank}", settings)
        keys = [f"guard/{rank}" for rank in range(len(meeting.ranks))]
        meeting.wait(keys, "set a Guard")
        odd = [rank for rank, theirs in enumerate(meeting.told(keys)) if theirs != settings]
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
