"""Process groups and meshes that all jobs of a process share.

Every group of gloo has a thread that wakes a hundred times a second, whether there is work or not: hundreds of them
take more of the machine than what is tested. A job that fails ends its processes, so none is spoilt for the next.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TIMEOUT = timedelta(seconds=20)


@cache
def all_ranks() -> dist.ProcessGroup:
    """Of training, apart from the one that processes are begun with."""
    return dist.new_group(list(range(dist.get_world_size())), timeout=TIMEOUT)


@cache
def line(name: str) -> DeviceMesh:
    """All ranks, side by side."""
    return DeviceMesh.from_group(all_ranks(), "cpu", mesh_dim_names=(name,))


@cache
def square(rows: str, columns: str) -> DeviceMesh:
    """Four ranks, two by two."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=(rows, columns))


def end_those_of_monitors() -> None:
    """Each Monitor has made one, and is closed on all ranks."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_desc == "gradvitals":
            dist.destroy_process_group(group)
