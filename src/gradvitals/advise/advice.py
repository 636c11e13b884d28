"""Advice as a record: what to do, how sure that is, and the figures it rests on; or why nothing can be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gradvitals.types import json_ready

Confidence = Literal["none", "low", "fair", "good"]
CONFIDENCES: tuple[Confidence, ...] = ("none", "low", "fair", "good")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One thing that was seen in the run, in words and as numbers."""

    text: str
    values: Mapping[str, Any] = field(default_factory=dict)
    first_step: int | None = None
    """The steps it was seen over; None where it is of no steps in particular."""
    last_step: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {name: json_ready(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Figure:
        """The inverse of `to_json`."""
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What a run says about one setting."""

    topic: str
    answer: str
    """What to do, in a sentence or two; what cannot be told, and why."""
    confidence: Confidence = "none"
    """`none` where nothing can be told."""
    because: str = ""
    """Why it is no surer than that."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The advice as numbers. The same names in every run: None where there is nothing to say."""
    figures: tuple[Figure, ...] = ()
    """What it rests on."""
    notes: tuple[str, ...] = ()
    """What to know before following it."""

    @property
    def can_tell(self) -> bool:
        """Whether there is any advice."""
        return self.confidence != "none"

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        own = {name: json_ready(getattr(self, name)) for name in self.__dataclass_fields__ if name != "figures"}
        return {**own, "can_tell": self.can_tell, "figures": [figure.to_json() for figure in self.figures]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Advice:
        """The inverse of `to_json`."""
        known = {name: value for name, value in data.items() if name != "can_tell"}
        figures = tuple(Figure.from_json(figure) for figure in data["figures"])
        return cls(**{**known, "figures": figures, "notes": tuple(data["notes"])})


def cannot_tell(topic: str, why: str, names: Sequence[str], figures: Sequence[Figure] = ()) -> Advice:
    """No advice, and the reason.

    >>> cannot_tell("decay", "no loss was observed", ["step"]).answer
    'Cannot tell, because no loss was observed.'
    """
    answer = f"Cannot tell, because {why}."
    return Advice(topic=topic, answer=answer, values=dict.fromkeys(names), figures=tuple(figures))


def rounded_up(value: float, digits: int = 2) -> float:
    """The next number above that has so few digits, so that a limit lets through what it is meant to.

    >>> rounded_up(1.214), rounded_up(0.0301), rounded_up(120.0), rounded_up(0.07)
    (1.3, 0.031, 120.0, 0.07)
    """
    near = float(f"{value:.{digits - 1}e}")
    if near >= value or value <= 0:
        return near
    exponent = int(f"{value:e}".partition("e")[2]) - digits + 1
    return float(f"{near + 10.0**exponent:.{digits - 1}e}")
