r"""The simulation of the reference note, and the structure that could make its claim or the opposite one true.

A tensor W follows the gradient of :math:`\tfrac12 \|W - W^*\|^2` with noise of size :math:`\sigma` added to every
element, under weight decay:

.. math:: W \leftarrow W (1 - \eta \lambda) - \eta u, \qquad u = g \text{ (SGD)} \quad\text{or}\quad
          u = \hat m / \sqrt{\hat v} \text{ (AdamW)}

The note writes the decay with the wrong sign and without the learning rate; this is the rule that it must mean. W
starts at a root mean square of 1. Every run is made twice with the same noise, for a target of twice and of half that
norm, and the elasticity is the share of the factor of four between the two that W follows: 1 where it adapts, 0 where
it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (64, 64), "vector": (64,), "scalar": ()}
LEVELS: tuple[float, ...] = tuple(10 ** (power / 2) for power in range(-6, 9))
"""Noise levels: seven orders of magnitude, two a decade."""
LR = {"sgd": 0.05, "adamw": 0.01}
DECAY = 0.2
BETA1, BETA2 = 0.9, 0.999
REPEATS = {"vector": 4, "scalar": 32}
"""How many times more often small tensors are run: one says little."""
SAMPLES = 16
"""Gradients at the start that the GSNR is estimated from."""

Optimizer = Literal["sgd", "adamw"]
Noise = Literal["iid", "rank one", "even rank one"]
Target = Literal["aligned", "elsewhere"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of run."""

    shape: str
    """One of `SHAPES`, or ``multiplier``: a matrix with a scalar multiplier."""
    optimizer: Optimizer
    noise: Noise
    """Independent in every element; or all of it along one direction, a product of a row and a column; or along one
    in which all elements are equally large."""
    target: Target
    """Along W at the start, so that only the norm has to change; or in another direction."""

    @property
    def dims(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return SHAPES["matrix" if self.shape == "multiplier" else self.shape]


@dataclass(frozen=True, kw_only=True)
class SimRow:
    """What became of one tensor at one noise level."""

    case: Case
    noise_level: float
    seed: int
    gsnr: float
    """Debiased, at the start."""
    radial_gsnr: float
    true_gsnr: float
    """What `gsnr` estimates, from the distance to the target and the noise as they were set."""
    change: float
    """Relative change of the norm, as the note measures it, where the target has twice the norm."""
    elasticity: float

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        values = asdict(self)
        return {**values.pop("case"), **values}


def cases(multipliers: bool = True) -> Iterator[Case]:
    """Everything that is simulated."""
    noises: tuple[Noise, ...] = ("iid", "rank one")
    targets: tuple[Target, ...] = ("aligned", "elsewhere")
    optimizers: tuple[Optimizer, ...] = ("sgd", "adamw")
    for optimizer in optimizers:
        for noise in noises:
            for target in targets:
                for shape in SHAPES:
                    if shape == "scalar" and (noise, target) != ("iid", "aligned"):
                        continue  # a number has one direction
                    yield Case(shape=shape, optimizer=optimizer, noise=noise, target=target)
    for shape in ("matrix", "vector"):
        yield Case(shape=shape, optimizer="adamw", noise="even rank one", target="aligned")
    if multipliers:
        for noise in noises:
            yield Case(shape="multiplier", optimizer="adamw", noise=noise, target="aligned")


def simulate(case: Case, *, seeds: int = 3, steps: int = 400, levels: Sequence[float] = LEVELS) -> list[SimRow]:
    """Run one case at every noise level, small tensors more often than `seeds` says."""
    seeds *= REPEATS.get(case.shape, 1)
    generator = torch.Generator().manual_seed(0)
    numel = math.prod(case.dims)
    runs = len(levels) * seeds
    sigma = torch.tensor([level for level in levels for _ in range(seeds)]).view(runs, 1)
    start = _unit_rms(torch.randn(runs, numel, generator=generator))
    aim = start if case.target == "aligned" else _unit_rms(torch.randn(runs, numel, generator=generator))
    targets = torch.stack([2 * aim, aim / 2])
    draw = _noise(case, runs, generator)
    signal, radial = _measure(start, targets, lambda: sigma * draw())
    weights = start.expand(2, runs, numel).clone()
    scale = torch.ones(2, runs, 1)
    move, move_scale = _Adam(weights), _Adam(scale)
    lr = LR[case.optimizer]
    for _ in range(steps):
        grad = scale * weights - targets + sigma * draw()
        if case.shape == "multiplier":
            pull = (weights * grad).sum(-1, keepdim=True)
            grad = scale * grad
            scale.sub_(lr * move_scale(pull))
        step = grad if case.optimizer == "sgd" else move(grad)
        weights.mul_(1 - lr * DECAY).sub_(lr * step)
    norms = (scale * weights).norm(dim=-1)
    elasticity = ((norms[0] / norms[1]).log() / math.log(4)).tolist()
    change = ((norms[0] - start.norm(dim=-1)).abs() / start.norm(dim=-1)).tolist()
    # The GSNR that the estimates estimate, mean of both targets: the gradient without noise is the distance to the
    # target, so this is the squared distance over the variance of the noise, summed over coordinates.
    true = ((start - targets).square().sum(-1).mean(0) / (numel * sigma[:, 0].square())).tolist()
    return [
        SimRow(
            case=case,
            noise_level=levels[run // seeds],
            seed=run % seeds,
            gsnr=float(signal[run]),
            radial_gsnr=float(radial[run]),
            true_gsnr=true[run],
            change=change[run],
            elasticity=elasticity[run],
        )
        for run in range(runs)
    ]


def _unit_rms(values: Tensor) -> Tensor:
    return values / values.square().mean(-1, keepdim=True).sqrt()


def _noise(case: Case, runs: int, generator: torch.Generator) -> Callable[[], Tensor]:
    """Draws noise of mean square 1 for every run, `[runs, numel]`."""
    numel = math.prod(case.dims)
    if case.noise == "iid":
        return lambda: torch.randn(runs, numel, generator=generator)
    rows, columns = (case.dims[0], case.dims[1]) if len(case.dims) == 2 else (1, numel)
    u, v = torch.randn(runs, rows, 1, generator=generator), torch.randn(runs, 1, columns, generator=generator)
    product = (u * v).view(runs, numel)
    direction = product.sign() if case.noise == "even rank one" else _unit_rms(product)
    return lambda: torch.randn(runs, 1, generator=generator) * direction


def _measure(start: Tensor, targets: Tensor, noise: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """GSNR and radial GSNR at the start, debiased, both targets together."""
    mean = start - targets
    samples = torch.stack([noise() for _ in range(SAMPLES)])
    middle = samples.mean(0)
    spread = (samples - middle).square().sum((0, -1)) / (SAMPLES - 1)
    signal = ((mean + middle).square().sum(-1) - spread / SAMPLES).mean(0)
    direction = start / start.norm(dim=-1, keepdim=True)
    along = (samples * direction).sum(-1)
    noise_along = along.var(0)
    signal_along = (((mean + middle) * direction).sum(-1).square() - noise_along / SAMPLES).mean(0)
    return signal / spread, signal_along / noise_along


class _Adam:
    """Adam's step for a tensor, without the learning rate."""

    def __init__(self, like: Tensor) -> None:
        self.m, self.v, self.t = torch.zeros_like(like), torch.zeros_like(like), 0

    def __call__(self, grad: Tensor) -> Tensor:
        self.t += 1
        self.m.lerp_(grad, 1 - BETA1)
        self.v.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
        size = (self.v / (1 - BETA2**self.t)).sqrt_()
        return self.m / (1 - BETA1**self.t) / size
