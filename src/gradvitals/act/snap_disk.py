"""One snapshot as files, through torch.distributed.checkpoint: whole in one process, in parts from many.

Tensors are DCP's; all else is one pickle a process, kept as bytes among them. It is read back without running code
wherever its content allows that. DCP's own index is a pickle too, so: resume only from folders you trust.
"""

from __future__ import annotations

import inspect
import io
import pickle
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gradvitals.act.snap_fit import Sizes
from gradvitals.act.snap_place import Place
from gradvitals.distributed.shards import local as part_of

Group = Any
"""The process group that snapshots are written through; None in a single process."""

TAKES_NO_DIST = "no_dist" in inspect.signature(state_dict_saver.save).parameters
"""In torch 2.6 only the older functions do, which later ones call deprecated."""

Index = dict[str, tuple[torch.Size, torch.dtype]]
"""Shapes and dtypes by the names that tensors have in the files."""


def write_files(
    path: Path,
    plain: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    specs: Mapping[str, Any],
    place: Place,
    group: Group,
) -> bool:
    """Write a snapshot into a folder of its own, down to the disk.

    Args:
        path: The folder; it is made.
        plain: Values other than tensors; under ``own`` the names of tensors that are this process's alone.
        tensors: This process's part of every tensor, in host memory.
        specs: How those that are sharded are spread over processes.
        place: Where this process stands among those that write together.
        group: Those.

    Returns:
        Whether `plain` can be read back without running code.
    """
    own = set(plain["own"])
    digest = _digest(tensors[name] for name in sorted(own) if name.startswith("buffer/"))
    content = _pickled({**plain, "place": place.to_json(), "digest": digest})
    blob = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    state = {
        (place.own if name in own else place.common) + name: _whole(tensor, specs.get(name))
        for name, tensor in tensors.items()
    }
    _be_quiet()
    # Copying ahead would wait for streams of a device that has nothing to do with it.
    writer = filesystem.FileSystemWriter(path, per_thread_copy_ahead=0)
    save: Any = state_dict_saver.save if TAKES_NO_DIST else state_dict_saver.save_state_dict
    save(state | {_plain_key(place.rank): blob}, storage_writer=writer, process_group=group, no_dist=group is None)
    return _is_safe(content)


def read_index(path: Path) -> Index:
    """Shapes and dtypes of the tensors of a snapshot, by their names in the files."""
    index = filesystem.FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        key: (entry.size, entry.properties.dtype)
        for key, entry in index.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_plain(path: Path, index: Index, ranks: Sequence[int], *, safe: bool) -> list[dict[str, Any]]:
    """The plain values that these ranks have written. No tensor is read."""
    blobs = {_plain_key(rank): torch.empty(index[_plain_key(rank)][0], dtype=torch.uint8) for rank in ranks}
    _load(path, dict(blobs))
    return [_unpickled(blob.numpy().tobytes(), safe=safe) for blob in blobs.values()]


def read_tensors(
    path: Path, keys: Mapping[str, str], sizes: Sizes, sharding: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """This process's part of tensors of a snapshot, in fresh host memory.

    Args:
        path: The snapshot's folder.
        keys: What is wanted: our names, and those in the files.
        sizes: Shapes and dtypes by our names.
        sharding: For those that are spread over processes here, a tensor that is spread in the same way.
    """
    local = {
        name: torch.empty(part_of(sharding[name]).shape if name in sharding else sizes[name][0], dtype=sizes[name][1])
        for name in keys
    }
    whole = {
        name: _whole(tensor, spec_of(sharding[name]) if name in sharding else None) for name, tensor in local.items()
    }
    _load(path, {keys[name]: tensor for name, tensor in whole.items()})
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


def _plain_key(rank: int) -> str:
    return f"plain/rank{rank}/"


def _digest(tensors: Iterable[Tensor]) -> int:
    """Tells whether two processes hold the same."""
    found = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        found = zlib.crc32(flat.numpy().data, found)
    return found


def _load(path: Path, state: dict[str, Tensor]) -> None:
    """Each process reads what it needs by itself, so that one that cannot does not leave the others waiting."""
    _be_quiet()
    load: Any = state_dict_loader.load if TAKES_NO_DIST else state_dict_loader.load_state_dict
    load(state, storage_reader=filesystem.FileSystemReader(path), no_dist=True)


def _be_quiet() -> None:
    """DCP warns that there is one process, at every call. A filter is set, not lent: others may warn meanwhile."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    if not TAKES_NO_DIST:
        warnings.filterwarnings("ignore", message="`(save|load)_state_dict` is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated", category=UserWarning)


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
