"""What must be known of a run before it is continued."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from gradvitals.errors import RunError
from gradvitals.store.reader import open_run


def run_id(path: Path) -> str | None:
    """The identity of the run kept at a path; None where there is none."""
    with contextlib.suppress(RunError), open_run(path) as run:
        return str(run.meta.get("run_id"))
    return None


def next_step(path: Path) -> int:
    """The step after the last one kept at a path, 0 where there is no run."""
    with contextlib.suppress(RunError), open_run(path) as run:
        return 0 if run.last_step is None else int(run.last_step) + 1
    return 0


def run_meta(path: Path) -> dict[str, Any]:
    """What is kept with the run at a path; nothing where there is none."""
    with contextlib.suppress(RunError), open_run(path) as run:
        return dict(run.meta)
    return {}
