"""What `gradvitals run` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `gradvitals run`."""

    run: Path
    """Where to keep the run."""
    program: str
    """What is run, for those who read about it later."""
    every: int = 50
    """Steps from one per-tensor reading to the next."""
    sinks: tuple[str, ...] = ()
    alerts: tuple[str, ...] = ()
    quiet: bool = False
