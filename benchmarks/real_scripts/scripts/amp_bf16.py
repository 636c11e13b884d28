"""Mixed precision: bfloat16 autocast and a GradScaler, which unscales before it clips."""

import torch
from clock import LONGER, Clock
from torch import nn


def main():
    torch.manual_seed(0)
    clock = Clock()
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    centers = torch.randn(10, 64)
    for _ in range(200 * LONGER):
        y = torch.randint(10, (128,))
        x = centers[y] + 3 * torch.randn(128, 64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        clock.step(loss.detach())
    clock.end(model)


if __name__ == "__main__":
    main()
