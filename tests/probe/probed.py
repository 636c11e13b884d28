"""Small models of many kinds, and data for them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradvitals as gv

DEFAULT = object()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def classes(count: int = 48, batch_size: int = 8, seed: int = 1) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()), batch_size)


def ask(
    model: nn.Module | None = None, loader: Any = None, loss_fn: Any = DEFAULT, n_batches: int = 10, **settings: Any
) -> gv.probe.Probe:
    """Probe a model, by default an MLP of three classes."""
    model, loader = model or mlp(), classes() if loader is None else loader
    loss_fn = nn.CrossEntropyLoss() if loss_fn is DEFAULT else loss_fn
    return gv.probe(model, loader, loss_fn, n_batches, **{"progress": False, **settings})


def everything() -> nn.Module:
    """Batch norm, dropout, a frozen parameter, tied weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 6), nn.Linear(6, 3)
    )
    model[4].weight = model[0].weight
    model[5].bias.requires_grad_(False)
    return model


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class Blocks(nn.Module):
    """A language model with attention and tied embeddings; gives (logits) or, with labels, an output with a loss."""

    def __init__(self, vocab: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.qkv, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x)
        if labels is None:
            return SimpleNamespace(logits=logits, loss=None)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def tokens(count: int = 4, batch_size: int = 4, length: int = 7) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(count):
        ids = torch.randint(11, (batch_size, length), generator=generator)
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    return found


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Item:
    features: Tensor
    answer: Tensor
    name: str = "kept"
