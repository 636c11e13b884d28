"""One training run of the VRGD lab: what it is, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "lamb", "lars")
ARMS = (
    *("base", "vr", "vr-row", "vr-layer", "vr-cap4", "mean", "shuffled", "shuffled-fixed"),
    *("wiener-element", "wiener-row", "wiener-tensor", "wiener-hierarchical"),
)
GAMMA_SCHEDULES = ("constant", "linear", "cosine", "adaptive")

Result = dict[str, float]
"""What a task's ``train(trial)`` returns.

``score``: higher is better (accuracy in %, minus the loss, AUC); nan if the run diverged. ``train_score``: the same
measure on training data, where the two can be compared. ``loss``: at the end, on training data. ``seconds``: of
training. ``chance``: the score of knowing nothing, which stands for nan where scores are averaged. And the task's own.
"""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run. Everything random in it follows from `seed` alone, so that arms meet the same data in the same order."""

    task: str
    """cifar, text or clicks."""
    model: str
    """resnet20, gpt-small, ..."""
    batch: int
    """Samples (images, sequences, clicks) of one optimizer step."""
    optimizer: str
    """sgd, momentum, adam, adamw, lamb or lars."""
    arm: str
    """What is done to its gradients; see `gradvitals.lab.vrgd.arms`."""
    lr: float
    seed: int
    k: int = 8
    """Micro-batches of a step. The base arm goes through them too."""
    gamma: float = 0.1
    gamma_schedule: str = "constant"
    """constant, linear or cosine (from 1 down to gamma over the run), or adaptive (see `arms`)."""
    epochs: float = 24
    """Or the task's own measure of length, such as steps."""
    weight_decay: float = 5e-4
