"""The state of every random number generator that training may draw from."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


def random_state(devices: Iterable[torch.device]) -> dict[str, Any]:
    """Python's, numpy's and torch's generators, as plain values and tensors; no device is waited for."""
    cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    return {
        "python": random.getstate(),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state(),
        "cuda": {index: torch.cuda.get_rng_state(index) for index in cuda},
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put every generator back where `random_state` found it; devices that are not here any more are left out."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kept = state["numpy"]
    if kept is not None:
        key = kept["key"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", key, kept["pos"], kept["has_gauss"], kept["gauss"]))
    torch.set_rng_state(state["torch"])
    for index, value in state["cuda"].items():
        if torch.cuda.is_available() and index < torch.cuda.device_count():
            torch.cuda.set_rng_state(value, index)


def _numpy_state() -> dict[str, Any] | None:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    if state["bit_generator"] != "MT19937":  # somebody's own generator in place of numpy's
        return None
    key = torch.from_numpy(state["state"]["key"].astype(np.int64))
    return {
        "key": key,
        "pos": int(state["state"]["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }
