"""Gradients of a few chosen tensors over a sliding window of steps, for their GSNR."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gradvitals.collect import reductions
from gradvitals.collect.transfer import ReadingBuffer
from gradvitals.worker.sums import NUM_BLOCKS

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
        """Add one step's gradient. Puts its squared norm and, at the end of a block, the window's sums into the buffer.

        Returns:
            Steps in a block, if the buffer now holds the sums of a full window; otherwise None.
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
        # Oldest block first, like the squared norms in the worker.
        without = torch.linalg.vector_norm(total - self.sums.roll(-(block + 1), 0), dim=1).square()
        buffer.add(f"window{self.row}", torch.cat([torch.dot(total, total)[None], without]), range(NUM_BLOCKS + 1))
        return self.block_steps

    def spoil(self) -> None:
        """Ignore the window until the last block has passed: it holds a gradient that was not complete."""
        self._blocks[(self.seen - 1) // self.block_steps % NUM_BLOCKS].fill_(math.nan)

    def state_dict(self) -> dict[str, Tensor | int]:
        """The state needed to resume."""
        return {"sums": self.sums.clone(), "seen": self.seen}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Continue from a saved state; ignore one of another shape."""
        sums = state["sums"]
        if isinstance(sums, Tensor) and sums.shape == self.sums.shape:
            self.sums.copy_(sums)
            self.seen = int(state["seen"])


def default_tensors(model: nn.Module, names: dict[int, str]) -> list[str]:
    """Returns the names of the first embedding's and the last linear layer's weight.

    Args:
        model: The model.
        names: Watched parameter names by the parameter's id.
    """
    embedding = [names.get(id(m.weight)) for m in model.modules() if isinstance(m, nn.Embedding)]
    head = [names.get(id(m.weight)) for m in model.modules() if isinstance(m, nn.Linear)]
    chosen = [*embedding[:1], *head[-1:]]
    return list(dict.fromkeys(name for name in chosen if name is not None))
