"""Diagnosis of a kept run: its readings, step by step, shown to the rules of today."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

from gradvitals.diagnose import RULES, Diagnosis, RunInfo
from gradvitals.store.reader import Run
from gradvitals.types import Finding, Reading

OnStep = Callable[[int], None]
"""Called with the number of each step that was judged."""


@dataclass(frozen=True, kw_only=True)
class Again:
    """What the rules of today find in a kept run."""

    findings: tuple[Finding, ...]
    failed: Mapping[str, str]
    """Rules that ended in an error of their own, and the error."""


def diagnose_again(run: Run, on_step: OnStep | None = None) -> Again:
    """Show every kept reading to the rules, with the settings the run was recorded with.

    Values of single tensors are kept more rarely than a live run has them, so what needs them is seen later or not
    at all.
    """
    failed: dict[str, str] = {}

    def on_error(rule: str, error: Exception) -> None:
        failed[rule] = repr(error)

    meta = run.meta
    facts = RunInfo.from_json(meta.get("facts") or {})
    diagnosis = Diagnosis(info=facts, settings=usable_settings(recorded_settings(meta)), on_error=on_error)
    diagnosis.describe(run.layout)
    has_norms, last_step = "grad/norm" in run.metrics("values"), run.last_step
    for step, grouped in groupby(run.readings(), key=_step):
        readings = list(grouped)
        if step == last_step and has_norms and not any("grad/norm" in reading.values for reading in readings):
            continue  # it was passed over, and is there for its number and its loss: nobody has judged it
        diagnosis.read(readings)
        if on_step is not None:
            on_step(step)
    if not run.is_live:
        diagnosis.finish()
    return Again(findings=tuple(diagnosis.findings), failed=failed)


def was_diagnosed(meta: Mapping[str, Any]) -> bool:
    """Whether the run was judged while it was recorded."""
    config = meta.get("config")
    wanted = config.get("diagnose", True) if isinstance(config, Mapping) else True
    return "facts" in meta and wanted is not False


def recorded_settings(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of rules that the run was recorded with."""
    config = meta.get("config")
    settings = config.get("rules") if isinstance(config, Mapping) else None
    return dict(settings) if isinstance(settings, Mapping) else {}


def usable_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of them that the rules of today have: another version, or a rule of one's own, may have had others."""
    usable: dict[str, Any] = {}
    for name, chosen in settings.items():
        if name in RULES and isinstance(chosen, bool):
            usable[name] = chosen
        elif name in RULES and isinstance(chosen, Mapping):
            known = {f.name for f in fields(RULES[name]) if f.init}  # type: ignore[arg-type]
            usable[name] = {key: value for key, value in chosen.items() if key in known}
    return usable


def _step(reading: Reading) -> int:
    return reading.step
