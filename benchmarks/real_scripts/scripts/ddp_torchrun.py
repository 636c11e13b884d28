"""DistributedDataParallel on gloo, started by torchrun."""

import os

import torch
import torch.distributed as dist
from clock import Clock
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)))
    centers = torch.randn(8, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)
    clock = Clock()
    for _ in range(150):
        y = torch.randint(8, (64,))
        loss = nn.functional.cross_entropy(model(centers[y] + 4 * torch.randn(64, 64)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        clock.step(total / 2)
    if rank == 0:
        clock.end(model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
