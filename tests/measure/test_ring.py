"""The ring of a device: it holds the losses of plain steps without copying them, and notices if a loop writes over one.

The tensors are in host memory here, which makes no difference to the ring.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from gradvitals.collect.ring import DeviceRing
from gradvitals.collect.transfer import Transfer
from gradvitals.worker.record import HAS_NORMS, decode_plain


class Loop:
    """Makes plain steps with these losses."""

    def __init__(self) -> None:
        self.ring = DeviceRing([0, 2], torch.device("cpu"))
        self.delivered: list[bytes] = []
        self.transfer = Transfer(lambda *_: None, lambda step: None, lambda data, count: self.delivered.append(data))
        self.transfer.use(self.ring)
        self.step = 0

    def make_step(self, *losses: Tensor, norms: Tensor | None = None, share: float = 1.0) -> None:
        kept = list(map(self.ring.note_loss, losses))
        if norms is not None:
            self.ring.note_norms(norms)
        flags = 0 if norms is None else HAS_NORMS
        self.ring.put(kept, share, (self.step, 0.0, 0.0, 0.1, math.nan, math.nan, flags, len(losses)))
        self.step += 1

    def losses(self) -> list[float]:
        self.transfer.finish(1.0)
        return [float(loss) for data in self.delivered for loss in decode_plain(data, {}).steps["loss"]]


def replays(memory: Tensor) -> Iterator[Tensor]:
    """The loss of a CUDA graph: always the same memory, whose version does not change."""
    for step in range(8):
        memory.data.fill_(step)
        yield memory


def test_losses_and_norms_come_back_in_their_order() -> None:
    loop = Loop()
    for step in range(5):
        norms = torch.tensor([step, 2.0 * step]) if step % 2 else None
        loop.make_step(torch.tensor(float(step)), norms=norms)
    assert loop.losses() == [0.0, 1.0, 2.0, 3.0, 4.0]
    norms_read = decode_plain(loop.delivered[0], {}).norms
    np.testing.assert_array_equal(norms_read[1::2], [[1, 2], [3, 6]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_of_micro_batches_are_added_up_or_averaged(dtype: torch.dtype) -> None:
    loop = Loop()
    loop.make_step(*(torch.tensor(loss, dtype=dtype) for loss in (0.5, 0.25, 4.0)))
    loop.make_step(torch.tensor(8.0), torch.tensor(4.0), share=0.5)
    assert loop.losses() == [4.75, 6.0]


def test_a_loss_that_a_replay_writes_over_is_unknown_never_wrong() -> None:
    loop = Loop()
    for loss in replays(torch.zeros(())):
        loop.make_step(loss)
    first, *others = loop.losses()
    assert math.isnan(first)
    assert others == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_a_loss_that_the_loop_changes_in_place_is_unknown_never_wrong() -> None:
    loop = Loop()
    for _ in range(2):
        loss = torch.tensor(3.0)
        loop.make_step(loss)
        loss.mul_(100)
        loop.make_step(torch.tensor(5.0))
        loop.losses()
    one, two, three, four = loop.losses()
    assert math.isnan(one)
    assert (two, three, four) == (5.0, 3.0, 5.0)


def test_a_part_of_a_large_tensor_does_not_keep_it_alive() -> None:
    loop = Loop()
    large = torch.full((100_000,), 7.0)
    storage = large.untyped_storage().data_ptr()
    loop.make_step(large[3])
    assert loop.ring._losses[0].untyped_storage().data_ptr() != storage
    assert loop.losses() == [7.0]
