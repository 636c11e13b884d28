"""Examples that stand out: those to look at first where labels may be wrong.

A wrong label shows in the loss of its own example once the model has learnt something. The direction of its gradient
says less: examples of one class point one way and those of another class another way, right or wrong. Losses are
compared within a class, since a class that is not learnt yet has a high loss in every example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.types import FloatArray

MOST_NAMED = 10
FEWEST = 5
"""Examples of a class that a median of its own is taken of; those of rarer classes are compared with all."""

FAR = 3.0
"""Tukey's outer fence: a value is far out that is so many interquartile ranges above the upper quartile."""


def excess_losses(losses: Sequence[float], targets: Sequence[int | None]) -> FloatArray:
    """The loss of each example above the median of its class, or of all where there are no classes.

    Example:
        >>> excess_losses([1.0, 1.0, 2.0, 5.0], [None] * 4).tolist()
        [-0.5, -0.5, 0.5, 3.5]
    """
    values = np.array(losses, dtype=np.float64)
    usual = np.full(len(values), _median(values))
    labels = np.array([math.nan if target is None else target for target in targets], dtype=np.float64)
    for label in np.unique(labels[np.isfinite(labels)]):
        own = labels == label
        if np.isfinite(values[own]).sum() >= FEWEST:
            usual[own] = _median(values[own])
    found: FloatArray = values - usual
    return found


def standing_out(excess: FloatArray, norms: FloatArray) -> NDArray[np.bool_]:
    """Which examples have a loss that is far out, and loss and gradient above the root mean square of all.

    The latter, since where a model has learnt nearly all, an example may be far out that it has right.
    """
    return (excess > _fence(excess)) & (excess > _root_mean_square(excess)) & (norms > _root_mean_square(norms))


def add_examples(record: dict[str, Any], label: Callable[[int], str] = str) -> None:
    """Put the lists of single examples into the record of `samples`; `label` gives the name of a class."""
    norms, cosines = np.array(record["norms"]), np.array(record["cosines"])
    excess = excess_losses(record["losses"], record["targets"])
    # What is not finite comes first among the suspects, and what has no direction last among the contrary.
    order = np.argsort(-np.nan_to_num(excess, nan=np.inf), kind="stable")
    odd = standing_out(excess, norms)
    record["standing_out"] = [int(i) for i in order if odd[i]]
    rows = _rows(record, excess, label)
    orders = {
        "suspects": order,
        "largest": np.argsort(-np.nan_to_num(norms, nan=np.inf), kind="stable"),
        "contrary": np.argsort(np.nan_to_num(cosines, nan=np.inf), kind="stable"),
    }
    for key, found in orders.items():
        record[key] = [rows(int(i)) for i in found[:MOST_NAMED]]


def _rows(record: dict[str, Any], excess: FloatArray, label: Callable[[int], str]) -> Callable[[int], dict[str, Any]]:
    usual = _median(np.array(record["norms"]))

    def row(i: int) -> dict[str, Any]:
        target = record["targets"][i]
        return {
            "index": i,
            "dataset_index": record["dataset_indices"][i],
            "batch": record["places"][i][0],
            "position": record["places"][i][1],
            "norm": record["norms"][i],
            "norm_over_median": record["norms"][i] / usual if usual > 0 else math.nan,
            "cosine": record["cosines"][i],
            "loss": record["losses"][i],
            "excess_loss": float(excess[i]),
            "target": target,
            "label": None if target is None else label(target),
        }

    return row


def _median(values: FloatArray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def _root_mean_square(values: FloatArray) -> float:
    finite = values[np.isfinite(values)]
    return math.sqrt(float(np.mean(finite**2))) if len(finite) else math.inf


def _fence(values: FloatArray) -> float:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return math.inf
    low, high = np.quantile(finite, [0.25, 0.75])
    return float(high + FAR * (high - low))
