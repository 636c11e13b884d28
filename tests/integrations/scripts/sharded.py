"""A model that is sharded over processes, and knows nothing of gradvitals."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    fully_shard(model.first)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for _ in range(6):
        model(torch.randn(4, 8)).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor()
        if dist.get_rank() == 0:
            print(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
