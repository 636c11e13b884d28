"""Which arms are to be compared, as one trial each: the groups that `run_sweep` sweeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product

from gradvitals.lab.vrgd.trial import Trial


def default_gamma(arm: str) -> float:
    """The smallest factor where none is asked for: the paper's, or none at all for shrinkage."""
    return 0.0 if arm.startswith("wiener") else 0.1


def make_groups(
    task: str,
    *,
    models: Sequence[str],
    batches: Sequence[int],
    optimizers: Sequence[str],
    arms: Sequence[str],
    ks: Sequence[int],
    epochs: float,
    weight_decay: float,
    start_lr: Callable[[str, int], float],
    gammas: Sequence[float] = (),
    gamma_schedules: Sequence[str] = ("constant",),
) -> list[Trial]:
    """All combinations that make sense, one comparison after the other.

    Args:
        task: Of all.
        models: And so on, every one with every other.
        batches: Samples of a step.
        optimizers: By name.
        arms: By name. ``base`` is one arm, whatever gamma; only ``vr`` can have an adaptive gamma.
        ks: Micro-batches of a step.
        epochs: Length of a trial.
        weight_decay: Of all.
        start_lr: Where the sweep begins, by optimizer and batch: for all arms alike.
        gammas: None: `default_gamma`.
        gamma_schedules: By name.
    """
    groups = [
        Trial(
            task=task,
            model=model,
            batch=batch,
            optimizer=optimizer,
            arm=arm,
            lr=start_lr(optimizer, batch),
            seed=0,
            k=k,
            gamma=gamma,
            gamma_schedule=schedule,
            epochs=epochs,
            weight_decay=weight_decay,
        )
        for model, batch, optimizer, k, arm in product(models, batches, optimizers, ks, arms)
        for gamma, schedule in _gammas(arm, gammas, gamma_schedules)
    ]
    return list(dict.fromkeys(groups))


def _gammas(arm: str, gammas: Sequence[float], schedules: Sequence[str]) -> Iterator[tuple[float, str]]:
    if arm == "base":
        yield default_gamma(arm), "constant"
        return
    for gamma, schedule in product(gammas or (default_gamma(arm),), schedules):
        if arm == "vr" or schedule != "adaptive":
            yield gamma, schedule


def scaled_start_lr(by_optimizer: dict[str, float], batch_of_those: int, optimizer: str, batch: int) -> float:
    """Where a sweep begins: what is known at one batch, times the square root of the batch, to the next power of 2."""
    return by_optimizer[optimizer] * 2.0 ** round(0.5 * math.log2(batch / batch_of_those))
