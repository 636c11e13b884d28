"""One cell of the table, as plain values: what is trained, what happens to it, who looks after it, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

ModelName = Literal["transformer", "cnn", "mlp"]
FaultName = Literal[
    "clean",
    "corrupted",
    "poisoned",
    "nan_gradients",
    "lr_spike",
    "state_bit_flips",
    "weight_bit_flip",
    "nan_weights_0",
    "nan_weights_1",
    "nan_weights_5",
    "nan_weights_30",
    "scaled_tensor_40",
    "scaled_tensor",
    "label_noise",
    "scheduler_bug",
    "bad_optimizer_state",
    "nan_micro_batch",
    "killed",
]
STRANGE: tuple[FaultName, ...] = (
    "scaled_tensor",
    "label_noise",
    "scheduler_bug",
    "bad_optimizer_state",
    "nan_micro_batch",
)
"""Faults that no response of the Guard was written for."""
ArmName = Literal["guard", "none", "clip", "olmo", "zclip"]

MODELS: tuple[ModelName, ...] = get_args(ModelName)
STRUCK_MODELS: tuple[ModelName, ...] = ("transformer", "cnn")
"""Those that faults happen to, unless others are asked for; all of them are trained clean."""
CLEAN: FaultName = "clean"
KILLED: FaultName = "killed"
FAULTS: tuple[FaultName, ...] = tuple(name for name in get_args(FaultName) if name != CLEAN)
ARMS: tuple[ArmName, ...] = get_args(ArmName)

DEFAULT_STEPS = 300
DEFAULT_CLEAN_STEPS = 1000
DEFAULT_SEEDS = 3

EXTRA_BATCHES = 0.2
"""Share of batches beyond the steps of the schedule that a run may draw, for those it skips, takes back or repeats."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run to make. Everything in it depends on these values alone."""

    model: ModelName
    fault: FaultName
    arm: ArmName
    seed: int
    steps: int = DEFAULT_STEPS
    """What the schedule is made for, and where the run ends when nothing is lost."""
    killed: bool = False
    """Whether its process is also killed at a random step, beside the fault; always so for the fault of that name."""

    @property
    def label(self) -> str:
        """A few words for a line of progress."""
        also = "+killed" if self.killed and self.fault != KILLED else ""
        length = "" if self.steps == DEFAULT_STEPS else f".{self.steps}"
        return f"{self.model}.{self.fault}{also}.{self.arm}.{self.seed}{length}"

    @property
    def is_killed(self) -> bool:
        """Whether its process is killed."""
        return self.killed or self.fault == KILLED

    @property
    def max_batches(self) -> int:
        """The most batches it may draw, in all its processes together."""
        return math.floor((1 + EXTRA_BATCHES) * self.steps + 1e-9)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended."""

    cell: Cell
    loss: float
    """Of held-out data, at the end; nan where the model is broken."""
    untrained: float
    """The same before the first step."""
    steps: int
    """Steps at the end as the arm counts them."""
    batches: int
    """Batches drawn, in all processes."""
    kept: int
    """Batches whose update is in the weights at the end: not skipped, not rolled back, not lost with a process."""
    actions: Mapping[str, int] = field(default_factory=dict)
    """How often the arm did what, by kind."""
    notes: tuple[str, ...] = ()
    """Each action of the Guard in a few words."""
    checksum: str = ""
    """Of all weights and buffers at the end."""
    seconds: float = 0.0

    @property
    def lost(self) -> int:
        """Batches that were computed in vain."""
        return self.batches - self.kept

    @property
    def diverged(self) -> bool:
        """Whether the model is no better than before its first step, or broken."""
        return not self.loss < self.untrained

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        from gradvitals.types import json_ready  # and numpy with it, which the help of a command does without

        values: dict[str, Any] = json_ready(asdict(self))
        return values

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        """The inverse of `to_json`."""
        numbers = {name: float(data[name]) for name in ("loss", "untrained", "seconds")}
        return cls(**{**data, **numbers, "cell": Cell(**data["cell"]), "notes": tuple(data["notes"])})
