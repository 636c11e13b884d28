"""The Guard on a GPU: decisions on the device wait for nothing, and are those of the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gradvitals as gv

pytestmark = pytest.mark.gpu

NAN_STEP, SPIKE_STEP = 40, 60


def train(
    folder: Path, *, decide: str, steps: int = 90, sync_is_error: bool = False
) -> tuple[nn.Module, gv.Guard, gv.Monitor]:
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    truth = torch.randn(16, 1, device=device)
    batches = [torch.randn(64, 16, device=device) for _ in range(steps)]
    targets = [batch @ truth for batch in batches]
    targets[NAN_STEP] *= float("nan")
    targets[SPIKE_STEP] *= 1e4
    rollback = gv.guard.RollBack(every=20, settle=5)
    guard = gv.Guard(mode="act", decide=decide, rollback=rollback)  # type: ignore[arg-type]
    monitor = gv.watch(model, optimizer, run=folder / decide, config=gv.Config(quiet=True), guard=guard)
    for number, (batch, target) in enumerate(zip(batches, targets, strict=True)):
        if sync_is_error and number == 10:  # the first steps may set things up
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        loss = (model(batch) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        monitor.observe(loss)
        optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    monitor.close()
    assert not [finding.evidence for finding in monitor.findings if finding.id in ("guard_error", "monitor_error")]
    return model, guard, monitor


def test_a_guarded_step_never_waits_for_the_device(tmp_path: Path) -> None:
    model, guard, _ = train(tmp_path, decide="auto", sync_is_error=True)
    assert [(action.kind, action.step) for action in guard.actions] == [("skip", NAN_STEP), ("skip", SPIKE_STEP)]
    assert guard.snapshots >= 3
    assert all(tensor.isfinite().all() for tensor in (*model.parameters(), *model.buffers()))


def test_device_and_host_decide_the_same(tmp_path: Path) -> None:
    there, on_device, _ = train(tmp_path, decide="device")
    here, on_host, _ = train(tmp_path, decide="host")
    decided = [[(action.kind, action.step) for action in guard.actions] for guard in (on_device, on_host)]
    assert decided[0] == decided[1]
    assert on_device.step == on_host.step
    for one, other in zip(there.state_dict().values(), here.state_dict().values(), strict=True):
        assert torch.equal(one, other)
