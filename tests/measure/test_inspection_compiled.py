"""Inspection changes no bit of training and compiles nothing anew; of a compiled model it sees the loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradvitals as gv

STEPS = 14

Step = Callable[[Tensor, Tensor], Tensor]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3), nn.Softmax(1)
    )


def step_of(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    forward: Any = torch.compile(model, backend="aot_eager") if kind == "compiled model" else model

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
        return loss

    compiled: Step = torch.compile(step, backend="aot_eager") if kind == "compiled loop" else step
    return compiled


def train(kind: str, run: Path | None) -> tuple[dict[str, Tensor], dict[str, int], list[gv.Finding]]:
    """Weights and buffers at the end, how often torch compiled, and what was found."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build()
    kind_of = torch.optim.SGD if kind == "compiled loop" else torch.optim.AdamW  # which takes long to compile
    optimizer = kind_of(model.parameters(), lr=1e-3)
    monitor = gv.watch(model, optimizer, run=run, config=gv.Config(quiet=True)) if run is not None else None
    data = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    step = step_of(kind, model, optimizer)
    for _ in range(STEPS):
        step(torch.randn(8, 6, generator=data), torch.randint(3, (8,), generator=data))
    counts = {name: int(torch._dynamo.utils.counters[part][name]) for part, name in COMPILED}
    findings: list[gv.Finding] = []
    if monitor is not None:
        monitor.close()
        findings = list(monitor.findings)
    return copy.deepcopy(model.state_dict()), counts, findings


COMPILED = (("frames", "ok"), ("stats", "unique_graphs"))


@pytest.mark.filterwarnings("ignore")  # of torch, while it compiles an optimizer
@pytest.mark.parametrize("kind", ["eager", "compiled model", pytest.param("compiled loop", marks=pytest.mark.slow)])
def test_training_is_bit_identical_and_nothing_is_compiled_anew(kind: str, tmp_path: Path) -> None:
    bare, compiled, _ = train(kind, None)
    watched, again, _ = train(kind, tmp_path / "run")
    assert all(torch.equal(bare[name], watched[name]) for name in bare)
    if kind != "compiled loop":  # in which the optimizer's own hooks are traced
        assert again == compiled


@pytest.mark.parametrize("kind", ["eager", "compiled model"])
def test_the_loss_of_a_compiled_model_is_seen(kind: str, tmp_path: Path) -> None:
    model = build()[:-1]
    torch._dynamo.reset()
    forward: Any = torch.compile(model, backend="aot_eager") if kind == "compiled model" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)) as monitor:
        for _ in range(STEPS):
            optimizer.zero_grad()
            functional.cross_entropy(forward(torch.randn(8, 6)).softmax(1), torch.randint(3, (8,))).backward()
            optimizer.step()
    [finding] = [one for one in monitor.findings if one.id == "loss_mismatch"]
    assert "softmax" in finding.causes[0]
