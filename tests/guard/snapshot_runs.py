"""Small runs to take snapshots of, with everything in them that a run may have."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradvitals.guard import RollBack
from gradvitals.guard.snapshot import SnapshotManager
from gradvitals.guard.training_state import TrainingState


class Position:
    """Data with a position: batch i is known by i."""

    def __init__(self) -> None:
        self.index = 0

    def __next__(self) -> Tensor:
        self.index += 1
        return torch.randn(8, 6, generator=torch.Generator().manual_seed(self.index))

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.Linear(12, 12).to(torch.bfloat16), nn.Linear(12, 3)
    )


def forward(net: nn.Module, batch: Tensor) -> Tensor:
    hidden = net[2](net[1](net[0](batch))).relu()
    # Randomness of all three kinds takes part, so that a resume must bring all of it back.
    noise = random.random() + np.random.rand()
    return (net[4](net[3](hidden.to(torch.bfloat16)).float()) + 0.01 * noise).square().mean()


class Run:
    """A run with a SnapshotManager, that calls it in the places where a Guard would."""

    def __init__(
        self,
        make_optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]],
        make_schedulers: Callable[[list[torch.optim.Optimizer]], list[Any]] = lambda optimizers: [],
        *,
        folder: Path | None = None,
        every: int = 4,
        settle: int = 0,
        keep: int = 2,
        scaler: torch.amp.GradScaler | None = None,
        parts: int = 1,
    ) -> None:
        self.parts = parts
        self.net, self.data, self.step, self.scaler = model(), Position(), 0, scaler
        self.optimizers = make_optimizers(self.net)
        self.schedulers = make_schedulers(self.optimizers)
        training_state = TrainingState(
            self.net, self.optimizers, schedulers=self.schedulers, scaler=scaler, data=self.data
        )
        self.snapshots = SnapshotManager(
            training_state, RollBack(mode="on", every=every, settle=settle, keep=keep), folder=folder
        )

    def train(self, steps: int, *, snapshots: bool = False) -> None:
        for _ in range(steps):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            for _ in range(self.parts):
                loss = forward(self.net, next(self.data)) / self.parts
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            self.snapshots.complete()
            for optimizer in self.optimizers:
                if self.scaler is not None:
                    self.scaler.step(optimizer)
                else:
                    optimizer.step()
            self.step += 1
            if snapshots:
                self.snapshots.settle(self.step)
                if self.snapshots.due(self.step):
                    assert self.snapshots.take(self.step, {"step": self.step})
            if self.scaler is not None:
                self.scaler.update()
            for scheduler in self.schedulers:
                scheduler.step(*[loss.detach()] * isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau))

    def all_bits(self) -> dict[str, Any]:
        """Everything there is, as bytes and plain values."""
        (plain, tensors), (settings, more) = self.snapshots.state.read(), self.snapshots.state.read_settings()
        tensors = {name: bits(tensor) for name, tensor in (tensors | more).items()}
        plain |= settings
        plain["random"] = {**plain["random"], "torch": bits(plain["random"]["torch"])}
        plain["random"]["numpy"] = plain["random"]["numpy"]["state"]["key"].tobytes()
        return {"tensors": tensors, "plain": repr(plain)}


def snapshots_of(net: nn.Module, folder: Path | None = None, *, settle: int = 0, keep: int = 2) -> SnapshotManager:
    """Snapshots at every step of a model under plain gradient descent."""
    state = TrainingState(net, torch.optim.SGD(net.parameters(), lr=1.0))
    return SnapshotManager(state, RollBack(mode="on", every=1, settle=settle, keep=keep), folder)


def take_healthy(snapshots: SnapshotManager, step: int) -> None:
    """Take a snapshot that has settled at once."""
    snapshots.take(step)
    snapshots.complete()
    snapshots.settle(step)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist())


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
