"""The forward-forward algorithm: each layer has an optimizer of its own, and layers are trained one after the other."""

from itertools import pairwise

import torch
from clock import LONGER, Clock
from torch import nn


class Layer(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.opt = torch.optim.Adam(self.parameters(), lr=0.01)
        self.threshold = 2.0

    def forward(self, x):
        direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return torch.relu(nn.functional.linear(direction, self.weight, self.bias))

    def train_layer(self, positive, negative, clock):
        for _ in range(100 * LONGER):
            good = self(positive).pow(2).mean(1)
            bad = self(negative).pow(2).mean(1)
            loss = nn.functional.softplus(torch.cat([self.threshold - good, bad - self.threshold])).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            clock.step(loss.detach())
        return self(positive).detach(), self(negative).detach()


class Net(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.layers = nn.ModuleList([Layer(*pair) for pair in pairwise(sizes)])

    def train_all(self, positive, negative, clock):
        for layer in self.layers:
            positive, negative = layer.train_layer(positive, negative, clock)


def main():
    torch.manual_seed(0)
    clock, net = Clock(), Net([138, 256, 256])
    y = torch.randint(10, (512,))
    x = torch.randn(10, 128)[y] + torch.randn(512, 128)
    labels = nn.functional.one_hot(y, 10).float()
    wrong = nn.functional.one_hot((y + torch.randint(1, 10, (512,))) % 10, 10).float()
    net.train_all(torch.cat([x, 3 * labels], 1), torch.cat([x, 3 * wrong], 1), clock)
    clock.end(net)


if __name__ == "__main__":
    main()
