"""Batches that a loop gives up: they are counted, with their loss, and nothing of them is in a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gradvitals as gv

BAD = 30
STEPS = 60

Loop = Callable[[gv.Monitor, torch.optim.Optimizer, torch.Tensor, float], bool]
"""What a loop does with a loss; whether it made a step."""


def skips_by_norm(monitor: gv.Monitor, optimizer: torch.optim.Optimizer, loss: torch.Tensor, told: float) -> bool:
    loss.backward()
    monitor.observe(told, batch_size=4)
    norm = nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return bool(torch.isfinite(norm))


def observes_first(monitor: gv.Monitor, optimizer: torch.optim.Optimizer, loss: torch.Tensor, told: float) -> bool:
    monitor.observe(told, batch_size=4)
    optimizer.zero_grad()
    loss.backward()
    if math.isfinite(told):
        optimizer.step()
    return math.isfinite(told)


def never_goes_backward(monitor: gv.Monitor, optimizer: torch.optim.Optimizer, loss: torch.Tensor, told: float) -> bool:
    monitor.observe(told, batch_size=4)
    if not math.isfinite(told):
        return False
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return True


@pytest.mark.parametrize("loop", [skips_by_norm, observes_first, never_goes_backward])
def test_a_batch_that_the_loop_gives_up_is_counted_and_told(loop: Loop, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected: list[float] = []
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)) as monitor:
        for batch in range(STEPS + 1):
            inputs = torch.randn(4, 4) if batch != BAD else torch.full((4, 4), math.nan)
            loss = model(inputs).square().mean()
            told = 100.0 + batch if batch != BAD else math.nan
            if loop(monitor, optimizer, loss, told):
                expected.append(told)
    with gv.open_run(monitor.run_path) as run:
        steps, losses = run.series("loss")
        assert steps.tolist() == list(range(STEPS))
        assert losses.tolist() == expected
        assert run.series("batches/given_up")[0].tolist() == [BAD]
        assert run.series("batches/given_up")[1].tolist() == [1.0]
        assert np.isnan(run.series("batches/given_up_loss")[1]).all()
        assert set(run.batch_sizes("grad/norm")[1]) == {4.0}
        assert np.all(run.series("grad/nonfinite")[1] == 0)
    found = {finding.id: finding for finding in monitor.findings}
    assert (found["batches_given_up"].severity, found["batches_given_up"].first_step) == ("warning", BAD)
    assert not {"loss_nonfinite", "nonfinite"} & found.keys()  # nothing of it has reached the model


def test_a_second_gradient_in_every_step_is_no_batch(tmp_path: Path) -> None:
    """As sharpness-aware minimization has it: the first gradient only tells where to take the second."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)) as monitor:
        for _ in range(STEPS):
            inputs = torch.randn(4, 4)
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                loss.backward()
            monitor.observe(loss)
            optimizer.step()
    assert not [finding for finding in monitor.findings if finding.id == "batches_given_up"]
    with gv.open_run(monitor.run_path) as run:
        assert len(run.series("loss")[0]) == STEPS
