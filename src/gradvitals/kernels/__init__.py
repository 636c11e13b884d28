"""Kernels that read many tensors in one launch, on NVIDIA GPUs with Triton. Importing this needs neither.

`usable` says whether they can be used for a tensor; `ready` imports them. Everything that uses them has a form in plain
torch beside it, with equal results.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels read; sums are kept in float32, and in float64 from one chunk to the next."""


class _State:
    interpreted = False
    """Set by tests: tensors in the host's memory go through Triton's interpreter."""
    broken: ClassVar[dict[str, str]] = {}
    """By module, why its kernels could not be compiled or launched; from then on nobody tries again."""


def ready(name: str) -> ModuleType | None:
    """The module of kernels of this name; None where there is no Triton, or it has failed before."""
    return None if name in _State.broken else _import(name)


@cache
def _import(name: str) -> ModuleType | None:
    try:
        return import_module(f"gradvitals.kernels.{name}")
    except ImportError:
        return None


def give_up(name: str, error: Exception, instead: str) -> None:
    """Kernels of a module have failed: no compiler, a device too old. Say so once, and do without from now on."""
    if str(error) not in _State.broken.values():
        warnings.warn(f"{instead}, without kernels, which failed: {error}", stacklevel=3)
    _State.broken[name] = str(error)


def on_device(tensor: Tensor) -> bool:
    """Whether a tensor is where kernels can reach it."""
    return (tensor.is_cuda and torch.version.hip is None) or (_State.interpreted and tensor.device.type == "cpu")


def usable(tensor: Tensor) -> bool:
    """Whether kernels can read this tensor as it lies in memory: dense, on a device of theirs, of a type they know."""
    return (
        on_device(tensor)
        and tensor.dtype in DTYPES
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and (tensor.is_contiguous() or is_gapless(tensor))
    )


def is_gapless(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill one stretch of memory, in whatever order."""
    expected = 1
    places = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    for stride, size in places:
        if stride != expected:
            return False
        expected *= size
    return True
