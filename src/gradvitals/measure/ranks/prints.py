"""Sixty-four bits that stand for many: how they are mixed, sent as numbers, and put together again."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
