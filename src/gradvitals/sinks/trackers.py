"""Trackers of runs: Weights & Biases, Trackio, MLflow."""

from __future__ import annotations

import posixpath
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from gradvitals.sinks.sink import Openings, Sink, require
from gradvitals.types import Finding

STEP = "step"


class TrackerSink(Sink):
    """A sink for a tracker of runs: logs to the run that the script has started, or else to one of its own.

    Args:
        project: Project of a run of its own, "gradvitals" unless given.
        run: The run to log to; None takes the script's, and without that starts one.
        prefix: Put before every key, so that it is none of the script's.
        alerts: Whether warnings and critical findings become alerts.
        settings: More arguments of the tracker's `init`, for a run of its own.
    """

    package: ClassVar[str]

    def __init__(
        self,
        project: str | None = None,
        *,
        run: Any = None,
        prefix: str = "gradvitals/",
        alerts: bool = True,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        require(self.package, self.package)
        self._project = project or "gradvitals"
        self._run = run
        self._prefix = prefix
        self._alerts = alerts
        self._settings = dict(settings or {})
        self._name: str | None = None
        self._is_own = self._is_over = self._defined = False
        self._openings = Openings()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(project={self._project!r})"

    def begin(self, run: Path) -> None:
        """Keep the name of the run's folder, for a run of its own."""
        self._name = run.name

    def close(self) -> None:
        """Finish a run of its own; the script's is left to the script."""
        if self._run is not None and self._is_own:
            self._run.finish()

    def _is_alert(self, finding: Finding) -> bool:
        return self._alerts and finding.severity != "info" and self._openings.opens(finding)


class WandB(TrackerSink):
    """Logs to the run that the script has started, or else to one of its own.

    In the script's run, values go into the row that the script logs next. Rows of our own would move its step, and
    wandb ignores what is logged at an earlier step than the last. All values have ``gradvitals/step`` as their x axis.
    Values after ``wandb.finish()`` are not sent.

    Its arguments are those of `TrackerSink`.
    """

    package = "wandb"

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


# -- Trackio ---------------------------------------------------------------------------------------------------------


class Trackio(TrackerSink):
    """Logs to the run that ``trackio.init`` has started in the training thread, or else to one of its own.

    Trackio counts steps for who does not give one, on from the last it has seen: a script that logs to the same run
    should pass ``step=`` to `trackio.log`.

    Its arguments are those of `TrackerSink`.
    """

    package = "trackio"

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


# -- MLflow ----------------------------------------------------------------------------------------------------------

BATCH = 500
"""Metrics that are sent together at most; MLflow takes 1,000."""
BATCH_SECONDS = 5.0
"""Longest time that metrics wait for others."""
LONGEST_KEY = 250


class MLflow(Sink):
    """Logs to the run that is active in the training thread at the first step, or else to one of its own.

    Args:
        experiment: Experiment of a run of its own, "gradvitals" unless given.
        run_id: The run to log to, instead of the active one.
        prefix: Put before every key, so that it is none of the script's.
    """

    def __init__(
        self, experiment: str | None = None, *, run_id: str | None = None, prefix: str = "gradvitals/"
    ) -> None:
        require("mlflow", "mlflow")
        self._experiment = experiment or "gradvitals"
        self._run_id = run_id
        self._prefix = prefix
        self._name = ""
        self._is_own = False
        self._client: Any = None
        self._waiting: list[Any] = []
        self._sent = time.monotonic()

    def __repr__(self) -> str:
        return f"MLflow(experiment={self._experiment!r})"

    def begin(self, run: Path) -> None:
        """Take the run that is active in this thread: MLflow does not show it to others."""
        self._name = run.name
        mlflow = sys.modules.get("mlflow")  # a script with an active run has imported it
        if self._run_id is None and mlflow is not None:
            active = mlflow.active_run()
            self._run_id = active.info.run_id if active is not None else None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Gather metrics, and send them when there are many or they have waited for some seconds."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting += [Metric(self._key(key), value, now, step) for key, value in metrics.items()]
        if len(self._waiting) >= BATCH or time.monotonic() - self._sent > BATCH_SECONDS:
            self._send()

    def finding(self, finding: Finding) -> None:
        """A tag of the run for each kind of finding, with the latest of it."""
        if finding.severity != "info":
            resolved = "" if finding.last_step is None else f"resolved after step {finding.last_step}: "
            self._open().set_tag(self._run_id, f"gradvitals.finding.{finding.id}", f"{resolved}{finding}"[:5000])

    def close(self) -> None:
        """Send what is left, and end a run of its own."""
        self._send()
        if self._is_own:
            self._client.set_terminated(self._run_id)

    def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
            self._open().log_batch(self._run_id, metrics=batch)
        self._sent = time.monotonic()

    def _open(self) -> Any:
        if self._client is None:
            import mlflow

            self._client = mlflow.MlflowClient()
            if self._run_id is None:
                known = self._client.get_experiment_by_name(self._experiment)
                experiment = known.experiment_id if known else self._client.create_experiment(self._experiment)
                self._run_id = self._client.create_run(experiment, run_name=self._name or None).info.run_id
                self._is_own = True
        return self._client

    def _key(self, key: str) -> str:
        """A key that MLflow takes, which may use it as a path."""
        plain = posixpath.normpath(re.sub(r"[^/\w.\- ]", "_", self._prefix + key)).lstrip("/.")
        return plain[:LONGEST_KEY]
