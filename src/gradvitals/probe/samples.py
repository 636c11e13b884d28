r"""Question "samples": one example at a time. Noise scale, GSNR, how well a step generalises, examples that stand out.

The one-step generalization ratio of Liu et al. is the expected fall of the loss on new data over that on the training
data, for a small step on a training set of n examples:

.. math:: R(n) = 1 - \frac{1}{n} \sum_j \frac{W_j}{r_j + 1/n}
               = \frac{\sum_j \mu_j^2}{\sum_j (\mu_j^2 + \rho_j^2 / n)},
          \qquad W_j = \frac{\mu_j^2 + \rho_j^2 / n}{\sum_k (\mu_k^2 + \rho_k^2 / n)}

with mean :math:`\mu_j` and variance :math:`\rho_j^2` of the gradient of one example and :math:`r_j = \mu_j^2/\rho_j^2`.
With the aggregate GSNR R this is :math:`R / (R + 1/n)`. It holds early in training, while gradients of training and new
data have one distribution.

Reference: Liu et al., "Understanding why neural networks generalize well through GSNR of parameters", ICLR 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradvitals.collect.reductions import accumulator
from gradvitals.errors import GradvitalsError
from gradvitals.functional.intervals import Estimate
from gradvitals.functional.norms import squared_norm
from gradvitals.probe.batches import Subject
from gradvitals.probe.per_example import PerExample
from gradvitals.probe.signal import noise_scale_of
from gradvitals.probe.streaming import Stream
from gradvitals.probe.suspects import add_examples

BINS = 20
USUAL = 256
"""Examples that are looked at where nothing else is asked for."""


def osgr(gsnr: float, train_size: float) -> float:
    r"""One-step generalization ratio from the aggregate GSNR of one example.

    .. math:: \frac{R}{R + 1/n}

    Args:
        gsnr: R, debiased; what is below 0 counts as 0.
        train_size: n, examples in the training set.

    Returns:
        Between 0 and 1: which share of a small step's gain on the training set is also had on new data.

    Example:
        >>> osgr(0.01, 100)
        0.5
    """
    signal = max(gsnr, 0.0) if not math.isnan(gsnr) else math.nan
    if math.isinf(signal):
        return 1.0
    return signal / (signal + 1 / train_size)


def samples_record(
    subject: Subject,
    parameters: dict[str, nn.Parameter],
    batches: Sequence[Any],
    *,
    most: int = USUAL,
    memory_limit: int = 1 << 29,
    train_size: int | None = None,
    indices: Callable[[int, int], Sequence[int | None]] = lambda batch, size: [None] * size,
    label: Callable[[int], str] = str,
    tick: Callable[[str], object] = lambda label: None,
) -> tuple[dict[str, Any], list[str]]:
    """The answer as a plain record, and notes on what was not as asked.

    Args:
        subject: The model and its loss; batch norm is set to eval mode and left so.
        parameters: By name.
        batches: Those to take examples from, in the loader's order.
        most: Examples to look at.
        memory_limit: Bytes for the gradients that are held at once.
        train_size: Examples of the training set; None where it is not known.
        indices: Gives, for the number of a batch and its size, the places of its examples in the data set.
        label: Gives the name of a class.
        tick: Called after each batch.
    """
    reader = PerExample(subject, parameters, memory_limit)
    frozen = reader.freeze_batch_norm()
    parts = _first_examples(subject, batches, most)
    count = sum(size for _, _, size in parts)
    if count < 2:
        raise GradvitalsError(f"{count} example was found; expected 2 or more to compare examples with each other")
    stream, votes = Stream(list(parameters.values()), count), _Votes(list(parameters.values()))
    losses: list[float] = []
    held: list[list[Tensor]] | None = [] if count <= reader.chunk else None
    for number, batch, size in parts:
        for chunk_losses, grads in reader.chunks(batch, size, number):
            losses += chunk_losses.double().tolist()
            for i in range(len(chunk_losses)):
                stream.add([grad[i] for grad in grads])
            votes.add(grads)
            if held is not None:
                held.append(grads)
        tick("examples")
    inner = _inner_products(reader, parts, votes, held, tick)
    rows = list(range(len(parameters)))
    total, *each = stream.gsnr([rows, *([row] for row in rows)])
    norms = np.sqrt(np.square(np.array(stream.norms)).sum(axis=1))
    cosines = cosines_with_the_others(np.array(inner), votes.norm_of_sum())
    targets = [target for _, batch, size in parts for target in _targets(subject, batch, size)]
    sizes = [subject.size(batch) for batch in batches]
    places = [[number, i] for number, _, size in parts for i in range(size)]
    n = train_size or count
    record = {
        "method": reader.method,
        "why": reader.why,
        "examples": count,
        "chunk": reader.chunk if reader.method == "vmap" else 1,
        "gsnr": total.value,
        "low": total.low,
        "high": total.high,
        **noise_scale_of(total, 1),
        **dict(zip(("osgr", "osgr_low", "osgr_high"), _osgr(total, n), strict=True)),
        "train_size": n,
        "tensors": [_tensor(name, gsnr, n) for name, gsnr in zip(parameters, each, strict=True)],
        "norms": norms.tolist(),
        "losses": losses,
        "cosines": cosines.tolist(),
        "places": places,
        "dataset_indices": [found for number, _, size in parts for found in indices(number, sizes[number])[:size]],
        "targets": targets,
        "histogram": _histogram(cosines),
    }
    add_examples(record, label)
    return record, _notes(reader, frozen, train_size, count, most)


def cosines_with_the_others(inner: Any, norm_of_sum: float) -> Any:
    r"""Cosine of each example's gradient with the mean direction of all others.

    With directions :math:`u_i = g_i/\|g_i\|` and their sum U, that of the others is :math:`U - u_i`: an example is not
    compared with itself. Each has one vote, however long its gradient is: once a model has learnt, the mean of
    gradients as they are is made by the few examples that it has wrong, and the others seem to point against it.

    Args:
        inner: :math:`\langle u_i, U \rangle`, `[n]`; nan for an example without a direction.
        norm_of_sum: :math:`\|U\|`.

    Example:
        Two gradients at a right angle; U is (1, 1).

        >>> cosines_with_the_others(np.array([1.0, 1.0]), 2**0.5).tolist()
        [0.0, 0.0]
    """
    square = norm_of_sum**2 - 2 * inner + 1
    # Where the others cancel out, what is left is rounding and has no direction.
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(square > 1e-9, np.clip((inner - 1) / np.sqrt(np.maximum(square, 0.0)), -1.0, 1.0), math.nan)


class _Votes:
    """The sum of the directions of gradients, one a row."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.sum = [torch.zeros(p.shape, dtype=accumulator(p.dtype), device=p.device) for p in parameters]

    def add(self, grads: Sequence[Tensor]) -> None:
        """Take the gradients of some examples; those that are zero or not finite have no direction."""
        norms = row_norms(grads)
        known = (norms > 0) & norms.isfinite()
        for total, grad in zip(self.sum, grads, strict=True):
            rows = grad[known].flatten(1).to(total.dtype)
            total += ((1 / norms[known]).to(total.dtype) @ rows).view(total.shape)

    def inner(self, grads: Sequence[Tensor]) -> list[float]:
        """Of each direction with the sum."""
        products = torch.stack(
            [g.flatten(1).to(total.dtype) @ total.flatten() for g, total in zip(grads, self.sum, strict=True)]
        ).double()
        found: list[float] = (products.sum(0) / row_norms(grads)).tolist()
        return found

    def norm_of_sum(self) -> float:
        """Length of the sum."""
        return math.sqrt(sum(squared_norm(total) for total in self.sum))


def row_norms(grads: Sequence[Tensor]) -> Tensor:
    """The norm of each example's gradient over all parameters, in float64."""
    each = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1, dtype=torch.float64) for g in grads])
    norms: Tensor = torch.linalg.vector_norm(each, dim=0)
    return norms


def _first_examples(subject: Subject, batches: Sequence[Any], most: int) -> list[tuple[int, Any, int]]:
    """(number of the batch, batch, examples in it) until there are enough."""
    parts: list[tuple[int, Any, int]] = []
    left = most
    for number, raw in enumerate(batches):
        if left <= 0:
            break
        batch = subject.move(raw)
        size = min(subject.size(batch), left)
        parts.append((number, subject.take(batch, 0, size), size))
        left -= size
    return parts


def _inner_products(
    reader: PerExample,
    parts: Sequence[tuple[int, Any, int]],
    votes: _Votes,
    held: list[list[Tensor]] | None,
    tick: Callable[[str], object],
) -> list[float]:
    """Of each example's direction with the sum; from a second pass where the gradients could not all be held."""
    found = [value for grads in held or () for value in votes.inner(grads)]
    if held is None:
        for number, batch, size in parts:
            for _, grads in reader.chunks(batch, size, number):
                found += votes.inner(grads)
            tick("examples, second pass")
    return found


def _osgr(gsnr: Estimate, n: int) -> tuple[float, float, float]:
    return osgr(gsnr.value, n), osgr(gsnr.low, n), osgr(gsnr.high, n)


def _tensor(name: str, gsnr: Estimate, n: int) -> dict[str, Any]:
    return {"name": name, "gsnr": gsnr.value, "low": gsnr.low, "high": gsnr.high, "osgr": osgr(gsnr.value, n)}


def _targets(subject: Subject, batch: Any, size: int) -> list[int | None]:
    """The class of each example, where it has one."""
    target = subject.target(batch)
    if isinstance(target, Tensor) and target.dim() == 1 and not target.is_floating_point() and len(target) == size:
        return [int(value) for value in target.tolist()]
    return [None] * size


def _histogram(cosines: Any) -> dict[str, list[float]]:
    counts, edges = np.histogram(cosines[np.isfinite(cosines)], bins=BINS, range=(-1.0, 1.0))
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def _notes(reader: PerExample, frozen: list[str], train_size: int | None, count: int, most: int) -> list[str]:
    notes = []
    if count < most and most != USUAL and (train_size is None or count < train_size):
        notes.append(f"samples: {count} of {most} examples: the batches read had no more; n_batches reads more")
    if frozen:
        more = f" and {len(frozen) - 1} more" if len(frozen) > 1 else ""
        notes.append(
            f"samples: batch norm ({frozen[0]}{more}) took its running statistics, since with those of the batch one "
            "example's gradient depends on the others"
        )
    if reader.method == "loop":
        notes.append(f"samples: gradients were taken one example at a time, since vmap could not: {reader.why}")
    if train_size is None:
        notes.append(f"samples: the size of the training set is not known; OSGR is for the {count} examples seen")
    return notes
