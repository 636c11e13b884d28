"""Plain steps, which are most steps of a run, say the same as steps that are read in every detail."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradvitals as gv

STEPS = 170
SERIES = ("loss", "lr", "grad/norm", "grad/spike_ratio", "grad/norm_cv", "grad/nonfinite")

Loop = Callable[[gv.Monitor, nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]], None]


def train(folder: Path, loop: Loop, *, detailed: bool, **settings: Any) -> gv.Run:
    """Train a small model with a loop; `detailed` reads every step in detail."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = gv.Config(quiet=True, worker="thread", overhead_budget=1, **settings)
    data = torch.Generator().manual_seed(1)

    def loss() -> torch.Tensor:
        inputs = torch.randn(16, 12, generator=data)
        return (model(inputs) - inputs[:, :4]).square().mean()

    on_reading = (lambda reading: None) if detailed else None
    with gv.watch(model, optimizer, run=folder / f"run-{detailed}", config=config, on_reading=on_reading) as monitor:
        loop(monitor, model, optimizer, loss)
    return gv.open_run(monitor.run_path)


def ordinary(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any) -> None:
    for _ in range(STEPS):
        found = loss()
        optimizer.zero_grad()
        found.backward()
        monitor.observe(found)
        optimizer.step()


def clipping(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        found = loss()
        optimizer.zero_grad()
        found.backward()
        monitor.observe(found)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()


def accumulating(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            found = loss()
            (found / 2).backward()
            monitor.observe(found)
        optimizer.step()


def silent(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def changing(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any) -> None:
    """Now and then something else happens in a step."""
    for step in range(STEPS):
        found = loss()
        if step % 7 != 3:  # else the gradients of two steps add up
            optimizer.zero_grad()
        found.backward()
        if step % 11 == 5:
            optimizer.zero_grad()  # the batch is thrown away
            found = loss()
            found.backward()
        if step % 13 != 6:
            monitor.observe(found, batch_size=16 if step % 5 == 0 else None)
        if step % 17 == 8:
            monitor.observe(found.detach(), split="val")
        if step % 19 < 9:
            torch.nn.utils.clip_grad_norm_(list(model.parameters())[:: -1 if step % 2 else 1], 0.1)
        if step % 23 == 10:
            model[0].weight.grad.mul_(0.5)  # the loop changes gradients by hand
        optimizer.step()


def thawing(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any) -> None:
    """A parameter has no gradient at first, and loses it again."""
    for step in range(STEPS):
        model[0].bias.requires_grad_(60 < step < 130)
        optimizer.zero_grad()
        found = loss()
        found.backward()
        monitor.observe(found)
        if step % 50 > 25:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def growing(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any) -> None:
    """A layer is added to the optimizer, and has gradients only later."""
    added = nn.Linear(12, 4, bias=False)
    model.add_module("added", added)
    model.forward = lambda x: model[2](model[1](model[0](x))) + (added(x) if use else 0)  # type: ignore[method-assign]
    for step in range(STEPS):
        use = step > 130
        if step == 70:
            optimizer.add_param_group({"params": added.parameters()})
        optimizer.zero_grad()
        found = loss()
        found.backward()
        monitor.observe(found)
        optimizer.step()


def whole_rate(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any) -> None:
    optimizer.param_groups[0]["lr"] = 1
    ordinary(monitor, model, optimizer, loss)


@pytest.mark.parametrize(
    "loop",
    [ordinary, clipping, accumulating, silent, changing, thawing, growing, whole_rate],
    ids=lambda loop: loop.__name__,
)
def test_plain_steps_say_what_detailed_steps_say(tmp_path: Path, loop: Loop) -> None:
    with train(tmp_path, loop, detailed=False) as plain, train(tmp_path, loop, detailed=True) as detailed:
        names = {"clip/max_norm", "grad/carried", "batches/given_up", "val/loss", *SERIES} & set(detailed.metrics())
        for name in names:
            steps, values = plain.series(name)
            expected_steps, expected = detailed.series(name)
            assert steps.tolist() == expected_steps.tolist(), name
            np.testing.assert_allclose(values, expected, rtol=1e-5, err_msg=name)


def test_a_broken_tensor_is_located_in_a_plain_step(tmp_path: Path) -> None:
    def breaking(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any) -> None:
        for step in range(STEPS):
            found = loss()
            optimizer.zero_grad()
            found.backward()
            monitor.observe(found)
            if step == 143:
                model[2].bias.grad[1] = math.nan
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step != 143:
                optimizer.step()
            else:
                optimizer.param_groups[0]["lr"] = 0.0
                optimizer.step()
                break

    with train(tmp_path, breaking, detailed=False) as run:
        steps, values = run.series("grad/nonfinite", tensor="2.bias")
        assert values[steps == 143].tolist() == [1.0]
        steps, values = run.series("grad/nonfinite", tensor="0.weight")
        assert values[steps == 143].tolist() == [0.0]


@pytest.mark.parametrize("frozen", [False, True])
def test_most_steps_of_a_calm_run_are_plain_and_cheap_to_record(tmp_path: Path, frozen: bool) -> None:
    calls: dict[int, int] = {}

    def counted(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any) -> None:
        import sys

        model[0].bias.requires_grad_(not frozen)
        ordinary(monitor, model, optimizer, loss)

        def count(frame: Any, event: str, arg: Any) -> None:
            if event == "call" and "gradvitals" in frame.f_code.co_filename:
                calls[monitor.step] = calls.get(monitor.step, 0) + 1

        for _ in range(25):
            found = loss()
            optimizer.zero_grad()
            sys.setprofile(count)
            try:
                found.backward()
                monitor.observe(found)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            finally:
                sys.setprofile(None)

    train(tmp_path, counted, detailed=False).close()
    assert sorted(calls.values())[len(calls) // 2] <= 40


@pytest.mark.parametrize("case", ["unused parameter", "float64"])
def test_a_loss_counts_once_if_norms_cannot_be_read_as_in_a_plain_step(tmp_path: Path, case: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(4, 1), "unused": nn.Linear(4, 1)}).to(
        torch.float64 if case == "float64" else torch.float32
    )
    layers = model if case == "unused parameter" else model["used"]
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
    losses = []
    with gv.watch(layers, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True, diagnose=False)) as monitor:
        monitor.recorder.add_up_losses()  # as `gradvitals run` does
        for _ in range(300):
            loss = (model["used"](torch.ones(8, 4, dtype=model["used"].weight.dtype)) - 3).square().mean()
            optimizer.zero_grad()
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
            losses.append(loss.item())
    with gv.open_run(tmp_path / "run") as run:
        np.testing.assert_allclose(run.series("loss")[1], losses, rtol=1e-5)


def test_experts_that_take_turns_keep_their_own_norms(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    norms, totals = [], []
    config = gv.Config(quiet=True, worker="thread", overhead_budget=1)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=config) as monitor:
        for step in range(STEPS):
            optimizer.zero_grad()
            expert = model[1 + step // 7 % 2]
            x = expert(model[0](torch.randn(8, 4)))
            loss = model[5](model[4](model[3](x))).square().mean()
            loss.backward()
            monitor.observe(loss)
            norms.append(float(expert.weight.grad.norm()))  # type: ignore[arg-type, union-attr]
            totals.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
    with gv.open_run(monitor.run_path) as run:
        np.testing.assert_allclose(run.series("grad/norm")[1], totals, rtol=1e-4)
        for place in (1, 2):
            steps, values = run.series("grad/norm", tensor=f"{place}.weight")
            known = {step: value for step, value in zip(steps, values, strict=True) if value == value}
            assert known
            assert set(known) <= {step for step in range(STEPS) if 1 + step // 7 % 2 == place}
            for step, value in known.items():
                assert value == pytest.approx(norms[step], rel=1e-4)
