"""The Lightning callback, in real Trainers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradvitals as gv
from gradvitals.integrations.lightning import GradvitalsCallback

QUIET = gv.Config(quiet=True, tensor_every=1)


class Module(L.LightningModule):
    """Notes its losses, and the norm of its gradients before the Trainer clips them."""

    def __init__(self, *, manual: bool = False, bad_batch: int | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.automatic_optimization = not manual
        self.bad_batch = bad_batch
        self.losses: list[float] = []
        self.norms: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch) * (torch.nan if batch_idx == self.bad_batch else 1.0)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.norms.append(norm(self))
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, 1e-3, "norm")
            optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.automatic_optimization:
            self.norms.append(norm(self))

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
        first, last = self.net[0].parameters(), self.net[2].parameters()
        return [torch.optim.SGD(first, lr=1e-2), torch.optim.AdamW(last, lr=1e-2)]


def norm(module: nn.Module) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))


@pytest.fixture(autouse=True)
def third_party_warnings() -> Iterator[None]:
    """Lightning warns of workers, loggers and deprecations of its own, which are not what is tested here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fit(
    module: Module, callback: GradvitalsCallback | None, *, batches: int = 8, resume: Path | None = None, **options: Any
) -> L.Trainer:
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(8 * batches, 4)), 8)
    options = {"max_epochs": 1, "accelerator": "cpu", **options}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [callback] if callback is not None else []
    trainer = L.Trainer(callbacks=callbacks, enable_checkpointing=False, **quiet, **options)
    trainer.fit(module, data, DataLoader(TensorDataset(torch.randn(8, 4)), 8), ckpt_path=resume, weights_only=True)
    return trainer


def made(manual: bool = False, bad_batch: int | None = None) -> Module:
    torch.manual_seed(0)
    return Module(manual=manual, bad_batch=bad_batch)


def test_accumulated_and_clipped_gradients_are_read_whole(tmp_path: Path) -> None:
    module, callback = made(), GradvitalsCallback(tmp_path / "run", config=QUIET)
    fit(module, callback, accumulate_grad_batches=2, gradient_clip_val=1e-3)
    run = gv.open_run(tmp_path / "run")
    steps, losses = run.series("loss")
    assert steps.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(losses, np.reshape(module.losses, (4, 2)).mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(run.series("grad/norm")[1], module.norms, rtol=1e-5)
    assert set(run.stage("grad/norm")[1]) == {"raw"}
    assert set(run.batch_sizes("grad/norm")[1]) == {16.0}
    assert [tensor.name for tensor in run.layout.tensors][:2] == ["net.0.weight", "net.0.bias"]
    assert run.series("clip/max_norm")[1].tolist() == pytest.approx([1e-3] * 4)
    assert run.meta["finished_at"] is not None


def test_weights_are_the_same_with_and_without_it(tmp_path: Path) -> None:
    watched, alone = made(), made()
    fit(watched, GradvitalsCallback(tmp_path / "run", config=QUIET), gradient_clip_val=0.1)
    fit(alone, None, gradient_clip_val=0.1)
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), alone.parameters(), strict=True))


def test_manual_optimisation_with_two_optimizers(tmp_path: Path) -> None:
    module = made(manual=True)
    fit(module, GradvitalsCallback(tmp_path / "run", config=QUIET))
    run = gv.open_run(tmp_path / "run")
    np.testing.assert_allclose(run.series("loss")[1], module.losses, rtol=1e-6)
    np.testing.assert_allclose(run.series("grad/norm")[1], module.norms, rtol=1e-5)
    assert set(run.stage("grad/norm")[1]) == {"raw"}


def test_16_mixed_is_read_unscaled(tmp_path: Path) -> None:
    module, scaler = made(), torch.amp.GradScaler("cpu", init_scale=4096.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    fit(module, GradvitalsCallback(tmp_path / "run", config=QUIET), plugins=[plugin], gradient_clip_val=1e-3)
    run = gv.open_run(tmp_path / "run")
    np.testing.assert_allclose(run.series("loss")[1], module.losses, rtol=1e-5)
    np.testing.assert_allclose(run.series("grad/norm")[1], module.norms, rtol=1e-3)
    assert set(run.stage("grad/norm")[1]) == {"unscaled"}


def test_a_resumed_trainer_continues_the_record(tmp_path: Path) -> None:
    first = GradvitalsCallback(tmp_path / "run", config=QUIET)
    fit(made(), first).save_checkpoint(tmp_path / "one.ckpt")
    fit(made(), GradvitalsCallback(config=QUIET), resume=tmp_path / "one.ckpt", max_epochs=2)
    run = gv.open_run(tmp_path / "run")
    assert run.series("loss")[0].tolist() == list(range(16))
    assert len(run.segments) == 2


def test_a_guard_leaves_a_step_out_that_the_trainer_makes_with_a_closure(tmp_path: Path) -> None:
    module = made(bad_batch=5)
    trainer = fit(module, GradvitalsCallback(tmp_path / "run", config=QUIET, guard=gv.Guard(mode="act")))
    assert "step" not in vars(trainer.optimizers[0])  # it has its own back
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    run = gv.open_run(tmp_path / "run")
    assert [(action.kind, action.step, action.taken) for action in run.actions][:1] == [("skip", 5, True)]
    assert run.series("loss")[0].tolist() == list(range(8))


def test_values_go_into_the_logs_where_asked_for(tmp_path: Path) -> None:
    class Flushed(GradvitalsCallback):
        def on_train_batch_end(self, *args: Any) -> None:
            assert self.monitor is not None
            self.monitor.flush()
            super().on_train_batch_end(*args)

    callback = Flushed(tmp_path / "run", config=QUIET, log=True)
    metrics = fit(made(), callback, batches=2, accumulate_grad_batches=2).callback_metrics
    logged = gv.open_run(tmp_path / "run").series("grad/norm")[1][-1]
    assert float(metrics["gradvitals/grad/norm"]) == pytest.approx(logged, rel=1e-6)


def test_an_error_is_kept_with_the_run_and_not_printed_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = made()
    module.validation_step = lambda batch, batch_idx: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        fit(module, GradvitalsCallback(tmp_path / "run"), num_sanity_val_steps=0)
    assert [finding.id for finding in gv.open_run(tmp_path / "run").findings][-1:] == ["training_stopped"]
    assert "ZeroDivisionError" not in capsys.readouterr().err  # Python shows it, in the traceback
