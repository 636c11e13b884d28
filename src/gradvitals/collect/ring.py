"""Where the numbers of plain steps wait: in host memory they are written at once, on a device 32 steps together."""

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
    HAS_LOSS,
    HAS_NORMS,
    PACKED_STEP,
    PLAIN_STEP,
    encode_plain,
    pack_rows,
    plain_head,
)

RING_STEPS = 32
"""The most steps in the ring of a device."""

WritePlain = Callable[[bytes, int], None]
"""Takes plain steps in a row, as `encode_plain` makes them, and how many they are."""

StepValues = tuple[int, float, float, float, float, float, int, int]
"""Of a plain step: its number, time, wall seconds, learning rate, limit of the clip, batch size, flags and passes."""

LOSS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What a ring keeps losses of without losing digits."""

SMALL_BYTES = 1024
"""A loss that is a part of a larger tensor is copied, so that its memory can be freed."""


class HostRing:
    """The ring of a model in host memory: it has room for one step, which is written as it ends."""

    def __init__(self, rows: Sequence[int], write: WritePlain) -> None:
        packed = pack_rows(rows)
        self._heads = plain_head(packed, 1, 0), plain_head(packed, 1, len(rows))
        """What comes before a step without norms, and before one with them."""
        self._write = write
        self._norms = np.zeros(len(rows), dtype=np.float32)

    def note_loss(self, loss: Tensor | float | None) -> Any:
        """Returns a loss as a number; None if only a full record can hold it."""
        if type(loss) is Tensor:
            if not loss.is_cpu or loss.dim() or not loss.is_floating_point() or torch.compiler.is_compiling():
                return None
            return loss.item()
        return loss if type(loss) is float else None

    def loss_value(self, loss: Any) -> Tensor | float:
        """The number."""
        return float(loss)

    def note_norms(self, norms: Tensor) -> bool:
        """Keep norms that are finite; what lies behind others is worth a closer look."""
        self._norms = norms.numpy()
        return math.isfinite(float(self._norms.sum()))

    def norms(self) -> Tensor:
        """The norms that were kept."""
        return torch.from_numpy(self._norms)

    def put(self, losses: Sequence[float], share: float, values: StepValues) -> None:
        """Write the step; its loss is the sum of these times a share."""
        number, time, wall, lr, max_norm, batch_size, flags, passes = values
        loss = math.nan
        if losses:
            loss = sum(losses) * share
            flags |= HAS_LOSS
        data = PACKED_STEP.pack(number, time, wall, loss, lr, max_norm, batch_size, flags, passes)
        without, whole = self._heads
        data = whole + data + self._norms.tobytes() if flags & HAS_NORMS else without + data
        self._write(data, 1)


class DeviceRing:
    """The ring of a model on a device: holds on to the tensors of each step and joins them when it is emptied.

    So a step launches nothing. A loop may write over a loss that is still held here, as the replay of a CUDA graph
    does. That loss is then unknown, and later ones are copied.

    Args:
        rows: The row of the model that each norm belongs to.
        device: Where the gradients are.
    """

    def __init__(self, rows: Sequence[int], device: torch.device) -> None:
        self.rows = pack_rows(rows)
        self._width, self._device = len(rows), device
        self._copies = False
        self._step_norms: Tensor | None = None
        self._start()

    def _start(self) -> None:
        self._steps: list[bytes] = []
        self._losses: list[Tensor] = []
        self._loss_steps: list[int] = []
        """The place of the step of each loss."""
        self._shares: list[float] = []
        """What each loss counts for in that of its step."""
        self._versions: list[int] = []
        self._addresses: dict[int, int] = {}
        """The place of the last loss at each address."""
        self._lost: set[int] = set()
        """The places of losses that were written over."""
        self._norms: list[Tensor] = []
        self._norm_steps: list[int] = []

    @property
    def count(self) -> int:
        """Steps in it."""
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        """Whether it has no room for another step."""
        return len(self._steps) >= RING_STEPS

    def note_loss(self, loss: Tensor | float | None) -> Any:
        """Returns a loss that stays on its device; None if only a full record can hold it."""
        if type(loss) is not Tensor or loss.dtype not in LOSS_DTYPES or loss.dim() or loss.device != self._device:
            return None
        if not self._losses and loss.untyped_storage().nbytes() > SMALL_BYTES:
            self._copies = True
        if loss.requires_grad:
            loss = loss.detach()
        return loss.clone() if self._copies else loss

    def loss_value(self, loss: Any) -> Tensor | float:
        """A copy: the loop may write over the loss."""
        copy: Tensor = loss.clone()
        return copy

    def note_norms(self, norms: Tensor) -> bool:
        """Keep norms."""
        self._step_norms = norms
        return True

    def norms(self) -> Tensor:
        """The norms that were kept."""
        assert self._step_norms is not None
        return self._step_norms

    def put(self, losses: Sequence[Tensor], share: float, values: StepValues) -> None:
        """End the step; its loss is the sum of these times a share."""
        number, time, wall, lr, max_norm, batch_size, flags, passes = values
        place = len(self._steps)
        if losses:
            flags |= HAS_LOSS
            for loss in losses:
                address = loss.data_ptr()
                if address in self._addresses:
                    self._lost.add(self._addresses[address])
                    self._copies, loss = True, loss.clone()
                    address = loss.data_ptr()
                self._addresses[address] = len(self._losses)
                self._losses.append(loss)
                self._versions.append(loss._version)
                self._loss_steps.append(place)
                self._shares.append(share)
        if flags & HAS_NORMS and self._step_norms is not None:
            self._norms.append(self._step_norms)
            self._norm_steps.append(place)
        self._steps.append(PACKED_STEP.pack(number, time, wall, math.nan, lr, max_norm, batch_size, flags, passes))

    @torch.no_grad()
    def take(self) -> tuple[PlainBlock, Tensor]:
        """Empty it. Returns its steps and, still on the device, all losses and then all norms."""
        altered = [n for n, one in enumerate(self._losses) if one._version != self._versions[n]]
        if altered:
            self._copies = True
            self._lost.update(altered)
        kept = [n for n in range(len(self._losses)) if n not in self._lost]
        parts = []
        try:
            parts = [_joined([self._losses[n] for n in kept])] if kept else []
        except RuntimeError:  # torch.compile frees what its CUDA graphs write over
            self._copies, kept, self._lost = True, [], set(range(len(self._losses)))
        parts += [torch.cat(self._norms)] if self._norms else []
        block = PlainBlock(
            rows=self.rows,
            width=self._width,
            steps=b"".join(self._steps),
            loss_steps=[self._loss_steps[n] for n in kept],
            shares=[self._shares[n] for n in kept],
            lost_steps=[self._loss_steps[n] for n in self._lost],
            norm_steps=self._norm_steps,
        )
        numbers = torch.cat(parts) if parts else torch.empty(0, device=self._device)
        self._start()
        return block, numbers


def _joined(losses: list[Tensor]) -> Tensor:
    if len({loss.dtype for loss in losses}) > 1:
        losses = [loss.float() for loss in losses]
    return torch.stack(losses).float()


@dataclass(frozen=True)
class PlainBlock:
    """The plain steps that left a ring together."""

    rows: bytes
    """Packed rows of the norms of a step."""
    width: int
    """Their number."""
    steps: bytes
    loss_steps: list[int]
    """The place of the step that each loss belongs to."""
    shares: list[float]
    """What it counts for in that step's loss."""
    lost_steps: list[int]
    """Places of steps with a loss that is not known."""
    norm_steps: list[int]
    """Places of the steps with norms."""

    def landed(self, numbers: NDArray[np.float32]) -> tuple[NDArray[np.void], NDArray[np.float32]]:
        """Returns the steps with their losses, and a row of norms per step, given the numbers on the host."""
        steps = np.frombuffer(bytearray(self.steps), PLAIN_STEP)
        losses, norms = numbers[: len(self.loss_steps)], numbers[len(self.loss_steps) :]
        weights = losses * np.asarray(self.shares)
        sums = np.bincount(np.asarray(self.loss_steps, dtype=np.intp), weights=weights, minlength=len(steps))
        known = steps["flags"] & HAS_LOSS > 0
        known[self.lost_steps] = False
        steps["loss"] = np.where(known, sums, math.nan)
        steps["flags"] = np.where(known, steps["flags"], steps["flags"] & ~np.uint32(HAS_LOSS))
        if not self.norm_steps:
            return steps, np.empty((len(steps), 0), dtype=np.float32)
        rows = np.full((len(steps), self.width), math.nan, dtype=np.float32)
        rows[self.norm_steps] = norms.reshape(-1, self.width)
        return steps, rows

    def encode(self, steps: NDArray[np.void], norms: NDArray[np.float32]) -> bytes:
        """Returns some of its steps as bytes for the journal."""
        return encode_plain(self.rows, steps, norms)
