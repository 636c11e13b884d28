"""The smallest use: watch a loop, then read the run back."""

import torch
from torch import nn

import gradvitals as gv

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
truth = torch.randn(20, 1)

with gv.watch(model, optimizer, run="runs/plain_loop", batch_size=32) as monitor:
    for _ in range(200):
        x = torch.randn(32, 20)
        loss = nn.functional.mse_loss(model(x), x @ truth + 0.1 * torch.randn(32, 1))
        loss.backward()
        monitor.observe(loss)
        optimizer.step()
        optimizer.zero_grad()

run = gv.open_run(monitor.run_path)
steps, norms = run.series("grad/norm")
print(f"{len(steps)} steps kept in {monitor.run_path}; the norm went from {norms[0]:.3g} to {norms[-1]:.3g}")
