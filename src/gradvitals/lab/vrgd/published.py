"""What the VRGD paper reports for CIFAR-10 with ResNet-56.

Jiang, Liu, Ding, Guo, Lin: "Accelerating large batch training via gradient signal to noise ratio (GSNR)", 2023, as
submitted to NeurIPS. Top-1 accuracy in %, mean of 5 runs.
"""

from __future__ import annotations

from gradvitals.lab.vrgd.trial import Trial

_GAMMA = (0.1, "constant")
_BATCHES = (256, 512, 1024, 2048, 4096, 8192)
_ACCURACY = {
    ("momentum", "base"): (93.68, 93.56, 93.17, 92.19, 17.40, 14.57),
    ("momentum", "vr"): (93.79, 93.71, 93.50, 93.28, 92.70, 90.57),
    ("adam", "base"): (91.88, 92.24, 92.02, 91.98, 59.38, 20.74),
    ("adam", "vr"): (92.46, 92.40, 92.43, 92.10, 91.74, 90.86),
    ("lamb", "base"): (92.08, 92.03, 91.90, 92.13, 58.35, 15.13),
    ("lamb", "vr"): (92.29, 92.34, 92.05, 92.43, 92.04, 91.07),
    ("lars", "base"): (92.30, 92.29, 92.34, 82.39, 27.50, 12.21),
    ("lars", "vr"): (92.35, 92.53, 92.44, 92.79, 92.35, 91.86),
}


def published(trial: Trial) -> float | None:
    """The paper's accuracy for the optimizer, arm, gamma and batch of a trial; None where it has none."""
    row = _ACCURACY.get((trial.optimizer, trial.arm))
    if trial.task != "cifar" or row is None or trial.batch not in _BATCHES:
        return None
    if trial.arm != "base" and (trial.gamma, trial.gamma_schedule) != _GAMMA:
        return None
    return row[_BATCHES.index(trial.batch)]
