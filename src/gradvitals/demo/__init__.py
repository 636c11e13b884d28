"""The demo: a small transformer learns Shakespeare on the CPU, and one bad batch is planted on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradvitals.config import Config
from gradvitals.monitor import watch
from gradvitals.types import Reading

MICRO_BATCHES = 4
MICRO_BATCH_SIZE = 8
WARMUP_STEPS = 20
LEARNING_RATE = 3e-3
MAX_NORM = 1.0
FAULT_SCALE = 8.0
"""How much the loss of the bad batch is scaled up, as a wrong reduction over the batch would do."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What to run."""

    out: Path
    steps: int = 300
    seed: int = 0
    fault: bool = True

    @property
    def fault_step(self) -> int | None:
        """The optimizer step, counted from 0, whose batch is corrupted; None for no fault."""
        return self.steps * 3 // 5 if self.fault else None


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What ran."""

    path: Path
    steps: int
    seconds: float
    fault_step: int | None
    """None also when the run was stopped before the fault."""
    num_parameters: int
    interrupted: bool

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {**asdict(self), "path": str(self.path)}


OnStep = Callable[[int, float, Mapping[str, float]], None]
"""Called for each step as its reading is finished: the number of steps done, the loss, and the latest values."""


def run_demo(settings: DemoSettings, on_step: OnStep) -> DemoResult:
    """Train, with a monitor watching, and return where the run was kept. Ctrl-C ends it early and cleanly."""
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))

    config = Config(
        tensor_every=1, overhead_budget=1, quiet=True, extra={"command": "gradvitals demo", "seed": settings.seed}
    )
    latest: dict[str, float] = {}

    def on_reading(reading: Reading) -> None:
        if reading.source in (None, "microbatch"):
            latest.update(reading.values)
        if reading.source is None:
            on_step(reading.step + 1, reading.values["loss"], latest)

    monitor = watch(
        model,
        optimizer,
        run=settings.out,
        config=config,
        batch_size=MICRO_BATCHES * MICRO_BATCH_SIZE,
        on_reading=on_reading,
    )
    start = time.perf_counter()
    done = 0
    interrupted = False
    with monitor:
        try:
            for step in range(settings.steps):
                for _ in range(MICRO_BATCHES):
                    tokens, targets = text.batch(MICRO_BATCH_SIZE, model.config.context)
                    if step == settings.fault_step:
                        loss = FAULT_SCALE * model(tokens, text.noise_like(targets))
                    else:
                        loss = model(tokens, targets)
                    (loss / MICRO_BATCHES).backward()
                    monitor.observe(loss, batch_size=MICRO_BATCH_SIZE)
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
                warmup.step()
                done = step + 1
        except KeyboardInterrupt:
            interrupted = True
    fault_step = settings.fault_step
    return DemoResult(
        path=monitor.run_path,
        steps=done,
        seconds=time.perf_counter() - start,
        fault_step=fault_step if fault_step is not None and fault_step < done else None,
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
    return resources.files("gradvitals.demo").joinpath("shakespeare.txt").read_text("utf-8")
