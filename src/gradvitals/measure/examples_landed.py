"""What the examples of a step add up to on the host, once it is sure that they are all there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from gradvitals.measure.packet import Arrived
from gradvitals.measure.rawstep import RawStep
from gradvitals.measure.sums import Flags, Floats, PartSums, RowSums

TOLERANCE = 0.02
"""How far the norm of the examples' sum may be from that of the gradient. Half precision rounds either by less."""


def land_examples(
    raw: RawStep, arrived: Mapping[str, Arrived], gradients: RowSums | None, scale: Floats, weighing: str
) -> tuple[RowSums, RowSums, PartSums] | str:
    """The sums over examples of a step, in the form of micro-batches of one example.

    The examples of a row must add up to the gradient that the optimizer gets. Where they do not, some were not seen, or
    the gradient is made of more: a weight that other code uses too, gradients that were not zeroed, a hook of the
    loop's own. Such rows are left out.

    Args:
        raw: The step.
        arrived: Its numbers.
        gradients: Squared norms of its gradients.
        scale: What each row's incoming gradients were multiplied by.
        weighing: `Config.micro_batch_weights`.

    Returns:
        Sums of squares and squares of sums by row, and what they are made of; or why there are none.
    """
    sizes: dict[int, tuple[int, ...]] = {}
    for station in raw.stations:
        sizes |= station.examples or {}
    if not sizes or "examples_sum" not in arrived:
        return "no call of a norm layer was seen; torch.compile hides them, and so does calling forward() directly"
    counts = Counter(sizes.values())
    common = max(counts, key=lambda found: (counts[found], -sum(found)))
    count = sum(common)
    if count < 2:
        return f"the norm layers have {count} example in a step, and it takes two"
    if raw.batch_size is not None and count > raw.batch_size * (1 + 1e-9):
        return (
            f"the norm layers have {count} examples in a step of {raw.batch_size:g} samples: their inputs do not have "
            "samples in the first dimension, and Config(example_dim=...) says in which"
        )
    squares = np.zeros(len(scale))
    weights = np.full(len(common), 1 / count) if weighing == "size" else 1 / (len(common) * np.array(common))
    for place, weight in enumerate(weights):
        squares += np.square(arrived[f"examples{place}"].sums(len(scale)) / scale) / weight
    total = np.square(arrived["examples_sum"].sums(len(scale)) / scale)
    seen = _complete(sizes, common, total, gradients)
    if not seen.any():
        return "what the examples add up to is not the gradient of the norm layers' weights"
    samples = float(count) if raw.batch_size is None else float(raw.batch_size)
    each, of_all = samples / count, np.repeat(weights, common)
    parts = PartSums(
        count=count,
        samples=samples,
        sizes_known=True,
        weight=float(of_all.sum()),
        weight_per_sample=float(of_all.sum()) / each,
        square_per_sample=float(np.square(of_all).sum()) / each,
    )
    return RowSums(squares, seen), RowSums(total, seen), parts


def _complete(
    sizes: Mapping[int, tuple[int, ...]], common: tuple[int, ...], total: Floats, gradients: RowSums | None
) -> Flags:
    """Rows whose examples were all seen."""
    seen = np.zeros(len(total), dtype=bool)
    seen[[row for row, found in sizes.items() if found == common]] = True
    if gradients is None:
        return np.zeros_like(seen)
    own, told = np.sqrt(total), np.sqrt(gradients.values)
    broken = ~np.isfinite(told)  # NaN in a gradient is told as such
    alike: Flags = broken | (np.abs(own - told) <= TOLERANCE * told)
    return seen & gradients.present & alike
