"""Sinks: where readings and findings go besides the run's own file. Each needs its package only when it is used."""

from gradvitals.sinks.jsonl import JSONL
from gradvitals.sinks.mlflow import MLflow
from gradvitals.sinks.opentelemetry import OpenTelemetry
from gradvitals.sinks.prometheus import Prometheus
from gradvitals.sinks.sink import Sink
from gradvitals.sinks.tensorboard import TensorBoard
from gradvitals.sinks.texts import as_sink, from_text
from gradvitals.sinks.trackio import Trackio
from gradvitals.sinks.wandb import WandB

__all__ = [
    "JSONL",
    "MLflow",
    "OpenTelemetry",
    "Prometheus",
    "Sink",
    "TensorBoard",
    "Trackio",
    "WandB",
    "as_sink",
    "from_text",
]
