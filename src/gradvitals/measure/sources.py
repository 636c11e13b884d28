"""Which sources of GSNR a run cannot have, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from gradvitals.config import Config
from gradvitals.measure.moments import unavailable_reason
from gradvitals.measure.ranks.fsdp import why_no_parts


def missing_sources(
    config: Config, optimizers: Sequence[torch.optim.Optimizer], model: nn.Module
) -> Iterator[tuple[str, str]]:
    """What was asked for and is known from the start not to be there: the source in words, and the reason."""
    if "gsnr" not in config.metrics:
        return
    if "adam" in config.sources:
        for reason in dict.fromkeys(filter(None, map(unavailable_reason, optimizers))):
            yield "the optimizer's moments", reason
    hidden = why_no_parts(model)
    if {"microbatch", "ranks"} & set(config.sources) and hidden is not None:
        yield "micro-batches", hidden
