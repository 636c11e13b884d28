"""torch.multiprocessing.spawn: the script starts its ranks itself, and this process trains nothing."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from clock import Clock
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def worker(rank, file, world_size):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DDP(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = Clock()
    torch.manual_seed(1 + rank)
    for _ in range(60):
        x = torch.randn(32, 16)
        loss = nn.functional.mse_loss(model(x), x[:, :4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step(loss.detach())
    if rank == 0:
        clock.end(model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    meeting = os.path.join(os.getcwd(), f"meeting-{os.getpid()}")  # noqa: PTH109, PTH118
    mp.spawn(worker, args=(meeting, 2), nprocs=2)
