"""A process group of our own, of the same ranks as another: training must not meet our messages."""

from __future__ import annotations

import collections
import hashlib
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

_made: collections.Counter[tuple[int, ...]] = collections.Counter()


def own_group(group: Any = None, seconds: float = 1800.0) -> Any:
    """A new group for messages of the host, of the ranks of `group`; of all for None. All of them must call it.

    Args:
        group: Another group.
        seconds: How long its collectives wait for a rank.
    """
    options: dict[str, Any] = {"backend": "gloo", "timeout": timedelta(seconds=seconds), "group_desc": "gradvitals"}
    if group is None or dist.get_world_size(group) == dist.get_world_size():
        return dist.new_group(**options)
    ranks = dist.get_process_group_ranks(group)
    _made[tuple(ranks)] += 1
    name = hashlib.sha1(f"gradvitals {ranks} {_made[tuple(ranks)]}".encode(), usedforsecurity=False).hexdigest()
    # Torch would name a group of some ranks after the number of groups that this rank is in. Where that is not the
    # same on all of them they never find each other.
    original = getattr(c10d, "_hash_ranks_to_str", None)
    if original is not None:
        c10d._hash_ranks_to_str = lambda ranks: name
    try:
        return dist.new_group(ranks, use_local_synchronization=True, **options)
    finally:
        if original is not None:
            c10d._hash_ranks_to_str = original
