"""Thirty steps, and no more."""

import torch
from clock import Clock
from torch import nn


def main():
    torch.manual_seed(0)
    clock = Clock()
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    target = torch.randn(32)
    for _ in range(30):
        x = torch.randn(128, 32)
        loss = nn.functional.mse_loss(model(x).squeeze(1), x @ target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step(loss.detach())
    clock.end(model)


if __name__ == "__main__":
    main()
