"""Which tensors ask for a multiplier, from a kept run."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from gradvitals.diagnose import RunInfo
from gradvitals.diagnose.rules.scale import TrappedScale, beta1_of, decay_of, is_plain_matrix
from gradvitals.store.reader import Run, open_run


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Tensors that ask for a multiplier. It can be gone through like the tuple of their names."""

    names: tuple[str, ...] = ()
    reason: str = ""
    """What it rests on, or why nothing can be said."""
    ratios: Mapping[str, float] = field(default_factory=dict)
    """Of every matrix that could be judged: its norm over the one that noise alone would have made."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        return f"{self.reason}: {', '.join(self.names)}" if self.names else self.reason


def suggest(run: Run | str | os.PathLike[str]) -> Suggestion:
    """Which tensors have the norm that noise and weight decay would give them, from a run's record.

    The norm that the noise of AdamW's updates alone would have by now follows from the learning rates, the weight decay
    and the norm at the start; `gradvitals.diagnose.rules.scale` has the formula. A tensor is named where its norm has
    been that one over the last readings, and where the run is long enough to have forgotten the norm it began with.

    Args:
        run: A run, or where it is.

    Returns:
        The names, to be given to `attach` as `where`, and in words what they rest on.
    """
    if isinstance(run, Run):
        return _suggestion(run)
    with open_run(run) as opened:
        return _suggestion(opened)


def _suggestion(run: Run) -> Suggestion:
    facts = RunInfo.from_json(run.meta.get("facts") or {})
    decay = decay_of(facts)
    if math.isnan(decay):
        given = f"{facts.optimizer or 'not known'}, its weight decay {facts.weight_decay}"
        return Suggestion(reason=f"cannot tell: the optimizer is {given}; expected AdamW with a weight decay")
    if "lr" not in run.metrics("values") or "weight/norm" not in run.metrics("tensors"):
        return Suggestion(reason="cannot tell: the run has no learning rate or no norms of weights")
    sizes = np.array([float(info.numel) for info in run.tensors])
    matrix = np.array([is_plain_matrix(info) for info in run.tensors])
    rates, readings = zip(*run.series("lr"), strict=True), dict(zip(*run.matrix("weight/norm"), strict=True))
    rule, last, held = TrappedScale(), np.zeros(0), np.zeros(len(sizes), dtype=bool)
    for step, lr in rates:
        if step in readings:
            last = np.square(readings[step]) / sizes
            held = rule.weigh(int(step), last, matrix)
        rule.walk.advance(int(step), float(lr), decay, beta1_of(facts))
    judged = np.flatnonzero(matrix & rule.judged) if len(last) else np.zeros(0, dtype=int)
    ratio = rule.ratio(last) if len(last) else last
    ratios = {run.tensors[i].name: float(ratio[i]) for i in judged.tolist()}
    if not ratios:
        left = 100 * rule.walk.kept
        return Suggestion(
            reason=f"cannot tell yet: {left:.0f} % of the weights' mean square at the start would still be there; it "
            f"takes about {1 / decay:.3g} / learning rate steps until a norm says what holds it"
        )
    names = tuple(run.tensors[i].name for i in np.flatnonzero(held).tolist())
    reason = f"{len(names)} of {len(ratios)} matrices have the norm that noise and weight decay make"
    return Suggestion(names=names, reason=reason, ratios=ratios)
