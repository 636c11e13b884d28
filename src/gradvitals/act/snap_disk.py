"""One snapshot as files, through torch.distributed.checkpoint: whole in one process, in parts from many.

Tensors are DCP's; all else is one pickle a process, kept as bytes among them. It is read back without running code
wherever its content allows that. DCP's own index is a pickle too, so: resume only from folders you trust.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gradvitals.act.snap_fit import Sizes

Group = Any
"""The process group that snapshots are written through; None in a single process."""


def write_files(
    path: Path, plain: Mapping[str, Any], tensors: Mapping[str, Tensor], specs: Mapping[str, Any], group: Group
) -> bool:
    """Write a snapshot into a folder of its own, down to the disk.

    Args:
        path: The folder; it is made.
        plain: Values other than tensors.
        tensors: This process's part of every tensor, in host memory.
        specs: How those that are sharded are spread over processes.
        group: The processes that write together.

    Returns:
        Whether `plain` can be read back without running code.
    """
    content = _pickled(plain)
    blob = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    state = {_key(name, group): _whole(tensor, specs.get(name)) for name, tensor in tensors.items()}
    _be_quiet()
    # Copying ahead would wait for streams of a device that has nothing to do with it.
    writer = filesystem.FileSystemWriter(path, per_thread_copy_ahead=0)
    state_dict_saver.save(
        state | {_plain_key(group): blob}, storage_writer=writer, process_group=group, no_dist=group is None
    )
    return _is_safe(content)


def read_plain(path: Path, group: Group, *, safe: bool) -> tuple[dict[str, Any], Sizes]:
    """The plain values of a snapshot, and shapes and dtypes of its tensors. No tensor is read."""
    index = filesystem.FileSystemReader(path).read_metadata().state_dict_metadata
    found = {key: entry for key, entry in index.items() if isinstance(entry, TensorStorageMetadata)}
    blob = torch.empty(found[_plain_key(group)].size, dtype=torch.uint8)
    _load(path, {_plain_key(group): blob}, group)
    own = _own_prefix(group)
    sizes = {
        key.removeprefix(own): (entry.size, entry.properties.dtype)
        for key, entry in found.items()
        if key.startswith((own, "parameter/", "state/", "group/", "scaler/"))
    }
    return _unpickled(blob.numpy().tobytes(), safe=safe), sizes


def read_tensors(path: Path, sizes: Sizes, sharding: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """This process's part of every tensor of a snapshot, in fresh host memory."""
    local = {
        name: torch.empty(sharding[name].to_local().shape if name in sharding else shape, dtype=dtype)  # type: ignore[attr-defined]
        for name, (shape, dtype) in sizes.items()
    }
    specs = {name: spec_of(tensor) for name, tensor in sharding.items()}
    _load(path, {_key(name, group): _whole(tensor, specs.get(name)) for name, tensor in local.items()}, group)
    return local


def spec_of(tensor: Tensor) -> Any:
    """How a tensor is spread over processes; None if it is not."""
    return getattr(tensor, "_spec", None)


def _whole(local: Tensor, spec: Any) -> Tensor:
    if spec is None:
        return local
    from torch.distributed.tensor import DTensor

    # DTensor.from_local would move host memory to the device of the mesh.
    return DTensor(local, spec, requires_grad=False)


def _key(name: str, group: Group) -> str:
    """Buffers may differ between processes, all else is the same or sharded."""
    return _own_prefix(group) + name if name.startswith("buffer/") else name


def _plain_key(group: Group) -> str:
    return f"plain/{_own_prefix(group)}"


def _own_prefix(group: Group) -> str:
    return f"rank{dist.get_rank(group) if group is not None else 0}/"


def _load(path: Path, state: dict[str, Tensor], group: Group) -> None:
    _be_quiet()
    state_dict_loader.load(
        state, storage_reader=filesystem.FileSystemReader(path), process_group=group, no_dist=group is None
    )


def _be_quiet() -> None:
    """DCP warns that there is one process, at every call. A filter is set, not lent: others may warn meanwhile."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _pickled(plain: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(dict(plain), file)
    return file.getvalue()


def _unpickled(content: bytes, *, safe: bool) -> Any:
    where = None if torch.cuda.is_available() else "cpu"
    # For good, not for the moment: another thread may be adding its own meanwhile.
    torch.serialization.add_safe_globals(_numpy_globals())
    return torch.load(io.BytesIO(content), map_location=where, weights_only=safe)


def _is_safe(content: bytes) -> bool:
    try:
        _unpickled(content, safe=True)
    except pickle.UnpicklingError:
        return False
    return True


def _numpy_globals() -> list[Any]:
    """What a pickled array or number of numpy is made by; none of it runs anything else."""
    kinds = {type(np.dtype(code)) for code in "?bhilqBHILQefdFD"}
    rebuild = np.ones(1).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    return [np.ndarray, np.dtype, rebuild, scalar, *kinds]
