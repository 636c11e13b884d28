"""The findings of a run: those recorded with it, or those of the current rules on its readings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

from gradvitals.diagnose import RULES, Diagnosis, RunInfo
from gradvitals.errors import RunError
from gradvitals.store.reader import Run
from gradvitals.types import Finding

OnStep = Callable[[int], None]
"""Called with the number of each step that is replayed."""

UNDIAGNOSED = "Recorded without diagnosis. `gradvitals doctor` judges the stored readings."


@dataclass(frozen=True)
class Diagnosed:
    """The findings of a run, and where they come from."""

    findings: tuple[Finding, ...]
    failed: frozenset[str] = frozenset()
    """Rules that raised an error."""
    replayed: str = ""
    """Why the readings were replayed; empty if the findings are those recorded with the run."""


def diagnose_run(run: Run, *, again: bool = False, on_step: OnStep | None = None) -> Diagnosed:
    """Returns the findings recorded with a run; if it was recorded without diagnosis, those of a replay.

    Raises:
        RunError: If the run has no readings.
    """
    if run.last_step is None:
        raise RunError(f"{run.path} has no readings yet; there is nothing to judge")
    meta, recorded = run.meta, run.findings
    undiagnosed = "" if was_diagnosed(meta) else "it was recorded without diagnosis"
    why = "as requested" if again else "it was imported" if "imported" in meta else undiagnosed
    if not why:
        failed = (str(finding.evidence.get("about")) for finding in recorded if finding.id == "monitor_error")
        return Diagnosed(tuple(recorded), frozenset(failed))
    replayed = replay(run, on_step)
    notices = [finding for finding in recorded if finding.id not in RULES]  # no reading shows how a run ended
    return replace(replayed, findings=(*notices, *replayed.findings), replayed=why)


def replay(run: Run, on_step: OnStep | None = None) -> Diagnosed:
    """Runs the current rules over every stored reading, with the settings the run was recorded with.

    Tensors are stored less often than a live run reads them, so some findings come later or not at all.
    """
    failed: set[str] = set()
    settings = {name: chosen for name, chosen in recorded_settings(run.meta).items() if name in RULES}
    for name, chosen in settings.items():  # another version, or a user's own rule, may have had other settings
        if isinstance(chosen, Mapping):
            names = {f.name for f in fields(RULES[name]) if f.init}  # type: ignore[arg-type]
            settings[name] = {key: value for key, value in chosen.items() if key in names}
    info = RunInfo.from_json(run.meta.get("facts") or {})
    diagnosis = Diagnosis(info=info, settings=settings, on_error=lambda rule, error: failed.add(rule))
    diagnosis.describe(run.layout)
    has_norms, last_step = "grad/norm" in run.metrics("values"), run.last_step
    for step, grouped in groupby(run.readings(), key=lambda reading: reading.step):
        readings = list(grouped)
        if step == last_step and has_norms and not any("grad/norm" in reading.values for reading in readings):
            continue  # a skipped step, stored for its number and loss alone: no live run judged it either
        diagnosis.read(readings)
        if on_step is not None:
            on_step(step)
    if not run.is_live:
        diagnosis.finish()
    return Diagnosed(tuple(diagnosis.findings), frozenset(failed))


def was_diagnosed(meta: Mapping[str, Any]) -> bool:
    """Returns whether rules ran while the run was recorded."""
    return "facts" in meta and (meta.get("config") or {}).get("diagnose", True) is not False


def recorded_settings(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of rules that the run was recorded with."""
    return dict((meta.get("config") or {}).get("rules") or {})
