"""Which ranks take part in a run, what each of them holds, and how they meet."""

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
from gradvitals.types import Layout, TensorInfo, json_ready

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


@dataclass(frozen=True)
class Holdings:
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


@dataclass(frozen=True)
class RankInfo:
    """What every rank tells all others when watching begins. Small: a thousand of them are read by a thousand."""

    version: str
    settings: Mapping[str, str]
    """Each setting, as a short text."""
    stock: str
    """Fingerprint of its Holdings."""
    shards: tuple[int, ...]
    """For each kind of row, which shard it holds."""
    empty: tuple[int, ...]
    """Rows of which it holds nothing."""
    data_ranks: tuple[int, ...]
    """Ranks that see the same samples, itself among them."""
    idle: tuple[int, ...]
    """Rows that none of its optimizers steps."""
    stage: int | None


def take_stock(
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
    stock = Holdings(
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


EXCHANGE_SECONDS = 1800.0
"""How long a rank may be behind the others before they go on without it. Training does not wait for it."""

_meetings: collections.Counter[tuple[int, ...]] = collections.Counter()


@dataclass(frozen=True)
class Topology:
    """The ranks of a run and what each of them holds. Everything but `rank` and `rows` is the same on all."""

    rank: int
    world: int
    group: Any
    """A process group of our own, on the host: training never waits for it."""
    check_group: Any
    """Another one, for what ranks compare before they add anything up: nobody waits for the sums before it."""
    device_group: Any
    """The process group of the training itself."""
    layout: Layout
    slots: list[tuple[int, int]]
    windows: list[int]
    """ParameterTable, of all ranks together, that a sliding window follows."""
    rows: NDArray[np.int64]
    """For each row of this rank, which one of all it is."""
    slot_numbers: NDArray[np.int64]
    weights: NDArray[np.float64]
    """What each row of this rank counts in a sum over ranks: shards over holders."""
    part_weights: NDArray[np.float64]
    """The same for gradients that are not reduced over data workers yet."""
    is_whole: NDArray[np.bool_]
    """Which rows of this rank its data worker has in one piece, before gradients are reduced."""
    is_current: NDArray[np.bool_]
    """Which rows of this rank have their new values as soon as it has stepped: not those that only others step."""
    is_shared_out: NDArray[np.bool_]
    """Which rows of all are stepped by some of those who hold them, and not by others."""
    expected: NDArray[np.float64]
    """For each row of all, the sum of the weights of those who hold something of it."""
    num_stages: int
    share: float
    """What this rank counts in a sum over data workers."""
    num_sources: int
    """Data workers behind each gradient."""
    data_index: NDArray[np.int64]
    """For each rank, which data worker it belongs to."""
    kinds: NDArray[np.int64]
    """For each row of all, its kind: those of one kind have their replicas on the same ranks."""
    replica_sets: NDArray[np.int64]
    """For each kind and rank, the shard it holds; -1 where it has none. Equal shards must be equal bits."""

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all of the model."""
        return self.num_stages == 1 and bool((self.weights == 1 / self.world).all())

    @property
    def num_data(self) -> int:
        """Data workers."""
        return int(self.data_index.max()) + 1 if len(self.data_index) else 1


class MissingRanksError(RunError):
    """Some ranks did not come in time."""


@dataclass(frozen=True)
class Rendezvous:
    """Where ranks meet: the same name on all of them, once only."""

    store: Any
    ranks: tuple[int, ...]
    """Their global ranks."""
    rank: int
    timeout: float

    def tell(self, key: str, value: object) -> None:
        """Leave a note for all."""
        is_new = not self._is_there(key)  # it may be from a meeting that others did not come to
        self.store.set(key, zlib.compress(pickle.dumps(value)))
        if is_new:
            self.store.add(f"{key.rsplit('/', 1)[0]}/count", 1)

    def told(self, keys: Sequence[str]) -> list[Any]:
        """Read notes that are there."""
        try:
            found = self.store.multi_get(list(keys))
        except RuntimeError:  # not every store can
            found = [self.store.get(key) for key in keys]
        return [pickle.loads(zlib.decompress(bytes(value))) for value in found]

    def wait(self, keys: Sequence[str], what: str) -> None:
        """Wait until all notes are there.

        Raises:
            MissingRanksError: When they are not in time; it names the ranks that are missing.
        """
        deadline, pause = time.monotonic() + self.timeout, 0.002
        while not self._all_there(keys):
            if time.monotonic() > deadline:
                missing = [place for place, key in enumerate(keys) if not self._is_there(key)]
                who = _listed(missing) if len(keys) == len(self.ranks) else "0"  # what one tells all is the first's
                raise MissingRanksError(
                    f"of {len(self.ranks)} ranks, rank {who} did not {what} within "
                    f"{self.timeout:g} s. Call gradvitals.watch on every rank that trains the model, or pass those "
                    "that do as watch(group=...); Config(rank_timeout=...) sets how long to wait"
                )
            time.sleep(pause)  # asking is cheap; the store's own way to wait complains aloud when it is in vain
            pause = min(2 * pause, 0.2)

    def _all_there(self, keys: Sequence[str]) -> bool:
        if len(keys) == 1:
            return self._is_there(keys[0])
        return bool(self.store.add(f"{keys[0].rsplit('/', 1)[0]}/count", 0) >= len(keys))

    def _is_there(self, key: str) -> bool:
        return bool(self.store.check([key]))


def call_meeting(group: Any, timeout: float) -> Rendezvous:
    """The meeting of a process group, or of all ranks where it is None."""
    ranks = dist.get_process_group_ranks(group if group is not None else c10d._get_default_group())
    name = f"gradvitals/{_meetings[tuple(ranks)]}/{fingerprint(json.dumps(ranks))[:8]}"
    store = c10d.PrefixStore(name, c10d._get_default_store())
    return Rendezvous(store, tuple(ranks), ranks.index(dist.get_rank()), timeout)


def meet(meeting: Rendezvous, card: RankInfo, stock: Holdings, group: Any) -> Topology:
    """Tell all other ranks what this one brings along, hear the same of them, and find that it fits.

    Args:
        meeting: Where.
        card: What is told of this rank.
        stock: What it holds.
        group: The process group of the training.

    Raises:
        RunError: On all ranks alike, where one is missing or they do not fit together.
    """
    world = len(meeting.ranks)
    meeting.tell(f"card/{meeting.rank}", card)
    keys = [f"card/{rank}" for rank in range(world)]
    meeting.wait(keys, "begin to watch")
    # One that has waited too long is gone when another comes: only those who are ready go on, or none.
    meeting.tell(f"ready/{meeting.rank}", None)
    meeting.wait([f"ready/{rank}" for rank in range(world)], "stay until all had come")
    _meetings[meeting.ranks] += 1  # all are here: whatever comes of it, the next meeting is another one
    cards: list[RankInfo] = meeting.told(keys)
    check_settings(cards)
    kinds_of_stock = list(dict.fromkeys(other.stock for other in cards))
    if meeting.rank == next(rank for rank, other in enumerate(cards) if other.stock == card.stock):
        meeting.tell(f"stock/{card.stock}", stock)
    stock_keys = [f"stock/{name}" for name in kinds_of_stock]
    meeting.wait(stock_keys, "tell what it holds")
    stocks: dict[str, Holdings] = dict(zip(kinds_of_stock, meeting.told(stock_keys), strict=True))
    check_stocks(cards, stocks)
    topology = combine(meeting, cards, stocks, group)
    ours, checks = (own_group(group, EXCHANGE_SECONDS) for _ in range(2))
    return replace(topology, group=ours, check_group=checks)


def check_settings(cards: Sequence[RankInfo]) -> None:
    """All ranks must read the same things at the same steps."""
    for what, values in [("gradvitals", [card.version for card in cards])] + [
        (name, [card.settings.get(name, "") for card in cards]) for name in cards[0].settings
    ]:
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        if odd:
            noun = "the version of gradvitals" if what == "gradvitals" else f"the setting {what}"
            raise RunError(
                f"{noun} differs between ranks: {values[0]} on rank 0, {values[odd[0]]} on rank {_listed(odd)}; give "
                "all ranks the same gradvitals, the same Config and the same arguments of watch"
            )


def check_stocks(cards: Sequence[RankInfo], stocks: dict[str, Holdings]) -> None:
    """Ranks hold the same tensors, or those of different pipeline stages, which have no name in common."""
    names = {key: {info.name: info for info in stock.tensors} for key, stock in stocks.items()}
    for (key, ours), (other_key, theirs) in itertools.combinations(names.items(), 2):
        if not ours.keys() & theirs.keys():
            continue
        mine = [rank for rank, card in enumerate(cards) if card.stock == key]
        others = [rank for rank, card in enumerate(cards) if card.stock == other_key]
        raise RunError(
            f"rank {_listed(mine)} and rank {_listed(others)} do not hold the same parameters: "
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


def combine(meeting: Rendezvous, cards: Sequence[RankInfo], stocks: dict[str, Holdings], group: Any) -> Topology:
    """Put all stocks one after the other, in the order of their stage or of their first rank."""
    world = len(cards)
    first_rank = {key: next(r for r, card in enumerate(cards) if card.stock == key) for key in stocks}
    stages = {key: cards[first_rank[key]].stage for key in stocks}
    order = sorted(stocks, key=lambda key: (stages[key] if stages[key] is not None else 0, first_rank[key]))
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
        stock, members = stocks[key], [rank for rank, card in enumerate(cards) if card.stock == key]
        row0, depth0, head0, kind0 = len(tensors), len(layers), len(heads), len(sets)
        place[key] = (row0, len(slots))
        tensors += [replace(info, index=row0 + info.index, depth=depth0 + info.depth) for info in stock.tensors]
        layers += stock.layers
        heads += stock.heads
        slots += [(row0 + row, head0 + head) for row, head in stock.slots]
        windows += [row0 + row for row in stock.windows]
        kinds += [kind0 + kind for kind in stock.kinds]
        sets += [
            [cards[rank].shards[kind] if rank in set(members) else -1 for rank in range(world)]
            for kind in range(len(set(stock.kinds)))
        ]
        weights_of[key] = [shards / len(members) for shards in stock.shards]
        holders = np.full(len(stock.tensors), float(len(members)))
        for rank in members:
            holders[list(cards[rank].empty)] -= 1
        expected += (np.array(weights_of[key]) * holders).tolist()
        idle = np.bincount(
            np.array([row for rank in members for row in cards[rank].idle], dtype=np.int64),
            minlength=len(stock.tensors),
        )
        shared_out += ((idle > 0) & (idle < len(members))).tolist()
    mine = cards[meeting.rank].stock
    row0, slot0 = place[mine]
    data_index, merged = _data_index(cards, meeting.ranks)
    num_data, together = int(data_index.max()) + 1, data_index == data_index[meeting.rank]
    in_stage = together & np.array([card.stock == mine for card in cards])
    is_current = np.ones(len(stocks[mine].tensors), dtype=bool)
    is_current[list(cards[meeting.rank].idle)] = False
    is_current |= ~np.array(shared_out)[row0 : row0 + len(is_current)]
    return Topology(
        rank=meeting.rank,
        world=world,
        group=None,
        check_group=None,
        device_group=group,
        layout=Layout(tensors=tuple(tensors), layers=tuple(layers), heads=tuple(heads)),
        slots=slots,
        windows=windows,
        rows=row0 + np.arange(len(stocks[mine].tensors)),
        slot_numbers=slot0 + np.arange(len(stocks[mine].slots)),
        weights=np.array(weights_of[mine]),
        part_weights=np.array(stocks[mine].worker_shards) / int(in_stage.sum()),
        is_whole=np.array(stocks[mine].worker_shards) == 1,
        is_current=is_current,
        is_shared_out=np.array(shared_out, dtype=bool),
        expected=np.array(expected),
        num_stages=len(stocks),
        share=1 / int(together.sum()) / (1 if merged else len(stocks)),
        num_sources=num_data if merged else max(1, num_data // len(stocks)),
        data_index=data_index,
        kinds=np.array(kinds, dtype=np.int64),
        replica_sets=np.array(sets, dtype=np.int64).reshape(-1, world),
    )


def _data_index(cards: Sequence[RankInfo], ranks: Sequence[int]) -> tuple[NDArray[np.int64], bool]:
    """Number the data workers in the order of their first rank.

    In a pipeline the first worker of every stage is taken for one and the same, and so on, where all stages have as
    many: so ranks are laid out in any mesh.

    Returns:
        The number of each rank's worker, and whether a worker has all stages.
    """
    number = {rank: position for position, rank in enumerate(ranks)}
    firsts = [min(number[rank] for rank in card.data_ranks if rank in number) for card in cards]
    of_stage: dict[str, dict[int, int]] = {}
    for card, first in zip(cards, firsts, strict=True):
        mine = of_stage.setdefault(card.stock, {})
        mine.setdefault(first, len(mine))
    if len({len(workers) for workers in of_stage.values()}) == 1:
        return np.array([of_stage[card.stock][first] for card, first in zip(cards, firsts, strict=True)]), True
    numbers = {first: index for index, first in enumerate(dict.fromkeys(firsts))}
    return np.array([numbers[first] for first in firsts], dtype=np.int64), False


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
