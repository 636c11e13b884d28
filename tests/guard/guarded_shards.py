"""Four ranks under a Guard in every arrangement, and the same run in one process; run by test_guard_ranks.py.

python guarded_shards.py RANK FOLDER
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradvitals as gv
from gradvitals.distributed.shards import local
from gradvitals.guard import guard as guard_module

WORLD, STEPS = 4, 20
SPIKE, BUMP, BROKEN = 14, 16, 18
"""Steps with a gradient that is to be skipped, clipped, and NaN on one rank alone."""
KINDS = {"ddp": 4, "fsdp": 4, "hsdp": 4, "tp": 1, "fsdp_tp": 2, "pipeline": 2, "fsdp, whole": 4}
"""Arrangements of four ranks, and how many parts of the batch they see. The last clips all tensors by one factor."""


MOVED = "fsdp to fsdp_tp"
"""A run that is given up after 13 steps, and gone on with in another arrangement."""


class Meshes:
    """Made once, by all ranks."""

    def __init__(self) -> None:
        self.flat = DeviceMesh("cpu", torch.arange(WORLD))
        self.square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        self.stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]


class Arrangement:
    """One model on one rank: how it is spread, and how a step's gradients come about."""

    def __init__(self, kind: str, meshes: Meshes | None) -> None:
        self.kind = kind
        torch.manual_seed(0)
        net = nn.Sequential(OrderedDict(a=nn.Linear(6, 8), tanh=nn.Tanh(), b=nn.Linear(8, 3)))
        self.worker, self.num_workers, self.rank = 0, KINDS.get(kind, 1), 0
        if meshes is not None:
            self.rank = dist.get_rank()
            self.worker = self.rank * self.num_workers // WORLD
            net = self._spread(net, meshes)
        self.net = net

    def _spread(self, net: nn.Sequential, meshes: Meshes) -> Any:
        if self.kind == "ddp":
            return nn.parallel.DistributedDataParallel(net)
        if self.kind == "pipeline":
            self.group, self.worker = meshes.stages[self.rank // 2], self.rank % 2
            return nn.Sequential(OrderedDict(a=net.a, tanh=net.tanh) if self.rank < 2 else OrderedDict(b=net.b))
        if self.kind in ("tp", "fsdp_tp"):
            mesh = meshes.flat if self.kind == "tp" else meshes.square["tensor"]
            parallelize_module(net, mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
        if self.kind.startswith("fsdp"):
            fully_shard(net, mesh=meshes.square["data"] if self.kind == "fsdp_tp" else meshes.flat)
        if self.kind == "hsdp":
            fully_shard(net, mesh=meshes.square)
        return net

    def backward(self, step: int) -> Tensor | None:
        """Gradients of one step's batch; returns the loss of this rank's part of it, if the rank knows."""
        inputs, targets = torch.randn(16, 6, generator=torch.Generator().manual_seed(step)), torch.ones(16, 3)
        targets[:4] = {SPIKE: 100.0, BUMP: 5.0}.get(step, 1.0)  # in the first part alone
        inputs, targets = (all_of.chunk(self.num_workers)[self.worker] for all_of in (inputs, targets))
        if self.kind != "pipeline":
            loss: Tensor = (self.net(inputs) - targets).square().mean()
            loss.backward()
            return loss.detach()
        return self._pipelined(inputs, targets)

    def _pipelined(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        loss = None
        if self.rank < 2:
            hidden = self.net(inputs)
            dist.send(hidden.detach(), self.rank + 2)
            back = torch.empty_like(hidden)
            dist.recv(back, self.rank + 2)
            hidden.backward(back)
        else:
            hidden = torch.empty(len(inputs), 8)
            dist.recv(hidden, self.rank - 2)
            loss = (self.net(hidden.requires_grad_()) - targets).square().mean()
            loss.backward()
            assert hidden.grad is not None
            dist.send(hidden.grad, self.rank - 2)
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= 2
        return None if loss is None else loss.detach()


def train(
    kind: str, meshes: Meshes | None, folder: Path, *, until: int = STEPS, snapshots: Path | None = None
) -> dict[str, Any]:
    """Train under a Guard; continue from what is in `snapshots`."""
    seen: list[list[Any]] = []
    reductions = [0]
    whole, real = guard_module.step_numbers, dist.all_reduce

    def step_numbers(*args: Any, **kwargs: Any) -> Any:
        before = reductions[0]
        found = whole(*args, **kwargs)
        assert reductions[0] - before == (0 if meshes is None else 1)
        norms = sorted(round(float(norm), 7) for _, norms in found.tensor_norms for norm in norms)
        seen.append([float(found.norm), float(found.loss), norms])
        return found

    def counted(*args: Any, **kwargs: Any) -> Any:
        reductions[0] += threading.current_thread() is threading.main_thread()
        return real(*args, **kwargs)

    run = Arrangement(kind, meshes)
    optimizer = torch.optim.AdamW(run.net.parameters(), lr=0.02, foreach=False)
    config = gv.Config(quiet=True, pipeline_stage=run.rank // 2 if kind == "pipeline" else None)
    monitor = gv.watch(run.net, optimizer, run=folder / kind.replace(", ", "_"), config=config)
    clip = gv.guard.Clip(
        method="quantile" if "whole" in kind else "tensor", first_steps=6, quantile=0.99, tensor_ratio=1.7
    )
    back = gv.guard.RollBack(every=5, settle=2)
    skip = gv.guard.Skip(first_steps=4, ratio=3.0)
    guard = gv.Guard(monitor, mode="act", clip=clip, skip=skip, rollback=back, folder=snapshots)
    begun = guard.resume() if snapshots is not None else 0
    guard_module.step_numbers, dist.all_reduce = step_numbers, counted
    try:
        for step in range(begun, until):
            optimizer.zero_grad()
            loss = run.backward(step)
            if loss is not None:
                monitor.observe(loss)
            if step == BROKEN and (meshes is None or run.rank == 2):
                grad = next(one.grad for name, one in run.net.named_parameters() if name.endswith("b.weight"))
                assert grad is not None
                local(grad)[0, 0] = float("nan")
            optimizer.step()
    finally:
        guard_module.step_numbers, dist.all_reduce = whole, real
        monitor.close()
    weights = {
        name.removeprefix("module."): getattr(one, "full_tensor", lambda one=one: one)().detach().double().tolist()
        for name, one in run.net.named_parameters()
    }
    return {
        "seen": seen,
        "actions": [(action.kind, action.step, action.taken) for action in guard.actions],
        "begun": begun,
        "step": guard.step,
        "weights": weights,
        "errors": [finding.title for finding in monitor.findings if finding.id.endswith(("_error", "_lost", "blind"))],
    }


def main(rank: int, folder: Path, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=100)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD, timeout=limit)
    meshes, results = Meshes(), dict[str, Any]()
    for kind in kinds or [*KINDS, MOVED]:
        try:
            if kind == MOVED:
                train("fsdp", meshes, folder / "before", until=13, snapshots=folder / "snapshots")
                results[kind] = train("fsdp_tp", meshes, folder / "after", snapshots=folder / "snapshots")
            else:
                results[kind] = train(kind, meshes, folder)
        except Exception:  # the others wait for this rank, and come no further either
            results[kind] = {"failed": traceback.format_exc()}
            break
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
