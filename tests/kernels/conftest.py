"""Kernels run on a GPU if there is one, and otherwise in Triton's interpreter: slow, but the same logic."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from gradvitals import kernels

sys.path.insert(0, str(Path(__file__).parent))

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Return the device that the kernels run on."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    from interpreted_faster import interpreted_faster

    monkeypatch.setattr(kernels._State, "interpreted", True)
    with interpreted_faster():
        yield torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_given_up() -> Iterator[None]:
    """A kernel that fails must fail its test, not be replaced by torch."""
    yield
    assert not kernels._State.broken
