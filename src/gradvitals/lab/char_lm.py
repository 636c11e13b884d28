"""A small character-level transformer and the text it learns: enough to be real, short enough to read."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class CharLMConfig:
    """Shape of a `CharLM`."""

    vocab_size: int
    context: int = 32
    d_model: int = 64
    n_layer: int = 4
    n_head: int = 4


class Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    def __init__(self, config: CharLMConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model)
        self.proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with those before it."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention, then an MLP; each reads a normalised copy of the stream and adds to it (pre-LN)."""

    def __init__(self, config: CharLMConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.d_model)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.d_model)
        self.mlp = nn.Sequential(
            nn.Linear(config.d_model, 4 * config.d_model),
            nn.GELU(),
            nn.Linear(4 * config.d_model, config.d_model),
        )

    def forward(self, x: Tensor) -> Tensor:
        """One layer of the stream."""
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class CharLM(nn.Module):
    """Predicts each next character from those before it."""

    def __init__(self, config: CharLMConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.position = nn.Parameter(0.02 * torch.randn(config.context, config.d_model))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.final_norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.apply(_small_weights)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the targets, in nats a character."""
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final_norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _small_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Characters:
    """A text as numbers, one a character, and random windows of it."""

    def __init__(self, text: str, *, seed: int = 0) -> None:
        self.alphabet = sorted(set(text))
        number = {character: i for i, character in enumerate(self.alphabet)}
        self.tokens = torch.tensor([number[character] for character in text])
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def vocab_size(self) -> int:
        """Number of distinct characters."""
        return len(self.alphabet)

    def batch(self, size: int, context: int) -> tuple[Tensor, Tensor]:
        """Windows of the text and the same windows one character on, each `[size, context]`."""
        starts = torch.randint(len(self.tokens) - context, (size, 1), generator=self.generator)
        places = starts + torch.arange(context)
        return self.tokens[places], self.tokens[places + 1]

    def noise_like(self, targets: Tensor) -> Tensor:
        """Targets that have nothing to do with the text."""
        return torch.randint(self.vocab_size, targets.shape, generator=self.generator)


def shakespeare() -> str:
    """The text shipped with the package: 250 kB of plays, public domain."""
    return resources.files("gradvitals.lab").joinpath("data/shakespeare.txt").read_text("utf-8")
