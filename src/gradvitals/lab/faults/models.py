"""The models of the zoo beside CharLM: an MLP, a CNN with batch norm, a post-LN transformer and a plain RNN."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradvitals.lab.char_lm import Block, CharLM
from gradvitals.lab.faults.pictures import NUM_CLASSES

Activation = Callable[[Tensor], Tensor]


class MLP(nn.Module):
    """A plain classifier of small pictures."""

    def __init__(
        self, *, depth: int = 4, width: int = 128, dropout: float = 0.0, activation: Activation = F.relu
    ) -> None:
        super().__init__()
        widths = [64] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))
        self.head = nn.Linear(widths[-1], NUM_CLASSES)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy."""
        x = inputs
        for layer in self.layers:
            x = self.dropout(self.activation(layer(x)))
        return F.cross_entropy(self.head(x), targets)


class CNN(nn.Module):
    """Three stages of convolution, batch norm and ReLU, each halving the picture."""

    def __init__(self, *, width: int = 12, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        channels = (1, width, 2 * width, 4 * width)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 3, 2, padding=1, bias=bias), nn.BatchNorm2d(after), nn.ReLU())
            for before, after in pairwise(channels)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels[-1], NUM_CLASSES)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy."""
        x = inputs
        for stage in self.stages:
            x = stage(x)
        return F.cross_entropy(self.head(self.dropout(x.mean((2, 3)))), targets)


class PostLN(nn.Module):
    """A transformer block as first published: the sum is normalised, so that no path around the layers stays."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.attn, self.mlp = block.attn, block.mlp
        self.norm1, self.norm2 = block.norm1, block.norm2

    def forward(self, x: Tensor) -> Tensor:
        """One layer of the stream."""
        x = self.norm1(x + self.attn(x))
        out: Tensor = self.norm2(x + self.mlp(x))
        return out


def post_ln(model: CharLM) -> CharLM:
    """The same transformer with its norms moved behind the sums, and the usual larger weights of that time."""
    model.blocks = nn.ModuleList(PostLN(block) for block in model.blocks if isinstance(block, Block))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return model


class CharRNN(nn.Module):
    """A plain recurrent network, or an LSTM, that reads text and predicts each next character."""

    def __init__(self, *, vocab_size: int, width: int = 64, gain: float = 1.0, lstm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.recur = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab_size)
        nn.init.orthogonal_(self.recur.weight, gain)
        nn.init.zeros_(self.recur.bias)
        self.lstm = nn.LSTM(width, width, batch_first=True) if lstm else None
        if lstm:
            del self.recur

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the targets, in nats a character."""
        inputs = self.embed(tokens)
        if self.lstm is not None:
            return F.cross_entropy(self.head(self.lstm(inputs)[0]).flatten(0, 1), targets.flatten())
        state = torch.zeros_like(inputs[:, 0])
        states = []
        for position in range(tokens.shape[1]):
            state = torch.tanh(self.recur(state) + inputs[:, position])
            states.append(state)
        return F.cross_entropy(self.head(torch.stack(states, 1)).flatten(0, 1), targets.flatten())
