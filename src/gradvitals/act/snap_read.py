"""Reading a snapshot from its folder for one rank, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from gradvitals.act.snap_disk import Index, read_index, read_plain, read_tensors
from gradvitals.act.snap_fit import SnapshotError, check_fit
from gradvitals.act.snap_place import Place, Plain, moved
from gradvitals.act.snap_tree import TENSOR, marks
from gradvitals.act.subject import SHARED, Subject

KINDS = ("parameter/", "buffer/", "state/", "group/", "scaler/")
"""What the names of tensors begin with."""


@dataclass(frozen=True)
class Found:
    """What was read for this rank.

    Attributes:
        plain: Everything but tensors.
        tensors: This rank's part of every tensor, in host memory.
        changed: What is not as it was, in words; nothing where as many ranks read it as wrote it.
    """

    plain: Plain
    tensors: Mapping[str, Tensor]
    changed: Sequence[str] = ()


def read_snapshot(
    path: Path, meta: Mapping[str, Any], subject: Subject, here: Place, now: Sequence[Place], elsewhere: Collection[str]
) -> Found:
    """What one rank needs of a snapshot. It is checked that it fits; nothing of the subject is touched.

    Args:
        path: Its folder.
        meta: What was written down about it.
        subject: What it is to be put back into.
        here: The place of this rank.
        now: The places of all ranks.
        elsewhere: Names of parameters and buffers that only other ranks have.
    """
    num, safe = int(meta["num_processes"]), meta["plain"] == "safe"
    then = [Place(**place) for place in meta.get("places", ())] or [Place(rank, rank) for rank in range(num)]
    index = readable(path, lambda: read_index(path))
    source, plain, changed, others = here, None, list[str](), list[int]()
    if then == list(now):
        plain = readable(path, lambda: read_plain(path, index, [here.rank], safe=safe))[0]
        names = plain["kinds"].get("parameters")
        plain = plain if names is None or set(names) == set(subject.parameters()) else None
    if plain is None:
        plains = readable(path, lambda: read_plain(path, index, range(num), safe=safe))
        others = [place.rank for place in then if place.stage == here.stage]
        plain, source, changed = moved(here, now, plains, _of_single_ranks(index))
        members = _members(plains, subject.kinds()["members"], elsewhere)
        plain["kinds"] = {**plain["kinds"], "members": members}
    plain["state"] = subject.held(plain["state"])
    keys = _names_in(index, source, here, others)
    sizes = {name: index[key] for name, key in keys.items() if name not in elsewhere}
    check_fit(subject, plain, sizes, str(path))
    needed = {mark[TENSOR] for mark in marks([plain["state"], plain["groups"], plain["scaler"]])}
    needed |= {name for name in sizes if name.startswith(("parameter/", "buffer/"))}
    wanted = {name: keys[name] for name in sizes if name in needed}
    sharding = subject.sharding(plain, sizes)
    return Found(plain, readable(path, lambda: read_tensors(path, wanted, sizes, sharding)), tuple(changed))


def readable(path: Path, read: Callable[[], Any]) -> Any:
    """What `read` returns; its errors become one that says what to do."""
    try:
        return read()
    except (Exception, CheckpointException) as error:
        raise SnapshotError(
            f"{path} cannot be read ({reason(cause(error))}); remove it to go on from an older one"
        ) from error


def cause(error: BaseException) -> BaseException:
    """The error of a process that an error of DCP reports."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next((failure[0] for failure in failures.values()), error)


def reason(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _names_in(index: Index, source: Place, here: Place, others: Collection[int]) -> dict[str, str]:
    """Our names of the tensors that this rank may need, and their names in the files.

    What the source has of its own comes first, then what ranks share, then what others have of their own: a buffer of a
    stage that was elsewhere.
    """
    prefixes = [*(f"rank{rank}/" for rank in sorted(others, reverse=True)), here.common, source.own]
    order = {prefix: number for number, prefix in enumerate(prefixes)}
    found: dict[str, tuple[int, str]] = {}
    for key in index:
        head, _, rest = key.partition("/")
        prefix, name = (f"{head}/", rest) if rest.startswith(KINDS) else ("", key)
        if prefix in order and name.startswith(KINDS):
            found[name] = max(found.get(name, (-1, "")), (order[prefix], key))
    return {name: key for name, (_, key) in found.items()}


def _of_single_ranks(index: Index) -> set[str]:
    """Names of tensors that belong to a parameter, but that every rank has its own of."""
    parts = (key.split("/", 1) for key in index if key.startswith("rank"))
    return {name for _, name in parts if name.startswith("state/") and f"/{SHARED}/" not in name}


def _members(
    plains: Sequence[Plain], live: Sequence[Sequence[Sequence[str]]], elsewhere: Collection[str]
) -> list[list[list[str]]]:
    """Names of the parameters in each group of each optimizer: those of all ranks, without what others have now."""
    found: list[list[list[str]]] = []
    for number, groups in enumerate(plains[0]["kinds"]["members"]):
        found.append([])
        for which in range(len(groups)):
            every = [one["kinds"]["members"][number] for one in plains if number < len(one["kinds"]["members"])]
            names = {name: None for group in every if which < len(group) for name in group[which]}
            kept = [name for name in names if f"parameter/{name}" not in elsewhere]
            here = live[number][which] if number < len(live) and which < len(live[number]) else []
            # In another order they are the same: state is kept by name.
            found[number].append(list(here) if set(here) == set(kept) else kept)
    return found
