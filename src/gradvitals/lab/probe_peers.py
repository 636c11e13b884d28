"""Gradients of single examples beside Opacus and BackPACK, where these are installed and know the layers."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradvitals.lab.markdown import markdown_table
from gradvitals.probe.batches import Subject
from gradvitals.probe.gradients import trainable
from gradvitals.probe.per_example import PerExample

EXAMPLES = 64
CLASSES = 10
REPEATS = 5
Way = Callable[[], list[Tensor]]


class Words(nn.Module):
    """Embedding, layer norm and two linear layers, with a mean over positions."""

    def __init__(self, vocab: int = 50, width: int = 32) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.down(torch.relu(self.up(self.norm(self.embed(tokens))))).mean(1)
        return scores


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    """Models and inputs."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    cnn = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )
    return {
        "mlp": (mlp, torch.randn(EXAMPLES, 64)),
        "cnn": (cnn, torch.randn(EXAMPLES, 3, 16, 16)),
        "words": (Words(), torch.randint(50, (EXAMPLES, 12))),
    }


def compare_with_peers() -> list[dict[str, Any]]:
    """For each model and way: the largest difference from a loop, over the tensor's largest element, and the time."""
    found = []
    for name, (model, inputs) in models().items():
        targets = torch.randint(CLASSES, (EXAMPLES,))
        parameters = list(model.parameters())

        def loop(model: nn.Module = model, x: Tensor = inputs, y: Tensor = targets) -> list[Tensor]:
            losses = [F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(EXAMPLES)]
            rows = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
            return [torch.stack(column) for column in zip(*rows, strict=True)]

        expected = loop()
        ways: dict[str, Callable[[], Way]] = {
            "loop": lambda loop=loop: loop,  # type: ignore[misc]
            "gradvitals": lambda m=model, x=inputs, y=targets: _ours(m, x, y),  # type: ignore[misc]
            "Opacus": lambda m=model, x=inputs, y=targets: _opacus(m, x, y),  # type: ignore[misc]
            "BackPACK": lambda m=model, x=inputs, y=targets: _backpack(m, x, y),  # type: ignore[misc]
        }
        for way, make in ways.items():
            row: dict[str, Any] = {"model": name, "parameters": sum(p.numel() for p in parameters), "way": way}
            try:
                work = make()
                row |= {"difference": _difference(work(), expected), "ms": _milliseconds(work), "problem": ""}
            except Exception as error:  # a peer that is not installed, or does not know a layer
                row |= {"difference": None, "ms": None, "problem": f"{type(error).__name__}: {error}"[:90]}
            found.append(row)
    return found


def _ours(model: nn.Module, x: Tensor, y: Tensor) -> Way:
    subject = Subject(model, nn.CrossEntropyLoss(), "output, target", x.device)
    parameters = trainable(model)

    def work() -> list[Tensor]:
        [(_, grads)] = PerExample(subject, parameters, 1 << 30).chunks((x, y), EXAMPLES)
        return grads

    return work


def _opacus(model: nn.Module, x: Tensor, y: Tensor) -> Way:
    wrapped = import_module("opacus").GradSampleModule(copy.deepcopy(model))

    def work() -> list[Tensor]:
        wrapped.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        return [p.grad_sample for p in wrapped.parameters()]

    return work


def _backpack(model: nn.Module, x: Tensor, y: Tensor) -> Way:
    package, extensions = import_module("backpack"), import_module("backpack.extensions")
    extended = package.extend(copy.deepcopy(model))
    # A sum, since BackPACK's gradients carry the loss's 1/N.
    loss = package.extend(nn.CrossEntropyLoss(reduction="sum"))

    def work() -> list[Tensor]:
        extended.zero_grad()
        with package.backpack(extensions.BatchGrad()):
            loss(extended(x), y).backward()
        return [p.grad_batch for p in extended.parameters()]

    return work


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def _milliseconds(work: Way) -> float:
    took = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hooks of the peers warn about inputs without gradients
        for _ in range(REPEATS):
            started = time.process_time()
            work()
            took.append(time.process_time() - started)
    return 1000 * min(took)


def format_peers(rows: list[dict[str, Any]]) -> str:
    """The comparison as a Markdown table."""
    table = [("model", "by", "difference from the loop", f"ms for {EXAMPLES} examples")]
    for row in rows:
        told = (f"{row['difference']:.1e}", f"{row['ms']:.1f}") if row["ms"] is not None else (row["problem"], "-")
        table.append((f"{row['model']}, {row['parameters']:,} parameters", row["way"], *told))
    return markdown_table(table, left=(0, 1))
