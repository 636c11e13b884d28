"""A language model small enough for many processes, whose tensors meet every case that sharding has, and its data.

No tensor has more than 64 elements but the embedding's table, so that nothing is sampled. The head has 7 rows, which
no number of ranks divides; `gain` has one element, so that all ranks but the first hold an empty part of it. Every
kind of tensor is in the first block; the second has what there must be two of, for each tensor costs every step time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

TOKENS, WIDTH, HEADS, LENGTH = 7, 8, 4, 8


class Attention(nn.Module):
    """Heads side by side; a rank of a tensor-parallel group has some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)  # a bias of keys has no gradient but rounding
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = (q @ k.transpose(-1, -2)) / (WIDTH // HEADS) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(mask, -30.0).softmax(-1).to(v.dtype) @ v
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    """Attention and an MLP, and a branch that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()
        self.side = nn.Linear(WIDTH, WIDTH, bias=False)
        self.use_side = True

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        y = self.norm2(x)
        x = x + self.mlp(y)
        return x + 0.3 * self.side(y) if self.use_side else x


class LastBlock(nn.Module):
    """Attention alone: heads of another layer, and tensors for a second stage or unit."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


class Net(nn.Module):
    def __init__(self, tied: str | None = None) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleDict({"0": Block(), "1": LastBlock()})
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, TOKENS, bias=False)
        self.gain: nn.Parameter | None = nn.Parameter(torch.tensor([1.5]))
        self.recompute = False
        self.tie(tied)

    def tie(self, tied: str | None) -> None:
        if tied == "head":
            self.head.weight = self.embed.weight
        if tied == "mlp":
            mlp = self.blocks["0"].mlp
            mlp.down.weight = mlp.up.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x if self.head is None else self.head(self.norm(x)) * self.gain

    def leave_out_side(self, leave_out: bool) -> None:
        if "0" in self.blocks:
            self.blocks["0"].use_side = not leave_out

    def freeze(self, frozen: tuple[str, ...]) -> Net:
        for name, p in self.named_parameters():
            p.requires_grad_(not name.startswith(frozen) if frozen else True)
        return self

    def keep_stage(self, stage: int) -> Net:
        """Keep what one of two stages of a pipeline has, under its name in the whole model."""
        del self.blocks[str(1 - stage)]
        if stage == 0:
            self.norm = self.head = self.gain = None
        else:
            self.embed = None
        return self


def new_net(tied: str | None = None) -> Net:
    """The same weights in every process, of a size that gives every tensor a gradient well above rounding."""
    torch.manual_seed(3)
    net = Net(tied)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.dim() == 2:
                p.mul_(1.5)
            elif "norm" in name and "weight" in name:
                p.add_(0.2 * torch.randn_like(p))
    return net


def batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Sequences in which a token says much of the next, so that gradients agree to some degree."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, TOKENS, (size, LENGTH + 1), generator=generator)
    sure = torch.rand(size, LENGTH, generator=generator) < 0.5
    for t in range(LENGTH):
        ids[:, t + 1] = torch.where(sure[:, t], (2 * ids[:, t] + 1) % TOKENS, ids[:, t + 1])
    return ids[:, :-1], ids[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over samples, all of which have the same length."""
    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return nn.functional.cross_entropy(logits.flatten(0, 1).to(kind), targets.flatten())
