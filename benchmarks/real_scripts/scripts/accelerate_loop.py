"""A plain loop with Accelerate: prepare, accumulate, clip."""

import torch
from accelerate import Accelerator
from clock import LONGER, Clock
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))
    x = torch.randn(6400, 64)
    y = teacher(x).detach() + 0.1 * torch.randn(6400, 8)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200 * LONGER)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    clock = Clock()
    total = 0.0
    for _ in range(3 * LONGER):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                total += loss.item() / 2
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    clock.step(total)
                    total = 0.0
    clock.end(accelerator.unwrap_model(model))


if __name__ == "__main__":
    main()
