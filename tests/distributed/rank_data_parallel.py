"""The ways in which several processes train one model. Each hides behind `Way`: backward, clip, step, and a look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from rank_groups import all_ranks, line, square
from rank_nets import batch, loss_of, new_net
from rank_pieces import piece_of
from rank_scenarios import Scenario
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, in float64, whoever holds it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).double().clone()


class Way:
    """One process's part of the training. Without a way of its own: each rank trains alone."""

    def __init__(self, scenario: Scenario, rank: int) -> None:
        self.scenario, self.rank = scenario, rank
        self.group = all_ranks()
        self.data_index, self.num_data = rank, scenario.world
        self.net = new_net(scenario.tied).freeze(scenario.frozen)
        self.net.recompute = scenario.recompute
        self.model: nn.Module = self.net
        self.build()
        self.optimizer = self.make_optimizer()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scenario.scaler)

    def build(self) -> None:
        pass

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.scenario.make_optimizer(self.model.parameters())

    # -- one step ---------------------------------------------------------------------------------------------------

    def backward(self, step: int) -> list[Tensor]:
        """All micro-batches of a step; the loss of each, as one would plot it."""
        if self.scenario.give_up:
            with self.accumulating(False):
                self.loss_of_other_samples(step).backward()
            self.model.zero_grad()
        losses = []
        for i in range(self.scenario.micro):
            size = self.scenario.size(self.data_index, i)
            inputs, targets = batch(self.scenario.seed(step, self.data_index, i), size)
            self.net.leave_out_side(self.scenario.leaves_out_side(step, self.data_index))
            with self.accumulating(i == self.scenario.micro - 1):
                with self.autocast():
                    loss = loss_of(self.model(inputs), targets)
                planted = loss * self.scenario.plant(step, self.data_index)
                weight = self.scenario.weight(self.data_index, i, self.num_data) * self.divisor()
                self.scaler.scale(planted * weight).backward()
            losses.append(loss.detach())
            self.on_micro(loss, size)
        self.reduce()
        return losses

    def loss_of_other_samples(self, step: int) -> Tensor:
        inputs, targets = batch(self.scenario.seed(step + 50, self.data_index, 0), 3)
        return loss_of(self.model(inputs), targets)

    def on_micro(self, loss: Tensor, size: int) -> None:
        """Called after every backward."""

    def divisor(self) -> float:
        """What the sum over data workers is divided by."""
        return self.scenario.options.get("divide", self.num_data)

    def autocast(self) -> Any:
        cast = self.scenario.precision == "autocast"
        return torch.autocast("cpu", dtype=torch.bfloat16) if cast else nullcontext()

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        yield

    def reduce(self) -> None:
        """What the loop itself does between backward and everything else."""

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.scenario.clip)

    # -- a look -----------------------------------------------------------------------------------------------------

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.net.named_parameters())

    def weights(self) -> dict[str, Any]:
        return {name: piece_of(p) for name, p in self.named()}

    def gradients(self) -> dict[str, Any]:
        """Of the whole batch."""
        return {name: piece_of(p.grad) for name, p in self.named() if p.grad is not None}

    def moments(self) -> dict[str, tuple[float, Any, Any]]:
        inner = getattr(self.optimizer, "optim", self.optimizer)
        found = {}
        for name, p in self.named():
            state = inner.state.get(p, {})
            if "exp_avg_sq" in state:
                found[name] = (
                    float(state["step"]),
                    piece_of(state["exp_avg"]),
                    piece_of(state["exp_avg_sq"]),
                )
        return found


class Ddp(Way):
    def build(self) -> None:
        options = {"process_group": self.group, **self.scenario.options}
        hook = options.pop("hook", None)
        self.net.leave_out_side(False)
        self.model = DistributedDataParallel(self.net, **options)
        if hook == "own":
            self.model.register_comm_hook(None, own_hook)
        elif hook == "fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif hook == "power":
            state = powerSGD_hook.PowerSGDState(self.group, matrix_approximation_rank=4, start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        if self.scenario.optimizer == "vradamw":
            optimizer.use_ranks(self.model)
        return optimizer

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        with nullcontext() if last or self.scenario.sync_always else self.model.no_sync():
            yield


def own_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sums what was divided before, as somebody may have written it."""
    flat = bucket.buffer().div_(2).mul_(2 / dist.get_world_size())
    return dist.all_reduce(flat, async_op=True).get_future().then(lambda done: done.value()[0])


own_hook.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}  # which torch looks at


class Compiled(Ddp):
    """A model that torch.compile has wrapped, by a backend that needs no compiler."""

    def build(self) -> None:
        super().build()
        self.model = torch.compile(self.model, backend="eager")

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        with nullcontext() if last else self.model._orig_mod.no_sync():
            yield


class ByHand(Way):
    """No wrapper: the loop averages gradients itself."""

    def reduce(self) -> None:
        for p in self.net.parameters():
            if p.grad is None:
                if self.scenario.keep_none:
                    continue
                p.grad = torch.zeros_like(p)
            if self.scenario.keep_none and self.net.blocks["0"].side.weight is p:
                continue  # of one rank alone
            dist.all_reduce(p.grad, group=self.group)
            p.grad.div_(self.num_data)


class Zero(Ddp):
    def make_optimizer(self) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # with a warning that only tests would mind

        return ZeroRedundancyOptimizer(
            self.model.parameters(),
            optimizer_class=torch.optim.AdamW,
            process_group=self.group,
            lr=0.01,
            betas=(0.8, 0.95),
        )


class ZeroByHand(Ddp):
    """Every rank's optimizer steps its own share of the tensors and tells the others the outcome, after the step."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        mine = [p for i, p in enumerate(self.net.parameters()) if i % self.num_data == self.rank]
        optimizer = self.scenario.make_optimizer(mine)
        step = optimizer.step

        def step_and_tell(*args: Any) -> Any:
            result = step(*args)
            for i, p in enumerate(self.net.parameters()):
                dist.broadcast(p.data, i % self.num_data, group=self.group)
            return result

        self.step = step_and_tell
        return optimizer


class Fsdp(Way):
    def mesh(self) -> DeviceMesh:
        return line("dp")

    def shard(self, mesh: DeviceMesh) -> None:
        options: dict[str, Any] = dict(self.scenario.options)
        if self.scenario.precision == "policy":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if options.pop("offload", False):
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if options.pop("columns", False):
            options["shard_placement_fn"] = lambda p: Shard(1) if p.dim() == 2 and p.shape[1] == 8 else None
        if options.pop("ignore", False):
            options["ignored_params"] = {self.net.blocks["0"].side.weight, self.net.gain}
        factor, root, compiled = options.pop("divide", None), options.pop("root", True), options.pop("compile", None)
        options.pop("keep", None)
        for block in self.net.blocks.values():
            if compiled == "blocks":
                block.compile(backend="eager")
            fully_shard(block, mesh=mesh, **options)
        if root:
            fully_shard(self.net, mesh=mesh, **options)
        if compiled == "whole":
            self.net.compile(backend="aot_eager")
        if factor is not None:
            for module in self.net.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(factor)
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def build(self) -> None:
        self.shard(self.mesh())

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        if self.scenario.accumulate_locally:
            self.net.set_requires_gradient_sync(last)
            self.net.set_reshard_after_backward(last or "keep" not in self.scenario.options)
        yield

    def reduce(self) -> None:
        """What `fully_shard` was told to leave alone, the loop averages."""
        for p in self.net.parameters():
            if not isinstance(p, DTensor) and p.grad is not None:
                dist.all_reduce(p.grad, group=self.group)
                p.grad.div_(self.num_data)


class Hsdp(Fsdp):
    def mesh(self) -> DeviceMesh:
        return square("replicate", "shard")
