"""How a stack is trained: AdamW, a warm-up, and a learning rate that stays or falls along a cosine."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gradvitals.lab.char_lm import shakespeare
from gradvitals.lab.scale.stack import StackedLM
from gradvitals.lab.vrgd.graphs import GraphedPasses
from gradvitals.lab.vrgd.text import TRAIN_FILE, VALID_FILE, Text, read_text

BETAS = (0.9, 0.99)
WARMUP = 0.05
"""Share of the steps over which the learning rate rises."""
EVAL_SEED = 10**6


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate and weight decay of a training."""

    lr: float
    decay: float
    form: Literal["constant", "cosine"] = "constant"

    @property
    def name(self) -> str:
        """How tables call it."""
        return f"{self.form} {self.lr:g}, decay {self.decay:g}"

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step; a cosine falls to a tenth."""
        rising = min(1.0, (step + 1) / max(1, round(WARMUP * steps)))
        if self.form == "constant":
            return self.lr * rising
        return self.lr * rising * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


@dataclass(frozen=True)
class Texts:
    """What is learnt, and what is only read to see how much was learnt."""

    train: Text
    unseen: Text


def read_texts(data: Path | None, device: torch.device) -> Texts:
    """Books from a folder; without one, the plays that come with the package, of which the last tenth is not learnt."""
    if data is not None:
        return Texts(read_text(data / TRAIN_FILE, device), read_text(data / VALID_FILE, device))
    content = shakespeare().encode("utf-8")
    cut = len(content) * 9 // 10
    return Texts(Text(content[:cut], device), Text(content[cut:], device))


def losses_of(model: StackedLM, windows: Tensor) -> Tensor:
    """Loss of each copy. On a GPU products are bf16, weights float32."""
    on_gpu = windows.device.type == "cuda"
    with torch.autocast(windows.device.type, dtype=torch.bfloat16, enabled=on_gpu, cache_enabled=False):
        losses: Tensor = model(windows)
    return losses


OnStep = Callable[[int, float, torch.optim.AdamW], None]
"""Called before each update with the step, its learning rate and the optimizer."""


def train_stack(
    model: StackedLM,
    text: Text,
    schedule: Schedule,
    *,
    steps: int,
    batch: int,
    seed: int,
    decays: Tensor | None = None,
    multiplier_decay: float = 2e-3,
    on_step: OnStep | None = None,
    graphs: bool = True,
) -> None:
    """Train all copies on the same windows.

    Args:
        model: Is changed.
        text: What windows are cut from.
        schedule: Learning rate and weight decay.
        steps: How long.
        batch: Windows of a step.
        seed: Of the windows.
        decays: One weight decay for each copy, instead of the schedule's.
        multiplier_decay: Weight decay of learnable multipliers.
        on_step: Called before each update.
        graphs: On a GPU, replay the passes of a step as one CUDA graph.
    """
    device = text.bytes.device
    generator = torch.Generator(device).manual_seed(seed)
    tensors = [model.stored(name) for name in model.names]
    multipliers = [getattr(model, name) for name in model.multipliers]
    groups = [{"params": tensors, "weight_decay": schedule.decay if decays is None else 0.0}]
    groups += [{"params": multipliers, "weight_decay": multiplier_decay}] if multipliers else []
    optimizer = torch.optim.AdamW(groups, lr=schedule.lr, betas=BETAS, fused=device.type == "cuda")
    each = None if decays is None else decays.to(device)

    def loss(windows: Tensor) -> Tensor:
        return losses_of(model, windows[None]).sum()

    with closing(GraphedPasses(loss, optimizer, 1, device=device, graphs=graphs)) as passes:
        for step in range(steps):
            lr = schedule.rate(step, steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            passes(text.windows(batch, model.shape.context, generator))
            if on_step is not None:
                on_step(step, lr, optimizer)
            if each is not None:  # as AdamW does it, but for each copy by its own: w (1 - lr decay) - lr u
                kept = 1 - lr * each
                with torch.no_grad():
                    torch._foreach_mul_(tensors, [kept.view(-1, *(1,) * (tensor.dim() - 1)) for tensor in tensors])
            optimizer.step()


@torch.no_grad()
def evaluate(model: StackedLM, text: Text, num_windows: int, chunk: int = 64) -> Tensor:
    """Mean loss of each copy over windows of a text, the same ones each time."""
    generator = torch.Generator(text.bytes.device).manual_seed(EVAL_SEED)
    windows = text.windows(num_windows, model.shape.context, generator)
    total = torch.zeros(model.num_copies, device=windows.device)
    for some in windows.split(chunk):
        total += losses_of(model, some[None]) * len(some)
    return total / num_windows
