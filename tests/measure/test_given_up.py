"""Batches that a loop gives up: they are counted, with their loss, and nothing of them is in a step."""

from __future__ import annotations

import math
import weakref
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


@pytest.mark.parametrize("observes", [True, False])
@pytest.mark.parametrize("passes", [1, 3])
def test_a_gradient_that_is_broken_though_its_loss_is_not_is_told_by_its_norm(
    observes: bool, passes: int, tmp_path: Path
) -> None:
    """The square root has no slope at 0; of several passes it is the first that breaks."""

    def train(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for batch in range(STEPS + 1):
            for index in range(passes):
                whole = torch.sqrt(model(torch.randn(4, 4)).square().sum() * (batch != BAD or index > 0))
                whole.backward()
                if observes:
                    monitor.observe(whole)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert bool(norm.isfinite()) == (batch != BAD)
            if norm.isfinite():
                optimizer.step()
            optimizer.zero_grad()

    monitor = watched(tmp_path, train)
    finding = found(monitor)["batches_given_up"]
    assert (finding.severity, finding.first_step) == ("warning", BAD)
    assert "with a gradient norm of NaN" in finding.title
    assert "Their gradient norm was NaN" in finding.causes[0]
    with gv.open_run(monitor.run_path) as run:
        steps, norms = run.series("batches/given_up_norm")
        assert steps.tolist() == [BAD]
        assert np.isnan(norms).all()
        assert np.isfinite(run.series("grad/norm")[1]).all()


def test_a_norm_that_the_loss_scale_may_have_made_is_not_told(tmp_path: Path) -> None:
    """A scale that is too high overflows until it is lowered: that is how it finds its size."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)) as monitor:
        for batch in range(STEPS):
            loss = model(torch.randn(4, 4)).square().mean() * (math.inf if batch == BAD else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert found(monitor)["batches_given_up"].severity == "info"


def test_a_norm_of_the_first_pass_is_not_told_of_both(tmp_path: Path) -> None:
    def train(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for batch in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 4)).square().mean()
            loss.backward()
            monitor.observe(loss)
            model(torch.randn(4, 4)).square().mean().backward()
            if batch != BAD:
                optimizer.step()

    monitor = watched(tmp_path, train)
    with gv.open_run(monitor.run_path) as run:
        assert run.series("batches/given_up")[0].tolist() == [BAD]
        assert "batches/given_up_norm" not in run.metrics("values")


def test_a_loop_whose_gradients_are_all_broken_makes_no_steps(tmp_path: Path) -> None:
    """Without a loss that was told: it is known by the norms alone, and told at the end."""

    def train(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for batch in range(STEPS):
            (model(torch.randn(4, 4)).square().mean() * (math.nan if batch >= BAD else 1.0)).backward()
            if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                optimizer.step()
            optimizer.zero_grad()

    assert found(watched(tmp_path, train))["no_steps"].severity == "critical"


def test_the_norm_of_a_whole_gradient_that_was_given_up_is_kept(tmp_path: Path) -> None:
    thrown: list[float] = []

    def train(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for batch in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, 4)).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if batch == BAD:
                thrown.append(float(norm))
            else:
                optimizer.step()

    monitor = watched(tmp_path, train)
    assert found(monitor)["batches_given_up"].severity == "info"
    with gv.open_run(monitor.run_path) as run:
        assert run.series("batches/given_up_norm")[1].tolist() == pytest.approx(thrown, rel=1e-6)


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


def watched(tmp_path: Path, train: Callable[[gv.Monitor, nn.Module, torch.optim.Optimizer], None]) -> gv.Monitor:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)) as monitor:
        train(monitor, model, optimizer)
    return monitor


def found(monitor: gv.Monitor) -> dict[str, gv.Finding]:
    return {finding.id: finding for finding in monitor.findings}


def test_a_loss_that_is_nan_and_was_gone_backward_with_is_part_of_the_step(tmp_path: Path) -> None:
    """Targets that are all left out make the mean over none of them NaN, and every gradient 0."""

    def train(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(20):
            optimizer.zero_grad()
            for ignored in (False, True):
                targets = torch.full((4,), -100) if ignored else torch.randint(3, (4,))
                loss = nn.functional.cross_entropy(model(torch.randn(4, 4)), targets)
                loss.backward()
                monitor.observe(loss, batch_size=4)
            optimizer.step()

    monitor = watched(tmp_path, train)
    assert "batches_given_up" not in found(monitor)
    assert found(monitor)["loss_nonfinite"].severity == "critical"


def test_gradients_that_are_clipped_between_micro_batches_are_not_thrown_away(tmp_path: Path) -> None:
    def train(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(60):
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.randn(4, 4)).square().mean().backward()
                if step % 10 == 9:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    assert "batches_given_up" not in found(watched(tmp_path, train))


@pytest.mark.parametrize("every", [2, 3])
def test_the_more_batches_are_broken_the_louder_it_is_told(every: int, tmp_path: Path) -> None:
    def train(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for batch in range(100):
            loss = model(torch.randn(4, 4)).square().mean() * (math.nan if batch % every else 1.0)
            monitor.observe(loss)
            if torch.isfinite(loss):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    finding = found(watched(tmp_path, train))["batches_given_up"]
    assert finding.severity == "critical"
    assert "with a loss of NaN" in finding.title


def test_a_broken_batch_is_not_hidden_by_a_whole_one_that_was_given_up_after_it(tmp_path: Path) -> None:
    def train(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for batch in range(60):
            loss = model(torch.randn(4, 4)).square().mean() * (math.nan if batch == 40 else 1.0)
            optimizer.zero_grad()
            loss.backward()
            monitor.observe(loss)
            if batch not in (40, 41):
                optimizer.step()

    monitor = watched(tmp_path, train)
    assert found(monitor)["batches_given_up"].severity == "warning"
    with gv.open_run(monitor.run_path) as run:
        assert run.series("batches/given_up")[1].tolist() == [2.0]


@pytest.mark.parametrize(("backward", "batches"), [(True, 10), (True, 1000), (False, 1000)])
def test_a_loop_that_makes_no_steps_any_more_is_told_and_takes_no_more_memory(
    backward: bool, batches: int, tmp_path: Path
) -> None:
    losses: list[weakref.ref[torch.Tensor]] = []

    def train(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for batch in range(50 + batches):
            loss = model(torch.randn(4, 4)).square().mean() * (math.nan if batch >= 50 else 1.0)
            optimizer.zero_grad()
            if backward or batch < 50:
                loss.backward()
            monitor.observe(loss)
            losses.append(weakref.ref(loss))
            if batch < 50:
                optimizer.step()
        assert sum(loss() is not None for loss in losses) <= 100

    finding = found(watched(tmp_path, train))["no_steps"]
    assert (finding.severity, finding.first_step) == ("critical", 50)


def test_losses_of_an_evaluation_are_no_batches_given_up(tmp_path: Path) -> None:
    def train(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
        for _ in range(300):
            monitor.observe(1.0)

    assert not {"no_steps", "batches_given_up"} & found(watched(tmp_path, train)).keys()


def test_gradients_that_are_taken_to_look_at_an_input_are_no_batches_given_up(tmp_path: Path) -> None:
    def train(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for batch in range(130):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 4)).square().mean()
            loss.backward()
            monitor.observe(loss)
            if batch < 30:
                optimizer.step()

    assert not {"no_steps", "batches_given_up"} & found(watched(tmp_path, train)).keys()


def test_a_reading_after_a_batch_that_was_clipped_and_given_up_is_of_the_raw_gradient(tmp_path: Path) -> None:
    def train(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for batch in range(40):
            loss = model(torch.randn(4, 4)).square().mean() * (math.nan if batch == 20 else 1.0)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if torch.isfinite(norm):
                optimizer.step()

    with gv.open_run(watched(tmp_path, train).run_path) as run:
        assert set(run.stage("grad/norm")[1]) == {"raw"}
