"""What four processes run for `test_parts_ranks.py`: one model under many ways to spread it over ranks.

Every scenario compares what the hooks measured on a rank with a plain copy of the model in float64, which sees the
same samples: `expected` and `measured` hold the squared norm of every tensor in every micro-batch, summed over the
ranks that work on the same samples.
"""

from __future__ import annotations

import copy
import gc
import os
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradvitals.collect.parameters import find_heads
from gradvitals.collect.schedule import CostTimer
from gradvitals.collect.transfer import ReadingBuffer
from gradvitals.config import Config
from gradvitals.distributed.fsdp import parts_of
from gradvitals.distributed.topology import _worker_shards, data_dimensions

WORLD = 4
WIDTH, WORDS, LENGTH = 8, 11, 8
STEPS = 2


class Attention(nn.Module):
    num_heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 2)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = (q @ k.transpose(-1, -2)).tanh() @ v
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(torch.tanh(self.up(self.norm2(x))))


class LastBlock(nn.Module):
    """Without attention: a second unit of its own needs no more, and every tensor costs time in every scenario."""

    def __init__(self) -> None:
        super().__init__()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm2(x))))


class Net(nn.Module):
    """A small language model. Numbers of words that no number of ranks divides, and a branch that may be left out."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), LastBlock()])
        self.side = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.recompute = False
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, side: bool = True) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        if side:
            x = x + self.side(x)
        return self.head(x) * self.scale


@dataclass(frozen=True)
class Scenario:
    """One way to spread the model.

    Attributes:
        spread: Makes of the plain model what is trained.
        micro: Micro-batches of a step.
        sync: Which of them are reduced: "last" or "each".
        share: Ranks that work on the same samples.
        side: Whether a rank goes through the branch.
        freeze: Beginnings of the names of frozen parameters.
        tied: Whether the output has the embedding's weights.
        dtype: What the model computes in.
        tolerance: Of norms, relative.
        by_hand: Whether the loop averages gradients itself.
        give_up: Whether each step begins with a backward that zero_grad throws away.
        reduced: Whether there are several data workers.
        factor: What measured norms are larger by than those of the plain model.
        recompute: Whether activations are computed again in backward.
        keep: Whether whole parameters are kept between micro-batches.
    """

    spread: Callable[[Net], nn.Module]
    micro: int = 1
    sync: str = "last"
    share: int = 1
    side: Callable[[int], bool] = lambda rank: True
    freeze: tuple[str, ...] = ()
    tied: bool = False
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-5
    by_hand: bool = False
    give_up: bool = False
    reduced: bool = True
    factor: float = 1.0
    recompute: bool = False
    keep: bool = False


# -- ways to spread ---------------------------------------------------------------------------------------------------


@cache
def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Shared by all scenarios: every group of gloo has threads that wake a hundred times a second."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def ddp(**options: Any) -> Callable[[Net], nn.Module]:
    return lambda net: DistributedDataParallel(net, bucket_cap_mb=0.001, **options)


def ddp_hooked(kind: str) -> Callable[[Net], nn.Module]:
    def spread(net: Net) -> nn.Module:
        model = DistributedDataParallel(net)
        if kind == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        else:
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model

    return spread


def ddp_compiled(net: Net) -> nn.Module:
    return torch.compile(DistributedDataParallel(net), backend="aot_eager")  # type: ignore[return-value]


def sharded(shape: tuple[int, ...] = (WORLD,), each: bool = True, then: Any = None, **options: Any) -> Any:
    """FSDP2 over a mesh; on every block and the whole, or on blocks alone."""

    def spread(net: Net) -> nn.Module:
        names = ("replicas", "shards")[-len(shape) :]
        mesh = mesh_of(*shape, names=names)
        for block in net.blocks:
            fully_shard(block, mesh=mesh, **options)
        if each:
            fully_shard(net, mesh=mesh, **options)
        if then is not None:
            then(net)
        return net

    return spread


def with_ignored(net: Net) -> nn.Module:
    mesh = mesh_of(WORLD)
    ignored = {net.side.weight, net.scale}
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh, ignored_params=ignored)


def compiled_blocks(net: Net) -> nn.Module:
    mesh = mesh_of(WORLD)
    for index, block in enumerate(net.blocks):
        net.blocks[index] = torch.compile(block, backend="eager")  # type: ignore[assignment]
        fully_shard(net.blocks[index], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def compiled_in_place(net: Net) -> nn.Module:
    mesh = mesh_of(WORLD)
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    net.compile(backend="aot_eager")
    return net


def divided(net: Net) -> None:
    for module in (*net.blocks, net):
        module.set_gradient_divide_factor(2.0)  # type: ignore[operator]
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # all that gloo can do


def parallel(net: Net, mesh: DeviceMesh, sequence: bool) -> None:
    for block in net.blocks:
        attention, output = "attention", Shard(1) if sequence else Replicate()
        plan: dict[str, Any] = {
            f"{attention}.q_proj": ColwiseParallel(),
            f"{attention}.k_proj": ColwiseParallel(),
            f"{attention}.v_proj": ColwiseParallel(),
            f"{attention}.out": RowwiseParallel(output_layouts=output),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(output_layouts=output),
        }
        if sequence:
            gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            plan |= {
                "norm1": SequenceParallel(),
                "norm2": SequenceParallel(),
                attention: PrepareModuleInput(**gather),
                "up": ColwiseParallel(input_layouts=Shard(1)),
            }
        there = {name for name, _ in block.named_modules()}
        parallelize_module(block, mesh, {name: style for name, style in plan.items() if name in there})
    if sequence:
        words = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        parallelize_module(net, mesh, {"words": words})
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(net, mesh, {"head": head})


def tensor_parallel(size: int, sequence: bool = False, shard: bool = False) -> Callable[[Net], nn.Module]:
    def spread(net: Net) -> nn.Module:
        mesh = mesh_of(WORLD // size, size, names=("data", "tensor"))
        parallel(net, mesh["tensor"], sequence)
        if shard:
            for module in (*net.blocks, net):
                fully_shard(module, mesh=mesh["data"])
        return net

    return spread


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(reduce_dtype=torch.float16)

SCENARIOS: dict[str, Scenario] = {
    "ddp": Scenario(ddp()),
    "ddp, 3 micro-batches": Scenario(ddp(), micro=3),
    "ddp, reduced each time": Scenario(ddp(), micro=2, sync="each"),
    "ddp, static graph": Scenario(ddp(static_graph=True), micro=2, sync="each"),
    "ddp, bucket views": Scenario(ddp(gradient_as_bucket_view=True), micro=2),
    "ddp, unused on some ranks": Scenario(ddp(find_unused_parameters=True), side=lambda rank: rank % 2 == 0),
    "ddp, fp16 compression": Scenario(ddp_hooked("fp16"), micro=2),
    "ddp, PowerSGD": Scenario(ddp_hooked("power"), micro=2),
    "ddp, compiled": Scenario(ddp_compiled, micro=2),
    "ddp, tied and frozen": Scenario(ddp(), tied=True, freeze=("blocks.0.up",), micro=2),
    "ddp, recomputed": Scenario(ddp(), micro=2, recompute=True),
    "ddp, a batch given up": Scenario(ddp(), micro=2, give_up=True),
    "averaged by hand": Scenario(lambda net: net, micro=2, by_hand=True),
    "fsdp": Scenario(sharded()),
    "fsdp, reduced each time": Scenario(sharded(), micro=3, sync="each"),
    "fsdp, reduced at the last": Scenario(sharded(), micro=3),
    "fsdp, no reshard": Scenario(sharded(reshard_after_forward=False), micro=2, keep=True),
    "fsdp, bf16": Scenario(sharded(mp_policy=BF16), micro=2, dtype=torch.bfloat16, tolerance=0.03),
    "fsdp, fp16 reduction": Scenario(sharded(mp_policy=FP16), micro=2, sync="each"),
    "fsdp, columns": Scenario(
        sharded(shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 4 == 0 else Shard(0)), micro=2
    ),
    "fsdp, offloaded": Scenario(sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), micro=2),
    "fsdp, divided by 2": Scenario(sharded(then=divided), micro=2, sync="each", factor=2.0),
    "fsdp, tied and frozen": Scenario(sharded(), tied=True, freeze=("blocks.0.up", "side.weight"), micro=2),
    "fsdp, recomputed": Scenario(sharded(), micro=2, recompute=True),
    "fsdp, some ignored": Scenario(with_ignored, micro=2),
    "fsdp, blocks alone": Scenario(sharded(each=False), micro=2),
    "fsdp, compiled blocks": Scenario(compiled_blocks, micro=2),
    "fsdp, compiled in place": Scenario(compiled_in_place, micro=2),
    "hsdp": Scenario(sharded((2, 2)), micro=2, sync="each"),
    "hsdp, reduced at the last": Scenario(sharded((2, 2)), micro=2),
    "tp": Scenario(tensor_parallel(4), micro=2, share=4, reduced=False),
    "tp, averaged by hand": Scenario(tensor_parallel(2), micro=2, share=2, by_hand=True),
    "tp, sequence": Scenario(tensor_parallel(2, sequence=True), micro=3, share=2, side=lambda rank: False),
    "tp, sequence, one worker": Scenario(
        tensor_parallel(4, sequence=True), micro=2, share=4, reduced=False, side=lambda rank: False
    ),
    "fsdp x tp": Scenario(tensor_parallel(2, shard=True), micro=2, share=2, sync="each"),
    "fsdp x tp, sequence": Scenario(
        tensor_parallel(2, sequence=True, shard=True), micro=2, share=2, side=lambda rank: False
    ),
    "fsdp, reshard to two": Scenario(sharded(reshard_after_forward=2), micro=2),  # last: torch makes groups for it
}


ALSO_UNWATCHED = ("ddp, 3 micro-batches", "ddp, PowerSGD", "fsdp", "fsdp, reduced at the last", "fsdp x tp, sequence")

# -- training ---------------------------------------------------------------------------------------------------------


def new_net(scenario: Scenario) -> Net:
    torch.manual_seed(7)
    net = Net(tied=scenario.tied)
    net.recompute = scenario.recompute
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not name.startswith(scenario.freeze) if scenario.freeze else True)
    return net


def loss_of(model: nn.Module, scenario: Scenario, worker: int, step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * worker + part)
    ids = torch.randint(WORDS, (3, LENGTH + 1), generator=generator)
    scores = model(ids[:, :-1], side=scenario.side(worker))
    return nn.functional.cross_entropy(scores.flatten(0, 1).double(), ids[:, 1:].flatten()) / scenario.micro


def plain_names(model: nn.Module) -> dict[str, nn.Parameter]:
    named = {}
    for name, parameter in model.named_parameters():
        named[name.replace("_orig_mod.", "").removeprefix("module.")] = parameter
    return named


def backward(model: nn.Module, scenario: Scenario, worker: int, step: int) -> None:
    wrapped = getattr(model, "_orig_mod", model)
    for part in range(scenario.micro):
        synced = part == scenario.micro - 1 or scenario.sync == "each"
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(synced)  # type: ignore[operator]
            model.set_reshard_after_backward(synced or not scenario.keep)  # type: ignore[operator]
        quiet = isinstance(wrapped, DistributedDataParallel) and not synced
        with wrapped.no_sync() if quiet else nullcontext():  # type: ignore[operator]
            loss_of(model, scenario, worker, step, part).backward()


def average(model: nn.Module, scenario: Scenario) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None and scenario.share == 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD


def numbers(packet: ReadingBuffer, rows_of_slots: list[int]) -> dict[str, dict[int, float]]:
    """What a packet holds: ``micro{i}`` squared, with the heads' squares added up to their tensor's, and the rest."""
    found: dict[str, dict[int, float]] = {}
    for device in packet.devices:
        for name, rows, values in packet.parts(device):
            for row, value in zip(rows, values, strict=True):
                number = float(value)
                if name.startswith("micro_heads"):
                    heads = found.setdefault(name, {})
                    heads[row] = heads.get(row, 0.0) + number**2
                    name_, row_, number = name.replace("_heads", ""), rows_of_slots[row], number**2
                else:
                    name_, row_ = name, row
                    number = number if "radial" in name else number**2
                into = found.setdefault(name_, {})
                into[row_] = into.get(row_, 0.0) + number
    return found


def expected(net: Net, scenario: Scenario, worker: int, step: int, heads: Any) -> dict[str, dict[int, float]]:
    """The same from a plain copy of the model."""
    names = {name: row for row, name in enumerate(dict(net.named_parameters()))}
    found: dict[str, dict[int, float]] = {}
    for part in range(scenario.micro):
        net.zero_grad()
        loss_of(net, scenario, worker, step, part).backward()
        for name, parameter in net.named_parameters():
            if parameter.grad is None:
                continue
            row, grad = names[name], parameter.grad.double() * scenario.factor
            found.setdefault(f"micro{part}", {})[row] = float(grad.square().sum())
            found.setdefault(f"micro_radial{part}", {})[row] = float((grad * parameter.detach().double()).sum())
            if row in heads:
                squares = grad.unflatten(0, (len(heads[row].heads), -1)).square().sum((1, 2))
                found.setdefault(f"micro_heads{part}", {}).update(zip(heads[row].slots, squares.tolist(), strict=True))
    return found


def over_worker(found: dict[str, dict[int, float]], shards: list[int], scenario: Scenario, slots: list[int]) -> Any:
    """Summed over the ranks that work on the same samples, as the exchange does."""
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, found)
    first = dist.get_rank() // scenario.share * scenario.share
    total: dict[str, dict[int, float]] = {}
    for other in gathered[first : first + scenario.share]:
        for name, by_row in other.items():
            for row, value in by_row.items():
                weight = shards[slots[row] if "heads" in name else row] / scenario.share
                total.setdefault(name, {})[row] = total.get(name, {}).get(row, 0.0) + weight * value
    return total


def train(scenario: Scenario, rank: int, watch: bool) -> dict[str, Any]:
    plain = new_net(scenario)
    order = list(dict(plain.named_parameters()))
    model = scenario.spread(copy.deepcopy(plain))
    named = plain_names(model)
    assert set(named) == set(order)
    parameters = [named[name] for name in order]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    views, _ = find_heads(model, {name: named[name] for name in order}, Config())
    heads = {view.row: view for view in views}
    slots = [view.row for view in views for _ in view.heads]
    dims = data_dimensions(model)
    shards = [_worker_shards(parameter, dims.get(id(parameter), ())) for parameter in parameters]
    arrivals: list[int] = []
    errors: list[str] = []
    parts, reason = parts_of(
        model,
        parameters,
        heads,
        rows=range(len(order)),
        arrivals=arrivals,
        timer=CostTimer(),
        on_error=lambda error: errors.append("".join(traceback.format_exception(error))),
        reduced=scenario.reduced,
    )
    assert parts is not None, reason
    steps = []
    for step in range(STEPS):
        if watch:
            parts.arm(radial=True)
        if scenario.give_up:
            with model.no_sync():  # type: ignore[operator]
                loss_of(model, scenario, rank, step + 50, 0).backward()
            model.zero_grad()
        worker = rank // scenario.share
        backward(model, scenario, worker, step)
        if scenario.by_hand:
            average(model, scenario)
        if watch:
            count, packet = parts.finish()
            if step == 0:
                parts.disarm()  # so that hooks are set in both ways
            reference = new_net(scenario)
            if step > 0:  # before, the model has the weights of a new one
                reference.load_state_dict({name: whole(parameter) for name, parameter in named.items()}, strict=False)
            reference = reference.to(scenario.dtype).to(torch.float64 if scenario.dtype == torch.float32 else None)
            steps.append(
                {
                    "count": count,
                    "measured": over_worker(numbers(packet, slots), shards, scenario, slots),
                    "expected": expected(reference, scenario, worker, step, heads),
                }
            )
        optimizer.step()
        optimizer.zero_grad()
    parts.disarm()
    return {
        "steps": steps,
        "errors": errors,
        "names": order,
        "arrivals": list(arrivals),
        "weights": [getattr(parameter, "_local_tensor", parameter).detach().clone() for parameter in parameters],
    }


def whole(parameter: nn.Parameter) -> Tensor:
    full: Any = parameter.detach()
    result: Tensor = full.full_tensor() if hasattr(full, "full_tensor") else full
    return result


def refused(rank: int) -> dict[str, Any]:
    """FSDP1 shows nothing of single ranks."""
    model = FullyShardedDataParallel(new_net(Scenario(ddp())), device_id=torch.device("cpu"), use_orig_params=True)
    parts, reason = parts_of(
        model,
        list(model.parameters()),
        {},
        rows=range(len(list(model.parameters()))),
        arrivals=[],
        timer=CostTimer(),
        on_error=lambda error: None,
        reduced=True,
    )
    return {"refused": parts is None, "reason": reason}


def run_ranks(_: int, folder: str) -> None:
    """Everything above on all ranks: forks of this process, so that not each of them imports a compiler."""
    import torch._functorch._aot_autograd.graph_compile
    import torch._inductor.compile_fx

    gc.freeze()  # a fork that collected what is here would copy it first
    multiprocessing.start_processes(run_all, (folder,), WORLD, start_method="fork")
    found = [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]
    torch.save({"ranks": found}, Path(folder) / "0.pt")


def run_all(rank: int, folder: str, chosen: list[str] | None = None) -> None:
    """Everything above on one of the ranks; results go into a file."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    results: dict[str, Any] = {}
    for name in chosen or SCENARIOS:
        try:
            results[name] = train(SCENARIOS[name], rank, watch=True)
            if name in ALSO_UNWATCHED:
                results[name]["unwatched"] = train(SCENARIOS[name], rank, watch=False)["weights"]
        except Exception:
            results[name] = {"errors": [traceback.format_exc()]}
        if "compiled" in name:
            torch._dynamo.reset()
    try:
        results["refused"] = refused(rank)
    except Exception:
        results["refused"] = {"reason": traceback.format_exc()}
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
