"""What one rank brings along: its tensors, which shards of them it holds, and which ranks see the same samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gradvitals.config import Config
from gradvitals.measure.ranks.fsdp import groups_of
from gradvitals.measure.ranks.shards import is_sharded, local, mesh_ranks, num_shards, placements, shard_index
from gradvitals.types import Layout, TensorInfo, json_ready


@dataclass(frozen=True)
class Stock:
    """The tensors of a rank: the same for all ranks but those of another pipeline stage."""

    tensors: tuple[TensorInfo, ...]
    layers: tuple[str, ...]
    heads: tuple[str, ...]
    slots: tuple[tuple[int, int], ...]
    windows: tuple[int, ...]
    """Rows that a sliding window follows."""
    shards: tuple[int, ...]
    """Into how many parts each row is cut."""
    worker_shards: tuple[int, ...]
    """Into how many of these the ranks of one data worker cut it, before gradients are reduced."""
    kinds: tuple[int, ...]
    """Rows of one kind are cut alike: their replicas are on the same ranks."""

    def to_json(self) -> str:
        """As text, the same for equal stocks."""
        tensors = [info.to_json() for info in self.tensors]
        rest = {name: value for name, value in asdict(self).items() if name != "tensors"}
        return json.dumps({"tensors": tensors, **rest}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Stock:
        """The inverse of `to_json`."""
        data = json.loads(text)
        tensors = tuple(TensorInfo.from_json(info) for info in data.pop("tensors"))
        slots = tuple((row, head) for row, head in data.pop("slots"))
        return cls(tensors=tensors, slots=slots, **{name: tuple(value) for name, value in data.items()})


@dataclass(frozen=True)
class Card:
    """What every rank tells all others when watching begins. Small: a thousand of them are read by a thousand."""

    version: str
    settings: Mapping[str, str]
    """Each setting, as a short text."""
    stock: str
    """Fingerprint of its Stock."""
    shards: tuple[int, ...]
    """For each kind of row, which shard it holds."""
    empty: tuple[int, ...]
    """Rows of which it holds nothing."""
    data_ranks: tuple[int, ...]
    """Ranks that see the same samples, itself among them."""
    idle: tuple[int, ...]
    """Rows that none of its optimizers steps."""
    stage: int | None

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Card:
        """The inverse of `to_json`."""
        data: dict[str, Any] = json.loads(text)
        as_tuples: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**as_tuples)


def take_stock(
    layout: Layout,
    slots: Sequence[tuple[int, int]],
    windows: Sequence[int],
    parameters: Sequence[nn.Parameter],
    data_dims: Mapping[int, tuple[int, ...]],
) -> tuple[Stock, tuple[int, ...], tuple[int, ...]]:
    """Describe what this rank holds.

    Args:
        layout: Its rows.
        slots: Row and head of each slice of an attention head.
        windows: Rows with a sliding window.
        parameters: The parameter of each row.
        data_dims: By a parameter's id, the dimensions of its mesh along which ranks see different samples.

    Returns:
        The stock, the shard it holds of each kind of row, and the rows of which it holds nothing.
    """
    patterns: dict[tuple[Any, ...], int] = {}
    kinds, held = [], []
    for parameter in parameters:
        pattern = (num_shards(parameter), tuple(map(str, placements(parameter))), mesh_ranks(parameter))
        if pattern not in patterns:
            patterns[pattern] = len(patterns)
            held.append(shard_index(parameter))
        kinds.append(patterns[pattern])
    stock = Stock(
        tensors=layout.tensors,
        layers=layout.layers,
        heads=layout.heads,
        slots=tuple(slots),
        windows=tuple(windows),
        shards=tuple(num_shards(parameter) for parameter in parameters),
        worker_shards=tuple(_worker_shards(parameter, data_dims.get(id(parameter), ())) for parameter in parameters),
        kinds=tuple(kinds),
    )
    empty = tuple(row for row, parameter in enumerate(parameters) if not local(parameter).numel())
    return stock, tuple(held), empty


def _worker_shards(parameter: Tensor, data_dims: Sequence[int]) -> int:
    count = 1
    for dim, placement in enumerate(placements(parameter)):
        if is_sharded(placement) and dim not in data_dims:
            count *= parameter.device_mesh.shape[dim]  # type: ignore[attr-defined]
    return count


def data_dimensions(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """For each parameter that FSDP shards, the dimensions of its mesh that are data parallel; all others are not."""
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    return {
        identity: _dims_within(parameters[identity], set(group.mesh_info.mesh.mesh.flatten().tolist()))
        for module in model.modules()
        for identity, group in groups_of(module).items()
        if identity in parameters
    }


def _dims_within(parameter: Tensor, ranks: set[int]) -> tuple[int, ...]:
    """Dimensions of a parameter's mesh that lead from this rank to ranks of a set only."""
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    here = mesh.get_coordinate()
    dims = []
    for dim in range(mesh.ndim):
        line = mesh.mesh[(*here[:dim], slice(None), *here[dim + 1 :])]
        if set(line.tolist()) <= ranks:
            dims.append(dim)
    return tuple(dims)


def data_ranks(parameters: Sequence[Tensor], data_dims: Mapping[int, tuple[int, ...]]) -> set[int]:
    """Global ranks that see the same samples as this one: those it cuts tensors with, other than to share data."""
    ranks = {dist.get_rank()}
    for parameter in parameters:
        if not placements(parameter):
            continue
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        free = data_dims.get(id(parameter), ())
        where = tuple(at if dim in free else slice(None) for dim, at in enumerate(mesh.get_coordinate()))
        ranks |= set(torch.as_tensor(mesh.mesh[where]).flatten().tolist())
    return ranks


def settings_of(config: Config, batch_told: bool) -> dict[str, str]:
    """Every setting that ranks must agree on, as a short text."""
    own = ("quiet", "extra", "pipeline_stage")
    settings = {name: value for name, value in asdict(config).items() if name not in own}
    settings["batch_size"] = "told" if batch_told else "not told"
    texts = {name: json.dumps(json_ready(value), default=str) for name, value in settings.items()}
    return {name: text if len(text) <= 24 else f"#{fingerprint(text)[:8]}" for name, text in texts.items()}


def fingerprint(text: str) -> str:
    """A short name for a text."""
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
