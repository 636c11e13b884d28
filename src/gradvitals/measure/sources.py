"""Which sources of GSNR a run cannot have, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gradvitals.config import Config
from gradvitals.measure.moments import unavailable_reason
from gradvitals.measure.sentinel import is_distributed


def missing_sources(config: Config, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, str]]:
    """What was asked for and is known from the start not to be there: the source in words, and the reason."""
    if "gsnr" not in config.metrics:
        return
    if "adam" in config.sources:
        for reason in dict.fromkeys(filter(None, map(unavailable_reason, optimizers))):
            yield "the optimizer's moments", reason
    if "microbatch" in config.sources and is_distributed():
        yield "micro-batches", "gradients are shared between processes, which this version does not tell apart"
