"""Checks whether ranks agree, by checksums of replicas and fingerprints of samples and random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils import _pytree as pytree

from gradvitals.collect import reductions
from gradvitals.collect.moments import stepping
from gradvitals.collect.transfer import ReadingBuffer
from gradvitals.distributed.shards import local
from gradvitals.distributed.topology import Topology
from gradvitals.functional.dispersion import leave_one_out_z, norm_dispersion, norm_ratios
from gradvitals.worker.record import Floats
from gradvitals.worker.sums import StepSums

Prints = NDArray[np.uint64]

HALF = 2**32


def mixed(numbers: ArrayLike) -> Prints:
    """Returns a one-to-one hash of every 64-bit number: the finalizer of splitmix64.

    >>> hex(int(mixed(0)))
    '0xe220a8397b1dcdaf'
    """
    # At least one dimension: numpy warns if a product of scalars wraps, which is intended here.
    x = np.atleast_1d(np.asarray(numbers, dtype=np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).reshape(np.shape(numbers))


def print_of(data: bytes) -> int:
    """Returns a 64-bit hash of some bytes, never 0, which stands for nothing."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


def split(prints: Prints) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the low and the high halves, which float64 holds exactly.

    >>> low, high = split(np.array([2**63 + 5], dtype=np.uint64))
    >>> float(low[0]), float(high[0])
    (5.0, 2147483648.0)
    """
    return (prints & np.uint64(HALF - 1)).astype(np.float64), (prints >> np.uint64(32)).astype(np.float64)


def digest(low: ArrayLike, high: ArrayLike) -> Prints:
    """Returns the inverse of `split`, also of sums of a few halves; 0 for NaN.

    >>> digest([5.0, float("nan")], [1.0, float("nan")])
    array([4294967301,          0], dtype=uint64)
    """
    low, high = np.nan_to_num(np.asarray(low, np.float64)), np.nan_to_num(np.asarray(high, np.float64))
    carried = np.atleast_1d(high.astype(np.uint64)) << np.uint64(32)
    return (np.atleast_1d(low.astype(np.uint64)) + carried).reshape(low.shape)


def fold(digests: Prints, salts: ArrayLike) -> np.uint64:
    """Returns one digest of many rows, in any order. Empty rows do not count; 0 if all are empty."""
    there = np.asarray(digests, np.uint64) != 0
    if not there.any():
        return np.uint64(0)
    terms = mixed(np.asarray(digests, np.uint64)[there] ^ np.asarray(salts, np.uint64)[there])
    return np.add.reduce(terms) or np.uint64(1)


def grad_print(norms: NDArray[np.floating[Any]]) -> np.uint64:
    """Returns a digest of one gradient from the exact norms of its tensors, NaN for tensors without one.

    Two different batches may agree in one norm, but not in all. Returns 0, nothing to compare, if there is no gradient
    or it is not finite.
    """
    known = np.nan_to_num(np.asarray(norms, np.float64), nan=-1.0, posinf=np.inf)
    if np.isinf(known).any() or not (known > 0).any():
        return np.uint64(0)
    return np.uint64(print_of(known.tobytes()))


PIECE_WORDS = 2**20
"""Words processed together: 8 MB as 64-bit numbers."""

HOST_WORDS = 2**14
"""The same on the host, to stay in the cache. The result does not depend on it."""

_WORDS = {1: torch.uint8, 2: torch.int16}
"""Word types by the size of an element; all others are read as words of 32 bits."""

_weights: dict[torch.device, Tensor] = {}


class Item(NamedTuple):
    """A tensor whose bits are part of one row's checksum."""

    row: int
    salt: int
    """Distinguishes it from other tensors of the row."""
    tensor: Tensor


def is_readable(tensor: Tensor) -> bool:
    """Returns whether a tensor's memory is its content: not for sparse, wrapper and meta tensors."""
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    in_transform = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return plain and not in_transform and tensor.layout == torch.strided and tensor.device.type != "meta"


def as_words(tensor: Tensor) -> Tensor:
    """Returns the bits of a contiguous tensor as integers along its last dimension.

    The size of a word must not depend on the address of a tensor, which differs between replicas.
    """
    return tensor.view(_WORDS.get(tensor.element_size(), torch.int32))


def weights(device: torch.device, count: int) -> Tensor:
    """Returns odd pseudo-random numbers, the same on every device."""
    known = _weights.get(device)
    if known is None or len(known) < count:
        size = min(max(count, 2**12), PIECE_WORDS) if count <= PIECE_WORDS else count
        numbers = (mixed(np.arange(size, dtype=np.uint64)) | np.uint64(1)).view(np.int64)
        known = _weights[device] = torch.from_numpy(numbers).to(device, non_blocking=True)
    return known[:count]


def signed(number: int) -> int:
    """Returns a number modulo 2**64 as a signed 64-bit integer."""
    return (int(number) + 2**63) % 2**64 - 2**63


@torch.no_grad()
def checksums(items: Iterable[Item]) -> Iterator[tuple[list[int], Tensor]]:
    """Yields, for each device, rows and one 64-bit checksum per row.

    A row with tensors on several devices comes once for each; its checksums add up.
    """
    by_device: dict[torch.device, list[Item]] = {}
    for item in items:
        by_device.setdefault(item.tensor.device, []).append(item)
    for device, mine in by_device.items():
        rows = list(dict.fromkeys(item.row for item in mine))
        place = {row: index for index, row in enumerate(rows)}
        pieces: list[Tensor] = []
        owners: list[int] = []
        factors: list[int] = []
        constants = [0] * len(rows)
        for item in mine:
            words = as_words(reductions.flat(item.tensor.detach()))
            parts = words.split(PIECE_WORDS) if words.numel() else ()
            constant, of_parts = _constants(item.salt, words.numel(), len(parts))
            constants[place[item.row]] += constant
            pieces += parts
            factors += of_parts
            owners += [place[item.row]] * len(parts)
        result = _to_device([signed(constant) for constant in constants], device)
        if pieces:
            sums = _sums_on_host(pieces) if device.type == "cpu" else torch.cat(list(_sums(pieces, device)))
            terms = sums * _to_device(factors, device)
            result = result.index_add(0, _to_device(owners, device), terms)
        yield rows, result


def halves(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the low and the high 32 bits, which a float64 holds exactly."""
    if numbers.device.type not in ("cpu", "cuda"):
        numbers = numbers.cpu()  # not every device has float64
    return numbers & (HALF - 1), (numbers >> 32) & (HALF - 1)


def _sums_on_host(pieces: Sequence[Tensor]) -> Tensor:
    """Returns the weighted sum of every piece, by numpy, which is twice as fast as torch here."""
    weight = weights(torch.device("cpu"), max(piece.numel() for piece in pieces)).numpy()
    sums = []
    for piece in pieces:
        words = piece.numpy()
        blocks = [slice(start, start + HOST_WORDS) for start in range(0, len(words), HOST_WORDS)]
        parts = (np.dot(words[block].astype(np.int64), weight[block][: len(words[block])]) for block in blocks)
        sums.append(signed(sum(map(int, parts))))
    return torch.tensor(sums)


@lru_cache(maxsize=2**14)
def _constants(salt: int, length: int, parts: int) -> tuple[int, list[int]]:
    """Returns the constant that a tensor of this length adds to its row, and the factor of each of its pieces."""
    factors = mixed(np.uint64(salt) ^ mixed(np.arange(parts))) | np.uint64(1)
    return int(mixed(int(mixed(salt)) ^ length)) | 1, [signed(factor) for factor in factors.tolist()]


def _sums(pieces: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yields the weighted sum of every piece, in order; processes many small ones at a time."""
    weight = weights(device, max(piece.numel() for piece in pieces))
    together: list[Tensor] = []
    size = 0
    for piece in pieces:
        if together and size + piece.numel() > PIECE_WORDS:
            yield _weighted(together, weight)
            together, size = [], 0
        together.append(piece)
        size += piece.numel()
    yield _weighted(together, weight)


def _weighted(pieces: Sequence[Tensor], weight: Tensor) -> Tensor:
    if len(pieces) == 1:
        return (pieces[0].to(torch.int64) * weight[: pieces[0].numel()]).sum().reshape(1)
    lengths = [piece.numel() for piece in pieces]
    terms = torch.cat(list(pieces)).to(torch.int64) * torch.cat([weight[:length] for length in lengths])
    # Differences of running totals: exact, because integers wrap around.
    ends = terms.cumsum(0)[_to_device((np.cumsum(lengths) - 1).tolist(), weight.device)]
    return ends.diff(prepend=ends.new_zeros(1))


def _to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


SAMPLES = 16
"""Samples of a batch that get a fingerprint."""

SAMPLE_ELEMENTS = 2**16
"""Elements of each sample that enter it, evenly spread."""

MAX_DEPTH = 8
"""The deepest nesting of containers that is searched for tensors."""


class Audit:
    """Reads, at audited steps, what ranks must agree in (replicas) or must not (samples).

    Args:
        model: The module that the training loop calls. Its first training forward after `arm` shows the samples.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hook: Any = None
        self._is_first = True
        self._samples: Tensor | None = None
        self._error: Exception | None = None

    # -- samples ------------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Look at the samples of the next training forward, once. Skips compiled models.

        The first call does nothing: the loop may compile the model in its first forward, and a model compiled with a
        hook is compiled again when the hook is removed. Compiled code ignores hooks that are added later.
        """
        self._samples, self._error = None, None
        first, self._is_first = self._is_first, False
        if not first and self._hook is None and not _is_compiled(self._model):
            self._hook = self._model.register_forward_pre_hook(_FirstLook(self), with_kwargs=True)

    def disarm(self) -> None:
        """Stop waiting for a forward."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def look(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take fingerprints of the samples in the first argument that holds tensors."""
        self.disarm()
        try:
            self._samples = sample_prints(args, kwargs)
        except Exception as error:  # training must continue; `fingerprints` raises it
            self._error = error

    @torch.no_grad()
    def fingerprints(self, buffer: ReadingBuffer) -> None:
        """Add fingerprints of the samples seen since `arm`, and of the state of random numbers."""
        self.disarm()
        samples, self._samples = self._samples, None
        state = print_of(b"".join(_random_states(self._model)))
        for name, half in zip(("rng_lo", "rng_hi"), halves(torch.tensor([signed(state)])), strict=True):
            buffer.add(name, half)
        if samples is not None:
            for name, half in zip(("sample_lo", "sample_hi"), halves(samples), strict=True):
                buffer.add(name, half, range(len(samples)))
        error, self._error = self._error, None
        if error is not None:
            raise error

    # -- replicas -----------------------------------------------------------------------------------------------

    def after_step(
        self, buffer: ReadingBuffer, rows: Sequence[int], parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        """Add checksums of this rank's part of parameters, and of their optimizer state.

        Skips rows whose memory cannot be read, or that have no state.
        """
        held = [(row, local(parameter)) for row, parameter in zip(rows, parameters, strict=True)]
        _add(buffer, "check", [Item(row, 0, tensor) for row, tensor in held if is_readable(tensor)])
        # ZeRO shards the state over ranks: there are no replicas.
        state: Mapping[Any, Any] = optimizer.state if stepping(optimizer) is optimizer else {}
        items = [
            Item(row, print_of(name.encode()), tensor)
            for row, parameter in zip(rows, parameters, strict=True)
            for name, tensor in _state_tensors(state.get(parameter) or {})
        ]
        _add(buffer, "state", items)


def sample_prints(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Returns a 64-bit fingerprint of each of the first samples; None if the input holds none that can be read.

    Covers all tensors of the argument with as many rows as its first one. Zero padding does not change it.
    """
    for argument in (*args, *kwargs.values()):
        tensors = [tensor for tensor in _tensors(argument) if tensor.dim() and tensor.numel()]
        if tensors:
            break
    else:
        return None
    # Tensors that require a gradient are not data: a later pipeline stage receives activations.
    if any(tensor.requires_grad for tensor in tensors) or not all(is_readable(local(tensor)) for tensor in tensors):
        return None
    count = len(local(tensors[0]))
    total: Tensor | None = None
    for place, tensor in enumerate(map(local, tensors)):
        if len(tensor) != count or tensor.device != tensors[0].device:
            continue
        print_ = _of_rows(tensor[:SAMPLES].detach()) * signed(int(mixed(place)) | 1)
        total = print_ if total is None else total + print_
    assert total is not None
    return total + signed(int(mixed(1)))


def _of_rows(tensor: Tensor) -> Tensor:
    rows = tensor.reshape(len(tensor), -1)
    rows = rows[:, :: reductions.odd_stride(rows.shape[1], SAMPLE_ELEMENTS)].contiguous()
    words = as_words(rows)
    return (words.to(torch.int64) * weights(words.device, words.shape[1])).sum(dim=1)


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yields all tensors in a container, in order."""
    if isinstance(value, Tensor):
        yield value
    elif depth < MAX_DEPTH:
        for part in _parts(value):
            yield from _tensors(part, depth + 1)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield getattr(value, field.name)


def _state_tensors(state: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields all tensors and numbers of an optimizer's state, with their paths."""
    for path, leaf in pytree.tree_leaves_with_path(state):
        if isinstance(leaf, (bool, int, float)):
            yield pytree.keystr(path), torch.tensor(float(leaf), dtype=torch.float64)
        elif isinstance(leaf, Tensor) and is_readable(local(leaf)):
            yield pytree.keystr(path), local(leaf)


def _add(buffer: ReadingBuffer, name: str, items: Sequence[Item]) -> None:
    for rows, numbers in checksums(items):
        low, high = halves(numbers)
        buffer.add(f"{name}_lo", low, rows)
        buffer.add(f"{name}_hi", high, rows)


def _random_states(model: nn.Module) -> Iterator[bytes]:
    yield torch.get_rng_state().numpy().tobytes()
    first = next(model.parameters(), None)
    if first is not None and first.is_cuda:
        yield torch.cuda.get_rng_state(first.device).numpy().tobytes()


def _is_compiled(model: nn.Module) -> bool:
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


class _FirstLook:
    """The hook. Copies of the model, in memory or in a file, get a hook that does nothing."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # the hook must not be compiled into the model
            return
        # A forward without gradients is an evaluation, where ranks may share data.
        if not module.training or not torch.is_grad_enabled():
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        self._audit.look(args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_look, ()


def _no_look() -> Any:
    return _nothing


def _nothing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    pass


Ints = NDArray[np.int64]

SHARED = 0.5
"""Share of its samples that a data-parallel worker has in common with its duplicate."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The fingerprints of one audit from W ranks: D data-parallel workers that hold C classes of replicas."""

    norms: Floats
    """[D] Norms of the workers' own gradients; NaN if not known."""
    data_index: Ints
    """[W] The worker that a rank is part of; -1 if not known."""
    rng_prints: Prints
    """[W] States of random numbers. In this and all other fingerprints, 0 is nothing."""
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
    """The state from one audit to the next."""

    rng_equal: bool = False
    """Whether the random numbers of all ranks were once in the same state, and most still are."""
    samples: Prints = field(default_factory=lambda: np.zeros((0, 0), dtype=np.uint64))
    """The sample fingerprints of the last audit."""

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return {"rng_equal": self.rng_equal, "samples": self.samples.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.rng_equal = bool(state["rng_equal"])
        samples = state["samples"]
        width = len(samples[0]) if samples else 0  # nothing is known before the first audit
        self.samples = np.array(samples, dtype=np.uint64).reshape(len(samples), width)


@dataclass(frozen=True)
class Suspect:
    """Ranks whose copies of a class of rows should be equal and are not."""

    place: int
    """The class."""
    replica_set: int
    ranks: tuple[int, ...]
    odd: tuple[int, ...]
    """Those that differ from the majority; all of them if there is none."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The metrics of an audit, without those that nothing could be compared for."""

    values: dict[str, float]
    ranks: dict[str, Floats]
    suspects: tuple[Suspect, ...] = ()


def audit_numbers(seen: Seen, memory: Memory) -> Verdict:
    """Returns the metrics of an audit.

    Args:
        seen: What all ranks sent.
        memory: What the last audit remembered; updated in place.
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
    """Returns, for every row, how many ranks differ from the majority in weights or optimizer state.

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
    """Returns the number of each rank's worker."""
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
    """Returns each worker's first rank with samples, or its first rank."""
    lowest = np.zeros(len(seen.norms), dtype=np.int64)
    shown = np.asarray(seen.sample_prints.any(axis=1))
    order = np.lexsort((-np.arange(len(shown)), shown))  # the last to be written wins
    order = order[seen.data_index[order] >= 0]
    lowest[seen.data_index[order]] = order
    return lowest


def _informative(seen: Seen, memory: Memory) -> Prints:
    """Returns the sample fingerprints that can tell data apart, 0 elsewhere.

    Inputs that are the same for all samples (a mask), or that were the same at the last audit (a grid of positions, a
    single batch that is repeated), do not identify whose data they are.
    """
    prints = np.sort(seen.sample_prints, axis=1)
    count = (prints != 0).sum(axis=1)
    distinct = (np.diff(prints, axis=1, prepend=np.uint64(0)) != 0).sum(axis=1)
    says = (distinct > 1) | (count == 1)
    if memory.samples.shape == prints.shape:
        says &= (np.sort(memory.samples, axis=1) != prints).any(axis=1)
    return np.where(says[:, None], seen.sample_prints, np.uint64(0))


def _partners(workers: NDArray[Any], prints: Prints) -> Ints:
    """Returns, for every worker, the lowest other one that it shares enough fingerprints with; -1 for none.

    Sorts all fingerprints, which scales to any number of workers.
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
    # In reverse, so that the lowest is written last.
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
    """Yields the number and the ranks of every set of several ranks."""
    order = np.argsort(sets, kind="stable")
    numbers, starts, sizes = np.unique(sets[order], return_index=True, return_counts=True)
    for number, start, size in zip(numbers.tolist(), starts, sizes, strict=True):
        if number >= 0 and size > 1:
            yield number, order[start : start + size]


def _groups(prints: Prints) -> Ints:
    """Returns the group of equal fingerprints that each is in: 0 the largest, then by size, then by first member."""
    _, first, inverse, counts = np.unique(prints, return_index=True, return_inverse=True, return_counts=True)
    place = np.empty(len(counts), dtype=np.int64)
    place[np.lexsort((first, -counts))] = np.arange(len(counts))
    return np.asarray(place[inverse.ravel()])


def _is_odd(prints: Prints) -> NDArray[np.bool_]:
    """Returns who differs from the majority. If the two largest groups are equal, all do."""
    groups = _groups(prints)
    sizes = np.bincount(groups)
    tied = len(sizes) > 1 and sizes[0] == sizes[1]
    return np.asarray((groups > 0) | tied)


MAX_WITNESSES = 6
"""Ranks whose checksums are compared tensor by tensor once copies differ."""


class Comparison:
    """Packs this rank's fingerprints into slots of its own, and compares those of all ranks."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.memory = Memory()
        names = [info.name for info in topology.layout.tensors]
        # What distinguishes a row from another one with the same content; equal on all ranks.
        self._salts = np.array([print_of(name.encode()) for name in names], dtype=np.uint64)
        self._own_kinds = topology.kinds[topology.rows]
        self.num_kinds = len(topology.replica_sets)
        # The low and the high half of every fingerprint; those of tensors are folded into one per class of rows.
        self._of_rank = np.dtype(
            [
                ("rng", "f8", (2,)),
                ("samples", "f8", (2, SAMPLES)),
                ("check", "f8", (2, self.num_kinds)),
                ("state", "f8", (2, self.num_kinds)),
            ]
        )
        self._of_worker = np.dtype([("square", "f8"), ("known", "f8"), ("gradient", "f8", (2,))])

    def pack(self, step: StepSums) -> Floats:
        """Returns this rank's numbers, in its slots; those of all others are 0."""
        topology, prints = self.topology, step.prints
        of_rank = np.zeros(topology.world, self._of_rank)
        mine = of_rank[topology.rank]
        mine["rng"] = _halves(prints, "rng", 1)[:, 0]
        mine["samples"] = _halves(prints, "sample", SAMPLES)
        for what in ("check", "state"):
            digests = self._digests(step, what)
            for kind in range(self.num_kinds):
                chosen = self._own_kinds == kind
                folded = fold(digests[chosen], self._salts[topology.rows][chosen])
                mine[what][:, kind] = np.concatenate(split(np.array([folded])))
        of_worker = np.zeros(topology.num_data, self._of_worker)
        parts = step.rows.get("parts")
        if parts is not None and parts.present.any():
            squares = np.where(parts.present, parts.values * topology.part_weights, 0.0)
            halves = split(np.array([grad_print(np.where(parts.present, parts.values, 0.0))]))
            of_worker[topology.data_index[topology.rank]] = squares.sum(), 1.0, np.concatenate(halves)
        return np.concatenate([of_rank.view("f8"), of_worker.view("f8")])

    def _digests(self, step: StepSums, what: str) -> Prints:
        """Returns one digest per row of this rank; 0 if there is none."""
        low, high = (step.prints.get(f"{what}_{half}") for half in ("lo", "hi"))
        if low is None or high is None:
            return np.zeros(len(self.topology.rows), dtype=np.uint64)
        # A tensor that some ranks step for others differs until they have received it.
        return np.where(self.topology.is_shared_out[self.topology.rows], np.uint64(0), digest(low, high))

    def unpack(
        self, vector: Floats, own: StepSums, step: StepSums, reduce: Callable[..., Generator[Any, None, Floats]]
    ) -> Generator[Any, None, None]:
        """Add the metrics of the audit to a step. If copies differ, a second round finds the tensors."""
        topology = self.topology
        end = topology.world * self._of_rank.itemsize // 8
        of_rank, of_worker = vector[:end].view(self._of_rank), vector[end:].view(self._of_worker)
        # Gradients of different pipeline stages cannot be compared.
        comparable = topology.num_sources == topology.num_data
        with np.errstate(invalid="ignore"):
            norms = np.where((of_worker["known"] > 0) & comparable, np.sqrt(of_worker["square"]), np.nan)
        seen = Seen(
            norms=norms,
            data_index=topology.data_index,
            rng_prints=digest(*of_rank["rng"].T),
            sample_prints=digest(of_rank["samples"][:, 0], of_rank["samples"][:, 1]),
            grad_prints=np.where(comparable, digest(*of_worker["gradient"].T), 0).astype(np.uint64),
            param_digest=digest(of_rank["check"][:, 0], of_rank["check"][:, 1]).T,
            state_digest=digest(of_rank["state"][:, 0], of_rank["state"][:, 1]).T,
            replica_set=topology.replica_sets,
        )
        verdict = audit_numbers(seen, self.memory)
        step.values |= verdict.values
        step.ranks |= verdict.ranks
        if verdict.suspects:
            mismatch = yield from self._where(verdict.suspects, own, reduce)
            step.values["ranks/checksum_mismatch"] = float((mismatch > 0).sum())
            step.tensors["ranks/checksum_mismatch"] = mismatch

    def _where(
        self, suspects: tuple[Suspect, ...], own: StepSums, reduce: Callable[..., Generator[Any, None, Floats]]
    ) -> Generator[Any, None, Floats]:
        """Fetch the checksums of single tensors from ranks that differ, and from some that do not."""
        topology = self.topology
        mismatch = np.zeros(len(topology.kinds))
        for suspect in suspects:
            rows = np.flatnonzero(topology.kinds == suspect.place)
            agreeing = [rank for rank in suspect.ranks if rank not in suspect.odd]
            witnesses = sorted([*suspect.odd[: MAX_WITNESSES - 2], *agreeing[:2]])
            sent = np.zeros((len(witnesses), 4, len(rows)))
            if topology.rank in witnesses:
                chosen = self._own_kinds == suspect.place
                for place, what in ((0, "check"), (2, "state")):
                    low, high = split(self._digests(own, what)[chosen])
                    sent[witnesses.index(topology.rank), place : place + 2] = low, high
            summed = yield from reduce(sent.reshape(-1), dist.ReduceOp.SUM)
            got = summed.reshape(sent.shape)
            sets = np.full((len(rows), len(witnesses)), suspect.replica_set)
            differing = tensor_mismatch(digest(got[:, 0], got[:, 1]).T, digest(got[:, 2], got[:, 3]).T, sets)
            mismatch[rows] = np.maximum(mismatch[rows], differing)
        return mismatch


def _halves(prints: dict[str, Floats], name: str, count: int) -> Floats:
    """Returns both halves of some fingerprints, padded with zeros."""
    halves = np.zeros((2, count))
    for place, half in enumerate(("lo", "hi")):
        found: Any = prints.get(f"{name}_{half}", ())
        halves[place, : len(found)] = found
    return halves
