"""MLflow: metrics in the active run, findings as tags."""

from __future__ import annotations

import posixpath
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradvitals.sinks.sink import Sink, require
from gradvitals.types import Finding

BATCH = 500
"""Metrics that are sent together at most; MLflow takes 1,000."""
BATCH_SECONDS = 5.0
"""How long they wait for others."""
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
