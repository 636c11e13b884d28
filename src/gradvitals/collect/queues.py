"""Queues for plain steps: in host memory each step is written at once, on a device 32 steps are joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradvitals.worker.record import (
    PACKED_STEP,
    PLAIN_STEP,
    encode_plain,
    pack_rows,
    plain_head,
)

QUEUE_STEPS = 32
"""The most steps that are kept on a device."""

WritePlain = Callable[[bytes, int], None]
"""Takes plain steps in a row, as `encode_plain` makes them, and how many they are."""

LOSS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of losses that a queue keeps without losing digits."""


class HostQueue:
    """The queue for numbers in host memory: each step is written as it ends.

    Args:
        rows: The row of the model that each norm belongs to.
        write: Writes a step.
    """

    def __init__(self, rows: Sequence[int], write: WritePlain) -> None:
        packed = pack_rows(rows)
        self._heads = plain_head(packed, 1, 0), plain_head(packed, 1, len(rows))
        """Bytes before a step without norms, and before one with norms."""
        self._write = write

    def keep_loss(self, loss: Any) -> Any:
        """Returns a loss as a number; None if only a full record can hold it."""
        if type(loss) is Tensor:
            if not loss.is_cpu or loss.dim() or not loss.is_floating_point() or torch.compiler.is_compiling():
                return None
            return loss.item()
        return loss if type(loss) is float else None

    def keeps_norms(self, norms: Tensor) -> bool:
        """Whether norms are finite; what lies behind others is worth a closer look."""
        return math.isfinite(float(norms.numpy().sum()))

    def put(self, losses: list[Any], share: float, norms: Tensor | None, values: list[Any]) -> None:
        """Write a step.

        Args:
            losses: Its loss is the sum of these times `share`.
            share: See `losses`.
            norms: Its norms, if they were read.
            values: What `PACKED_STEP` holds, with NaN as the loss.
        """
        if losses:
            values[3] = sum(losses) * share
        without, whole = self._heads
        data = PACKED_STEP.pack(*values)
        self._write(without + data if norms is None else whole + data + norms.numpy().tobytes(), 1)


class DeviceQueue:
    """The queue for numbers on a device: a step launches one copy of each loss, and nothing else.

    Args:
        rows: The row of the model that each norm belongs to.
        device: Where the gradients are.
    """

    def __init__(self, rows: Sequence[int], device: torch.device) -> None:
        self._rows, self._width, self._device = pack_rows(rows), len(rows), device
        self._start()

    def _start(self) -> None:
        self._steps: list[bytes] = []
        self._losses: list[Tensor] = []
        self._loss_steps: list[int] = []
        self._shares: list[float] = []
        self._norms: list[Tensor] = []
        self._norm_steps: list[int] = []

    @property
    def count(self) -> int:
        """Steps in it."""
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        """Whether it should be emptied."""
        return len(self._steps) >= QUEUE_STEPS

    def keep_loss(self, loss: Any) -> Any:
        """Returns a copy of a loss, which a loop may write over; None if only a full record can hold it."""
        if type(loss) is float:
            return loss
        if type(loss) is not Tensor or loss.dtype not in LOSS_DTYPES or loss.dim() or loss.device != self._device:
            return None
        return loss.detach().clone()

    def keeps_norms(self, norms: Tensor) -> bool:
        """Whether it keeps norms: always."""
        return True

    def put(self, losses: list[Any], share: float, norms: Tensor | None, values: list[Any]) -> None:
        """Add a step: see `HostQueue.put`."""
        place = len(self._steps)
        if losses:
            numbers = [loss for loss in losses if type(loss) is float]
            tensors = [loss for loss in losses if type(loss) is not float]
            values[3] = sum(numbers) * share
            self._losses += tensors
            self._loss_steps += [place] * len(tensors)
            self._shares += [share] * len(tensors)
        if norms is not None:
            self._norms.append(norms)
            self._norm_steps.append(place)
        self._steps.append(PACKED_STEP.pack(*values))

    @torch.no_grad()
    def take(self) -> tuple[PlainBlock, Tensor]:
        """Empty it. Returns its steps and, still on the device, all losses and then all norms."""
        losses, norms = self._losses, self._norms
        if len({loss.dtype for loss in losses}) > 1:
            losses = [loss.float() for loss in losses]
        parts = [torch.stack(losses).float()] if losses else []
        parts += [torch.cat(norms)] if norms else []
        numbers = torch.cat(parts) if parts else torch.empty(0, device=self._device)
        block = PlainBlock(
            self._rows, self._width, b"".join(self._steps), self._loss_steps, self._shares, self._norm_steps
        )
        self._start()
        return block, numbers


@dataclass(frozen=True)
class PlainBlock:
    """The plain steps that left a `DeviceQueue` together."""

    rows: bytes
    """Packed rows of the norms of a step."""
    width: int
    """Their number."""
    steps: bytes
    loss_steps: list[int]
    """The place of the step that each loss belongs to."""
    shares: list[float]
    """The weight of each loss in that of its step."""
    norm_steps: list[int]
    """Places of the steps with norms."""

    def landed(self, numbers: NDArray[np.float32]) -> tuple[NDArray[np.void], NDArray[np.float32]]:
        """Returns the steps with their losses, and a row of norms per step, given the numbers on the host."""
        steps = np.frombuffer(bytearray(self.steps), PLAIN_STEP)
        losses, norms = numbers[: len(self.loss_steps)], numbers[len(self.loss_steps) :]
        places = np.asarray(self.loss_steps, dtype=np.intp)
        steps["loss"] += np.bincount(places, losses * np.asarray(self.shares), len(steps))  # NaN without a loss
        if not self.norm_steps:
            return steps, np.empty((len(steps), 0), dtype=np.float32)
        rows = np.full((len(steps), self.width), math.nan, dtype=np.float32)
        rows[self.norm_steps] = norms.reshape(-1, self.width)
        return steps, rows

    def encode(self, steps: NDArray[np.void], norms: NDArray[np.float32]) -> bytes:
        """Returns some of its steps as bytes for the journal."""
        return encode_plain(self.rows, steps, norms)
