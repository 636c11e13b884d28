"""Describes the ranks of a run and what each of them holds, and how they find each other."""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import pickle
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from gradvitals.config import Config
from gradvitals.distributed.fsdp import groups_of
from gradvitals.distributed.shards import is_sharded, local, mesh_ranks, num_shards, placements, shard_index
from gradvitals.errors import RunError
from gradvitals.format import listed
from gradvitals.types import Layout, TensorInfo, json_ready

_made: collections.Counter[tuple[int, ...]] = collections.Counter()


def own_group(group: Any = None, seconds: float = 1800.0) -> Any:
    """Returns a new gloo group of the ranks of `group`, of all ranks for None. All of them must call it.

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
    # Torch names a group of some ranks after the number of groups that this rank is in. If that differs between
    # ranks, they never find each other.
    original = getattr(c10d, "_hash_ranks_to_str", None)
    if original is not None:
        c10d._hash_ranks_to_str = lambda ranks: name
    try:
        return dist.new_group(ranks, use_local_synchronization=True, **options)
    finally:
        if original is not None:
            c10d._hash_ranks_to_str = original


@dataclass(frozen=True)
class Holdings:
    """The tensors of a rank: the same on all ranks of a pipeline stage."""

    tensors: tuple[TensorInfo, ...]
    layers: tuple[str, ...]
    heads: tuple[str, ...]
    slots: tuple[tuple[int, int], ...]
    windows: tuple[int, ...]
    """Rows that a sliding window follows."""
    shards: tuple[int, ...]
    """The number of shards of each row."""
    worker_shards: tuple[int, ...]
    """The number of shards within one data-parallel worker, before gradients are reduced."""
    kinds: tuple[int, ...]
    """The kind of each row: rows of one kind have their replicas on the same ranks."""


@dataclass(frozen=True)
class RankInfo:
    """The facts that every rank sends to all others at the start. Small: a thousand ranks read a thousand of them."""

    version: str
    settings: Mapping[str, str]
    """Each setting as a short text."""
    holdings: str
    """Fingerprint of its Holdings."""
    shards: tuple[int, ...]
    """For each kind of row, which shard it holds."""
    empty: tuple[int, ...]
    """Rows of which it holds nothing."""
    data_ranks: tuple[int, ...]
    """Ranks that see the same samples, including itself."""
    idle: tuple[int, ...]
    """Rows that none of its optimizers steps."""
    stage: int | None


def describe_holdings(
    layout: Layout,
    slots: Sequence[tuple[int, int]],
    windows: Sequence[int],
    parameters: Sequence[nn.Parameter],
    data_dims: Mapping[int, tuple[int, ...]],
) -> tuple[Holdings, tuple[int, ...], tuple[int, ...]]:
    """Describe what this rank holds.

    Args:
        layout: Its rows.
        slots: Row and head of each slice of an attention head.
        windows: Rows with a sliding window.
        parameters: The parameter of each row.
        data_dims: By a parameter's id, the dimensions of its mesh along which ranks see different samples.

    Returns:
        The holdings, the shard it holds of each kind of row, and the rows of which it holds nothing.
    """
    patterns: dict[tuple[Any, ...], int] = {}
    kinds, held = [], []
    for parameter in parameters:
        pattern = (num_shards(parameter), tuple(map(str, placements(parameter))), mesh_ranks(parameter))
        if pattern not in patterns:
            patterns[pattern] = len(patterns)
            held.append(shard_index(parameter))
        kinds.append(patterns[pattern])
    holdings = Holdings(
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
    return holdings, tuple(held), empty


def _worker_shards(parameter: Tensor, data_dims: Sequence[int]) -> int:
    count = 1
    for dim, placement in enumerate(placements(parameter)):
        if is_sharded(placement) and dim not in data_dims:
            count *= parameter.device_mesh.shape[dim]  # type: ignore[attr-defined]
    return count


def data_dimensions(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """Returns, by the id of each parameter that FSDP shards, the data-parallel dimensions of its mesh."""
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    return {
        identity: _dims_within(parameters[identity], set(group.mesh_info.mesh.mesh.flatten().tolist()))
        for module in model.modules()
        for identity, group in groups_of(module).items()
        if identity in parameters
    }


def _dims_within(parameter: Tensor, ranks: set[int]) -> tuple[int, ...]:
    """Returns the dimensions of a parameter's mesh along which this rank only meets ranks of a set."""
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    here = mesh.get_coordinate()
    dims = []
    for dim in range(mesh.ndim):
        line = mesh.mesh[(*here[:dim], slice(None), *here[dim + 1 :])]
        if set(line.tolist()) <= ranks:
            dims.append(dim)
    return tuple(dims)


def data_ranks(parameters: Sequence[Tensor], data_dims: Mapping[int, tuple[int, ...]]) -> set[int]:
    """Returns the global ranks that see the same samples: those that share tensor, not data parallelism with it."""
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
    """Returns every setting that ranks must agree on, as a short text."""
    own = ("quiet", "extra", "pipeline_stage")
    settings = {name: value for name, value in asdict(config).items() if name not in own}
    settings["batch_size"] = "told" if batch_told else "not told"
    texts = {name: json.dumps(json_ready(value), default=str) for name, value in settings.items()}
    return {name: text if len(text) <= 24 else f"#{fingerprint(text)[:8]}" for name, text in texts.items()}


def fingerprint(text: str) -> str:
    """Returns a short hash of a text."""
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


EXCHANGE_SECONDS = 1800.0
"""Longest time a rank may be behind before the others stop exchanging numbers with it. Training does not wait."""

_rendezvous_count: collections.Counter[tuple[int, ...]] = collections.Counter()


@dataclass(frozen=True)
class Topology:
    """The ranks of a run and what each of them holds."""

    rank: int
    world: int
    group: Any
    """A gloo group of our own: training never waits for it."""
    check_group: Any
    """Another one, to compare what ranks are about to add up while earlier sums are in progress."""
    device_group: Any
    """The process group of the training."""
    layout: Layout
    slots: list[tuple[int, int]]
    windows: list[int]
    """Rows, of all ranks together, that a sliding window follows."""
    rows: NDArray[np.int64]
    """For each row of this rank, its place among those of all ranks."""
    slot_numbers: NDArray[np.int64]
    weights: NDArray[np.float64]
    """The weight of each row of this rank in a sum over ranks: shards over holders."""
    part_weights: NDArray[np.float64]
    """The same for gradients before the reduction."""
    is_whole: NDArray[np.bool_]
    """Which rows this rank's worker has in one piece before the reduction."""
    is_current: NDArray[np.bool_]
    """Which rows of this rank have their new values right after its step: not those that only other ranks step."""
    is_shared_out: NDArray[np.bool_]
    """Which rows of all ranks are stepped by some of their holders only."""
    expected: NDArray[np.float64]
    """For each row of all ranks, the sum of the weights of its holders."""
    num_stages: int
    share: float
    """The weight of this rank in a sum over data-parallel workers."""
    num_sources: int
    """Data-parallel workers behind each gradient."""
    data_index: NDArray[np.int64]
    """For each rank, the data-parallel worker it belongs to."""
    kinds: NDArray[np.int64]
    """For each row of all ranks, its kind."""
    replica_sets: NDArray[np.int64]
    """For each kind and rank, the shard it holds; -1 for none. Equal shards must have equal bits."""

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all of the model."""
        return self.num_stages == 1 and bool((self.weights == 1 / self.world).all())

    @property
    def num_data(self) -> int:
        """The number of data-parallel workers."""
        return int(self.data_index.max()) + 1 if len(self.data_index) else 1


class MissingRanksError(RunError):
    """Some ranks did not call `watch` in time."""


@dataclass(frozen=True)
class Rendezvous:
    """A place in the store of torch.distributed where the ranks of one run exchange values."""

    store: Any
    ranks: tuple[int, ...]
    """Their global ranks."""
    rank: int
    timeout: float

    def publish(self, key: str, value: object) -> None:
        """Publish a value to all ranks."""
        is_new = not self._is_there(key)  # else it is left from a rendezvous that failed
        self.store.set(key, zlib.compress(pickle.dumps(value)))
        if is_new:
            self.store.add(f"{key.rsplit('/', 1)[0]}/count", 1)

    def read(self, keys: Sequence[str]) -> list[Any]:
        """Returns published values."""
        try:
            found = self.store.multi_get(list(keys))
        except RuntimeError:  # not every store supports it
            found = [self.store.get(key) for key in keys]
        return [pickle.loads(zlib.decompress(bytes(value))) for value in found]

    def wait(self, keys: Sequence[str], what: str) -> None:
        """Wait until all values are published.

        Raises:
            MissingRanksError: If they are not in time; names the missing ranks.
        """
        deadline, pause = time.monotonic() + self.timeout, 0.002
        while not self._all_there(keys):
            if time.monotonic() > deadline:
                missing = [place for place, key in enumerate(keys) if not self._is_there(key)]
                who = listed(missing) if len(keys) == len(self.ranks) else "0"  # a single value is published by rank 0
                raise MissingRanksError(
                    f"of {len(self.ranks)} ranks, rank {who} did not {what} within "
                    f"{self.timeout:g} s. Call gradvitals.watch on every rank that trains the model, or pass those "
                    "that do as watch(group=...); Config(rank_timeout=...) sets how long to wait"
                )
            time.sleep(pause)  # the store's own wait prints a warning if it times out
            pause = min(2 * pause, 0.2)

    def _all_there(self, keys: Sequence[str]) -> bool:
        if len(keys) == 1:
            return self._is_there(keys[0])
        return bool(self.store.add(f"{keys[0].rsplit('/', 1)[0]}/count", 0) >= len(keys))

    def _is_there(self, key: str) -> bool:
        return bool(self.store.check([key]))


def find_rendezvous(group: Any, timeout: float) -> Rendezvous:
    """Returns the rendezvous of a process group, of all ranks for None."""
    ranks = dist.get_process_group_ranks(group if group is not None else c10d._get_default_group())
    name = f"gradvitals/{_rendezvous_count[tuple(ranks)]}/{fingerprint(json.dumps(ranks))[:8]}"
    store = c10d.PrefixStore(name, c10d._get_default_store())
    return Rendezvous(store, tuple(ranks), ranks.index(dist.get_rank()), timeout)


def exchange_holdings(rendezvous: Rendezvous, info: RankInfo, holdings: Holdings, group: Any) -> Topology:
    """Exchange with all ranks what each of them holds, and check that it fits together.

    Args:
        rendezvous: Where to exchange it.
        info: This rank.
        holdings: What it holds.
        group: The process group of the training.

    Raises:
        RunError: On all ranks alike, if one is missing or they do not fit together.
    """
    world = len(rendezvous.ranks)
    rendezvous.publish(f"info/{rendezvous.rank}", info)
    keys = [f"info/{rank}" for rank in range(world)]
    rendezvous.wait(keys, "begin to watch")
    # A rank that timed out is gone when a late one comes: continue only if all are ready.
    rendezvous.publish(f"ready/{rendezvous.rank}", None)
    rendezvous.wait([f"ready/{rank}" for rank in range(world)], "wait until all ranks watched")
    _rendezvous_count[rendezvous.ranks] += 1  # all are here: the next rendezvous needs another name
    infos: list[RankInfo] = rendezvous.read(keys)
    check_settings(infos)
    fingerprints = list(dict.fromkeys(other.holdings for other in infos))
    if rendezvous.rank == next(rank for rank, other in enumerate(infos) if other.holdings == info.holdings):
        rendezvous.publish(f"holdings/{info.holdings}", holdings)
    holding_keys = [f"holdings/{name}" for name in fingerprints]
    rendezvous.wait(holding_keys, "say which tensors it holds")
    holdings_of: dict[str, Holdings] = dict(zip(fingerprints, rendezvous.read(holding_keys), strict=True))
    check_holdings(infos, holdings_of)
    topology = combine(rendezvous, infos, holdings_of, group)
    ours, checks = (own_group(group, EXCHANGE_SECONDS) for _ in range(2))
    return replace(topology, group=ours, check_group=checks)


def check_settings(infos: Sequence[RankInfo]) -> None:
    """Check that all ranks read the same at the same steps."""
    for what, values in [("gradvitals", [info.version for info in infos])] + [
        (name, [info.settings.get(name, "") for info in infos]) for name in infos[0].settings
    ]:
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        if odd:
            noun = "the version of gradvitals" if what == "gradvitals" else f"the setting {what}"
            raise RunError(
                f"{noun} differs between ranks: {values[0]} on rank 0, {values[odd[0]]} on rank {listed(odd)}; give "
                "all ranks the same gradvitals, the same Config and the same arguments of watch"
            )


def check_holdings(infos: Sequence[RankInfo], holdings_of: dict[str, Holdings]) -> None:
    """Check that ranks hold the same tensors, or those of pipeline stages, which have no name in common."""
    names = {key: {info.name: info for info in holdings.tensors} for key, holdings in holdings_of.items()}
    for (key, ours), (other_key, theirs) in itertools.combinations(names.items(), 2):
        if not ours.keys() & theirs.keys():
            continue
        mine = [rank for rank, info in enumerate(infos) if info.holdings == key]
        others = [rank for rank, info in enumerate(infos) if info.holdings == other_key]
        raise RunError(
            f"rank {listed(mine)} and rank {listed(others)} do not hold the same parameters: "
            f"{_difference(ours, theirs)}. Ranks that train one model must build it alike; pipeline stages that use "
            "the same names for different parameters need Config(pipeline_stage=...) with a number of their own"
        )


def _difference(ours: dict[str, TensorInfo], theirs: dict[str, TensorInfo]) -> str:
    for name in [*ours, *theirs]:
        mine, other = ours.get(name), theirs.get(name)
        if mine is None or other is None:
            return f"{name!r} is on {'the second' if mine is None else 'the first'} only"
        if mine.shape != other.shape:
            return f"{name!r} has the shape {list(mine.shape)} on one and {list(other.shape)} on the other"
        if mine.dtype != other.dtype:
            return f"{name!r} is {mine.dtype} on one and {other.dtype} on the other"
    return "they are sharded, frozen or followed differently"


def combine(
    rendezvous: Rendezvous, infos: Sequence[RankInfo], holdings_of: dict[str, Holdings], group: Any
) -> Topology:
    """Concatenate the holdings of all pipeline stages, in the order of stage or of first rank."""
    world = len(infos)
    first_rank = {key: next(r for r, info in enumerate(infos) if info.holdings == key) for key in holdings_of}
    stages = {key: infos[first_rank[key]].stage for key in holdings_of}
    order = sorted(holdings_of, key=lambda key: (stages[key] if stages[key] is not None else 0, first_rank[key]))
    tensors: list[TensorInfo] = []
    layers: list[str] = []
    heads: list[str] = []
    slots: list[tuple[int, int]] = []
    windows: list[int] = []
    kinds: list[int] = []
    sets: list[list[int]] = []
    expected: list[float] = []
    place: dict[str, tuple[int, int]] = {}
    weights_of: dict[str, list[float]] = {}
    shared_out: list[bool] = []
    for key in order:
        holdings, members = holdings_of[key], [rank for rank, info in enumerate(infos) if info.holdings == key]
        row0, depth0, head0, kind0 = len(tensors), len(layers), len(heads), len(sets)
        place[key] = (row0, len(slots))
        tensors += [replace(info, index=row0 + info.index, depth=depth0 + info.depth) for info in holdings.tensors]
        layers += holdings.layers
        heads += holdings.heads
        slots += [(row0 + row, head0 + head) for row, head in holdings.slots]
        windows += [row0 + row for row in holdings.windows]
        kinds += [kind0 + kind for kind in holdings.kinds]
        sets += [
            [infos[rank].shards[kind] if rank in set(members) else -1 for rank in range(world)]
            for kind in range(len(set(holdings.kinds)))
        ]
        weights_of[key] = [shards / len(members) for shards in holdings.shards]
        holders = np.full(len(holdings.tensors), float(len(members)))
        for rank in members:
            holders[list(infos[rank].empty)] -= 1
        expected += (np.array(weights_of[key]) * holders).tolist()
        idle = np.bincount(
            np.array([row for rank in members for row in infos[rank].idle], dtype=np.int64),
            minlength=len(holdings.tensors),
        )
        shared_out += ((idle > 0) & (idle < len(members))).tolist()
    mine = infos[rendezvous.rank].holdings
    row0, slot0 = place[mine]
    data_index, merged = _data_index(infos, rendezvous.ranks)
    num_data, together = int(data_index.max()) + 1, data_index == data_index[rendezvous.rank]
    in_stage = together & np.array([info.holdings == mine for info in infos])
    is_current = np.ones(len(holdings_of[mine].tensors), dtype=bool)
    is_current[list(infos[rendezvous.rank].idle)] = False
    is_current |= ~np.array(shared_out)[row0 : row0 + len(is_current)]
    return Topology(
        rank=rendezvous.rank,
        world=world,
        group=None,
        check_group=None,
        device_group=group,
        layout=Layout(tensors=tuple(tensors), layers=tuple(layers), heads=tuple(heads)),
        slots=slots,
        windows=windows,
        rows=row0 + np.arange(len(holdings_of[mine].tensors)),
        slot_numbers=slot0 + np.arange(len(holdings_of[mine].slots)),
        weights=np.array(weights_of[mine]),
        part_weights=np.array(holdings_of[mine].worker_shards) / int(in_stage.sum()),
        is_whole=np.array(holdings_of[mine].worker_shards) == 1,
        is_current=is_current,
        is_shared_out=np.array(shared_out, dtype=bool),
        expected=np.array(expected),
        num_stages=len(holdings_of),
        share=1 / int(together.sum()) / (1 if merged else len(holdings_of)),
        num_sources=num_data if merged else max(1, num_data // len(holdings_of)),
        data_index=data_index,
        kinds=np.array(kinds, dtype=np.int64),
        replica_sets=np.array(sets, dtype=np.int64).reshape(-1, world),
    )


def _data_index(infos: Sequence[RankInfo], ranks: Sequence[int]) -> tuple[NDArray[np.int64], bool]:
    """Number the data-parallel workers in the order of their first rank.

    In a pipeline whose stages have equally many workers, the n-th workers of all stages are one worker, as in any
    device mesh.

    Returns:
        The number of each rank's worker, and whether workers span all stages.
    """
    number = {rank: position for position, rank in enumerate(ranks)}
    firsts = [min(number[rank] for rank in info.data_ranks if rank in number) for info in infos]
    of_stage: dict[str, dict[int, int]] = {}
    for info, first in zip(infos, firsts, strict=True):
        mine = of_stage.setdefault(info.holdings, {})
        mine.setdefault(first, len(mine))
    if len({len(workers) for workers in of_stage.values()}) == 1:
        return np.array([of_stage[info.holdings][first] for info, first in zip(infos, firsts, strict=True)]), True
    numbers = {first: index for index, first in enumerate(dict.fromkeys(firsts))}
    return np.array([numbers[first] for first in firsts], dtype=np.int64), False
