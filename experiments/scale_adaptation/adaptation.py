r"""Which tensors of a language model adapt their scale: each is asked by changing the scale that it would need.

One copy of the model is trained as it is. For every tensor two more are, in which that tensor counts twice and half
where it is used. Were its norm free, it would end at half and at twice the norm; were it held by noise and weight
decay, at the same. The elasticity is between the two:

.. math:: e = \frac{\log (\|W_{1/2}\| / \|W_2\|)}{\log 4}

1 for a tensor that follows the scale it should have, 0 for one that does not. Other tensors may take over part of the
change, so that a tensor which is free can have less than 1.

The second half asks how well a number tells beforehand which tensors adapt (ROC, the best threshold, and what is left
of it elsewhere), and trains the same model with and without learnable multipliers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.scale_adaptation.training import (
    BETAS,
    Role,
    Schedule,
    Shape,
    StackedLM,
    Texts,
    evaluate,
    losses_of,
    role,
    train_stack,
)
from gradvitals.diagnose.rules.scale import NoiseWalk
from gradvitals.functional.adam import adam_signal_and_noise
from gradvitals.multipliers import WEIGHT_DECAY, Kind

FACTOR = 2.0
"""What a tensor is multiplied and divided by where it is used."""
ADAPTS = 0.5
"""Elasticity from which on a tensor counts as one that adapts."""
LATE = 0.5
"""Share of the steps after which the signal is measured."""
LAST = 0.9
"""Share of the steps after which norms are averaged."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of it: enough to see something on a GPU, or a little to try it."""

    steps: int = 2000
    batch: int = 32
    num_parts: int = 16
    """Batches at the same weights that a measurement of the signal is made of."""
    every: int = 20
    """Steps from one measurement to the next."""


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """One tensor of one model under one schedule."""

    model: str
    schedule: str
    tensor: str
    role: Role
    numel: int
    elasticity: float
    rms: float
    """Root mean square of its elements at the end."""
    noise_rms: float
    """The same after AdamW on pure noise, with the same start and schedule."""
    formula_rms: float
    """The same by the recursion of `gradvitals.diagnose.rules.scale`."""
    gsnr: float
    """Debiased, at the batch of a step."""
    radial_gsnr: float
    adam_gsnr: float
    """Debiased, from Adam's moments."""
    critical: float
    """r* = lr weight_decay / 2, by the mean learning rate: where the signal in a coordinate equals the noise."""

    @property
    def adapts(self) -> bool:
        """Whether its norm follows the scale it should have."""
        return self.elasticity > ADAPTS

    @property
    def norm_ratio(self) -> float:
        """Its norm over that of pure noise."""
        return self.rms / self.noise_rms

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "norm_ratio": self.norm_ratio, "adapts": self.adapts}


def measure_adaptation(
    label: str, shape: Shape, schedule: Schedule, texts: Texts, size: Size, *, seed: int = 0, graphs: bool = True
) -> list[TensorRow]:
    """Train a stack with every tensor's target scale changed in turn, and see which tensors follow.

    Args:
        label: What the model is called.
        shape: Of the model.
        schedule: Learning rate and weight decay.
        texts: What it learns.
        size: How much.
        seed: Of weights and batches.
        graphs: On a GPU, replay the passes of a step as one CUDA graph.
    """
    names = list(shape.tensors())
    copies = 1 + 2 * len(names)
    factors = {name: torch.ones(copies) for name in names}
    for place, name in enumerate(names):
        factors[name][1 + 2 * place], factors[name][2 + 2 * place] = FACTOR, 1 / FACTOR
    device = texts.train.bytes.device
    model = StackedLM(shape, [seed] * copies, factors).to(device)
    signal = Signal(model, texts, size, seed=seed + 1)
    noise = Brownian(model, schedule, seed=seed + 2)
    walk, starts = NoiseWalk(), noise.mean_squares()
    logs, counted, rates = torch.zeros(len(names), copies, device=device), 0, 0.0

    def look(step: int, lr: float, optimizer: torch.optim.AdamW) -> None:
        nonlocal counted, rates
        if step >= LATE * size.steps and step % size.every == 0:
            signal.measure(optimizer, step)
        if step >= LAST * size.steps:
            logs.add_(_norms(model).log())
            counted += 1
        noise.step(lr)
        walk.advance(step, lr, schedule.decay)
        rates += lr / size.steps

    train_stack(
        model, texts.train, schedule, steps=size.steps, batch=size.batch, seed=seed, on_step=look, graphs=graphs
    )
    ends = (logs / counted).tolist()
    noise_squares, formula = noise.mean_squares(), walk.expected(starts)
    ratios = signal.ratios()
    rows = []
    for place, (name, tensor_shape) in enumerate(shape.tensors().items()):
        numel = math.prod(tensor_shape)
        low, high = ends[place][1 + 2 * place], ends[place][2 + 2 * place]
        rows.append(
            TensorRow(
                model=label,
                schedule=schedule.name,
                tensor=name,
                role=role(tensor_shape),
                numel=numel,
                elasticity=(high - low) / (2 * math.log(FACTOR)),
                rms=math.exp(ends[place][0]) / math.sqrt(numel),
                noise_rms=math.sqrt(noise_squares[place]),
                formula_rms=math.sqrt(formula[place]),
                gsnr=float(ratios[0][place]),
                radial_gsnr=float(ratios[1][place]),
                adam_gsnr=float(ratios[2][place]),
                critical=rates * schedule.decay / 2,
            )
        )
    return rows


@torch.no_grad()
def _norms(model: StackedLM) -> Tensor:
    """`[tensors, copies]`."""
    stored = (model.stored(name) for name in model.names)
    return torch.stack([tensor.reshape(len(tensor), -1).norm(dim=1) for tensor in stored])


class Signal:
    """GSNR, radial GSNR and Adam's of the copy that is trained as it is, as ratios of means over measurements."""

    def __init__(self, model: StackedLM, texts: Texts, size: Size, *, seed: int) -> None:
        self.model, self.texts, self.size = model, texts, size
        device = texts.train.bytes.device
        self._probe = StackedLM(model.shape, [0] * size.num_parts).to(device)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._sums = torch.zeros(4, len(model.names), dtype=torch.float64, device=device)
        self._adam = np.zeros((2, len(model.names)))

    def measure(self, optimizer: torch.optim.AdamW, step: int) -> None:
        """Take gradients of several batches at the weights as they are, and what Adam remembers."""
        model, probe, parts = self.model, self._probe, self.size.num_parts
        with torch.no_grad():
            for name in model.names:
                probe.stored(name).copy_(model.stored(name)[:1].expand_as(probe.stored(name)))
        context = model.shape.context
        windows = self.texts.train.windows(parts * self.size.batch, context, self._generator)
        losses = losses_of(probe, windows.view(parts, self.size.batch, context + 1)).sum()
        stored = [probe.stored(name) for name in model.names]
        grads = torch.autograd.grad(losses, stored)
        with torch.no_grad():
            self._sums += torch.stack(list(map(torch.stack, zip(*self._parts(stored, grads), strict=True))))
        if step < 2:
            return
        states = [optimizer.state[model.stored(name)] for name in model.names]
        moments = torch.stack([torch.stack([s["exp_avg"][0].square().sum(), s["exp_avg_sq"][0].sum()]) for s in states])
        first, second = moments.double().cpu().numpy().T
        self._adam += adam_signal_and_noise(first, second, beta1=BETAS[0], beta2=BETAS[1], step=step)

    def _parts(self, stored: list[Tensor], grads: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
        for weight, grad in zip(stored, grads, strict=True):
            rows, direction = grad.reshape(len(grad), -1).double(), weight[0].flatten().double()
            yield (*_split(rows), *_split((rows @ direction / direction.norm())[:, None]))

    def ratios(self) -> tuple[Any, Any, Any]:
        """GSNR, radial GSNR and Adam's, one number for each tensor."""
        sums = self._sums.cpu().numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            return sums[0] / sums[1], sums[2] / sums[3], self._adam[0] / self._adam[1]


def _split(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Signal and noise of samples `[T, n]`, debiased: |mean|² - S/T, and S."""
    mean = rows.mean(0)
    noise = (rows - mean).square().sum() / (len(rows) - 1)
    return mean.square().sum() - noise / len(rows), noise


class Brownian:
    """Adam Brownian motion: tensors that start like a model's and whose gradients are pure noise."""

    def __init__(self, model: StackedLM, schedule: Schedule, *, seed: int) -> None:
        first = [model.stored(name)[0].detach().flatten() for name in model.names]
        self._sizes = [len(part) for part in first]
        self._flat = torch.cat(first).clone().requires_grad_()
        self._flat.grad = torch.zeros_like(self._flat)
        self._generator = torch.Generator(self._flat.device).manual_seed(seed)
        self._optimizer = torch.optim.AdamW([self._flat], lr=schedule.lr, betas=BETAS, weight_decay=schedule.decay)

    def step(self, lr: float) -> None:
        """One step of AdamW."""
        assert self._flat.grad is not None
        self._flat.grad.normal_(generator=self._generator)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()

    def mean_squares(self) -> Any:
        """Mean square of each tensor's elements, as numpy."""
        parts = self._flat.detach().split(self._sizes)
        return torch.stack([part.square().mean() for part in parts]).double().cpu().numpy()


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


ARMS: dict[str, Kind | None] = {"none": None, "scalar": "scalar", "row": "row", "both": "both"}
EVAL_WINDOWS = 2048


@dataclass(frozen=True, kw_only=True)
class CureRow:
    """One training."""

    arm: str
    lr: float
    decay: float
    seed: int
    loss: float
    """On text that was not learnt, in nats a byte."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def try_cure(
    arm: str,
    shape: Shape,
    schedule: Schedule,
    decays: Sequence[float],
    seeds: Sequence[int],
    texts: Texts,
    *,
    steps: int,
    batch: int,
    windows: int = EVAL_WINDOWS,
    graphs: bool = True,
) -> list[CureRow]:
    """Train one arm: all weight decays and seeds as one stack. Seeds are those of the weights; batches are the same.

    Args:
        arm: One of `ARMS`.
        shape: Of the model.
        schedule: Learning rate; its weight decay is not used.
        decays: Weight decays.
        seeds: Of the weights.
        texts: What it learns, and what it is judged by.
        steps: How long.
        batch: Windows of a step.
        windows: Windows of the text that it is judged by.
        graphs: On a GPU, replay the passes of a step as one CUDA graph.
    """
    cells = [(decay, seed) for decay in decays for seed in seeds]
    device = texts.train.bytes.device
    model = StackedLM(shape, [seed for _, seed in cells], kind=ARMS[arm]).to(device)
    train_stack(
        model,
        texts.train,
        schedule,
        steps=steps,
        batch=batch,
        seed=12345,
        decays=torch.tensor([decay for decay, _ in cells]),
        multiplier_decay=WEIGHT_DECAY,
        graphs=graphs,
    )
    losses = evaluate(model, texts.unseen, windows).tolist()
    return [
        CureRow(arm=arm, lr=schedule.lr, decay=decay, seed=seed, loss=loss)
        for (decay, seed), loss in zip(cells, losses, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What multipliers did, against the same seeds without."""

    arm: str
    lr: float
    decay: float
    loss: float
    gain: float
    """Mean fall of the loss; positive is better."""
    error: float
    """Standard error of it over seeds."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def gains(rows: Sequence[CureRow]) -> list[Gain]:
    """Each arm at each setting against ``none``, seed by seed."""
    plain = {(row.lr, row.decay, row.seed): row.loss for row in rows if row.arm == "none"}
    found = []
    for arm, lr, decay in dict.fromkeys((row.arm, row.lr, row.decay) for row in rows):
        mine = [row for row in rows if (row.arm, row.lr, row.decay) == (arm, lr, decay)]
        falls = [plain[key] - row.loss for row in mine if (key := (lr, decay, row.seed)) in plain]
        error = float(np.std(falls, ddof=1)) / math.sqrt(len(falls)) if len(falls) > 1 else math.nan
        found.append(
            Gain(
                arm=arm,
                lr=lr,
                decay=decay,
                loss=float(np.mean([row.loss for row in mine])),
                gain=float(np.mean(falls)) if falls else math.nan,
                error=error,
            )
        )
    return found
