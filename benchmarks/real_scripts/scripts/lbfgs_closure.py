"""Sequence prediction with LBFGS, which evaluates a closure several times per step, as in PyTorch's examples."""

import math

import torch
from clock import LONGER, Clock
from torch import nn


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2 = nn.LSTMCell(1, 24), nn.LSTMCell(24, 24)
        self.linear = nn.Linear(24, 1)

    def forward(self, x):
        outputs = []
        h, c, h2, c2 = (torch.zeros(x.size(0), 24, dtype=x.dtype) for _ in range(4))
        for part in x.split(1, dim=1):
            h, c = self.lstm1(part, (h, c))
            h2, c2 = self.lstm2(h, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


def main():
    torch.manual_seed(0)
    clock = Clock()
    shifts = torch.randint(-80, 80, (24, 1))
    data = torch.sin((torch.arange(40)[None, :] + shifts) / 20.0 * math.pi).double()
    seq, criterion = Sequence().double(), nn.MSELoss()
    optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.5, max_iter=5)
    for _ in range(60 * LONGER):

        def closure():
            optimizer.zero_grad()
            loss = criterion(seq(data[:, :-1]), data[:, 1:])
            loss.backward()
            return loss

        clock.step(optimizer.step(closure).detach())
    clock.end(seq)


if __name__ == "__main__":
    main()
