"""A recurrent language model that updates its weights by hand, as that of PyTorch's examples does."""

import torch
from clock import Clock
from torch import nn


class RNNModel(nn.Module):
    def __init__(self, ntoken, width):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, width)
        self.rnn = nn.LSTM(width, width)
        self.decoder = nn.Linear(width, ntoken)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, data, hidden):
        output, hidden = self.rnn(self.encoder(data), hidden)
        return self.decoder(output).flatten(0, 1).log_softmax(dim=1), hidden


def main():
    torch.manual_seed(0)
    clock, model, lr = Clock(), RNNModel(64, 96), 2.0
    tokens = [torch.randint(64, (20,))]
    for _ in range(3000):
        noise = torch.rand(20) < 0.2
        tokens.append(torch.where(noise, torch.randint(64, (20,)), (5 * tokens[-1] + 3) % 64))
    data = torch.stack(tokens)
    hidden = tuple(torch.zeros(1, 20, 96) for _ in range(2))
    model.train()
    for start in range(0, 3000 - 15, 15):
        inputs, targets = data[start : start + 15], data[start + 1 : start + 16].flatten()
        model.zero_grad()
        hidden = tuple(part.detach() for part in hidden)
        output, hidden = model(inputs, hidden)
        loss = nn.functional.nll_loss(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        clock.step(loss.detach())
    clock.end(model)


if __name__ == "__main__":
    main()
