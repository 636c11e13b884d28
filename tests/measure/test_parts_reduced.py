"""Parts of a step whose gradients are reduced over ranks, in one process: `.grad` is never what is measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from gradvitals.collect import microbatch
from gradvitals.collect.microbatch import MicrobatchSums
from gradvitals.collect.schedule import CostTimer
from gradvitals.collect.transfer import ReadingBuffer


class Two(nn.Module):
    """Two branches on a trunk, either of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor, *branches: str) -> Tensor:
        y = torch.tanh(self.trunk(x))
        return sum((getattr(self, branch)(y).square().sum() for branch in branches), start=y.sum() * 0)


@pytest.fixture
def net() -> Two:
    torch.manual_seed(0)
    return Two().double()


@pytest.fixture
def parts(net: Two) -> Iterator[MicrobatchSums]:
    errors: list[Exception] = []
    parameters = list(net.parameters())
    sums = MicrobatchSums(
        parameters,
        {},
        rows=range(len(parameters)),
        arrivals=[],
        timer=CostTimer(),
        on_error=errors.append,
        reduced=True,
    )
    yield sums
    sums.disarm()
    assert not errors


def batch(part: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(part), dtype=torch.float64)


def norms(packet: ReadingBuffer, index: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for rows, values in packet.named(f"micro{index}"):
        for row, value in zip(rows, values, strict=True):
            assert row not in found
            found[row] = float(value)
    return found


def expected(net: Two, part: int, *branches: str) -> dict[int, float]:
    named = list(net.parameters())
    grads = torch.autograd.grad(net(batch(part), *branches), named, allow_unused=True)
    return {row: float(grad.norm()) for row, grad in enumerate(grads) if grad is not None}


def spoil(net: Two) -> None:
    """What a reduction over ranks does to `.grad`."""
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1000.0)


@pytest.mark.parametrize("limit", [1, 64 * 2**20])
def test_several_are_measured_whenever_they_are_flushed(
    net: Two, parts: MicrobatchSums, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(microbatch, "FLUSH_BYTES", limit)
    parts.arm(radial=False)
    for part in range(3):
        net(batch(part), "left", "right").backward()
        spoil(net)
    count, packet = parts.finish()
    assert count == 3
    for part in range(3):
        assert norms(packet, part) == pytest.approx(expected(net, part, "left", "right"), rel=1e-12)


@pytest.mark.parametrize("limit", [1, 64 * 2**20])
@pytest.mark.parametrize("reduced", [True, False])
def test_a_branch_that_is_new_belongs_to_its_own_micro_batch(
    net: Two, parts: MicrobatchSums, limit: int, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reached before the trunk shows that a new micro-batch has begun."""
    monkeypatch.setattr(microbatch, "FLUSH_BYTES", limit)
    parts.reduced = reduced
    parts.arm(radial=False)
    branches = [("left",), ("right",), ("left", "right")]
    for part, chosen in enumerate(branches):
        net(batch(part), *chosen).backward()
    count, packet = parts.finish()
    assert count == 3
    for part, chosen in enumerate(branches):
        assert norms(packet, part) == pytest.approx(expected(net, part, *chosen), rel=1e-12)


def test_two_losses_of_one_micro_batch_are_one(net: Two, parts: MicrobatchSums) -> None:
    parts.arm(radial=False)
    net.left(batch(0) @ torch.ones(3, 4, dtype=torch.float64)).sum().backward()
    net.right(batch(0) @ torch.ones(3, 4, dtype=torch.float64)).sum().backward()
    count, packet = parts.finish()
    assert count == 1
    assert set(norms(packet, 0)) == {2, 3, 4, 5}


@pytest.mark.parametrize("given_up", [1, 2])
def test_what_was_thrown_away_does_not_count(net: Two, parts: MicrobatchSums, given_up: int) -> None:
    parts.arm(radial=False)
    for part in range(given_up):
        net(batch(50 + part), "left").backward()
    net.zero_grad()
    for part in range(2):
        net(batch(part), "right", "left").backward()
    count, packet = parts.finish()
    assert count == 2
    for part in range(2):
        assert norms(packet, part) == pytest.approx(expected(net, part, "left", "right"), rel=1e-12)
