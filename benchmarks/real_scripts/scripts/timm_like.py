"""An image classifier with an EMA copy, mixup and warmup, in the manner of timm's train.py, which needs torchvision."""

import copy
import math

import torch
from clock import LONGER, Clock
from torch import nn


class ModelEma(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module, self.decay = copy.deepcopy(model), decay
        self.module.eval()

    @torch.no_grad()
    def update(self, model):
        for ema, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            ema.copy_(self.decay * ema + (1 - self.decay) * value if ema.is_floating_point() else value)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


def create_model():
    stem = nn.Conv2d(3, 24, 3, stride=2, padding=1)
    return nn.Sequential(stem, Block(24), Block(24), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(24 * 16, 10))


def main():
    torch.manual_seed(0)
    clock = Clock()
    centers = torch.randn(10, 3, 16, 16)
    model = create_model()
    model_ema = ModelEma(model, 0.99)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
    for step in range(200 * LONGER):
        lr = 0.05 * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / (200 * LONGER)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        target = torch.randint(10, (32,))
        images = centers[target] + 2 * torch.randn(32, 3, 16, 16)
        lam = float(torch.distributions.Beta(0.2, 0.2).sample())
        mixed = lam * images + (1 - lam) * images.flip(0)
        one_hot = nn.functional.one_hot(target, 10).float()
        loss = nn.functional.cross_entropy(model(mixed), lam * one_hot + (1 - lam) * one_hot.flip(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model_ema.update(model)
        clock.step(loss.detach())
    clock.end(model, model_ema)


if __name__ == "__main__":
    main()
