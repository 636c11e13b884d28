"""Sub-pixel super-resolution with the planted bug of a learning rate ten times too high for SGD with momentum."""

import torch
from clock import Clock
from torch import nn


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, upscale_factor**2, 3, padding=1)
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        for conv in (self.conv1, self.conv2):
            nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))

    def forward(self, x):
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        return self.pixel_shuffle(self.conv3(x))


def main():
    torch.manual_seed(0)
    clock, model, criterion = Clock(), Net(2), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    grid = torch.linspace(0, 6, 24)
    for _ in range(200):
        phase, tilt = 6 * torch.rand(16, 1, 1, 1), 2 * torch.rand(16, 1, 1, 1) - 1
        target = 0.5 + 0.5 * torch.sin(grid[None, None, :, None] + tilt * grid[None, None, None, :] + phase)
        optimizer.zero_grad()
        loss = criterion(model(nn.functional.avg_pool2d(target, 2)), target)
        loss.backward()
        optimizer.step()
        clock.step(loss.detach())
    clock.end(model)


if __name__ == "__main__":
    main()
