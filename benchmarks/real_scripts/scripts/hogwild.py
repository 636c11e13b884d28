"""Hogwild: processes of the script's own train a shared model; this one trains nothing."""

import torch
import torch.multiprocessing as mp
from clock import Clock
from torch import nn


def train(rank, model):
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(100):
        x = torch.randn(64, 32)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    model.share_memory()
    process = mp.get_context("spawn").Process(target=train, args=(0, model))
    process.start()
    process.join()
    Clock().end(model)


if __name__ == "__main__":
    main()
