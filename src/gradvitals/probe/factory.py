"""The arguments of `gv.probe` from a function, for `gradvitals probe`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradvitals.errors import GradvitalsError
from gradvitals.probe.examination import probe

PLACES = ("model", "loader", "loss_fn", "optimizer")
WANTED = "(model, loader), (model, loader, loss), (model, loader, loss, optimizer) or a dict of arguments of gv.probe"


def made_by(path: str, device: str | None = None) -> dict[str, Any]:
    """Returns the arguments of `gv.probe` that a factory function makes; finds modules in the current folder too.

    Args:
        path: ``package.module:function``.
        device: ``cpu``, ``cuda`` or ``auto`` to move the model there.

    Raises:
        GradvitalsError: when there is no such function, or it returns something else.
    """
    made = _function(path)()
    if isinstance(made, Mapping):
        arguments = {str(key): value for key, value in made.items()}
    elif isinstance(made, (tuple, list)) and 2 <= len(made) <= len(PLACES):
        arguments = dict(zip(PLACES, made, strict=False))
    else:
        raise GradvitalsError(f"{path} returned {type(made).__name__}; expected {WANTED}")
    if not isinstance(arguments.get("model"), nn.Module) or "loader" not in arguments:
        got = type(arguments.get("model")).__name__
        raise GradvitalsError(f"{path} returned a model of type {got}; expected {WANTED}, with a torch.nn.Module first")
    known = list(inspect.signature(probe).parameters)
    unknown = [key for key in arguments if key not in known]
    if unknown:
        raise GradvitalsError(
            f"{path} returned a dict with the key {unknown[0]!r}; expected some of {', '.join(known)}"
        )
    if device is not None:
        arguments["model"].to(_device(device))
    return arguments


def _function(path: str) -> Any:
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise GradvitalsError(f"the factory is {path!r}; expected package.module:function, e.g. train:make_probe")
    if module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise GradvitalsError(f"the factory is {path!r}; expected the module without .py: {dotted}:{name}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise GradvitalsError(
            f"there is no module {error.name!r} to import {path!r} from; expected it in {here} or installed"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise GradvitalsError(f"{module_name} has no function {name!r}; expected one that returns {WANTED}")
    needed = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise GradvitalsError(
            f"{path} takes {', '.join(needed)}; expected a function without arguments that returns {WANTED}"
        )
    return function


def _device(name: str) -> str:
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise GradvitalsError("device is cuda and torch finds no GPU here; expected cpu or auto")
    return ("cuda" if has_gpu else "cpu") if name == "auto" else name
