"""Examine a model and its data offline: `gv.probe(model, loader, loss_fn)`.

The package is callable, so that `gradvitals.probe` is both the function and the place where its parts live.
"""

from __future__ import annotations

import sys
from types import ModuleType

from gradvitals.probe.data import Names
from gradvitals.probe.examination import QUESTIONS, Probe, probe

__all__ = ["QUESTIONS", "Names", "Probe", "probe"]


class _Callable(ModuleType):
    __call__ = staticmethod(probe)


# Importing a part, such as gradvitals.probe.saliency, makes Python put this package where the function was.
sys.modules[__name__].__class__ = _Callable
