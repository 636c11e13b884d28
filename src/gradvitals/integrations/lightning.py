"""A callback for Lightning's Trainer."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradvitals.integrations.backward import newest, show_shards
from gradvitals.monitor import Monitor, watch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the same under its older name
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]


class GradvitalsCallback(Callback):
    """Watches what a Trainer trains: ``Trainer(callbacks=[GradvitalsCallback(run="runs/mine")])``.

    Gradients are read unscaled and before the Trainer clips them. The loss is the one that `training_step` returns;
    with manual optimization, the sum of those passed to `manual_backward` in a step. The Trainer's checkpoints hold
    the callback's state, so `trainer.fit(ckpt_path=...)` continues the run.

    Args:
        run: Folder to keep the run in, as for `gradvitals.watch`.
        batch_size: Samples per optimizer step of this process; None counts the samples of each batch.
        log: Whether to add the newest gradient norm, GSNR and noise scale to the Trainer's logs, as ``gradvitals/...``.
        options: As for `gradvitals.watch`: config, guard, sinks, alerts and so on.
    """

    def __init__(
        self,
        run: str | Path | None = None,
        *,
        batch_size: float | None = None,
        log: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.monitor: Monitor | None = None
        """The Monitor, once training has started."""
        self._options = {"run": run, "batch_size": batch_size, **options}
        self._log = log
        self._loss: Tensor | None = None
        self._samples: int | None = None
        self._state: dict[str, Any] | None = None
        self._unwrap: list[Callable[[], None]] = []

    # -- start and end ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start watching: optimizers exist, the checkpoint is loaded, the sanity check is over."""
        model = trainer.strategy.model if trainer.strategy.model is not None else pl_module
        show_shards(model)  # the sanity check may have gathered parameters
        self.monitor = watch(model, trainer.optimizers, **self._options)
        if not pl_module.automatic_optimization:
            self.monitor.recorder.add_up_losses()
        if self._state is not None:
            self.monitor.load_state_dict(self._state)
            self._state = None
        if self._options.get("guard") is not None:
            self._unwrap = [_evaluate_first(optimizer) for optimizer in trainer.optimizers]

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Training ended with an error or was interrupted."""
        self._close(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Training is over, and its last checkpoint is written."""
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        while self._unwrap:  # before the Guard restores the optimizers' own steps
            self._unwrap.pop()()
        if self.monitor is not None:
            self.monitor.close(error)

    # -- in the loop --------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the samples."""
        sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0}
        self._samples = sizes.pop() if len(sizes) == 1 and self._options["batch_size"] is None else None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Keep the loss, unscaled."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = getattr(scaler, "_scale", None)
        self._loss = loss.detach() if scale is None else loss.detach() / scale.to(loss.device)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Observe the loss, now that the gradients exist."""
        if self.monitor is None or self._loss is None:
            return
        if pl_module.automatic_optimization:  # the Trainer has divided it
            self.monitor.observe(self._loss * trainer.accumulate_grad_batches, batch_size=self._samples)
        else:
            self.monitor.observe(self._loss)
        self._loss = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the newest values to the Trainer's logs."""
        if self._log and self.monitor is not None:
            found = newest(self.monitor)
            pl_module.log_dict(found, on_step=True, on_epoch=False, rank_zero_only=True, batch_size=1)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return self.monitor.state_dict() if self.monitor is not None else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a checkpoint when training starts."""
        self._state = dict(state_dict) or None


def _evaluate_first(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Make an optimizer evaluate the Trainer's closure before its step, so that a Guard sees a plain step.

    Torch's optimizers do the same, except LBFGS, which evaluates it repeatedly and stays as it is. Returns a function
    that undoes the change.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return lambda: None
    guarded = optimizer.step

    @functools.wraps(guarded)
    def step(_: torch.optim.Optimizer, closure: Any = None) -> Any:
        if closure is None:
            return guarded()
        with torch.enable_grad():
            loss = closure()
        guarded()
        return loss

    replacement = types.MethodType(step, optimizer)
    optimizer.step = replacement  # type: ignore[method-assign]

    def undo() -> None:
        if vars(optimizer).get("step") is replacement:  # else someone has wrapped it since
            optimizer.step = guarded  # type: ignore[method-assign]

    return undo
