"""Steps scaled by the signal: the factors, the optimizers they act on, and the command's quick path."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from experiments.shrinkage import __main__ as command
from experiments.shrinkage.__main__ import format_summary, summarize
from experiments.shrinkage.training import Stepper, Trial, train


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.mark.parametrize("adam", [True, False])
def test_the_base_arm_is_torchs_own(adam: bool) -> None:
    ours, theirs = layers(), layers()
    matrices = [p for p in theirs.parameters() if p.dim() > 1]
    others = [p for p in theirs.parameters() if p.dim() == 1]
    optimizer: torch.optim.Optimizer
    if adam:
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.99), weight_decay=0.05)
    else:
        optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    stepper = Stepper(ours, "base", adam=adam)
    if not adam:
        stepper._decay = [0.0] * 4
    for _ in range(4):
        first, second = ([torch.randn_like(p) for p in ours.parameters()] for _ in range(2))
        stepper.step(first, second, 0.1)
        for parameter, a, b in zip(theirs.parameters(), first, second, strict=True):
            parameter.grad = (a + b) / 2
        optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(("arm", "factor"), [("tensor", 0.75), ("layer", 1.0)])
def test_signal_and_noise_of_two_halves(arm: str, factor: float) -> None:
    stepper = Stepper(layers(), arm, adam=False)
    first = [torch.full_like(p, 3.0) for p in layers().parameters()]
    second = [torch.full_like(p, 1.0) for p in layers().parameters()]
    stepper.step(first, second, 0.1)  # per element: signal 3, noise 1
    assert stepper.factors().tolist() == pytest.approx([factor] * 4)


@pytest.mark.parametrize("task", ["text", "images"])
def test_a_task_trains(task: str) -> None:
    trial = Trial(task=task, arm="tensor", batch=8, lr=0.01, seed=0, samples=80, small=True)
    found = train(trial)
    assert (found["steps"], found["score"]) == (10, train(copy.copy(trial))["score"])


def test_an_arm_wins_where_it_is_better_on_both_tasks_at_the_same_multiple() -> None:
    common = {"phase": "fresh", "lr": 0.1, "steps": 9}
    scores = {"base": 1.0, "tensor": 0.5, "layer": 1.5}
    lines: list[dict[str, Any]] = [
        {**common, "task": task, "batch": batch, "arm": arm, "seed": 100 + seed, "score": score + 0.01 * seed}
        for task, batch in (("text", 8), ("images", 64))
        for arm, score in scores.items()
        for seed in range(3)
    ]
    lines += [{"phase": "critical", "task": task, "noise_scale": 8.0} for task in ("text", "images")]
    found = summarize(lines)
    assert found["won"] == ["tensor at 1 x"]
    assert "tensor at 1 x" in format_summary(found)
    assert format_summary(summarize([]))


def test_quick_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ARMS", ("base", "tensor"))
    monkeypatch.setattr(command, "TIMES", (1,))
    monkeypatch.setattr(command, "STARTS", {"text": replace(command.STARTS["text"])})
    done = CliRunner().invoke(command.main, ["--quick"])
    assert done.exit_code == 0, done.output
    assert "tensor" in done.stdout
