"""Muon for the matrices and AdamW for the rest: two optimizers of one model."""

import torch
from clock import LONGER, Clock
from torch import nn


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(buffer, group["momentum"])
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
                p.add_(x, alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)


def main():
    torch.manual_seed(0)
    clock = Clock()
    model = nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 192), nn.GELU(), nn.Linear(192, 16))
    teacher = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16)).requires_grad_(False)
    matrices = [p for p in model[2].parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = [torch.optim.AdamW(others, lr=1e-3), Muon(matrices, lr=0.005)]
    for step in range(200 * LONGER):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = (0.005 if isinstance(optimizer, Muon) else 1e-3) * (1 - step / (200 * LONGER))
        x = torch.randn(256, 64)
        loss = nn.functional.mse_loss(model(x), teacher(x))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        clock.step(loss.detach())
    clock.end(model)


if __name__ == "__main__":
    main()
