"""How little it takes to change the model's answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradvitals.errors import expect
from gradvitals.probe.perturb import Opening, Outcome, Sample, Where, at_rest
from gradvitals.probe.saliency import IGNORED, predicts_own_tokens
from gradvitals.probe.verdict import item

if TYPE_CHECKING:
    from gradvitals.probe.data import Subject


def accuracy(output: Tensor | None, target: Tensor | None, tokens: Tensor | None = None) -> float:
    """Returns the fraction of correct answers; nan if answers cannot be correct or wrong.

    Classes are the highest score along the last axis (or the second, as torch's cross entropy has it); a target of
    -100 does not count. Where the targets are the model's own tokens, it predicts the next one, as language models
    do that shift their labels themselves. One output per example with targets 0 and 1 is a yes-or-no question: yes
    is above 0, or above one half if all outputs are probabilities.

    Args:
        output: of the model.
        target: what it should be.
        tokens: the tokens the model was called with.

    Returns:
        A number from 0 to 1, or nan.

    Example:
        >>> import torch
        >>> accuracy(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([1, 1]))
        0.5
    """
    found = answers(output, target, tokens)
    return math.nan if found is None else float((found[0] == found[1]).double().mean())


def by_chance(output: Tensor | None, target: Tensor | None, tokens: Tensor | None = None) -> tuple[float, float]:
    """Returns the accuracy of always giving the most common answer, and two standard errors of it.

    Returns:
        Both nan if answers cannot be correct or wrong.
    """
    found = answers(output, target, tokens)
    if found is None:
        return math.nan, math.nan
    counts = found[1].unique(return_counts=True)[1]
    share, total = float(counts.max()) / float(counts.sum()), float(counts.sum())
    return share, 2 * math.sqrt(share * (1 - share) / total)


def answers(output: Tensor | None, target: Tensor | None, tokens: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """Returns the answers that count and their targets; None if they cannot be correct or wrong."""
    if output is None or target is None:
        return None
    target = target.to(output.device)
    if target.shape == output.shape or target.numel() == output.numel():
        return _yes_or_no(output, target)
    if target.is_floating_point() or output.ndim < 2:
        return None
    if output.shape[:-1].numel() == target.numel():
        answer = output.argmax(-1).reshape(target.shape)
    elif output.shape[:1] + output.shape[2:] == target.shape:
        answer = output.argmax(1)
    else:
        return None
    if predicts_own_tokens(target, tokens):
        answer, target = answer[:, :-1], target[:, 1:]
    counted = target != IGNORED
    return (answer[counted], target[counted]) if bool(counted.any()) else None


def _yes_or_no(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    if not target.numel() or not bool(((target == 0) | (target == 1)).all()):
        return None
    one_hot = output.ndim == 2 and output.shape[1] > 1 and target.shape == output.shape
    if one_hot and bool((target.sum(1) == 1).all()):
        return output.argmax(1), target.argmax(1)
    middle = 0.5 if bool(((output >= 0) & (output <= 1)).all()) else 0.0
    return output.reshape(-1) > middle, target.reshape(-1) > 0.5


SIZES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Perturbation sizes to try, in standard deviations of the data."""
MOST_EXAMPLES = 128


@dataclass(frozen=True, kw_only=True)
class Robustness:
    """Loss and accuracy by the size of a perturbation."""

    where: str
    """`inputs`, or `embeddings` for data made of tokens."""
    place: str
    """Name of the argument or of the embedding."""
    examples: int
    scale: float
    """Standard deviation of the data over the batch, the unit of `relative`; of a table the median over its columns,
    each of which moves by its own."""
    relative: list[float]
    """Sizes in standard deviations of the data, from 0."""
    sizes: list[float]
    """The same in units of the data: no value changes by more than this (maximum norm)."""
    curves: dict[str, dict[str, list[float]]]
    """By kind (`noise`, `fgsm`, `pgd`): `loss` and `accuracy` at each size; accuracy is nan where there are no
    classes."""
    slope: float
    """Sum of the absolute gradient of the loss: how fast FGSM raises the loss with `sizes`, at first."""
    lipschitz: dict[str, float]
    """Local Lipschitz constant of the output, over examples: `median`, `largest`; and of the loss of one example,
    taken as its part of a mean over the batch: `loss`, the median norm of its gradient."""
    chance: float
    """Accuracy of always giving the most common answer; nan without classes."""
    half_at: dict[str, float]
    """By kind, the size in standard deviations at which accuracy has lost half of what it was above `chance`; nan where
    it did not, or was not above it."""
    verdict: list[dict[str, Any]] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Returns the record as nested dicts and lists."""
        return asdict(self)


def examine_robustness(
    subject: Subject, batch: Any, *, tick: Callable[[str], object] = lambda words: None
) -> dict[str, Any]:
    """Returns the robustness on a batch's first examples, as the plain record that `gv.probe` keeps.

    Args:
        subject: the model and how its batches are read.
        batch: one batch, on the model's device.
        tick: told what is being done.

    Returns:
        The fields of `Robustness`.
    """
    some = subject.take(batch, 0, MOST_EXAMPLES) if subject.size(batch) > MOST_EXAMPLES else batch
    target = subject.target(some)
    known = target if isinstance(target, Tensor) else None
    return robustness(subject.model, Sample(loss=lambda: subject.loss(some), target=known), tick=tick).record()


def robustness(
    model: nn.Module,
    sample: Sample,
    *,
    where: Where = "auto",
    relative: Sequence[float] = SIZES,
    steps: int = 7,
    draws: int = 3,
    iterations: int = 8,
    bounds: tuple[float, float] | None = None,
    seed: int = 0,
    tick: Callable[[str], object] = lambda words: None,
) -> Robustness:
    r"""Loss and accuracy under changes of the data of growing size, by chance and by intent.

    All three kinds move values by up to :math:`\epsilon`, so that they can be compared; they differ in the direction
    alone:

    - noise: :math:`x + \epsilon s`, s random signs; the mean over `draws`.
    - fgsm (Goodfellow et al. 2015): :math:`x + \epsilon \, \mathrm{sign} \nabla_x L`, the worst change of a loss
      that is linear.
    - pgd (Madry et al. 2018): `steps` such steps of :math:`2.5 \epsilon / \mathrm{steps}`, each brought back to
      within :math:`\epsilon` of x, from the FGSM point; the highest loss met, which is therefore never below FGSM's.

    For a loss that is linear in x, both attacks raise it by exactly :math:`\epsilon \|\nabla_x L\|_1`. The loss is
    the batch's own, with examples that do not depend on each other (the model is asked in eval mode, and left as it
    was).

    Args:
        model: any module.
        sample: a batch as its loss and its targets.
        where: which data to change; see `perturb.Opening`.
        relative: sizes to try, in standard deviations of the data.
        steps: of PGD.
        draws: of noise.
        iterations: of the power iteration behind the Lipschitz constant.
        bounds: lowest and highest value that data can have, where they have such; changed data are brought back within.
        seed: of the noise; the global random numbers are not touched.
        tick: told what is being done.

    Returns:
        The record.

    Raises:
        CannotPerturb: where the data have no gradient; the message says why.
    """
    expect(len(relative) > 0 and all(size > 0 for size in relative), "relative", relative, "sizes above 0")
    expect(steps >= 1, "steps", steps, "1 or more steps of PGD")
    expect(draws >= 1, "draws", draws, "1 or more draws of noise")
    expect(bounds is None or bounds[0] < bounds[1], "bounds", bounds, "the lowest and the highest value, in this order")
    with at_rest(model):
        opening = Opening(model, sample, where)
        x = opening.values
        units = _units(x, columns=opening.kind == "inputs" and x.ndim == 2)
        scale = float(units[units > 0].double().median())
        grad, clean = opening.gradient(x)
        ladder = [0.0, *sorted(relative)]
        generator = torch.Generator().manual_seed(seed)
        judge = _Judge(opening, sample.target)
        start = judge(clean)
        curves: dict[str, list[tuple[float, float]]] = {"noise": [start], "fgsm": [start], "pgd": [start]}
        for size in ladder[1:]:
            tick(f"robustness: size {size:g}")
            within = Ball(x, size * units, bounds)
            curves["noise"].append(
                _mean([judge.at(within(noise)) for noise in _signs(x, size * units, draws, generator)])
            )
            first = within(x + size * units * grad.sign())
            fgsm, worst = pgd(opening, first, within, steps)
            curves["fgsm"].append(judge(fgsm))
            curves["pgd"].append(judge(worst))
        tick("robustness: Lipschitz constant")
        constants = lipschitz(opening, iterations, generator)
    count = len(x)
    named = {
        kind: {"loss": [a for a, _ in points], "accuracy": [b for _, b in points]} for kind, points in curves.items()
    }
    # In units of `sizes`, so that a table's columns count by how far each moves.
    slope = float((grad.double().abs() * units.double()).sum()) / scale
    chance, doubt = by_chance(clean.output, sample.target, opening.ids)
    learnt = start[1] > chance + doubt
    half_at = {
        kind: _half_at(ladder, curve["accuracy"], chance) if learnt else math.nan for kind, curve in named.items()
    }
    of_loss = float((grad.double() * count).reshape(count, -1).norm(dim=1).median()) if count else math.nan
    return Robustness(
        where=opening.kind,
        place=opening.name,
        examples=count,
        scale=scale,
        relative=ladder,
        sizes=[size * scale for size in ladder],
        curves=named,
        slope=slope,
        lipschitz={"median": _median(constants), "largest": max(constants, default=math.nan), "loss": of_loss},
        chance=chance,
        half_at=half_at,
        verdict=_verdict(start[1], chance, half_at),
    )


def pgd(opening: Opening, first: Tensor, within: Ball, steps: int) -> tuple[Outcome, Outcome]:
    """Projected gradient ascent on the loss.

    Args:
        opening: where the data enter.
        first: where to start.
        within: the data that may be tried.
        steps: how many.

    Returns:
        The outcome at the start, and the one with the highest loss met.
    """
    radius = within.radius
    point, start, worst = first, None, None
    for _ in range(steps):
        grad, outcome = opening.gradient(point)
        start = start or outcome
        worst = outcome if worst is None or bool(outcome.loss > worst.loss) else worst
        point = within(point + 2.5 * radius / steps * grad.sign())
    with torch.no_grad():
        last = opening.run(point)
    assert start is not None
    assert worst is not None
    return start, last if bool(last.loss > worst.loss) else worst


def lipschitz(opening: Opening, iterations: int, generator: torch.Generator) -> list[float]:
    r"""Local Lipschitz constant of the output at each example: the largest singular value of its Jacobian J.

    .. math:: \sigma = \max_{\|v\|=1} \|J^\top v\|

    Power iteration: u = J'v by backward, then v = Ju by a difference of two forward passes. Only the direction v
    comes from the difference; the value is an exact norm of J'v, so it is never too large, whatever the rounding.

    Args:
        opening: where the data enter.
        iterations: how often.
        generator: for the direction to start with.

    Returns:
        One number an example; none where the model's output is not one row an example.
    """
    x = opening.values
    with torch.no_grad():
        base = opening.run(x).output
    if base is None or not len(x) or base.ndim == 0 or base.numel() % len(x) or len(base) % len(x):
        return []
    rows = len(x)
    v = _unit(torch.randn(rows, base.numel() // rows, generator=generator).to(base))
    best = torch.zeros(rows, dtype=torch.float64, device=x.device)
    reach = math.sqrt(torch.finfo(x.dtype).eps) * x.reshape(rows, -1).norm(dim=1, keepdim=True).clamp_min(1e-3)
    for _ in range(max(1, iterations)):
        u, outcome = opening.gradient(x, partial(_along, v))
        best = torch.maximum(best, u.reshape(rows, -1).double().norm(dim=1))
        with torch.no_grad():
            ahead = opening.run((x.reshape(rows, -1) + reach * _unit(u.reshape(rows, -1))).reshape(x.shape))
        v = _unit((_flat(ahead, rows) - _flat(outcome, rows)) / reach)
    return [float(value) for value in best]


class _Judge:
    """Returns loss and accuracy of an outcome."""

    def __init__(self, opening: Opening, target: Tensor | None) -> None:
        self._opening = opening
        self._target = target

    def __call__(self, outcome: Outcome) -> tuple[float, float]:
        return float(outcome.loss), accuracy(outcome.output, self._target, self._opening.ids)

    def at(self, values: Tensor) -> tuple[float, float]:
        with torch.no_grad():
            return self(self._opening.run(values))


class Ball:
    """Projects values to within a radius of the original, in the maximum norm, and within bounds."""

    def __init__(self, center: Tensor, radius: Tensor, bounds: tuple[float, float] | None) -> None:
        self.center = center
        self.radius = radius
        self.bounds = bounds

    def __call__(self, values: Tensor) -> Tensor:
        """Returns the nearest values that are allowed."""
        inside = torch.minimum(torch.maximum(values, self.center - self.radius), self.center + self.radius)
        return inside if self.bounds is None else inside.clamp(*self.bounds)


def _units(x: Tensor, *, columns: bool) -> Tensor:
    """Returns one standard deviation of all values, or of each column of a table; 0 for a constant column."""
    if columns and len(x) > 1 and bool((own := x.double().std(dim=0)).any()):
        return own.to(x)
    whole = float(x.double().std()) if x.numel() > 1 else 0.0
    return x.new_tensor(whole or float(x.double().abs().mean()) or 1.0)


def _signs(x: Tensor, size: Tensor, draws: int, generator: torch.Generator) -> Iterator[Tensor]:
    for _ in range(draws):
        signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
        yield x + size * signs.to(x)


def _along(direction: Tensor, outcome: Outcome) -> Tensor:
    return _flat(outcome, len(direction)) * direction


def _flat(outcome: Outcome, rows: int) -> Tensor:
    assert outcome.output is not None
    return outcome.output.reshape(rows, -1)


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1, eps=torch.finfo(rows.dtype).tiny)


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(a for a, _ in points) / len(points), sum(b for _, b in points) / len(points)


def _median(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).median()) if values else math.nan


def _half_at(sizes: list[float], accuracies: list[float], chance: float) -> float:
    """Returns where the curve first crosses halfway to chance, by linear interpolation; nan if never."""
    half = (accuracies[0] + chance) / 2
    for at in range(1, len(sizes)):
        before, after = accuracies[at - 1], accuracies[at]
        if after <= half < before:
            return sizes[at - 1] + (sizes[at] - sizes[at - 1]) * (before - half) / (before - after)
    return math.nan


def _verdict(clean: float, chance: float, half_at: dict[str, float]) -> list[dict[str, Any]]:
    """Returns the verdict if a barely visible perturbation, adversarial or random, halves the accuracy above chance."""
    for kind, severity, title, advice in (
        (
            "noise",
            "warning",
            "random noise breaks the model",
            "noise or augmentation in training",
        ),
        (
            "pgd",
            "info",
            "small directed changes break the model",
            "adversarial training where inputs can be hostile; without it this is usual",
        ),
    ):
        if half_at[kind] <= 0.1:
            size = f"{half_at[kind]:.2g} standard deviations of the data"
            detail = f"accuracy falls from {clean:.3g} halfway to that of the commonest answer, {chance:.3g}, at {size}"
            return [item(severity, "robustness", title, detail, (), advice)]
    return []
