"""Many copies of one small language model, trained side by side: every tensor has the copies as its first dimension.

Copies share nothing: the gradient of the sum of their losses is, copy by copy, the gradient of each. So an experiment
that needs a hundred trainings of a small model, one for each tensor that is changed, is one training of a stack.

They are trained with AdamW, a warm-up, and a learning rate that stays or falls along a cosine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.vrgd.loop import GraphedPasses
from experiments.vrgd.text import TRAIN_FILE, VALID_FILE, Text, read_text
from gradvitals.demo import shakespeare
from gradvitals.multipliers import PARTS, Kind

VOCAB_SIZE = 256
"""Bytes."""

Role = Literal["matrix", "vector", "scalar"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of each copy."""

    width: int = 64
    num_layers: int = 2
    num_heads: int = 2
    context: int = 64
    scalars: bool = False
    """Whether each branch of the residual stream is multiplied by a learnt number, as in ReZero."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors of one copy, from the input to the output."""
        d = self.width
        found: dict[str, tuple[int, ...]] = {"embed": (VOCAB_SIZE, d), "position": (self.context, d)}
        for i in range(self.num_layers):
            layer: dict[str, tuple[int, ...]] = {"norm1": (d,), "q": (d, d), "k": (d, d), "v": (d, d), "proj": (d, d)}
            layer |= {"proj_bias": (d,), "norm2": (d,), "up": (4 * d, d), "up_bias": (4 * d,), "down": (d, 4 * d)}
            layer |= {"down_bias": (d,)} | ({"attn_scale": (), "mlp_scale": ()} if self.scalars else {})
            found |= {f"layer{i}.{name}": shape for name, shape in layer.items()}
        return found | {"final_norm": (d,), "head": (VOCAB_SIZE, d)}


def role(shape: Sequence[int]) -> Role:
    """What kind of tensor it is."""
    return "matrix" if len(shape) > 1 else "vector" if len(shape) else "scalar"


def start(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A tensor at the start of training: gains and scalars 1, biases 0, others normal."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) < 2:
        return torch.ones(shape)
    spread = 0.1 if name in ("embed", "position") else 1 / math.sqrt(shape[1])
    return spread * torch.randn(shape, generator=generator)


def multiplier_parts(name: str, kind: Kind) -> tuple[str, ...]:
    """Which multipliers a matrix gets, as the paper has it: none on embeddings, no rows on the output head."""
    if name in ("embed", "position"):
        return ()
    return tuple(part for part in PARTS[kind] if not (name == "head" and part == "row"))


class StackedLM(nn.Module):
    """Copies of a pre-LN transformer over bytes.

    Args:
        shape: Of each copy.
        seeds: One for each copy, from which it starts; equal ones start alike.
        factors: By tensor, one number for each copy that the tensor is multiplied by where it is used. A copy with
            another factor needs the tensor at another scale for the same outputs: its target scale is changed.
        kind: Learnable multipliers on matrices, as `gv.multipliers.attach` makes them; None for none.
    """

    def __init__(
        self,
        shape: Shape,
        seeds: Sequence[int],
        factors: Mapping[str, Tensor] | None = None,
        kind: Kind | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.num_copies = len(seeds)
        self.names = tuple(shape.tensors())
        starts: dict[int, dict[str, Tensor]] = {}
        for seed in dict.fromkeys(seeds):
            generator = torch.Generator().manual_seed(seed)
            starts[seed] = {name: start(name, size, generator) for name, size in shape.tensors().items()}
        for name in self.names:
            stacked = torch.stack([starts[seed][name] for seed in seeds])
            self.register_parameter(_key(name), nn.Parameter(stacked))
        for name, factor in (factors or {}).items():
            size = shape.tensors()[name]
            self.register_buffer(f"factor_{_key(name)}", factor.view(-1, *(1 for _ in size)).float())
        self.multipliers: list[str] = []
        for name, size in shape.tensors().items():
            for part in multiplier_parts(name, kind) if kind is not None and len(size) > 1 else ():
                whole = {"scale": (1, 1), "row": (size[0], 1), "column": (1, size[1])}[part]
                self.register_parameter(f"{_key(name)}__{part}", nn.Parameter(torch.ones(len(seeds), *whole)))
                self.multipliers.append(f"{_key(name)}__{part}")

    def stored(self, name: str) -> Tensor:
        """A tensor as the optimizer has it, `[copies, ...]`."""
        found = getattr(self, _key(name))
        assert isinstance(found, Tensor)
        return found

    def used(self, name: str) -> Tensor:
        """The same as the model uses it: with its factor and its multipliers."""
        product, key = self.stored(name), _key(name)
        for other in (f"factor_{key}", f"{key}__scale", f"{key}__row", f"{key}__column"):
            if hasattr(self, other):
                product = product * getattr(self, other)
        return product

    def forward(self, windows: Tensor) -> Tensor:
        """Mean loss of each copy, in nats a byte.

        Args:
            windows: `[copies or 1, batch, context + 1]`: inputs and, one byte on, targets.
        """
        shape, num = self.shape, self.num_copies
        tokens, targets = windows[..., :-1], windows[..., 1:]
        batch, length = tokens.shape[1:]
        # One table of all copies' embeddings, in which each copy has its own rows.
        rows = tokens + VOCAB_SIZE * torch.arange(num, device=windows.device).view(-1, 1, 1)
        x = F.embedding(rows, self.used("embed").flatten(0, 1)) + self.used("position")[:, None, :length]
        x = x.flatten(1, 2)
        for i in range(shape.num_layers):
            layer = f"layer{i}."
            branch = self._attend(self._norm(x, layer + "norm1"), layer, batch)
            x = x + (branch * self.used(layer + "attn_scale").view(-1, 1, 1) if shape.scalars else branch)
            hidden = F.gelu(self._linear(self._norm(x, layer + "norm2"), layer + "up", layer + "up_bias"))
            branch = self._linear(hidden, layer + "down", layer + "down_bias")
            x = x + (branch * self.used(layer + "mlp_scale").view(-1, 1, 1) if shape.scalars else branch)
        logits = self._linear(self._norm(x, "final_norm"), "head").float()
        wanted = targets.expand(num, -1, -1).reshape(num, -1)
        losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        return losses.view(num, -1).mean(1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]) * self.used(name)[:, None]

    def _linear(self, x: Tensor, name: str, bias: str | None = None) -> Tensor:
        out = torch.bmm(x, self.used(name).transpose(1, 2))
        return out if bias is None else out + self.used(bias)[:, None]

    def _attend(self, x: Tensor, layer: str, batch: int) -> Tensor:
        heads, width = self.shape.num_heads, self.shape.width
        q, k, v = (
            self._linear(x, layer + part).view(self.num_copies * batch, -1, heads, width // heads).transpose(1, 2)
            for part in ("q", "k", "v")
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        back = mixed.transpose(1, 2).reshape(self.num_copies, -1, width)
        return self._linear(back, layer + "proj", layer + "proj_bias")


def _key(name: str) -> str:
    return name.replace(".", "_")


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
