"""Zero-code watching in this process, and a look at what it leaves behind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.nn.modules import module as modules
from torch.optim import optimizer as optim

from gradvitals.integrations.zero_code.program import Settings
from gradvitals.integrations.zero_code.watcher import Hooks, Watcher

sys.path.insert(0, str(Path(__file__).parent))
collect_ignore_glob = ["scripts/*"]
"""Run by tests, in processes of their own."""


@pytest.fixture
def zero_code(tmp_path: Path) -> Iterator[Callable[..., Watcher]]:
    """Listens to torch in this process as `gradvitals run` does, until the test is over."""
    hooks: list[Hooks] = []
    if "torch._dynamo.utils" in sys.modules:  # what other tests have compiled is not compiled in this program
        sys.modules["torch._dynamo.utils"].counters.clear()

    def install(**settings: Any) -> Watcher:
        given = {"run": tmp_path / "run", "program": "test", "every": 1, "quiet": True, **settings}
        watcher = Watcher(Settings(**given))
        hooks.append(Hooks(watcher))
        hooks[-1].install()
        return watcher

    yield install
    for one in hooks:
        one.remove()
        one._watcher.close(None)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No test leaves a hook on all modules of the process."""
    yield
    assert not [name for name, hooks in vars(modules).items() if name.startswith("_global_") and hooks]
    assert not optim._global_optimizer_pre_hooks
