"""Monitoring changes nothing: not a bit of the training, and no hook stays behind."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm_python
from reference import Data, Rig, Transformer, assert_no_errors, finished, mlp, next_token, regression
from torch import nn

import gradvitals as gv
from gradvitals.collect import hooks


def train(monitored: Path | None, *, kind: str, config: gv.Config | None = None) -> tuple[Any, ...]:
    """One training run; everything that could differ is returned."""
    torch.manual_seed(0)
    tokens = kind == "transformer"
    model: nn.Module = Transformer() if tokens else mlp(dropout=0.3)
    if kind == "bfloat16":
        model = model.to(torch.bfloat16)
    loss_of, data = (next_token if tokens else regression), Data(kind="tokens" if tokens else "vectors")
    fused = kind == "fused scaler"
    options: dict[str, Any] = {"lr": 1e-2}
    if kind == "lbfgs":
        optimizer: torch.optim.Optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    elif kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2) if "scaler" in kind else None
    monitor = None
    if monitored is not None:
        monitor = gv.watch(model, optimizer, run=monitored, config=config, batch_size=8)
    norms = []
    for step in range(8):
        if kind == "lbfgs":
            batch = data.batch(4)

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
            continue
        for batch in data.batches((4, 4)):
            loss = loss_of(model, batch) / 2
            (scaler.scale(loss) if scaler else loss).backward()
            if monitor:
                monitor.observe(loss)
        if step == 4 and scaler:
            next(model.parameters()).grad.view(-1)[0] = float("inf")
        if scaler:
            scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    if monitor:
        monitor.close()
    rng = torch.get_rng_state()
    scale = scaler.get_scale() if scaler else None
    return [p.detach().clone() for p in model.parameters()], optimizer.state_dict()["state"], norms, rng, scale, monitor


KINDS = ("plain", "sgd", "transformer", "scaler", "fused scaler", "lbfgs", "bfloat16")


@pytest.mark.parametrize(("kind", "every"), [*((kind, 1) for kind in KINDS), ("transformer", 3), ("fused scaler", 3)])
def test_training_is_bit_identical(tmp_path: Path, kind: str, every: int) -> None:
    bare = train(None, kind=kind)
    watched = train(tmp_path / "run", kind=kind, config=gv.Config(tensor_every=every, quiet=True, window_steps=20))
    for ours, theirs in zip(watched[0], bare[0], strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(watched[1].values(), bare[1].values(), strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, theirs[key]), key
    for ours, theirs in zip(watched[2], bare[2], strict=True):
        assert torch.equal(ours, theirs) or (ours.isnan() and theirs.isnan())
    assert torch.equal(watched[3], bare[3])
    assert watched[4] == bare[4]


def originals() -> dict[str, Any]:
    from torch.nn.utils import clip_grad

    return {
        "_get_total_norm": clip_grad._get_total_norm,
        "_clip_grads_with_norm_": clip_grad._clip_grads_with_norm_,
        "clip_grad_value_": nn.utils.clip_grad_value_,
        "get_total_norm": nn.utils.get_total_norm,
        "clip_grads_with_norm_": nn.utils.clip_grads_with_norm_,
        "scale": torch.amp.GradScaler.scale,
        "step": torch.amp.GradScaler.step,
        "_foreach_norm": torch._foreach_norm,
    }


def assert_bare(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in model.named_parameters():
        assert not parameter._backward_hooks, name
        assert not getattr(parameter, "_post_accumulate_grad_hooks", None), name
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("when", ["at once", "after steps", "between backward and step"])
def test_close_takes_every_hook_away(tmp_path: Path, when: str) -> None:
    gc.collect()
    before = originals()
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(tensor_every=1, quiet=True))
    if when != "at once":
        for _ in range(3):
            regression(model, Data().batch(4)).backward()
            optimizer.step()
    if when == "between backward and step":
        regression(model, Data().batch(4)).backward()
    monitor.close()
    monitor.close()
    assert_bare(model, optimizer)
    assert originals() == before
    monitor.observe(1.0)
    optimizer.step()


def test_two_monitors_at_once(tmp_path: Path) -> None:
    """Two models, two monitors, one of them closed first: each sees its own."""
    gc.collect()
    before = originals()
    rigs = []
    for index in range(2):
        torch.manual_seed(index)
        model = mlp()
        rigs.append(
            Rig(
                tmp_path / str(index),
                model,
                torch.optim.AdamW(model.parameters(), lr=1e-2),
                data=Data(index),
                clip=lambda ps: nn.utils.clip_grad_norm_(ps, 0.1),
            )
        )
    for _ in range(3):
        for rig in rigs:
            rig.step()
    rigs[0].check()
    assert originals() != before
    rigs[1].steps(2).check()
    assert originals() == before
    for rig in rigs:
        assert set(rig.stages()) == {"raw"}


def test_a_second_monitor_of_one_model_closes_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = gv.watch(model, optimizer, run=tmp_path / "first")
    regression(model, Data().batch(4)).backward()
    optimizer.step()
    with gv.watch(model, optimizer, run=tmp_path / "second") as second:
        assert f"closed the earlier Monitor of this model, whose run is in {first.run_path}" in capsys.readouterr().err
        regression(model, Data().batch(4)).backward()
        optimizer.step()
    assert (first.step, second.step) == (1, 1)
    assert_bare(model, optimizer)


def test_monitor_dropped_without_closing_lets_the_model_go_and_keeps_every_step(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    monitor = gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True))
    for _ in range(40):
        regression(model, Data().batch(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    alive = weakref.ref(model), weakref.ref(monitor)
    monitor.flush()
    del model, optimizer, monitor
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    with gv.open_run(tmp_path / "run") as run:
        assert run.series("grad/norm")[0].tolist() == list(range(40))


def test_model_and_optimizer_can_be_saved_and_copied(tmp_path: Path) -> None:
    rig_model = mlp()
    optimizer = torch.optim.AdamW(rig_model.parameters())
    with gv.watch(rig_model, optimizer, run=tmp_path / "run", config=gv.Config(tensor_every=1, quiet=True)) as monitor:
        regression(rig_model, Data().batch(4)).backward()
        optimizer.step()
        buffer = io.BytesIO()
        torch.save({"model": rig_model, "optimizer": optimizer, "state": optimizer.state_dict()}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        copied_model, copied_optimizer = copy.deepcopy((rig_model, optimizer))
        assert_bare(loaded["model"], loaded["optimizer"])
        assert_bare(copied_model, copied_optimizer)
        copied_optimizer.step()
        loaded["optimizer"].step()
        assert monitor.step == 1
    assert_no_errors(monitor)


def test_evaluation_in_between(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp(dropout=0.2)
    model.eval()  # dropout off: the truth must be able to say the same
    rig = Rig(tmp_path, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _ in range(4):
        rig.step()
        with torch.no_grad():
            regression(model, Data(4).batch(8))
        with torch.inference_mode():
            regression(model, Data(4).batch(8))
    rig.check()


def test_gradients_of_gradients(tmp_path: Path) -> None:
    """A penalty on the gradient's norm runs backward with create_graph before the real one."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(tensor_every=1, quiet=True))
    data, norms = Data(), []
    for _ in range(3):
        x, y = data.batch(4)
        x.requires_grad_()
        loss = (model(x) - y).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        norms.append([float(p.grad.double().norm()) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    with finished(monitor) as run:
        np.testing.assert_allclose(run.matrix("grad/norm")[1], norms, rtol=1e-5)


SCRIPT = """
import sys, warnings
import torch
from torch.utils.data import DataLoader
import gradvitals as gv

if __name__ == "__main__":
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = gv.watch(model, optimizer, run=sys.argv[1], config=gv.Config(tensor_every=1))
    loader = DataLoader(torch.randn(16, 4), batch_size=4, num_workers=1, multiprocessing_context="fork")
    for epoch in range(2):
        for batch in loader:
            loss = model(batch).square().mean()
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
            optimizer.zero_grad()
    print("steps", monitor.step)
"""


def test_worker_processes_do_not_hang_at_exit(tmp_path: Path) -> None:
    """The monitor is not closed: leaving the interpreter does that, in the parent only."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = warm_python.run(script, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "steps 8" in done.stdout
    assert "Traceback" not in done.stderr
    with gv.open_run(tmp_path / "run") as run:
        assert run.last_step == 7
        assert run.meta["finished_at"] is not None


def test_a_monitor_may_be_collected_while_another_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is collected at any allocation: then the old one closes in the middle of what the new one does."""

    def watched(name: str) -> gv.Monitor:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return gv.watch(model, optimizer, run=tmp_path / name, config=gv.Config(quiet=True))

    dropped: list[object] = [watched("dropped")]
    dropped.append(dropped)
    del dropped
    others = hooks._others
    monkeypatch.setattr(hooks, "_others", lambda listener: (gc.collect(), others(listener))[1])
    starting = threading.Thread(target=lambda: watched("new").close(), daemon=True)
    starting.start()
    starting.join(60)
    assert not starting.is_alive()
