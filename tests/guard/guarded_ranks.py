"""What two ranks under a Guard do; run by test_guard_ranks.py, one process a rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))

STEPS, BAD = 24, 15
"""Steps to make, and the one with something that must not be trusted."""


def train(folder: Path, rank: int, scenario: str) -> dict[str, Any]:
    from guarded_runs import Net, batch

    import gradvitals as gv

    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    config = gv.Config(quiet=True)
    monitor = gv.watch(model, optimizer, run=folder / scenario, config=config)
    back = gv.guard.RollBack(every=8, settle=4)
    scaler = torch.amp.GradScaler("cpu", enabled=scenario.startswith("scaler"))
    guard = gv.Guard(
        monitor,
        mode="act",
        scheduler=scheduler,
        skip=gv.guard.Skip(first_steps=10),
        rollback=back,
        scaler=scaler if scaler.is_enabled() else None,
    )
    for index in range(STEPS):
        inputs, targets = batch(2 * index + rank)
        if scenario == "nan_weight_on_one" and index == BAD and rank == 1:
            with torch.no_grad():
                next(model.parameters())[0, 0] = float("nan")
        loss = (model(inputs) - targets).square().mean()
        if scenario in ("nan_gradient", "scaler") and index == BAD and rank == 1:
            loss = loss * float("nan")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if scenario == "scaler_on_one" and index == BAD and rank == 1:
            next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        told = loss.detach()
        if scenario == "nan_loss" and rank == 1 and index == BAD:
            told = told * float("nan")
        if scenario != "observed_on_one" or rank == 0:
            monitor.observe(told)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    monitor.close()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double()
    return {
        "actions": [(action.kind, action.step, action.taken) for action in guard.actions],
        "step": guard.step,
        "weights": [float(weights.sum()), float(weights.abs().sum())],
        "errors": [finding.title for finding in monitor.findings if finding.id in ("guard_error", "monitor_error")],
    }


SCENARIOS = (
    "clean",
    "nan_gradient",
    "observed_on_one",
    "nan_loss",
    "nan_weight_on_one",
    "scaler",
    "scaler_on_one",
)


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    results = {scenario: train(Path(folder), rank, scenario) for scenario in SCENARIOS}
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
