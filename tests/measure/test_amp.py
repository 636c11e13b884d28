"""Loss scaling, autocast and parameters of half precision."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import Data, Rig, Transformer, Truth, assert_no_errors, close, finished, mlp, next_token, regression
from torch import nn
from torch.nn.utils import clip_grad_norm_

import gradvitals as gv

clip_to_one_tenth = partial(clip_grad_norm_, max_norm=0.1)


def make(path: Path, *, optimizer: str = "AdamW", enabled: bool = True, **options: object) -> Rig:
    torch.manual_seed(0)
    model = mlp()
    if optimizer == "SGD":
        steps: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    else:
        steps = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=optimizer == "fused")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=enabled)
    return Rig(path, model, steps, scaler=scaler, **options)


@pytest.mark.parametrize(("optimizer", "observe"), [("AdamW", "step"), ("fused", "never"), ("SGD", "micro")])
@pytest.mark.parametrize("how", ["plain", "unscale", "unscale and clip"])
def test_values_are_free_of_the_scale(tmp_path: Path, optimizer: str, observe: str, how: str) -> None:
    clip = clip_to_one_tenth if "clip" in how else None
    rig = make(tmp_path, optimizer=optimizer, observe=observe, unscale="unscale" in how, clip=clip).steps(5)
    rig.check(radial=True)
    assert rig.stages() == ["unscaled"] * 5
    with gv.open_run(rig.monitor.run_path) as run:
        assert run.series("step/skipped")[1].tolist() == [0] * 5


def test_disabled_scaler_is_no_scaler(tmp_path: Path) -> None:
    rig = make(tmp_path, enabled=False).steps(4)
    rig.check()
    assert rig.stages() == ["raw"] * 4


@pytest.mark.parametrize("optimizer", ["AdamW", "fused"])
@pytest.mark.parametrize(("unscale", "observe"), [(False, "step"), (True, "never")])
def test_skipped_step(tmp_path: Path, optimizer: str, unscale: bool, observe: str) -> None:
    rig = make(tmp_path, optimizer=optimizer, unscale=unscale, observe=observe).steps(3)

    def spoil() -> None:
        rig.model[0].weight.grad[1, 2] = float("inf")

    rig.plant = spoil
    before = [p.detach().clone() for p in rig.model.parameters()]
    rig.step(know=False)
    rig.truth.steps.append(rig.truth.steps[-1])  # nothing is compared at the skipped step
    assert all(torch.equal(a, b) for a, b in zip(before, rig.model.parameters(), strict=True))
    rig.plant = None
    rig.steps(3)
    rig.check(steps=[0, 1, 2, 4, 5, 6], skip=("microbatch:gsnr", "adam:gsnr"))
    with gv.open_run(rig.monitor.run_path) as run:
        assert run.series("step/skipped")[1].tolist() == [0, 0, 0, 1, 0, 0, 0]
        assert run.series("grad/nonfinite")[1].tolist()[3] == 1
        assert run.series("grad/nonfinite", tensor="0.weight")[1].tolist()[3] == 1
        assert np.isfinite(run.series("gsnr", tensor="4.weight", source="microbatch")[1]).all()
        broken = run.series("gsnr", tensor="0.weight", source="microbatch")[1]
        assert np.isfinite(broken).tolist() == [True, True, True, False, True, True, True]  # silent where it was spoilt
        spikes = run.series("grad/spike_ratio")[1]
        assert np.isfinite(np.delete(spikes, [0, 1, 3])).all()


def test_radial_gsnr_weighs_a_skipped_step_like_any_other(tmp_path: Path) -> None:
    rig = make(tmp_path, optimizer="AdamW").steps(2)

    def spoil() -> None:
        rig.model[0].weight.grad[1, 2] = float("inf")

    rig.plant = spoil
    rig.step()
    rig.plant = None
    rig.steps(2)
    rig.monitor.close()
    truth = rig.truth.ratios("radial_gsnr", "microbatch", "tensors")
    with gv.open_run(rig.monitor.run_path) as run:
        got = run.series("radial_gsnr", tensor="4.weight")[1]
    for value, expected in zip(got[2:], truth[2:], strict=True):
        close(value, expected["4.weight"], 1e-3, "radial_gsnr after a skipped step", atol=1e-3)


def test_scale_that_changes_between_two_optimizers(tmp_path: Path) -> None:
    """scaler.update() between the two steps doubles the scale in place; the first reading was of the old one."""
    torch.manual_seed(0)
    model = mlp()
    first = torch.optim.SGD(model[0].parameters(), lr=1e-2)
    second = torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)

    def turn() -> None:
        scaler.step(first)
        scaler.update()
        for p in (*model[2].parameters(), *model[4].parameters()):
            p.grad.mul_(2)  # the loop keeps up with the scale that has doubled
        scaler.step(second)
        scaler.update()

    options = {"sizes": (4,), "observe": "never", "tell": "no"}
    Rig(tmp_path, model, [first, second], scaler=scaler, turn=turn, **options).steps(3).check(skip=("grad/max",))


def test_two_optimizers_one_unscaled_by_hand(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    first = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
    second = torch.optim.AdamW([*model[2].parameters(), *model[4].parameters()], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def turn() -> None:
        scaler.unscale_(first)
        clip_to_one_tenth(model[0].parameters())
        scaler.step(first)
        scaler.step(second)
        scaler.update()

    Rig(tmp_path, model, [first, second], scaler=scaler, turn=turn, observe="never", tell="no").steps(3).check()


def test_two_optimizers_one_with_a_scaler(tmp_path: Path) -> None:
    """Two losses: one scaled and stepped by the scaler, one in full precision."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"cast": mlp(), "plain": mlp()})
    first = torch.optim.SGD(model["cast"].parameters(), lr=1e-2)
    second = torch.optim.SGD(model["plain"].parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    monitor = gv.watch(model, [first, second], run=tmp_path / "run", config=gv.Config(tensor_every=1, quiet=True))

    def both(module: nn.ModuleDict, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return regression(module["cast"], batch) + regression(module["plain"], batch)

    truth, data = Truth(model, [first, second], both), Data()
    for _ in range(4):
        batch = data.batch(4)
        truth.before([batch], [1.0], [1.0])
        scaler.scale(regression(model["cast"], batch)).backward()
        regression(model["plain"], batch).backward()
        monitor.observe(1.0)
        scaler.step(first)
        second.step()
        scaler.update()
        truth.after()
        model.zero_grad()
    with finished(monitor) as run:
        truth.check(run, samples_known=False)


def test_bfloat16_autocast(tmp_path: Path) -> None:
    """The forward pass rounds to 8 bits; what is recorded must be what .grad holds, and near the truth."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rig = Rig(tmp_path, model, optimizer, loss=next_token, data=Data(kind="tokens"), autocast=torch.bfloat16)
    norms = []
    rig.plant = lambda: norms.append([float(p.grad.double().norm()) for p in model.parameters()])
    rig.steps(4)
    rig.monitor.close()
    assert_no_errors(rig.monitor)
    truth = rig.truth.ratios("gsnr", "microbatch", "values")
    with gv.open_run(rig.monitor.run_path) as run:
        np.testing.assert_allclose(run.matrix("grad/norm")[1], norms, rtol=1e-5)
        for value, expected in zip(run.series("gsnr", source="microbatch")[1], truth, strict=True):
            close(value, expected[""], 0.1, "gsnr", atol=0.02)  # bfloat16 has a relative error of 0.4 % an operation


@pytest.mark.parametrize(
    ("dtype", "clip"),
    [(torch.bfloat16, None), (torch.bfloat16, clip_to_one_tenth), (torch.float16, None)],
    ids=["bfloat16", "bfloat16, clipped", "float16"],
)
def test_half_precision_parameters(tmp_path: Path, dtype: torch.dtype, clip: object) -> None:
    """Norms are of the gradients as they are, summed in float32: not rounded to the parameters' type."""
    torch.manual_seed(0)
    model = mlp().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    monitor = gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(tensor_every=1, quiet=True))
    data, norms, largest, weights, moved = Data(), [], [], [], []
    for _ in range(5):
        regression(model, data.batch(4)).backward()
        grads = [p.grad.double().clone() for p in model.parameters()]
        norms.append([float(g.norm()) for g in grads])
        largest.append([float(g.abs().max()) for g in grads])
        before = [p.detach().double().clone() for p in model.parameters()]
        monitor.observe(1.0)
        if clip:
            clip(model.parameters())
        optimizer.step()
        weights.append([float(p.detach().double().norm()) for p in model.parameters()])
        moved.append([float((p.detach().double() - b).norm()) for p, b in zip(model.parameters(), before, strict=True)])
        optimizer.zero_grad()
    with finished(monitor) as run:
        for metric, expected in (
            ("grad/norm", norms),
            ("grad/max", largest),
            ("weight/norm", weights),
            ("update/norm", moved),
        ):
            np.testing.assert_allclose(run.matrix(metric)[1], expected, rtol=1e-5, atol=1e-10, err_msg=metric)
        np.testing.assert_allclose(run.series("grad/norm")[1], np.linalg.norm(norms, axis=1), rtol=1e-5)


@pytest.mark.parametrize("layer", [0, 2])
def test_mixed_precision_parameters_with_clipping(tmp_path: Path, layer: int) -> None:
    """clip_grad_norm_ gives norms of both types; only those in float32 are good enough to keep."""
    torch.manual_seed(0)
    model = mlp()
    model[layer].bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    monitor = gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(tensor_every=1, quiet=True))
    data, norms = Data(), []
    for _ in range(4):
        x, y = data.batch(4)
        for index, module in enumerate(model):
            x = module(x.bfloat16()).float() if index == layer else module(x)
        (x - y).square().mean().backward()
        norms.append([float(p.grad.double().norm()) for p in model.parameters()])
        clip_to_one_tenth(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    with finished(monitor) as run:
        np.testing.assert_allclose(run.matrix("grad/norm")[1], norms, rtol=1e-5)


@pytest.mark.parametrize("unscale", [True, False])
def test_parameter_that_only_the_last_micro_batch_reaches(tmp_path: Path, unscale: bool) -> None:
    """Its gradient becomes .grad without a copy, so unscale_ changes what the hook was given."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"enter": nn.Linear(6, 5), "middle": nn.Linear(5, 5), "out": nn.Linear(5, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    config = gv.Config(tensor_every=1, quiet=True, sources=("microbatch",))
    monitor = gv.watch(model, optimizer, run=tmp_path / "run", config=config)
    deep = {"on": False}

    def loss(module: nn.ModuleDict, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = torch.tanh(module["enter"](batch[0]))
        x = torch.tanh(module["middle"](x)) if deep["on"] else x
        return (module["out"](x) - batch[1]).square().mean()

    truth, data = Truth(model, [optimizer], loss), Data()
    for _ in range(3):
        batches = data.batches((4, 4))
        step = truth.before([], [], [])
        step.weights, step.sizes = [0.5, 0.5], [1.0, 1.0]
        for deep["on"], batch in zip((False, True), batches, strict=True):
            step.parts += truth.before([batch], [0.5], [1.0]).parts
            truth.steps.pop()
        for deep["on"], batch in zip((False, True), batches, strict=True):
            scaler.scale(loss(model, batch) / 2).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        truth.after()
        optimizer.zero_grad()
    with finished(monitor) as run:
        truth.check(run, samples_known=False)


def test_adam_moments_of_half_precision(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp().to(torch.bfloat16)
    rig = Rig(tmp_path, model, torch.optim.AdamW(model.parameters(), lr=1e-2), sizes=(4, 4))
    rig.steps(5)
    # The optimizer's state is compared with itself, so its own type does not matter; sums are in float32.
    rig.monitor.close()
    truth = rig.truth.ratios("gsnr", "adam", "tensors")
    with gv.open_run(rig.monitor.run_path) as run:
        steps, matrix = run.matrix("gsnr", source="adam")
        for step, row in zip(steps, matrix, strict=True):
            for name, value in zip(run.names("tensors"), row, strict=True):
                if name in truth[step]:
                    close(value, truth[step][name], 1e-4, f"adam gsnr of {name}", atol=1e-4)


@pytest.mark.parametrize("observe", ["step", "never"])
def test_scaler_of_another_model_is_none_of_ours(tmp_path: Path, observe: str) -> None:
    """A teacher is trained with a scaler before our own first step, which has none."""
    torch.manual_seed(0)
    model, other = mlp(), mlp()
    rig = Rig(tmp_path, model, torch.optim.AdamW(model.parameters(), lr=1e-2), observe=observe, clip=clip_to_one_tenth)
    teacher = torch.optim.SGD(other.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        scaler.scale(regression(other, Data(8).batch(4))).backward()
        scaler.step(teacher)
        scaler.update()
        rig.step()
    rig.check()
    assert rig.stages() == ["raw"] * 3


def test_a_loop_that_uses_one_tensor_for_every_skipped_step(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)) as monitor:
        for step in range(10):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.found_inf.fill_(float(step in (3, 6)))
            optimizer.step()
            optimizer.found_inf.zero_()
    steps, _ = gv.open_run(monitor.run_path).series("step/left_out")
    assert steps.tolist() == [3, 6]
