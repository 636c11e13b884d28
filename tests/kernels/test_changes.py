"""How far sampled coordinates have moved, against the same coordinates compared in float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from gradvitals import kernels
from gradvitals.collect import reductions
from gradvitals.collect import updates as changes
from gradvitals.collect.transfer import ReadingBuffer, Transfer
from gradvitals.collect.updates import COORDINATES, Changes
from gradvitals.kernels.reductions import ChangeReader
from gradvitals.worker.record import Part, StepRecord

SIZES = (1, 2, 63, 64, 65, 129, 1000, 20_011)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_squares_and_products_of_every_tensor(device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    states = [[torch.randn(size, generator=generator).to(dtype) for size in SIZES] for _ in range(4)]
    tensors = [state.clone().to(device) for state in states[0]]
    strides = [reductions.odd_stride(size, COORDINATES) for size in SIZES]
    reader = ChangeReader(tensors, strides, COORDINATES)
    last = [torch.zeros(0)] * len(SIZES)
    for before, now in pairwise(states):
        for tensor, value in zip(tensors, now, strict=True):
            tensor.copy_(value)
        squares, products = reader.look().double().cpu()
        moved = [(b.double() - a.double())[::s] for a, b, s in zip(before, now, strides, strict=True)]
        expected = torch.stack([change.square().sum() for change in moved])
        torch.testing.assert_close(squares, expected, rtol=1e-5, atol=1e-9)
        if len(last[0]):
            expected = torch.stack([change @ other for change, other in zip(moved, last, strict=True)])
            torch.testing.assert_close(products, expected, rtol=1e-4, atol=1e-4)
        last = moved


def test_nothing_beyond_a_tensor_is_read(device: torch.device) -> None:
    memory = torch.zeros(200, device=device)
    tensors = [memory[:70], memory[128:131]]
    reader = ChangeReader(tensors, [3, 1], COORDINATES)
    memory[70:128] = 5.0
    memory[131:] = 5.0
    assert reader.look().tolist() == [[0.0, 0.0], [0.0, 0.0]]
    memory[69] = 2.0
    memory[130] = 3.0
    assert reader.look()[0].tolist() == [4.0, 9.0]


def test_kernels_and_torch_agree(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(3,), (70, 2), (4, 5, 6, 7)]
    parameters = [nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
    parameters.append(nn.Parameter(torch.zeros(2, 3, 8, 8, device=device).to(memory_format=torch.channels_last)))
    by_kernels, by_torch = Changes(), Changes()
    for one in (by_kernels, by_torch):
        one.follow([7, 2, 5, 0], parameters)
    by_kernels.before_step()
    assert isinstance(by_kernels._groups[0], changes._KernelGroup)
    with monkeypatch.context() as without:
        without.setattr(kernels, "ready", lambda name: None)
        by_torch.before_step()
    assert not isinstance(by_torch._groups[0], changes._KernelGroup)
    assert by_kernels.shares == by_torch.shares
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        with torch.no_grad():
            for parameter in parameters:
                parameter += torch.randn(parameter.shape, generator=generator).to(device)
        found, expected = read(by_kernels), read(by_torch)
        assert set(found) == set(expected) == ({"change", "change_dot"} if step else {"change"})
        torch.testing.assert_close(found["change"], expected["change"], rtol=1e-5, atol=1e-4)
        if step:  # torch sums over all tensors
            both = (found["change_dot"].sum(), expected["change_dot"].sum())
            torch.testing.assert_close(*both, rtol=1e-5, atol=1e-4)


def test_torch_reads_tensors_that_steps_move(device: torch.device) -> None:
    parameter, one = nn.Parameter(torch.zeros(64, device=device)), Changes()
    one.follow([3], [parameter])
    found = []
    for _ in range(3):
        one.before_step()
        parameter.data = parameter.data + 1
        found.append(read(one))
    assert found[0] == {}  # by then, kernels have the old addresses
    assert [float(sums["change"][3]) for sums in found[1:]] == [64.0, 64.0]


def read(one: Changes) -> dict[str, torch.Tensor]:
    """The values per row, by name."""
    buffer, found = ReadingBuffer(), dict[str, torch.Tensor]()
    one.add(buffer)

    def deliver(_: StepRecord, parts: list[Part]) -> None:
        found.update({name: in_rows(*part) for name, *part in parts})

    transfer = Transfer(deliver, lambda step: None, lambda data, count: None)
    transfer.add(StepRecord(step=1), buffer)
    transfer.finish(10.0)
    return found


def in_rows(rows: Sequence[int], values: np.ndarray) -> torch.Tensor:
    placed = torch.zeros(8, dtype=torch.float64)
    placed[list(rows)] = torch.from_numpy(values).double()
    return placed
