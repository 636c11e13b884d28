"""The window source: the last steps' gradients of the embedding and the head, held against a list of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import Data, Rig, Transformer, assert_no_errors, close, finished, mlp, next_token

import gradvitals as gv

T = 20


def make(path: Path, **options: Any) -> Rig:
    torch.manual_seed(0)
    model = Transformer(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return Rig(path, model, optimizer, loss=next_token, data=Data(kind="tokens"), **{"sizes": (3,), **options})


def window_gsnr(gradients: np.ndarray) -> float:
    """Debiased ratio of sums over the rows of [T, n]."""
    count, mean = len(gradients), gradients.mean(0)
    noise = np.square(gradients - mean).sum() / (count - 1)
    return float((mean @ mean - noise / count) / noise)


def jackknife(gradients: np.ndarray, blocks: int = 10) -> float:
    """Half the width of the interval: Student's t with 9 degrees of freedom times the jackknife's error."""
    size = len(gradients) // blocks
    left = [window_gsnr(np.delete(gradients, slice(i * size, (i + 1) * size), axis=0)) for i in range(blocks)]
    return 2.262157 * math.sqrt((blocks - 1) / blocks * np.square(left - np.mean(left)).sum())


@pytest.mark.parametrize("sizes", [(3,), (3, 3)], ids=["one backward", "two"])
@pytest.mark.parametrize("observe", ["micro", "step", "never"])
def test_embedding_and_head(tmp_path: Path, sizes: tuple[int, ...], observe: str) -> None:
    rig = make(tmp_path, sizes=sizes, observe=observe).steps(31)
    with finished(rig.monitor) as run:
        for name in ("embed.weight", "head.weight"):
            gradients = np.stack([step.total(name) for step in rig.truth.steps])
            steps, values = run.series("gsnr", tensor=name, source="window")
            lows = dict(zip(*run.series("gsnr_low", tensor=name, source="window"), strict=True))
            assert steps.tolist() == [19], "one window of ten is read unless the tensors are named"
            for step, value in zip(steps, values, strict=True):
                seen = gradients[step - T + 1 : step + 1]
                close(value, window_gsnr(seen), 1e-4, f"window gsnr of {name} at {step}", atol=1e-5)
                close(lows[step], window_gsnr(seen) - jackknife(seen), 1e-3, f"gsnr_low at {step}", atol=1e-4)
        others = run.matrix("gsnr", source="window")[1]
        names = run.names("tensors")
        finite = {names[column] for column in np.flatnonzero(np.isfinite(others).any(0))}
        assert finite == {"embed.weight", "head.weight"}


def test_every_gradient_counts_whatever_the_cadence(tmp_path: Path) -> None:
    rig = make(tmp_path, tensor_every=7).steps(22)
    rig.monitor.close()
    assert_no_errors(rig.monitor)
    gradients = np.stack([step.total("head.weight") for step in rig.truth.steps])
    with gv.open_run(rig.monitor.run_path) as run:
        for step, value in zip(*run.series("gsnr", tensor="head.weight", source="window"), strict=True):
            close(value, window_gsnr(gradients[step - T + 1 : step + 1]), 1e-4, "window gsnr", atol=1e-5)


def test_chosen_tensors(tmp_path: Path) -> None:
    rig = make(tmp_path, window_tensors=("blocks.0.mlp.0.weight",)).steps(20)
    rig.monitor.close()
    assert_no_errors(rig.monitor)
    gradients = np.stack([step.total("blocks.0.mlp.0.weight") for step in rig.truth.steps])
    with gv.open_run(rig.monitor.run_path) as run:
        _, values = run.series("gsnr", tensor="blocks.0.mlp.0.weight", source="window")
        close(values[-1], window_gsnr(gradients), 1e-4, "window gsnr", atol=1e-5)


def test_nan_leaves_with_the_window(tmp_path: Path) -> None:
    rig = make(tmp_path)
    for step in range(48):
        rig.plant = None
        if step in (5, 6):
            rig.plant = lambda: rig.model.head.weight.grad.fill_(math.nan)
            weights = {name: p.detach().clone() for name, p in rig.model.named_parameters()}
            rig.step()
            with torch.no_grad():  # a loop that goes back after a NaN
                for name, p in rig.model.named_parameters():
                    p.copy_(weights[name])
        else:
            rig.step()
    rig.monitor.close()
    assert_no_errors(rig.monitor)
    gradients = np.stack([step.total("head.weight") for step in rig.truth.steps])
    with gv.open_run(rig.monitor.run_path) as run:
        steps, values = run.series("gsnr", tensor="head.weight", source="window")
        assert np.isfinite(values[steps >= 6 + T]).all()
        for step, value in zip(steps, values, strict=True):
            if np.isfinite(value):
                kept = [i for i in range(step - T + 1, step + 1) if i not in (5, 6)]
                close(value, window_gsnr(gradients[kept]), 1e-4, f"window gsnr at {step}", atol=1e-5)


@pytest.mark.parametrize("unscale", [True, False])
def test_loss_scale(tmp_path: Path, unscale: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    rig = make(tmp_path, scaler=scaler, unscale=unscale).steps(20)
    rig.monitor.close()
    gradients = np.stack([step.total("head.weight") for step in rig.truth.steps])
    with gv.open_run(rig.monitor.run_path) as run:
        _, values = run.series("gsnr", tensor="head.weight", source="window")
        close(values[-1], window_gsnr(gradients), 1e-4, "window gsnr", atol=1e-5)


def test_source_turned_off(tmp_path: Path) -> None:
    rig = make(tmp_path, sources=("microbatch",)).steps(21)
    with finished(rig.monitor) as run:
        assert "gsnr" not in run.metrics()


def test_model_without_embedding_follows_the_last_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    rig = Rig(tmp_path, model, torch.optim.SGD(model.parameters(), lr=1e-2), sizes=(4,)).steps(20)
    rig.check()
    with gv.open_run(rig.monitor.run_path) as run:
        row = run.matrix("gsnr", source="window")[1][-1]
        assert [run.names("tensors")[i] for i in np.flatnonzero(np.isfinite(row))] == ["4.weight"]


def test_more_micro_batches_than_before_is_still_one_gradient(tmp_path: Path) -> None:
    """A loop that observes every micro-batch begins to take more of them; none goes into the window by itself."""
    rig = make(tmp_path, observe="micro", sizes=(3, 3))
    for step in range(20):
        rig.step(sizes=(3, 3) if step % 4 else (3, 3, 3))
    rig.monitor.close()
    assert_no_errors(rig.monitor)
    gradients = np.stack([step.total("head.weight") for step in rig.truth.steps])
    with gv.open_run(rig.monitor.run_path) as run:
        _, values = run.series("gsnr", tensor="head.weight", source="window")
        close(values[-1], window_gsnr(gradients), 1e-4, "window gsnr", atol=1e-5)
