"""Facts: what kind of run it is, as far as the Monitor could tell when it began. Rules read it to judge and to word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gradvitals.types import json_ready


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything about a run that is not a reading. What is not known keeps its default."""

    optimizer: str = ""
    """Class name of the first optimizer, e.g. ``AdamW``."""
    betas: tuple[float, float] | None = None
    """Of an Adam-like optimizer."""
    momentum: float | None = None
    weight_decay: float | None = None
    eps: float | None = None
    autocast: str | None = None
    """The dtype that autocast computes in, e.g. ``float16``; None where it is off or not known."""
    world_size: int = 1

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        data: dict[str, Any] = json_ready(asdict(self))
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Facts:
        """The inverse of `to_json`; what another version wrote and this one does not know is left aside."""
        known = {name: value for name, value in data.items() if name in cls.__dataclass_fields__}
        if known.get("betas") is not None:
            known["betas"] = tuple(known["betas"])
        return cls(**known)
