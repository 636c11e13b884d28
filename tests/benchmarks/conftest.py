"""Processes of the lab that have torch when they begin, for tests that are not about how they begin."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any

import pytest
import warm_process

from benchmarks.distributed import launch


@pytest.fixture
def warm_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks for spawned processes gets forks of the one that has torch: as clean as those, seconds earlier."""
    usual = multiprocessing.get_context

    def get_context(method: str | None = None) -> Any:
        return warm_process.context() if method == "spawn" else usual(method)

    def parent() -> int:
        warm_process.context()
        return int(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]

    monkeypatch.setattr(multiprocessing, "get_context", get_context)
    monkeypatch.setattr(launch, "os", SimpleNamespace(**{**vars(os), "getpid": parent}))  # whose children they are
