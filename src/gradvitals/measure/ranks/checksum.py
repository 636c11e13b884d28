r"""Checksums of the bits of tensors: 64 bits for each row, made on the device, without a copy and without waiting.

A tensor is read as words :math:`x_i` of at most 32 bits, in pieces of bounded size. With odd pseudo-random weights
:math:`w_i`, a factor :math:`f_c` (odd too) for each piece and a constant for each tensor, all modulo :math:`2^{64}`,

.. math:: h = \mathrm{constant} + \sum_c f_c \sum_{i \in c} w_i x_i

Whole numbers are exact in any order of summation, so equal bits give equal checksums on any number of threads. One word
that differs changes a checksum always, as its weight is odd; two that are swapped, and any other change, all but
always: that words have 32 bits leaves at least 32 bits of chance even where only their highest bits differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradvitals.measure import stats
from gradvitals.measure.ranks.prints import HALF, mixed

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
            words = as_words(stats.flat(item.tensor.detach()))
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
