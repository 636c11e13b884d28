"""Four processes that write snapshots in one arrangement and go on in another; run by test_vault_moving.py.

python moving_ranks.py RANK FOLDER
"""

from __future__ import annotations

import json
import sys
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

from gradvitals.act.keeper import Keeper
from gradvitals.act.snap_place import Place
from gradvitals.act.subject import Subject
from gradvitals.collect.moments import stepping

WORLD, BEFORE, AFTER = 4, 3, 2
SIZES = {"alone": 1, "hsdp": 4, "fsdp_tp": 4, "pipe": 2, "same_names": 2, "tp": 2}

MOVES = [
    ("fsdp2", "fsdp4"),
    ("fsdp4", "fsdp2"),
    ("fsdp4", "alone"),
    ("alone", "fsdp2"),
    ("ddp2", "ddp3"),
    ("ddp3", "ddp2"),
    ("fsdp2", "ddp2"),
    ("hsdp", "fsdp2"),
    ("fsdp_tp", "tp"),
    ("tp", "fsdp_tp"),
    ("fsdp_tp", "fsdp4"),
    ("zero2", "zero3"),
    ("pipe", "alone"),
    ("alone", "pipe"),
    ("same_names", "same_names"),
    ("own_state2", "own_state4"),
]


class Groups:
    """Process groups and meshes of every size; all processes make them, members or not."""

    def __init__(self) -> None:
        self.of = {size: dist.new_group(list(range(size))) for size in range(1, WORLD + 1)}
        self.flat = {size: DeviceMesh("cpu", torch.arange(size)) for size in (2, WORLD)}
        self.square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


def size_of(kind: str) -> int:
    return SIZES.get(kind) or int(kind[-1])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class OwnState(torch.optim.AdamW):
    """Keeps a tensor of the size of the rank's own part of every parameter."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("own", torch.ones_like(parameter.to_local()))
        return result


class Run:
    """One arrangement of ranks that train the same model on the same data."""

    def __init__(self, kind: str, groups: Groups, folder: Path) -> None:
        rank, size = dist.get_rank(), size_of(kind)
        net = self.net = model()
        worker = rank
        make: Any = torch.optim.AdamW
        if kind.startswith(("fsdp", "own")) and kind != "fsdp_tp":
            fully_shard(net, mesh=groups.flat[size])
            make = OwnState if kind.startswith("own") else make
        elif kind == "hsdp":
            fully_shard(net, mesh=groups.square)
        elif kind in ("tp", "fsdp_tp"):
            mesh = groups.flat[2] if kind == "tp" else groups.square["tensor"]
            parallelize_module(net, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
            if kind == "fsdp_tp":
                fully_shard(net, mesh=groups.square["data"])
            worker = rank // 2
        elif kind.startswith("ddp"):
            net = nn.parallel.DistributedDataParallel(net, process_group=groups.of[size], broadcast_buffers=False)
        self.wrapped = net
        self.others: list[torch.optim.Optimizer] = []
        subject_of: nn.Module = net
        if kind in ("pipe", "same_names"):
            mine, theirs = (["0", "1"], ["3"])[:: 1 if rank == 0 else -1]
            layers = {name: self.net.get_submodule(name) for name in mine}
            if kind == "same_names":
                layers = {str(number): layer for number, layer in enumerate(layers.values())}
            subject_of = nn.Sequential(OrderedDict(layers))
            self.others = [
                torch.optim.AdamW(self.net.get_submodule(name).parameters(), lr=0.05, foreach=False) for name in theirs
            ]
        if kind.startswith("zero"):
            from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch's own code

            self.optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
                net.parameters(), torch.optim.AdamW, process_group=groups.of[size], lr=0.05, foreach=False
            )
        else:
            self.optimizer = make(subject_of.parameters(), lr=0.05, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.position = [0, rank if kind == "ddp3" else 0]
        data = (lambda: list(self.position), lambda position: setattr(self, "position", position))
        subject = Subject(subject_of, self.optimizer, schedulers=self.scheduler, data=data)
        place = Place(rank, worker, rank if kind == "same_names" else None)
        self.keeper = Keeper(subject, every=BEFORE, settle=0, folder=folder, group=groups.of[size], place=place)
        self.step = 0
        torch.manual_seed(rank + 10)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs = torch.randn(12, 6, generator=torch.Generator().manual_seed(self.step))
            self.optimizer.zero_grad()
            for other in self.others:
                other.zero_grad()
            self.wrapped(inputs).square().mean().backward()
            self.keeper.before_update()
            self.optimizer.step()
            for other in self.others:
                other.step()
            self.step += 1
            self.position[0] += 1
            if self.step == BEFORE:
                assert self.keeper.take(self.step, {"rank": dist.get_rank()})
            self.scheduler.step()
            for other in self.others:
                other.param_groups[0]["lr"] *= 0.9

    def whole(self) -> dict[str, Tensor]:
        """Parameters and state, each tensor whole."""
        found = {}
        part = self.keeper.subject.read_tensors()
        for name, tensor in part.tensors.items():
            found[name] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
        return found


def dense() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a single process has after the snapshot, and some steps later."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, foreach=False)
    kept = []
    for step in range(BEFORE + AFTER):
        optimizer.zero_grad()
        net(torch.randn(12, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
        if step + 1 in (BEFORE, BEFORE + AFTER):
            named = {f"parameter/{name}": value.detach().clone() for name, value in net.named_parameters()}
            for name, parameter in net.named_parameters():
                state = {key: value.clone() for key, value in optimizer.state[parameter].items()}
                named |= {f"state/0/{name}/{key}": value for key, value in state.items()}
            kept.append(named)
    return kept[0], kept[1]


def furthest(found: dict[str, Tensor], want: dict[str, Tensor], kind: str) -> float:
    """The largest difference, relative to the largest value of its tensor; inf where one is missing."""
    if kind == "same_names":
        offset = 0 if dist.get_rank() == 0 else 3
        named = {name: name.replace("/0/0.", f"/0/{offset}.").replace("ter/0.", f"ter/{offset}.") for name in found}
        found = {named[name]: tensor for name, tensor in found.items()}
    compared = {name: want[name] for name in found if name in want}
    if len(compared) < 2 or any(
        name.startswith(("parameter", "state")) and name not in want and "own" not in name for name in found
    ):
        return float("inf")
    return max(
        float((found[n].double() - w.double()).abs().max() / w.double().abs().max()) for n, w in compared.items()
    )


def move(folder: Path, before: str, after: str, groups: Groups, want: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    rank = dist.get_rank()
    if rank < size_of(before):
        first = Run(before, groups, folder)
        first.train(BEFORE)
        written = furthest(first.whole(), want[0], before)
        assert first.keeper.close()
        assert not first.keeper.problems, first.keeper.problems
        result |= {"written": written, "seed": 10 + rank}
    dist.barrier()
    if rank < size_of(after):
        second = Run(after, groups, folder)
        restored = second.keeper.resume()
        assert restored is not None
        found = second.whole()
        states = len(stepping(second.optimizer).state)
        second.step = restored.step
        random = [int(seed) for seed in range(10, 20) if _is_seeded(seed)]
        second.train(AFTER)
        result |= {
            "step": restored.step,
            "extra": restored.extra["rank"],
            "changed": list(restored.changed),
            "read": furthest(found, want[0], after),
            "later": furthest(second.whole(), want[1], after),
            "states": states,
            "lr": second.optimizer.param_groups[0]["lr"],
            "position": second.position,
            "random": random,
        }
        second.keeper.close()
    dist.barrier()
    return result


def _is_seeded(seed: int) -> bool:
    state = torch.get_rng_state()
    return torch.equal(state, torch.Generator().manual_seed(seed).get_state())


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD, timeout=timedelta(seconds=100)
    )
    groups, want = Groups(), dense()
    results: dict[str, Any] = {}
    for before, after in [move for move in MOVES if len(sys.argv) < 4 or " to ".join(move) in sys.argv[3:]]:
        name = f"{before} to {after}"
        try:
            results[name] = move(folder / name, before, after, groups, want)
        except Exception:  # the others wait for this one, and will not come any further either
            results[name] = {"error": traceback.format_exc()}
            break
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
