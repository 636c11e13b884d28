"""Broken gradients and spikes: counted, placed, kept when not due, and gone from the averages."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import Rig, assert_no_errors, close, finished, mlp, plain, regression
from torch import nn

import gradvitals as gv


def make(path: Path, **options: Any) -> Rig:
    torch.manual_seed(0)
    model = mlp()
    return Rig(path, model, torch.optim.SGD(model.parameters(), lr=1e-3), **options)


def run_with(rig: Rig, steps: int, plants: dict[int, Callable[[], None]]) -> gv.Run:
    """Train; where something is planted, the weights go back to what they were before that step."""
    for step in range(steps):
        rig.plant = plants.get(step)
        before = [p.detach().clone() for p in rig.model.parameters()]
        rig.step()
        if step in plants:
            rig.monitor.flush()
            with torch.no_grad():
                for p, old in zip(rig.model.parameters(), before, strict=True):
                    p.copy_(old)
    rig.monitor.close()
    assert_no_errors(rig.monitor)
    return gv.open_run(rig.monitor.run_path)


def spoil(parameter: nn.Parameter, value: float, count: int) -> Callable[[], None]:
    def plant() -> None:
        parameter.grad.view(-1)[:count] = value

    return plant


@pytest.mark.parametrize(("value", "clip"), [(math.nan, False), (math.nan, True), (math.inf, False), (-math.inf, True)])
def test_counts_and_places(tmp_path: Path, value: float, clip: bool) -> None:
    """The first broken step says which tensors; from then on, which may be a step later, elements are counted."""
    rig = make(tmp_path, clip=(lambda ps: nn.utils.clip_grad_norm_(ps, 0.1)) if clip else None)
    plants = {2: spoil(rig.model[0].bias, value, 2), 5: spoil(rig.model[2].weight, value, 5)}
    with run_with(rig, 8, plants) as run:
        names = run.names("tensors")
        counts = run.matrix("grad/nonfinite")[1]
        first, row = names.index("0.bias"), names.index("2.weight")
        assert counts[2, first] in (1, 2)
        expected = np.zeros_like(counts)
        expected[2, first], expected[5, row] = counts[2, first], 5
        np.testing.assert_array_equal(counts, expected)
        assert run.series("grad/nonfinite")[1].tolist() == [0, 0, counts[2, first], 0, 0, 5, 0, 0]
        assert not math.isfinite(run.series("grad/norm")[1][5])
        good = [0, 1, 3, 4, 6, 7]
        rig.truth.check(run, skip=("microbatch:gsnr", "update/norm", "update/ratio", "weight/norm"), steps=good)
        others = np.delete(run.matrix("grad/norm")[1][5], row)
        truth = plain(rig.truth.steps[5], "grad/norm")[1]
        for name, found in zip([n for n in names if n != "2.weight"], others, strict=True):
            close(found, truth[name], 1e-5, f"grad/norm of {name}")
        assert np.isfinite(run.matrix("grad/spike_ratio")[1][6:]).all()
        assert np.isfinite(run.matrix("gsnr", source="microbatch")[1][6:]).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_elements_are_not_zeros(tmp_path: Path, value: float) -> None:
    rig = make(tmp_path)
    with run_with(rig, 3, {1: spoil(rig.model[2].weight, value, 5)}) as run:
        close(run.series("grad/zero_fraction", tensor="2.weight")[1][1], 0.0, 0.0, "grad/zero_fraction")


def test_gsnr_after_a_broken_step_is_that_of_the_good_ones(tmp_path: Path) -> None:
    rig = make(tmp_path)
    plants = {2: spoil(rig.model[2].weight, math.nan, 5)}
    with run_with(rig, 6, plants) as run:
        pairs = [p["2.weight"] for i, p in enumerate(rig.truth.pairs("gsnr", "microbatch", "tensors")) if i > 2]
        signal, noise = np.mean(pairs, axis=0)
        close(run.series("gsnr", tensor="2.weight", source="microbatch")[1][-1], 4 * signal / noise, 1e-4, "gsnr", 1e-4)
        # The whole model was not seen at step 2: a sum without its largest tensor is another number.
        pairs = [p[""] for i, p in enumerate(rig.truth.pairs("gsnr", "microbatch", "values")) if i > 2]
        signal, noise = np.mean(pairs, axis=0)
        close(run.series("gsnr", source="microbatch")[1][-1], 4 * signal / noise, 1e-4, "gsnr of the model", 1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_step_keeps_its_tensors_though_not_due(tmp_path: Path, value: float) -> None:
    rig = make(tmp_path, tensor_every=50)
    with run_with(rig, 7, {5: spoil(rig.model[2].weight, value, 2)}) as run:
        steps, counts = run.matrix("grad/nonfinite")
        assert steps.tolist() == [0, 1, 2, 4, 5]  # a young run is read at powers of two
        row = run.names("tensors").index("2.weight")
        assert np.flatnonzero(counts[4]).tolist() == [row]
        steps, norms = run.matrix("grad/norm")
        assert np.flatnonzero(~np.isfinite(norms[4])).tolist() == [row]


@pytest.mark.parametrize(("factor", "kept"), [(50.0, True), (1.01, False)])
def test_spike_keeps_its_tensors_though_not_due(tmp_path: Path, factor: float, kept: bool) -> None:
    rig = make(tmp_path, tensor_every=50)

    def plant() -> None:
        for parameter in rig.model.parameters():
            parameter.grad.mul_(factor)

    with run_with(rig, 7, {5: plant}) as run:
        steps, norms = run.matrix("grad/norm")
        assert steps.tolist() == ([0, 1, 2, 4, 5] if kept else [0, 1, 2, 4])
        assert "grad/spike_ratio" in run.metrics("tensors")
        if kept:
            for name, value in plain(rig.truth.steps[5], "grad/norm")[1].items():
                close(norms[4][run.names("tensors").index(name)], factor * value, 1e-5, f"norm of {name}")
            assert run.series("grad/spike_ratio")[1][5] > 2
        assert run.series("grad/norm")[0].tolist() == list(range(7))


@pytest.mark.parametrize(("window", "every"), [(4, 1), (100, 3)])
def test_spike_ratio_and_variation(tmp_path: Path, window: int, every: int) -> None:
    """Ratio and variation are by the finite ones of the last `norm_window` norms before this one."""
    rig = make(tmp_path, norm_window=window, tensor_every=every)
    plants = {4: spoil(rig.model[0].weight, math.nan, 1), 9: spoil(rig.model[0].weight, 100.0, 4)}
    with run_with(rig, 18, plants) as run:
        steps, norms = run.series("grad/norm")
        _check_history(steps, norms, run.series("grad/spike_ratio")[1], run.series("grad/norm_cv")[1], window)
        if every == 1:
            for name in run.names("tensors"):
                steps, norms = run.series("grad/norm", tensor=name)
                ratio = run.series("grad/spike_ratio", tensor=name)[1]
                _check_history(steps, norms, ratio, run.series("grad/norm_cv", tensor=name)[1], window)


def _check_history(steps: np.ndarray, norms: np.ndarray, ratios: np.ndarray, cvs: np.ndarray, window: int) -> None:
    for index in range(len(steps)):
        before = norms[:index][-window:]
        before = before[np.isfinite(before)]
        if len(before) < 2:
            assert np.isnan(ratios[index])
            assert np.isnan(cvs[index])
            continue
        close(float(cvs[index]), float(before.std(ddof=1) / before.mean()), 1e-4, f"norm_cv at {index}", atol=1e-6)
        if np.isfinite(norms[index]):
            close(float(ratios[index]), float(norms[index] / before.mean()), 1e-5, f"spike_ratio at {index}")


def test_all_zero_gradients(tmp_path: Path) -> None:
    rig = make(tmp_path)

    def nothing() -> None:
        for parameter in rig.model.parameters():
            parameter.grad.zero_()

    with run_with(rig, 5, {0: nothing, 1: nothing, 2: nothing}) as run:
        assert run.series("grad/norm")[1][:3].tolist() == [0, 0, 0]
        assert run.series("grad/zero_fraction")[1][:3].tolist() == [1, 1, 1]


def test_tiny_and_huge_gradients(tmp_path: Path) -> None:
    """No absolute epsilon: the ratios of a loss are those of the same loss times 1e-12 or 1e12."""
    found = []
    for index, scale in enumerate((1.0, 1e-12, 1e12)):
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2 / scale)
        rig = Rig(tmp_path / str(index), model, optimizer)
        plain_loss = rig.loss
        rig.loss = lambda m, b, s=scale, f=plain_loss: s * f(m, b)
        for _ in range(4):
            rig.step(know=False)
        with finished(rig.monitor) as run:
            found.append((run.matrix("gsnr", source="microbatch")[1], run.series("grad/norm")[1] / scale))
    for gsnr, norm in found[1:]:
        np.testing.assert_allclose(gsnr, found[0][0], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(norm, found[0][1], rtol=1e-4)


def scale_by(rig: Rig, factor: float) -> Callable[[], None]:
    """Multiply every gradient, which float32 holds though its square does not."""

    def plant() -> None:
        for parameter in rig.model.parameters():
            parameter.grad.mul_(factor)

    return plant


@pytest.mark.parametrize(("element", "clip"), [(1e19, True), (1e25, False)])
def test_a_finite_gradient_whose_squares_overflow_is_finite(tmp_path: Path, element: float, clip: bool) -> None:
    rig = make(tmp_path, clip=(lambda ps: nn.utils.clip_grad_norm_(ps, 0.1)) if clip else None, tensor_every=50)
    plants = {step: scale_by(rig, element) for step in (5, 6)}
    with run_with(rig, 9, plants) as run:
        assert not run.series("grad/nonfinite")[1].any()
        assert not [finding for finding in run.findings if finding.id == "nonfinite"]
        norms = run.series("grad/norm")[1]
        assert norms[5] > 1e17  # infinity is the norm in float32; the next step is read in float64
        close(norms[6] / element, plain(rig.truth.steps[6], "grad/norm")[0], 1e-5, "norm in float64")
        close(norms[7], plain(rig.truth.steps[7], "grad/norm")[0], 1e-5, "norm after it")


@pytest.mark.parametrize("element", [1e-14, 1e-19, 1e-24, 1e25])
def test_gsnr_at_the_ends_of_float32_is_right_or_unknown(tmp_path: Path, element: float) -> None:
    """All gradients times a factor have the same GSNR, as far as squares can tell."""
    torch.manual_seed(0)
    values = {}
    for factor in (1.0, element):
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
        rig = Rig(tmp_path / str(factor), model, optimizer, loss=lambda m, b, f=factor: f * regression(m, b))
        rig.steps(6).monitor.close()
        with gv.open_run(rig.monitor.run_path) as run:
            values[factor] = {
                source: np.append(
                    run.matrix("gsnr", source=source)[1], run.series("gsnr", source=source)[1][:, None], 1
                )
                for source in ("microbatch", "adam")
            }
    for source, right in values[1.0].items():
        found = values[element][source]
        known = np.isfinite(found)
        np.testing.assert_allclose(found[known], right[known], rtol=1e-3, atol=1e-4)
        assert not np.isinf(found).any()
        assert known[-1].all() == (element == 1e-14), source
