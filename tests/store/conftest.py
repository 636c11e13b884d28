from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradvitals.types import Layout, Reading, TensorInfo


@pytest.fixture
def make_layout() -> Callable[..., Layout]:
    def make(*names: str, layers: tuple[str, ...] = (), heads: tuple[str, ...] = ()) -> Layout:
        tensors = tuple(
            TensorInfo(index=i, name=name, shape=(2, i), dtype="float32", layer="block", depth=0)
            for i, name in enumerate(names)
        )
        return Layout(tensors=tensors, layers=layers, heads=heads)

    return make


@pytest.fixture
def make_reading() -> Callable[..., Reading]:
    """Readings of three tensors whose numbers tell their step: ``grad/norm`` is step + 0.25 * row."""

    def make(step: int, **changes: Any) -> Reading:
        content: dict[str, Any] = {
            "values": {"loss": 2.0 * step},
            "tensors": {"grad/norm": step + 0.25 * np.arange(3), "weight/norm": np.full(3, -1.0 * step)},
        }
        return Reading(**{"step": step, "time": 100.0 + step, **content, **changes})

    return make
