"""One run of the table, as plain values: how ranks share the model, what happens to one of them, how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

WrapName = Literal["ddp", "fsdp"]
FaultName = Literal[
    "clean",
    "clean_dropout",
    "seed",
    "shard",
    "shard_dropout",
    "weight_bit",
    "state_bit",
    "scaled",
    "nan",
    "killed",
    "sampler_seed",
]

WRAPS: tuple[WrapName, ...] = get_args(WrapName)
CLEAN: tuple[FaultName, ...] = ("clean", "clean_dropout")
KILLED: FaultName = "killed"
UNSEEN: tuple[FaultName, ...] = ("sampler_seed",)
"""Faults that an audit cannot see; planted only where they are asked for by name."""
FAULTS: tuple[FaultName, ...] = tuple(name for name in get_args(FaultName) if name not in CLEAN)
OF_REPLICAS: tuple[FaultName, ...] = ("weight_bit", "state_bit")
"""Faults in copies, which a sharded model does not have."""

DEFAULT_RANKS = 4
DEFAULT_STEPS = 500
DEFAULT_CLEAN_STEPS = 1000
DEFAULT_FAULT_STEP = 123
"""Neither an audit nor a full reading is due then: a fault must not be planted where it happens to be looked at."""
DEFAULT_AUDIT_EVERY = 100


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run to make. Everything in it depends on these values alone."""

    fault: FaultName
    wrap: WrapName = "ddp"
    ranks: int = DEFAULT_RANKS
    steps: int = DEFAULT_STEPS
    fault_step: int = DEFAULT_FAULT_STEP
    audit_every: int = DEFAULT_AUDIT_EVERY
    seed: int = 0

    @property
    def label(self) -> str:
        """A few words for a line of progress, and a name for its folder."""
        return f"{self.wrap}.{self.fault}.{self.seed}"

    @property
    def is_clean(self) -> bool:
        """Whether nothing happens in it."""
        return self.fault in CLEAN

    @property
    def odd_rank(self) -> int:
        """The rank that it happens to: neither the first nor, where there are three or more, the last."""
        return max(1, self.ranks - 2)

    @property
    def twin(self) -> int:
        """The rank whose samples it reads, where that is the fault."""
        return self.odd_rank - 1

    @property
    def has_dropout(self) -> bool:
        """Whether the model has dropout, and every rank random numbers of its own."""
        return self.fault in ("clean_dropout", "shard_dropout")

    @property
    def is_guarded(self) -> bool:
        """Whether a Guard may act."""
        return self.fault == "nan"


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """How a run ended for one rank."""

    rank: int
    steps: int
    seconds: float
    """Wall time of a step."""
    loss: float
    left_out: tuple[int, ...] = ()
    """Steps that its Guard has left out."""
    digest: str = ""
    """Of all its weights at the end, bit for bit; empty where they are sharded."""
    collectives: int = 0
    """Collectives of gradvitals' own."""
    bytes_sent: int = 0
    """Handed to them."""
    error: str = ""
    """What ended its training early."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankResult:
        """The inverse of `to_json`."""
        return cls(**{**data, "left_out": tuple(data["left_out"])})


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended."""

    cell: Cell
    ranks: tuple[RankResult, ...]
    """Of those that lived to tell."""
    findings: tuple[Mapping[str, Any], ...] = field(default=())
    """What the record of the run has, as `Finding.to_json` writes it."""
    steps_kept: int = 0
    """Steps that the record has a norm of."""
