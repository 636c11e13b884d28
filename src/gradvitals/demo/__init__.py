"""The demo: a small transformer learns Shakespeare on the CPU, with a bug in its loop, and then without it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradvitals.config import Config
from gradvitals.monitor import watch

MICRO_BATCHES = 4
MICRO_BATCH_SIZE = 8
WARMUP_STEPS = 20
LEARNING_RATE = 3e-3
TOO_HIGH = 100
"""Factor by which the learning rate of the fault `lr` is too high."""
TENSOR_EVERY = 10

Fault = Literal["stale", "lr", "none"]
"""The fault to plant: a loop without zero_grad, a learning rate that is `TOO_HIGH`, or none."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """One training."""

    out: Path
    steps: int = 200
    seed: int = 0
    fault: Fault = "stale"
    lr: float | None = None
    """None for the learning rate that goes with the fault."""


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The result of a run."""

    path: Path
    fault: Fault
    steps: int
    seconds: float
    num_parameters: int
    interrupted: bool

    def to_json(self) -> dict[str, Any]:
        """Returns the record as plain JSON values."""
        return {**asdict(self), "path": str(self.path)}


OnStep = Callable[[int, float], None]
"""Called after each step: the number of steps done, and the loss."""


def run_demo(settings: DemoSettings, on_step: OnStep) -> DemoResult:
    """Train, with a Monitor watching. Ctrl-C ends it early and cleanly."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains little from more, and loses a lot on a busy machine
    try:
        return _train(settings, on_step)
    finally:
        torch.set_num_threads(threads)


def _train(settings: DemoSettings, on_step: OnStep) -> DemoResult:
    torch.manual_seed(settings.seed)
    text = Characters(shakespeare(), seed=settings.seed)
    model = CharLM(CharLMConfig(vocab_size=text.vocab_size))
    rate = settings.lr or LEARNING_RATE * (TOO_HIGH if settings.fault == "lr" else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    about = {"command": "gradvitals demo", "seed": settings.seed, "fault": settings.fault}
    monitor = watch(
        model,
        optimizer,
        run=settings.out,
        config=Config(tensor_every=TENSOR_EVERY, overhead_budget=1, quiet=True, extra=about),
        batch_size=MICRO_BATCHES * MICRO_BATCH_SIZE,
    )
    start, done, interrupted = time.perf_counter(), 0, False
    with monitor:
        try:
            for step in range(settings.steps):
                losses = []
                for _ in range(MICRO_BATCHES):
                    loss = model(*text.batch(MICRO_BATCH_SIZE, model.config.context))
                    (loss / MICRO_BATCHES).backward()
                    monitor.observe(loss, batch_size=MICRO_BATCH_SIZE)
                    losses.append(loss.item())
                optimizer.step()
                if settings.fault != "stale":
                    optimizer.zero_grad()
                warmup.step()
                done = step + 1
                on_step(done, sum(losses) / len(losses))
        except KeyboardInterrupt:
            interrupted = True
    return DemoResult(
        path=monitor.run_path,
        fault=settings.fault,
        steps=done,
        seconds=time.perf_counter() - start,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        interrupted=interrupted,
    )


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
    """Attention, then an MLP; each reads a normalized copy of the stream and adds to it (pre-LN)."""

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
        """Mean cross-entropy of the targets, in nats per character."""
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
    """A text as numbers, one per character, and random windows of it."""

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


def shakespeare() -> str:
    """The text shipped with the package: 250 kB of plays, public domain."""
    return resources.files("gradvitals.demo").joinpath("shakespeare.txt").read_text("utf-8")
