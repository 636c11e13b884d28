"""All forward and backward passes of a step as one CUDA graph: the host launches one thing, not thousands of kernels.

The first steps of a training run as they always do. They are its warm-up as well: libraries choose their kernels,
blocks are compiled, optimizers make their state. Then the passes are captured, and from there on every step fills the
memory that the graph reads, replays it, and finds its gradients in the same ``.grad``.

Nothing is carried from one replay to the next: the graph casts weights anew, its first micro-batch writes ``.grad`` and
the others add to it, and an optimizer that collects parts clears its sums in step(). Running averages of batch norm
advance as ever.

`train` is the loop of tasks that draw their data as they go: k micro-batches per step, warm-up, cosine decay to 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn

from experiments.vrgd.trial import Trial, make_optimizer, warmup_cosine
from gradvitals.errors import GradvitalsError
from gradvitals.optim.vrgd import VarianceReduced

WARM_UP = 3
"""Steps that run as they always do, before the passes are captured."""

FusedReducer = Callable[[], Tensor]
"""Leaves gradients in ``.grad`` and returns the loss, reading the same memory each time."""


class Recorder(Protocol):
    """What can run passes as they are, record them once, and replay them."""

    def run(self, passes: FusedReducer) -> Tensor:
        """Just run them, in surroundings fit to warm up for `record`."""

    def record(self, passes: FusedReducer) -> Tensor:
        """Note what they do, without doing it. Returns the tensor that their loss will be in."""

    def replay(self) -> None:
        """Do what was recorded."""


class CudaRecorder:
    """Records a CUDA graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device)
        self._graph = torch.cuda.CUDAGraph()

    def run(self, passes: FusedReducer) -> Tensor:
        """Run on the stream that will be captured, in order with the current one."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = passes()
        current.wait_stream(self._stream)
        return loss

    def record(self, passes: FusedReducer) -> Tensor:
        """Capture."""
        # Backward runs in a thread of autograd's own, which need not keep to the rules of the capturing one.
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            return passes()

    def replay(self) -> None:
        """On the current stream, as evaluation and optimizer are."""
        self._graph.replay()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all trials of a process: libraries keep a workspace for each stream they meet."""
    return torch.cuda.Stream(device)


def make_recorder(device: torch.device) -> Recorder | None:
    """What records on a device; None where there are no graphs."""
    return CudaRecorder(device) if device.type == "cuda" else None


class GraphedPasses:
    """Computes the gradients of a batch in micro-batches, soon by replaying a graph.

    Who calls it makes the optimizer's step after each call, and clears no gradients.

    Args:
        loss: Mean loss of a micro-batch, from a part of each tensor of the batch.
        optimizer: Whose parameters receive gradients.
        num_parts: Micro-batches of a batch.
        device: Where.
        graphs: Whether to use a graph, where there are such.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        num_parts: int,
        *,
        device: torch.device,
        graphs: bool = True,
    ) -> None:
        self._loss = loss
        self._optimizer = optimizer
        self._num_parts = num_parts
        self._device = device
        self._recorder = make_recorder(device) if graphs else None
        self._num_runs = 0
        self._columns: list[Tensor] = []
        self._recorded: Tensor | None = None

    def __call__(self, *batch: Tensor) -> Tensor:
        """Leave the gradient of a batch's mean loss in ``.grad``.

        Args:
            batch: Tensors of samples, of the same shapes in every call. They are copied.

        Returns:
            The mean loss, on the device. The next call may overwrite it.
        """
        self._fill(batch)
        if self._recorder is None:
            return self._from_nothing()
        if self._num_runs < WARM_UP:
            self._num_runs += 1
            return self._recorder.run(self._from_nothing)
        collects = self._optimizer if isinstance(self._optimizer, VarianceReduced) else None
        if self._recorded is None:
            self._optimizer.zero_grad()
            self._recorded = self._recorder.record(self._passes)
            if collects is not None:
                collects.graph_captured()
        self._recorder.replay()
        if collects is not None:
            collects.graph_replayed()
        return self._recorded

    def close(self) -> None:
        """Give back the memory of the graph, gradients included."""
        self._recorder = self._recorded = None
        self._columns = []
        self._optimizer.zero_grad()

    def _fill(self, batch: tuple[Tensor, ...]) -> None:
        if not self._columns:
            self._columns = [torch.empty_like(column) for column in batch]
        for mine, given in zip(self._columns, batch, strict=True):
            mine.copy_(given)

    def _from_nothing(self) -> Tensor:
        self._optimizer.zero_grad()
        return self._passes()

    def _passes(self) -> Tensor:
        total = torch.zeros((), device=self._device)
        for part in zip(*(column.chunk(self._num_parts) for column in self._columns), strict=True):
            mean = self._loss(*part) / self._num_parts
            mean.backward()
            total += mean.detach()
        return total


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
