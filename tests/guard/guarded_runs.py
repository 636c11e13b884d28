"""Small runs for a Guard: batch i is known by i, so a run that never had a batch is easy to make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradvitals as gv

Makes = Callable[[nn.Module], list[torch.optim.Optimizer]]
Schedules = Callable[[list[torch.optim.Optimizer]], list[Any]]

NAN = float("nan")


class Net(nn.Module):
    """Two layers with batch norm between them, and a buffer that counts in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 1)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        result: Tensor = self.head(self.body(inputs))
        return result


def batch(index: int, kind: str = "") -> tuple[Tensor, Tensor]:
    """Inputs and targets. `huge`: targets far off, so the gradient is a million times its size; `nan`: one input."""
    generator = torch.Generator().manual_seed(1000 + index)
    inputs = torch.randn(16, 6, generator=generator)
    targets = inputs.sum(dim=1, keepdim=True) + torch.randn(16, 1, generator=generator)
    if kind == "nan":
        inputs[3, 2] = NAN
    if kind == "huge":
        targets = targets * 1e6
    return inputs, targets


def adamw(net: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(net.parameters(), lr=0.01, **options)]


def train_step(monitor: gv.Monitor, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """What a loop does with a loss."""
    optimizer.zero_grad()
    loss.backward()
    monitor.observe(loss)
    optimizer.step()


def each_step(run: Run, count: int, loss: Tensor) -> None:
    """Tick all schedulers after every step."""
    for scheduler in run.schedulers:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss.detach())
        else:
            scheduler.step()


class Run:
    """A plain training loop.

    Args:
        where: Folder of the run; None for neither Monitor nor Guard.
        guard: Settings of the Guard; None for none.
        bad: What is wrong with which batches.
        clip: What the loop clips to, if it does.
        parts: Micro-batches in a step.
        tick: What the loop does after its optimizers' steps; gets the run, the steps before this one and the loss.
    """

    def __init__(
        self,
        where: Path | None = None,
        guard: Mapping[str, Any] | None = None,
        *,
        optimizers: Makes = adamw,
        schedulers: Schedules = lambda optimizers: [],
        scaler: torch.amp.GradScaler | None = None,
        bad: Mapping[int, str] | None = None,
        clip: float | None = None,
        parts: int = 1,
        tick: Callable[[Run, int, Tensor], None] = each_step,
        net: nn.Module | None = None,
        config: gv.Config | None = None,
    ) -> None:
        self.net = net if net is not None else Net()
        self.optimizers = optimizers(self.net)
        self.schedulers = schedulers(self.optimizers)
        self.scaler, self.clip, self.parts, self.tick = scaler, clip, parts, tick
        self.bad = dict(bad or {})
        self.count = 0
        self.losses: list[float] = []
        self._monitor: gv.Monitor | None = None
        self._guard: gv.Guard | None = None
        if where is not None:
            settings = config if config is not None else gv.Config(quiet=True, diagnose=False)
            self._monitor = gv.watch(self.net, self.optimizers, run=where, config=settings)
        if guard is not None:
            given = {"scheduler": self.schedulers, "scaler": scaler, **guard}
            self._guard = gv.Guard(self._monitor, **given)

    @property
    def monitor(self) -> gv.Monitor:
        assert self._monitor is not None
        return self._monitor

    @property
    def guard(self) -> gv.Guard:
        assert self._guard is not None
        return self._guard

    def loss(self, index: int) -> Tensor:
        inputs, targets = batch(index, self.bad.get(index, ""))
        return (self.net(inputs) - targets).square().mean()

    def backward(self, index: int) -> Tensor:
        """All micro-batches of a step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        total = torch.zeros(())
        for part in range(self.parts):
            loss = self.loss(index * self.parts + part)
            scaled = loss / self.parts
            (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
            total = total + loss.detach() / self.parts
            if self._monitor is not None:
                self._monitor.observe(loss)
        return total

    def step(self, index: int) -> None:
        loss = self.backward(index)
        for optimizer in self.optimizers:
            if self.clip is not None:
                if self.scaler is not None:
                    self.scaler.unscale_(optimizer)
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(parameters, self.clip)
            if self.scaler is not None:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        self.tick(self, self.count, loss)
        self.count += 1
        self.losses.append(float(loss))

    def train(self, indices: Iterable[int]) -> Run:
        for index in indices:
            self.step(index)
        return self

    def close(self) -> Run:
        self.monitor.close()
        return self

    def kinds(self, *, taken: bool | None = None) -> list[tuple[str, int]]:
        """Kind and step of what was done."""
        return [(a.kind, a.step) for a in self.guard.actions if taken is None or a.taken == taken]

    def parameters(self) -> dict[str, Any]:
        return bits({name: value for name, value in self.net.named_parameters()})

    def all_bits(self) -> dict[str, Any]:
        """Everything that a step that was skipped must not have changed."""
        return bits(
            {
                "net": self.net.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "schedulers": [without_wrapping(scheduler.state_dict()) for scheduler in self.schedulers],
                "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            }
        )


def without_wrapping(state: Mapping[str, Any]) -> dict[str, Any]:
    """A scheduler's state without what only counts how it was called."""
    kept = {name: value for name, value in state.items() if name not in ("_step_count", "_is_initial")}
    for name in ("_schedulers",):
        if name in kept:
            kept[name] = [without_wrapping(each) for each in kept[name]]
    return kept


def bits(value: Any) -> Any:
    """The same with tensors as bytes, so that == means bit for bit."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().contiguous().cpu().numpy().tobytes())
    if isinstance(value, Mapping):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    if isinstance(value, float):
        return repr(value)
    return value if not callable(value) else repr(type(value))


def without(indices: Iterable[int], bad: Iterable[int]) -> list[int]:
    left = set(bad)
    return [index for index in indices if index not in left]
