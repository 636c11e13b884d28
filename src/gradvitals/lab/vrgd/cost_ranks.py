"""What ranks send each other in one step: two processes over gloo, every collective counted as it is called.

Counted are the bytes a rank hands to collectives. What goes over the wire for each depends on the algorithm: in a ring
of n ranks 2 (n - 1) / n times as much. gloo has torch's fp16 compression but refuses its bf16 hook, which wants NCCL;
both send 2 bytes.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradvitals import optim

NUM_RANKS = 2
NUM_MICRO_BATCHES = 4
SETTLE_STEPS = 2
"""DDP rearranges its buckets in the second step, and tells the other ranks."""

Make = Callable[[nn.Module, DistributedDataParallel], torch.optim.Optimizer]


def _base(model: nn.Module, ddp: DistributedDataParallel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def _base_16(model: nn.Module, ddp: DistributedDataParallel) -> torch.optim.Optimizer:
    ddp.register_comm_hook(None, fp16_compress_hook)
    return torch.optim.AdamW(model.parameters())


def _vr(model: nn.Module, ddp: DistributedDataParallel) -> torch.optim.Optimizer:
    optimizer = optim.VRAdamW(model.parameters())
    optimizer.use_ranks(ddp)
    return optimizer


def _vr_16(model: nn.Module, ddp: DistributedDataParallel) -> torch.optim.Optimizer:
    optimizer = optim.VRAdamW(model.parameters())
    optimizer.use_ranks(ddp, hook=fp16_compress_hook)
    return optimizer


def _vr_all_16(model: nn.Module, ddp: DistributedDataParallel) -> torch.optim.Optimizer:
    optimizer = optim.VRAdamW(model.parameters(), moments_dtype=torch.bfloat16)
    optimizer.use_ranks(ddp, hook=fp16_compress_hook)
    return optimizer


VARIANTS: dict[str, Make] = {
    "base": _base,
    "base, 16-bit hook": _base_16,
    "use_ranks": _vr,
    "use_ranks, 16-bit hook": _vr_16,
    "use_ranks, 16-bit hook, 16-bit moments": _vr_all_16,
}


class _SentBytes(TorchDispatchMode):
    """Adds up the tensors that collectives are called with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self.total += sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        return func(*args, **(kwargs or {}))


def bytes_per_parameter() -> dict[str, float]:
    """Bytes a rank hands to collectives in one step of k micro-batches, for each parameter, in every variant."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(NUM_RANKS, mp_context=context) as pool:
            found = [pool.submit(_rank, rank, meeting) for rank in range(NUM_RANKS)]
            return found[0].result()


def _rank(rank: int, meeting: Path) -> dict[str, float]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # gloo and DDP warn of much that does not matter here
    dist.init_process_group("gloo", init_method=meeting.as_uri(), rank=rank, world_size=NUM_RANKS)
    try:
        return {name: _count(make) for name, make in VARIANTS.items()}
    finally:
        dist.destroy_process_group()


def _count(make: Make) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DistributedDataParallel(model)
    optimizer = make(model, ddp)
    total = 0
    for _ in range(SETTLE_STEPS + 1):
        with _SentBytes() as sent:
            for number in range(1, NUM_MICRO_BATCHES + 1):
                with ddp.no_sync() if number < NUM_MICRO_BATCHES else nullcontext():
                    ddp(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        total = sent.total
    return total / sum(parameter.numel() for parameter in model.parameters())
