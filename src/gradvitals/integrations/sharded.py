"""Models that `fully_shard` has sharded: their parameters are others while they are gathered for a forward pass."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def sharded_modules(model: nn.Module) -> list[Any]:
    """The parts of a model that are sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return [module for module in model.modules() if isinstance(module, kind)] if kind is not None else []


def class_name(module: nn.Module) -> str:
    """The class that a module had before it was sharded, which makes a class of its own for it."""
    kind = type(module)
    return kind.__bases__[-1].__name__ if module in sharded_modules(module) else kind.__name__


def show_shards(model: nn.Module) -> None:
    """Have a model show the parameters that its optimizer steps.

    After a forward pass the outermost part still holds gathered ones, whose memory is freed later. They are gathered
    again when they are needed. Not to be called between a forward pass and its backward pass.
    """
    for module in sharded_modules(model):
        module.reshard()
