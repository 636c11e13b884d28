"""Micro-batches: several backward passes before a step let gradvitals tell signal from noise."""

import torch
from torch import nn

import gradvitals as gv

MICRO_BATCHES = 4

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
truth = torch.randn(20, 1)

with gv.watch(model, optimizer, run="runs/accumulation") as monitor:
    for _ in range(200):
        for _ in range(MICRO_BATCHES):
            x = torch.randn(8, 20)
            loss = nn.functional.mse_loss(model(x), x @ truth + 0.5 * torch.randn(8, 1))
            (loss / MICRO_BATCHES).backward()
            monitor.observe(loss, batch_size=len(x))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

run = gv.open_run(monitor.run_path)
for metric in ("gsnr", "noise_scale"):
    steps, values = run.series(metric, source="microbatch")
    print(f"{metric}: {values[-1]:.3g} at step {steps[-1]}")
