"""gradvitals in a loop that Accelerate has prepared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradvitals import monitor as monitoring
from gradvitals.integrations.backward import BackwardPasses
from gradvitals.monitor import Monitor

if TYPE_CHECKING:
    from accelerate import Accelerator


def watch(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    checkpoint: bool = True,
    **options: Any,
) -> Monitor:
    """Watch a model and an optimizer that `accelerator.prepare` returned.

    The loop needs no `observe`: the loss is the sum over the `accelerator.backward` calls of a step, which divide it by
    the number of micro-batches.

    Args:
        accelerator: The Accelerator of the loop.
        model: The prepared model.
        optimizer: The prepared optimizer or optimizers.
        checkpoint: Whether `accelerator.save_state` and `load_state` keep and restore the Monitor's state too.
        options: As for `gradvitals.watch`: run, config, batch_size, guard, sinks, alerts and so on.

    Returns:
        The Monitor. Close it, or let it close with the program; it then prints the verdict to stderr.
    """
    monitor = monitoring.watch(model, optimizer, **options)
    monitor.recorder.add_up_losses()
    backwards = BackwardPasses(monitor.observe)
    monitor.at_close(backwards.stop)
    backwards.start()
    if checkpoint:
        accelerator.register_for_checkpointing(monitor)
    return monitor
