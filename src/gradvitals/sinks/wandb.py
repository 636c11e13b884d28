"""Weights & Biases: values beside what a script logs itself, findings as alerts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradvitals.sinks.sink import TrackerSink, require
from gradvitals.types import Finding

STEP = "step"


class WandB(TrackerSink):
    """Logs to the run that the script has started, or else to one of its own.

    In the script's run, values go into the row that the script logs next. Rows of our own would move its step, and
    wandb ignores what is logged at an earlier step than the last. All values have ``gradvitals/step`` as their x axis.
    Values after ``wandb.finish()`` are not sent.

    Args:
        project: Project of a run of its own, "gradvitals" unless given.
        run: The run to log to; None takes ``wandb.run``, and without that starts one.
        prefix: Put before every key, so that it is none of the script's.
        alerts: Whether warnings and critical findings become alerts.
        settings: More arguments of `wandb.init`, for a run of its own.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        run: Any = None,
        prefix: str = "gradvitals/",
        alerts: bool = True,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        require("wandb", "wandb")
        super().__init__(project, prefix, alerts, settings)
        self._run = run
        self._is_over = self._defined = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One row, or a part of the script's next one. Never passes a step: wandb's own must stay the script's."""
        import wandb

        if self._is_over:
            return
        row = {self._prefix + key: value for key, value in metrics.items()} | {self._prefix + STEP: step}
        try:
            self._open().log(row, commit=self._is_own)
        except wandb.errors.UsageError:
            self._is_over = True  # the script has finished its run

    def finding(self, finding: Finding) -> None:
        """An alert for a warning or a critical finding that opens or gets worse."""
        import wandb

        if self._is_over or not self._is_alert(finding):
            return
        level = "ERROR" if finding.severity == "critical" else "WARN"
        text = "\n".join([str(finding), *(f"Fix: {fix}" for fix in finding.fixes[:1])])
        try:
            self._open().alert(title=f"gradvitals: {finding.title}"[:60], text=text[:4000], level=level)
        except wandb.errors.UsageError:
            self._is_over = True

    def _open(self) -> Any:
        import wandb

        if self._run is None:
            self._run = wandb.run
        if self._run is None:
            self._is_own = True
            own = {"project": self._project, "name": self._name, "reinit": "create_new"}
            self._run = wandb.init(**{**own, **self._settings})
        if not self._defined:
            self._defined = True
            self._run.define_metric(self._prefix + STEP, hidden=True)
            self._run.define_metric(self._prefix + "*", step_metric=self._prefix + STEP)
        return self._run
