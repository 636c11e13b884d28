"""A callback for the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gradvitals.integrations.backward import BackwardPasses, newest
from gradvitals.monitor import Monitor, watch
from gradvitals.worker.worker import print_line


class GradvitalsCallback(TrainerCallback):
    """Watches what a Trainer trains: ``Trainer(..., callbacks=[GradvitalsCallback(run="runs/mine")])``.

    Gradients are read unscaled and before the Trainer clips them. The loss is the sum over the backward passes
    of a step; the Trainer has divided each, so it is the mean over the step's batch. The Monitor's state is a file in
    the Trainer's checkpoints, so `train(resume_from_checkpoint=...)` continues the run.

    Args:
        run: Folder to keep the run in, as for `gradvitals.watch`.
        batch_size: Samples per optimizer step of this process; None takes it from the TrainingArguments.
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
        self.monitor: Monitor | None = None
        """The Monitor, once training has started."""
        self._options = {"run": run, **options}
        self._batch_size = batch_size
        self._log = log
        self._backwards = BackwardPasses(self._after_backward)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start watching, or continue from the checkpoint."""
        self._close()
        samples = self._batch_size or args.train_batch_size * args.gradient_accumulation_steps
        self.monitor = watch(kwargs["model"], kwargs["optimizer"], batch_size=samples, **self._options)
        self.monitor.recorder.add_up_losses()
        if not _restore(self.monitor, _state_file(args, state)) and state.global_step:
            self.monitor.recorder.start(state.global_step)
        self._backwards.start()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the Monitor's state beside the Trainer's."""
        file = _state_file(args, state)
        if self.monitor is not None and file.parent.is_dir():
            fresh = file.with_suffix(".new")
            try:
                torch.save(self.monitor.state_dict(), fresh)
                fresh.replace(file)  # a kill meanwhile leaves no partial file
            except Exception as error:  # such as a full disk; the Trainer must continue to save
                print_line(f"{file} could not be written: {type(error).__name__}: {error}", self.monitor.config.quiet)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the newest values to the Trainer's logs."""
        if self._log and self.monitor is not None and logs is not None and "loss" in logs:
            found = newest(self.monitor)
            logs |= found
            if state.log_history:
                state.log_history[-1] |= found

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Training is over."""
        self._close()

    def _after_backward(self, loss: Tensor | None) -> None:
        if self.monitor is not None:
            self.monitor.observe(loss)

    def _close(self) -> None:
        self._backwards.stop()
        if self.monitor is not None:
            self.monitor.close()


def _restore(monitor: Monitor, file: Path) -> bool:
    """Continue from a checkpoint. Returns whether that was possible; training continues either way."""
    if not file.is_file():
        return False
    try:
        monitor.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:
        print_line(f"{file} cannot be read, so the record starts anew: {type(error).__name__}", monitor.config.quiet)
        return False
    return True


def _state_file(args: TrainingArguments, state: TrainerState) -> Path:
    """Returns the file of this process in the Trainer's checkpoint of this step."""
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}" / f"gradvitals_{args.process_index}.pt"
