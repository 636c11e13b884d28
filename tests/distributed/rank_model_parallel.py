"""Tensor parallelism and pipelines, alone and together with data parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_data_parallel import Fsdp, Way, whole
from rank_groups import line, square
from rank_nets import Net, batch, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def parallelize(net: Net, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Columns, rows, and between them whole samples or parts of their sequence."""
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    for attn in ("blocks.0.attn", "blocks.1.attn"):
        plan |= {f"{attn}.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        plan[f"{attn}.proj"] = RowwiseParallel(output_layouts=between)
    plan["blocks.0.mlp.up"] = ColwiseParallel()
    plan["blocks.0.mlp.down"] = RowwiseParallel(output_layouts=between)
    plan["blocks.0.side"] = ColwiseParallel(input_layouts=between, output_layouts=between)
    if sequence:
        gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        for name in ("blocks.0.attn", "blocks.0.mlp", "blocks.1.attn"):
            plan[name] = PrepareModuleInput(**gathered)
        for name in ("blocks.0.norm", "blocks.0.norm2", "norm"):
            plan[name] = SequenceParallel()
    parallelize_module(net, mesh, plan)


class Tp(Way):
    sequence = False

    def build(self) -> None:
        self.data_index, self.num_data = 0, 1
        parallelize(self.net, line("tp"), sequence=self.sequence)
        self.net.tie(self.scenario.tied)

    def clip(self) -> None:
        """By hand: torch's own takes no mixture of DTensors and plain tensors."""
        grads = [p.grad for p in self.net.parameters() if p.grad is not None]
        norm = torch.stack([whole(grad).norm() for grad in grads]).norm()
        factor = min(1.0, self.scenario.clip / float(norm))
        for grad in grads:
            grad.mul_(factor)


class TpSequence(Tp):
    sequence = True


class TpByHand(Tp):
    """Tensor-parallel pairs, whose gradients the loop averages itself."""

    def build(self) -> None:
        mesh = square("dp", "tp")
        self.data_index, self.num_data = self.rank // 2, 2
        self.across = mesh["dp"].get_group()
        parallelize(self.net, mesh["tp"], sequence=self.sequence)

    def reduce(self) -> None:
        for p in self.net.parameters():
            grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            dist.all_reduce(grad, group=self.across)
            grad.div_(2)


class FsdpTp(Fsdp):
    sequence = False

    def build(self) -> None:
        mesh = square("dp", "tp")
        self.data_index, self.num_data = self.rank // 2, 2
        parallelize(self.net, mesh["tp"], sequence=self.sequence)
        self.net.tie(self.scenario.tied)
        self.shard(mesh["dp"])

    clip = Tp.clip


class FsdpTpSequence(FsdpTp):
    sequence = True


class Pipeline(Way):
    """Two stages, each with tensors of its own; losses are known to the last alone."""

    schedule: Any

    def build(self) -> None:
        self.data_index, self.num_data, self.stage = 0, 1, self.rank
        self.begin(self.group)

    def begin(self, group: Any) -> None:
        self.net.keep_stage(self.stage)
        self.model = self.wrap()
        stage = PipelineStage(self.model, self.stage, 2, torch.device("cpu"), group=group)
        schedule = ScheduleGPipe if self.scenario.options.get("schedule") == "gpipe" else Schedule1F1B
        self.schedule = schedule(
            stage, self.scenario.micro, loss_fn=self.part_of_loss, scale_grads=self.scenario.scale_grads
        )

    def wrap(self) -> nn.Module:
        return self.net

    def part_of_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(logits, targets)
        self.losses.append(loss.detach())
        return loss if self.scenario.scale_grads else loss / self.scenario.micro

    def backward(self, step: int) -> list[Tensor]:
        scenario = self.scenario
        self.net.leave_out_side(scenario.leaves_out_side(step, self.data_index))
        batches = [
            batch(scenario.seed(step, self.data_index, i), scenario.size(self.data_index, i))
            for i in range(scenario.micro)
        ]
        inputs, targets = (torch.cat([pair[which] for pair in batches]) for which in (0, 1))
        self.losses: list[Tensor] = []
        with self.autocast():
            if self.stage == 0:
                self.schedule.step(inputs)
            else:
                self.schedule.step(target=targets)
        self.reduce()
        return self.losses[-scenario.micro :]  # torch has tried the last stage before its first step

    def clip(self) -> None:
        """By hand, for the norm is of all stages."""
        grads = [p.grad for p in self.net.parameters()]
        square = torch.stack([grad.square().sum() for grad in grads]).sum()
        dist.all_reduce(square, group=self.group)
        for grad in grads:
            grad.mul_(min(1.0, self.scenario.clip / float(square.sqrt())))


class PipelineByHand(Pipeline):
    """Two pipelines of two stages: ranks 0 and 1 are one, 2 and 3 the other; the loop averages between them."""

    def build(self) -> None:
        self.data_index, self.num_data, self.stage = self.rank // 2, 2, self.rank % 2
        self.mesh = square("dp", "pp")
        self.begin(self.mesh["pp"].get_group())

    def reduce(self) -> None:
        for p in self.net.parameters():
            dist.all_reduce(p.grad, group=self.mesh["dp"].get_group())
            p.grad.div_(2)


class PipelineFsdp(PipelineByHand):
    """The same, each stage sharded between the two; its micro-batches are summed before they are reduced."""

    def wrap(self) -> nn.Module:
        return fully_shard(self.net, mesh=self.mesh["dp"])

    def reduce(self) -> None:
        pass
