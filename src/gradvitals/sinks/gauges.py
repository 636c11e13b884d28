"""Gauges of the latest values: Prometheus, to be scraped over HTTP, and OpenTelemetry, set up by the user."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from gradvitals.metrics import METRICS
from gradvitals.sinks.sink import Sink, require
from gradvitals.types import SEVERITIES, Finding

PORT = 9464


class GaugeSink(Sink):
    """A sink of gauges, which hold the latest values of the whole model.

    Values of single tensors are not exported: every tensor would be a time series of its own.
    """

    tensors: ClassVar[bool] = False
    gauges: ClassVar[bool] = True

    def __init__(self) -> None:
        self._run = ""
        self._gauges: dict[str, Any] = {}
        self._open: dict[str, dict[tuple[int | None, int], str]] = {}

    def _set(self, key: str, value: float, **labels: str) -> None:
        """Set one gauge of the run."""
        raise NotImplementedError

    def begin(self, run: Path) -> None:
        """Keep the name of the run's folder, with which every value is labeled."""
        self._run = run.name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Set every gauge."""
        for key, value in {**metrics, "step": step}.items():
            self._set(key, value)

    def finding(self, finding: Finding) -> None:
        """Set the gauges of its id: how many are open, by severity.

        A finding that gets worse or closes leaves what it was counted as before.
        """
        of_id = self._open.setdefault(finding.id, {})
        key = (finding.rank, finding.first_step)
        if finding.last_step is None:
            of_id[key] = finding.severity
        else:
            of_id.pop(key, None)
        for severity in SEVERITIES:
            count = list(of_id.values()).count(severity)
            self._set("finding/open", count, id=finding.id, severity=severity)


class Prometheus(GaugeSink):
    """Serves gauges such as ``gradvitals_grad_norm{run="gpt"}``, and ``gradvitals_finding_open`` for each finding.

    Values of single tensors are not exported: every tensor would be a time series of its own.

    Args:
        port: Where it listens; 0 takes a free one. After the first step, `port` says which.
        addr: Who may connect; only this machine, unless told otherwise.
        registry: A registry of yours to put the gauges in. Nothing listens then.
    """

    in_worker = True

    def __init__(self, port: int = PORT, addr: str = "127.0.0.1", *, registry: Any = None) -> None:
        require("prometheus_client", "prometheus")
        super().__init__()
        self.port = port
        self._addr = addr
        self._registry = registry
        if registry is not None or port == 0:
            self.in_worker = False  # the script's registry is in its process, and so is who asks for the port
        self._server: Any = None
        self._thread: Any = None

    def __repr__(self) -> str:
        return f"Prometheus(port={self.port}, addr={self._addr!r})"

    def _set(self, key: str, value: float, **labels: str) -> None:
        """Set one gauge; begin to listen at the first."""
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        if self._registry is None:
            self._registry = CollectorRegistry()
            self._server, self._thread = start_http_server(self.port, addr=self._addr, registry=self._registry)
            self.port = int(self._server.server_port)
        name = "gradvitals_" + re.sub(r"\W", "_", key, flags=re.ASCII)
        if name not in self._gauges:
            text = "findings of this id that are open" if labels else f"{key} of the run's latest step that has it"
            self._gauges[name] = Gauge(name, text, ("run", *labels), registry=self._registry)
        self._gauges[name].labels(run=self._run, **labels).set(value)

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(5.0)


# -- OpenTelemetry ---------------------------------------------------------------------------------------------------


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
