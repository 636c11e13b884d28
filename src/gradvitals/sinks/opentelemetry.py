"""OpenTelemetry: the latest values of the whole model as gauges; where they go is set up by the user."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from gradvitals.metrics import METRICS
from gradvitals.sinks.sink import OpenFindings, Sink, require
from gradvitals.types import Finding


class OpenTelemetry(Sink):
    """Sets gauges such as ``gradvitals.grad.norm``, and ``gradvitals.finding.open`` for each finding.

    Values of single tensors are not exported: every tensor would be a time series of its own.

    Args:
        provider: A MeterProvider of yours; None takes the one that `metrics.set_meter_provider` has set.
        attributes: Put on every value, beside ``run``, the name of the run's folder.
    """

    tensors: ClassVar[bool] = False
    gauges: ClassVar[bool] = True

    def __init__(self, provider: Any = None, *, attributes: Mapping[str, str] | None = None) -> None:
        require("opentelemetry.sdk", "otel")
        self._provider = provider
        self._attributes = dict(attributes or {})
        self._meter: Any = None
        self._gauges: dict[str, Any] = {}
        self._findings = OpenFindings()

    def __repr__(self) -> str:
        return "OpenTelemetry()"

    def begin(self, run: Path) -> None:
        """Keep the name of the run's folder: an attribute of every value."""
        self._attributes = {"run": run.name, **self._attributes}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Set every gauge."""
        for key, value in {**metrics, "step": step}.items():
            self._gauge(key).set(value, self._attributes)

    def finding(self, finding: Finding) -> None:
        """Set the gauges of its id: how many are open, by severity."""
        for severity, count in self._findings.after(finding).items():
            self._gauge("finding/open").set(count, {**self._attributes, "id": finding.id, "severity": severity})

    def _gauge(self, key: str) -> Any:
        if key not in self._gauges:
            if self._meter is None:
                from opentelemetry import metrics

                self._meter = metrics.get_meter("gradvitals", meter_provider=self._provider)
            name = "gradvitals." + re.sub(r"[^\w.-]", "_", key.replace("/", "."), flags=re.ASCII)
            known = METRICS.get(key)
            unit = f"{{{known.unit}}}" if known is not None and known.unit else ""
            text = "" if known is None else known.text
            self._gauges[key] = self._meter.create_gauge(name[:255], unit=unit, description=text)
        return self._gauges[key]
