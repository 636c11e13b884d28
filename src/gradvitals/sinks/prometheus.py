"""Prometheus: the latest values of the whole model, to be scraped over HTTP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from gradvitals.sinks.sink import OpenFindings, Sink, require
from gradvitals.types import Finding

PORT = 9464


class Prometheus(Sink):
    """Serves gauges such as ``gradvitals_grad_norm{run="gpt"}``, and ``gradvitals_finding_open`` for each finding.

    Values of single tensors are not exported: every tensor would be a time series of its own.

    Args:
        port: Where it listens; 0 takes a free one. After the first step, `port` says which.
        addr: Who may connect; only this machine, unless told otherwise.
        registry: A registry of yours to put the gauges in. Nothing listens then.
    """

    tensors: ClassVar[bool] = False
    gauges: ClassVar[bool] = True
    in_worker = True

    def __init__(self, port: int = PORT, addr: str = "127.0.0.1", *, registry: Any = None) -> None:
        require("prometheus_client", "prometheus")
        self.port = port
        self._addr = addr
        self._registry = registry
        self._serves = registry is None
        if registry is not None or port == 0:
            self.in_worker = False  # the script's registry is in its process, and so is who asks for the port
        self._run = ""
        self._gauges: dict[str, Any] = {}
        self._findings = OpenFindings()
        self._server: Any = None
        self._thread: Any = None

    def __repr__(self) -> str:
        return f"Prometheus(port={self.port}, addr={self._addr!r})"

    def begin(self, run: Path) -> None:
        """Keep the name of the run's folder: a label of every gauge."""
        self._run = run.name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Set every gauge."""
        self._open()
        for key, value in {**metrics, "step": step}.items():
            self._gauge(key, f"{key} of the run's latest step that has it").labels(run=self._run).set(value)

    def finding(self, finding: Finding) -> None:
        """Set the gauges of its id: how many are open, by severity."""
        self._open()
        gauge = self._gauge("finding_open", "findings of this id that are open", ("run", "id", "severity"))
        for severity, count in self._findings.after(finding).items():
            gauge.labels(run=self._run, id=finding.id, severity=severity).set(count)

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(5.0)

    def _open(self) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        if self._registry is None:
            self._registry = CollectorRegistry()
        if self._serves and self._server is None:
            self._server, self._thread = start_http_server(self.port, addr=self._addr, registry=self._registry)
            self.port = int(self._server.server_port)

    def _gauge(self, key: str, text: str, labels: tuple[str, ...] = ("run",)) -> Any:
        from prometheus_client import Gauge

        name = "gradvitals_" + re.sub(r"\W", "_", key, flags=re.ASCII)
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, text, labels, registry=self._registry)
        return self._gauges[name]
