"""A guarded run in a process of its own: resumes if it can, may kill itself, prints what it came to.

python guarded_process.py FOLDER STEPS DECIDE [KILL_AFTER]
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import gradvitals as gv

BAD = {4: "nan", 24: "huge", 33: "huge", 34: "nan", 52: "huge"}


class Data:
    """Batches by number; a position to save."""

    def __init__(self) -> None:
        self.index = 0

    def draw(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.index)
        inputs = torch.randn(16, 6, generator=generator)
        targets = inputs.sum(dim=1, keepdim=True) * (1e6 if BAD.get(self.index) == "huge" else 1.0)
        if BAD.get(self.index) == "nan":
            inputs[0, 0] = float("nan")
        self.index += 1
        return inputs, targets


def run(
    folder: Path, steps: int, decide: str, kill_after: int | None = None, *, snapshots: bool = True
) -> dict[str, Any]:
    """Train until so many batches have been drawn."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=200) if decide == "host" else None
    data = Data()
    monitor = gv.watch(net, optimizer, run=folder / "run", config=gv.Config(quiet=True))
    guard = gv.Guard(
        monitor,
        mode="act",
        skip=gv.guard.Skip(first_steps=10),
        rollback=gv.guard.RollBack(every=5, settle=5),
        scheduler=scheduler,
        data=(lambda: data.index, lambda index: setattr(data, "index", index)),
        folder=folder / "snapshots" if snapshots else None,
        decide=decide,  # type: ignore[arg-type]
    )
    began = guard.resume() if snapshots else 0
    while data.index < steps:
        inputs, targets = data.draw()
        loss = (net(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        monitor.observe(loss)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if kill_after is not None and data.index >= kill_after:
            assert guard._manager is not None
            guard._manager.flush(30.0)  # the last snapshot is on disk: what is tested is what it holds
            monitor.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    monitor.close()
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()["state"], "random": torch.get_rng_state()}
    digest = hashlib.sha256()
    for tensor in _tensors(state):
        digest.update(tensor.detach().numpy().tobytes())
    return {
        "began": began,
        "step": guard.step,
        "monitor": monitor.step,
        "digest": digest.hexdigest(),
        "rate": repr(optimizer.param_groups[0]["lr"]),
        "ticks": scheduler.last_epoch if scheduler is not None else 0,
        "learned": repr(guard.state_dict()["wrappers"][0]["baseline"]),
        "spikes": json.dumps(guard.state_dict()["spikes"]),
        "actions": [(a.kind, a.step, a.taken) for a in guard.actions],
        "kept": [(a.kind, a.step, a.taken) for a in gv.open_run(monitor.run_path).actions],
    }


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return []


if __name__ == "__main__":
    kill = int(sys.argv[4]) if len(sys.argv) > 4 else None
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], kill)))
