"""How a loss function wants to be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from gradvitals.errors import GradvitalsError

MODEL_NAMES = ("model", "net", "network", "module")
BATCH_NAMES = ("batch", "data", "examples", "samples")

Form = Literal["output, target", "output", "model, batch", "own"]
"""How the loss is called; `own` is a model that gives its loss itself."""


def form_of(loss_fn: Callable[..., Any] | None) -> Form:
    """How a loss function wants to be called, by its signature.

    Returns:
        ``own`` for None; ``model, batch`` where the first argument is called `model`, `net`, `network` or `module`, or
        is annotated as a module; ``output`` for a function of one argument; else ``output, target``.

    Example:
        >>> form_of(nn.MSELoss()), form_of(lambda model, batch: model(batch).mean()), form_of(None)
        ('output, target', 'model, batch', 'own')
    """
    if loss_fn is None:
        return "own"
    if not callable(loss_fn):
        raise GradvitalsError(
            f"loss_fn is {loss_fn!r}; expected loss_fn(output, target), loss_fn(model, batch), or None for a model "
            "that gives its own loss"
        )
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise GradvitalsError(f"loss_fn is the class {loss_fn.__name__}; expected one of it: {loss_fn.__name__}()")
    if isinstance(loss_fn, nn.Module):
        return "output, target"
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):  # a function that is not written in Python
        return "output, target"
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not placed and variadic:
        return "output, target"
    required = [p.name for p in placed if p.default is p.empty]
    if not placed or len(required) > 2:
        raise GradvitalsError(
            f"loss_fn takes {', '.join(required) or 'no arguments'}; expected loss_fn(output, target) or "
            "loss_fn(model, batch)"
        )
    annotation = placed[0].annotation
    is_module = isinstance(annotation, type) and issubclass(annotation, nn.Module)
    if placed[0].name in MODEL_NAMES or is_module or str(annotation).endswith("Module"):
        return "model, batch"
    if len(placed) == 1 and placed[0].name in BATCH_NAMES and not variadic:
        raise GradvitalsError(
            f"loss_fn takes one argument, {placed[0].name}, and would get the model's output; expected "
            f"loss_fn(model, {placed[0].name}) for a loss that reads the batch itself"
        )
    return "output" if len(placed) == 1 and not variadic else "output, target"
