"""Snapshots on a GPU: the host never waits for the device, and what is kept is what was there when it was taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradvitals.guard import RollBack
from gradvitals.guard.snapshot import SnapshotManager
from gradvitals.guard.training_state import TrainingState

pytestmark = pytest.mark.gpu

WAYS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"foreach": True, "capturable": True},
    "tensor_lr": {"fused": True, "lr": "tensor"},
}


class Trained:
    """A model whose device lags far behind the host, with buffers that every forward changes."""

    def __init__(self, folder: Path | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Dropout(0.1), nn.Linear(256, 64)).cuda()
        if options.get("lr") == "tensor":
            options["lr"] = torch.tensor(1e-3, device="cuda")
        self.optimizer = torch.optim.AdamW(self.net.parameters(), **options)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3)
        subject = TrainingState(
            self.net, self.optimizer, schedulers=self.scheduler, scaler=self.scaler, data=(lambda: self.step, print)
        )
        self.keeper = SnapshotManager(subject, RollBack(mode="on", every=4, settle=0), folder=folder)
        self.step = 0
        self.busy = torch.randn(2048, 2048, device="cuda")

    def train(self, steps: int) -> None:
        for _ in range(steps):
            batch = torch.randn(32, 64, device="cuda")
            self.optimizer.zero_grad()
            self.scaler.scale((self.net(batch) - batch).square().mean()).backward()
            for _ in range(20):
                self.busy = (self.busy @ self.busy).clamp(-1, 1)
            self.keeper.complete()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.step += 1

    def snapshot(self) -> None:
        """Take one, waiting for the memory it needs but for nothing else."""
        self.keeper.settle(self.step)
        assert self.keeper.take(self.step, {"step": self.step})

    def everything(self) -> list[Tensor]:
        tensors = self.keeper.state.read()[1] | self.keeper.state.read_settings()[1]
        rates = [torch.as_tensor(group["lr"]).cpu() for group in self.optimizer.param_groups]
        return [one.detach().cpu().clone() for one in tensors.values()] + rates


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_back_and_on_again_is_what_happened_the_first_time(options: dict[str, Any]) -> None:
    run = Trained(**options)
    run.train(4)
    run.snapshot()
    torch.cuda.manual_seed(1)
    run.train(5)
    first = run.everything()
    run.keeper.settle(run.step)
    places = [parameter.data_ptr() for parameter in run.net.parameters()]
    for _ in range(2):
        assert run.keeper.restore() is not None
        torch.cuda.manual_seed(1)
        run.train(5)
        assert same(run.everything(), first)
    assert [parameter.data_ptr() for parameter in run.net.parameters()] == places


def test_what_is_kept_is_the_state_when_it_was_taken_though_the_device_lags() -> None:
    run = Trained(fused=True)
    run.train(4)
    torch.cuda.synchronize()
    before = {name: tensor.detach().cpu().clone() for name, tensor in run.keeper.state.read()[1].items()}
    for _ in range(50):
        run.busy = (run.busy @ run.busy).clamp(-1, 1)
    run.snapshot()
    run.net(torch.randn(32, 64, device="cuda"))  # changes the statistics of BatchNorm
    run.train(3)
    (snapshot,) = run.keeper._ring
    tensors = snapshot.tensors()
    assert all(tensors[name].is_pinned() and torch.equal(tensors[name], before[name]) for name in before)


def test_neither_taking_nor_completing_waits_for_the_device(tmp_path: Path) -> None:
    run = Trained(tmp_path, fused=True)
    run.train(4)
    run.snapshot()
    run.train(4)
    run.keeper.flush()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            run.snapshot()
            run.keeper.complete()
            run.step += 4
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.keeper.close()
    assert run.keeper.problems == []


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    torch.cuda.manual_seed(3)
    first = Trained(tmp_path, fused=True)
    torch.cuda.manual_seed(3)
    first.train(4)
    first.snapshot()
    first.train(5)
    assert first.keeper.close()
    second = Trained(tmp_path, fused=True)
    restored = second.keeper.resume()
    assert restored is not None
    assert restored.step == 4
    second.train(5)
    assert same(second.everything(), first.everything())
    second.keeper.close()
