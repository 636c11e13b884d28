"""Training problems to time a monitor on: two GPTs for a GPU, and an MLP, a CNN and a transformer for the CPU.

Each is a whole ordinary training step on made-up data that lies on the device, so that nothing but training is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradvitals.lab.char_lm import CharLM, CharLMConfig

LEARNING_RATE = 1e-6
"""So small that no batch is learnt by heart while it is timed: numbers near zero are slow on a CPU."""

MAX_NORM = 1.0
NUM_CLASSES = 10

Observe = Callable[[Tensor], object]
"""Called with the mean loss of a step between its last backward and clipping."""


MicroBatch = tuple[Tensor, Tensor]
"""Inputs and targets."""

NUM_BATCHES = 8
"""Different batches that are gone through in turn: with a single one, gradients would have no noise to measure."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model, its optimizer and the data, which is gone through again and again."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Sequence[Sequence[MicroBatch]]
    """The micro-batches of every step."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """Mean loss of one micro-batch, from its inputs and targets."""
    autocast: torch.dtype | None = None

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.batches[0][0][0].device

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_tensors(self) -> int:
        """Parameters, tied ones once."""
        return sum(1 for _ in self.model.parameters())

    @property
    def num_micro_batches(self) -> int:
        """Backward passes of one step."""
        return len(self.batches[0])

    @property
    def batch_size(self) -> int:
        """Samples of one step, over all micro-batches."""
        return sum(len(inputs) for inputs, _ in self.batches[0])

    @cached_property
    def _turns(self) -> Iterator[Sequence[MicroBatch]]:
        return cycle(self.batches)

    def step(self, observe: Observe | None = None) -> None:
        """One optimizer step, as a training loop does it. It never waits for the device."""
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for inputs, targets in next(self._turns):
            with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                loss = self.loss(inputs, targets) / self.num_micro_batches
            loss.backward()
            total += loss.detach()
        if observe is not None:
            observe(total)
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()


def gpt(
    device: torch.device,
    *,
    n_layer: int,
    d_model: int,
    n_head: int,
    micro_batch_size: int,
    vocab_size: int = 50257,
    context: int = 1024,
    tied: bool = True,
    bf16: bool = True,
    num_micro_batches: int = 2,
) -> Training:
    """A decoder-only transformer at GPT sizes: pre-LN, fused qkv, output head tied to the embedding."""
    config = CharLMConfig(vocab_size=vocab_size, context=context, d_model=d_model, n_layer=n_layer, n_head=n_head)
    with device:
        model = CharLM(config)
    if tied:
        model.head.weight = model.embed.weight
    shape = (NUM_BATCHES, num_micro_batches, micro_batch_size, context + 1)
    tokens = torch.randint(vocab_size, shape, device=device)
    return Training(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=device.type == "cuda" or None),
        batches=[[(micro[:, :-1], micro[:, 1:]) for micro in batch] for batch in tokens],
        loss=model,
        autocast=torch.bfloat16 if bf16 else None,
    )


def gpt_124m(device: torch.device, *, micro_batch_size: int = 8) -> Training:
    """The size of GPT-2 small."""
    return gpt(device, n_layer=12, d_model=768, n_head=12, micro_batch_size=micro_batch_size)


def gpt_1_3b(device: torch.device, *, micro_batch_size: int = 6) -> Training:
    """The size of GPT-3 XL."""
    return gpt(device, n_layer=24, d_model=2048, n_head=16, micro_batch_size=micro_batch_size)


def transformer(device: torch.device, *, micro_batch_size: int = 1, d_model: int = 128, n_layer: int = 5) -> Training:
    """A character-level transformer in float32: 1M parameters in 65 tensors."""
    return gpt(
        device,
        n_layer=n_layer,
        d_model=d_model,
        n_head=4,
        micro_batch_size=micro_batch_size,
        vocab_size=96,
        context=64,
        tied=False,
        bf16=False,
    )


def mlp(device: torch.device, *, micro_batch_size: int = 64, width: int = 512) -> Training:
    """A plain MLP in float32 with AdamW: 1M parameters in 10 tensors."""
    inputs = width // 2
    with device:
        model = nn.Sequential(
            nn.Linear(inputs, width),
            nn.ReLU(),
            *(layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())),
            nn.Linear(width, NUM_CLASSES),
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches = _labelled(2, (micro_batch_size, inputs), device)
    return Training(model=model, optimizer=optimizer, batches=batches, loss=_classifier_loss(model))


def cnn(device: torch.device, *, micro_batch_size: int = 16, width: int = 32) -> Training:
    """A CNN with batch norm on 32×32 images, SGD with momentum, one batch a step: 1M parameters in 17 tensors."""
    channels = (3, width, 2 * width, 4 * width, 8 * width, 8 * width)
    layers: list[nn.Module] = []
    for position, (before, after) in enumerate(pairwise(channels)):
        stride = 2 if position < 4 else 1
        layers += [nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], NUM_CLASSES)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    batches = _labelled(1, (micro_batch_size, 3, 32, 32), device)
    return Training(model=model, optimizer=optimizer, batches=batches, loss=_classifier_loss(model))


def _labelled(num_micro_batches: int, shape: tuple[int, ...], device: torch.device) -> list[list[MicroBatch]]:
    def one() -> MicroBatch:
        return torch.randn(shape, device=device), torch.randint(NUM_CLASSES, shape[:1], device=device)

    return [[one() for _ in range(num_micro_batches)] for _ in range(NUM_BATCHES)]


def _classifier_loss(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), targets)

    return loss


SHAPES: dict[str, Callable[[torch.device], Training]] = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
    "gpt-124m": gpt_124m,
    "gpt-1.3b": gpt_1_3b,
}

DEFAULT_SHAPES = {"cpu": ("mlp", "cnn", "transformer"), "cuda": ("gpt-124m", "gpt-1.3b")}
"""Those that suit a kind of device."""
