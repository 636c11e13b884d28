"""What goes wrong between ranks, and what is odd but allowed: small jobs for `rank_worker`, each on its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_nets import Net, batch, loss_of, new_net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

import gradvitals as gv
from gradvitals.types import Reading

Job = Callable[[int, Path], dict[str, Any]]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def config(**settings: Any) -> gv.Config:
    return gv.Config(**{"tensor_every": 1, "audit_every": 1, "quiet": True, "rank_timeout": 10.0, **settings})


def attempt(watch: Callable[[], gv.Monitor]) -> dict[str, Any]:
    """The error that watching begins with, and how long it took to come."""
    begun = time.monotonic()
    try:
        watch().close()
    except Exception as error:
        return {"kind": type(error).__name__, "message": str(error), "seconds": time.monotonic() - begun}
    return {"kind": None, "message": "", "seconds": time.monotonic() - begun}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    monitor: gv.Monitor,
    rank: int,
    steps: int,
    *,
    seed: Callable[[int, int], int] = lambda step, rank: 100 * step + rank,
    scale: float = 1.0,
    observe: bool = True,
    after: Callable[[int], None] = lambda step: None,
) -> None:
    """The ordinary loop."""
    for step in range(steps):
        inputs, targets = batch(seed(step, rank), 3)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        (scale * loss).backward()
        if observe:
            monitor.observe(loss)
        optimizer.step()
        after(step)


def told(readings: list[Reading]) -> list[dict[str, Any]]:
    """The general readings, as plain numbers."""
    return [
        {
            "step": reading.step,
            "values": dict(reading.values),
            "ranks": {name: array.tolist() for name, array in reading.ranks.items()},
            "tensors": {name: array.tolist() for name, array in reading.tensors.items()},
        }
        for reading in readings
        if reading.source is None
    ]


# -- when watching begins -------------------------------------------------------------------------------------------


def watched_by_one_alone(rank: int, folder: Path) -> dict[str, Any]:
    """And then by both, to see that nothing is left of the first time."""
    net = new_net()
    optimizer = sgd(net)
    found: dict[str, Any] = {}
    if rank == 0:
        found = attempt(lambda: gv.watch(net, optimizer, run=folder / "alone", config=config(rank_timeout=2.0)))
    dist.barrier()
    found["then"] = attempt(lambda: gv.watch(net, optimizer, run=folder / "both", config=config(rank_timeout=5.0)))
    dist.barrier()
    return found


def _differing(rank: int, folder: Path, make: Callable[[], nn.Module], **settings: Any) -> dict[str, Any]:
    model = make()
    found = attempt(lambda: gv.watch(model, sgd(model), run=folder / f"differing{rank}", config=config(**settings)))
    dist.barrier()
    loss_of(model(batch(0, 3)[0]), batch(0, 3)[1]).backward()  # no hook is left that would mind
    found["runs"] = sorted(path.name for path in folder.glob("differing*"))
    return found


def another_config(rank: int, folder: Path) -> dict[str, Any]:
    return _differing(rank, folder, new_net, tensor_every=1 + rank)


class MoreOnOne(Net):
    def __init__(self, rank: int) -> None:
        super().__init__()
        if rank == 1:
            self.extra = nn.Parameter(torch.zeros(5))


def a_tensor_on_one_alone(rank: int, folder: Path) -> dict[str, Any]:
    return _differing(rank, folder, lambda: MoreOnOne(rank))


def another_shape(rank: int, folder: Path) -> dict[str, Any]:
    def make() -> nn.Module:
        net = new_net()
        if rank == 1:
            net.blocks["0"].side = nn.Linear(8, 8, bias=False)
            net.blocks["0"].mlp.up = nn.Linear(8, 6)
            net.blocks["0"].mlp.down = nn.Linear(6, 8, bias=False)
        return net

    return _differing(rank, folder, make)


# -- odd, but allowed -----------------------------------------------------------------------------------------------


def stages_with_the_same_names(rank: int, folder: Path) -> dict[str, Any]:
    """Two stages that are both numbered from 0, of different shapes; each is trained by itself here."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4 + rank, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer, readings = sgd(model), list[Reading]()
    monitor = gv.watch(
        model, optimizer, run=folder / "stages", config=config(pipeline_stage=rank), on_reading=readings.append
    )
    squares = []
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(3, 4 + rank, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        squares.append([float(p.grad.double().square().sum()) for p in model.parameters()])
        monitor.observe()
        optimizer.step()
    monitor.close()
    names: tuple[str, ...] = ()
    if rank == 0:
        with gv.open_run(monitor.run_path) as run:
            names = run.names("tensors")
    return {"readings": told(readings), "squares": squares, "names": names}


def observed_by_one_alone(rank: int, folder: Path) -> dict[str, Any]:
    model = DistributedDataParallel(new_net())
    optimizer, readings = sgd(model), list[Reading]()
    monitor = gv.watch(model, optimizer, run=folder / "observed", config=config(), on_reading=readings.append)
    train(model, optimizer, monitor, rank, 3, observe=rank == 0)
    monitor.close()
    return {"readings": told(readings), "findings": [f.id for f in monitor.findings]}


def losses_that_are_spread(rank: int, folder: Path) -> dict[str, Any]:
    """As `loss_parallel` makes them: first one that all ranks know, then one of which each has a summand."""
    model = DistributedDataParallel(new_net())
    optimizer, readings = sgd(model), list[Reading]()
    mesh = init_device_mesh("cpu", (2,))
    monitor = gv.watch(model, optimizer, run=folder / "spread", config=config(), on_reading=readings.append)
    for step in range(4):
        inputs, targets = batch(100 * step + rank, 3)
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        placement = Replicate() if step < 3 else Partial()
        monitor.observe(DTensor.from_local(torch.tensor(2.0 + step), mesh, [placement]))
        optimizer.step()
    monitor.close()
    said = [f.title for f in monitor.findings if f.id == "observe_ignored"]
    return {"losses": [reading["values"].get("loss") for reading in told(readings)], "said": said}


def rarely(rank: int, folder: Path) -> dict[str, Any]:
    """At the usual cadence many steps travel together."""
    model = DistributedDataParallel(new_net())
    optimizer, readings = sgd(model), list[Reading]()
    config = gv.Config(quiet=True, audit_every=None)
    monitor = gv.watch(model, optimizer, run=folder / "rarely", config=config, on_reading=readings.append)
    train(model, optimizer, monitor, rank, 60)
    monitor.close()
    return {"steps": [reading.step for reading in readings if reading.source is None]}


def two_pairs(rank: int, folder: Path) -> dict[str, Any]:
    """Four processes that train two models, two ranks each."""
    pairs = [
        dist.new_group([0, 1], timeout=timedelta(seconds=20)),
        dist.new_group([2, 3], timeout=timedelta(seconds=20)),
    ]
    pair = pairs[rank // 2]
    model = DistributedDataParallel(new_net(), process_group=pair)
    optimizer, readings = sgd(model), list[Reading]()
    monitor = gv.watch(
        model, optimizer, run=folder / f"pair{rank // 2}", config=config(), group=pair, on_reading=readings.append
    )
    norms = []

    def look(step: int) -> None:
        norms.append(float(torch.stack([p.grad.double().square().sum() for p in model.parameters()]).sum().sqrt()))

    train(model, optimizer, monitor, rank, 3, after=look)
    monitor.close()
    dist.barrier()
    runs = sorted(path.name for path in folder.glob("pair*"))
    return {"readings": told(readings), "norms": norms, "runs": runs, "findings": [f.id for f in monitor.findings]}


# -- while training -------------------------------------------------------------------------------------------------


def one_stops_before_the_other(rank: int, folder: Path) -> dict[str, Any]:
    """Nothing but monitoring joins them, so that only monitoring could wait."""
    net = new_net()
    optimizer = sgd(net)
    monitor = gv.watch(net, optimizer, run=folder / "out_of_step", config=config(audit_every=None))
    train(net, optimizer, monitor, rank, 12 if rank == 0 else 9)
    begun = time.monotonic()
    monitor.close()
    found: dict[str, Any] = {"seconds": time.monotonic() - begun}
    if rank == 0:
        with gv.open_run(monitor.run_path) as run:
            found["steps"] = run.series("grad/norm")[0].tolist()
        found["findings"] = [(f.id, f.severity) for f in monitor.findings]
    return found


def _audited(rank: int, folder: Path, name: str, **how: Any) -> dict[str, Any]:
    torch.manual_seed(5)
    model = DistributedDataParallel(new_net())
    optimizer, readings = sgd(model), list[Reading]()
    monitor = gv.watch(model, optimizer, run=folder / name, config=config(), on_reading=readings.append)
    prepare = how.pop("after", None)
    train(model, optimizer, monitor, rank, 6, **how, after=lambda step: prepare(step, model) if prepare else None)
    monitor.close()
    names: tuple[str, ...] = ()
    if rank == 0:
        with gv.open_run(monitor.run_path) as run:
            names = run.names("tensors")
    found = [(f.id, f.rank, f.tensors, f.title) for f in monitor.findings]
    return {"readings": told(readings), "findings": found, "names": names}


def one_flipped_bit(rank: int, folder: Path) -> dict[str, Any]:
    def flip(step: int, model: nn.Module) -> None:
        if step == 1 and rank == 2:
            weight = model.module.blocks["0"].mlp.up.weight.data
            weight.view(torch.int32)[3, 5] ^= 1

    return _audited(rank, folder, "flipped", after=flip)


def two_with_the_same_samples(rank: int, folder: Path) -> dict[str, Any]:
    return _audited(rank, folder, "twins", seed=lambda step, rank: 100 * step + (1 if rank == 3 else rank))


def one_with_a_larger_loss(rank: int, folder: Path) -> dict[str, Any]:
    return _audited(rank, folder, "scaled", scale=10.0 if rank == 1 else 1.0)


def one_draws_more_random_numbers(rank: int, folder: Path) -> dict[str, Any]:
    def draw(step: int, model: nn.Module) -> None:
        if step == 1 and rank == 2:
            torch.rand(1)

    return _audited(rank, folder, "random", after=draw)


def nan_on_one_of_many_shards(rank: int, folder: Path) -> dict[str, Any]:
    """In a step that is not read in full: the gradient that all see holds everybody's NaN."""
    torch.manual_seed(5)
    model = new_net()
    for block in model.blocks.values():
        fully_shard(block)
    fully_shard(model)
    optimizer = sgd(model)
    monitor = gv.watch(model, optimizer, run=folder / "nan_shards", config=gv.Config(quiet=True))
    for step in range(8):
        inputs, targets = batch(100 * step + rank, 3)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        (loss * (math.nan if (step, rank) == (7, 1) else 1.0)).backward()
        monitor.observe(loss)
        optimizer.step()
    monitor.close()
    read_in_full: list[int] = []
    if rank == 0:
        with gv.open_run(monitor.run_path) as run:
            read_in_full = run.times("grad/max", kind="tensors")[0].tolist()
    return {"findings": [(f.id, f.rank, f.first_step) for f in monitor.findings], "read_in_full": read_in_full}


def _own_rate(rank: int, folder: Path, model: nn.Module, name: str) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 if rank == 0 else 0.02)
    monitor = gv.watch(model, optimizer, run=folder / name, config=config())
    train(model, optimizer, monitor, rank, 4)
    monitor.close()
    lr: list[float] = []
    if rank == 0:
        with gv.open_run(monitor.run_path) as run:
            lr = run.series("lr")[1].tolist()
    findings = [(f.id, f.rank, f.title) for f in monitor.findings if f.id == "rank_lr_differs"]
    return {"findings": findings, "lr": lr}


def another_rate_under_ddp(rank: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(5)
    return _own_rate(rank, folder, DistributedDataParallel(new_net()), "rate_ddp")


def another_rate_under_fsdp(rank: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(5)
    model = new_net()
    fully_shard(model)
    return _own_rate(rank, folder, model, "rate_fsdp")


TROUBLES: dict[int, dict[str, Job]] = {
    2: {
        f"trouble: {job.__name__}": job
        for job in (
            another_config,
            a_tensor_on_one_alone,
            another_shape,
            stages_with_the_same_names,
            observed_by_one_alone,
            losses_that_are_spread,
            rarely,
            one_stops_before_the_other,
            another_rate_under_ddp,
            another_rate_under_fsdp,
            watched_by_one_alone,
        )
    },
    4: {
        f"trouble: {job.__name__}": job
        for job in (
            two_pairs,
            one_flipped_bit,
            two_with_the_same_samples,
            one_with_a_larger_loss,
            one_draws_more_random_numbers,
            nan_on_one_of_many_shards,
        )
    },
}
