"""Where an experiment runs."""

from __future__ import annotations

import torch

from gradvitals.errors import GradvitalsError


def pick_device(name: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` is a GPU where there is one.

    Raises:
        GradvitalsError: when there is no GPU and one was asked for.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise GradvitalsError("device is cuda and torch finds no GPU here; expected cpu or auto")
    return ("cuda" if has_gpu else "cpu") if name == "auto" else name
