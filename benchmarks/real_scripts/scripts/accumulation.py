"""Gradients of four micro-batches per step; every epoch ends with a step of fewer, each still divided by four."""

import torch
from clock import LONGER, Clock
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    clock, accum_iter = Clock(), 4
    teacher = nn.Sequential(nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 6)).requires_grad_(False)
    x = torch.randn(1344, 48)
    y = teacher(x) + 0.1 * torch.randn(1344, 6)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(48, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(12 * LONGER):
        parts = []
        for index, (inputs, targets) in enumerate(loader):
            loss = nn.functional.mse_loss(model(inputs), targets)
            parts.append(loss.item())
            loss = loss / accum_iter
            loss.backward()
            if (index + 1) % accum_iter == 0 or index + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
                clock.step(sum(parts) / len(parts))
                parts = []
    clock.end(model)


if __name__ == "__main__":
    main()
