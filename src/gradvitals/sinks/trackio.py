"""Trackio: metrics and alerts in the current run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradvitals.sinks.sink import TrackerSink, require
from gradvitals.types import Finding


class Trackio(TrackerSink):
    """Logs to the run that ``trackio.init`` has started in the training thread, or else to one of its own.

    Trackio counts steps for who does not give one, on from the last it has seen: a script that logs to the same run
    should pass ``step=`` to `trackio.log`.

    Args:
        project: Project of a run of its own, "gradvitals" unless given.
        prefix: Put before every key, so that it is none of the script's.
        alerts: Whether warnings and critical findings become alerts.
        settings: More arguments of `trackio.init`, for a run of its own.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        prefix: str = "gradvitals/",
        alerts: bool = True,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        require("trackio", "trackio")
        super().__init__(project, prefix, alerts, settings)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One row at this step."""
        self._open().log({self._prefix + key: value for key, value in metrics.items()}, step=step)

    def finding(self, finding: Finding) -> None:
        """An alert for a warning or a critical finding that opens or gets worse."""
        if not self._is_alert(finding):
            return
        from trackio import AlertLevel

        level = AlertLevel.ERROR if finding.severity == "critical" else AlertLevel.WARN
        self._open().alert(title=f"gradvitals: {finding.title}", text=str(finding), level=level)

    def _open(self) -> Any:
        if self._run is None:
            import trackio
            from trackio import context_vars

            self._run = context_vars.current_run.get()
            if self._run is None:
                self._is_own = True
                own = {"project": self._project, "name": self._name, "embed": False}
                own |= {"auto_log_cpu": False, "auto_log_gpu": False}
                self._run = trackio.init(**{**own, **self._settings})
        return self._run
