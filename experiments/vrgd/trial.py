"""One trial, the arms that are compared, and what each arm does to the gradients of its optimizer.

======================== ===============================================================================================
``base``                 the optimizer as it is
``vr``                   its VRGD twin, by the paper's rule: factors from the GSNR over its mean in each tensor
``vr-row, vr-layer``     the same with the mean taken over rows, or over layers
``vr-cap4``              the paper's rule clipped to [gamma, 4]: elements with much signal may go faster
``mean``                 each tensor's gradient times the mean of the paper's factors: is it just a smaller step?
``shuffled``             the paper's factors, given to random coordinates of each tensor, anew in every step
``shuffled-fixed``       the same with one permutation for the whole run, so factors last as long as they do in ``vr``
``wiener-...``           shrinkage by R / (1 + R), by ``element``, ``row``, ``tensor``, or ``hierarchical``
======================== ===============================================================================================

With the schedule ``adaptive`` the smallest factor of a tensor is R / (1 + R), or gamma if that is more; R is the
debiased GSNR of the tensor's gradient over the whole batch. A tensor that is all signal is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from gradvitals import optim
from gradvitals.functional import vrgd_scale_from_variance, wiener_scale

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
    """What is done to its gradients; see `Arm`."""
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


def warmup_cosine(step: int, num_steps: int, warmup: float) -> float:
    """What the learning rate is multiplied with: up in a line over the share `warmup` of all steps, then a cosine to 0.

    Args:
        step: From 0.
        num_steps: Of the whole run.
        warmup: In [0, 1].
    """
    rising = round(warmup * num_steps)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, num_steps - rising)))


def make_optimizer(
    trial: Trial, named_parameters: Iterable[tuple[str, Tensor]], num_steps: int
) -> torch.optim.Optimizer:
    """The optimizer of a trial. Weight decay is for matrices and kernels; biases and gains (one dimension) have none.

    Args:
        trial: What to build.
        named_parameters: As a model gives them.
        num_steps: Optimizer steps of the run, for schedules of gamma.

    Raises:
        ValueError: when the trial names something that is not there.
    """
    groups = _decay_groups(list(named_parameters), trial.weight_decay)
    kind = trial.optimizer
    if kind not in OPTIMIZERS:
        raise ValueError(f"optimizer is {kind!r}; expected one of {', '.join(OPTIMIZERS)}")
    if trial.arm == "base":
        return _base(kind, groups, trial.lr)
    return _vr(kind, groups, trial.lr, _vr_options(trial, num_steps))


def _decay_groups(named_parameters: list[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [
        {"params": [pair for pair in named_parameters if pair[1].dim() > 1], "weight_decay": weight_decay},
        {"params": [pair for pair in named_parameters if pair[1].dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _base(kind: str, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    if kind in ("sgd", "momentum"):
        return torch.optim.SGD(groups, lr=lr, momentum=_momentum(kind), foreach=True)
    if kind == "adam":
        return torch.optim.Adam(groups, lr=lr, foreach=True)
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=lr, foreach=True)
    return optim.LAMB(groups, lr=lr) if kind == "lamb" else optim.LARS(groups, lr=lr)


def _vr(kind: str, groups: list[dict[str, Any]], lr: float, options: dict[str, Any]) -> torch.optim.Optimizer:
    if kind in ("sgd", "momentum"):
        return optim.VRSGD(groups, lr=lr, momentum=_momentum(kind), **options)
    twins = {"adam": optim.VRAdam, "adamw": optim.VRAdamW, "lamb": optim.VRLAMB, "lars": optim.VRLARS}
    twin: torch.optim.Optimizer = twins[kind](groups, lr=lr, **options)
    return twin


def _momentum(kind: str) -> float:
    return 0.9 if kind == "momentum" else 0.0


# -- what the arms do to gradients ----------------------------------------------------------------------------------


def _vr_options(trial: Trial, num_steps: int) -> dict[str, Any]:
    options: dict[str, Any] = {"k": trial.k, "gamma": _gamma(trial, num_steps)}
    arm, adaptive = trial.arm, trial.gamma_schedule == "adaptive"
    if arm not in ARMS:
        raise ValueError(f"arm is {arm!r}; expected one of {', '.join(ARMS)}")
    if adaptive and arm != "vr":
        raise ValueError(f"arm is {arm!r} with an adaptive gamma; expected arm 'vr', the only one that has it")
    if arm.startswith("wiener"):
        return options | {"scale": "wiener", "granularity": arm.removeprefix("wiener-")}
    if arm in ("vr-row", "vr-layer"):
        return options | {"granularity": arm.removeprefix("vr-")}
    if adaptive:
        return options | {"scale": adaptive_factor}
    if arm == "vr-cap4":
        return options | {"scale": cap4_factor}
    if arm == "mean":
        return options | {"scale": mean_factor}
    if arm.startswith("shuffled"):
        return options | {"scale": Shuffled(trial.seed, fixed=arm == "shuffled-fixed")}
    return options


def _gamma(trial: Trial, num_steps: int) -> float | Callable[[int], float]:
    if trial.gamma_schedule in ("constant", "adaptive"):
        return trial.gamma
    if trial.gamma_schedule == "linear":
        return optim.schedules.linear(1.0, trial.gamma, num_steps)
    if trial.gamma_schedule == "cosine":
        return optim.schedules.cosine(1.0, trial.gamma, num_steps)
    raise ValueError(f"gamma_schedule is {trial.gamma_schedule!r}; expected one of {', '.join(GAMMA_SCHEDULES)}")


def cap4_factor(mean: Tensor, variance: Tensor, num_parts: int, gamma: float) -> Tensor:
    """The paper's ratio over its mean in the tensor, clipped at 4 and not at 1."""
    ratio = mean.square() / variance
    counted = torch.isfinite(ratio)
    average = torch.where(counted, ratio, 0.0).sum() / counted.sum()
    return (ratio / average).clamp(gamma, 4.0)


def mean_factor(mean: Tensor, variance: Tensor, num_parts: int, gamma: float) -> Tensor:
    """The mean of the paper's factors, for every element."""
    return vrgd_scale_from_variance(mean, variance, gamma).mean().expand_as(mean)


def adaptive_factor(mean: Tensor, variance: Tensor, num_parts: int, gamma: float) -> Tensor:
    """The paper's factors with a smallest factor that follows the tensor: max(gamma, R / (1 + R))."""
    signal_share = wiener_scale(mean, variance, num_parts, level="tensor", gamma=gamma)
    return torch.maximum(vrgd_scale_from_variance(mean, variance, gamma), signal_share)


class Shuffled:
    """The paper's factors, given to other coordinates of the same tensor."""

    def __init__(self, seed: int, *, fixed: bool) -> None:
        self._seed = seed
        self._fixed = fixed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._orders: dict[tuple[torch.device, int], Tensor] = {}

    def __call__(self, mean: Tensor, variance: Tensor, num_parts: int, gamma: float) -> Tensor:
        """Factors of the shape of `mean`."""
        factor = vrgd_scale_from_variance(mean, variance, gamma)
        return factor.flatten()[self._order(factor)].view(factor.shape)

    def _order(self, factor: Tensor) -> Tensor:
        # Tensors of one size share a fixed exchange: it need only have nothing to do with the factors.
        known = self._orders.get((factor.device, factor.numel()))
        if known is not None:
            return known
        generator = self._generators.get(factor.device)
        if generator is None:
            generator = self._generators[factor.device] = torch.Generator(factor.device).manual_seed(self._seed)
        order = torch.rand(factor.numel(), generator=generator, device=factor.device).argsort()
        if self._fixed:
            self._orders[factor.device, factor.numel()] = order
        return order
