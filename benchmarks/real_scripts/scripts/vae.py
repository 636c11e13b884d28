"""A variational autoencoder, whose loss is a sum over the batch, as in PyTorch's examples."""

import torch
from clock import LONGER, Clock
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(256, 200)
        self.fc21, self.fc22 = nn.Linear(200, 10), nn.Linear(200, 10)
        self.fc3, self.fc4 = nn.Linear(10, 200), nn.Linear(200, 256)

    def forward(self, x):
        hidden = torch.relu(self.fc1(x))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.fc4(torch.relu(self.fc3(z))).sigmoid(), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = nn.functional.binary_cross_entropy(recon_x, x, reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def main():
    torch.manual_seed(0)
    clock, model = Clock(), VAE()
    patterns = (torch.rand(8, 256) > 0.7).float()
    mixed = patterns[torch.randint(8, (12800,))] * 0.9 + 0.05
    images = torch.bernoulli(mixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2 * LONGER):
        for (data,) in DataLoader(TensorDataset(images), batch_size=128, shuffle=True):
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data)
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            optimizer.step()
            clock.step(loss.detach())
    clock.end(model)


if __name__ == "__main__":
    main()
