"""Loops in the shape of scripts that others wrote: each was once not watched, or was watched wrongly."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradvitals as gv
from gradvitals.integrations.zero_code.watcher import Watcher

Install = Callable[..., Watcher]


def finished(watcher: Watcher) -> dict[str, gv.Run]:
    watcher.close(None)
    return {name: gv.open_run(path) for path, name in watcher.runs.items()}


def only(watcher: Watcher) -> gv.Run:
    (run,) = finished(watcher).values()
    return run


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(samples: int = 16) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, 8)
    return x, x.sum(1, keepdim=True)


def loss_of(model: nn.Module, samples: int = 16) -> Tensor:
    x, y = batch(samples)
    return nn.functional.mse_loss(model(x), y)


def norm_of(parameters: Iterable[Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


# -- weights that the script updates itself ------------------------------------------------------------------------


def update_by_hand(model: nn.Module, steps: int = 12) -> tuple[list[float], list[float], list[float]]:
    """Two micro-batches per step; returns losses, gradient norms and the update norms of the first tensor."""
    losses, norms, updates = [], [], []
    for _ in range(steps):
        model.zero_grad()
        parts = [loss_of(model) / 2 for _ in range(2)]
        for part in parts:
            part.backward()
        losses.append(sum(part.item() for part in parts))
        norms.append(norm_of(model.parameters()))
        updates.append(0.05 * float(next(model.parameters()).grad.norm()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
    return losses, norms, updates


def test_updates_by_hand_are_read_from_the_second_step_on(zero_code: Install) -> None:
    bare, model = network(), network()
    torch.manual_seed(1)
    update_by_hand(bare)
    watcher = zero_code()
    torch.manual_seed(1)
    losses, norms, updates = update_by_hand(model)
    run = only(watcher)
    assert all(torch.equal(one, other) for one, other in zip(bare.parameters(), model.parameters(), strict=True))
    np.testing.assert_allclose(run.series("loss")[1], losses[1:], rtol=1e-5)
    np.testing.assert_allclose(run.series("grad/norm")[1], norms[1:], rtol=1e-5)
    np.testing.assert_allclose(run.series("update/norm", tensor="0.weight")[1], updates[1:], rtol=1e-4)
    assert set(run.stage("grad/norm")[1]) == {"raw"}
    assert run.batch_sizes("grad/norm")[1][-1] == 32
    assert {finding.severity for finding in run.findings} <= {"info"}


def test_weights_that_are_nan_and_stay_so_are_not_updated(zero_code: Install) -> None:
    broken = network()
    loss_of(broken).backward()
    for parameter in broken.parameters():
        parameter.data.fill_(math.nan)
    watcher = zero_code()
    losses, _, _ = update_by_hand(network())
    np.testing.assert_allclose(only(watcher).series("loss")[1], losses[1:], rtol=1e-5)


def test_updates_by_hand_are_found_beside_what_torch_compile_traces_with(zero_code: Install) -> None:
    compiled = torch.compile(network(), backend="aot_eager")
    compiled(batch()[0]).sum().backward()  # leaves tensors that have no memory
    watcher = zero_code()
    losses, _, _ = update_by_hand(network())
    np.testing.assert_allclose(only(watcher).series("loss")[1], losses[1:], rtol=1e-5)


def test_updates_behind_torch_s_back_are_seen_and_gradients_read_before_the_clip(zero_code: Install) -> None:
    watcher, model, norms = zero_code(), network(), []
    for _ in range(8):
        model.zero_grad()
        loss_of(model).backward()
        norms.append(norm_of(model.parameters()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.5)
    run = only(watcher)
    np.testing.assert_allclose(run.series("grad/norm")[1], norms[1:], rtol=1e-5)
    assert set(run.stage("grad/norm")[1]) == {"raw"}


@pytest.mark.parametrize("zeroes", [True, False])
def test_plain_tensors_whose_gradients_are_zeroed_in_place(zero_code: Install, zeroes: bool) -> None:
    watcher = zero_code()
    torch.manual_seed(0)
    weights = [(torch.randn(8, 16) / 4).requires_grad_(), (torch.randn(16, 1) / 4).requires_grad_()]
    for _ in range(40):
        x, y = batch()
        (torch.tanh(x @ weights[0]) @ weights[1] - y).square().mean().backward()
        with torch.no_grad():
            for weight in weights:
                weight -= 0.01 * weight.grad
                if zeroes:
                    weight.grad.zero_()
    run = only(watcher)
    assert run.meta["extra"]["model"] == "tensors of the script"
    assert len(run.series("loss")[0]) == 39
    assert ("stale_gradients" in {finding.id for finding in run.findings}) is not zeroes


class ForeignOptimizer:
    """An optimizer that is none of torch's, such as that of Keras."""

    def __init__(self) -> None:
        self.momentum: list[Tensor] = []

    @torch.no_grad()
    def apply(self, gradients: list[Tensor], weights: list[nn.Parameter]) -> None:
        self.momentum = self.momentum or [torch.zeros_like(gradient) for gradient in gradients]
        torch._foreach_mul_(self.momentum, 0.9)
        torch._foreach_add_(self.momentum, gradients)
        torch._foreach_add_([weight.data for weight in weights], self.momentum, alpha=-0.01)


def test_an_optimizer_of_another_framework(zero_code: Install) -> None:
    watcher, model, optimizer = zero_code(), network(), ForeignOptimizer()
    untrained = nn.Linear(8, 1)
    for _ in range(10):
        model.zero_grad()
        (loss_of(model) + 0 * untrained(torch.ones(1, 8)).sum()).backward()
        weights = list(model.parameters())
        optimizer.apply([weight.grad for weight in weights], weights)
    run = only(watcher)
    assert [tensor.name for tensor in run.layout.tensors] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert len(run.series("grad/norm")[0]) == 9


# -- what a step is ------------------------------------------------------------------------------------------------


def test_layers_that_are_trained_one_after_the_other_get_a_run_each(zero_code: Install) -> None:
    watcher, net = zero_code(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizers = [torch.optim.Adam(layer.parameters(), lr=0.01) for layer in net]
    x = torch.randn(32, 8)
    for layer, optimizer in zip(net, optimizers, strict=True):
        for _ in range(30):
            optimizer.zero_grad()
            (layer(x).square().mean() - 1).square().backward()
            optimizer.step()
        x = layer(x).detach()
    runs = finished(watcher)
    assert [len(run.series("loss")[0]) for run in runs.values()] == [30, 30]
    assert [[tensor.name for tensor in run.layout.tensors] for run in runs.values()] == [["weight", "bias"]] * 2
    assert all("dead_tensor" not in {finding.id for finding in run.findings} for run in runs.values())


def test_an_average_of_the_weights_inside_the_model_is_not_dead(zero_code: Install) -> None:
    watcher, net = zero_code(), nn.ModuleDict({"model": network()})
    net["ema"] = copy.deepcopy(net["model"])
    optimizer = torch.optim.Adam(net["model"].parameters())
    for _ in range(40):
        optimizer.zero_grad()
        loss_of(net["model"]).backward()
        optimizer.step()
        for average, weight in zip(net["ema"].parameters(), net["model"].parameters(), strict=True):
            average.data.lerp_(weight.data, 0.01)
    run = only(watcher)
    assert {tensor.name.split(".")[0] for tensor in run.layout.tensors if tensor.frozen} == {"ema"}
    assert "dead_tensor" not in {finding.id for finding in run.findings}


def test_calls_that_backward_does_not_reach_are_no_samples(zero_code: Install) -> None:
    watcher, model = zero_code(), network()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(6):
        for _ in range(4):
            model(torch.randn(1, 8)).argmax()  # to act
        optimizer.zero_grad()
        loss_of(model, samples=24).backward()
        optimizer.step()
    assert only(watcher).batch_sizes("grad/norm")[1][-1] == 24


def test_a_closure_that_is_evaluated_often_has_the_samples_of_one_time(zero_code: Install) -> None:
    watcher, model = zero_code(), network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    x, y = batch(24)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(6)]
    run = only(watcher)
    assert run.batch_sizes("grad/norm")[1][-1] == 24
    np.testing.assert_allclose(run.series("loss")[1], losses, rtol=1e-5)


# -- the loss ------------------------------------------------------------------------------------------------------


def accumulate(divide: Callable[[Tensor], Tensor], scaled: bool, epochs: int) -> list[float]:
    """Seven micro-batches per epoch, stepped after four and at the end; returns the mean loss of each step."""
    model, losses = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    for _ in range(epochs):
        parts = []
        for index in range(7):
            loss = loss_of(model)
            parts.append(loss.item())
            scaler.scale(divide(loss)).backward()
            if (index + 1) % 4 == 0 or index == 6:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                losses.append(sum(parts) / len(parts))
                parts = []
    return losses


@pytest.mark.parametrize(
    ("divide", "scaled"),
    [(lambda loss: loss / 4, False), (lambda loss: 0.25 * loss, True)],
    ids=["divided", "multiplied, scaled"],
)
def test_the_loss_of_an_incomplete_accumulation_is_the_mean(
    zero_code: Install, divide: Callable[[Tensor], Tensor], scaled: bool
) -> None:
    watcher = zero_code(every=50)  # most steps are plain
    losses = accumulate(divide, scaled, epochs=40)
    run = only(watcher)
    np.testing.assert_allclose(run.series("loss")[1], losses, rtol=1e-5)
    assert run.batch_sizes("grad/norm")[1].tolist()[6:] == [64, 48] * 37


def test_a_loss_that_is_not_divided_is_said_to_be_a_sum(
    zero_code: Install, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    watcher, model = zero_code(quiet=False), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sums = []
    for _ in range(6):
        losses = [loss_of(model) for _ in range(3)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sums.append(sum(loss.item() for loss in losses))
    np.testing.assert_allclose(only(watcher).series("loss")[1], sums, rtol=1e-5)
    assert "with SGD, 48 samples per step, its loss the sum of 3 backward passes; the run" in capsys.readouterr().err


def test_a_sequence_that_is_fed_step_by_step_is_no_small_part_of_the_data(zero_code: Install) -> None:
    watcher, cell = zero_code(), nn.LSTMCell(1, 8)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.01)
    data = torch.randn(16, 30)
    for _ in range(20):
        h = c = torch.zeros(16, 8)
        for part in data.split(1, dim=1):
            h, c = cell(part, (h, c))
        optimizer.zero_grad()
        h.square().mean().backward()
        optimizer.step()
    assert "data_order" not in {finding.id for finding in only(watcher).findings}


@pytest.mark.parametrize("lasts", [1, 20])
def test_an_optimizer_made_anew_at_every_step_is_the_finding(zero_code: Install, lasts: int) -> None:
    """One that lasts for some steps, as where layers are thawed by and by, is none."""
    watcher, model = zero_code(), network()
    for step in range(80):
        if step % lasts == 0:
            optimizer = torch.optim.Adam(model.parameters())
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    with only(watcher) as run:
        ids, last = {finding.id for finding in run.findings}, run.last_step
    assert ("optimizer_remade" in ids) == (lasts == 1)
    assert last == (2 if lasts == 1 else 79)


def test_two_models_that_accumulate_in_turn_keep_their_own_losses(zero_code: Install) -> None:
    watcher, models = zero_code(every=50), {"one": network(), "two": network()}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.01) for name, model in models.items()}
    losses: list[float] = []
    for _ in range(200):
        for name, optimizer in optimizers.items():
            optimizer.zero_grad()
            parts = []
            for _ in range(4):
                loss = loss_of(models[name]) / 4
                loss.backward()
                parts.append(loss.item())
            optimizer.step()
            losses.append(sum(parts))
    one, two = (run.series("loss")[1] for run in finished(watcher).values())
    np.testing.assert_allclose(one, losses[::2], rtol=1e-5)
    np.testing.assert_allclose(two, losses[1::2], rtol=1e-5)
