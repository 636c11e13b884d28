"""GSNR over a sliding window of steps, for a few chosen tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gradvitals.collect import reductions
from gradvitals.collect.transfer import ReadingBuffer
from gradvitals.worker.aggregate import NUM_BLOCKS

MAX_COORDINATES = 2**16


class SlidingWindow:
    """The sums of one tensor's gradient over the last `steps` steps."""

    def __init__(self, row: int, parameter: Tensor, steps: int) -> None:
        self.row = row
        self.block_steps = max(1, round(steps / NUM_BLOCKS))
        self.stride = reductions.odd_stride(parameter.numel(), MAX_COORDINATES)
        size = math.ceil(parameter.numel() / self.stride)
        kind = reductions.accumulator(parameter.dtype)
        self.sums = torch.zeros(NUM_BLOCKS, size, dtype=kind, device=parameter.device)
        self._blocks = self.sums.unbind(0)
        self.seen = 0

    @torch.no_grad()
    def push(self, grad: Tensor, scale: Tensor | None, buffer: ReadingBuffer) -> int | None:
        """Add one step's gradient; put the window's sums, once it is full, into the buffer.

        The squared norm of the sample goes along at every step.

        Returns:
            Steps in a block, where the buffer now holds the sums of a full window; else None.
        """
        block, position = divmod(self.seen % (NUM_BLOCKS * self.block_steps), self.block_steps)
        values = reductions.flat(grad.to_dense() if grad.is_sparse else grad)
        if self.stride > 1:
            values = values[:: self.stride].to(self.sums.dtype)
        if scale is not None:
            values = values / scale
        if position == 0:
            self._blocks[block].copy_(values)
        else:
            self._blocks[block].add_(values)
        buffer.add(f"window_sq{self.row}", torch.dot(values, values))
        self.seen += 1
        if position + 1 < self.block_steps or self.seen < NUM_BLOCKS * self.block_steps:
            return None
        total = self.sums.sum(0)
        # Oldest block first, as the host's squared norms are.
        without = torch.linalg.vector_norm(total - self.sums.roll(-(block + 1), 0), dim=1).square()
        buffer.add(f"window{self.row}", torch.cat([torch.dot(total, total)[None], without]), range(NUM_BLOCKS + 1))
        return self.block_steps

    def spoil(self) -> None:
        """The gradient pushed last was not the step's whole one: be silent until its block has passed."""
        self._blocks[(self.seen - 1) // self.block_steps % NUM_BLOCKS].fill_(math.nan)

    def state_dict(self) -> dict[str, Tensor | int]:
        """Everything needed to go on after a restart."""
        return {"sums": self.sums.clone(), "seen": self.seen}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Go on from a saved state; one of another shape (a changed model or setting) is left aside."""
        sums = state["sums"]
        if isinstance(sums, Tensor) and sums.shape == self.sums.shape:
            self.sums.copy_(sums)
            self.seen = int(state["seen"])


def default_tensors(model: nn.Module, names: dict[int, str]) -> list[str]:
    """The embedding and the output head: the first embedding's weight and the last linear layer's.

    Args:
        model: The model.
        names: Watched parameter names by the parameter's id.
    """
    embedding = [names.get(id(m.weight)) for m in model.modules() if isinstance(m, nn.Embedding)]
    head = [names.get(id(m.weight)) for m in model.modules() if isinstance(m, nn.Linear)]
    chosen = [*embedding[:1], *head[-1:]]
    return list(dict.fromkeys(name for name in chosen if name is not None))
