"""The one-pass statistics against float64."""

from __future__ import annotations

import pytest
import torch

from gradvitals import kernels
from gradvitals.kernels import reductions
from gradvitals.kernels.reductions import Reader
from gradvitals.kernels.tables import Chunks

# The interpreter computes with numpy, which warns about results that are valid on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

SIZES = (7, 1, 2048, 16384, 16384 * 2 + 5)


def some(dtype: torch.dtype, device: torch.device, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(device, dtype) for size in SIZES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_matches_float64(dtype: torch.dtype, device: torch.device) -> None:
    tensors, others = some(dtype, device), some(dtype, device, seed=1)
    tensors[2][:100] = 0
    found = Reader().read(tensors, counts=True, others=others).cpu()
    wide, beside = [t.double().cpu() for t in tensors], [t.double().cpu() for t in others]
    expected = [
        [t.norm() for t in wide],
        [t.abs().max() for t in wide],
        [(t != 0).sum().double() for t in wide],
        [torch.zeros((), dtype=torch.float64)] * len(wide),
        [t @ o for t, o in zip(wide, beside, strict=True)],
        [o @ o for o in beside],
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=2e-6, atol=1e-4)


def test_nan_and_inf_are_counted(device: torch.device) -> None:
    tensors = [torch.ones(5000, device=device) for _ in range(3)]
    tensors[0][17] = torch.inf
    tensors[0][4000] = -torch.inf
    tensors[1][4999] = torch.nan
    norm, largest, _, nonfinite = Reader().read(tensors, counts=True).cpu()
    assert nonfinite.tolist() == [2, 1, 0]
    assert norm[0] == largest[0] == torch.inf
    assert norm[1].isnan()
    assert largest[1].isnan()
    assert (norm[2].item(), largest[2].item()) == (pytest.approx(5000**0.5), 1.0)


def test_slices_come_after_the_tensors_and_add_up(device: torch.device) -> None:
    tensors = [torch.randn(10, device=device), torch.randn(6, 4, 16, device=device)]
    squares = Reader().read(tensors, slices={1: 6}, norms=False)[0]
    assert len(squares) == 2 + 6
    torch.testing.assert_close(squares[2:].float(), tensors[1].square().sum((1, 2)))
    torch.testing.assert_close(squares[2:].sum(), squares[1])


def test_unaligned_tensors_are_read_correctly(device: torch.device) -> None:
    buffer = torch.randn(40000, device=device)
    views = [buffer[1:17000], buffer[17001:40000]]
    found = Reader().read(views)[0].float()
    torch.testing.assert_close(found, torch.stack([view.norm() for view in views]))


def test_moved_gradients_are_read(device: torch.device) -> None:
    reader = Reader()
    for seed in range(3):
        tensors = some(torch.float32, device, seed)  # elsewhere in memory, while the last ones are still held
        found = reader.read(tensors)[0].float()
        torch.testing.assert_close(found, torch.stack([t.norm() for t in tensors]))


def test_every_element_is_in_one_chunk() -> None:
    cut = Chunks([5, 100, 96], torch.device("cpu"), 32, {2: 3, 1: 3})
    assert cut.slices == {2: 3}  # 100 is not cut into 3
    tensors, starts, ends = cut.table.tolist()
    covered = {0: set(), 1: set(), 2: set()}
    for tensor, start, end in zip(tensors, starts, ends, strict=True):
        assert 0 < end - start <= 32
        assert not covered[tensor] & set(range(start, end))
        covered[tensor] |= set(range(start, end))
    assert [len(covered[t]) for t in range(3)] == [5, 100, 96]
    assert cut.ranges.tolist() == [[0, 1], [1, 5], [5, 8], [5, 6], [6, 7], [7, 8]]


def test_usable_rejects_what_kernels_cannot_read(device: torch.device) -> None:
    matrix = torch.randn(8, 6, device=device)
    assert kernels.usable(matrix)
    assert kernels.usable(matrix.t())
    assert kernels.usable(torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last))
    assert not kernels.usable(matrix[:, ::2])
    assert not kernels.usable(matrix.expand(2, 8, 6))
    assert not kernels.usable(matrix.double())
    assert not kernels.usable(matrix.to_sparse())


def test_reading_takes_two_launches_for_any_number_of_tensors(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    for name in ("_chunk_sums", "_finish"):
        kernel = getattr(reductions, name)

        class Counted:
            def __getitem__(self, grid, kernel=kernel, name=name):
                launched.append(name)
                return kernel[grid]

        monkeypatch.setattr(reductions, name, Counted())
    tensors = [torch.randn(3, device=device) for _ in range(40)]
    found = Reader().read(tensors, counts=True, others=tensors)[0].float()
    assert launched == ["_chunk_sums", "_finish"]
    torch.testing.assert_close(found, torch.stack([tensor.norm() for tensor in tensors]))
