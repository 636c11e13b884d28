"""From what all ranks have sent to the numbers of an audit: who differs, who is a double, who has left the others.

On the host, in numpy, with the same input and so the same outcome on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.functional.dispersion import leave_one_out_z, norm_dispersion, norm_ratios
from gradvitals.measure.ranks.prints import Prints

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SHARED = 0.5
"""Share of its samples that a data worker must have in common with one other to be its double."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one audit has gathered of W ranks, which are D data workers and hold C kinds of replicas."""

    norms: Floats
    """[D] Norms of the data workers' own gradients; nan where not known."""
    data_index: Ints
    """[W] Which data worker a rank is part of; -1 where not known."""
    rng_prints: Prints
    """[W] States of random numbers. Of this and all other prints, 0 is nothing."""
    sample_prints: Prints
    """[W, samples]"""
    grad_prints: Prints
    """[D]"""
    param_digest: Prints
    """[C, W] Digest of a rank's weights of one class: rows that are replicated over the same sets of ranks."""
    state_digest: Prints
    """[C, W] The same of their optimizer state."""
    replica_set: Ints
    """[C, W] Ranks with the same number hold the same bits; -1 for a rank that holds none."""


@dataclass
class Memory:
    """What one audit leaves for the next."""

    rng_equal: bool = False
    """Whether the random numbers of all ranks had been in one state, and have not all gone their own ways since."""
    samples: Prints = field(default_factory=lambda: np.zeros((0, 0), dtype=np.uint64))
    """The sample prints of the last audit."""

    def state_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {"rng_equal": self.rng_equal, "samples": self.samples.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.rng_equal = bool(state["rng_equal"])
        self.samples = np.array(state["samples"], dtype=np.uint64).reshape(len(state["samples"]), -1)


@dataclass(frozen=True)
class Suspect:
    """Ranks that should hold the same bits of a class of rows, and do not."""

    place: int
    """The class."""
    replica_set: int
    ranks: tuple[int, ...]
    odd: tuple[int, ...]
    """Those that are not with the majority; all of them where there is none."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The numbers of an audit. A metric that nothing could be compared for is not among them."""

    values: dict[str, float]
    ranks: dict[str, Floats]
    suspects: tuple[Suspect, ...] = ()


def audit_numbers(seen: Seen, memory: Memory) -> Verdict:
    """Make the numbers of an audit of what was gathered.

    Args:
        seen: What all ranks have sent.
        memory: What the last audit left; it is brought up to date.
    """
    values: dict[str, float] = {}
    ranks: dict[str, Floats] = {}
    _compare_norms(seen, values, ranks)
    _find_twins(seen, memory, values, ranks)
    _find_out_of_step(seen, memory, values, ranks)
    suspects = _compare_replicas(seen, values, ranks)
    memory.samples = seen.sample_prints.copy()
    return Verdict(values=values, ranks=ranks, suspects=suspects)


def tensor_mismatch(param_digest: Prints, state_digest: Prints, replica_set: Ints) -> Floats:
    """For every row, how many ranks do not hold the bits of the majority, in weights or optimizer state.

    Args:
        param_digest: [R, W] Digests of single tensors; 0 where a rank has none.
        state_digest: [R, W]
        replica_set: [R, W] As in `Seen`, here for each row.
    """
    result = np.zeros(len(replica_set))
    for row, sets in enumerate(replica_set):
        differs = np.zeros(len(sets), dtype=bool)
        for _, ranks in _replicas(sets):
            for digests in (param_digest[row], state_digest[row]):
                members = ranks[digests[ranks] != 0]
                differs[members] |= _groups(digests[members]) > 0
        result[row] = differs.sum()
    return result


def _compare_norms(seen: Seen, values: dict[str, float], ranks: dict[str, Floats]) -> None:
    if not np.isfinite(seen.norms).any():
        return
    ranks["ranks/norm"] = _by_rank(seen, seen.norms)
    dispersion = norm_dispersion(seen.norms)
    if np.isfinite(dispersion):
        values["ranks/norm_dispersion"] = dispersion
        ranks["ranks/norm_ratio"] = _by_rank(seen, norm_ratios(seen.norms))
        ranks["ranks/norm_z"] = _by_rank(seen, leave_one_out_z(seen.norms))


def _by_rank(seen: Seen, of_workers: Floats) -> Floats:
    """Numbers of the data workers, at each of their ranks."""
    return np.append(of_workers, np.nan)[seen.data_index]


def _find_twins(seen: Seen, memory: Memory, values: dict[str, float], ranks: dict[str, Floats]) -> None:
    lowest = _lowest_ranks(seen)
    workers = np.arange(len(lowest))
    by_gradient = _partners(workers, seen.grad_prints[:, None])
    samples = _informative(seen, memory)[lowest]
    by_samples = _partners(workers, samples)
    known = (seen.grad_prints != 0).sum() >= 2 or samples.any(axis=1).sum() >= 2
    if not known:
        return
    twin = np.where(by_gradient >= 0, by_gradient, by_samples)
    values["ranks/duplicates"] = float((twin >= 0).sum())
    ranks["ranks/twin"] = _by_rank(seen, np.where(twin >= 0, lowest[twin], -1).astype(np.float64))


def _lowest_ranks(seen: Seen) -> Ints:
    """The first rank of every data worker that has shown samples, or its first."""
    lowest = np.zeros(len(seen.norms), dtype=np.int64)
    shown = np.asarray(seen.sample_prints.any(axis=1))
    order = np.lexsort((-np.arange(len(shown)), shown))  # the last to be written wins
    order = order[seen.data_index[order] >= 0]
    lowest[seen.data_index[order]] = order
    return lowest


def _informative(seen: Seen, memory: Memory) -> Prints:
    """Sample prints that can tell data apart, 0 elsewhere.

    Inputs that are the same for all samples (a mask), or that were the same at the last audit (a grid of positions, one
    batch that is trained on again and again), say nothing about whose data they are.
    """
    prints = np.sort(seen.sample_prints, axis=1)
    count = (prints != 0).sum(axis=1)
    distinct = (np.diff(prints, axis=1, prepend=np.uint64(0)) != 0).sum(axis=1)
    says = (distinct > 1) | (count == 1)
    if memory.samples.shape == prints.shape:
        says &= (np.sort(memory.samples, axis=1) != prints).any(axis=1)
    return np.where(says[:, None], seen.sample_prints, np.uint64(0))


def _partners(workers: NDArray[Any], prints: Prints) -> Ints:
    """For every worker the lowest other one that it shares enough prints with; -1 for none.

    Sorting all prints finds who shares them, whatever the number of workers.
    """
    result = np.full(len(workers), -1, dtype=np.int64)
    who = np.repeat(workers, prints.shape[1])
    pairs = np.unique(np.stack([prints.ravel(), who.astype(np.uint64)]), axis=1) if prints.size else prints[:2]
    pairs = pairs[:, pairs[0] != 0]
    if not pairs.size:
        return result
    value, owner = pairs[0], pairs[1].astype(np.int64)
    _, start, size = np.unique(value, return_index=True, return_counts=True)
    first = np.repeat(owner[start], size)
    second = np.repeat(owner[np.minimum(start + 1, len(owner) - 1)], size)
    other = np.where(owner == first, second, first)
    shared = np.repeat(size, size) > 1
    own = np.bincount(owner, minlength=len(workers))
    (mine, theirs), votes = np.unique(np.stack([owner[shared], other[shared]]), axis=1, return_counts=True)
    enough = votes >= SHARED * own[mine]
    # In reverse, so that the lowest is what stays.
    result[mine[enough][::-1]] = theirs[enough][::-1]
    return result


def _find_out_of_step(seen: Seen, memory: Memory, values: dict[str, float], ranks: dict[str, Floats]) -> None:
    known = np.flatnonzero(seen.rng_prints != 0)
    world = len(seen.rng_prints)
    code = np.zeros(world)
    if len(known) >= 2:
        group = np.full(world, np.nan)
        group[known] = _groups(seen.rng_prints[known])
        ranks["ranks/rng"] = group
        in_largest = int((group == 0).sum())
        if in_largest == len(known):
            memory.rng_equal = True
        elif memory.rng_equal and 2 * in_largest > len(known):
            code[known] += group[known] > 0
        elif memory.rng_equal and len(known) == 2:
            code[known] += 1
        else:
            memory.rng_equal = False
    shown = np.flatnonzero(seen.sample_prints.any(axis=1) & (seen.data_index >= 0))
    order = shown[np.argsort(seen.data_index[shown], kind="stable")]
    _, sizes = np.unique(seen.data_index[order], return_counts=True)
    together = False
    for members in np.split(order, np.cumsum(sizes)[:-1]) if len(sizes) and sizes.max() > 1 else ():
        if len(members) > 1:
            together = True
            _, same = np.unique(seen.sample_prints[members], axis=0, return_inverse=True)
            code[members] += 2.0 * _is_odd(same.ravel().astype(np.uint64))
    if len(known) >= 2 or together:
        values["ranks/out_of_step"] = float((code > 0).sum())
        ranks["ranks/out_of_step"] = code


def _compare_replicas(seen: Seen, values: dict[str, float], ranks: dict[str, Floats]) -> tuple[Suspect, ...]:
    replica = np.full(len(seen.data_index), np.nan)
    suspects = []
    for place, sets in enumerate(seen.replica_set):
        for number, ranks_of_set in _replicas(sets):
            odd: set[int] = set()
            for digests in (seen.param_digest[place], seen.state_digest[place]):
                members = ranks_of_set[digests[ranks_of_set] != 0]
                if len(members) > 1:
                    differs = _is_odd(digests[members])
                    replica[members] = np.fmax(replica[members], differs)
                    odd.update(members[differs].tolist())
            if odd:
                suspects.append(Suspect(place, number, tuple(ranks_of_set.tolist()), tuple(sorted(odd))))
    if not np.isnan(replica).all():
        values["ranks/checksum_mismatch"] = float(len({suspect.place for suspect in suspects}))
        ranks["ranks/replica"] = replica
    return tuple(suspects)


def _replicas(sets: Ints) -> Iterator[tuple[int, Ints]]:
    """Every set of several ranks: its number and its ranks."""
    order = np.argsort(sets, kind="stable")
    numbers, starts, sizes = np.unique(sets[order], return_index=True, return_counts=True)
    for number, start, size in zip(numbers.tolist(), starts, sizes, strict=True):
        if number >= 0 and size > 1:
            yield number, order[start : start + size]


def _groups(prints: Prints) -> Ints:
    """The group of equal prints that each is in: 0 the largest, then by size, then by who comes first."""
    _, first, inverse, counts = np.unique(prints, return_index=True, return_inverse=True, return_counts=True)
    place = np.empty(len(counts), dtype=np.int64)
    place[np.lexsort((first, -counts))] = np.arange(len(counts))
    return np.asarray(place[inverse.ravel()])


def _is_odd(prints: Prints) -> NDArray[np.bool_]:
    """Who is not with the majority. Where two groups are the largest there is none: then all, if they differ."""
    groups = _groups(prints)
    sizes = np.bincount(groups)
    tied = len(sizes) > 1 and sizes[0] == sizes[1]
    return np.asarray((groups > 0) | tied)
