"""Do ranks agree: checksums of replicas, fingerprints of samples and random numbers, and what they show."""

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
from gradvitals.worker.aggregate import StepSums
from gradvitals.worker.record import Floats

Prints = NDArray[np.uint64]

HALF = 2**32


def mixed(numbers: ArrayLike) -> Prints:
    """Every 64-bit number as another one that looks random; no two become the same (the finalizer of splitmix64).

    >>> hex(int(mixed(0)))
    '0xe220a8397b1dcdaf'
    """
    # At least one dimension: numpy warns of a wrapped product of scalars, which is what is wanted here.
    x = np.atleast_1d(np.asarray(numbers, dtype=np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).reshape(np.shape(numbers))


def print_of(data: bytes) -> int:
    """Sixty-four bits of some bytes, never 0: that stands for nothing."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


def row_salt(name: str) -> int:
    """What sets a row apart from another one of the same content; equal on all ranks."""
    return print_of(name.encode())


def split(prints: Prints) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The low and the high halves, which float64 holds exactly.

    >>> low, high = split(np.array([2**63 + 5], dtype=np.uint64))
    >>> float(low[0]), float(high[0])
    (5.0, 2147483648.0)
    """
    return (prints & np.uint64(HALF - 1)).astype(np.float64), (prints >> np.uint64(32)).astype(np.float64)


def digest(low: ArrayLike, high: ArrayLike) -> Prints:
    """The inverse of `split`, also of sums of a few halves; 0 where there is nothing (nan).

    >>> digest([5.0, float("nan")], [1.0, float("nan")])
    array([4294967301,          0], dtype=uint64)
    """
    low, high = np.nan_to_num(np.asarray(low, np.float64)), np.nan_to_num(np.asarray(high, np.float64))
    carried = np.atleast_1d(high.astype(np.uint64)) << np.uint64(32)
    return (np.atleast_1d(low.astype(np.uint64)) + carried).reshape(low.shape)


def fold(digests: Prints, salts: ArrayLike) -> np.uint64:
    """One digest of many rows, in any order; rows with nothing in them do not count, and 0 is nothing at all."""
    there = np.asarray(digests, np.uint64) != 0
    if not there.any():
        return np.uint64(0)
    terms = mixed(np.asarray(digests, np.uint64)[there] ^ np.asarray(salts, np.uint64)[there])
    return np.add.reduce(terms) or np.uint64(1)


def grad_print(norms: NDArray[np.floating[Any]]) -> np.uint64:
    """A digest of one gradient by the norms of its tensors, bit for bit; nan for tensors without one.

    Two different batches agree in one norm now and then, but not in all. Returns 0, nothing to compare, where there is
    no gradient, or one that is not finite.
    """
    known = np.nan_to_num(np.asarray(norms, np.float64), nan=-1.0, posinf=np.inf)
    if np.isinf(known).any() or not (known > 0).any():
        return np.uint64(0)
    return np.uint64(print_of(known.tobytes()))


PIECE_WORDS = 2**20
"""Words looked at together: 8 MB as 64-bit numbers."""

HOST_WORDS = 2**14
"""The same in the host's memory, where it is what stays in a cache that counts. The outcome does not depend on it."""

_WORDS = {1: torch.uint8, 2: torch.int16}
"""By the size of an element; all others are read as words of 32 bits."""

_weights: dict[torch.device, Tensor] = {}


class Item(NamedTuple):
    """A tensor whose bits count towards one row."""

    row: int
    salt: int
    """Sets it apart from other tensors of the row."""
    tensor: Tensor


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor's memory is what it holds: not so for sparse ones, wrappers, and those without memory."""
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    in_transform = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return plain and not in_transform and tensor.layout == torch.strided and tensor.device.type != "meta"


def as_words(tensor: Tensor) -> Tensor:
    """The bits of a contiguous tensor as whole numbers along its last dimension.

    The size of a word must not depend on where in memory a tensor begins, which replicas need not share.
    """
    return tensor.view(_WORDS.get(tensor.element_size(), torch.int32))


def weights(device: torch.device, count: int) -> Tensor:
    """Odd pseudo-random numbers, the same on every device."""
    known = _weights.get(device)
    if known is None or len(known) < count:
        size = min(max(count, 2**12), PIECE_WORDS) if count <= PIECE_WORDS else count
        numbers = (mixed(np.arange(size, dtype=np.uint64)) | np.uint64(1)).view(np.int64)
        known = _weights[device] = torch.from_numpy(numbers).to(device, non_blocking=True)
    return known[:count]


def signed(number: int) -> int:
    """A number modulo 2**64 as torch's 64-bit integers have it."""
    return (int(number) + 2**63) % 2**64 - 2**63


@torch.no_grad()
def checksums(items: Iterable[Item]) -> Iterator[tuple[list[int], Tensor]]:
    """The checksums of all rows, for each device: the rows, and one 64-bit integer for each.

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
    """The low and the high 32 bits, as numbers that a float64 holds exactly."""
    if numbers.device.type not in ("cpu", "cuda"):
        numbers = numbers.cpu()  # not every device has the float64 that they travel in
    return numbers & (HALF - 1), (numbers >> 32) & (HALF - 1)


def _sums_on_host(pieces: Sequence[Tensor]) -> Tensor:
    """The weighted sum of every piece, by numpy, which is twice as fast as torch at this."""
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
    """What a tensor of this length adds to its row, and the factor of each of its pieces."""
    factors = mixed(np.uint64(salt) ^ mixed(np.arange(parts))) | np.uint64(1)
    return int(mixed(int(mixed(salt)) ^ length)) | 1, [signed(factor) for factor in factors.tolist()]


def _sums(pieces: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """The weighted sum of every piece, in their order; small ones are handled many at a time."""
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
    # Differences of running totals: exact, as whole numbers wrap around.
    ends = terms.cumsum(0)[_to_device((np.cumsum(lengths) - 1).tolist(), weight.device)]
    return ends.diff(prepend=ends.new_zeros(1))


def _to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


SAMPLES = 16
"""Samples of a batch that are looked at."""

SAMPLE_ELEMENTS = 2**16
"""Elements of each that are, evenly spread."""

MAX_DEPTH = 8
"""Containers inside containers that are searched for tensors."""


class Audit:
    """Adds to the packets of audited steps what ranks must agree in, or must not.

    Args:
        model: The root that the training loop calls. Its first training forward after `arm` shows the samples.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hook: Any = None
        self._is_first = True
        self._samples: Tensor | None = None
        self._error: Exception | None = None

    # -- samples ------------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Look at the samples of the next training forward, once. Compiled models are left alone.

        The first call is for nothing: the loop may have the model compiled in its first forward, and what is compiled
        with a hook is compiled again when that is gone. A hook that comes later is not noticed there.
        """
        self._samples, self._error = None, None
        first, self._is_first = self._is_first, False
        if not first and self._hook is None and not _is_compiled(self._model):
            self._hook = self._model.register_forward_pre_hook(_FirstLook(self), with_kwargs=True)

    def disarm(self) -> None:
        """Do not wait for a forward any more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def look(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take the prints of the samples in the first argument that holds tensors."""
        self.disarm()
        try:
            self._samples = sample_prints(args, kwargs)
        except Exception as error:  # it must not end training; told with the other instruments' errors
            self._error = error

    @torch.no_grad()
    def fingerprints(self, buffer: ReadingBuffer) -> None:
        """Put prints of the samples seen since `arm`, and of the state of random numbers, into the buffer."""
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
        """Put checksums of this rank's part of parameters, and of their optimizer state, into the buffer.

        Rows whose memory cannot be read, or that have no state, are skipped.
        """
        held = [(row, local(parameter)) for row, parameter in zip(rows, parameters, strict=True)]
        _add(buffer, "check", [Item(row, 0, tensor) for row, tensor in held if is_readable(tensor)])
        # ZeRO spreads the state over ranks: nobody has a copy of another one's.
        state: Mapping[Any, Any] = optimizer.state if stepping(optimizer) is optimizer else {}
        items = [
            Item(row, print_of(name.encode()), tensor)
            for row, parameter in zip(rows, parameters, strict=True)
            for name, tensor in _state_tensors(state.get(parameter) or {})
        ]
        _add(buffer, "state", items)


def sample_prints(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """One 64-bit print for each of the first samples; None where the input holds none that can be read.

    All tensors of the argument that have as many rows as its first one count. Padding by zeros does not.
    """
    for argument in (*args, *kwargs.values()):
        tensors = [tensor for tensor in _tensors(argument) if tensor.dim() and tensor.numel()]
        if tensors:
            break
    else:
        return None
    # What requires a gradient is no data: the activations that a later stage of a pipeline is given.
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
    """All tensors in a container, in order."""
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
    """All tensors and numbers of an optimizer's state, by where they are in it."""
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
    """The hook. Copies of the model, in memory or in a file, get one that does nothing."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # it must not become part of what is compiled
            return
        # A forward without gradients is an evaluation, where ranks may well share their data.
        if not module.training or not torch.is_grad_enabled() or _is_capturing():
            return
        self._audit.look(args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_look, ()


def _no_look() -> Any:
    return _nothing


def _nothing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    pass


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


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


MAX_WITNESSES = 6
"""Ranks whose checksums are compared tensor by tensor, once they are known to differ."""


class Comparison:
    """Packs this rank's fingerprints into slots of its own, and judges those of all ranks."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.memory = Memory()
        names = [info.name for info in topology.layout.tensors]
        self._salts = np.array([row_salt(name) for name in names], dtype=np.uint64)
        self._own_kinds = topology.kinds[topology.rows]
        self.num_kinds = len(topology.replica_sets)

    def pack(self, step: StepSums) -> Floats:
        """This rank's numbers, in its slots; those of all others are 0."""
        topology, prints = self.topology, step.prints
        of_rank = np.zeros((topology.world, 2 + 2 * SAMPLES + 4 * self.num_kinds))
        mine = of_rank[topology.rank]
        mine[0:2] = _halves(prints, "rng", 1)[:, 0]
        mine[2 : 2 + 2 * SAMPLES] = _halves(prints, "sample", SAMPLES).reshape(-1)
        for place, what in ((0, "check"), (2, "state")):
            digests = self._digests(step, what)
            for kind in range(self.num_kinds):
                chosen = self._own_kinds == kind
                salts = self._salts[topology.rows][chosen]
                low, high = split(np.array([fold(digests[chosen], salts)]))
                mine[2 + 2 * SAMPLES + 4 * kind + place :][:2] = low[0], high[0]
        of_worker = np.zeros((topology.num_data, 4))
        parts = step.rows.get("parts")
        if parts is not None and parts.present.any():
            squares = np.where(parts.present, parts.values * topology.part_weights, 0.0)
            low, high = split(np.array([grad_print(np.where(parts.present, parts.values, 0.0))]))
            of_worker[topology.data_index[topology.rank]] = squares.sum(), 1.0, low[0], high[0]
        return np.concatenate([of_rank.reshape(-1), of_worker.reshape(-1)])

    def _digests(self, step: StepSums, what: str) -> Prints:
        """One a row of this rank; 0 where there is none."""
        low, high = (step.prints.get(f"{what}_{half}") for half in ("lo", "hi"))
        if low is None or high is None:
            return np.zeros(len(self.topology.rows), dtype=np.uint64)
        # What some ranks step for others is not the same everywhere until it has been sent to them.
        return np.where(self.topology.is_shared_out[self.topology.rows], np.uint64(0), digest(low, high))

    def unpack(
        self, vector: Floats, own: StepSums, step: StepSums, reduce: Callable[..., Generator[Any, None, Floats]]
    ) -> Generator[Any, None, None]:
        """Put into a step what the fingerprints of all ranks say. Where copies differ, a second round finds where."""
        topology = self.topology
        width = 2 + 2 * SAMPLES + 4 * self.num_kinds
        of_rank = vector[: topology.world * width].reshape(topology.world, width)
        of_worker = vector[topology.world * width :].reshape(topology.num_data, 4)
        samples = of_rank[:, 2 : 2 + 2 * SAMPLES].reshape(topology.world, 2, SAMPLES)
        checks = of_rank[:, 2 + 2 * SAMPLES :].reshape(topology.world, self.num_kinds, 2, 2)
        # Gradients of single pipeline stages are of different tensors.
        comparable = topology.num_sources == topology.num_data
        with np.errstate(invalid="ignore"):
            norms = np.where((of_worker[:, 1] > 0) & comparable, np.sqrt(of_worker[:, 0]), np.nan)
        seen = Seen(
            norms=norms,
            data_index=topology.data_index,
            rng_prints=digest(of_rank[:, 0], of_rank[:, 1]),
            sample_prints=digest(samples[:, 0], samples[:, 1]),
            grad_prints=np.where(comparable, digest(of_worker[:, 2], of_worker[:, 3]), 0).astype(np.uint64),
            param_digest=digest(checks[:, :, 0, 0], checks[:, :, 0, 1]).T,
            state_digest=digest(checks[:, :, 1, 0], checks[:, :, 1, 1]).T,
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
    """Both halves of some fingerprints, zeros where there are fewer."""
    halves = np.zeros((2, count))
    for place, half in enumerate(("lo", "hi")):
        found: Any = prints.get(f"{name}_{half}", ())
        halves[place, : len(found)] = found
    return halves
