"""What four processes run for `test_ddp.py`, all of it in one group of processes, and the same in a single one."""

from __future__ import annotations

import copy
import gc
import os
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import gradvitals as gv

WORLD = 4
STEPS = 4


class Net(nn.Module):
    """Several tensors of several shapes, and an optional branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 16)
        self.side = nn.Linear(16, 16)
        self.last = nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor, side: bool = True) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + torch.tanh(self.second(x))
        if side:
            x = x + 0.5 * self.side(x)
        return self.last(x) * self.scale


class TwoHeads(nn.Module):
    """One of two heads on a shared trunk; a step trains both."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 16)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)) for _ in range(2))

    def forward(self, x: Tensor, second: bool) -> Tensor:
        return self.heads[int(second)](torch.tanh(self.trunk(x)))


momentum = partial(gv.optim.VRSGD, lr=0.05, momentum=0.9)
adamw = partial(gv.optim.VRAdamW, lr=0.02)
lamb = partial(gv.optim.VRLAMB, lr=0.02, weight_decay=0.1)
lars = partial(gv.optim.VRLARS, lr=2.0, weight_decay=0.1)


def wrapped(params: Any, **vr: Any) -> torch.optim.Optimizer:
    return gv.optim.VRGD(torch.optim.RMSprop(params, lr=0.01), **vr)


SIDES: dict[str, Callable[[int, int], bool]] = {
    "always": lambda step, part: True,
    "not on the first": lambda step, part: part != 0,
    "on the last only": lambda step, part: part == 7,
    "not in step two": lambda step, part: step != 2,
    "on the second of two": lambda step, part: part % 2 == 1,
}
"""In which steps and parts a branch takes part."""


@dataclass(frozen=True)
class Scenario:
    """One way to spread micro-batches over ranks."""

    ranks: int = WORLD
    micro: int = 2  # micro-batches of each rank, all but the last under no_sync
    make: Callable[..., torch.optim.Optimizer] = adamw
    vr: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9  # relative to how far the weights moved
    net: Callable[[], nn.Module] = Net
    side: str = "always"  # one of SIDES
    hook: Any = None  # the user's own communication hook
    set_to_none: bool = True
    clip: float | None = None
    scaler: bool = False
    give_up: bool = False  # each step begins with a backward that zero_grad throws away
    skip: int = 0  # micro-batches of a step before each step that is computed to the end, then zeroed by the model
    wrap_first: bool = False  # the model is wrapped before there is an optimizer
    frozen: bool = False
    transposed: bool = False  # a weight's rows are not next to each other in memory
    identical: bool = False  # every rank and micro-batch sees the same samples
    units: float = 1.0  # what the loss is multiplied by, and the learning rate divided by

    @property
    def options(self) -> dict[str, Any]:
        return self.vr | ({} if self.units == 1 else {"lr": 0.05 / self.units})

    @property
    def num_parts(self) -> int:
        return self.ranks * self.micro


SMALL = {"bucket_cap_mb": 0.002}
VIEWS = {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}
WIENER = {"scale": "wiener"}

SCENARIOS: dict[str, Scenario] = {
    "4 ranks": Scenario(micro=1, make=momentum),
    "2 ranks, 2 micro-batches": Scenario(ranks=2, make=momentum),
    "4 ranks, 2 micro-batches": Scenario(),
    "wrapped in DDP before": Scenario(wrap_first=True),
    "views": Scenario(ddp=VIEWS),
    "zeros": Scenario(set_to_none=False, make=momentum),
    "views and zeros": Scenario(ddp=VIEWS, set_to_none=False),
    "small buckets": Scenario(ddp=SMALL),
    "small buckets and views": Scenario(ddp=SMALL | VIEWS, make=momentum),
    "static graph": Scenario(micro=1, ddp=SMALL | {"static_graph": True}),
    "a branch unused on one rank": Scenario(micro=1, make=momentum, ddp=UNUSED, side="not on the first"),
    "a branch unused in one part": Scenario(ddp=UNUSED | SMALL, side="not on the first"),
    "a branch used in one part": Scenario(ddp=UNUSED | SMALL, side="on the last only"),
    "a branch used in one part, views": Scenario(ddp=UNUSED | VIEWS, side="on the last only"),
    "a branch unused everywhere": Scenario(ddp=UNUSED, side="not in step two"),
    "transposed": Scenario(transposed=True, make=momentum),
    "identical ranks": Scenario(identical=True, make=momentum),
    "wiener": Scenario(make=momentum, vr=WIENER),
    "wiener by row": Scenario(make=momentum, vr=WIENER | {"granularity": "row"}, ddp=SMALL),
    "rows": Scenario(vr={"granularity": "row"}),
    "lamb": Scenario(make=lamb),
    "lars": Scenario(make=lars, micro=1),
    "wrapper": Scenario(make=wrapped, vr={"beta3": 0.5}),
    "k declared": Scenario(vr={"k": 8}),
    "clipped": Scenario(clip=0.1, make=momentum),
    "scaled": Scenario(scaler=True, make=momentum),
    "scaled, wiener": Scenario(scaler=True, make=momentum, vr=WIENER),
    "begun anew": Scenario(give_up=True, make=momentum),
    "skipped": Scenario(skip=2, make=momentum),
    "skipped, views and small buckets": Scenario(skip=2, make=momentum, ddp=VIEWS | SMALL),
    "skipped, wiener": Scenario(skip=2, make=momentum, vr=WIENER),
    "skipped, fewer micro-batches": Scenario(skip=1, make=momentum),
    "skipped, a branch unused after": Scenario(skip=2, make=momentum, ddp=UNUSED | SMALL, side="not in step two"),
    "two heads": Scenario(net=TwoHeads, make=momentum, ddp=UNUSED | SMALL, side="on the second of two"),
    "two heads on 2 ranks": Scenario(
        ranks=2, net=TwoHeads, make=momentum, ddp=UNUSED | SMALL | VIEWS, side="on the second of two"
    ),
    "two heads, wiener": Scenario(net=TwoHeads, vr=WIENER, ddp=UNUSED | SMALL, side="on the second of two"),
    "frozen": Scenario(frozen=True),
    "float16 parameters": Scenario(dtype=torch.float16, tolerance=0.05, make=momentum, units=1e-3),
    "bfloat16 parameters": Scenario(dtype=torch.bfloat16, tolerance=0.2, make=momentum),
    "float32": Scenario(dtype=torch.float32, tolerance=1e-4, make=momentum),
    "bfloat16 moments": Scenario(
        dtype=torch.float32, tolerance=0.03, make=momentum, vr={"moments_dtype": torch.bfloat16}
    ),
    "bfloat16 on the wire": Scenario(
        dtype=torch.float32, tolerance=0.05, make=momentum, hook=default_hooks.bf16_compress_hook
    ),
    "bfloat16 on the wire, small buckets": Scenario(
        dtype=torch.float32, tolerance=0.05, make=momentum, hook=default_hooks.bf16_compress_hook, ddp=SMALL | VIEWS
    ),
}


def new_model(scenario: Scenario) -> nn.Module:
    torch.manual_seed(7)
    model = scenario.net().to(scenario.dtype)
    if scenario.frozen:
        model.second.bias.requires_grad_(False)
    if scenario.transposed:
        model.second.weight = nn.Parameter(model.second.weight.detach().t().contiguous().t())
    return model


def loss_of(model: nn.Module, scenario: Scenario, step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + (0 if scenario.identical else part))
    x = torch.randn(3, 6, generator=generator, dtype=torch.float64).to(scenario.dtype)
    y = torch.stack([x.sum(1), x[:, 0] - x[:, 1], x[:, 2]], dim=1)
    return (model(x, SIDES[scenario.side](step, part)) - y).square().mean() * scenario.units


def accumulate(model: nn.Module, scenario: Scenario, step: int, first: int, count: int, scaler: Any) -> None:
    """The micro-batches of one step; ranks average their gradients in the last."""
    ddp = isinstance(model, DistributedDataParallel)
    for part in range(first, first + count):
        last = part == first + count - 1
        with nullcontext() if last or not ddp else model.no_sync():
            scaler.scale(loss_of(model, scenario, step, part) / count).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scenario: Scenario, first: int, count: int) -> list[int]:
    """The ordinary loop over `count` micro-batches per step, starting at number `first`."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scenario.scaler)
    seen = []
    ddp = isinstance(model, DistributedDataParallel)
    for step in range(STEPS):
        if scenario.give_up:
            with model.no_sync() if ddp else nullcontext():
                (7 * loss_of(model, scenario, step + 50, first)).backward()
            optimizer.zero_grad(set_to_none=scenario.set_to_none)
        if scenario.skip and ddp:  # a single process never skipped
            accumulate(model, scenario, step + 50, first, scenario.skip, scaler)
            model.zero_grad()
        accumulate(model, scenario, step, first, count, scaler)
        if scenario.clip:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), scenario.clip)
        scaler.step(optimizer)
        scaler.update()
        seen.append(optimizer.last_num_parts)
        optimizer.zero_grad(set_to_none=scenario.set_to_none)
    return seen


def in_one_process(scenario: Scenario) -> list[Tensor]:
    """All parts of all ranks, one after the other."""
    model = new_model(scenario)
    optimizer = scenario.make(model.parameters(), **scenario.options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of four parts
        train(model, optimizer, scenario, 0, scenario.num_parts)
    return [p.detach() for p in model.parameters()]


def run(scenario: Scenario, rank: int, group: Any) -> dict[str, Any]:
    model = new_model(scenario)
    if scenario.wrap_first:
        ddp = DistributedDataParallel(model, process_group=group, **scenario.ddp)
        optimizer = scenario.make(ddp.parameters(), **scenario.options)
    else:
        optimizer = scenario.make(model.parameters(), **scenario.options)
        ddp = DistributedDataParallel(model, process_group=group, **scenario.ddp)
    optimizer.use_ranks(ddp, hook=scenario.hook)
    seen = train(ddp, optimizer, scenario, rank * scenario.micro, scenario.micro)
    return {"weights": [p.detach().clone() for p in model.parameters()], "num_parts": seen}


# -- one optimizer after another ----------------------------------------------------------------------------------


def plain_training(model: nn.Module, rank: int) -> list[Tensor]:
    """Three steps without any of this."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        loss_of(model, Scenario(), step + 100, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def then_plain(rank: int, group: Any) -> dict[str, Any]:
    """Train the model after its optimizer is gone, and compare with a model that never had one."""
    scenario = Scenario(make=momentum, ddp=SMALL)
    model = new_model(scenario)
    ddp = DistributedDataParallel(model, process_group=group, **scenario.ddp)
    optimizer = momentum(model.parameters())
    optimizer.use_ranks(ddp)
    train(ddp, optimizer, scenario, 2 * rank, 2)
    del optimizer
    gc.collect()
    fresh = DistributedDataParallel(copy.deepcopy(model), process_group=group, **scenario.ddp)
    return {"weights": plain_training(ddp, rank), "expected": plain_training(fresh, rank)}


def then_another(rank: int, group: Any) -> dict[str, Any]:
    """A second variance-reduced optimizer on the same model, after the first or in the middle of its step."""
    scenario = Scenario(make=momentum, ddp=SMALL)
    model = new_model(scenario)
    ddp = DistributedDataParallel(model, process_group=group, **scenario.ddp)
    for make in (momentum, adamw):
        optimizer = make(model.parameters())
        optimizer.use_ranks(ddp)
        seen = train(ddp, optimizer, scenario, 2 * rank, 2)
        loss_of(ddp, scenario, 200, rank).backward()  # averaged, then abandoned
        del optimizer
        gc.collect()
        ddp.zero_grad()
    return {"weights": [p.detach().clone() for p in model.parameters()], "num_parts": seen}


def then_another_in_one_process() -> list[Tensor]:
    scenario = Scenario(make=momentum)
    model = new_model(scenario)
    for make in (momentum, adamw):
        train(model, make(model.parameters()), scenario, 0, scenario.num_parts)
    return [p.detach() for p in model.parameters()]


HANDOVERS = {f.__name__: f for f in (then_plain, then_another)}


# -- mistakes -----------------------------------------------------------------------------------------------------


def forgotten(rank: int, group: Any) -> None:
    scenario = Scenario()
    model = new_model(scenario)
    optimizer = adamw(model.parameters())
    train(DistributedDataParallel(model, process_group=group), optimizer, scenario, 2 * rank, 2)


def wrong_number(rank: int, group: Any) -> None:
    run(Scenario(vr={"k": 2}), rank, group)


def no_sync_forgotten(rank: int, group: Any) -> None:
    scenario = Scenario()
    model = new_model(scenario)
    optimizer = adamw(model.parameters())
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer.use_ranks(ddp)
    for part in range(2):
        loss_of(ddp, scenario, 0, 2 * rank + part).backward()
    optimizer.step()


def no_sync_forgotten_later(rank: int, group: Any) -> None:
    """After a skipped step that had more micro-batches."""
    scenario = Scenario()
    model = new_model(scenario)
    optimizer = momentum(model.parameters())
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer.use_ranks(ddp)
    accumulate(ddp, scenario, 50, 4 * rank, 4, torch.amp.GradScaler("cpu", enabled=False))
    ddp.zero_grad()
    for part in range(2):
        loss_of(ddp, scenario, 0, 2 * rank + part).backward()
    optimizer.step()


def averaged_twice(rank: int, group: Any) -> None:
    """Uses no_sync once, which is once too few."""
    scenario = Scenario()
    model = new_model(scenario)
    optimizer = momentum(model.parameters())
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer.use_ranks(ddp)
    for step in range(2):
        accumulate(ddp, scenario, step, 2 * rank, 2, torch.amp.GradScaler("cpu", enabled=False))
    optimizer.step()


def not_a_ddp_model(rank: int, group: Any) -> None:
    model = new_model(Scenario())
    adamw(model.parameters()).use_ranks(model)


MISTAKES = {
    f.__name__: f
    for f in (forgotten, wrong_number, no_sync_forgotten, no_sync_forgotten_later, averaged_twice, not_a_ddp_model)
}


class Groups:
    """Shared by all that do not fail: each has threads that wake a hundred times a second."""

    def __init__(self) -> None:
        self._of: dict[int, Any] = {}

    def attempt(self, work: Callable[[Any], dict[str, Any] | None], ranks: int = WORLD) -> dict[str, Any]:
        """Return the result of work that the first ranks do in a group."""
        found: dict[str, Any] | None = None
        if ranks not in self._of:
            self._of[ranks] = dist.new_group(list(range(ranks)), timeout=timedelta(seconds=5))
        try:
            if dist.get_rank() < ranks:
                found = work(self._of[ranks])
        except Exception as error:
            found = {"kind": type(error).__name__, "error": str(error), "trace": traceback.format_exc()}
        failed = torch.tensor(float("error" in (found or {})))
        dist.all_reduce(failed)
        if failed:  # on any rank: its leftovers would spoil the next scenario
            del self._of[ranks]
        return found or {}


def run_all(rank: int, folder: str) -> None:
    """Everything above on one of the ranks; results go into a file."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD, timeout=timedelta(seconds=20)
    )
    groups = Groups()
    results = {
        name: groups.attempt(lambda group, scenario=scenario: run(scenario, rank, group), scenario.ranks)
        for name, scenario in SCENARIOS.items()
    }
    for name, job in {**HANDOVERS, **MISTAKES}.items():
        results[name] = groups.attempt(lambda group, job=job: job(rank, group))
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
