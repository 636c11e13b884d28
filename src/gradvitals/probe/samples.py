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

from gradvitals.errors import GradvitalsError
from gradvitals.functional.intervals import Estimate
from gradvitals.probe.batches import Subject
from gradvitals.probe.per_example import PerExample
from gradvitals.probe.signal import noise_scale_of
from gradvitals.probe.streaming import Stream
from gradvitals.probe.untouched import same_randomness

MOST_NAMED = 10
BINS = 20


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
    most: int = 256,
    memory_limit: int = 1 << 29,
    train_size: int | None = None,
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
        tick: Called after each batch.
    """
    reader = PerExample(subject, parameters, memory_limit)
    frozen = reader.freeze_batch_norm()
    parts = _first_examples(subject, batches, most)
    count = sum(size for _, _, size in parts)
    if count < 2:
        raise GradvitalsError(f"{count} example was found; expected 2 or more to compare examples with each other")
    stream = Stream(list(parameters.values()), count)
    losses: list[float] = []
    held: list[list[Tensor]] | None = [] if count <= reader.chunk else None
    with same_randomness():
        for _, batch, size in parts:
            for chunk_losses, grads in reader.chunks(batch, size):
                losses += chunk_losses.double().tolist()
                for i in range(len(chunk_losses)):
                    stream.add([grad[i] for grad in grads])
                if held is not None:
                    held.append(grads)
            tick("examples")
    inner = _inner_products(reader, parts, stream.mean, held, tick)
    rows = list(range(len(parameters)))
    total, *each = stream.gsnr([rows, *([row] for row in rows)])
    norms = np.sqrt(np.square(np.array(stream.norms)).sum(axis=1))
    cosines = cosines_with_the_others(norms, np.array(inner), stream.norm_of_mean(rows))
    targets = [target for _, batch, size in parts for target in _targets(subject, batch, size)]
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
        "targets": targets,
        "histogram": _histogram(cosines),
    }
    record["largest"] = _named(record, np.argsort(-np.nan_to_num(norms, nan=np.inf), kind="stable"))
    record["contrary"] = _named(record, np.argsort(np.nan_to_num(cosines, nan=np.inf), kind="stable"))
    return record, _notes(reader, frozen, train_size, count)


def cosines_with_the_others(norms: Any, inner: Any, norm_of_mean: float) -> Any:
    r"""Cosine of each example's gradient with the mean of all others.

    With n gradients of mean m, the mean of the others is :math:`(n m - g_i)/(n-1)`: an example is not compared with
    itself.

    Args:
        norms: :math:`\|g_i\|`, `[n]`.
        inner: :math:`\langle g_i, m \rangle`, `[n]`.
        norm_of_mean: :math:`\|m\|`.

    Example:
        Two gradients, (1, 0) and (0, 1), have the mean (1/2, 1/2).

        >>> cosines_with_the_others(np.array([1.0, 1.0]), np.array([0.5, 0.5]), 0.5**0.5).tolist()
        [0.0, 0.0]
    """
    n = len(norms)
    product = (n * inner - norms**2) / (n - 1)
    square = np.maximum(n**2 * norm_of_mean**2 - 2 * n * inner + norms**2, 0.0) / (n - 1) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(product / (norms * np.sqrt(square)), -1.0, 1.0)


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
    mean: Sequence[Tensor],
    held: list[list[Tensor]] | None,
    tick: Callable[[str], object],
) -> list[float]:
    """Of each example's gradient with the mean; from a second pass where the gradients could not all be held."""
    found: list[float] = []

    def add(grads: Sequence[Tensor]) -> None:
        total = sum((g.flatten(1).double() @ m.flatten().double()).cpu() for g, m in zip(grads, mean, strict=True))
        found.extend(torch.as_tensor(total).tolist())

    for grads in held or ():
        add(grads)
    if held is None:
        with same_randomness():
            for _, batch, size in parts:
                for _, grads in reader.chunks(batch, size):
                    add(grads)
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


def _named(record: dict[str, Any], order: Any) -> list[dict[str, Any]]:
    usual = float(np.nanmedian(record["norms"]))
    return [
        {
            "index": int(i),
            "batch": record["places"][i][0],
            "position": record["places"][i][1],
            "norm": record["norms"][i],
            "norm_over_median": record["norms"][i] / usual if usual > 0 else math.nan,
            "cosine": record["cosines"][i],
            "loss": record["losses"][i],
            "target": record["targets"][i],
        }
        for i in order[:MOST_NAMED]
    ]


def _histogram(cosines: Any) -> dict[str, list[float]]:
    counts, edges = np.histogram(cosines[np.isfinite(cosines)], bins=BINS, range=(-1.0, 1.0))
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def _notes(reader: PerExample, frozen: list[str], train_size: int | None, count: int) -> list[str]:
    notes = []
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
