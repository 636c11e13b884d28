"""Advice as a record: what to do, how sure that is, and the figures behind it; or why the run does not show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

from gradvitals.types import json_ready

if TYPE_CHECKING:
    from gradvitals.advise.record import Record

Confidence = Literal["none", "low", "fair", "good"]
CONFIDENCES: tuple[Confidence, ...] = ("none", "low", "fair", "good")


SETTINGS = ("learning_rate", "max_grad_norm", "batch_size", "warmup", "decay")
"""Topics about which a run with a bug says nothing."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One observation in the run, in words and as numbers."""

    text: str
    values: Mapping[str, Any] = field(default_factory=dict)
    first_step: int | None = None
    """The steps it covers; None if it is of no steps in particular."""
    last_step: int | None = None

    @property
    def with_steps(self) -> str:
        """The text and its steps, if it covers more than one."""
        first, last = self.first_step, self.last_step
        if first is None or last is None or last <= first:
            return self.text
        return f"{self.text}; steps {first:,} to {last:,}"

    def to_json(self) -> dict[str, Any]:
        """Returns the record as plain JSON values."""
        return {name: json_ready(getattr(self, name)) for name in self.__dataclass_fields__}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The advice of a run for one setting."""

    topic: str = ""
    answer: str
    """The advice in a sentence or two; or what the run does not show, and why."""
    confidence: Confidence = "none"
    """`none` if the run does not show it."""
    because: str = ""
    """Why the confidence is no higher."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The advice as numbers. The same names in every run; None if there is nothing to say."""
    figures: Sequence[Figure] = ()
    """The evidence."""
    notes: Sequence[str] = ()
    """Limits of the advice."""

    @property
    def can_tell(self) -> bool:
        """Whether there is any advice."""
        return self.confidence != "none"

    def to_json(self) -> dict[str, Any]:
        """Returns the record as plain JSON values."""
        own = {name: json_ready(getattr(self, name)) for name in self.__dataclass_fields__ if name != "figures"}
        return {**own, "can_tell": self.can_tell, "figures": [figure.to_json() for figure in self.figures]}


class CannotTell(Exception):
    """The run does not show what a piece of advice needs."""

    def __init__(self, why: str, figures: Sequence[Figure] = ()) -> None:
        super().__init__(why)
        self.figures = figures


def advises_on(topic: str, names: Sequence[str]) -> Callable[[Callable[[Record], Advice]], Callable[[Record], Advice]]:
    """Completes the advice of a function: the topic, every name of a value, and an answer instead of `CannotTell`."""

    def decorate(advise: Callable[[Record], Advice]) -> Callable[[Record], Advice]:
        @wraps(advise)
        def complete(record: Record) -> Advice:
            try:
                if topic in SETTINGS and record.bug is not None:
                    raise CannotTell(f"the numbers of this run show a bug ({record.bug.id}); fix it first")
                return replace(advise(record), topic=topic)
            except CannotTell as error:
                answer = f"Cannot tell, because {error}."
                return Advice(topic=topic, answer=answer, values=dict.fromkeys(names), figures=error.figures)

        return complete

    return decorate


def rounded_up(value: float) -> float:
    """Returns the next number above that has two digits.

    >>> rounded_up(1.214), rounded_up(0.0301), rounded_up(120.0), rounded_up(0.07)
    (1.3, 0.031, 120.0, 0.07)
    """
    near = float(f"{value:.1e}")
    if near >= value or value <= 0:
        return near
    exponent = int(f"{value:e}".partition("e")[2]) - 1
    return float(f"{near + 10.0**exponent:.1e}")
