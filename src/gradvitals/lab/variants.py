"""What the cost of monitoring is measured for: settings of a Monitor, and what people write themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradvitals.config import Config
from gradvitals.lab.shapes import Training

WARM_UP_STEPS = 10
"""Bare steps before anything is timed: kernels are chosen, the optimizer makes its state."""

NUM_BINS = 64

MONITORED: dict[str, Config] = {
    "default": Config(quiet=True),
    "norms+gsnr every step": Config(tensor_every=1, metrics=("grad/norm", "gsnr"), quiet=True),
    "everything every step": Config(tensor_every=1, quiet=True),
}
"""Variants that attach a monitor."""


def norm_loop(training: Training) -> None:
    """What many loops do today: ask for the norm of each gradient, one by one."""
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.grad.norm().item()


def histograms(training: Training) -> None:
    """What `wandb.watch` and its like do: a histogram of each gradient, brought to the host one by one."""
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            torch.histc(parameter.grad.float(), bins=NUM_BINS).cpu()


BY_HAND: dict[str, Callable[[Training], None]] = {"norm loop": norm_loop, "histograms": histograms}
"""Variants that people write themselves."""

VARIANTS = (*MONITORED, *BY_HAND, "bare")
