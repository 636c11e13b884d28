"""gradvitals: vital signs for neural-network training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradvitals import (
        advise,
        alerts,
        diagnose,
        functional,
        guard,
        multipliers,
        optim,
        schedules,
        sinks,
        testing,
        types,
    )
    from gradvitals.config import Config
    from gradvitals.guard import Guard
    from gradvitals.monitor import Monitor, watch
    from gradvitals.probe import probe
    from gradvitals.report.diff import diff
    from gradvitals.report.verdict import Verdict
    from gradvitals.store.reader import Run, open_run
    from gradvitals.types import Action, Finding, Reading

__version__ = "0.1.0"

__all__ = [
    "Action",
    "Config",
    "Finding",
    "Guard",
    "Monitor",
    "Reading",
    "Run",
    "Verdict",
    "__version__",
    "advise",
    "alerts",
    "diagnose",
    "diff",
    "functional",
    "guard",
    "multipliers",
    "open_run",
    "optim",
    "probe",
    "schedules",
    "sinks",
    "testing",
    "types",
    "watch",
]

# Names are looked up on first use, so that reading a run, or `gradvitals --help`, never imports torch.
_HOMES = {
    "Action": "gradvitals.types",
    "Config": "gradvitals.config",
    "Finding": "gradvitals.types",
    "Guard": "gradvitals.guard",
    "Monitor": "gradvitals.monitor",
    "Reading": "gradvitals.types",
    "Run": "gradvitals.store.reader",
    "Verdict": "gradvitals.report.verdict",
    "diff": "gradvitals.report.diff",
    "open_run": "gradvitals.store.reader",
    "watch": "gradvitals.monitor",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in (
        "advise", "alerts", "diagnose", "functional", "guard", "multipliers", "optim", "probe", "schedules", "sinks",
        "testing", "types",
    ):  # fmt: skip
        return importlib.import_module(f"gradvitals.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gradvitals' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
