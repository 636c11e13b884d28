"""The rules, one module per family. Importing this package registers them."""

from gradvitals.diagnose.rules import (
    batch,
    clipping,
    gradients,
    loop,
    loss,
    precision,
    ranks,
    scale,
    schedule,
    setup,
    signal,
    updates,
)

__all__ = [
    "batch",
    "clipping",
    "gradients",
    "loop",
    "loss",
    "precision",
    "ranks",
    "scale",
    "schedule",
    "setup",
    "signal",
    "updates",
]
