"""OpenTelemetry: the latest values of the whole model as gauges; where they go is set up by the user."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gradvitals.metrics import METRICS
from gradvitals.sinks.sink import GaugeSink, require


class OpenTelemetry(GaugeSink):
    """Sets gauges such as ``gradvitals.grad.norm``, and ``gradvitals.finding.open`` for each finding.

    Values of single tensors are not exported: every tensor would be a time series of its own.

    Args:
        provider: A MeterProvider of yours; None takes the one that `metrics.set_meter_provider` has set.
        attributes: Put on every value, beside ``run``, the name of the run's folder.
    """

    def __init__(self, provider: Any = None, *, attributes: Mapping[str, str] | None = None) -> None:
        require("opentelemetry.sdk", "otel")
        super().__init__()
        self._provider = provider
        self._attributes = dict(attributes or {})
        self._meter: Any = None

    def __repr__(self) -> str:
        return "OpenTelemetry()"

    def _set(self, key: str, value: float, **labels: str) -> None:
        """Set one gauge."""
        if key not in self._gauges:
            if self._meter is None:
                from opentelemetry import metrics

                self._meter = metrics.get_meter("gradvitals", meter_provider=self._provider)
            name = "gradvitals." + re.sub(r"[^\w.-]", "_", key.replace("/", "."), flags=re.ASCII)
            known = METRICS.get(key)
            unit = f"{{{known.unit}}}" if known is not None and known.unit else ""
            text = "" if known is None else known.text
            self._gauges[key] = self._meter.create_gauge(name[:255], unit=unit, description=text)
        self._gauges[key].set(value, {"run": self._run, **self._attributes, **labels})
