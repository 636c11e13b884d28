"""A two-layer network of plain tensors whose weights the script updates itself, as the tutorials of PyTorch do."""

import torch
from clock import LONGER, Clock


def main():
    torch.manual_seed(0)
    clock = Clock()
    target = torch.randn(64, 4)
    w1 = (torch.randn(64, 800) / 8).requires_grad_()
    w2 = (torch.randn(800, 4) / 28).requires_grad_()
    for _ in range(200 * LONGER):
        x = torch.randn(256, 64)
        y = torch.tanh(x @ target / 8)
        loss = (x.mm(w1).clamp(min=0).mm(w2) - y).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            w1 -= 0.003 * w1.grad
            w2 -= 0.003 * w2.grad
            w1.grad.zero_()
            w2.grad.zero_()
        clock.step(loss.detach())
    clock.end(w1, w2)


if __name__ == "__main__":
    main()
