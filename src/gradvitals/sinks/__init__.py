"""Sinks: where readings and findings go besides the run's own file. Each needs its package only when it is used."""

from __future__ import annotations

from collections.abc import Callable

from gradvitals.errors import ConfigError
from gradvitals.sinks.files import JSONL, TensorBoard
from gradvitals.sinks.gauges import OpenTelemetry, Prometheus
from gradvitals.sinks.sink import Sink
from gradvitals.sinks.trackers import MLflow, Trackio, WandB

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

WAYS = {
    "tensorboard": "tensorboard:FOLDER",
    "wandb": "wandb, or wandb:PROJECT",
    "mlflow": "mlflow, or mlflow:EXPERIMENT",
    "trackio": "trackio, or trackio:PROJECT",
    "prometheus": "prometheus, or prometheus:PORT",
    "otel": "otel",
    "jsonl": "jsonl:FILE",
}
"""What can be written, by the word before the colon."""


def from_text(text: str) -> Sink:
    """The sink that a text such as ``tensorboard:logs`` names.

    Raises:
        ConfigError: If there is no such sink, or it needs something else after the colon.
        MissingExtraError: If its package is not installed.

    Example:
        >>> from_text("jsonl:readings.jsonl")
        JSONL('readings.jsonl')
    """
    kind, _, rest = text.strip().partition(":")
    kind = kind.lower()
    makers: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoard(rest),
        "wandb": lambda: WandB(project=rest or None),
        "mlflow": lambda: MLflow(experiment=rest or None),
        "trackio": lambda: Trackio(project=rest or None),
        "prometheus": lambda: Prometheus(port=_port(text, rest)) if rest else Prometheus(),
        "otel": OpenTelemetry,
        "jsonl": lambda: JSONL(rest),
    }
    lacking = kind in ("tensorboard", "jsonl") and not rest
    if kind not in makers or lacking or (kind == "otel" and rest):
        expected = WAYS.get(kind) or f"one of {'; '.join(WAYS.values())}"
        raise ConfigError(f"{text!r} is not a sink; expected {expected}")
    return makers[kind]()


def as_sink(given: object) -> Sink:
    """A sink as it is, or the one that a text names."""
    if isinstance(given, str):
        return from_text(given)
    if not isinstance(given, Sink):
        hint = "; write Sink() with brackets" if isinstance(given, type) else ""
        raise TypeError(
            f"{given!r} is not a sink; expected a gradvitals.sinks.Sink or a text such as 'tensorboard:logs'{hint}"
        )
    return given


def _port(text: str, rest: str) -> int:
    if not rest.isdecimal() or not int(rest) < 1 << 16:
        raise ConfigError(f"{text!r} is not a sink; expected a port below 65536 after the colon, as in prometheus:9464")
    return int(rest)
