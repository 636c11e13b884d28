"""The queue of a device, which keeps the losses and norms of plain steps and joins them.

The tensors are in host memory here, which makes no difference to it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradvitals.collect.queues import DeviceQueue
from gradvitals.collect.transfer import Transfer
from gradvitals.worker.record import HAS_LOSS, HAS_NORMS, decode_plain


class Loop:
    """Makes plain steps with these losses."""

    def __init__(self) -> None:
        self.queue = DeviceQueue([0, 2], torch.device("cpu"))
        self.delivered: list[bytes] = []
        self.transfer = Transfer(lambda *_: None, lambda step: None, lambda data, count: self.delivered.append(data))
        self.transfer.use(self.queue)
        self.step = 0

    def make_step(self, *losses: Tensor | float, norms: Tensor | None = None, share: float = 1.0) -> None:
        kept = list(map(self.queue.keep_loss, losses))
        flags = HAS_LOSS * bool(kept) | HAS_NORMS * (norms is not None)
        values: list[Any] = [self.step, 0.0, 0.0, math.nan, 0.1, math.nan, math.nan, flags, len(losses)]
        self.queue.put(kept, share, norms, values)
        self.step += 1

    def losses(self) -> list[float]:
        self.transfer.finish(1.0)
        return [float(loss) for data in self.delivered for loss in decode_plain(data, {}).steps["loss"]]


def test_losses_and_norms_come_back_in_their_order() -> None:
    loop = Loop()
    for step in range(5):
        norms = torch.tensor([step, 2.0 * step]) if step % 2 else None
        loop.make_step(torch.tensor(float(step)), norms=norms)
    loop.make_step()
    *losses, none = loop.losses()
    assert losses == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert math.isnan(none)
    norms_read = decode_plain(loop.delivered[0], {}).norms
    np.testing.assert_array_equal(norms_read[1:5:2], [[1, 2], [3, 6]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_of_micro_batches_are_added_up_or_averaged(dtype: torch.dtype) -> None:
    loop = Loop()
    loop.make_step(*(torch.tensor(loss, dtype=dtype) for loss in (0.5, 0.25, 4.0)))
    loop.make_step(torch.tensor(8.0), torch.tensor(4.0), share=0.5)
    loop.make_step(3.0, torch.tensor(2.0), share=0.5)  # some are numbers already
    loop.make_step(7.0)
    assert loop.losses() == [4.75, 6.0, 2.5, 7.0]


def test_a_loss_that_is_written_over_later_keeps_its_value() -> None:
    loop, memory = Loop(), torch.zeros(())
    for step in range(8):
        memory.data.fill_(step)  # as the replay of a CUDA graph does: the version of the tensor does not change
        loop.make_step(memory)
        memory.mul_(100)
    assert loop.losses() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
