"""The training loop of tasks that draw their data as they go: k micro-batches a step, warm-up, cosine decay to 0."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradvitals.errors import GradvitalsError
from gradvitals.lab.vrgd.arms import make_optimizer, warmup_cosine
from gradvitals.lab.vrgd.graphs import GraphedPasses
from gradvitals.lab.vrgd.trial import Trial

WARMUP = 0.1
"""Share of the steps over which the learning rate rises."""
CURVE_POINTS = 6
CHECK_EVERY = 20
"""Steps from one look at the loss to the next: a run that diverged is not carried to its end."""


@dataclass(frozen=True)
class Course:
    """How a training went."""

    losses: list[float]
    """Mean over the k micro-batches of each step, before it."""
    curve: dict[int, float]
    """What `look` returned, by the number of steps made; the last is after the last step."""
    seconds: float

    @property
    def diverged(self) -> bool:
        """Whether any loss was nan or infinite."""
        return not all(map(math.isfinite, self.losses))


def train_steps(
    trial: Trial,
    model: nn.Module,
    num_steps: int,
    *,
    draw: Callable[[], tuple[Tensor, ...]],
    loss: Callable[..., Tensor],
    look: Callable[[], float | Tensor],
    graphs: bool = True,
) -> Course:
    """Train a model as a trial says.

    Args:
        trial: Names the optimizer and the arm.
        model: Is changed.
        num_steps: How long.
        draw: Gives the batch of one step, as tensors of samples. They are divided into `trial.k` micro-batches.
        loss: Mean loss of a micro-batch, from its part of each tensor.
        look: Measures the model, at `CURVE_POINTS` moments. A tensor can be left on the device.
        graphs: On a GPU, replay the passes of a step as one CUDA graph; see `graphs`.
    """
    device = next(model.parameters()).device
    optimizer = make_optimizer(trial, model.named_parameters(), num_steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, num_steps, WARMUP))
    look_after = {max(1, round(num_steps * point / CURVE_POINTS)) for point in range(1, CURVE_POINTS + 1)}
    losses = torch.full((num_steps,), math.nan, device=device)
    curve: dict[int, float | Tensor] = {}
    done = 0
    start = time.perf_counter()
    with closing(GraphedPasses(loss, optimizer, trial.k, device=device, graphs=graphs)) as passes:
        for step in range(num_steps):
            total = passes(*draw())
            losses[step] = total
            optimizer.step()
            scheduler.step()
            done = step + 1
            if done % CHECK_EVERY == 0 and not math.isfinite(float(total)):
                break
            if done in look_after:
                curve[done] = look()
        kept = losses[:done].tolist()
    seconds = time.perf_counter() - start
    return Course(kept, {step: float(score) for step, score in curve.items()}, seconds)


def check_parts(trial: Trial) -> None:
    """Refuse a batch that does not divide into k micro-batches."""
    if trial.batch % trial.k:
        raise GradvitalsError(f"batch is {trial.batch}; expected a multiple of k, which is {trial.k}")
