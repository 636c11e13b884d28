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

WAYS: dict[str, tuple[str, Callable[[str], Sink]]] = {
    "tensorboard": ("tensorboard:FOLDER", TensorBoard),
    "wandb": ("wandb, or wandb:PROJECT", lambda rest: WandB(project=rest or None)),
    "mlflow": ("mlflow, or mlflow:EXPERIMENT", lambda rest: MLflow(experiment=rest or None)),
    "trackio": ("trackio, or trackio:PROJECT", lambda rest: Trackio(project=rest or None)),
    "prometheus": ("prometheus, or prometheus:PORT", lambda rest: Prometheus(port=int(rest)) if rest else Prometheus()),
    "otel": ("otel", lambda rest: OpenTelemetry()),
    "jsonl": ("jsonl:FILE", JSONL),
}
"""What a text can be, and what makes a sink of what is after the colon, by the word before it."""


def from_text(text: str) -> Sink:
    """Returns the sink that a text such as ``tensorboard:logs`` names.

    Raises:
        ConfigError: If there is no such sink, or it needs something else after the colon.
        MissingExtraError: If its package is not installed.

    Example:
        >>> from_text("jsonl:readings.jsonl")
        JSONL('readings.jsonl')
    """
    kind, _, rest = text.strip().partition(":")
    kind = kind.lower()
    lacking = kind in ("tensorboard", "jsonl") and not rest
    if kind not in WAYS or lacking or (kind == "otel" and rest):
        expected = WAYS[kind][0] if kind in WAYS else f"one of {'; '.join(way for way, _ in WAYS.values())}"
        raise ConfigError(f"{text!r} is not a sink; expected {expected}")
    if kind == "prometheus" and rest and not (rest.isdecimal() and int(rest) < 1 << 16):
        expected = "a port below 65536 after the colon, as in prometheus:9464"
        raise ConfigError(f"{text!r} is not a sink; expected {expected}")
    return WAYS[kind][1](rest)


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
