"""PlainRecorder: records the steps that go like most steps of a run, which have no objects of their own.

This is the code that runs at nearly every step of a run, so calls are few here and everything is prepared before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.collect import reductions
from gradvitals.collect.backward import BackwardCounter
from gradvitals.collect.observed import Observation
from gradvitals.collect.queues import DeviceQueue, HostQueue
from gradvitals.worker.record import (
    CARRIED,
    CLIPPED,
    HAS_LOSS,
    HAS_NORMS,
)


class PlainRecorder:
    """Records consecutive plain steps, one at a time. What is not plain is for `StepRecorder` to read.

    Every method that returns False leaves the step as it was: the recorder then takes over what was kept so far.

    Args:
        queue: Where the numbers of a step go.
        rows: The row of each norm.
        parameters: Their parameters.
        absent: The other parameters, which have no gradients.
        backward: Counts the backward passes of the step.
        adds_up: Whether the loss of a step is the sum of what is observed instead of its mean.
    """

    def __init__(
        self,
        queue: HostQueue | DeviceQueue,
        rows: Sequence[int],
        parameters: Sequence[nn.Parameter],
        absent: Sequence[nn.Parameter],
        backward: BackwardCounter,
        *,
        adds_up: bool,
    ) -> None:
        self.rows = rows
        self._queue = queue
        self._parameters, self._absent = parameters, absent
        self._backward = backward
        self._adds_up = adds_up
        self.begin([], math.inf)

    def begin(self, reads_norms: list[bool], reads_after: float) -> None:
        """Start some steps.

        Args:
            reads_norms: For each of them, whether norms are read if the loop does not compute them itself.
            reads_after: The observation after which to read them; before the optimizer's step at the latest.
        """
        self._planned: Iterator[bool] = iter(reads_norms)
        self.left, self._reads_after = len(reads_norms), reads_after
        """Steps that are left of them."""
        self._start_step()

    def forget_step(self) -> None:
        """Start the step anew: a CUDA graph was captured, and nothing was computed."""
        self._planned = chain([self._reads_norm], self._planned)
        self._start_step()

    def _start_step(self) -> None:
        self._reads_norm = next(self._planned, False)
        self.losses: list[Any] = []
        """The observed losses, as the queue keeps them."""
        self.passes: list[int] = []
        """The backward passes before each of them."""
        self.norms: Tensor | None = None
        self.read_at = -1
        """After how many backward passes the gradients were looked at."""
        self.norm_seconds = 0.0
        """Seconds spent on norms that the loop did not compute itself."""
        self.clipped = False
        self.max_norm: float | None = None

    def observe(self, loss: Tensor | float | None) -> bool:
        """Keep a loss of the step."""
        passes = self._backward.backwards
        kept = self._queue.keep_loss(loss) if passes else None
        if kept is None:
            return False
        reads = self._reads_norm and self.read_at != passes and len(self.losses) + 1 >= self._reads_after
        if reads and not self._read_norms(passes):
            return False
        self.losses.append(kept)
        self.passes.append(passes)
        return True

    def observations(self) -> list[Observation]:
        """Returns what was observed so far, as a full record holds it."""
        if self._adds_up and self.losses:
            return [Observation(sum(self.losses[1:], self.losses[0]), None, self.passes[-1])]
        return [Observation(loss, None, passes) for loss, passes in zip(self.losses, self.passes, strict=True)]

    def take_norms(self, rows: Sequence[int], norms: Tensor | None) -> bool:
        """Keep norms that the loop computed, or compute them if it kept none."""
        passes = self._backward.backwards
        if self.read_at == passes:
            return True
        if rows is not self.rows:
            return False
        if type(norms) is Tensor and norms.dtype == torch.float32:
            return self._keep(norms, passes)
        return self._read_norms(passes)

    def clip(self, max_norm: float | None) -> bool:
        """The loop is about to clip the gradients."""
        passes = self._backward.backwards
        if not self.clipped and self.read_at != passes and not self._read_norms(passes):
            return False
        self.clipped, self.max_norm = True, max_norm
        return True

    def reach(self) -> bool:
        """The optimizer is about to step."""
        if self.clipped:
            return True
        if self._backward.altered():
            return False
        passes = self._backward.backwards
        return not self._reads_norm or self.read_at == passes or self._read_norms(passes)

    def end_step(self, step: int, time: float, seconds: float, lr: float, batch_size: float | None, flags: int) -> None:
        """Put the numbers of the step into the queue and start the next one."""
        backward, losses, norms = self._backward, self.losses, self.norms
        flags |= HAS_LOSS * bool(losses) | HAS_NORMS * (norms is not None)
        flags |= CLIPPED * self.clipped | CARRIED * backward.carried
        max_norm = math.nan if self.max_norm is None else self.max_norm
        size = math.nan if batch_size is None else batch_size
        share = 1.0 if self._adds_up or len(losses) < 2 else 1 / len(losses)
        values = [step, time, seconds, math.nan, lr, max_norm, size, flags, backward.backwards]
        self._queue.put(losses, share, norms, values)
        backward.reset()
        self.left -= 1
        self._start_step()

    def _keep(self, norms: Tensor, passes: int) -> bool:
        if not self._queue.keeps_norms(norms):
            return False
        self.norms, self.read_at = norms, passes
        return True

    @torch.no_grad()
    def _read_norms(self, passes: int) -> bool:
        """Read the norms of gradients as they are now, if that is due."""
        if not self._reads_norm or (self._parameters[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            self.read_at = passes
            return True
        started = perf_counter()
        grads = [grad for parameter in self._parameters if (grad := parameter.grad) is not None]
        if len(grads) != len(self._parameters) or any(parameter.grad is not None for parameter in self._absent):
            return False
        norms = torch.stack(list(reductions.norms(grads)))
        if norms.dtype != torch.float32 or not self._keep(norms, passes):
            return False
        self.norm_seconds = perf_counter() - started
        return True
