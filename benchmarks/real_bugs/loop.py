"""The ordinary training loop of a case, and the knobs that a fix may turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.real_bugs.data import Data

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Knobs:
    """What a program can change about a case without reading its code: the `change` of a fix."""

    change: Mapping[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    """Knobs that the case has and the change sets."""

    def __call__(self, name: str, value: Any) -> Any:
        """Returns the value of a setting, changed if the fix says so."""
        if name in self.change:
            self.used.add(name)
            return self.change[name]
        return value

    def scaled(self, name: str, *tensors: Tensor) -> list[Tensor]:
        """Returns inputs or targets, standardized by the first of them if the fix says so."""
        if self.change.get(name) != "standardize":
            return list(tensors)
        self.used.add(name)
        mean, std = tensors[0].mean(0), tensors[0].std(0).clamp_min(1e-6)
        if tensors[0].dim() > 2:
            mean, std = tensors[0].mean(), tensors[0].std()
        return [(tensor - mean) / std for tensor in tensors]


def batches(data: Data, size: int, shuffle: bool = True) -> Iterator[Data]:
    """Yields batches, epoch after epoch."""
    x, y = data
    while True:
        order = torch.randperm(len(x)) if shuffle else torch.arange(len(x))
        for part in order.split(size):
            if len(part) == min(size, len(x)):
                yield x[part], y[part]


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Loss,
    data: Data,
    knobs: Knobs,
    *,
    steps: int = 400,
    batch: int = 32,
    shuffle: bool = True,
    clip: float | None = None,
    schedule: Any = None,
    validate: Data | None = None,
) -> None:
    """Train as the first example of any tutorial does, with validation at the end of each epoch if there is data."""
    steps, batch, clip = int(knobs("steps", steps)), int(knobs("batch_size", batch)), knobs("max_norm", clip)
    epoch = max(len(data[0]) // batch, 1)
    source = batches(data, batch, shuffle)
    for step in range(steps):
        x, y = next(source)
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        if validate is not None and (step + 1) % epoch == 0:
            model.eval()
            with torch.no_grad():
                loss_fn(model(validate[0]), validate[1])
            model.train()


def sgd(model: nn.Module, knobs: Knobs, lr: float = 0.05, momentum: float = 0.0, decay: float = 0.0) -> Any:
    """Plain SGD."""
    momentum, decay = knobs("momentum", momentum), knobs("weight_decay", decay)
    return torch.optim.SGD(model.parameters(), lr=knobs("lr", lr), momentum=momentum, weight_decay=decay)


def adam(model: nn.Module, knobs: Knobs, lr: float = 1e-3, decay: float = 0.0) -> Any:
    """Adam, or AdamW with weight decay."""
    decay = knobs("weight_decay", decay)
    if decay:
        return torch.optim.AdamW(model.parameters(), lr=knobs("lr", lr), weight_decay=decay)
    return torch.optim.Adam(model.parameters(), lr=knobs("lr", lr))


@torch.no_grad()
def wrong(model: nn.Module, test: Data) -> float:
    """Returns the share of test samples whose class is wrong."""
    model.eval()
    return float((model(test[0]).argmax(1) != test[1]).float().mean())


@torch.no_grad()
def wrong_binary(model: nn.Module, test: Data, threshold: float = 0.5) -> float:
    """Returns the share of test samples on the wrong side of a threshold."""
    model.eval()
    return float(((model(test[0])[:, :1] > threshold) != (test[1][:, :1] > 0.5)).float().mean())


@torch.no_grad()
def unexplained(model: nn.Module, test: Data, y_scale: float = 1.0, y_shift: float = 0.0) -> float:
    """Returns the mean squared error over the variance of the targets, at most 2; NaN counts as 2."""
    model.eval()
    error = (model(test[0]) * y_scale + y_shift - test[1]).square().mean() / test[1].var()
    return min(float(error), 2.0) if bool(error.isfinite()) else 2.0
