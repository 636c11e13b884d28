"""Kernels run as they are on a GPU, and through Triton's interpreter where there is none: slow, but the same logic."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from gradvitals import kernels

sys.path.insert(0, str(Path(__file__).parent))

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the kernels run."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    from interpreted_faster import look_once_a_launch

    monkeypatch.setattr(kernels._State, "interpreted", True)
    look_once_a_launch(monkeypatch)
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_given_up() -> None:
    """A kernel that fails must fail its test, not be replaced by torch."""
    yield
    assert not kernels._State.broken
