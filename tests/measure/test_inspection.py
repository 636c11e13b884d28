"""The inspection of batches stays out of the script's way."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from torch import nn

import gradvitals as gv


def depth(function: object) -> int:
    """Wrappers around a function of torch."""
    wrappers = 0
    while hasattr(function, "__wrapped__"):
        function, wrappers = function.__wrapped__, wrappers + 1
    return wrappers


def test_monitors_that_come_and_go_leave_torch_as_it_was(tmp_path: Path) -> None:
    before = (torch.autograd.backward, nn.Module.train, nn.functional.mse_loss)
    models = [nn.Linear(4, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    config = gv.Config(quiet=True, tensor_every=1, overhead_budget=1)
    monitors = [
        gv.watch(model, optimizer, run=tmp_path / f"run{index}", config=config)
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
    ]
    wrappers = set()
    for step in range(40):
        for index in (0, 1) if step % 2 else (1, 0):
            model, optimizer = models[index], optimizers[index]
            model.eval()
            nn.functional.mse_loss(model(torch.ones(4, 4)).detach(), torch.ones(4, 1))
            model.train()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(torch.randn(8, 4)), torch.ones(8, 1)).backward()
            optimizer.step()
            wrappers.add(depth(torch.autograd.backward) - depth(before[0]))
    assert wrappers <= {0, 1, 2}, "one, and a second if something was compiled in this process before"
    for monitor in monitors:
        monitor.close()
    assert (torch.autograd.backward, nn.Module.train, nn.functional.mse_loss) == before


def test_losses_on_several_devices_do_not_disturb_an_evaluation(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)):
        model.eval()
        for device in ("cpu", "meta"):
            nn.functional.mse_loss(torch.ones(2, device=device), torch.zeros(2, device=device))
        assert model.train() is model


def test_wrapped_functions_keep_their_signature(tmp_path: Path) -> None:
    expected = inspect.signature(torch.autograd.backward)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)):
        assert inspect.signature(torch.autograd.backward) == expected
