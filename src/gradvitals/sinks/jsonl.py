"""JSONL: one line of JSON for each step, finding and action, for scripts and `tail -f`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from gradvitals.sinks.sink import Sink
from gradvitals.types import Action, Finding, json_ready


class JSONL(Sink):
    """Appends to a file. Numbers that JSON cannot hold are the strings "nan", "inf" and "-inf".

    Args:
        path: The file; its folder is made if needed.

    Lines are ``{"step": 3, "time": 1700000000.0, "metrics": {"loss": 0.5, ...}}``, ``{"finding": {...}, "time": ...}``
    and ``{"action": {...}, "time": ...}``.
    """

    in_worker = True

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[str] | None = None

    def __repr__(self) -> str:
        return f"JSONL({str(self.path)!r})"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One line for a step."""
        self._write({"step": step, "metrics": metrics})

    def finding(self, finding: Finding) -> None:
        """One line for a finding, each time it changes."""
        self._write({"finding": finding.to_json()})

    def action(self, action: Action) -> None:
        """One line for an action."""
        self._write({"action": action.to_json()})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8", buffering=1)
        line = json.dumps(json_ready({**record, "time": time.time()}), allow_nan=False, default=str)
        self._file.write(line + "\n")
