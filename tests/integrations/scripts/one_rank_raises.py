"""Two ranks under DDP; the one that is named raises after 20 steps."""

import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    if step == 20 and dist.get_rank() == int(sys.argv[1]):
        raise ValueError("bad sample")
dist.destroy_process_group()
