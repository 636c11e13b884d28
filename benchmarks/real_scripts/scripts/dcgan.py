"""A DCGAN: two models, two optimizers, two backward passes for the discriminator, as in PyTorch's examples."""

import torch
from clock import LONGER, Clock
from torch import nn


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(16, 32, 4, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, x):
        return self.main(x)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2),
            nn.Conv2d(32, 1, 4, bias=False),
        )  # fmt: skip

    def forward(self, x):
        return self.main(x).view(-1).sigmoid()


def weights_init(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def main():
    torch.manual_seed(0)
    clock, netG, netD, criterion = Clock(), Generator(), Discriminator(), nn.BCELoss()
    netG.apply(weights_init)
    netD.apply(weights_init)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    grid = torch.linspace(-3, 3, 16)
    for _ in range(150 * LONGER):
        netD.zero_grad()
        phase, tilt = 3 * torch.rand(32, 1, 1, 1), torch.rand(32, 1, 1, 1)
        real = torch.sin(grid[None, None, :, None] + tilt * grid[None, None, None, :] + phase)
        real = 0.8 * real + 0.1 * torch.randn(32, 1, 16, 16)
        errD_real = criterion(netD(real), torch.ones(32))
        errD_real.backward()
        fake = netG(torch.randn(32, 16, 1, 1))
        errD_fake = criterion(netD(fake.detach()), torch.zeros(32))
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        errG = criterion(netD(fake), torch.ones(32))
        errG.backward()
        optimizerG.step()
        clock.step((errD_real + errD_fake).detach())
    clock.end(netG, netD)


if __name__ == "__main__":
    main()
