"""Parts under `fully_shard` and beside it on each kind of device, in one process: held, copied or measured at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from gradvitals.collect.microbatch import MicrobatchSums
from gradvitals.collect.schedule import CostTimer
from gradvitals.collect.transfer import ReadingBuffer
from gradvitals.distributed.fsdp import parts_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A device, and a process group of one."""
    monkeypatch.setitem(os.environ, "GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if request.param == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


def new_net(device: str) -> nn.Sequential:
    """Tensors of more and of fewer elements than are handled many at a time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 2000), nn.Tanh(), nn.Linear(2000, 60), nn.Tanh(), nn.Linear(60, 3)).to(device)


def loss_of(net: nn.Module, part: int, device: str) -> Tensor:
    batch = torch.randn(8, 40, generator=torch.Generator().manual_seed(part)).to(device)
    loss: Tensor = net(batch).float().square().mean()
    return loss


def numbers(packet: ReadingBuffer, name: str) -> dict[int, float]:
    """What came for each row; parts of one number add up, as they do on their way to a reading."""
    sums: dict[int, float] = {}
    for rows, values in packet.named(name):
        for row, value in zip(rows, values, strict=True):
            sums[row] = sums.get(row, 0.0) + float(value)
    return sums


def measured(net: nn.Module, errors: list[Exception]) -> tuple[MicrobatchSums | None, str | None]:
    parameters = list(net.parameters())
    return parts_of(
        net,
        parameters,
        {},
        rows=range(len(parameters)),
        arrivals=[],
        timer=CostTimer(),
        on_error=errors.append,
        reduced=True,
    )


@pytest.mark.parametrize("sync", ["each", "last"])
@pytest.mark.parametrize("kind", ["plain", "sharded", "sharded bf16"])
def test_parts_on_a_device(device: str, kind: str, sync: str) -> None:
    net, dtype = new_net(device), torch.bfloat16 if kind.endswith("bf16") else torch.float32
    if kind != "plain":
        mesh = init_device_mesh(device, (1,))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in (net[0], net[2], net):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    errors: list[Exception] = []
    parts, reason = measured(net, errors)
    assert parts is not None, reason
    plain = new_net(device).to(dtype)
    for radial in (True, False):
        parts.arm(radial=radial)
        for part in range(3):
            if kind != "plain":
                net.set_requires_gradient_sync(sync == "each" or part == 2)  # type: ignore[operator]
            loss_of(net, part, device).backward()
        count, packet = parts.finish()
        assert not errors, errors
        assert count == 3
        for part in range(3):
            batch = torch.randn(8, 40, generator=torch.Generator().manual_seed(part)).to(device, dtype)
            grads = torch.autograd.grad(plain(batch).float().square().mean(), list(plain.parameters()))
            wanted = {row: float(grad.double().norm()) for row, grad in enumerate(grads)}
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            assert numbers(packet, f"micro{part}") == pytest.approx(wanted, rel=tolerance)
            pairs = enumerate(zip(grads, plain.parameters(), strict=True))
            along = {row: float((grad.double() * weight.detach().double()).sum()) for row, (grad, weight) in pairs}
            if radial:
                near = pytest.approx(along, rel=tolerance, abs=10 * tolerance * max(wanted.values()))
                assert numbers(packet, f"micro_radial{part}") == near
            else:
                assert not packet.named(f"micro_radial{part}")
        net.zero_grad()
    parts.disarm()


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # in a world of one
def test_flat_parameters_are_refused_with_a_reason(device: str) -> None:
    flat = FullyShardedDataParallel(new_net(device), device_id=torch.device(device), use_orig_params=True)
    parts, reason = measured(flat, [])
    assert parts is None
    assert reason is not None
    assert "fully_shard" in reason
