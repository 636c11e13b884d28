"""Who wrote what of a snapshot, and what a rank takes of it where there are more or fewer ranks than wrote it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradvitals.act.snap_tree import TENSOR, marks

Plain = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a process stands among those that train together.

    Attributes:
        rank: Its number.
        worker: Which part of the data it sees; the ranks of a tensor-parallel group see the same.
        stage: The pipeline's stage, where stages use the same names for different tensors; else None.
    """

    rank: int = 0
    worker: int = 0
    stage: int | None = None

    @property
    def own(self) -> str:
        """Stands before the names of tensors that are this rank's alone."""
        return f"rank{self.rank}/"

    @property
    def common(self) -> str:
        """Stands before the names of tensors that ranks share."""
        return "" if self.stage is None else f"stage{self.stage}/"

    @staticmethod
    def of(plain: Mapping[str, Any], rank: int) -> Place:
        """The place of the rank that wrote these plain values."""
        return Place(**{"rank": rank, "worker": rank, **plain.get("place", {})})

    def to_json(self) -> Plain:
        """As plain values."""
        return asdict(self)


def source_of(here: Place, now: Sequence[Place], then: Sequence[Place]) -> Place:
    """Whose plain values and buffers a rank goes on with.

    The one in the same place: with the same part of the data, and if there were several of these, the same among them.

    Args:
        here: The rank's place.
        now: The places of all ranks.
        then: Those of all that wrote the snapshot.

    Example:
        >>> then = [Place(rank, worker=rank) for rank in range(2)]
        >>> now = [Place(rank, worker=rank) for rank in range(3)]
        >>> [source_of(here, now, then).rank for here in now]
        [0, 1, 0]
    """
    alike = [one for one in then if one.stage == here.stage] or list(then)
    worker = here.worker % (1 + max(one.worker for one in alike))
    mine = [one for one in alike if one.worker == worker] or alike
    among = [one.rank for one in now if (one.worker, one.stage) == (here.worker, here.stage)].index(here.rank)
    return mine[among % len(mine)]


def moved(
    here: Place, now: Sequence[Place], plains: Sequence[Plain], lost: Collection[str]
) -> tuple[Plain, Place, list[str]]:
    """The plain values for one rank, from those of all ranks of a run that had more or fewer of them.

    Args:
        here: The rank's place.
        now: The places of all ranks.
        plains: What each rank wrote, in their order.
        lost: Names of tensors of single ranks, which others have no use for.

    Returns:
        The plain values, whose they mostly are, and what is not as it was, in words. Without ``position`` or ``random``
        these are to be left as they are.
    """
    then = [Place.of(plain, rank) for rank, plain in enumerate(plains)]
    source = source_of(here, now, then)
    made, changed = dict(plains[source.rank]), []
    made["state"], dropped = _all_state(plains, source, lost)
    if dropped:
        shown = ", ".join(sorted(dropped)[:3])
        changed.append(
            f"the optimizer's state of {len(dropped)} tensors ({shown}..), of which ranks kept parts, is new"
        )
    if here.rank == 0:
        made["extra"] = plains[0]["extra"]  # the first rank alone knows what was found
    workers, before = (len({one.worker for one in places}) for places in (now, then))
    if workers != before:
        few = f"{workers} data workers in place of {before}"
        changed += _with_other_shares(made, plains, few, apart=before > 1, has_source=source.worker == here.worker)
        digests = {(*plain.get("own", ()), plain.get("digest")) for plain in plains}
        if len(digests) > len({tuple(plain.get("own", ())) for plain in plains}):
            changed.append("buffers that ranks had different ones of (batch norm's, say) are those of one of them")
    return made, source, changed


def _with_other_shares(made: Plain, plains: Sequence[Plain], few: str, *, apart: bool, has_source: bool) -> list[str]:
    """Data position and random numbers are of a share of the data: with other shares they may mean nothing."""
    changed = []
    if made["position"] is not None:
        if all(plain["position"] == made["position"] for plain in plains):
            changed.append(f"the data position is what all ranks had; if your loader counts by rank, mind the {few}")
        else:
            del made["position"]
            changed.append(f"the data position is not set, as it was not the same on all ranks ({few})")
    if not (apart and all(_same(plain["random"], plains[0]["random"]) for plain in plains)):
        if not has_source:
            del made["random"]
        changed.append(f"random numbers are not what they would have been ({few}); new workers have their own")
    return changed


def _all_state(plains: Sequence[Plain], source: Place, lost: Collection[str]) -> tuple[list[Plain], set[str]]:
    """The optimizers' state of all parameters, whichever rank kept it, and the parameters whose state is lost."""
    others = [plain for rank, plain in enumerate(plains) if rank != source.rank]
    stage = source.stage
    states: list[Plain] = []
    dropped: set[str] = set()
    for index, own in enumerate(plains[source.rank]["state"]):
        state = dict(own)
        for plain in others:
            if Place.of(plain, 0).stage == stage and index < len(plain["state"]):
                state |= {name: shape for name, shape in plain["state"][index].items() if name not in state}
        gone = {name for name, shape in state.items() if any(mark[TENSOR] in lost for mark in marks(shape))}
        states.append({name: shape for name, shape in state.items() if name not in gone})
        dropped |= gone
    return states, dropped


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return bool(one == other)
