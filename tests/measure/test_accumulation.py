"""Micro-batches of one step, told in every way a loop may tell them, against the dense truth."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import (
    Data,
    Rig,
    Transformer,
    close,
    finished,
    head_masks,
    mlp,
    next_token,
    signal_and_noise,
)
from torch import nn

import gradvitals as gv


def make(path: Path, **options: object) -> Rig:
    torch.manual_seed(0)
    model = mlp()
    return Rig(path, model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def test_reference_agrees_with_the_textbook_form() -> None:
    rng = np.random.default_rng(0)
    g, b = rng.normal(size=(4, 7)) + 1, 5
    k, mean = len(g), g.mean(0)
    noise = b / (k - 1) * np.square(g - mean).sum()
    assert np.allclose(signal_and_noise(g / k, [b] * k, [1 / k] * k), (mean @ mean - noise / (k * b), noise))


@pytest.mark.parametrize(("observe", "count"), [("micro", 2), ("micro", 5), ("step", 3), ("never", 3)])
def test_equal_micro_batches(tmp_path: Path, observe: str, count: int) -> None:
    make(tmp_path, sizes=(4,) * count, observe=observe).steps(6).check()


def test_transformer_with_layers_and_heads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Transformer(width=8, n_head=2)
    heads = {
        f"blocks.{i}.attn/head{h}": {f"blocks.{i}.attn.qkv.weight": mask}
        for i in range(2)
        for h, mask in enumerate(head_masks(model.blocks[i].attn.qkv.weight, 2, 3))
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rig = Rig(tmp_path, model, optimizer, loss=next_token, data=Data(kind="tokens"), heads=heads, sizes=(3, 3, 3))
    # The gradient of the keys' bias is zero but for rounding, which float32 and float64 do differently.
    rig.steps(5).check(skip=("grad/zero_fraction",), rtol=2e-5)


@pytest.mark.parametrize("equal", [False, True], ids=["by size", "equal weights"])
def test_unequal_sizes_told_with_observe(tmp_path: Path, equal: bool) -> None:
    make(tmp_path, sizes=(2, 7, 4), observe="micro", tell="micro", equal=equal).steps(6).check()


@pytest.mark.parametrize("equal", [False, True], ids=["by size", "(loss / k).backward()"])
def test_the_weights_of_unequal_sizes_are_found_out(tmp_path: Path, equal: bool) -> None:
    """Once found, the readings are those of a run that was told, which agree with the dense truth."""
    series = []
    for name, settings in (("told", {}), ("found", {"micro_batch_weights": None})):
        told = {"observe": "micro", "tell": "micro", "equal": equal, "gsnr_window": 5, **settings}
        rig = make(tmp_path / name, sizes=(2, 7, 4), **told).steps(30)
        with finished(rig.monitor) as run:
            series.append(dict(zip(*(part.tolist() for part in run.series("gsnr", source="microbatch")), strict=True)))
    told, found = series
    assert min(found) <= 24  # nothing before it is known
    assert found[29] == pytest.approx(told[29], rel=1e-6)


def test_weights_that_cannot_be_found_out_are_asked_for(tmp_path: Path) -> None:
    """The norms grow with the size, halfway between those of the two conventions."""
    rig = make(tmp_path, sizes=(2, 8), observe="micro", tell="micro", micro_batch_weights=None)
    rig.loss = lambda model, batch: sum(p.square().sum() for p in model.parameters()) * len(batch[0]) ** -0.75
    rig.steps(24).monitor.close()
    notes = [finding for finding in rig.monitor.findings if finding.id == "source_unavailable"]
    assert any("micro_batch_weights" in finding.title for finding in notes)
    with gv.open_run(rig.monitor.run_path) as run:
        assert "microbatch" not in run.sources("gsnr")


def test_sizes_that_change_from_step_to_step(tmp_path: Path) -> None:
    rig = make(tmp_path, observe="micro", tell="micro")
    for sizes in [(4, 4), (2, 3, 4), (6, 1), (5, 5, 5, 5), (3, 2, 1)]:
        rig.step(sizes=sizes)
    rig.check()


def test_size_told_once_a_step(tmp_path: Path) -> None:
    make(tmp_path, sizes=(4, 4), observe="step", tell="step").steps(4).check()


def test_sizes_not_told(tmp_path: Path) -> None:
    rig = make(tmp_path, sizes=(4, 4), tell="no").steps(5)
    rig.check()
    with gv.open_run(rig.monitor.run_path) as run:
        assert "noise_scale" not in run.metrics()
        assert np.isnan(run.batch_sizes("gsnr", source="microbatch")[1]).all()


def test_batch_size_stands_beside_the_gsnr(tmp_path: Path) -> None:
    rig = make(tmp_path, sizes=(4, 4, 4)).steps(3)
    with finished(rig.monitor) as run:
        assert run.batch_sizes("gsnr", source="microbatch")[1].tolist() == [4.0] * 3
        assert run.batch_sizes("gsnr", source="adam")[1].tolist() == [12.0] * 3
        assert run.batch_sizes("grad/norm")[1].tolist() == [12.0] * 3


def test_loss_is_the_mean_over_samples(tmp_path: Path) -> None:
    rig = make(tmp_path, sizes=(2, 7), observe="micro", tell="micro").steps(3)
    with finished(rig.monitor) as run:
        for step, loss in zip(rig.truth.steps, run.series("loss")[1], strict=True):
            close(loss, float(np.average(step.losses, weights=[2, 7])), 1e-5, "loss")


def test_one_micro_batch_says_that_gsnr_needs_more(tmp_path: Path) -> None:
    rig = make(tmp_path, sizes=(4,)).steps(3)
    rig.check()
    told = [finding for finding in rig.monitor.findings if finding.id == "source_unavailable"]
    assert len(told) == 1
    assert "micro-batches" in told[0].title
    with gv.open_run(rig.monitor.run_path) as run:
        assert "microbatch" not in run.sources("gsnr")


def test_interval_is_the_delta_method_over_readings(tmp_path: Path) -> None:
    rig = make(tmp_path, gsnr_window=8).steps(12)
    rig.check()
    # At step 11 the readings from step 6 on count: none from before half-time.
    pairs = np.array([pair[""] for pair in rig.truth.pairs("gsnr", "microbatch", "values")])[6:]
    mean, (variance, covariance) = pairs.mean(0), np.cov(pairs.T)
    ratio = mean[0] / mean[1]
    spread = variance[0] - 2 * ratio * variance[1] + ratio**2 * covariance[1]
    half = 2.5705818366 * math.sqrt(spread / 6) / mean[1]  # Student's t, 5 degrees of freedom
    with gv.open_run(rig.monitor.run_path) as run:
        close(run.series("gsnr_low", source="microbatch")[1][-1], 4 * (ratio - half), 1e-4, "gsnr_low", atol=1e-4)
        close(run.series("gsnr_high", source="microbatch")[1][-1], 4 * (ratio + half), 1e-4, "gsnr_high", atol=1e-4)
        close(run.series("noise_scale_low")[1][-1], 1 / (ratio + half), 1e-3, "noise_scale_low")


def test_window_forgets_old_readings(tmp_path: Path) -> None:
    make(tmp_path, gsnr_window=3).steps(8).check()


def test_identical_micro_batches_have_infinite_gsnr(tmp_path: Path) -> None:
    rig = make(tmp_path, sizes=(4, 4))
    batch = Data(3).batch(4)
    for _ in range(3):
        for _ in range(2):
            (rig.loss(rig.model, batch) / 2).backward()
        rig.optimizer.step()
        rig.optimizer.zero_grad()
    with finished(rig.monitor) as run:
        assert np.isinf(run.series("gsnr", source="microbatch")[1]).all()


@pytest.mark.parametrize("count", [2, 4])
def test_radial_gsnr_is_along_the_weights_the_gradients_were_taken_at(tmp_path: Path, count: int) -> None:
    make(tmp_path, sizes=(4,) * count).steps(5).check(radial=True)


class TwoTasks(nn.Module):
    """A body, a middle that may be skipped, and two heads of which a micro-batch may use one only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.middle = nn.Linear(5, 5)
        self.left = nn.Linear(5, 3)
        self.right = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        x = torch.tanh(self.body(x))
        if "m" in task:
            x = x + torch.tanh(self.middle(x))
        return (self.left(x) if "l" in task else 0) + (self.right(x) if "r" in task else 0)


@pytest.mark.parametrize(
    ("tasks", "how"),
    [
        *((tasks, "equal sizes") for tasks in ("ml,mlr", "mlr,ml", "ml,mr", "l,ml", "ml,l", "mr,l,mlr")),
        *((tasks, "equal sizes, observed") for tasks in ("ml,mlr", "mr,l,mlr")),
        *((tasks, "unequal sizes") for tasks in ("ml,mlr", "mr,l,mlr")),
    ],
)
def test_micro_batch_that_does_not_reach_every_parameter(tmp_path: Path, tasks: str, how: str) -> None:
    torch.manual_seed(0)
    model = TwoTasks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    names = tasks.split(",")
    unequal = how == "unequal sizes"
    sizes = (2, 7, 3)[: len(names)] if unequal else (4,) * len(names)
    current = {"task": ""}

    def loss(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (module(batch[0], current["task"]) - batch[1]).square().mean()

    rig = Rig(tmp_path, model, optimizer, tell="no", metrics=("grad/norm", "gsnr"), sources=("microbatch",))
    data = Data(5)
    for _ in range(4):
        batches = data.batches(sizes)
        weights = [size / sum(sizes) for size in sizes]
        step = rig.truth.before([], [], [])
        step.sizes, step.weights = list(sizes) if unequal else [1.0] * len(sizes), weights
        for name, batch, weight in zip(names, batches, weights, strict=True):
            current["task"] = name
            step.parts += rig.truth.before([batch], [weight], [1.0], loss).parts
            rig.truth.steps.pop()
        for name, batch, weight, size in zip(names, batches, weights, sizes, strict=True):
            current["task"] = name
            value = loss(model, batch)
            (weight * value).backward()
            if how != "equal sizes":
                rig.monitor.observe(value, batch_size=size if unequal else None)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        rig.truth.after()
        optimizer.zero_grad()
    with finished(rig.monitor) as run:
        rig.truth.check(
            run,
            skip=("grad/max", "grad/zero_fraction", "weight/norm", "update/norm", "update/ratio"),
            samples_known=False,
        )
