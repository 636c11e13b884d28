"""How many findings of each kind are open, for sinks that show a state rather than a history."""

from __future__ import annotations

from gradvitals.types import SEVERITIES, Finding


class OpenFindings:
    """Counts by id and severity. A finding that gets worse or closes leaves what it was counted as before."""

    def __init__(self) -> None:
        self._open: dict[str, dict[tuple[int | None, int], str]] = {}

    def after(self, finding: Finding) -> dict[str, int]:
        """Open findings of this id, for every severity, now that this one is known."""
        of_id = self._open.setdefault(finding.id, {})
        key = (finding.rank, finding.first_step)
        if finding.last_step is None:
            of_id[key] = finding.severity
        else:
            of_id.pop(key, None)
        return {severity: list(of_id.values()).count(severity) for severity in SEVERITIES}
