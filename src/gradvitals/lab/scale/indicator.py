"""How well a number tells beforehand which tensors adapt: ROC, the best threshold, and what is left of it elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Labels = NDArray[np.bool_]


def average_ranks(values: Floats) -> Floats:
    """Rank of each value from 1 on, the mean of their ranks for those that are equal.

    >>> average_ranks(np.array([5.0, 1.0, 5.0])).tolist()
    [2.5, 1.0, 2.5]
    """
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(count) - (count - 1) / 2)[place]
    return ranks


def auc(scores: Floats, labels: Labels) -> float:
    r"""Area under the ROC: the chance that a tensor that adapts has the higher score, ties counted half.

    .. math:: \frac{U}{n_1 n_0}, \qquad U = \sum_{i \in 1} \mathrm{rank}_i - \frac{n_1 (n_1 + 1)}{2}

    nan where one of the two kinds is missing. Scores that are nan count as the lowest.

    >>> auc(np.array([1.0, 2.0, 3.0, 4.0]), np.array([False, True, False, True]))
    0.75
    """
    known = np.where(np.isnan(scores), -np.inf, scores)
    ones, zeros = int(labels.sum()), int((~labels).sum())
    if not ones or not zeros:
        return math.nan
    ranks = average_ranks(known)
    return float((ranks[labels].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def roc(scores: Floats, labels: Labels) -> tuple[Floats, Floats]:
    """Shares of false and of true alarms, threshold by threshold from the highest down."""
    known = np.where(np.isnan(scores), -np.inf, scores)
    thresholds = np.append(np.inf, np.unique(known)[::-1])
    above = known[None, :] >= thresholds[:, None]
    false = above[:, ~labels].mean(1) if (~labels).any() else np.zeros(len(thresholds))
    true = above[:, labels].mean(1) if labels.any() else np.zeros(len(thresholds))
    return false, true


def balanced_accuracy(scores: Floats, labels: Labels, threshold: float) -> float:
    """Mean of the shares of both kinds that ``score > threshold`` tells rightly; of one kind where one is missing."""
    told = scores > threshold
    shares = [float((told[labels == kind] == kind).mean()) for kind in (True, False) if (labels == kind).any()]
    return float(np.mean(shares)) if shares else math.nan


def best_threshold(scores: Floats, labels: Labels) -> float:
    """The threshold of highest balanced accuracy, midway (by ratio, where both are positive) between two scores."""
    known = np.unique(scores[np.isfinite(scores)])
    if not len(known):
        return math.nan
    middles = [
        math.sqrt(a * b) if a > 0 else (a + b) / 2 for a, b in zip(known[:-1].tolist(), known[1:].tolist(), strict=True)
    ]
    candidates = [float(known[0]) - 1e-12, *middles, float(known[-1])]
    return max(candidates, key=lambda threshold: balanced_accuracy(scores, labels, threshold))


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What a number was worth."""

    auc: float
    """Over everything."""
    accuracy: float
    """Share told rightly by the threshold that is best over everything, each kind counting half."""
    threshold: float
    held_out_auc: float
    """Mean over groups that were held out, each with the direction chosen on the others."""
    held_out_accuracy: float
    """Mean over groups, each by the threshold that was best on the others."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return dict(vars(self))


def judge(scores: Floats, labels: Labels, groups: Sequence[Any]) -> Judged:
    """Judge a number as a predictor, also on groups that it was not fitted to.

    Args:
        scores: One for each tensor, higher for those that should adapt.
        labels: Which do.
        groups: What is held out together: a fold, a model or a schedule.
    """
    sign = 1.0 if not auc(scores, labels) < 0.5 else -1.0
    threshold = best_threshold(sign * scores, labels)
    names = np.array([str(group) for group in groups])
    areas, accuracies = [], []
    for name in dict.fromkeys(names.tolist()):
        out = names == name
        if out.all() or not (~out).any():
            continue
        direction = 1.0 if not auc(scores[~out], labels[~out]) < 0.5 else -1.0
        areas.append(auc(direction * scores[out], labels[out]))
        limit = best_threshold(direction * scores[~out], labels[~out])
        accuracies.append(balanced_accuracy(direction * scores[out], labels[out], limit))
    return Judged(
        auc=auc(sign * scores, labels),
        accuracy=balanced_accuracy(sign * scores, labels, threshold),
        threshold=sign * threshold,
        held_out_auc=_mean(areas),
        held_out_accuracy=_mean(accuracies),
    )


def folds(count: int, number: int, seed: int = 0) -> list[int]:
    """Which of `number` folds each of `count` things is in, at random."""
    order = np.random.default_rng(seed).permutation(count)
    return [int(place) % number for place in np.argsort(order)]


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan
