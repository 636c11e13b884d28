"""How far every step moves the weights, and in which direction, against what the optimizer is known to do."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradvitals as gv
from gradvitals.collect.reductions import sample_stride
from gradvitals.types import Reading


class Weights(nn.Module):
    """Parameters whose gradient is whatever the test says."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.zeros(size)))


class Custom(torch.optim.Optimizer):
    """Steps each parameter by a function of the test."""

    def __init__(self, model: nn.Module, change: Callable[[nn.Parameter], None]) -> None:
        super().__init__(model.parameters(), {"lr": 1.0})
        self.change = change

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.change(parameter)


def train(
    tmp_path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    gradient: Callable[[int, str], float],
    steps: int,
    clip: float | None = None,
    between: Callable[[int], None] = lambda step: None,
) -> dict[int, Reading]:
    readings: dict[int, Reading] = {}

    def keep(reading: Reading) -> None:
        if reading.source is None:
            readings[reading.step] = reading

    config = gv.Config(quiet=True, diagnose=False)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=config, on_reading=keep) as monitor:
        for step in range(steps):
            optimizer.zero_grad()
            terms: list[Tensor] = [p.sum() * gradient(step, name) for name, p in model.named_parameters()]
            torch.stack(terms).sum().backward()
            monitor.observe(0.0)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            between(step)
    assert not [finding for finding in monitor.findings if finding.id == "monitor_error"]
    return readings


def test_every_step_tells_the_change_of_every_tensor(tmp_path: Path) -> None:
    model = Weights({"a": 10, "b": 1000})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    readings = train(tmp_path, model, optimizer, lambda step, name: {"a": 2.0, "b": 0.1}[name] * (step + 1), 60)
    for step, reading in readings.items():
        a, b = 0.5 * 2.0 * (step + 1), 0.5 * 0.1 * (step + 1)
        np.testing.assert_allclose(reading.tensors["update/rms"], [a, b], rtol=1e-3)
        whole = math.sqrt((10 * a**2 + 1000 * b**2) / 1010)
        assert reading.values["update/rms"] == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize(("turn", "cosine"), [(1.0, 1.0), (-1.0, -1.0)])
def test_the_direction_is_kept_or_turned_round(tmp_path: Path, turn: float, cosine: float) -> None:
    model = Weights({"a": 100})
    readings = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=1.0), lambda step, name: turn**step, 8)
    assert "update/cosine" not in readings[0].values
    assert [readings[step].values["update/cosine"] for step in range(1, 8)] == pytest.approx([cosine] * 7, abs=1e-5)


def test_directions_at_right_angles(tmp_path: Path) -> None:
    model = Weights({"a": 64, "b": 64})
    gradient: Callable[[int, str], float] = lambda step, name: float((name == "a") == (step % 2 == 0))  # noqa: E731
    readings = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=1.0), gradient, 6)
    assert [readings[step].values["update/cosine"] for step in range(1, 6)] == pytest.approx([0.0] * 5, abs=1e-6)


def test_a_tensor_no_optimizer_steps_does_not_change(tmp_path: Path) -> None:
    model = Weights({"a": 100, "forgotten": 100})
    readings = train(tmp_path, model, torch.optim.SGD([model.a], lr=1.0), lambda step, name: 1.0, 5)
    for reading in readings.values():
        np.testing.assert_allclose(reading.tensors["update/rms"], [1.0, 0.0])


def test_half_precision_weights_that_are_too_coarse_for_their_update_stay(tmp_path: Path) -> None:
    model = Weights({"a": 100}).to(torch.bfloat16)
    with torch.no_grad():
        model.a.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    readings = train(tmp_path, model, optimizer, lambda step, name: 1.0, 4)
    assert [reading.values["update/rms"] for reading in readings.values()] == [0.0] * 4


def test_embeddings_are_not_sampled(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4))
    readings = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=1.0), lambda step, name: 1.0, 3)
    for reading in readings.values():
        assert np.isnan(reading.tensors["update/rms"]).tolist() == [True, False, False]
        assert reading.values["update/rms"] == pytest.approx(1.0)


def test_storage_put_under_a_parameter_is_followed(tmp_path: Path) -> None:
    model = Weights({"a": 100})

    def swap(step: int) -> None:
        if step == 2:
            model.a.data = torch.full((100,), 5.0)

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    readings = train(tmp_path, model, optimizer, lambda step, name: 1.0, 6, between=swap)
    assert [reading.values["update/rms"] for reading in readings.values()] == pytest.approx([1.0] * 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_puts_new_storage_under_its_parameters_is_followed(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    def assign(parameter: nn.Parameter) -> None:
        parameter.data = parameter.data - parameter.grad

    model = Weights({"a": 100}).to(dtype)
    readings = train(tmp_path, model, Custom(model, assign), lambda step, name: 1.0, 12)
    assert [reading.values["update/rms"] for reading in readings.values()] == pytest.approx([1.0] * 12)
    norms = [reading.tensors["update/norm"][0] for reading in readings.values() if "update/norm" in reading.tensors]
    assert norms == pytest.approx([10.0] * 6)
    assert readings[11].values["update/cosine"] == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_without_a_one_dimensional_view_are_followed(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Weights({"a": 100})
    model.b = nn.Parameter(torch.zeros(8, 8, dtype=dtype)[:, :4])
    readings = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=1.0), lambda step, name: 1.0, 5)
    for reading in readings.values():
        np.testing.assert_allclose(reading.tensors["update/rms"], [1.0, 1.0])
    np.testing.assert_allclose(readings[4].tensors["update/norm"], [10.0, math.sqrt(32)], rtol=1e-6)


@pytest.mark.parametrize("skipped", [False, True])
def test_weights_put_back_after_a_step_that_failed_are_no_update(tmp_path: Path, skipped: bool) -> None:
    failing = False

    def change(parameter: nn.Parameter) -> None:
        if failing:
            raise RuntimeError
        parameter -= parameter.grad

    model = Weights({"a": 100})
    optimizer = Custom(model, change)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=skipped)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True, diagnose=False)) as monitor:
        for step in range(30):
            failing = step in (4, 8, 22)
            optimizer.zero_grad()
            scaler.scale(model.a.sum() * (math.inf if failing else 1.0)).backward()
            monitor.observe(0.0)
            with contextlib.suppress(RuntimeError):
                scaler.step(optimizer)
                scaler.update()
            if failing:
                model.a.data += 5.0
    with gv.open_run(monitor.run_path) as run:
        for metric, tensor, expected in (("update/rms", None, 1.0), ("update/norm", "a", 10.0)):
            _, values = run.series(metric, tensor=tensor)
            np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_what_the_loop_clips_to(tmp_path: Path) -> None:
    model = Weights({"a": 100})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    readings = train(tmp_path, model, optimizer, lambda step, name: 1.0, 4, clip=2.5)
    assert [reading.values["clip/max_norm"] for reading in readings.values()] == [2.5] * 4
    assert readings[3].values["grad/norm"] == pytest.approx(10.0)
    assert readings[3].values["update/rms"] == pytest.approx(0.25, rel=1e-3)


def test_without_clipping_there_is_nothing_to_tell(tmp_path: Path) -> None:
    model = Weights({"a": 100})
    readings = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=1.0), lambda step, name: 1.0, 2)
    assert "clip/max_norm" not in readings[1].values


@given(
    shape=st.lists(st.integers(1, 300), min_size=2, max_size=3),
    most=st.sampled_from([16, 64, 256]),
)
def test_samples_spread_over_rows_and_columns_of_any_shape(shape: list[int], most: int) -> None:
    tensor = torch.empty(shape)
    stride = sample_stride(tensor, most)
    sampled = np.arange(0, tensor.numel(), stride)
    row = tensor.numel() // shape[0]
    assert 1 <= len(sampled) <= most or stride == 1
    if row >= 8 and len(sampled) >= 24:
        assert len(np.unique(sampled % row * 4 // row)) == 4, "a sample in every quarter of the columns"
    if shape[0] >= 4 and len(sampled) >= 24:
        assert len(np.unique(sampled // row * 4 // shape[0])) == 4, "and of the rows"


def test_weights_of_inputs_that_are_always_zero_do_not_hide_the_others(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)) as monitor:
        for _ in range(60):
            images = torch.rand(32, 28, 28)
            images[:, :3] = images[:, -3:] = 0  # a black margin, as in MNIST
            loss = nn.functional.cross_entropy(model(images.flatten(1)), torch.randint(0, 10, (32,)))
            optimizer.zero_grad()
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
    assert "unchanged_weights" not in {finding.id for finding in monitor.findings}
