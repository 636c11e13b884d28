"""Whether the loss of a batch is the mean of its examples' losses, on which everything about examples rests."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gradvitals.probe.batches import Subject
from gradvitals.probe.perturb import at_rest
from gradvitals.probe.untouched import same_randomness
from gradvitals.probe.verdict import item

EXAMPLES = 4
TOLERANCE = {True: 0.03, False: 3e-3}
"""Relative, in half precision and else: a batch is computed in another order than its examples."""


def averaging_of(subject: Subject, batch: Any) -> dict[str, Any]:
    """Compare the loss of a few examples together with their losses one by one, in eval mode.

    Returns:
        `kind` (``mean``, ``sum``, ``weighted``, ``other``, or ``unknown`` where it cannot be told: a single example, a
        loss that needs several or draws random numbers), and the two losses as `together` and `mean_of_singles`.
    """
    count = min(EXAMPLES, subject.size(batch))
    nothing = {"kind": "unknown", "together": math.nan, "mean_of_singles": math.nan}
    if count < 2:
        return nothing
    some = subject.take(batch, 0, count)
    try:
        with torch.no_grad(), at_rest(subject.model):
            together, again = (_loss(subject, some, seed) for seed in (0, 1))
            singles = [_loss(subject, subject.take(batch, i, i + 1), 0) for i in range(count)]
    except Exception:  # one example may be too few for the model; the batch as a whole is what counts
        return nothing
    mean = math.fsum(singles) / count
    if together != again or not math.isfinite(mean + together):
        return nothing
    near = TOLERANCE[_is_half(subject)] * max(abs(mean), abs(together), 1e-6)
    if abs(together - mean) <= near:
        kind = "mean"
    elif abs(together - count * mean) <= near * count:
        kind = "sum"
    else:
        within = min(singles) - near <= together <= max(singles) + near
        kind = "weighted" if within and not _is_broadcast(subject, some) else "other"
    return {"kind": kind, "together": together, "mean_of_singles": mean, "examples": count}


def _is_half(subject: Subject) -> bool:
    narrow = any(p.is_floating_point() and p.element_size() < 4 for p in subject.model.parameters())
    return narrow or torch.is_autocast_enabled(subject.device.type)


def _is_broadcast(subject: Subject, batch: Any) -> bool:
    """Whether output and a target of real numbers differ in shape, so that each is compared with all others."""
    target = subject.target(batch)
    if not subject.splits or not isinstance(target, Tensor) or not target.is_floating_point():
        return False
    with torch.no_grad(), at_rest(subject.model):
        return subject.output(batch).shape != target.shape


def verdict_of(found: dict[str, Any], shapes: str) -> list[dict[str, Any]]:
    """A warning where the loss is no mean."""
    numbers = f"{found['together']:.4g} for {found.get('examples')} together, {found['mean_of_singles']:.4g} on average"
    if found["kind"] == "sum":
        title = "the batch loss is the sum of its examples' losses, not the mean"
        advice = "reduction='mean': with a sum, gradients, steps and the edge of stability grow with the batch"
        return [item("warning", "loss", title, numbers, (), advice)]
    if found["kind"] == "other":
        title = "the batch loss is not the mean of its examples' losses"
        advice = (
            "look at the shapes of output and target, one may be broadcast; where examples are compared with each "
            "other, as in a contrastive loss, what is said of single examples does not hold"
        )
        return [item("warning", "loss", title, f"{numbers}; {shapes}", (), advice)]
    return []


def note_of(found: dict[str, Any]) -> list[str]:
    """A note where examples weigh differently, as those of different length do."""
    if found["kind"] != "weighted":
        return []
    return [
        f"the batch loss weighs its examples ({found['together']:.4g} together, {found['mean_of_singles']:.4g} on "
        "average), as a mean over tokens or weights of classes do; what is said of single examples weighs them the same"
    ]


def _loss(subject: Subject, batch: Any, seed: int) -> float:
    with same_randomness(seed):
        return float(subject.loss(batch))
