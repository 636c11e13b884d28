"""What `gradvitals probe` needs: a function that makes a model, its data and its loss.

gradvitals probe examples.probe_factory:factory --html probe.html
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradvitals as gv


def factory() -> tuple[nn.Module, DataLoader, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    # Two rings, of which 2 % have the wrong label.
    angle, inner = torch.rand(1024) * 6.283, torch.arange(1024) % 2
    radius = 1.0 + inner + 0.2 * torch.randn(1024)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    labels = torch.where(torch.rand(1024) < 0.02, 1 - inner, inner)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(points, labels), batch_size=64, shuffle=True)
    loss = nn.CrossEntropyLoss()
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    return model, loader, loss, optimizer


if __name__ == "__main__":  # the same without the command
    model, loader, loss, optimizer = factory()
    print(gv.probe(model, loader, loss, optimizer=optimizer))
