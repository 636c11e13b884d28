"""Integrations on a GPU, where losses are really scaled: readings are unscaled, before clipping, with the loss."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradvitals as gv

pytestmark = pytest.mark.gpu

QUIET = gv.Config(quiet=True, tensor_every=1)


@pytest.fixture(autouse=True)
def third_party_warnings() -> Iterator[None]:
    """Frameworks warn of settings and deprecations of their own, which are not what is tested here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()


def check(run: gv.Run, losses: list[float], norms: list[float]) -> None:
    """Compare a run with what the loop itself has seen."""
    np.testing.assert_allclose(run.series("loss")[1], losses, rtol=1e-3)
    np.testing.assert_allclose(run.series("grad/norm")[1], norms, rtol=1e-3)
    assert set(run.stage("grad/norm")[1]) == {"unscaled"}


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "re-entrant checkpoints"])
def test_zero_code_with_a_scaler(tmp_path: Path, reentrant: bool) -> None:
    """A re-entrant checkpoint goes backward in a thread of torch's, within the pass of the loop."""
    from gradvitals.integrations.zero_code.program import Settings
    from gradvitals.integrations.zero_code.watcher import Hooks, Watcher

    watcher = Watcher(Settings(run=tmp_path / "run", program="test", every=1, quiet=True))
    hooks = Hooks(watcher)
    hooks.install()
    try:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        losses, norms = [], []
        for _ in range(6):
            with torch.autocast("cuda", torch.float16):
                x = torch.randn(32, 16, device="cuda", requires_grad=reentrant)
                y = checkpoint(model, x, use_reentrant=True) if reentrant else model(x)
                loss = y.float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    finally:
        hooks.remove()
        watcher.close(None)
    run = gv.open_run(tmp_path / "run")
    check(run, losses, norms)
    assert run.meta["facts"]["autocast"] == "float16"
    if not reentrant:  # what a checkpoint calls without gradients is not counted as samples
        assert run.batch_sizes("grad/norm")[1][-1] == 32


def test_lightning_16_mixed(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from gradvitals.integrations.lightning import GradvitalsCallback

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.losses: list[float] = []
            self.norms: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(batch).float().square().mean()
            self.losses.append(loss.item())
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    module, data = Module(), torch.utils.data.DataLoader(torch.randn(192, 16), 32)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="gpu",
        devices=1,
        precision="16-mixed",
        gradient_clip_val=1e-3,
        callbacks=[GradvitalsCallback(tmp_path / "run", config=QUIET)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    run = gv.open_run(tmp_path / "run")
    # A first scale of 65,536 may be too large: such steps are skipped, and their norms are not numbers.
    np.testing.assert_allclose(run.series("loss")[1], module.losses, rtol=1e-3)
    fine = np.isfinite(module.norms)
    np.testing.assert_allclose(run.series("grad/norm")[1][fine], np.array(module.norms)[fine], rtol=1e-3)
    assert set(run.stage("grad/norm")[1]) == {"unscaled"}


def test_transformers_fp16(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from gradvitals.integrations.transformers import GradvitalsCallback

    class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            row = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": row, "labels": row}

    transformers.set_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=32, n_layer=1, n_head=2)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=0.1,
        fp16=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Tokens(),
        callbacks=[GradvitalsCallback(tmp_path / "run", config=QUIET)],
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    run = gv.open_run(tmp_path / "run")
    np.testing.assert_allclose(run.series("loss")[1], [log["loss"] for log in logs], rtol=1e-3)
    norms = np.array([log["grad_norm"] for log in logs])
    fine = np.isfinite(norms)
    np.testing.assert_allclose(run.series("grad/norm")[1][fine], norms[fine], rtol=1e-3)
    assert set(run.stage("grad/norm")[1]) == {"unscaled"}


def test_accelerate_fp16(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from gradvitals.integrations.accelerate import watch

    accelerator = accelerate.Accelerator(mixed_precision="fp16")
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    monitor = watch(accelerator, model, optimizer, run=tmp_path / "run", batch_size=32, config=QUIET)
    losses, norms = [], []
    for _ in range(6):
        loss = model(torch.randn(32, 16, device="cuda")).float().square().mean()
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e-3)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    monitor.close()
    run = gv.open_run(tmp_path / "run")
    np.testing.assert_allclose(run.series("loss")[1], losses, rtol=1e-3)
    fine = np.isfinite(norms)
    np.testing.assert_allclose(run.series("grad/norm")[1][fine], np.array(norms)[fine], rtol=1e-3)
    assert set(run.stage("grad/norm")[1]) == {"unscaled"}
