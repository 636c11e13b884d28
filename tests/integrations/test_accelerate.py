"""gradvitals in a loop of Accelerate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

import gradvitals as gv
from gradvitals.integrations.accelerate import watch

QUIET = gv.Config(quiet=True, tensor_every=1)


def train(
    run: Path | None, steps: int, *, load: Path | None = None, save: Path | None = None, config: gv.Config = QUIET
) -> tuple[list[float], ...]:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    monitor = watch(accelerator, model, optimizer, run=run, batch_size=16, config=config)
    if load is not None:
        accelerator.load_state(str(load))
    losses: list[float] = []
    norms: list[float] = []
    for _ in range(2 * steps):
        with accelerator.accumulate(model):
            loss = model(torch.randn(8, 4)).square().mean()
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e-3)))
            optimizer.step()
            optimizer.zero_grad()
    if save is not None:
        accelerator.save_state(str(save))
    monitor.close()
    return losses, norms


def test_the_loss_is_heard_and_gradients_are_read_before_clipping(tmp_path: Path) -> None:
    backward = torch.autograd.backward
    losses, norms = train(tmp_path / "run", 5)
    run = gv.open_run(tmp_path / "run")
    assert run.series("loss")[0].tolist() == list(range(5))
    np.testing.assert_allclose(run.series("loss")[1], np.reshape(losses, (5, 2)).mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(run.series("grad/norm")[1], norms, rtol=1e-5)
    assert set(run.stage("grad/norm")[1]) == {"raw"}
    assert torch.autograd.backward is backward  # closing puts it back


def test_its_checkpoints_hold_our_state(tmp_path: Path) -> None:
    train(tmp_path / "run", 5, save=tmp_path / "state")
    train(None, 3, load=tmp_path / "state")
    run = gv.open_run(tmp_path / "run")
    assert run.series("loss")[0].tolist() == list(range(8))
    assert len(run.segments) == 2


def test_the_verdict_and_the_folder_are_said_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "quiet", 3)
    assert capsys.readouterr().err == ""
    train(tmp_path / "run", 3, config=gv.Config())
    verdict, where = capsys.readouterr().err.splitlines()[-2:]
    assert verdict.startswith("gradvitals: ")
    assert ": 3 steps" in verdict
    assert where == f"gradvitals: details: gradvitals doctor {tmp_path / 'run'}"
