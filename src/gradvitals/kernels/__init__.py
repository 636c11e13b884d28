"""Triton kernels that process many tensors per launch, on NVIDIA GPUs. Importing this package needs neither.

`usable` returns whether kernels can read a tensor; `ready` imports a module of kernels. Every caller also has an
implementation in plain torch, with equal results.
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
"""The sums that kernels read. They sum in float32 within a chunk and in float64 across chunks."""


class _State:
    interpreted = False
    """Set by tests: CPU tensors go through Triton's interpreter."""
    broken: ClassVar[dict[str, str]] = {}
    """Modules whose kernels failed to compile or launch, with the error. They are not tried again."""


def ready(name: str) -> ModuleType | None:
    """Return a module of kernels by name; None if there is no Triton, or the module failed before."""
    return None if name in _State.broken else _import(name)


@cache
def _import(name: str) -> ModuleType | None:
    try:
        return import_module(f"gradvitals.kernels.{name}")
    except ImportError:
        return None


def give_up(name: str, error: Exception, instead: str) -> None:
    """Stop using a module whose kernels failed (no compiler, an old device), and warn once per error."""
    if str(error) not in _State.broken.values():
        warnings.warn(f"{instead}, without kernels, which failed: {error}", stacklevel=3)
    _State.broken[name] = str(error)


def on_device(tensor: Tensor) -> bool:
    """Return whether kernels can reach a tensor."""
    return (tensor.is_cuda and torch.version.hip is None) or (_State.interpreted and tensor.device.type == "cpu")


def usable(tensor: Tensor) -> bool:
    """Return whether kernels can read a tensor: dense, without gaps, on a supported device, of a supported dtype."""
    return (
        on_device(tensor)
        and tensor.dtype in DTYPES
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and (tensor.is_contiguous() or is_gapless(tensor))
    )


def is_gapless(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill one contiguous range of memory, in any order."""
    expected = 1
    places = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    for stride, size in places:
        if stride != expected:
            return False
        expected *= size
    return True
