"""The rule that looks for NaN and Inf in gradients, and for where they began."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradvitals.diagnose.explain import number
from gradvitals.diagnose.rule import Rule, Sign, register
from gradvitals.diagnose.step import NAMED, Step
from gradvitals.types import Severity

DIVERGED = 1e3
"""A loss so many times the first one is that of a run which was lost before anything overflowed."""


@register
@dataclass
class Nonfinite(Rule):
    """NaN or Inf in a gradient."""

    id = "nonfinite"
    needs = ("grad/nonfinite",)

    skips: int = 10
    """Steps in a row that a GradScaler may skip. It looks for its scale that way, a few steps at a time."""

    bad_for: int = field(default=0, init=False)
    """Steps in a row."""
    last: int = field(default=-1, init=False)
    since: int = field(default=-1, init=False)
    first: list[str] = field(default_factory=list, init=False)
    """Where it was when it began: a step later it is everywhere."""
    seen: dict[str, Any] = field(default_factory=dict, init=False)
    cause: str = field(default="", init=False)
    earlier: bool = field(default=False, init=False)
    """Whether it may come from a step that was passed over: weights that are not finite make every gradient so."""
    rank: int | None = field(default=None, init=False)
    """The one rank that had it before gradients were reduced, where that is known."""

    def look(self, step: Step) -> Sign | None:
        """Fires at every step with a gradient that is not finite."""
        if not step.value("grad/nonfinite") > 0:
            self.bad_for = 0
            return None
        if self.last < 0 or step.number - self.last > self.closes_after:
            self._begin(step)
        self.bad_for, self.last = self.bad_for + 1, step.number
        skipped, guarded = step.value("step/skipped") == 1, step.value("step/left_out") == 1
        ordinary = (skipped or guarded) and self.bad_for <= self.skips
        if guarded:
            return self._sign("info" if ordinary else "critical", (self.cause,), ("guard", self.cause))
        if ordinary:
            return self._sign("info", ("scaler", self.cause), ("scaler",))
        if self.earlier:
            return self._sign("critical", ("earlier", self.cause), ("earlier",))
        return self._sign("critical", (self.cause,), ("skipping", self.cause) if skipped else (self.cause,))

    def _sign(self, severity: Severity, causes: tuple[str, ...], cures: tuple[str, ...]) -> Sign:
        return Sign(
            severity=severity,
            seen={**self.seen, "steps": self.bad_for},
            expected={"share": 0.0} if "share" in self.seen else {},
            tensors=tuple(self.first),
            since=self.since,
            causes=causes,
            cures=cures,
            rank=self.rank,
        )

    def _begin(self, step: Step) -> None:
        counts, infos = step.tensors("grad/nonfinite"), step.layout.tensors
        bad = [] if counts is None else [infos[i] for i in np.flatnonzero(counts > 0)]
        bad.sort(key=lambda info: (-info.depth, -info.index))  # as backward comes to them
        loss = step.general.values.get("loss")
        everywhere = len(bad) == len(infos)
        broken = loss is not None and not math.isfinite(loss)
        self.cause = "forward" if broken else "batch" if everywhere else "backward"
        self.earlier = everywhere and step.unread > 0 and step.was_made
        first = step.history["loss"].values[:1]
        if everywhere and infos and infos[0].dtype == "float16":
            self.cause = "float16"
        elif first and loss is not None and math.isfinite(loss) and loss > DIVERGED * abs(first[0]):
            self.cause = "diverged"
        on_ranks = np.flatnonzero(step.general.ranks.get("ranks/nonfinite", ()))
        self.rank = int(on_ranks[0]) if len(on_ranks) == 1 else None
        self.since, self.bad_for = step.number, 0
        self.first = [info.name for info in bad[:NAMED]]
        where = "all tensors" if everywhere else f"{len(bad)} of {len(infos)} tensors"
        named = f", first in {self.first[0]}," if self.first and not self.earlier else ""
        self.seen = {"affected": where, "first_in": named, "tensors": len(bad), "of": len(infos)}
        # The first step that is not finite tells only where, 1 standing for "some": they are counted from the next on.
        if counts is not None and np.nanmax(counts, initial=0.0) > 1:
            elements = float(np.nansum(counts))
            self.seen |= {"elements": elements, "share": elements / (sum(info.numel for info in bad) or 1)}
        self.seen |= {"at": step.number, "eps": step.facts.eps or 1e-8, "lr": step.value("lr"), "known_loss": ""}
        if loss is not None:
            self.seen |= {"loss": loss, "known_loss": f", and the loss is {number(loss)}"}
